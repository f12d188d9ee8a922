"""The constants of the vote: candidates' weights, and the bins in which outcomes are counted for the confidence.

Three implementations read them: numba (`voting.py`), Triton (`drafters/device/kernels.py`) and NumPy
(`tests/drafters/device/reference.py`). `drafter.py` says how the vote works.
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

OWN_WEIGHT, SIBLING_WEIGHT, PROMPT_WEIGHT, SHARED_WEIGHT = 2.0, 2.0, 0.5, 0.1
"""Weight of a candidate by where it comes from: the request's own output, the problem's other rollouts, its prompt,
other problems. The lookahead pool's token has LOOKAHEAD_WEIGHT."""
SIMILARITY = 0.4
"""A candidate's weight is divided by e^(SIMILARITY n) where its signature is n bits further from the request's
than the most similar candidate's."""
MAX_DISAGREEMENT = 12
"""Candidates whose signature is more bits further than the most similar one's are dropped, which saves their time."""
UNKNOWN_DISAGREEMENT = 6
"""A candidate whose state is not known, as in prompts, counts as this many bits further than the most similar one."""
MIN_REMEMBERED = 0.02
"""Smaller probabilities of remembered distributions are left out."""
BLEND = 0.3
"""Weight of the shorter contexts' distribution when match lengths are blended; a candidate of weight 1 counts 1."""
LOOKAHEAD_WEIGHT = 0.4
"""Probability that the lookahead pool's token is given; the candidates share the rest."""

# -- confidence, from counted outcomes -----------------------------------------------------------------------------

LENGTH_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Bin b of the match length holds the lengths that exceed b of these edges."""
NUM_LENGTH_BINS = len(LENGTH_EDGES) + 1
NUM_PROBABILITY_BINS = 12
BINS_PER_HALVING = 2.0
"""Bins of the expected probability get finer towards 1: this many per halving of the distance from 1."""
MIN_DISTANCE_FROM_ONE = 1e-9
CELLS = 2 * NUM_PROBABILITY_BINS * NUM_LENGTH_BINS
"""Outcomes are counted by whether noise chose, expected probability and match length."""
PRIOR = 2.0
"""Prior trials of a cell, at the expected probability."""
MAX_TRIALS = 4096
"""A cell with this many trials is halved, so that confidence follows the policy."""
