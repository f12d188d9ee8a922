"""What a step takes the host: drafts fill the time for which the device would wait for it.

A host that schedules, prepares and launches steps, and reads what they sampled, takes milliseconds for each, and more
for many requests. A GPU that needs less waits for it: with 64 requests of a 1.5B model and drafts, an H100 computed for
3.3 of 10 ms (experiments/results/README.md). Until the device has as much to do as the host, verifying a further draft
token takes no time at all. vLLM's adaptive verification does not know that, as it weighs the device's time alone.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

STEPS = 16
"""The host's time is the median of this many steps, so that prompts and ending requests do not count."""


class HostTime:
    """Measures the time from one step's launch to the next one's, per forward pass, if the device was idle at both.

    If it was not, the host may have waited for it: then this time is an upper bound. Steps in which nothing is drafted
    do not count.

    Args:
        device_waits: Whether the device has finished the step before.
        share: Gives all tensor-parallel ranks the first one's object; None for a single rank.

    Attributes:
        milliseconds: The host's time for a pass, 0 while it is not known.
        is_step: Whether the last launch was that of a step with drafts for the next one.
    """

    def __init__(self, device_waits: Callable[[], bool], share: Callable[[Any], Any] | None) -> None:
        self.milliseconds = 0.0
        self.is_step = False
        self._device_waits, self._share = device_waits, share
        self._launched = 0.0
        self._waited = False  # whether the device was idle at the last launch
        self._last: deque[float] = deque(maxlen=STEPS)
        self._num_decisions = 0
        self._num_passes = 1

    def launch(self, num_passes: int = 1) -> None:
        """The first forward pass of a step is about to be launched. num_passes: How many the step has."""
        now, waits = time.perf_counter(), self._device_waits()
        took = (now - self._launched) * 1e3 / self._num_passes
        if self.is_step and waits and self._waited:
            self._last.append(took)
        elif self.is_step:
            self._last = deque((min(before, took) for before in self._last), STEPS)
        # A step without drafts records no event, so what `waits` says is of an earlier step.
        self._launched, self._waited, self.is_step = now, waits and self.is_step, False
        self._num_passes = num_passes

    def for_next_step(self) -> float:
        """Milliseconds, which change once in STEPS steps: all ranks ask in the same step."""
        if self._num_decisions % STEPS == 0:
            median = statistics.median(self._last) if self._last else 0.0
            self.milliseconds = self._share(median) if self._share else median
        self._num_decisions += 1
        return self.milliseconds
