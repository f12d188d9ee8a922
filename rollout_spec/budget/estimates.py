"""The estimates that budgets use, learned while the engine runs: survival and step cost.

Requests of a step are told apart by `starts` (int64 [B + 1]): request i's draft tokens are those from starts[i] up to
starts[i + 1] of an array over all draft tokens of the step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_spec.jit.compiler import njit
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
MIN_OBSERVATIONS = 3
"""The last measurements of a size count however old they are. With fewer in all, undrafted steps have no cost."""
WINDOW = 512
"""A size's cost is the lower decile of its measurements in so many steps up to its last one."""
KEPT_MEASUREMENTS, CLOSE_MEASUREMENTS = 32, 16
"""So many are kept of each size; once CLOSE_MEASUREMENTS are in the window, only those that spread over it."""
LONGEST_TRUST, LONGEST_UNDRAFTED_TRUST = 2048, 128
"""Most steps for which a cost with, or without, drafts is used before it is measured again."""
LESS_TRUST = 16
"""Where a larger step with drafts took less than one without: steps after which that is measured again."""
MOST_PATIENCE = 4.0
"""A size that was measured n times and costs p steps without drafts on top is believed for (n p)^2 steps, with p from 1
to this: what was measured once or twice at a bad time is soon measured again, and what is expensive ever less often."""
BOLD_COST = 2.0
"""Sizes that cost more steps without drafts than this are tried again only once smaller ones were found cheap."""
GROWTH = 4
"""How far to go beyond what is known: where larger sizes were expensive, to this many times the draft tokens whose cost
is believed, or to those that were once found cheap; where nothing is known, to this many draft tokens for each token of
a step without drafts."""
REQUESTS_PER_TRIAL_TOKEN = 4
"""Where steps with drafts were found expensive, they are tried again with one token per so many requests."""
WIDE_GAP, STEEP_GAP = 4, 0.25
"""Between two numbers of draft tokens that differ by more than this factor, and in cost by more than this part of a
step without drafts, one in the middle is worth a try."""
LEAST_COST = 0.005
"""Least cost of a draft token, as a share of a request's in a step without drafts, so that hopeless drafts stop."""
LARGEST_SIZE = 8192
"""Steps of more tokens count as one size as far as their first step is concerned."""
RECENT_COLD, MOST_COLD = 32, 4.0
"""What first steps of a size cost more is the median of RECENT_COLD, and at most MOST_COLD steps without drafts."""
COLD_USES = 10
"""How often a new size is expected to be used, by which the price of its first step is divided. After n steps, where
that is more: n / COLD_USES times."""
TOKENS, SECONDS, LAST, COUNT, KEPT, IS_WARM = range(6)
"""What is known of about one size: its cost, the last step of it and how many there were; the number of measurements
ever kept, and whether they are others than first steps."""


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


@njit(allocates=False)
def _position_bin(position: int) -> int:
    index = 0
    for limit in POSITION_LIMITS:
        index += position >= limit
    return index


@njit(allocates=False)
def _confidence_bin(confidence: float) -> int:
    """See NUM_CONFIDENCE_BINS."""
    return min(int(math.sqrt(confidence) * NUM_CONFIDENCE_BINS), NUM_CONFIDENCE_BINS - 1)


@njit(allocates=False)
def _weight(cell: Floats, step: int) -> float:
    """See UNTRIED_STEPS."""
    return min(UNTRIED_STEPS / max(step - cell[3], 1.0), 1.0)


@njit(allocates=False)
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
def count_verified(confidence: Any, num_verified: int, num_accepted: int, step: int, counts: Floats) -> None:
    """`Survival.observe` for one draft, whose tokens have this confidence, float32 [n]."""
    for j in range(min(num_verified, confidence.size)):  # vLLM may verify padding
        c = float(confidence[j])
        cell = counts[_position_bin(j), _confidence_bin(c)]
        weight = _weight(cell, step) if j < num_accepted else 1.0
        if cell[0] >= MAX_TRIALS:
            weight = min(weight, 0.5)
        for k in range(3):
            cell[k] *= weight
        cell[3] = step
        cell[0] += 1.0
        cell[1] += c
        cell[2] += j < num_accepted


