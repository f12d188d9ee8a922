"""How many tokens of each draft are worth verifying in this step.

`allocate` takes the draft tokens whose expected gain exceeds their cost. The gain of one is its confidence, the
drafter's estimate that it is reached and accepted, times what an accepted token saves: a request's share of a step
without drafts. That maximises tokens per second. What a step costs by the tokens in it is measured on the steps
themselves (`StepCost`).

Budgets change which tokens are verified, never which are sampled.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_spec.jit import njit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_BINS = 1024
"""Draft tokens whose confidence differs by less than 1 / NUM_BINS are worth the same."""
RECENT_STEPS = 5
"""A size costs what the second fastest of its last RECENT_STEPS steps took, of fewer than four the fastest: other work
makes steps longer, never shorter."""
FRESH_STEPS = 512
"""It costs no more than a larger size whose last step is less than FRESH_STEPS steps ago: contexts grow."""
MIN_OBSERVATIONS = 3
"""With fewer steps without drafts, what one costs is not known."""
MAX_UNDRAFTED_TRUST = 128
"""Most steps after which one without drafts is measured again."""
TRUST, ONCE, MOST_PATIENCE, LONGEST_TRUST = 12, 0.25, 4.0, 3072
"""A cost that was measured n times, and is p > 1 times that of a step without drafts, is forgotten after
TRUST ((n - 1 + ONCE) p)^2 steps, with p at most MOST_PATIENCE, and after LONGEST_TRUST at the latest. The size then
counts as a step without drafts and is tried again: soon if its only step may have been held up, an expensive one ever
less often."""
NEW_SIZE_COST, LARGEST_SIZE = 0.3, 8192
"""The first step of each number of tokens is charged this share of a step without drafts on top, as a CPU makes kernels
for it; after FRESH_STEPS steps the charge falls. Numbers above LARGEST_SIZE count as one."""
LONGEST_SLEEP = 32
"""Most steps in a row in which a drafter whose drafts do not pay is not asked."""
RECENT_DRAFTS = 32
"""Drafting is expected to take the lower decile of its last RECENT_DRAFTS calls."""
AVERAGE_WEIGHT = 1 / 32
"""Weight of the last step in averages."""
JUDGED_STEPS, PRIOR_TOKENS = 256, 4.0
"""Compare confidence with what was accepted in about the last JUDGED_STEPS steps, and PRIOR_TOKENS that were right."""
TOKENS, SECONDS, LAST, COUNT = range(4)
"""Rows of what was measured of a size: its tokens and cost, the last step of it, and how many there were."""


@njit(allocates=False)
def allocate(confidence: Floats, starts: Ints, value: float, cost: Floats, bins: Floats, taken: Ints) -> float:
    """How many tokens of each draft to verify: those that lower the expected time most. O(D + NUM_BINS).

    Maximises the sum of confidence times value over the tokens taken, less what their number costs. Tokens are counted
    by confidence instead of sorted. As confidence never rises along a draft, taking the best tokens takes each draft's
    first ones; of those in the last bin the first requests' are taken.

    Args:
        confidence: float64 [D], from 0 to 1, never rising along a draft.
        starts: int64 [B + 1], each draft's first token, then D.
        value: Seconds that an accepted token saves.
        cost: float64 [>= 1], seconds that 0, 1, 2, ... draft tokens cost more than none, up to as many as are allowed.
        bins: float64 [2, NUM_BINS], filled with the number of tokens by confidence, and their summed confidence.
        taken: int64 [B], filled.

    Returns:
        The seconds that are expected to be gained.
    """
    bins[:] = 0.0
    for j in range(confidence.size):
        index = int(confidence[j] * (NUM_BINS - 1))
        bins[0, index] += 1.0
        bins[1, index] += confidence[j]
    best, last, left = 0.0, NUM_BINS, 0  # all tokens of better bins than `last` are taken, and `left` of its own
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
            index = int(confidence[j] * (NUM_BINS - 1))
            if index < last or (index == last and left == 0):
                break
            left -= index == last
            taken[i] += 1
    return best


class StepCost:
    """Seconds of an engine step by the tokens it computes, with and without drafts, from the steps themselves.

    Steps without drafts may be scheduled and run in other ways than those with, and have a curve of their own. Between
    sizes cost is interpolated. All of it follows from the observations alone: ranks that observe the same decide the
    same.
    """

    def __init__(self) -> None:
        self._now = 0
        self._sizes: Any = None
        self.pad_to(())

    def pad_to(self, sizes: tuple[int, ...]) -> None:
        """Say to which sizes steps are padded, for example those of CUDA graphs: cost is constant between them.

        Other sizes than before forget what was measured.

        Args:
            sizes: Empty: steps are not padded, as before the first call.
        """
        if self._sizes is not None and sorted(sizes) == self._sizes.tolist():
            return
        self._sizes = np.array(sorted(sizes), np.int64)
        # The most tokens of each bucket: what steps are padded to, then quarters of octaves.
        quarters = sorted({int(2 ** (n / 4)) for n in range(4 * 20)})
        self._limits = [*self._sizes.tolist(), *(limit for limit in quarters if limit > max(sizes, default=0))]
        self._measured = np.zeros((2, 4, len(self._limits)))  # without drafts, with; TOKENS, SECONDS, ...
        self._recent = np.zeros((2, len(self._limits), RECENT_STEPS, 2))  # tokens, seconds
        self._curve = np.empty((2, len(self._limits) + 1))  # scratch
        self._is_new = np.ones(LARGEST_SIZE + 1, np.bool_)  # numbers of tokens that no step has had

    def observe(self, num_tokens: int, seconds: float, *, drafted: bool) -> None:
        """Learn from one step. O(1).

        Args:
            num_tokens: All tokens that it computed.
            seconds: What it took, without the drafter's work.
            drafted: Whether any request had a draft.
        """
        self._now += 1
        padded = self._pad(num_tokens)
        measured, recent = self._measured[int(drafted)], self._recent[int(drafted)]
        self._is_new[min(padded, LARGEST_SIZE)] = False
        bucket = self._bucket(num_tokens)
        count = int(measured[COUNT, bucket])
        recent[bucket, count % RECENT_STEPS] = padded, seconds
        # By seconds per token, which can be compared between the numbers of tokens that share a bucket.
        steps = sorted(recent[bucket, : min(count + 1, RECENT_STEPS)].tolist(), key=lambda step: step[1] / step[0])
        measured[:, bucket] = *steps[len(steps) // 4], self._now, count + 1

    def is_awaited(self, num_tokens: int, *, drafted: bool) -> bool:
        """Whether the next decisions need to know what such a step took: it was measured rarely, or long ago. O(log).

        Args:
            num_tokens, drafted: As `observe` will be told.
        """
        if not drafted:
            return self.undrafted(num_tokens)[1]
        _, _, last, count = self._measured[1, :, self._bucket(num_tokens)]
        return bool(self._now > last + count**2 or not count)

    def undrafted(self, num_tokens: int) -> tuple[float, bool]:
        """What a step without drafts costs. O(sizes).

        Returns:
            (seconds, 0 before the first such step; whether it is time to measure steps of about this size).
        """
        return _undrafted(self._measured, self._now, self._pad(num_tokens), self._curve)  # type: ignore[no-any-return]

    def drafted(self, num_requests: int, num_tokens: int, undrafted: float, cost: Floats) -> tuple[float, bool]:
        """What draft tokens gain and cost: see `Budget.costs`. O(sizes + draft tokens).

        Args:
            undrafted: What the step costs without drafts.
            cost: float64 [>= 1], filled.

        Returns:
            (seconds that an accepted token saves, whether any cost of drafts is known).
        """
        return _price(  # type: ignore[no-any-return]
            self._measured, self._now, self._sizes, self._is_new, num_requests, num_tokens, undrafted, self._curve, cost
        )

    def _bucket(self, num_tokens: int) -> int:
        return min(bisect_left(self._limits, num_tokens), len(self._limits) - 1)

    def _pad(self, num_tokens: int) -> int:
        """The size to which a step of `num_tokens` is padded."""
        bucket = self._bucket(num_tokens)
        return self._limits[bucket] if bucket < self._sizes.size else num_tokens


@njit(allocates=False)
def _is_forgotten(seconds: float, count: float, age: float, base: float) -> bool:
    """Whether a size's cost no longer counts, `age` steps after the last of `count` steps of that size; see TRUST.

    Args:
        base: Seconds of a step without drafts.
    """
    patience = (count - 1.0 + ONCE) * min(seconds / base, MOST_PATIENCE)
    return seconds > base and age >= min(TRUST * patience**2, LONGEST_TRUST)


@njit(allocates=False)
def _draw(measured: Floats, now: int, above: int, n: int, base: float, curve: Floats) -> int:
    """Add the sizes of more than `above` tokens to a curve of `n`. Sizes rise, costs never fall.

    Args:
        measured: float64 [4, buckets], of `StepCost`.
        base: Seconds of a step without drafts, which sizes cost whose own cost is forgotten; infinite: none is.
        curve: float64 [2, > buckets], filled with each size's tokens and seconds.

    Returns:
        The number of sizes.
    """
    end = n
    for bucket in range(measured.shape[1]):
        end += measured[COUNT, bucket] > 0.0 and measured[TOKENS, bucket] > above
    least, at = math.inf, end
    for bucket in range(measured.shape[1] - 1, -1, -1):
        tokens, seconds = measured[TOKENS, bucket], measured[SECONDS, bucket]
        last, count = measured[LAST, bucket], measured[COUNT, bucket]
        if count > 0.0 and tokens > above:
            at -= 1
            if now - last < FRESH_STEPS:  # a larger step that took less: the smaller ones were held up
                least = min(least, seconds)
            seconds = min(seconds, least)
            curve[0, at], curve[1, at] = tokens, base if _is_forgotten(seconds, count, now - last, base) else seconds
    for i in range(max(n, 1), end):
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
def _undrafted(measured: Any, now: int, padded: int, curve: Floats) -> tuple[float, bool]:
    """See `StepCost.undrafted`."""
    total, count, last = 0.0, 0.0, 0.0
    for bucket in range(measured.shape[2]):
        total += measured[0, COUNT, bucket]
        if padded / 2 <= measured[0, TOKENS, bucket] <= 2 * padded:
            count += measured[0, COUNT, bucket]
            last = max(last, measured[0, LAST, bucket])
    is_due = total < MIN_OBSERVATIONS or now >= last + min(4 * count**2, MAX_UNDRAFTED_TRUST)
    n = _draw(measured[0], now, 0, 0, math.inf, curve)
    if n == 0:
        return 0.0, is_due
    at = 0
    while at < n and curve[0, at] < padded:
        at += 1
    return max(_interpolate(padded, at, n, curve), 1e-9), is_due


@njit(allocates=False)
def _price(
    measured: Any, now: int, sizes: Ints, is_new: Any, num_requests: int, num_tokens: int, undrafted: float,
    curve: Floats, cost: Floats,
) -> tuple[float, bool]:  # fmt: skip
    """See `StepCost.drafted`."""
    curve[0, 0], curve[1, 0] = num_tokens, undrafted
    n = _draw(measured[1], now, num_tokens, 1, undrafted, curve)
    new_size_cost = NEW_SIZE_COST * undrafted * min(FRESH_STEPS / max(now, 1), 1.0)
    cost[0], at, size = 0.0, 0, 0
    for i in range(1, cost.size):
        padded = num_tokens + i
        while size < sizes.size and sizes[size] < padded:
            size += 1
        if size < sizes.size:
            padded = sizes[size]
        while at < n and curve[0, at] < padded:
            at += 1
        cost[i] = max(_interpolate(padded, at, n, curve) - undrafted, 0.0)
        cost[i] += is_new[min(padded, LARGEST_SIZE)] * new_size_cost
    # Tokens of prompts are computed with or without drafts: what they cost, as far as is known, is not saved.
    per_token = min(max(_slope(0, n - 1, curve), 0.0), undrafted / num_tokens)
    return (undrafted - per_token * (num_tokens - num_requests)) / num_requests, n > 1


class Budget:
    """Decides, step by step, how many tokens of each draft an engine verifies, and whether to draft at all.

    For each step ask `wants_drafts`. If it does, draft, and cut the drafts by `trust`, `costs` and `allocate`; then
    `note` what that gains. Tell `observe_drafts` what became of them, and `observe_step` what the step took.

    Attributes:
        cost: What steps cost.
    """

    def __init__(self) -> None:
        self.cost = StepCost()
        self._expected = self._accepted = 0.0  # sums over the last steps
        self._is_known = False  # whether any cost of drafts is
        self._drafting: deque[float] = deque(maxlen=RECENT_DRAFTS)  # seconds per request
        self._draft_seconds = 0.0  # their lower decile
        self._balance = 0.0  # what drafts gain in a step less what drafting takes, on average
        self._undrafted = 0.0  # what the present step costs without drafts
        self._steps_to_skip = 0
        self._last_pause = 0

    @property
    def trust(self) -> float:
        """By this the drafts' confidence is multiplied: what was accepted of late over what was expected.

        1.0 for drafters that calibrate their confidence themselves, of which `observe_drafts` is told nothing.
        """
        return (self._accepted + PRIOR_TOKENS) / (self._expected + PRIOR_TOKENS)

    def observe_drafts(self, expected: float, accepted: float) -> None:
        """Learn what became of a step's drafts, of a drafter that does not do so itself. O(1).

        Args:
            expected: Summed confidence of the tokens that were verified.
            accepted: How many were accepted.
        """
        self._expected += expected
        self._accepted += accepted

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
        self._expected *= 1 - 1 / JUDGED_STEPS  # so that drafts that were wrong are tried again
        self._accepted *= 1 - 1 / JUDGED_STEPS
        self.cost.observe(num_tokens, max(seconds - draft_seconds, 0.0), drafted=drafted)
        if num_asked:
            self._drafting.append(draft_seconds / num_asked)
            if len(self._drafting) >= MIN_OBSERVATIONS:  # the first ones may compile something
                self._draft_seconds = sorted(self._drafting)[len(self._drafting) // 10]

    def wants_drafts(self, num_tokens: int) -> bool:
        """Whether to ask the drafter in this step. Where drafts do not pay for it, it is asked ever less often. O(1).

        Nor is it asked where a step of about this size without drafts was never timed, or long ago: this one is timed.

        Args:
            num_tokens: Tokens that the step computes without drafts: one per request, and those of prompts.
        """
        if self._steps_to_skip > 0:
            self._steps_to_skip -= 1
            return False
        self._undrafted, is_due = self.cost.undrafted(num_tokens)
        return not is_due

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
        value, self._is_known = self.cost.drafted(num_requests, num_tokens, self._undrafted, cost)
        return value, cost

    def note(self, num_requests: int, gain: float) -> None:
        """Remember whether drafts paid, and pause where they do not: while no cost is known, if none were worth it.

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
