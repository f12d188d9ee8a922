"""The estimates that budgets use, learned while the engine runs: survival and step cost.

Requests of a step are told apart by `starts` (int64 [B + 1]): request i's draft tokens are those from starts[i] up to
starts[i + 1] of an array over all draft tokens of the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.jit.compiler import inlined, njit
from rollout_spec.types import NUM_CONFIDENCE_BINS, Draft

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

POSITION_LIMITS = (1, 2, 4, 8, 16)
"""Positions of a draft share a counter up to these."""
SURVIVAL_PRIOR = 6.0
"""Prior trials, at the rate of the drafter's own confidence."""
MAX_TRIALS = 4096.0
"""Counters are halved at so many trials, so that they follow the policy."""
UNTRIED_STEPS = 16
"""A counter that saw nothing for n times as many steps counts 1 / n, so that drafts that were wrong, perhaps before
there was history, are tried again. If they are right then, the rest of the old counts is dropped for good."""
WINDOW = 512
"""A size's cost is the lower decile of its measurements in so many steps up to its last one."""
MIN_OBSERVATIONS = 3
"""The last measurements of a size count however old they are. With fewer in all, undrafted steps have no cost."""
REFRESH = 8
"""Steps after which a curve is drawn anew."""
LONGEST_TRUST, LONGEST_UNDRAFTED_TRUST = 2048, 128
"""Most steps for which a cost with, or without, drafts is used before it is measured again."""
MOST_PATIENCE = 4.0
"""A size that was measured n times and costs p steps without drafts on top is believed for (n p)^2 steps, with p from 1
to this: what was measured once or twice at a bad time is soon measured again, and what is expensive ever less often."""
BOLD_MEASUREMENTS, BOLD_COST = 2, 2.0
"""After BOLD_MEASUREMENTS steps that each cost more than BOLD_COST steps without drafts, such sizes are tried again
only once smaller ones were found cheap."""
GROWTH = 4
"""How far to go beyond what is known: where larger sizes were expensive, to this many times the draft tokens whose cost
is believed; where nothing is known, to this many draft tokens for each token of a step without drafts."""
WIDE_GAP, STEEP_GAP = 4, 0.25
"""Between two numbers of draft tokens that differ by more than this factor, and in cost by more than this part of a
step without drafts, one in the middle is worth a try."""
LARGEST_SIZE = 8192
"""Steps of more tokens count as one size as far as their first step is concerned."""
RECENT_COLD, MOST_COLD = 32, 4.0
"""What first steps of a size cost more is the median of RECENT_COLD, and at most MOST_COLD steps without drafts."""
COLD_USES = 10
"""How often a new size is expected to be used, by which the price of its first step is divided. After n steps, where
that is more: n / COLD_USES times."""


def flatten(drafts: Sequence[Draft]) -> tuple[NDArray[np.float32], Ints]:
    """(confidence, starts) of a step's drafts, float32 [D] and int64 [B + 1]. O(D)."""
    confidence = np.concatenate([draft.confidence for draft in drafts])
    return confidence, np.concatenate(([0], np.cumsum([len(draft.token_ids) for draft in drafts], dtype=np.int64)))


def median(values: Iterable[Any]) -> Any:
    """Of an even number of values the upper one; much faster than NumPy's for a few."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def lower_decile(values: Iterable[Any]) -> Any:
    """The least of up to nine values, then the second least, ...

    Other work on the machine can only make a step longer, so short times tell most about what a step costs.
    """
    ordered = sorted(values)
    return ordered[len(ordered) // 10]


class Survival:
    """Turns a drafter's confidence into the observed probability of acceptance, by position and confidence.

    Attributes:
        counts: float64 [positions, confidence bins, 4]: verified tokens, their summed confidence, accepted ones, and
            the step in which the last one was counted.
        step: Number of the present step.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((len(POSITION_LIMITS) + 1, NUM_CONFIDENCE_BINS, 4))
        self.step = 0

    def observe(self, confidence: NDArray[np.float32], starts: Ints, num_verified: Ints, num_accepted: Ints) -> None:
        """Count an outcome. O(D).

        Args:
            confidence: float32 [D], the drafter's.
            starts: int64 [B + 1].
            num_verified, num_accepted: int64 [B], tokens that were verified, and of these accepted.
        """
        _observe(confidence, starts, num_verified, num_accepted, self.step, self.counts)

    def reliability(self) -> Floats:
        """float64 [confidence bins, 3]: verified tokens, mean confidence, share accepted. For reports."""
        verified, confidence, accepted = self.counts[..., :3].sum(0).T
        some = np.maximum(verified, 1e-9)
        return np.stack((verified, confidence / some, accepted / some), 1)


