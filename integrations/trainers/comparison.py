"""What drafts gain in a run, measured: some generations are sampled without drafts and timed beside their neighbours.

Rollouts are the same with and without drafts, so those of such a generation are used like all others.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from statistics import fmean, stdev
from typing import NamedTuple

FEWEST = 5
"""Comparisons for an interval: of two it may reach from 0 to 100."""
T_90 = 2.13, 2.02, 1.94, 1.89, 1.86, 1.83
"""Two-sided 90 % quantiles of Student's t for `FEWEST` comparisons and more; yet more are taken for the last."""


class Measured(NamedTuple):
    """How many times as fast generations are with drafts."""

    speedup: float
    """Geometric mean."""
    speedup_low: float | None
    """Its 90 % interval, by Student's t of the logarithms; None of fewer than `FEWEST` comparisons."""
    speedup_high: float | None
    generations: int
    """Without drafts that were compared, so far."""


class _Generation(NamedTuple):
    num_requests: int
    log_seconds: float
    """Per token, the logarithm."""
    is_plain: bool
    """Whether it had no drafts."""


class Comparison:
    """Compares every n-th generation, without drafts, with the one before and the one after it, per token.

    Which generations these are does not depend on what they say, so the mean is not biased. Neighbours with another
    number of requests are not compared with, as steps cost more or less then. Where steps have several generations,
    each turn is compared with the same turn of other steps, as later ones have longer prompts. That the machine or the
    rollouts change slowly does not matter, as the one before and the one after count equally.

    Args:
        every: n, 3 or more, so that no generation is the neighbour of two, and comparisons are independent.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._num_seen: Counter[int] = Counter()  # generations, by turn
        self._last: defaultdict[int, deque[_Generation]] = defaultdict(lambda: deque(maxlen=3))  # by turn
        self._logs: list[float] = []

    def is_plain(self, turn: int = 0) -> bool:
        """Whether the next generation that is this turn of its step shall have no drafts."""
        return self._num_seen[turn] % self.every == self.every - 1

    def observe(self, num_requests: int, num_tokens: int, seconds: float, turn: int = 0) -> None:
        """A generation has ended, which was this turn of its step."""
        was_plain, last = self.is_plain(turn), self._last[turn]
        self._num_seen[turn] += 1
        if not num_tokens:
            last.clear()
            return
        last.append(_Generation(num_requests, math.log(seconds / num_tokens), was_plain))
        if len(last) == 3 and last[1].is_plain and len({generation.num_requests for generation in last}) == 1:
            before, plain, after = (generation.log_seconds for generation in last)
            self._logs.append(plain - (before + after) / 2)

    def forget(self) -> None:
        """What comes next is not compared with what was before."""
        self._last.clear()

    def measured(self) -> Measured | None:
        """None before the first comparison."""
        if not self._logs:
            return None
        mean, count = fmean(self._logs), len(self._logs)
        if count < FEWEST:
            return Measured(math.exp(mean), None, None, count)
        half = T_90[min(count - FEWEST, len(T_90) - 1)] * stdev(self._logs) / math.sqrt(count)
        return Measured(math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)
