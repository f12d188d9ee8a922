"""What drafts gain in a run, measured: some generations are sampled without drafts and timed beside their neighbours.

Rollouts are the same with and without drafts, so those of such a generation are used like all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

T_90 = 6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83
"""Two-sided 90 % quantiles of Student's t for 1, 2, ... degrees of freedom; more are taken for the last."""


class Measured(NamedTuple):
    """How many times as fast generations are with drafts."""

    speedup: float
    """Geometric mean."""
    low: float | None
    """Its 90 % interval, by Student's t of the logarithms; None if only one generation was compared."""
    high: float | None
    generations: int
    """Without drafts, so far."""


class _Generation(NamedTuple):
    kind: tuple[int, int]
    """Requests, and the generation's number in its step: later turns have longer prompts."""
    log_seconds: float
    """Per token, the logarithm."""


class Comparison:
    """Compares every n-th generation, without drafts, with the one before and the one after it, per token.

    Which generations these are does not depend on what they say, so the mean is not biased. Neighbours with another
    number of requests, or that are another turn of their step, are not compared with, as steps cost more or less then.
    That the machine or the rollouts change slowly does not matter, as the one before and the one after count equally.

    Args:
        every: n, 3 or more, so that no generation is the neighbour of two, and comparisons are independent.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._number = 0
        self._before: _Generation | None = None
        self._plain: _Generation | None = None  # one without drafts, and what came before it is comparable
        self._logs: list[float] = []

    @property
    def is_plain(self) -> bool:
        """Whether the next generation shall have no drafts."""
        return self._number % self._every == self._every - 1

    def observe(self, num_requests: int, num_tokens: int, seconds: float, *, number_in_step: int = 0) -> None:
        """The next generation has ended."""
        was_plain, self._number = self.is_plain, self._number + 1
        if not num_tokens:
            self.forget()
            return
        now = _Generation((num_requests, number_in_step), math.log(seconds / num_tokens))
        if was_plain:
            self._plain = now if self._before is not None and self._before.kind == now.kind else None
            return
        if self._plain is not None and self._before is not None and self._plain.kind == now.kind:
            self._logs.append(self._plain.log_seconds - (self._before.log_seconds + now.log_seconds) / 2)
        self._before, self._plain = now, None

    def forget(self) -> None:
        """What comes next is not compared with what was before."""
        self._before = self._plain = None

    def measured(self) -> Measured | None:
        """None before the first comparison."""
        return _summary(self._logs) if self._logs else None


def _summary(logs: Sequence[float]) -> Measured:
    mean, count = fmean(logs), len(logs)
    if count == 1:
        return Measured(math.exp(mean), None, None, 1)
    half = T_90[min(count - 1, len(T_90)) - 1] * stdev(logs) / math.sqrt(count)
    return Measured(math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)
