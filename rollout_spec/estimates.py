"""What draft budgets go by, learned while the engine runs: survival, step cost and remaining length.

Requests of a step are told apart by `starts` (int64 [B + 1]): request i's draft slots are those from starts[i] up to
starts[i + 1] of an array over all slots of the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.jit import inlined, njit
from rollout_spec.types import NUM_CONFIDENCE_BINS, Draft

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

POSITION_LIMITS = (1, 2, 4, 8, 16)
"""Slots of a draft share a counter up to these positions."""
SURVIVAL_PRIOR = 6.0
"""Trials that the drafter's own confidence is worth."""
MAX_TRIALS = 4096.0
"""Counters are halved here: what they say follows the policy."""
WINDOW = 24
"""Steps that a cost is the median of; older ones are forgotten."""
REFRESH = 8
"""Steps after which a curve is drawn anew."""
MAX_AGE = 2048
"""Steps after which a measurement counts only where there is no newer one."""
MIN_OBSERVATIONS = 3
"""Steps below which a size has no cost of its own."""
MAX_LENGTHS = 64
"""Rollouts of a problem whose lengths are remembered, and sixteen times as many of all problems."""
MAX_PROBLEMS = 10_000
"""Problems whose lengths are remembered."""


def flatten(drafts: Sequence[Draft]) -> tuple[NDArray[np.float32], Ints]:
    """(confidence, starts) of a step's drafts, float32 [D] and int64 [B + 1]. O(D)."""
    confidence = np.concatenate([draft.confidence for draft in drafts])
    return confidence, np.concatenate(([0], np.cumsum([len(draft.token_ids) for draft in drafts], dtype=np.int64)))


def median(values: Iterable[Any]) -> Any:
    """Of an even number of values the upper one; much faster than NumPy's for a few."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


class Survival:
    """Turns a drafter's confidence into the observed probability of acceptance, by position and confidence.

    Attributes:
        counts: float64 [positions, confidence bins, 3]: slots, their summed confidence, accepted ones.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((len(POSITION_LIMITS) + 1, NUM_CONFIDENCE_BINS, 3))

    def observe(self, confidence: NDArray[np.float32], starts: Ints, num_verified: Ints, num_accepted: Ints) -> None:
        """Count an outcome. O(D).

        Args:
            confidence: float32 [D], the drafter's.
            starts: int64 [B + 1].
            num_verified, num_accepted: int64 [B], slots that were verified, and of these accepted.
        """
        _observe(confidence, starts, num_verified, num_accepted, self.counts)

    def reliability(self) -> Floats:
        """float64 [confidence bins, 3]: verified slots, mean confidence, share accepted. For reports."""
        slots, confidence, accepted = self.counts.sum(0).T
        some = np.maximum(slots, 1e-9)
        return np.stack((slots, confidence / some, accepted / some), 1)


@inlined
def _position_bin(position: int) -> int:
    index = 0
    for limit in POSITION_LIMITS:
        index += position >= limit
    return index


@inlined
def _confidence_bin(confidence: float) -> int:
    """See CONFIDENCE_LIMITS."""
    return min(int(math.sqrt(confidence) * NUM_CONFIDENCE_BINS), NUM_CONFIDENCE_BINS - 1)


@njit
def predict_survival(confidence: Any, starts: Ints, counts: Floats, predicted: Floats) -> None:
    """Probability of each slot to be reached and accepted, never rising along a draft. O(D).

    Args:
        confidence: float32 [D], the drafter's.
        starts: int64 [B + 1].
        counts: `Survival.counts`.
        predicted: float64 [D], to be filled.
    """
    for i in range(starts.size - 1):
        least = 1.0
        for j in range(starts[i], starts[i + 1]):
            c = float(confidence[j])
            if c > 0.0:
                _, summed, accepted = counts[_position_bin(j - starts[i]), _confidence_bin(c)]
                # Within a bin survival is in proportion to confidence.
                ratio = (accepted + SURVIVAL_PRIOR * c) / (summed + SURVIVAL_PRIOR * c)
                least = min(least, c * ratio)
            else:
                least = 0.0
            predicted[j] = least


