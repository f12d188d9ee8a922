"""How many tokens of each draft are worth verifying in this step.

Two estimates, both learned while the engine runs (`estimates.py`), decide:

- `Survival`: how probable it is that a drafted token is reached and accepted, calibrated from outcomes.
- `StepCost`: what a step costs by the tokens in it, measured on the steps themselves.

`allocate` then takes the draft tokens whose expected gain exceeds their cost. The gain of one is its survival times
what a token less saves, a request's share of a step without drafts: that maximises tokens per second. The seconds that
prompts take in the step are not saved.

Budgets change which tokens are verified, never which are sampled.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget.estimates import (
    MIN_OBSERVATIONS,
    Floats,
    Ints,
    StepCost,
    Survival,
    line_nb,
    lower_decile,
    predict_survival,
)
from rollout_spec.jit.compiler import inlined, njit

NUM_BINS = 1024
"""Draft tokens whose survival differs by less than one part of so many are worth the same."""
REQUESTS_PER_TRIAL_TOKEN = 4
"""Where steps with drafts were found expensive, they are tried again with one token per so many requests."""
LEAST_COST = 0.005
"""Least cost of a draft token, as a share of a request's in a step without drafts, so that hopeless drafts stop."""
MAX_PROBES = 8
"""After so many steps in a row whose cost without drafts is not known, it is guessed from other sizes."""
LONGEST_SLEEP = 32
"""Most steps in a row in which a drafter whose drafts do not pay is not asked."""
RECENT_DRAFTS = 32
"""Drafting takes the lower decile of so many last calls."""
AVERAGE_WEIGHT = 1 / 32
"""Weight of the last step in averages."""


def allocate(survival: Floats, starts: Ints, value: float, cost: Floats) -> Ints:
    """How many tokens of each draft to verify, int64 [B]: those that lower the expected time most.

    Maximises the sum of survival times value over the tokens taken, less what their number costs. See `allocate_into`.

    Args:
        survival: float64 [D], from 0 to 1, never rising along a draft.
        starts: int64 [B + 1], each draft's first token, then D.
        value: Seconds that an accepted token saves.
        cost: float64 [>= 1], seconds that 0, 1, 2, ... draft tokens cost more than none, up to as many as are allowed.

    Raises:
        ValueError: shapes do not fit.
    """
    if starts[0] != 0 or starts[-1] != survival.size or not cost.size:
        raise ValueError(f"shapes do not fit: {survival.shape}, {starts}, {cost.shape}")
    taken = np.empty(starts.size - 1, np.int64)
    allocate_into(survival, starts, value, cost, new_bins(), taken)
    return taken


def new_bins() -> Floats:
    """What `allocate_into` needs for its own."""
    return np.empty((2, NUM_BINS))


@inlined(allocates=False)
def allocate_into(survival: Floats, starts: Ints, value: float, cost: Floats, bins: Floats, taken: Ints) -> float:
    """`allocate` for compiled callers; returns the seconds that are expected to be gained. O(D + NUM_BINS).

    Tokens are counted by survival instead of sorted. As survival never rises along a draft, taking the best tokens
    takes each draft's first ones; of those in the last bin the first requests' are taken.

    Args:
        bins: `new_bins`, filled with the number of tokens by survival, and their summed survival.
        taken: int64 [B], filled.
    """
    bins[:] = 0.0
    for j in range(survival.size):
        index = int(survival[j] * (NUM_BINS - 1))
        bins[0, index] += 1.0
        bins[1, index] += survival[j]
    best, last, left = -cost[0], NUM_BINS, 0  # tokens of better bins than `last` are taken, and so many of its own
    total, n, most = 0.0, 0, cost.size - 1
    for index in range(NUM_BINS - 1, -1, -1):
        if n >= most:
            break
        size = int(bins[0, index])
        for i in range(min(size, most - n)):
            total += value * bins[1, index] / size
            if total - cost[n + i + 1] > best:
                best, last, left = total - cost[n + i + 1], index, i + 1
        n += size
    for i in range(taken.size):
        taken[i] = 0
        for j in range(starts[i], starts[i + 1]):
            index = int(survival[j] * (NUM_BINS - 1))
            if index < last or (index == last and left == 0):
                break
            left -= index == last
            taken[i] += 1
    return best


