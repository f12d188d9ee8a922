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
    predict_survival,
)
from rollout_spec.jit.compiler import njit

NUM_BINS = 1024
"""Draft tokens whose survival differs by less than one part of so many are worth the same."""
MAX_PROBES = 8
"""After so many steps in a row whose cost without drafts is not known, it is guessed from other sizes."""
LONGEST_SLEEP = 32
"""Most steps in a row in which a drafter whose drafts do not pay is not asked."""
RECENT_DRAFTS = 32
"""Drafting takes the lower decile of so many last calls."""
AVERAGE_WEIGHT = 1 / 32
"""Weight of the last step in averages."""


def new_bins() -> Floats:
    """What `allocate` needs for its own."""
    return np.empty((2, NUM_BINS))


@njit(allocates=False)
def allocate(survival: Floats, starts: Ints, value: float, cost: Floats, bins: Floats, taken: Ints) -> float:
    """How many tokens of each draft to verify: those that lower the expected time most. O(D + NUM_BINS).

    Maximises the sum of survival times value over the tokens taken, less what their number costs. Tokens are counted by
    survival instead of sorted. As survival never rises along a draft, taking the best tokens takes each draft's first
    ones; of those in the last bin the first requests' are taken.

    Args:
        survival: float64 [D], from 0 to 1, never rising along a draft.
        starts: int64 [B + 1], each draft's first token, then D.
        value: Seconds that an accepted token saves.
        cost: float64 [>= 1], seconds that 0, 1, 2, ... draft tokens cost more than none, up to as many as are allowed.
        bins: `new_bins`, filled with the number of tokens by survival, and their summed survival.
        taken: int64 [B], filled.

    Returns:
        The seconds that are expected to be gained.
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
    confidence: Any, starts: Ints, counts: Floats, step: int, value: float, cost: Floats, survival: Floats,
    bins: Floats, taken: Ints,
) -> float:  # fmt: skip
    predict_survival(confidence, starts, counts, step, survival)
    return allocate(survival, starts, value, cost, bins, taken)


class Budget:
    """Decides, step by step, how many tokens of each draft an engine verifies, and whether to draft at all.

    For each step ask `wants_drafts`. If it does, draft, and cut the drafts by `costs` and `allocate`; then `note` what
    that gains. `decide` does so for simulations. Tell `survival` what became of them, and `observe_step` what the step
    took.

    Attributes:
        survival, cost: The two estimates.
        bins: For `allocate`.
    """

    def __init__(self) -> None:
        self.survival = Survival()
        self.cost = StepCost()
        self.bins = new_bins()
        self._is_known = False  # whether any cost of drafts is
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
                self._draft_seconds = sorted(self._drafting)[len(self._drafting) // 10]

    def wants_drafts(self, num_tokens: int) -> bool:
        """Whether to ask the drafter in this step. Where drafts do not pay for it, it is asked ever less often. O(1).

        Nor is it asked where the cost of such a step without drafts is not known, or was last seen long ago.

        Args:
            num_tokens: Tokens that the step computes without drafts: one per request, and those of prompts.
        """
        if self._steps_to_skip > 0:
            self._steps_to_skip -= 1
            return False
        self._undrafted, is_known, is_due = self.cost.undrafted(num_tokens)
        self._num_probes = 0 if is_known else self._num_probes + 1
        return not is_due if is_known else self._undrafted > 0.0 and self._num_probes > MAX_PROBES

    def costs(self, num_requests: int, num_tokens: int, max_draft_tokens: int) -> tuple[float, Floats]:
        """What draft tokens gain and cost in a step for which `wants_drafts` said True. O(max_draft_tokens).

        Args:
            num_requests: Those that are drafted for.
            num_tokens: As `wants_drafts` was told.
            max_draft_tokens: Most tokens of all drafts together.

        Returns:
            `value` and `cost` of `allocate`.
        """
        cost = np.empty(max_draft_tokens + 1)
        most, value, self._is_known = self.cost.drafted(num_requests, num_tokens, self._undrafted, cost)
        return value, cost[: most + 1]

    def decide(
        self, confidence: NDArray[np.float32], starts: Ints, *, num_tokens: int, max_draft_tokens: int | None = None
    ) -> Ints:
        """Tokens to verify of each draft, int64 [B], in a step for which `wants_drafts` said True. O(D).

        Args:
            confidence: float32 [D], the drafter's, of all drafted tokens.
            starts: int64 [B + 1], each draft's first token in it, then D.
            num_tokens: As `wants_drafts` was told.
            max_draft_tokens: Most tokens of all drafts together. None: no bound.
        """
        size = starts.size - 1
        allowed = confidence.size if max_draft_tokens is None else min(confidence.size, max_draft_tokens)
        taken, gain = np.zeros(size, np.int64), 0.0
        if allowed > 0:
            value, cost = self.costs(size, num_tokens, allowed)
            counts, step, survival = self.survival.counts, self.survival.step, np.empty(confidence.size)
            gain = _decide(confidence, starts, counts, step, value, cost, survival, self.bins, taken)
        self.note(size, gain)
        return taken

    def note(self, num_requests: int, gain: float) -> None:
        """Remember whether drafts paid, other than to learn what they cost.

        Args:
            num_requests: For how many the drafter was asked.
            gain: What `allocate` returned.
        """
        balance = gain - self._draft_seconds * num_requests
        self._balance += AVERAGE_WEIGHT * (balance - self._balance)
        if balance > 0:  # after a pause drafts pay again
            self._balance = max(self._balance, 0.0)
        if self._balance >= 0:
            self._last_pause //= 2
        elif self._is_known or gain <= 0:
            self._steps_to_skip, self._last_pause = self._last_pause, min(2 * self._last_pause + 1, LONGEST_SLEEP)

    def to_dict(self, sizes: Sequence[int] = ()) -> dict[str, Any]:
        """What was learned, as plain data, without a change to it.

        Args:
            sizes: Tokens of steps whose cost without drafts is wanted.

        Returns:
            `undrafted`, `drafted`: the two cost curves as (tokens, seconds). `undrafted_of_sizes`: seconds, None where
            they are not known. `reliability`: `Survival.reliability`.
        """
        costs = [self.cost.undrafted(size) for size in sizes]
        return {
            "undrafted": [values.tolist() for values in self.cost.curve(drafted=False)],
            "drafted": [values.tolist() for values in self.cost.curve(drafted=True)],
            "undrafted_of_sizes": [seconds if is_known else None for seconds, is_known, _ in costs],
            "reliability": self.survival.reliability().tolist(),
        }