@njit
def _observe(confidence: Any, starts: Ints, num_verified: Ints, num_accepted: Ints, counts: Floats) -> None:
    for i in range(starts.size - 1):
        for j in range(num_verified[i]):
            c = float(confidence[starts[i] + j])
            cell = counts[_position_bin(j), _confidence_bin(c)]
            if cell[0] >= MAX_TRIALS:
                cell *= 0.5
            cell[0] += 1.0
            cell[1] += c
            cell[2] += j < num_accepted[i]


class _Observation(NamedTuple):
    when: int
    num_tokens: int
    seconds: float


class StepCost:
    """Seconds of an engine step by the tokens it computes, with and without drafts, from the steps themselves.

    A size's cost is the median of its last WINDOW steps: robust against a step that was held up. When it is seen again,
    what is older than MAX_AGE steps is forgotten, but for the newest few. Between sizes cost is interpolated, and it
    never falls with size. Steps without drafts may be scheduled and run in other ways, and have a curve of their own.
    """

    def __init__(self) -> None:
        self.sizes = np.empty(0, np.int64)
        self._steps: tuple[dict[int, deque[_Observation]], ...] = ({}, {})  # without drafts, with
        self._points: tuple[dict[int, tuple[float, float]], ...] = ({}, {})  # (tokens, seconds) by size
        self._changed: tuple[set[int], ...] = (set(), set())  # sizes whose points are not up to date
        self._curves: list[tuple[Floats, Floats] | None] = [None, None]
        self._num_new = [0, 0]
        self._plain: dict[int, float | None] = {}  # what `plain` said since the curves were drawn
        self._now = 0

    def pad_to(self, sizes: tuple[int, ...]) -> None:
        """Say to which sizes steps are padded, for example those of CUDA graphs: cost is constant between them.

        Args:
            sizes: Empty: steps are not padded, as before the first call.
        """
        self.sizes = np.array(sorted(sizes), np.int64)

    def observe(self, num_tokens: int, seconds: float, *, drafted: bool) -> None:
        """Learn from one step. O(1).

        Args:
            num_tokens: All tokens that it computed.
            seconds: What it took, without the drafter's work.
            drafted: Whether any request had a draft.
        """
        bucket = self._bucket(num_tokens)
        steps = self._steps[drafted].setdefault(bucket, deque(maxlen=WINDOW))
        self._now += 1
        steps.append(_Observation(self._now, num_tokens, seconds))
        self._changed[drafted].add(bucket)
        self._num_new[drafted] += 1
        # Steps without drafts may be rare: each few of them count at once.
        refresh = REFRESH if drafted else MIN_OBSERVATIONS
        if self._num_new[drafted] >= refresh or len(steps) == MIN_OBSERVATIONS:
            self._curves[drafted], self._num_new[drafted] = None, 0
            self._plain.clear()

    def forget_drafted(self) -> None:
        """Learn the cost of steps with drafts anew."""
        for learned in (self._steps, self._points, self._changed):
            learned[True].clear()
        self._curves[True], self._num_new[True] = None, 0
        self._plain.clear()

    def curve(self, *, drafted: bool) -> tuple[Floats, Floats]:
        """(tokens, seconds) of the sizes that are known, rising. Both may be empty. Up to REFRESH steps old."""
        curve = self._curves[drafted]
        if curve is None:
            for bucket in self._changed[drafted]:
                steps = self._steps[drafted][bucket]
                if len(steps) >= MIN_OBSERVATIONS:
                    self._points[drafted][bucket] = self._point(steps)
            self._changed[drafted].clear()
            curve = self._curves[drafted] = _curve(self._points[drafted].values())
        return curve

    def _point(self, steps: deque[_Observation]) -> tuple[float, float]:
        """Median tokens and seconds of the steps that count."""
        recent = [step for step in steps if step.when > self._now - MAX_AGE]
        used = recent if len(recent) >= MIN_OBSERVATIONS else list(steps)[-MIN_OBSERVATIONS:]
        return float(median([self._pad(step.num_tokens) for step in used])), median([step.seconds for step in used])

    def plain(self, num_tokens: int) -> float | None:
        """Seconds of a step without drafts; None if none of half to four times as many tokens was measured. O(log)."""
        if num_tokens not in self._plain:
            tokens, seconds = self.curve(drafted=False)
            near = (tokens >= num_tokens / 2) & (tokens <= 4 * num_tokens)
            self._plain[num_tokens] = self._read(num_tokens, tokens, seconds) if near.any() else None
        return self._plain[num_tokens]

    def plain_age(self, num_tokens: int) -> int:
        """Steps since one without drafts of half to twice as many tokens was last measured. O(sizes)."""
        seen = [
            steps[-1].when
            for steps in self._steps[False].values()
            if num_tokens / 2 <= steps[-1].num_tokens <= 2 * num_tokens
        ]
        return self._now - max(seen, default=0)

    def guess_plain(self, num_tokens: int) -> float | None:
        """The same from any steps, however few and however different their sizes; None if there were none. O(sizes)."""
        tokens, seconds = _curve([self._point(steps) for steps in self._steps[False].values()])
        return self._read(num_tokens, tokens, seconds) if tokens.size else None

    def _read(self, num_tokens: int, tokens: Floats, seconds: Floats) -> float:
        slope = _slope(tokens, seconds)
        if slope is None:  # what a token more costs is known from the steps with drafts
            slope = _slope(*self.curve(drafted=True))
        return max(line(float(self._pad(num_tokens)), tokens, seconds, slope or 0.0), 1e-9)

    def drafted(self, num_tokens: int) -> tuple[Floats, Floats, float, int]:
        """What steps of so many tokens and drafts on top cost: (tokens, seconds, seconds per token beyond, most slots).

        At most twice as many slots as were measured should be tried: what a step costs is approached from below.

        Returns:
            The curve for `line`, empty as long as it is not known, and how many slots should be tried at most: 0 if
            nothing is known.
        """
        tokens, seconds = self.curve(drafted=True)
        first = int(np.searchsorted(tokens, num_tokens, "right"))
        if first == tokens.size:
            return tokens[:0], seconds[:0], 0.0, 0
        tokens, seconds = tokens[first:], seconds[first:]
        slope = _slope(tokens, seconds)
        if slope is None:
            slope = _slope(*self.curve(drafted=False))
        return tokens, seconds, slope or 0.0, 2 * math.ceil(tokens[-1] - num_tokens)

    def _pad(self, num_tokens: int) -> int:
        """What a step of so many tokens is padded to."""
        if not self.sizes.size or num_tokens > self.sizes[-1]:
            return num_tokens
        return int(self.sizes[np.searchsorted(self.sizes, num_tokens)])

    def _bucket(self, num_tokens: int) -> int:
        if self.sizes.size and num_tokens <= self.sizes[-1]:
            return int(np.searchsorted(self.sizes, num_tokens))
        return -1 - int(4 * math.log2(max(num_tokens, 1)))