@njit(allocates=False)
def _decide(
    confidence: Any,
    starts: Ints,
    counts: Floats,
    step: int,
    num_tokens: int,
    undrafted: float,
    tokens: Floats,
    seconds: Floats,
    slope: float,
    sizes: Ints,
    first_seconds: Floats,
    cold_seconds: float,
    untried: int,
    untried_cost: float,
    cost: Floats,
    survival: Floats,
    bins: Floats,
    taken: Ints,
) -> float:
    """`Budget.decide` once the curves are known: fills `taken`, returns the seconds that are expected to be gained.

    Args:
        first_seconds: See `StepCost`.
        cold_seconds: What a step of a size that was never run must gain more.
        untried, untried_cost: So many draft tokens cost so much, whatever the curve says: see `DraftCosts`.
        cost: float64, one longer than the most draft tokens that may be taken; filled with what they cost.
        survival: float64 [D]; filled.
    """
    least = LEAST_COST * undrafted / taken.size  # a lower bound, whatever was measured
    cost[0] = 0.0
    at = 0
    for n in range(1, cost.size):
        padded = num_tokens + n
        while at < sizes.size and sizes[at] < padded:
            at += 1
        if at < sizes.size:
            padded = sizes[at]
        cost[n] = n * least
        if tokens.size:
            cost[n] = max(cost[n], line_nb(float(padded), tokens, seconds, slope) - undrafted)
            if padded < tokens[0]:  # never below the line from the step without drafts to the first known size
                cost[n] = max(cost[n], (seconds[0] - undrafted) * n / (tokens[0] - num_tokens))
        if first_seconds[min(padded, first_seconds.size - 1)] == 0.0:
            cost[n] += cold_seconds
    if 0 < untried < cost.size:
        cost[untried] = untried_cost
    predict_survival(confidence, starts, counts, step, survival)
    per_token = 0.0  # what a token more costs, as far as is known
    if tokens.size:
        per_token = min((seconds[-1] - undrafted) / (tokens[-1] - num_tokens), undrafted / num_tokens)
    value = (undrafted - max(per_token, 0.0) * (num_tokens - taken.size)) / taken.size
    return allocate_into(survival, starts, value, cost, bins, taken)


