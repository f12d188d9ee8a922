"""How many forward passes a step of vLLM's scheduler has, from what they take: `NumPasses`.

Between two steps the host schedules, prepares inputs and reads outputs, for which a GPU that runs a small model waits.
Where nothing but decoding happens a step can have several forward passes, which pay for that once. More of them gain
little once the GPU has no time left to wait, and cost what they compute for requests that have ended in an earlier
one. So a step has as few as are nearly the fastest, by the time that a pass takes.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from statistics import median

AUTO_SUB_STEPS, MAX_SUB_STEPS = 4, 8
"""Most passes of a step where the number is chosen here, and where a user sets it."""
SIZES_PER_DOUBLING = 2
"""Sizes per doubling of the number of requests. Steps of one size are taken to be alike."""
WORTH_IT = 1.03
"""More passes have to be this many times as fast, each."""
TRIAL, RECENT_STEPS, MOST_TRIALS = 5, 16, 2
"""A number is tried for TRIAL steps in a row, of which two can be timed, and takes the median of its last RECENT_STEPS.
One of which no step could be timed is tried at most MOST_TRIALS times."""
PATIENCE = 64
"""A number with which a pass takes r times as long as with the best is tried again after PATIENCE r² steps."""


class NumPasses:
    """Chooses the number of passes, for each number of requests, and for steps with drafts and without.

    A new size begins with what was best in the last one, if possible of steps that had drafts or none like its own.

    Args:
        most: The largest number; it and the powers of two below it are tried.

    Attributes:
        is_trial: Whether the number that was chosen last is being tried.
    """

    def __init__(self, most: int = AUTO_SUB_STEPS) -> None:
        self.is_trial = False
        self._candidates = [n for n in (1, 2, 4) if n <= most]
        self._sizes: dict[tuple[int, bool], _Size] = {}
        self._last: dict[bool, _Size] = {}

    def choose(self, num_requests: int, has_drafts: bool) -> int:
        """How many passes the next step of so many requests shall have. O(RECENT_STEPS log RECENT_STEPS)."""
        size = self._size(num_requests, has_drafts)
        n = size.choose()
        self.is_trial = n != size.best
        return n

    def observe(self, num_requests: int, has_drafts: bool, num_passes: int, seconds: float) -> None:
        """Learn what a step took that had so many passes, and steps like it before and after it."""
        if num_passes in self._candidates:
            self._size(num_requests, has_drafts).seconds[num_passes].append(seconds / num_passes)

    def _size(self, num_requests: int, has_drafts: bool) -> _Size:
        name = round(SIZES_PER_DOUBLING * math.log2(num_requests)), has_drafts
        if name not in self._sizes:
            last = self._last.get(has_drafts, self._last.get(not has_drafts))
            self._sizes[name] = _Size(self._candidates, last)
        self._last[has_drafts] = self._sizes[name]
        return self._sizes[name]


class _Size:
    """Steps of about as many requests.

    Args:
        last: The size that a new one begins like.

    Attributes:
        best: The number of passes that is used unless another is tried.
        seconds: What a pass took in the last steps, by their number of passes.
    """

    def __init__(self, candidates: list[int], last: _Size | None) -> None:
        self.seconds = {n: deque[float](maxlen=RECENT_STEPS) for n in candidates}
        self.best: int = candidates[min(1, len(candidates) - 1)] if last is None else last.best
        # Than with the best, as far as is known.
        self._times_worse: dict[int, float] = {} if last is None else dict(last._times_worse)
        self._num_steps, self._num_left, self._tried = 0, 0, 0
        self._num_trials, self._last_trial = Counter[int](), Counter[int]()

    def choose(self) -> int:
        """The best, or one that is tried."""
        self._num_steps += 1
        if self._num_left:
            self._num_left -= 1
            return self._tried
        self._compare()
        for n in self.seconds if self.seconds[self.best] else ():
            is_unknown = n not in self._times_worse and self._num_trials[n] < MOST_TRIALS
            waited = self._num_steps - self._last_trial[n]
            if n != self.best and (is_unknown or waited > PATIENCE * self._times_worse.get(n, 1.0) ** 2):
                self._tried, self._num_left, self._last_trial[n] = n, TRIAL - 1, self._num_steps + TRIAL
                self._num_trials[n] += 1
                self.seconds[n].clear()
                return n
        return self.best

    def _compare(self) -> None:
        known = {n: median(seconds) for n, seconds in self.seconds.items() if seconds}
        if self.best not in known or len(known) == 1:
            return
        fastest = min(known.values())
        self.best = next(n for n, seconds in known.items() if seconds <= WORTH_IT * fastest)
        self._times_worse |= {n: max(1.0, seconds / known[self.best]) for n, seconds in known.items()}
