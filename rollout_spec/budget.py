"""How many tokens of each draft on the host are worth verifying: the rule of `schedule.py`, by times of the steps.

`allocate` takes the draft tokens whose expected gain exceeds their cost. The gain of one is the probability that it is
reached and accepted times what an accepted token saves, a request's share of a step without drafts. What a step takes
by the tokens in it is measured on the steps themselves (`StepTimes`).

Budgets change which tokens are verified, never which are sampled.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque

import numpy as np
from numpy.typing import NDArray

from rollout_spec.jit import njit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_BINS = 1024
"""Draft tokens whose confidence differs by less than 1 / NUM_BINS are worth the same."""
RECENT_STEPS, FRESH_STEPS = 5, 512
"""A size takes what the second fastest of its last RECENT_STEPS steps took, of fewer than four the fastest: other work
makes steps longer, never shorter. It takes no longer than a larger size of the last FRESH_STEPS steps."""
TRUST, ONCE, MOST_PATIENCE, LONGEST_TRUST = 12, 0.25, 4.0, 3072
"""A size is forgotten after TRUST (m p)² steps, at most LONGEST_TRUST, and tried again. m: measurements - 1 + ONCE, so
a single one, which may have been held up, is soon repeated. p: its time over that of a step without drafts, at most
MOST_PATIENCE, so expensive sizes are tried less often."""
ENOUGH, LONGEST_UNDRAFTED = 3, 128
"""Steps without drafts are measured until there are ENOUGH, and again after LONGEST_UNDRAFTED steps at the latest."""
NEW_SIZE_COST, LARGEST_SIZE = 0.3, 8192
"""The first step of each number of tokens is charged this share of a step without drafts on top, as a CPU makes kernels
for it; after FRESH_STEPS steps the charge falls. Numbers above LARGEST_SIZE count as one."""
LONGEST_SLEEP = 32
"""Most steps in a row in which a drafter whose drafts do not pay is not asked."""
RECENT_DRAFTS, AVERAGE_WEIGHT = 32, 1 / 32
"""Drafting takes the lower decile of its last RECENT_DRAFTS calls. AVERAGE_WEIGHT: of the last step in averages."""
JUDGED_STEPS, PRIOR_TOKENS = 256, 4.0
"""Compare confidence with what was accepted in about the last JUDGED_STEPS steps, and PRIOR_TOKENS that were right."""


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


class _Size:
    """Steps of about as many tokens. Attributes: what they take, the last one's number, and how many there were."""

    def __init__(self) -> None:
        self.tokens, self.seconds, self.last, self.count = 0, 0.0, 0, 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)

    def observe(self, tokens: int, seconds: float, now: int) -> None:
        self._recent.append((tokens, seconds))
        # By seconds per token, which can be compared between the numbers of tokens that share a size.
        steps = sorted(self._recent, key=lambda step: step[1] / step[0])
        self.tokens, self.seconds = steps[len(steps) // 4]
        self.last, self.count = now, self.count + 1


class StepTimes:
    """Seconds of an engine step by the tokens it computes, with and without drafts, from the steps themselves.

    Steps without drafts may be scheduled and run in other ways than those with, and have a curve of their own. Between
    sizes cost is interpolated. All of it follows from the observations alone: ranks that observe the same decide the
    same.
    """

    def __init__(self) -> None:
        self.now = 0
        self._padded: list[int] | None = None
        self.pad_to(())

    def pad_to(self, sizes: tuple[int, ...]) -> None:
        """Say to which sizes steps are padded, as by CUDA graphs. Other sizes than before forget what was measured."""
        if self._padded == sorted(sizes):
            return
        self._padded = sorted(sizes)
        quarters = sorted({int(2 ** (n / 4)) for n in range(4 * 20)})  # of octaves, above what is padded
        self._limits = [*self._padded, *(limit for limit in quarters if limit > max(sizes, default=0))]
        self._sizes: tuple[dict[int, _Size], ...] = {}, {}  # without drafts, with; by bucket
        self._is_new = np.ones(LARGEST_SIZE + 1, np.bool_)  # numbers of tokens that no step has had

    def observe(self, num_tokens: int, seconds: float, *, drafted: bool) -> None:
        """Learn from one step of `num_tokens` in all. seconds: Without the drafter's work. O(1)."""
        self.now += 1
        bucket = self._bucket(num_tokens)
        padded = self._pad(np.array([num_tokens]))[0]
        self._is_new[min(padded, LARGEST_SIZE)] = False
        self._sizes[drafted].setdefault(bucket, _Size()).observe(padded, seconds, self.now)

    def is_awaited(self, num_tokens: int, *, drafted: bool) -> bool:
        """Whether the next decisions need to know what such a step took: it was measured rarely, or long ago."""
        if not drafted:
            return self.wants_undrafted(num_tokens)
        size = self._sizes[True].get(self._bucket(num_tokens))
        return size is None or self.now > size.last + size.count**2

    def wants_undrafted(self, num_tokens: int) -> bool:
        """Whether to measure steps of about this size without drafts now. O(sizes)."""
        sizes, padded = self._sizes[False].values(), self._pad(np.array([num_tokens]))[0]
        alike = [size for size in sizes if padded / 2 <= size.tokens <= 2 * padded]
        count, last = sum(size.count for size in alike), max((size.last for size in alike), default=0)
        return sum(s.count for s in sizes) < ENOUGH or self.now >= last + min(4 * count**2, LONGEST_UNDRAFTED)

    def undrafted(self, num_tokens: int) -> float:
        """Seconds of a step without drafts, of which some are known. O(sizes)."""
        return max(float(_interpolate(self._pad(np.array([num_tokens])), *self._curve(False, 0, math.inf))[0]), 1e-9)

    def drafted(self, num_tokens: int, most: int) -> tuple[Floats, float, bool, float]:
        """What 0, 1, ... `most` draft tokens cost beside `num_tokens` others. O(sizes + most).

        Returns:
            (seconds float64 [most + 1], those of a token, whether any cost of drafts is known, `undrafted`).
        """
        base = self.undrafted(num_tokens)
        tokens, seconds = self._curve(True, num_tokens, base)
        tokens, seconds = np.append(num_tokens, tokens), np.maximum(np.append(base, seconds), base)
        padded = self._pad(num_tokens + np.arange(most + 1))
        cost = np.maximum(_interpolate(padded, tokens, seconds) - base, 0.0)
        price = NEW_SIZE_COST * base * min(FRESH_STEPS / max(self.now, 1), 1.0)
        cost += price * self._is_new[np.minimum(padded, LARGEST_SIZE)]
        cost[0] = 0.0
        return cost, _slope(tokens, seconds), tokens.size > 1, base

    def _curve(self, drafted: bool, above: int, base: float) -> tuple[Floats, Floats]:
        """The sizes of more than `above` tokens, rising, and their seconds, which never fall.

        Args:
            base: Seconds of a step without drafts, which forgotten sizes count as; infinite: none is.
        """
        curve, least = [], math.inf
        for _, size in sorted(self._sizes[drafted].items(), reverse=True):
            if size.tokens > above:
                age = self.now - size.last
                if age < FRESH_STEPS:  # a larger step that took less: the smaller ones were held up
                    least = min(least, size.seconds)
                seconds = min(size.seconds, least)
                patience = (size.count - 1 + ONCE) * min(seconds / base, MOST_PATIENCE)
                is_forgotten = seconds > base and age >= min(TRUST * patience**2, LONGEST_TRUST)
                curve.append((size.tokens, base if is_forgotten else seconds))
        tokens, seconds_of = np.array(curve[::-1], np.float64).reshape(-1, 2).T
        return tokens, np.maximum.accumulate(seconds_of)

    def _bucket(self, num_tokens: int) -> int:
        return min(bisect_left(self._limits, num_tokens), len(self._limits) - 1)

    def _pad(self, num_tokens: Ints) -> Ints:
        """The sizes to which steps are padded, int64 [N]."""
        if not self._padded:
            return num_tokens
        index = np.searchsorted(self._padded, num_tokens)
        return np.where(index < len(self._padded), np.append(self._padded, 0)[index], num_tokens)


def _slope(tokens: Floats, seconds: Floats) -> float:
    """Seconds per token over a whole curve, 0 of a single size."""
    return float((seconds[-1] - seconds[0]) / (tokens[-1] - tokens[0])) if tokens.size > 1 else 0.0


def _interpolate(wanted: Ints, tokens: Floats, seconds: Floats) -> Floats:
    """Seconds of `wanted` tokens. Beyond a curve's ends by its average slope."""
    outside = np.minimum(wanted - tokens[0], 0.0) + np.maximum(wanted - tokens[-1], 0.0)
    return np.interp(wanted, tokens, seconds) + _slope(tokens, seconds) * outside


class Budget:
    """Decides, step by step, how many tokens of each draft an engine verifies, and whether to draft at all.

    For each step ask `wants_drafts`. If it does, draft, and cut the drafts by `trust`, `costs` and `allocate`; then
    `note` what that gains. Tell `observe_drafts` what became of them, and `observe_step` what the step took.

    Attributes:
        times: What steps take.
    """

    def __init__(self) -> None:
        self.times = StepTimes()
        self._expected = self._accepted = 0.0  # sums over the last steps
        self._is_known = False  # whether any cost of drafts is
        self._drafting: deque[float] = deque(maxlen=RECENT_DRAFTS)  # seconds per request
        self._draft_seconds = 0.0  # their lower decile
        self._balance = 0.0  # what drafts gain in a step less what drafting takes, on average
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
        self.times.observe(num_tokens, max(seconds - draft_seconds, 0.0), drafted=drafted)
        if num_asked:
            self._drafting.append(draft_seconds / num_asked)
            if len(self._drafting) >= ENOUGH:  # the first ones may compile something
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
        return not self.times.wants_undrafted(num_tokens)

    def costs(self, num_requests: int, num_tokens: int, max_draft_tokens: int) -> tuple[float, Floats]:
        """What draft tokens gain and cost in a step for which `wants_drafts` said True. O(max_draft_tokens).

        Args:
            num_requests: Those that are drafted for.
            num_tokens: As `wants_drafts` was told.
            max_draft_tokens: Most tokens of all drafts together.

        Returns:
            `value` and `cost` of `allocate`.
        """
        cost, per_token, self._is_known, undrafted = self.times.drafted(num_tokens, max_draft_tokens)
        # Tokens of prompts are computed with or without drafts: what they cost, as far as is known, is not saved.
        of_prompts = min(max(per_token, 0.0), undrafted / num_tokens) * (num_tokens - num_requests)
        return (undrafted - of_prompts) / num_requests, cost

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
