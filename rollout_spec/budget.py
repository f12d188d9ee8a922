"""How many tokens of each draft are worth verifying in this step.

Three estimates, all learned while the engine runs, decide:

- `Survival`: how probable it is that a draft's slot is reached and accepted, calibrated from outcomes.
- `StepCost`: what a step costs by the tokens in it, measured on the steps themselves.
- `RemainingLength`: how many tokens a request still has to say, from earlier rollouts of its problem.

`allocate` then takes the slots whose expected gain exceeds their cost. The gain of a slot is its survival times what a
token of that request is worth. A rollout phase ends when its longest rollout ends: while b requests are live a step
costs c(b), so one token less for a request saves its part of its last step, c(b) - c(b - 1) where b is the number of
requests that live as long. With c(b) = F + m b that is m for every request, and F more for the longest.
Which one is the longest is uncertain, so F is shared out by the probability of being it (`worth`). Where nothing is
known that is F / B each, and the rule is the one that maximises tokens per second.

Budgets change which tokens are verified, never which are sampled.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from itertools import accumulate
from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

POSITION_LIMITS = (1, 2, 4, 8, 16)
"""Slots of a draft share a counter up to these positions."""
NUM_CONFIDENCE_BINS = 16
SURVIVAL_PRIOR = 6.0
"""Trials that the drafter's own confidence is worth."""
MAX_TRIALS = 4096.0
"""Counters are halved here: what they say follows the policy."""
WINDOW = 24
"""Steps that a cost is the median of; older ones are forgotten."""
REFRESH = 8
"""Steps after which a curve is drawn anew."""
MIN_OBSERVATIONS = 3
"""Steps below which a size has no cost of its own."""
FIRST_PATIENCE, LONGEST_PATIENCE = 32, 1024
"""Steps without drafts after which the cost of a step with drafts is taken for unknown once: it may have changed."""
CAUTION = 8
"""A step whose cost with drafts is not known gets at most one slot for so many requests."""
LEAST_COST = 0.02
"""What a slot costs at least, as a share of a request's in a step without drafts: drafts that never come true stop."""
FRESHNESS = 256
"""Steps with drafts after which one without is taken, to see what that costs by now."""
TIRED_AFTER, LONGEST_SLEEP = 8, 64
"""Steps without worthwhile drafts after which the drafter is asked less often, and the longest pause."""
MAX_LENGTHS = 64
"""Rollouts of a problem whose lengths are remembered, and sixteen times as many of all problems."""
MAX_PROBLEMS = 10_000
"""Problems whose lengths are remembered."""


