"""The numbers of the vote: who counts how much, how confident a draft is, and the bins that outcomes are counted in.

Three implementations read them: numba (`propose.py`), Triton (`device_kernels.py`) and NumPy (`device_reference.py`).
`mixture.py` says how the vote works.
"""

from __future__ import annotations

# -- who votes -----------------------------------------------------------------------------------------------------

MAX_DEPTH = 32
"""Longest context that is compared, in tokens. Longer matches were worth nothing on recorded rollouts."""
MAX_CANDIDATES = 32
"""Earlier continuations that one lookup gathers; the longest match comes first."""
ENOUGH_CANDIDATES = 8
"""Once there are so many, only matches as long as the last of them are still added."""

# -- the weight of a vote ------------------------------------------------------------------------------------------

OWN, SIBLING, PROMPT_TEXT, SHARED, LOOKAHEAD = range(5)
SOURCES = ("own", "problem", "prompt", "shared", "lookahead")
"""Where a drafted token comes from: the request, the problem's other rollouts, its prompt, other problems, the pool."""
DISTANCE_EDGES = (4, 32, 256)
"""A candidate's distance is how many tokens earlier or later in its rollout it lies than the draft does in the
request's. Bin b holds the distances above b of these edges."""
NUM_DISTANCE_BINS = len(DISTANCE_EDGES) + 1
PREFERENCE = (
    (2.0, 2.0, 1.5, 1.0),
    (3.0, 1.7, 1.0, 0.6),
    (0.5, 0.5, 0.5, 0.5),
    (0.15, 0.12, 0.07, 0.05),
    (1.0, 1.0, 1.0, 1.0),
)
"""Weight of a candidate by `SOURCES` and by distance bin. Chosen on recorded rollouts, where it gains about 1 %."""
RECENCY = 0.98
"""Weight of a rollout relative to one of the next policy version, unless the drafter's option says otherwise."""
MIN_AGE_WEIGHT = 1e-6
"""Lower bound on the weight by age."""
BLEND = 0.3
"""Weight of the shorter contexts' distribution, in rollouts of the present policy."""
LOOKAHEAD_WEIGHT = 0.4
"""Probability that the lookahead pool's token gets; the candidates share the rest."""

# -- the choice under the request's noise --------------------------------------------------------------------------

INVERSE_TEMPERATURES = (0.7, 1.0, 1.4, 2.0, 4.0, 1e4)
"""Exponents on the candidates' probabilities that coupled choice selects from; under the last, noise has no say."""
HEAD_START = 2.0
"""Extra hits credited to exponent 1."""

# -- confidence, from counted outcomes -----------------------------------------------------------------------------

LENGTH_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Bin b of the match length holds the lengths above b of these edges."""
NUM_LENGTH_BINS = len(LENGTH_EDGES) + 1
NUM_PROBABILITY_BINS = 12
BINS_PER_HALVING = 2.0
"""Bins of the expected probability get finer towards 1: so many per halving of the distance from 1."""
MIN_DISTANCE_FROM_ONE = 1e-9
NUM_ORIGIN_BINS = len(SOURCES) * NUM_DISTANCE_BINS
"""Combinations of a drafted token's source with its distance bin or, under noise, with its probability in as many
equal bins: how likely the token was without noise says more there than how near it lies."""
COARSE_PRIOR, FINE_PRIOR = 2.0, 16.0
"""Trials that the expected probability counts as in a coarse cell, and that a coarse cell's rate counts as in its fine
ones."""
OUTCOME_DECAY = 255 / 256
"""Decay for the cell whose low rate ended a draft, so that it is tried again."""
VERSION_DECAY = 0.9
"""Decay of all outcomes when a new policy version begins."""
MAX_TRIALS = 4096
"""Outcomes are halved here, so that confidence follows the policy."""