def _curve(points: Iterable[tuple[float, float]]) -> tuple[Floats, Floats]:
    known = sorted(points)
    if not known:
        return np.empty(0), np.empty(0)
    return np.array([tokens for tokens, _ in known]), _isotonic([seconds for _, seconds in known])


def _slope(tokens: Floats, seconds: Floats) -> float | None:
    """Seconds per token, on average over what is known; None for fewer than two points."""
    if tokens.size < 2:
        return None
    return float((seconds[-1] - seconds[0]) / (tokens[-1] - tokens[0]))


@njit
def line(wanted: float, tokens: Floats, seconds: Floats, slope: float) -> float:
    """Interpolation, and beyond what is known so many seconds per token."""
    if wanted <= tokens[0]:
        return seconds[0] - slope * (tokens[0] - wanted)
    if wanted >= tokens[-1]:
        return seconds[-1] + slope * (wanted - tokens[-1])
    at = np.searchsorted(tokens, wanted)
    share = (wanted - tokens[at - 1]) / (tokens[at] - tokens[at - 1])
    return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])


def _isotonic(values: list[float]) -> Floats:
    """The nearest sequence that never falls (pool adjacent violators)."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value, 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, weight = blocks.pop()
            blocks[-1][0] = (blocks[-1][0] * blocks[-1][1] + mean * weight) / (blocks[-1][1] + weight)
            blocks[-1][1] += weight
    return np.repeat([mean for mean, _ in blocks], [int(weight) for _, weight in blocks])


class RemainingLength:
    """How long rollouts get: those of the same problem if some are known, else those of the run."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}  # by problem
        self._of_problem = np.zeros((64, MAX_LENGTHS), np.int32)
        self._num_seen = np.zeros(64, np.int64)  # the newest lengths replace the oldest ones
        self._recent: deque[int] = deque(maxlen=16 * MAX_LENGTHS)
        self._of_run: Floats | None = None  # [3, n + 1]: lengths, rising; their sums and those of their squares

    def observe(self, problem: int, length: int) -> None:
        """A rollout of `length` tokens has ended. O(1)."""
        row = self._rows.get(problem)
        if row is None:
            row = self._rows[problem] = self._new_row()
            self._num_seen[row] = 0
        self._of_problem[row, self._num_seen[row] % MAX_LENGTHS] = length
        self._num_seen[row] += 1
        self._recent.append(length)
        self._of_run = None

    def _new_row(self) -> int:
        row = len(self._rows)
        if row >= MAX_PROBLEMS:
            return self._rows.pop(next(iter(self._rows)))
        if row == self._num_seen.size:
            self._of_problem = np.concatenate((self._of_problem, np.zeros_like(self._of_problem)))
            self._num_seen = np.concatenate((self._num_seen, np.zeros_like(self._num_seen)))
        return row

    def predict(self, problems: list[int], so_far: Ints, at_most: Ints) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of the tokens to come, float64 [B] each. O(B (MAX_LENGTHS + log)).

        By the problem's rollouts that got longer than `so_far`, if there are two, else by the run's, else half of what
        is left.

        Args:
            problems: Each request's.
            so_far, at_most: int64 [B], tokens said, and most that may come.
        """
        if self._of_run is None:
            lengths = np.sort(np.array(self._recent, np.float64))
            self._of_run = np.array([[0.0, *lengths], np.cumsum([0.0, *lengths]), np.cumsum([0.0, *lengths**2])])
        rows = np.array([self._rows.get(problem, -1) for problem in problems], np.int64)
        mean, deviation = np.empty(rows.size), np.empty(rows.size)
        _predict_length(self._of_problem, self._num_seen, self._of_run, rows, so_far, at_most, mean, deviation)
        return mean, deviation


@inlined
def _moments(count: int, summed: float, squares: float) -> tuple[int, float, float]:
    """(number, mean, standard deviation)."""
    mean = summed / max(count, 1)
    return count, mean, math.sqrt(max(squares / max(count, 1) - mean * mean, 0.0))


@njit
def _predict_length(
    of_problem: Any, num_seen: Ints, of_run: Floats, rows: Ints, so_far: Ints, at_most: Ints, mean: Any, deviation: Any
) -> None:
    for i in range(rows.size):
        count, summed, squares = 0, 0.0, 0.0
        if rows[i] >= 0:
            for length in of_problem[rows[i], : min(num_seen[rows[i]], MAX_LENGTHS)]:
                if length > so_far[i]:
                    count += 1
                    summed += length
                    squares += float(length) * length
        if count < 2:
            lengths, sums, sums_of_squares = of_run
            at = np.searchsorted(lengths[1:], so_far[i], "right")
            count = lengths.size - 1 - at
            summed, squares = sums[-1] - sums[at], sums_of_squares[-1] - sums_of_squares[at]
        count, mean[i], deviation[i] = _moments(count, summed, squares)
        if count < 2:
            mean[i], deviation[i] = at_most[i] / 2, at_most[i] / 2
        else:
            mean[i] = min(mean[i] - so_far[i], float(at_most[i]))
            deviation[i] = max(deviation[i], 0.1 * mean[i])
