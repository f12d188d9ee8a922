"""What drafts gain in a run, measured: some generations are sampled without drafts and timed beside their neighbours.

Rollouts are the same with and without drafts, so those of such a generation are used like all others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
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
    low: float | None
    """Its 90 % interval, by Student's t of the logarithms; None of fewer than `FEWEST` comparisons."""
    high: float | None
    generations: int
    """Without drafts that were compared, so far."""


class _Generation(NamedTuple):
    num_requests: int
    log_seconds: float
    """Per token, the logarithm."""


@dataclass
class _Turn:
    """The generations that are the same turn of their steps."""

    number: int = 0
    """Of its next generation."""
    before: _Generation | None = None
    plain: _Generation | None = None
    """One without drafts, and what came before it is comparable."""


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
        self._turns: defaultdict[int, _Turn] = defaultdict(_Turn)
        self._logs: list[float] = []

    def is_plain(self, turn: int = 0) -> bool:
        """Whether the next generation that is this turn of its step shall have no drafts."""
        return self._turns[turn].number % self.every == self.every - 1

    def observe(self, num_requests: int, num_tokens: int, seconds: float, turn: int = 0) -> None:
        """A generation has ended, which was this turn of its step."""
        was_plain, of_turn = self.is_plain(turn), self._turns[turn]
        of_turn.number += 1
        if not num_tokens:
            of_turn.before = of_turn.plain = None
            return
        now, before, plain = _Generation(num_requests, math.log(seconds / num_tokens)), of_turn.before, of_turn.plain
        if was_plain:
            of_turn.plain = now if before is not None and before.num_requests == num_requests else None
            return
        if plain is not None and before is not None and plain.num_requests == num_requests:
            self._logs.append(plain.log_seconds - (before.log_seconds + now.log_seconds) / 2)
        of_turn.before, of_turn.plain = now, None

    def forget(self) -> None:
        """What comes next is not compared with what was before."""
        for of_turn in self._turns.values():
            of_turn.before = of_turn.plain = None

    def measured(self) -> Measured | None:
        """None before the first comparison."""
        if not self._logs:
            return None
        mean, count = fmean(self._logs), len(self._logs)
        if count < FEWEST:
            return Measured(math.exp(mean), None, None, count)
        half = T_90[min(count - FEWEST, len(T_90) - 1)] * stdev(self._logs) / math.sqrt(count)
        return Measured(math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)
