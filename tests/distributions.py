"""Statistical checks with stated power."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import chisquare

ALPHA = 1e-6
"""Chance that a correct sampler fails one check. Seeds are fixed, so a pass stays a pass."""


def matches_distribution(samples: ArrayLike, probabilities: NDArray[np.floating]) -> bool:
    """Chi-square test of int samples in [0, V) against float probabilities [V], cells below 5 expected pooled.

    Power: with n samples and V <= 16 cells, a total variation distance d gives a noncentrality of at least 4 n d**2.
    For n = 30,000 and d = 0.03 that is 108, which this test (alpha 1e-6) misses with a probability of 6e-6 for 8 cells
    (critical value 40.5) and 1.3e-4 for 16 (56.5).
    """
    samples = np.asarray(samples)
    counts = np.bincount(samples, minlength=len(probabilities)).astype(float)
    expected = probabilities / probabilities.sum() * len(samples)
    if counts[expected == 0].any():
        return False
    rare = (expected < 5) & (expected > 0)
    keep = expected >= 5
    observed, wanted = counts[keep], expected[keep]
    if rare.any():
        observed, wanted = np.append(observed, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    if len(wanted) == 1:
        return True
    return bool(chisquare(observed, wanted).pvalue > ALPHA)