@inlined(allocates=False)
def _position_bin(position: int) -> int:
    index = 0
    for limit in POSITION_LIMITS:
        index += position >= limit
    return index


@inlined(allocates=False)
def _confidence_bin(confidence: float) -> int:
    """See CONFIDENCE_LIMITS."""
    return min(int(math.sqrt(confidence) * NUM_CONFIDENCE_BINS), NUM_CONFIDENCE_BINS - 1)


@inlined(allocates=False)
def _weight(cell: Floats, step: int) -> float:
    """See UNTRIED_STEPS."""
    return min(UNTRIED_STEPS / max(step - cell[3], 1.0), 1.0)


@inlined(allocates=False)
def predict_survival(confidence: Any, starts: Ints, counts: Floats, step: int, predicted: Floats) -> None:
    """Probability of each draft token to be reached and accepted, never rising along a draft. O(D).

    Args:
        confidence: float32 [D], the drafter's.
        starts: int64 [B + 1].
        counts, step: `Survival.counts` and `Survival.step`.
        predicted: float64 [D], to be filled.
    """
    for i in range(starts.size - 1):
        least = 1.0
        for j in range(starts[i], starts[i + 1]):
            c = float(confidence[j])
            if c > 0.0:
                cell = counts[_position_bin(j - starts[i]), _confidence_bin(c)]
                weight = _weight(cell, step)
                summed, accepted = weight * cell[1], weight * cell[2]
                # Within a bin survival is in proportion to confidence.
                ratio = (accepted + SURVIVAL_PRIOR * c) / (summed + SURVIVAL_PRIOR * c)
                least = min(least, c * ratio)
            else:
                least = 0.0
            predicted[j] = least


@njit(allocates=False)
def _observe(confidence: Any, starts: Ints, num_verified: Ints, num_accepted: Ints, step: int, counts: Floats) -> None:
    for i in range(starts.size - 1):
        for j in range(min(num_verified[i], starts[i + 1] - starts[i])):  # vLLM may verify padding
            c = float(confidence[starts[i] + j])
            cell = counts[_position_bin(j), _confidence_bin(c)]
            weight = _weight(cell, step) if j < num_accepted[i] else 1.0
            if cell[0] >= MAX_TRIALS:
                weight = min(weight, 0.5)
            for k in range(3):
                cell[k] *= weight
            cell[3] = step
            cell[0] += 1.0
            cell[1] += c
            cell[2] += j < num_accepted[i]


class _Observation(NamedTuple):
    seconds_per_token: float  # comparable between the numbers of tokens that share a bucket
    num_tokens: int  # padded
    when: int


class _Curve(NamedTuple):
    """Costs by size; sizes rise, costs never fall."""

    tokens: Floats
    seconds: Floats
    last: Ints  # step of about that size
    counts: Ints  # of measurements


class DraftCosts(NamedTuple):
    """What steps of some number of tokens and drafts on top cost.

    Attributes:
        tokens, seconds: float64 [n], the curve for `line`, empty as long as it is not known.
        slope: Seconds per token beyond it.
        most: How many draft tokens should be tried at most; -1: any number.
        untried: Draft tokens of a size that was never measured, between two of very different cost; 0: there is none.
        untried_seconds: The lower one of these two costs.
    """

    tokens: Floats
    seconds: Floats
    slope: float
    most: int
    untried: int
    untried_seconds: float