@njit(allocates=False)
def _observe(confidence: Any, starts: Ints, num_verified: Ints, num_accepted: Ints, step: int, counts: Floats) -> None:
    for i in range(starts.size - 1):
        count_verified(confidence[starts[i] : starts[i + 1]], num_verified[i], num_accepted[i], step, counts)


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
    """

    def __init__(self) -> None:
        self._first_seconds = np.zeros(LARGEST_SIZE + 1)  # of each size; 0 before its first step, -1 after its second
        self._cold: deque[float] = deque(maxlen=RECENT_COLD)  # seconds that first steps took longer than second ones
        self._usual_cold: float | None = None  # their median
        self._now = 0
        self._set_sizes(())

    def _set_sizes(self, sizes: tuple[int, ...]) -> None:
        self.sizes = np.array(sizes, np.int64)
        # The most tokens of each bucket: what steps are padded to, then quarters of octaves.
        quarters = sorted({int(2 ** (n / 4)) for n in range(4 * 20)})
        self._limits = [*sizes, *(limit for limit in quarters if limit > max(sizes, default=0))]
        buckets = len(self._limits)
        self._known = np.zeros((2, 6, buckets))  # without drafts, with; TOKENS, SECONDS, ...
        self._measured = np.zeros((2, buckets, KEPT_MEASUREMENTS, 3))  # tokens, seconds, the step

    def pad_to(self, sizes: tuple[int, ...]) -> None:
        """Say to which sizes steps are padded, for example those of CUDA graphs: cost is constant between them.

        Other sizes than before forget what was measured.

        Args:
            sizes: Empty: steps are not padded, as before the first call.
        """
        sizes = tuple(sorted(sizes))
        if sizes != tuple(self.sizes.tolist()):
            self._set_sizes(sizes)

    def observe(self, num_tokens: int, seconds: float, *, drafted: bool) -> None:
        """Learn from one step. O(1).

        Args:
            num_tokens: All tokens that it computed.
            seconds: What it took, without the drafter's work.
            drafted: Whether any request had a draft.
        """
        self._now += 1
        padded = self._pad(num_tokens)
        exactly = min(padded, LARGEST_SIZE)
        first = self._first_seconds[exactly]
        if first == 0.0:
            self._first_seconds[exactly] = seconds
            if drafted and self._usual_cold is not None:
                seconds = max(seconds - self._usual_cold, seconds / 2)
        elif first > 0.0:
            self._cold.append(max(first - seconds, 0.0))
            self._usual_cold = median(self._cold)
            self._first_seconds[exactly] = -1.0
        bucket = self._bucket(num_tokens)
        _measure(self._known, self._measured, int(drafted), bucket, padded, seconds, self._now, first == 0.0)

    def is_awaited(self, num_tokens: int, *, drafted: bool) -> bool:
        """Whether the next decisions need to know what such a step took: it was measured rarely, or long ago. O(log).

        Args:
            num_tokens, drafted: As `observe` will be told.
        """
        if not drafted:
            return self.undrafted(num_tokens)[2]
        known = self._known[1, :, self._bucket(num_tokens)]
        return bool(self._now > known[LAST] + known[COUNT] ** 2 or not known[COUNT])

    def curve(self, *, drafted: bool) -> tuple[Floats, Floats]:
        """(tokens, seconds) of the sizes that were measured, rising. Both may be empty."""
        curve = self._new_curve()
        tokens, seconds = curve[:2, : _draw(self._known[int(drafted)], self._now, 0, 0, curve)]
        return tokens, seconds

    def undrafted(self, num_tokens: int) -> tuple[float, bool, bool]:
        """What a step without drafts costs. O(sizes).

        Returns:
            (seconds, 0 before the first such step; whether steps of half to four times as many tokens were measured, or
            it is a guess; whether it is time to measure steps of about this size again).
        """
        return _undrafted(self._known, self._now, num_tokens, self._pad(num_tokens), self._new_curve())  # type: ignore[no-any-return]

    def drafted(self, num_requests: int, num_tokens: int, undrafted: float, cost: Floats) -> tuple[int, float, bool]:
        """What draft tokens gain and cost: see `Budget.costs`. O(sizes + draft tokens).

        A cost that is no longer believed does not count: a size is tried again, from below if it looked expensive.

        Args:
            undrafted: What the step costs without drafts.
            cost: float64 [>= 1], filled.

        Returns:
            (how many draft tokens should be tried at most, seconds that a token less saves, whether any cost is known).
        """
        cold = undrafted / 2 if self._usual_cold is None else min(self._usual_cold, MOST_COLD * undrafted)
        cold *= COLD_USES / max(self._now, COLD_USES**2)
        return _price(
            self._known, self._now, self.sizes, self._first_seconds, cold, num_requests,
            num_tokens, undrafted, self._new_curve(), cost,
        )  # fmt: skip

    def _new_curve(self) -> Floats:
        return np.empty((3, len(self._limits) + 1))

    def _bucket(self, num_tokens: int) -> int:
        return min(bisect_left(self._limits, num_tokens), len(self._limits) - 1)

    def _pad(self, num_tokens: int) -> int:
        """What a step of so many tokens is padded to."""
        bucket = self._bucket(num_tokens)
        return self._limits[bucket] if bucket < self.sizes.size else num_tokens


@njit(allocates=False)
def _measure(
    known: Any, measured: Any, kind: int, bucket: int, tokens: int, seconds: float, now: int, is_first: bool
) -> None:
    """Keep one more measurement. First steps of their number of tokens count where there are no others."""
    mine, kept = known[kind, :, bucket], measured[kind, bucket]
    mine[LAST] = now
    mine[COUNT] += 1
    if is_first and mine[IS_WARM]:
        return
    if not is_first and not mine[IS_WARM]:
        mine[IS_WARM], mine[KEPT] = 1, 0
    number = int(mine[KEPT])
    close = kept[(number - CLOSE_MEASUREMENTS) % KEPT_MEASUREMENTS, 2] > now - WINDOW
    last = kept[(number - 1) % KEPT_MEASUREMENTS, 2]
    if number >= CLOSE_MEASUREMENTS and close and now < last + WINDOW // KEPT_MEASUREMENTS:
        return
    newest = kept[number % KEPT_MEASUREMENTS]
    newest[0], newest[1], newest[2] = tokens, seconds, now
    number += 1
    mine[KEPT] = number
    used = 0
    while used < min(number, KEPT_MEASUREMENTS) and (
        used < MIN_OBSERVATIONS or kept[(number - 1 - used) % KEPT_MEASUREMENTS, 2] > now - WINDOW
    ):
        used += 1
    for i in range(number - used, number):
        this = kept[i % KEPT_MEASUREMENTS]
        rank = 0
        for j in range(number - used, number):
            other = kept[j % KEPT_MEASUREMENTS]
            # By seconds per token, which can be compared between the numbers of tokens that share a bucket.
            difference = other[1] * this[0] - this[1] * other[0]
            rank += difference < 0 or (difference == 0 and j < i)
        if rank == used // 10:
            mine[TOKENS], mine[SECONDS] = this[0], this[1]


@njit(allocates=False)
def _draw(known: Floats, now: int, above: int, n: int, curve: Floats) -> int:
    """Add the sizes of more than `above` tokens to a curve of `n`. Sizes rise, costs never fall.

    Args:
        known: float64 [6, buckets], of `StepCost`.
        curve: float64 [3, > buckets], filled with each size's tokens, seconds and bucket.

    Returns:
        The number of sizes.
    """
    end = n
    for bucket in range(known.shape[1]):
        if known[COUNT, bucket] and known[TOKENS, bucket] > above:
            curve[0, end], curve[1, end], curve[2, end] = known[TOKENS, bucket], known[SECONDS, bucket], bucket
            end += 1
    # A larger step that took less shows that the smaller one was held up, unless that was long ago.
    least = least_of_fresh = math.inf
    for i in range(end - 1, n - 1, -1):
        least = min(least, curve[1, i])
        if known[LAST, int(curve[2, i])] > now - WINDOW:
            least_of_fresh = min(least_of_fresh, curve[1, i])
            curve[1, i] = least_of_fresh
        else:
            curve[1, i] = least
    for i in range(n + 1, end):
        curve[1, i] = max(curve[1, i], curve[1, i - 1])
    return end


@njit(allocates=False)
def _interpolate(wanted: float, at: int, n: int, curve: Floats) -> float:
    """Seconds of `wanted` tokens, if `at` of a curve's `n` sizes have less. Beyond them, by the average slope."""
    first, last = (at - 1, at) if 0 < at < n else (0, n - 1)
    near = max(at - 1, 0)
    return curve[1, near] + _slope(first, last, curve) * (wanted - curve[0, near])