class Survival:
    """Turns a drafter's confidence into the observed probability of acceptance, by position and confidence.

    Attributes:
        counts: float64 [positions, confidence bins, 3]: slots, their summed confidence, accepted ones.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((len(POSITION_LIMITS) + 1, NUM_CONFIDENCE_BINS, 3))

    def predict(self, confidence: Floats) -> Floats:
        """Survival of each slot, float64 [B, K], never rising along a draft; of confidence 0 it is 0. O(B K).

        Args:
            confidence: float [B, K], the drafter's; 0 where there is no draft.
        """
        predicted = np.empty(confidence.shape)
        _predict(np.asarray(confidence, np.float64), self.counts, predicted)
        return predicted

    def observe(self, confidence: Floats, num_drafted: NDArray[np.int64], num_accepted: NDArray[np.int64]) -> None:
        """Count an outcome. O(B K).

        Args:
            confidence: float [B, K], the drafter's.
            num_drafted, num_accepted: int64 [B], slots that were verified, and of these accepted.
        """
        _observe(np.asarray(confidence, np.float64), num_drafted, num_accepted, self.counts)

    def reliability(self) -> Floats:
        """float64 [confidence bins, 3]: verified slots, mean confidence, share accepted. For reports."""
        slots, confidence, accepted = self.counts.sum(0).T
        some = np.maximum(slots, 1e-9)
        return np.stack((slots, confidence / some, accepted / some), 1)


@nb.njit(cache=True)
def _position_bin(position: int) -> int:
    index = 0
    for limit in POSITION_LIMITS:
        index += position >= limit
    return index


@nb.njit(cache=True)
def _confidence_bin(confidence: float) -> int:
    """Finer towards 0, where it is decided whether a slot is worth its cost."""
    return min(int(math.sqrt(confidence) * NUM_CONFIDENCE_BINS), NUM_CONFIDENCE_BINS - 1)


@nb.njit(cache=True)
def _predict(confidence: Floats, counts: Floats, predicted: Floats) -> None:
    for i in range(confidence.shape[0]):
        least = 1.0
        for j in range(confidence.shape[1]):
            c = confidence[i, j]
            if c > 0.0:
                _, summed, accepted = counts[_position_bin(j), _confidence_bin(c)]
                # Within a bin survival is in proportion to confidence.
                ratio = (accepted + SURVIVAL_PRIOR * c) / (summed + SURVIVAL_PRIOR * c)
                least = min(least, c * ratio)
            else:
                least = 0.0
            predicted[i, j] = least


@nb.njit(cache=True)
def _observe(
    confidence: Floats, num_drafted: NDArray[np.int64], num_accepted: NDArray[np.int64], counts: Floats
) -> None:
    for i in range(confidence.shape[0]):
        for j in range(num_drafted[i]):
            cell = counts[_position_bin(j), _confidence_bin(confidence[i, j])]
            if cell[0] >= MAX_TRIALS:
                cell *= 0.5
            cell[0] += 1.0
            cell[1] += confidence[i, j]
            cell[2] += j < num_accepted[i]


class StepCost:
    """Seconds of an engine step by the tokens it computes, with and without drafts, from the steps themselves.

    A size's cost is the median of its last WINDOW steps: robust against a step that was held up, and new after a change
    of the machine or the model. Between sizes it is interpolated, and it never falls with size. Without drafts the
    scheduling, the graphs and the drafter's own work may be other ones, so those steps have a curve of their own.

    Args:
        sizes: Sizes that steps are padded to, for example those of CUDA graphs: cost is constant between them. None:
            steps are not padded.
    """

    def __init__(self, sizes: tuple[int, ...] | None = None) -> None:
        self._sizes = np.array(sorted(sizes)) if sizes else None
        self._steps: tuple[dict[int, deque[tuple[int, float]]], ...] = ({}, {})  # without drafts, with
        self._curves: list[tuple[Floats, Floats] | None] = [None, None]
        self._num_new = [0, 0]

    def observe(self, num_tokens: int, seconds: float, *, drafted: bool) -> None:
        """Learn from one step that read no prompts. O(1).

        Args:
            num_tokens: Requests and verified draft tokens.
            seconds: What it took.
            drafted: Whether any request had a draft.
        """
        steps = self._steps[drafted].setdefault(self._bucket(num_tokens), deque(maxlen=WINDOW))
        steps.append((num_tokens, seconds))
        self._num_new[drafted] += 1
        if self._num_new[drafted] >= REFRESH or len(steps) == MIN_OBSERVATIONS:
            self._curves[drafted], self._num_new[drafted] = None, 0

    def curve(self, *, drafted: bool) -> tuple[Floats, Floats]:
        """(tokens, seconds) of the sizes that are known, rising. Both may be empty. Up to REFRESH steps old."""
        curve = self._curves[drafted]
        if curve is None:
            curve = self._curves[drafted] = self._fit(drafted)
        return curve

    def _fit(self, drafted: bool) -> tuple[Floats, Floats]:
        known = [
            (float(np.median(self._pad(np.array([n for n, _ in steps])))), float(np.median([s for _, s in steps])))
            for steps in self._steps[drafted].values()
            if len(steps) >= MIN_OBSERVATIONS
        ]
        if not known:
            return np.empty(0), np.empty(0)
        tokens, seconds = np.array(sorted(known)).T
        return tokens, _isotonic(seconds)

    def plain(self, num_requests: int) -> float | None:
        """Seconds of a step without drafts; None if none of half to twice as many requests was measured. O(log)."""
        tokens, seconds = self.curve(drafted=False)
        near = (tokens >= num_requests / 2) & (tokens <= 2 * num_requests)
        if not near.any():
            return None
        slope = _slope(tokens, seconds)
        if slope is None:  # what a token more costs is known from the steps with drafts
            slope = _slope(*self.curve(drafted=True))
        return float(np.maximum(_line(self._pad(np.array([num_requests])), tokens, seconds, slope or 0.0), 1e-9)[0])

    def drafted(self, num_requests: int, num_slots: NDArray[np.int64], *, hopeful: bool) -> tuple[Floats, int]:
        """(seconds of steps with so many slots, most slots that should be tried). O(slots).

        The first steps with drafts at a number of requests have few slots, the next twice as many: two points tell what
        drafts cost at all from what each slot costs. From then on at most twice as many as were measured are tried.

        Args:
            hopeful: Forget what is known.
        """
        tokens, seconds = self.curve(drafted=True)
        known = tokens > num_requests
        tokens, seconds = tokens[known], seconds[known]
        few = max(num_requests // CAUTION, 1)
        if hopeful or not tokens.size:
            return np.zeros(num_slots.size), few
        largest = 2 * math.ceil(tokens[-1] - num_requests)
        slope = _slope(tokens, seconds)
        if slope is None:
            return np.zeros(num_slots.size), largest
        return _line(self._pad(num_requests + num_slots), tokens, seconds, slope), largest

    def _pad(self, num_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sizes that steps of so many tokens are padded to."""
        if self._sizes is None:
            return num_tokens
        at = np.searchsorted(self._sizes, num_tokens)
        return np.where(at < self._sizes.size, self._sizes[np.minimum(at, self._sizes.size - 1)], num_tokens)

    def _bucket(self, num_tokens: int) -> int:
        if self._sizes is not None and num_tokens <= self._sizes[-1]:
            return int(np.searchsorted(self._sizes, num_tokens))
        return -1 - int(4 * math.log2(max(num_tokens, 1)))