class Budget:
    """Decides, step by step, how many tokens of each draft an engine verifies, and whether to draft at all.

    For each step ask `wants_drafts`. If it does, draft and let `decide` cut the drafts. Tell `survival` what became of
    them, and `observe_step` what the step took.

    Attributes:
        survival, cost: The two estimates.
    """

    def __init__(self) -> None:
        self.survival = Survival()
        self.cost = StepCost()
        self._bins = new_bins()
        self._drafting: deque[float] = deque(maxlen=RECENT_DRAFTS)  # seconds per request
        self._draft_seconds = 0.0  # their lower decile
        self._balance = 0.0  # what drafts gain in a step less what drafting takes, on average
        self._undrafted = 0.0  # what the present step costs without drafts
        self._num_probes = 0  # in a row
        self._steps_to_skip = 0
        self._last_pause = 0

    def observe_step(
        self, num_tokens: int, seconds: float, *, drafted: bool, num_asked: int = 0, draft_seconds: float = 0.0
    ) -> None:
        """Learn what a step took. O(1).

        Args:
            num_tokens: All tokens that it computed.
            seconds: From its beginning to that of the next one, the drafter's work in between included.
            drafted: Whether any request had a draft token.
            num_asked: For how many requests the drafter was asked.
            draft_seconds: What that took.
        """
        self.survival.step += 1
        self.cost.observe(num_tokens, max(seconds - draft_seconds, 0.0), drafted=drafted)
        if num_asked:
            self._drafting.append(draft_seconds / num_asked)
            if len(self._drafting) >= MIN_OBSERVATIONS:  # the first ones may compile something
                self._draft_seconds = lower_decile(self._drafting)

    def wants_drafts(self, num_tokens: int) -> bool:
        """Whether to ask the drafter in this step. Where drafts do not pay for it, it is asked ever less often. O(1).

        Nor is it asked where the cost of such a step without drafts is not known, or was last seen long ago.

        Args:
            num_tokens: Tokens that the step computes without drafts: one per request, and those of prompts.
        """
        if self._steps_to_skip > 0:
            self._steps_to_skip -= 1
            return False
        undrafted = self.cost.undrafted(num_tokens)
        if undrafted is not None and self.cost.undrafted_is_due(num_tokens):
            return False
        if undrafted is None:
            self._num_probes += 1
            undrafted = self.cost.guess_undrafted(num_tokens) if self._num_probes > MAX_PROBES else None
        else:
            self._num_probes = 0
        if undrafted is not None:
            self._undrafted = undrafted
        return undrafted is not None

    def decide(
        self,
        confidence: NDArray[np.float32],
        starts: Ints,
        *,
        num_tokens: int,
        max_draft_tokens: int | None = None,
    ) -> Ints:
        """Tokens to verify of each draft, int64 [B], in a step for which `wants_drafts` said True. O(D).

        Args:
            confidence: float32 [D], the drafter's, of all drafted tokens.
            starts: int64 [B + 1], each draft's first token in it, then D.
            num_tokens: As `wants_drafts` was told.
            max_draft_tokens: Most tokens of all drafts together. None: no bound.
        """
        size = starts.size - 1
        allowed = confidence.size if max_draft_tokens is None else max(min(confidence.size, max_draft_tokens), 0)
        if allowed == 0:
            return self._note(np.zeros(size, np.int64), -self._draft_seconds * size)
        costs = self.cost.drafted(num_tokens, self._undrafted)
        if costs.most >= 0:
            allowed = min(allowed, max(costs.most, size // REQUESTS_PER_TRIAL_TOKEN, 1))
        # A trial of few tokens would never gain what a new size costs.
        cold = self.cost.cold_seconds(self._undrafted) if costs.most else 0.0
        taken = np.empty(size, np.int64)
        gain = _decide(
            confidence, starts, self.survival.counts, self.survival.step, num_tokens, self._undrafted,
            costs.tokens, costs.seconds, costs.slope, self.cost.sizes, self.cost.first_seconds, cold,
            costs.untried, costs.untried_seconds - self._undrafted, np.empty(allowed + 1),
            np.empty(confidence.size), self._bins, taken,
        )  # fmt: skip
        return self._note(taken, gain - self._draft_seconds * size, learning=not costs.tokens.size)

    def to_dict(self, sizes: Sequence[int] = ()) -> dict[str, Any]:
        """What was learned, as plain data, without a change to it.

        Args:
            sizes: Tokens of steps whose cost without drafts is wanted.

        Returns:
            `undrafted`, `drafted`: the two cost curves as (tokens, seconds). `undrafted_of_sizes`: seconds, None where
            they are not known. `reliability`: `Survival.reliability`.
        """
        cost = copy.deepcopy(self.cost)  # reading redraws curves, and other ranks may not be asked
        return {
            "undrafted": [values.tolist() for values in cost.curve(drafted=False)],
            "drafted": [values.tolist() for values in cost.curve(drafted=True)],
            "undrafted_of_sizes": [cost.undrafted(size) for size in sizes],
            "reliability": self.survival.reliability().tolist(),
        }

    def _note(self, taken: Ints, balance: float, *, learning: bool = False) -> Ints:
        """Remember whether drafts paid, other than to learn what they cost."""
        self._balance += AVERAGE_WEIGHT * (balance - self._balance)
        if balance > 0:  # after a pause drafts pay again
            self._balance = max(self._balance, 0.0)
        if self._balance >= 0:
            self._last_pause //= 2
        elif not (learning and taken.any()):
            self._steps_to_skip, self._last_pause = self._last_pause, min(2 * self._last_pause + 1, LONGEST_SLEEP)
        return taken