@njit(allocates=False)
def _slope(first: int, last: int, curve: Floats) -> float:
    """Seconds per token, 0 from a size to itself."""
    return (curve[1, last] - curve[1, first]) / (curve[0, last] - curve[0, first]) if first < last else 0.0


@njit(allocates=False)
def _undrafted(known: Any, now: int, num_tokens: int, padded: int, curve: Floats) -> tuple[float, bool, bool]:
    """See `StepCost.undrafted`."""
    count, last, total, is_near = 0.0, 0.0, 0.0, False
    for bucket in range(known.shape[2]):
        tokens = known[0, TOKENS, bucket]
        total += known[0, COUNT, bucket]
        is_near |= num_tokens / 2 <= tokens <= 4 * num_tokens
        if num_tokens / 2 <= tokens <= 2 * num_tokens:
            count += known[0, COUNT, bucket]
            last = max(last, known[0, LAST, bucket])
    is_due = now >= last + min(4 * count**2, LONGEST_UNDRAFTED_TRUST)
    n = _draw(known[1], now, num_tokens - 1, 0, curve)
    larger, slope = (curve[1, 0] if n else math.inf), _slope(0, n - 1, curve)
    n = _draw(known[0], now, 0, 0, curve)
    if n == 0:
        return 0.0, False, is_due
    at = 0
    while at < n and curve[0, at] < padded:
        at += 1
    seconds = _interpolate(padded, at, n, curve)
    if n == 1:  # what a token more costs is known from the steps with drafts
        seconds += slope * (padded - curve[0, 0])
    if larger < seconds:  # with drafts; so other work slowed those without
        seconds, is_due = larger, now >= last + LESS_TRUST
    return max(seconds, 1e-9), is_near and total >= MIN_OBSERVATIONS, is_due


