"""How many tokens of each draft are worth verifying in this step.

Three estimates, all learned while the engine runs (`estimates.py`), decide:

- `Survival`: how probable it is that a drafted token is reached and accepted, calibrated from outcomes.
- `StepCost`: what a step costs by the tokens in it, measured on the steps themselves.
- `RemainingLength`: how many tokens a request still has to say, from earlier rollouts of its problem.

`allocate` then takes the draft tokens whose expected gain exceeds their cost. The gain of one is its survival times
what a token of that request is worth. A rollout phase ends when its longest rollout ends: while b requests are live a
step costs c(b), so one token less for a request saves its part of its last step, c(b) - c(b - 1) where b is the number
of requests that live as long. With c(b) = F + m b that is m for every request, and F more for the longest. Any of
several requests may finish last, so they share F by probability (`token_value`). While requests wait for a place no
single one decides: then it is F / B each, and the rule is the one that maximises tokens per second.

Budgets change which tokens are verified, never which are sampled.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget.estimates import (
    MIN_OBSERVATIONS,
    Floats,
    Ints,
    RemainingLength,
    StepCost,
    Survival,
    line_nb,
    lower_decile,
    predict_survival,
)
from rollout_spec.jit.compiler import inlined, njit

LEAST_LENGTH_SPREAD = 0.25
"""Least uncertainty about which request finishes last, as a part of the longest one's tokens to come."""
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


@inlined(allocates=False)
def token_value(
    mean: Floats, deviation: Floats, num_tokens: int, step_seconds: float, token_seconds: float, value: Floats
) -> None:
    """Seconds that one token less saves, by request. See the module's docstring. O(B).

    Args:
        mean, deviation: float64 [B], tokens to come.
        num_tokens: Tokens of a step without drafts. Those of prompts are not saved.
        step_seconds: What such a step costs.
        token_seconds: What one token more costs.
        value: float64 [B], to be filled.
    """
    per_token = min(max(token_seconds, 0.0), step_seconds / num_tokens)
    fixed = step_seconds - per_token * num_tokens
    longest, squares = mean[0], 0.0
    for i in range(mean.size):
        longest = max(longest, mean[i])
        squares += deviation[i] * deviation[i]
    # The probability of being the longest, if lengths had Gumbel noise of this spread.
    spread = max(math.sqrt(squares / mean.size * 6.0) / math.pi, LEAST_LENGTH_SPREAD * longest, 1e-9)
    total = 0.0
    for i in range(mean.size):
        value[i] = math.exp((mean[i] - longest) / spread)
        total += value[i]
    for i in range(mean.size):
        value[i] = per_token + fixed * value[i] / total


def allocate(survival: Floats, starts: Ints, value: Floats, cost: Floats) -> Ints:
    """How many tokens of each draft to verify, int64 [B]: those that lower the expected time most. O(D log D).

    Maximises the sum of survival times value over the tokens taken, less what their number costs. As survival never
    rises along a draft, taking the best tokens takes each draft's first ones.

    Args:
        survival: float64 [D], never rising along a draft.
        starts: int64 [B + 1], each draft's first token, then D.
        value: float64 [B], seconds that an accepted token saves.
        cost: float64 [>= 1], seconds that 0, 1, 2, ... draft tokens cost more than none, up to
            as many as are allowed.

    Raises:
        ValueError: shapes do not fit.
    """
    if starts.size != value.size + 1 or starts[0] != 0 or starts[-1] != survival.size or not cost.size:
        raise ValueError(f"shapes do not fit: {survival.shape}, {starts}, {value.shape}, {cost.shape}")
    taken = np.zeros(value.size, np.int64)
    _allocate(survival, starts, value, cost, np.empty((2, survival.size)), taken)
    return taken


@njit(allocates=False)
def _allocate(survival: Floats, starts: Ints, value: Floats, cost: Floats, gains: Floats, taken: Ints) -> None:
    row, count = _sort_gains(survival, starts, value, gains)
    _take(survival, starts, value, cost, gains[row, :count], taken)


@inlined(allocates=False)
def _sort_gains(survival: Floats, starts: Ints, value: Floats, gains: Floats) -> tuple[int, int]:
    """Fill one row of `gains`, float64 [2, D], with those above 0, falling. Returns the row and their number.

    A merge sort: numba takes seconds to compile NumPy's.
    """
    row, count = 0, 0
    for i in range(value.size):
        for j in range(starts[i], starts[i + 1]):
            gain = survival[j] * value[i]
            if gain <= 0.0:
                break
            gains[0, count] = gain
            count += 1
    width = 1
    while width < count:
        ordered, merged = gains[row], gains[1 - row]
        for start in range(0, count, 2 * width):
            left, right = start, min(start + width, count)
            left_end, right_end = right, min(right + width, count)
            for at in range(start, right_end):
                if right == right_end or (left < left_end and ordered[left] >= ordered[right]):
                    merged[at] = ordered[left]
                    left += 1
                else:
                    merged[at] = ordered[right]
                    right += 1
        row = 1 - row
        width *= 2
    return row, count