def _slope(tokens: Floats, seconds: Floats) -> float | None:
    """Seconds per token, on average over what is known; None for fewer than two points."""
    if tokens.size < 2:
        return None
    return float((seconds[-1] - seconds[0]) / (tokens[-1] - tokens[0]))


def _line(wanted: NDArray[Any], tokens: Floats, seconds: Floats, slope: float) -> Floats:
    """Interpolation, and beyond what is known so many seconds per token."""
    beyond = np.maximum(wanted - tokens[-1], 0.0) - np.maximum(tokens[0] - wanted, 0.0)
    return np.asarray(np.interp(wanted, tokens, seconds) + slope * beyond)


def _isotonic(values: Floats) -> Floats:
    """The nearest sequence that never falls (pool adjacent violators)."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([float(value), 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, weight = blocks.pop()
            blocks[-1][0] = (blocks[-1][0] * blocks[-1][1] + mean * weight) / (blocks[-1][1] + weight)
            blocks[-1][1] += weight
    return np.repeat([mean for mean, _ in blocks], [int(weight) for _, weight in blocks])


class _Lengths:
    """The last lengths, so that the mean of those beyond any length is at hand."""

    def __init__(self, capacity: int) -> None:
        self._recent: deque[int] = deque(maxlen=capacity)
        self._sorted: list[int] = []
        self._sums: list[float] = []
        self._squares: list[float] = []

    def add(self, length: int) -> None:
        """O(capacity)."""
        self._recent.append(length)
        self._sorted = sorted(self._recent)
        self._sums = list(accumulate(map(float, reversed(self._sorted))))[::-1]
        self._squares = list(accumulate(float(n * n) for n in reversed(self._sorted)))[::-1]

    def beyond(self, length: int) -> tuple[float, float] | None:
        """(mean, standard deviation) of what is left of those that are longer; None for fewer than two. O(log)."""
        at = bisect_right(self._sorted, length)
        count = len(self._sorted) - at
        if count < 2:
            return None
        mean = self._sums[at] / count
        return mean - length, math.sqrt(max(self._squares[at] / count - mean * mean, 0.0))


class RemainingLength:
    """How long rollouts get: those of the same problem if some are known, else those of the run."""

    def __init__(self) -> None:
        self._of_problem: dict[int, _Lengths] = {}
        self._of_run = _Lengths(16 * MAX_LENGTHS)

    def observe(self, problem: int, length: int) -> None:
        """A rollout of `length` tokens has ended."""
        if problem not in self._of_problem and len(self._of_problem) >= MAX_PROBLEMS:
            del self._of_problem[next(iter(self._of_problem))]
        self._of_problem.setdefault(problem, _Lengths(MAX_LENGTHS)).add(length)
        self._of_run.add(length)

    def predict(self, problem: int, so_far: int, at_most: int) -> tuple[float, float]:
        """(mean, standard deviation) of the tokens to come, given `so_far`, at most `at_most`. O(log).

        By the problem's rollouts that got longer than `so_far`, else by the run's, else half of what is left.
        """
        of_problem = self._of_problem.get(problem)
        found = (of_problem.beyond(so_far) if of_problem else None) or self._of_run.beyond(so_far)
        if found is None:
            return at_most / 2, at_most / 2
        mean = min(found[0], float(at_most))
        return mean, max(found[1], 0.1 * mean)


def worth(mean: Floats, deviation: Floats, step_seconds: float, token_seconds: float) -> Floats:
    """Seconds that one token less saves, by request, float64 [B]. See the module's docstring. O(B).

    Args:
        mean, deviation: float64 [B], tokens to come.
        step_seconds: What a step of these requests costs without drafts.
        token_seconds: What one token more costs.
    """
    size = mean.size
    per_token = min(max(token_seconds, 0.0), step_seconds / size)
    fixed = step_seconds - per_token * size
    # The chance of being the longest, as if by a choice with Gumbel noise of the lengths' spread.
    spread = max(float(np.sqrt(np.mean(deviation**2))) * math.sqrt(6.0) / math.pi, 1e-9)
    score = np.exp((mean - mean.max()) / spread)
    return np.asarray(per_token + fixed * score / score.sum())


def allocate(survival: Floats, value: Floats, cost: Floats, max_slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many slots of each draft to verify, int64 [B]: those that lower the expected time most. O(B K log(B K)).

    Maximises the sum of survival times value over the slots taken, less what their number costs. As survival never
    rises along a draft, taking the best slots takes each draft's first ones.

    Args:
        survival: float64 [B, K], never rising along a draft.
        value: float64 [B], seconds that an accepted token saves.
        cost: float64 [>= 1], seconds that 0, 1, 2, ... slots cost more than none; as many slots as it has are allowed.
        max_slots: int64 [B], most slots of each request.

    Raises:
        ValueError: shapes do not fit.
    """
    if survival.ndim != 2 or not survival.shape[0] == value.size == max_slots.size or not cost.size:
        raise ValueError(f"shapes do not fit: {survival.shape}, {value.shape}, {cost.shape}, {max_slots.shape}")
    taken = np.zeros(survival.shape[0], np.int64)
    _allocate(survival, value, cost, max_slots, taken)
    return taken