class _SizeHistory:
    """The last steps of about one size. Cold ones, the first of their number of tokens, count where there are none."""

    def __init__(self) -> None:
        self.steps: deque[_Observation] = deque()
        self.count = 0  # of all that were ever measured
        self.last = 0  # when the last one was
        self._is_warm = False  # whether `steps` are no cold ones
        self._point: tuple[float, float, int, int] | None = None

    def add(self, step: _Observation, *, cold: bool) -> None:
        """Measure one more step, and forget the oldest ones."""
        self.count, self.last, self._point = self.count + 1, step.when, None
        if cold and self._is_warm:
            return
        if not cold and not self._is_warm:
            self.steps.clear()
            self._is_warm = True
        self.steps.append(step)
        while len(self.steps) > MIN_OBSERVATIONS and self.steps[0].when <= step.when - WINDOW:
            self.steps.popleft()

    def point(self) -> tuple[float, float, int, int]:
        """(tokens, seconds, the last step of this size, how many there were)."""
        if self._point is None:
            per_token, tokens, _ = lower_decile(self.steps)
            self._point = tokens, per_token * tokens, self.last, self.count
        return self._point


class StepCost:
    """Seconds of an engine step by the tokens it computes, with and without drafts, from the steps themselves.

    Other processes make steps longer, one at a time or hundreds in a row, and never shorter. Therefore a size's cost is
    a lower decile, no size costs more than a larger one, and a cost is believed for longer the more often it was
    measured. Between sizes cost is interpolated. Steps without drafts may be scheduled and run in other ways, and have
    a curve of their own. All of it follows from the observations alone: ranks that observe the same decide the same.

    The first step of each number of tokens may take several times as long as the next ones, because kernels for that
    size are made then. It is not what the size costs.

    Attributes:
        sizes: See `pad_to`.
        first_seconds: float64 [LARGEST_SIZE + 1], by a step's padded tokens: seconds of the first such step; 0 before
            it, -1 after the second one.
    """

    def __init__(self) -> None:
        self.sizes = np.empty(0, np.int64)
        self.first_seconds = np.zeros(LARGEST_SIZE + 1)
        self._cold: deque[float] = deque(maxlen=RECENT_COLD)  # seconds that first steps took longer than second ones
        self._usual_cold: float | None = None  # their median
        self._steps: tuple[dict[int, _SizeHistory], ...] = ({}, {})  # without drafts, with
        self._curves: list[_Curve | None] = [None, None]
        self._undrafted: dict[
            int, tuple[float | None, int]
        ] = {}  # seconds, and the step at which to measure them again
        # Of the last question to `drafted`: the question, the step up to which the answer holds, the answer.
        self._answer: tuple[tuple[int, float], float, DraftCosts] | None = None
        self._redraw_at = 0
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
        self._now += 1
        size = self._steps[drafted].setdefault(self._bucket(num_tokens), _SizeHistory())
        # What is believed of its cost may expire before the next time that curves are drawn: with drafts, a cost is
        # believed for as many steps as the square of its measurements.
        rest = REFRESH**2 - REFRESH if drafted else REFRESH
        is_rare = size.count < REFRESH or size.last <= self._now - rest
        padded = self._pad(num_tokens)
        exactly = min(padded, LARGEST_SIZE)
        first = self.first_seconds[exactly]
        if first == 0.0:
            self.first_seconds[exactly] = seconds
        elif first > 0.0:
            self._cold.append(max(first - seconds, 0.0))
            self._usual_cold = median(self._cold)
            self.first_seconds[exactly] = -1.0
        if drafted and first == 0.0 and self._usual_cold is not None:
            seconds = max(seconds - self._usual_cold, seconds / 2)
        size.add(_Observation(seconds / padded, padded, self._now), cold=first == 0.0)
        if is_rare or self._now >= self._redraw_at:
            self._curves, self._redraw_at = [None, None], self._now + REFRESH
            self._undrafted.clear()
            self._answer = None

    def is_awaited(self, num_tokens: int, *, drafted: bool) -> bool:
        """Whether the next decisions need to know what such a step took: it was measured rarely, or long ago. O(log).

        Args:
            num_tokens, drafted: As `observe` will be told.
        """
        if not drafted:
            return self.undrafted_is_due(num_tokens)
        size = self._steps[True].get(self._bucket(num_tokens))
        return size is None or self._now > size.last + size.count**2

    def cold_seconds(self, undrafted: float) -> float:
        """What a step of a size that was never run must gain beyond its usual cost.

        That is its part of the seconds that the size's first step takes longer: the longer this engine has run, the
        more often the size will be used. Until they are known, half a step without drafts is taken for them.
        """
        longer = undrafted / 2 if self._usual_cold is None else min(self._usual_cold, MOST_COLD * undrafted)
        return longer * COLD_USES / max(self._now, COLD_USES**2)

    def curve(self, *, drafted: bool) -> tuple[Floats, Floats]:
        """(tokens, seconds) of the sizes that were measured, rising. Both may be empty. Up to REFRESH steps old."""
        return self._curve(drafted)[:2]

    def _curve(self, drafted: bool) -> _Curve:
        curve = self._curves[drafted]
        if curve is None:
            sizes = list(self._steps[drafted].values())
            if not drafted and sum(size.count for size in sizes) < MIN_OBSERVATIONS:
                sizes = []
            curve = self._curves[drafted] = _draw([size.point() for size in sizes], self._now)
        return curve

    def undrafted(self, num_tokens: int) -> float | None:
        """Seconds of a step without drafts; None if none of half to four times as many tokens was measured. O(log)."""
        return self._look_up(num_tokens)[0]

    def undrafted_is_due(self, num_tokens: int) -> bool:
        """Whether it is time to measure steps of half to twice as many tokens without drafts again. O(log)."""
        return self._now >= self._look_up(num_tokens)[1]

    def _look_up(self, num_tokens: int) -> tuple[float | None, int]:
        if num_tokens not in self._undrafted:
            tokens, seconds = self.curve(drafted=False)
            near = (tokens >= num_tokens / 2) & (tokens <= 4 * num_tokens)
            cost = self._read(num_tokens, tokens, seconds) if near.any() else None
            similar = [
                size
                for size in self._steps[False].values()
                if num_tokens / 2 <= size.steps[-1].num_tokens <= 2 * num_tokens
            ]
            last = max((size.last for size in similar), default=0)
            trust = min(4 * sum(size.count for size in similar) ** 2, LONGEST_UNDRAFTED_TRUST)
            tokens, seconds = self.curve(drafted=True)
            larger = seconds[tokens >= num_tokens]
            # A larger step with drafts took less, so other work slowed those without.
            if cost is not None and larger.size and larger[0] < cost:
                cost, trust = float(larger[0]), 2 * REFRESH
            self._undrafted[num_tokens] = cost, last + trust
        return self._undrafted[num_tokens]

    def guess_undrafted(self, num_tokens: int) -> float | None:
        """The same from any steps, however few and however different their sizes; None if there were none. O(sizes)."""
        tokens, seconds, *_ = _draw([size.point() for size in self._steps[False].values()], self._now)
        return self._read(num_tokens, tokens, seconds) if tokens.size else None

    def _read(self, num_tokens: int, tokens: Floats, seconds: Floats) -> float:
        slope = _slope(tokens, seconds)
        if slope is None:  # what a token more costs is known from the steps with drafts
            slope = _slope(*self.curve(drafted=True))
        return max(float(line(float(self._pad(num_tokens)), tokens, seconds, slope or 0.0)), 1e-9)

    def drafted(self, num_tokens: int, undrafted: float) -> DraftCosts:
        """What steps of so many tokens and drafts on top cost, where they cost `undrafted` seconds without.

        A cost that is no longer believed counts only if it is below the line between those that are, from `undrafted`
        on: a size that looked expensive is tried again, as a whole at first. After BOLD_MEASUREMENTS it is approached
        from below.
        """
        question = num_tokens, undrafted
        if self._answer is None or self._answer[0] != question or self._answer[1] < self._now:
            self._answer = question, *self._cost_of_drafts(num_tokens, undrafted)
        return self._answer[2]

    def _cost_of_drafts(self, num_tokens: int, undrafted: float) -> tuple[float, DraftCosts]:
        """(the step up to which this holds, what `drafted` returns)."""
        tokens, seconds, last, counts = self._curve(True)
        first = int(np.searchsorted(tokens, num_tokens, "right"))
        tokens, seconds, last, counts = tokens[first:], seconds[first:], last[first:], counts[first:]
        untried = self._untried(num_tokens, undrafted, tokens, seconds)
        factor = np.clip((seconds - undrafted) / undrafted, 1.0, MOST_PATIENCE) ** 2
        until = last + np.minimum(counts**2 * factor, LONGEST_TRUST)
        trusted = until >= self._now
        valid_until = float(until[trusted].min()) if trusted.any() else math.inf
        believed = np.append(num_tokens, tokens[trusted]), np.append(undrafted, seconds[trusted])
        kept = trusted | (seconds < np.interp(tokens, *believed, right=0.0))
        is_expensive = ~kept & (seconds > BOLD_COST * undrafted)
        is_known_expensive = counts[is_expensive].sum() >= BOLD_MEASUREMENTS
        tokens, seconds = tokens[kept], seconds[kept]
        most = -1
        if is_known_expensive:
            most = math.ceil(GROWTH * (tokens[-1] - num_tokens)) if tokens.size else 0
        elif not tokens.size:
            most = GROWTH * num_tokens
            if self.sizes.size and num_tokens < self.sizes[-1]:  # larger steps have no CUDA graph
                most = min(most, int(self.sizes[-1]) - num_tokens)
        slope = _slope(tokens, seconds)
        if slope is None:
            slope = _slope(*self.curve(drafted=False))
        if slope is None:  # half of what a token costs on average
            slope = undrafted / num_tokens / 2
        return valid_until, DraftCosts(tokens, seconds, slope, most, *untried)

    def _untried(self, num_tokens: int, undrafted: float, tokens: Floats, seconds: Floats) -> tuple[int, float]:
        """`untried` and `untried_seconds` of DraftCosts, by all that was measured with drafts: see WIDE_GAP."""
        sizes, costs = np.append(0, tokens - num_tokens), np.append(undrafted, seconds)
        gaps = (sizes[1:] > WIDE_GAP * np.maximum(sizes[:-1], 1)) & (np.diff(costs) > STEEP_GAP * undrafted)
        if not gaps.any():
            return 0, undrafted
        gap = int(np.argmax(gaps))
        middle = round(math.sqrt(max(sizes[gap], 1) * sizes[gap + 1]))
        if self._pad(num_tokens + middle) >= tokens[gap]:  # padded to the upper one
            return 0, undrafted
        return middle, float(costs[gap])

    def _pad(self, num_tokens: int) -> int:
        """What a step of so many tokens is padded to."""
        if not self.sizes.size or num_tokens > self.sizes[-1]:
            return num_tokens
        return int(self.sizes[np.searchsorted(self.sizes, num_tokens)])

    def _bucket(self, num_tokens: int) -> int:
        if self.sizes.size and num_tokens <= self.sizes[-1]:
            return int(np.searchsorted(self.sizes, num_tokens))
        return -1 - int(4 * math.log2(max(num_tokens, 1)))