@inlined(allocates=False)
def _take(survival: Floats, starts: Ints, value: Floats, cost: Floats, ordered: Floats, taken: Ints) -> int:
    """`allocate` for gains that are sorted. Returns the number of tokens taken."""
    best, best_count, total = -cost[0], 0, 0.0
    for n in range(1, min(ordered.size, cost.size - 1) + 1):
        total += ordered[n - 1]
        if total - cost[n] > best:
            best, best_count = total - cost[n], n
    for i in range(value.size):
        taken[i] = 0
    if best_count == 0:
        return 0
    # All tokens above the last gain taken, and of those that equal it the first requests'.
    last = ordered[best_count - 1]
    left = best_count
    for i in range(value.size):
        for j in range(starts[i], starts[i + 1]):
            if survival[j] * value[i] <= last:
                break
            taken[i] += 1
            left -= 1
    for i in range(value.size):
        while left > 0 and starts[i] + taken[i] < starts[i + 1] and survival[starts[i] + taken[i]] * value[i] == last:
            taken[i] += 1
            left -= 1
    return best_count


@njit(allocates=False)
def _decide(
    confidence: Any,
    starts: Ints,
    counts: Floats,
    step: int,
    mean: Floats,
    deviation: Floats,
    num_tokens: int,
    undrafted: float,
    tokens: Floats,
    seconds: Floats,
    slope: float,
    token_seconds: float,
    sizes: Ints,
    first_seconds: Floats,
    cold_seconds: float,
    untried_cost: float,
    free: Floats,
    cost: Floats,
    value: Floats,
    scratch: Floats,
    taken: Ints,
) -> float:
    """`Budget.decide` once the curves are known: fills `taken`, returns the seconds that are expected to be gained.

    Args:
        first_seconds: See `StepCost`.
        cold_seconds: What a step of a size that was never run must gain more.
        untried_cost: What `DraftCosts.untried` draft tokens cost at least.
        free: float64 zeros, one longer than these.
        cost: float64, one longer than the most draft tokens that may be taken; filled with what they cost.
        value, scratch: float64 [B], [3, D]; filled.
    """
    size = starts.size - 1
    least = LEAST_COST * undrafted / size  # a lower bound, whatever was measured
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
    token_value(mean, deviation, num_tokens, undrafted, token_seconds, value)
    survival = scratch[0]
    predict_survival(confidence, starts, counts, step, survival)
    gains = scratch[1:]
    row, count = _sort_gains(survival, starts, value, gains)
    ordered = gains[row, :count]
    count = _take(survival, starts, value, cost, ordered, taken)
    untried = free.size - 1
    has_room = 0 < untried <= min(ordered.size, cost.size - 1)
    if has_room and ordered[:untried].sum() - untried_cost > ordered[:count].sum() - cost[count]:
        count = _take(survival, starts, value, free, ordered, taken)
    gain = -cost[count]
    for i in range(size):
        for j in range(taken[i]):
            gain += survival[starts[i] + j] * value[i]
    return gain


class Budget:
    """Decides, step by step, how many tokens of each draft an engine verifies, and whether to draft at all.

    For each step ask `wants_drafts`. If it does, draft and let `decide` cut the drafts. Tell `survival` what became of
    them, `observe_step` what the step took, and `lengths` of each rollout that ends.

    Attributes:
        survival, cost, lengths: The three estimates.
    """

    def __init__(self) -> None:
        self.survival = Survival()
        self.cost = StepCost()
        self.lengths = RemainingLength()
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
        remaining: tuple[Floats, Floats] | None,
        *,
        num_tokens: int,
        max_draft_tokens: int | None = None,
    ) -> Ints:
        """Tokens to verify of each draft, int64 [B], in a step for which `wants_drafts` said True. O(D log D).

        Args:
            confidence: float32 [D], the drafter's, of all drafted tokens.
            starts: int64 [B + 1], each draft's first token in it, then D.
            remaining: float64 [B] each: mean and standard deviation of the tokens to come. None while requests wait.
            num_tokens: As `wants_drafts` was told.
            max_draft_tokens: Most tokens of all drafts together. None: no bound.
        """
        size = starts.size - 1
        allowed = confidence.size if max_draft_tokens is None else max(min(confidence.size, max_draft_tokens), 0)
        if allowed == 0:
            return self._note(np.zeros(size, np.int64), -self._draft_seconds * size)
        costs = self.cost.drafted(num_tokens, self._undrafted)
        mean, deviation = remaining if remaining is not None else (np.ones(size), np.ones(size))
        if costs.most >= 0:
            allowed = min(allowed, max(costs.most, size // REQUESTS_PER_TRIAL_TOKEN, 1))
        # A trial of few tokens would never gain what a new size costs.
        cold = self.cost.cold_seconds(self._undrafted) if costs.most else 0.0
        taken = np.empty(size, np.int64)
        gain = _decide(
            confidence, starts, self.survival.counts, self.survival.step, mean, deviation, num_tokens, self._undrafted,
            costs.tokens, costs.seconds, costs.slope, costs.average, self.cost.sizes, self.cost.first_seconds, cold,
            costs.untried_seconds - self._undrafted, np.zeros(costs.untried + 1), np.empty(allowed + 1),
            np.empty(size), np.empty((3, confidence.size)), taken,
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