@nb.njit(cache=True)
def _allocate(
    survival: Floats, value: Floats, cost: Floats, max_slots: NDArray[np.int64], taken: NDArray[np.int64]
) -> None:
    size, k = survival.shape
    gains = np.empty(size * k)
    count = 0
    for i in range(size):
        for j in range(min(max_slots[i], k)):
            gain = survival[i, j] * value[i]
            if gain <= 0.0:
                break
            gains[count] = gain
            count += 1
    ordered = np.sort(gains[:count])[::-1]
    best, best_count, total = -cost[0], 0, 0.0
    for n in range(1, min(count, cost.size - 1) + 1):
        total += ordered[n - 1]
        if total - cost[n] > best:
            best, best_count = total - cost[n], n
    if best_count == 0:
        return
    # All slots above the last gain taken, and of those that equal it the first requests'.
    last = ordered[best_count - 1]
    left = best_count
    for i in range(size):
        for j in range(min(max_slots[i], k)):
            if survival[i, j] * value[i] <= last:
                break
            taken[i] += 1
            left -= 1
    for i in range(size):
        while left > 0 and taken[i] < min(max_slots[i], k) and survival[i, taken[i]] * value[i] == last:
            taken[i] += 1
            left -= 1


class Budget:
    """Decides, step by step, how many tokens of each draft an engine verifies, and whether to draft at all.

    Args:
        sizes: Sizes that steps are padded to, see `StepCost`.

    Attributes:
        survival, cost, lengths: The three estimates.
    """

    def __init__(self, sizes: tuple[int, ...] | None = None) -> None:
        self.survival = Survival()
        self.cost = StepCost(sizes)
        self.lengths = RemainingLength()
        self._patience = self._next_try = FIRST_PATIENCE
        self._steps_without = 0  # slots, in a row
        self._steps_with = 0
        self._sleep = 0
        self._asleep_for = 1

    def wants_drafts(self) -> bool:
        """Whether to ask the drafter in this step. Where no slot paid for a while it is asked ever less often."""
        if self._sleep > 0:
            self._sleep -= 1
            self._steps_without += 1
            return False
        return True

    def decide(
        self,
        confidence: Floats,
        num_drafted: NDArray[np.int64],
        remaining: tuple[Floats, Floats],
        *,
        max_slots: int | None = None,
    ) -> NDArray[np.int64]:
        """Slots to verify of each draft, int64 [B], of all requests of a step. O(B K log(B K)).

        Args:
            confidence: float64 [B, K], the drafter's, 0 beyond each draft's end.
            num_drafted: int64 [B], drafted tokens.
            remaining: float64 [B] each: mean and standard deviation of the tokens to come.
            max_slots: Most slots of all requests together. None: no bound.
        """
        size = num_drafted.size
        nothing = np.zeros(size, np.int64)
        total = int(num_drafted.sum())
        if max_slots is not None:
            total = min(total, max_slots)
        if total == 0:
            return self._note(nothing)
        plain = self.cost.plain(size)
        if plain is None or self._steps_with >= FRESHNESS:
            return self._note(nothing, learning=True)
        hopeful = self._steps_without >= self._next_try
        wanted = np.arange(1, total + 1)
        seconds, largest = self.cost.drafted(size, wanted, hopeful=hopeful)
        # A slot costs something, whatever was measured.
        extra = np.maximum(seconds - plain, wanted * (LEAST_COST * plain / size))
        extra = np.concatenate(([0.0], np.maximum.accumulate(extra)))
        value = worth(*remaining, plain, float(extra[-1] - extra[1]) / max(total - 1, 1))
        survival = self.survival.predict(confidence)
        taken = allocate(survival, value, extra, num_drafted)
        if taken.sum() > largest:  # what was not measured yet is approached step by step
            taken = allocate(survival, value, np.zeros(largest + 1), num_drafted)
        if hopeful:
            self._next_try = self._steps_without + self._patience
            self._patience = min(2 * self._patience, LONGEST_PATIENCE)
        return self._note(taken, learning=hopeful)

    def _note(self, taken: NDArray[np.int64], *, learning: bool = False) -> NDArray[np.int64]:
        """Remember when slots were last taken, other than to learn what they cost."""
        if taken.any() and not learning:
            self._steps_without, self._asleep_for = 0, 1
            self._patience = self._next_try = FIRST_PATIENCE
            self._steps_with += 1
            return taken
        self._steps_with = 0
        self._steps_without += 1
        if self._steps_without >= TIRED_AFTER and not learning:
            self._sleep, self._asleep_for = self._asleep_for, min(2 * self._asleep_for, LONGEST_SLEEP)
        return taken
