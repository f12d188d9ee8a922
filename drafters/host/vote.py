"""The constants of the vote: candidates' weights, and the bins in which outcomes are counted for the confidence.

Three implementations read them: numba (`voting.py`), Triton (`drafters/device/kernels.py`) and NumPy
(`tests/drafters/device/reference.py`). `history.py` says how the vote works.
"""

from __future__ import annotations

# -- who votes -----------------------------------------------------------------------------------------------------

MAX_DEPTH = 32
"""Longest context that is compared, in tokens. Longer ones gained nothing on recorded rollouts."""
MAX_CANDIDATES = 32
"""Earlier continuations that one lookup gathers; the longest match comes first."""
ENOUGH_CANDIDATES = 8
"""Once there are this many candidates, only matches as long as the last of these are added."""

# -- the weight of a vote ------------------------------------------------------------------------------------------

OWN, SIBLING, PROMPT_TEXT, SHARED, LOOKAHEAD = range(5)
SOURCES = ("own", "problem", "prompt", "shared", "lookahead")
"""Where a drafted token comes from: the request's own output, the problem's other rollouts, its prompt, other problems,
the lookahead pool."""
DISTANCE_EDGES = (4, 32, 256)
"""A candidate's distance is the difference, in tokens, between its place in its rollout and the draft's place in the
request's output. Bin b holds the distances that exceed b of these edges."""
NUM_DISTANCE_BINS = len(DISTANCE_EDGES) + 1
PREFERENCE = (
    (2.0, 2.0, 1.5, 1.0),
    (3.0, 1.7, 1.0, 0.6),
    (0.5, 0.5, 0.5, 0.5),
    (0.15, 0.12, 0.07, 0.05),
    (1.0, 1.0, 1.0, 1.0),
)
"""Weight of a candidate by source and distance bin. Tuned on recorded rollouts, where it gains about 1 %."""
RECENCY = 0.998
"""Default of the drafters' option: factor on a rollout's weight for each policy version of its age. Smaller ones gain
next to nothing where an epoch has few versions, and lose some percent where it has hundreds."""
MIN_AGE_WEIGHT = 1e-6
"""Lower bound on the weight by age."""
SIMILARITY = 0.4
"""A candidate's weight is divided by e^(SIMILARITY n) where its signature is n bits further from the request's
than the most similar candidate's."""
MAX_DISAGREEMENT = 12
"""Candidates whose signature is more bits further than the most similar one's are dropped, which saves their time."""
UNKNOWN_DISAGREEMENT = 6
"""A candidate whose state is not known, as in prompts, counts as so many bits further than the most similar one."""
MIN_REMEMBERED = 0.02
"""Smaller probabilities of remembered distributions are left out."""
BLEND = 0.3
"""Weight of the shorter contexts' distribution when match lengths are blended; a candidate of weight 1 counts 1."""
LOOKAHEAD_WEIGHT = 0.4
"""Probability that the lookahead pool's token is given; the candidates share the rest."""

# -- the choice under the request's noise --------------------------------------------------------------------------

INVERSE_TEMPERATURES = (0.7, 1.0, 1.4, 2.0, 4.0, 1e4)
"""Exponents on the candidates' probabilities that coupled choice selects from; with the last, noise decides nothing."""
HEAD_START = 2.0
"""Extra hits credited to exponent 1."""

# -- confidence, from counted outcomes -----------------------------------------------------------------------------

LENGTH_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Bin b of the match length holds the lengths that exceed b of these edges."""
NUM_LENGTH_BINS = len(LENGTH_EDGES) + 1
NUM_PROBABILITY_BINS = 12
BINS_PER_HALVING = 2.0
"""Bins of the expected probability get finer towards 1: this many per halving of the distance from 1."""
MIN_DISTANCE_FROM_ONE = 1e-9
CELLS = 2 * NUM_PROBABILITY_BINS * NUM_LENGTH_BINS
"""Coarse cells, without noise and with it; each has NUM_ORIGIN_BINS fine ones."""
NUM_ORIGIN_BINS = len(SOURCES) * NUM_DISTANCE_BINS
"""A drafted token's source and distance bin in one number. Where it was chosen with noise, its probability without
noise, in as many equal bins, takes the place of the distance: it predicts acceptance better there."""
COARSE_PRIOR, FINE_PRIOR = 2.0, 16.0
"""Prior trials: of the expected probability in a coarse cell, and of the coarse cell's rate in its fine cells."""
OUTCOME_DECAY = 255 / 256
"""Decay for the cell whose low rate ended a draft, so that it is tried again."""
VERSION_DECAY = 0.9
"""Decay of all outcomes when a new policy version begins."""
MAX_TRIALS = 4096
"""A cell with this many trials is halved, so that confidence follows the policy."""
