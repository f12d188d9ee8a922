"""The CPU verifier where its blocks, its bounds and its own exponential matter."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.noise import host as noise
from rollout_spec.types import SamplingBatch
from rollout_spec.verify import cpu
from rollout_spec.verify.cpu import BLOCK
from tests.verify.batches import LOGPROBS_MODES, assert_agrees, verify_on_host

HASHES = np.unique(
    np.concatenate(
        [
            np.arange(1000),
            2**32 - 1 - np.arange(1000),
            *(2**n + np.arange(-3, 4) for n in range(3, 32)),
            np.random.default_rng(0).integers(0, 2**32, 20_000),
        ]
    )
).astype(np.uint32)


def test_the_bound_is_above_the_noise_and_near_it_where_it_is_large():
    exact = noise.gumbel_from_hash(HASHES)
    bounds = np.array([cpu._noise_bound(h) for h in HASHES])
    assert (bounds >= exact).all()
    usual = (exact > 3) & (exact < 15)  # where tokens are told apart
    assert (bounds - exact)[usual].max() < 0.1


def test_the_exponential():
    x = -np.concatenate([np.linspace(0, 87, 20_001), np.logspace(-8, 1, 1000)]).astype(np.float32)
    values = np.array([cpu._exp(value) for value in x])
    np.testing.assert_allclose(values, np.exp(x.astype(np.float64)), rtol=2.5e-7)
    assert 0 <= cpu._exp(np.float32(-np.inf)) < 1e-37


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]),
    st.sampled_from(["flat", "peaked", "rising", "masked", "zeros", "broken"]),
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.sampled_from(LOGPROBS_MODES),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**32),
)
def test_rows_of_several_blocks(size, kind, temperature, mode, dtype, seed):
    """The same tokens bit for bit, log-probabilities and ranks, wherever in a row the winner lies."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((6, size)).astype(np.float32)
    if kind == "peaked":
        logits[:, rng.integers(0, size, 5)] += 12
    elif kind == "rising":  # every block has new candidates
        logits = np.sort(logits * 4, axis=1)
    elif kind == "masked":
        logits[rng.random(logits.shape) < 0.999] = -np.inf
        logits[:, -1] = 0.0
    elif kind == "zeros":
        logits = np.where(rng.random(logits.shape) < 0.5, np.float32(0.0), np.float32(-0.0))
    elif kind == "broken":
        logits[rng.integers(6), rng.integers(size)] = rng.choice([np.nan, -np.nan, np.inf])
    rows = SamplingBatch(
        np.full(2, temperature, np.float32), rng.integers(-(2**63), 2**63 - 1, 2), rng.integers(0, 10_000, 2)
    )
    drafts = rng.integers(0, size, 4).astype(np.int32)
    assert_agrees(verify_on_host, (logits, drafts, np.array([3, 4], np.int32), rows), "sample", mode, dtype)