@njit(allocates=False)
def _price(
    known: Any, now: int, sizes: Ints, first_seconds: Floats, cold: float, num_requests: int, num_tokens: int,
    undrafted: float, curve: Floats, cost: Floats,
) -> tuple[int, float, bool]:  # fmt: skip
    """`StepCost.drafted`, where a step of a size that was never run must gain `cold` seconds more."""
    n = _draw(known[1], now, num_tokens, 1, curve)
    curve[0, 0], curve[1, 0] = num_tokens, undrafted
    kept, is_expensive, cheap, untried = 1, False, 0, 0
    extra_before, seconds_before, untried_cost, above = 1.0, undrafted, 0.0, 0.0
    for i in range(1, n):
        tokens, seconds, bucket = curve[0, i], curve[1, i], int(curve[2, i])
        extra = tokens - num_tokens
        if untried == 0 and extra > WIDE_GAP * extra_before and seconds - seconds_before > STEEP_GAP * undrafted:
            untried, untried_cost, above = round(math.sqrt(extra_before * extra)), seconds_before - undrafted, tokens
        extra_before, seconds_before = extra, seconds
        patience = min(max(seconds / undrafted - 1.0, 1.0), MOST_PATIENCE)
        trust = min((known[1, COUNT, bucket] * patience) ** 2, LONGEST_TRUST)
        if known[1, LAST, bucket] + trust >= now:
            curve[0, kept], curve[1, kept] = tokens, seconds
            kept += 1
        elif seconds > BOLD_COST * undrafted:
            is_expensive = True
        else:
            cheap = int(extra)
    most = cost.size - 1
    if is_expensive:
        most = max(int(GROWTH * (curve[0, kept - 1] - num_tokens)), cheap)
    elif kept == 1:
        most = GROWTH * num_tokens
        if sizes.size and num_tokens < sizes[-1]:  # larger steps have no CUDA graph
            most = min(most, sizes[-1] - num_tokens)
    if most == 0:
        cold = 0.0  # a trial of few tokens would never gain what a new size costs
    most = min(cost.size - 1, max(most, num_requests // REQUESTS_PER_TRIAL_TOKEN, 1))
    cost[0] = 0.0
    at = size = 0
    for i in range(1, most + 1):
        padded = num_tokens + i
        while size < sizes.size and sizes[size] < padded:
            size += 1
        if size < sizes.size:
            padded = sizes[size]
        while at < kept and curve[0, at] < padded:
            at += 1
        cost[i] = max(_interpolate(padded, at, kept, curve) - undrafted, i * LEAST_COST * undrafted / num_requests)
        if first_seconds[min(padded, LARGEST_SIZE)] == 0.0:
            cost[i] += cold
        if i == untried and padded < above:
            cost[i] = untried_cost
    # What a token more costs, as far as is known, is not saved for those of prompts.
    per_token = (curve[1, kept - 1] - undrafted) / max(curve[0, kept - 1] - num_tokens, 1.0)
    per_token = min(max(per_token, 0.0), undrafted / num_tokens)
    return most, (undrafted - per_token * (num_tokens - num_requests)) / num_requests, kept > 1