def _draw(points: list[tuple[float, float, int, int]], now: int) -> _Curve:
    tokens, seconds, last, counts = np.array(sorted(points), np.float64).reshape(-1, 4).T
    # A larger step that took less shows that the smaller one was held up, unless that was long ago.
    fresh = last > now - WINDOW
    seconds = np.where(fresh, _least_from_here(np.where(fresh, seconds, np.inf)), _least_from_here(seconds))
    return _Curve(tokens, np.maximum.accumulate(seconds), last.astype(np.int64), counts.astype(np.int64))


def _least_from_here(values: Floats) -> Floats:
    return np.minimum.accumulate(values[::-1])[::-1]


def _slope(tokens: Floats, seconds: Floats) -> float | None:
    """Seconds per token, on average over what is known; None for fewer than two points."""
    if tokens.size < 2:
        return None
    return float((seconds[-1] - seconds[0]) / (tokens[-1] - tokens[0]))


def line(wanted: float, tokens: Floats, seconds: Floats, slope: float) -> float:
    """Interpolation, and beyond what is known so many seconds per token. O(log)."""
    first, last = 0, tokens.size - 1
    if wanted <= tokens[first]:
        return seconds[first] - slope * (tokens[first] - wanted)
    if wanted >= tokens[last]:
        return seconds[last] + slope * (wanted - tokens[last])
    while last - first > 1:
        middle = (first + last) // 2
        if tokens[middle] < wanted:
            first = middle
        else:
            last = middle
    share = (wanted - tokens[first]) / (tokens[last] - tokens[first])
    return seconds[first] + share * (seconds[last] - seconds[first])


line_nb = inlined(line, allocates=False)
