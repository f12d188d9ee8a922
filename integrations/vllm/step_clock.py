"""How much of a step the device works, and how much it waits for the host."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from rollout_spec.stats import SpeculationStats
from rollout_spec.transfers import runs_later

STEPS_PER_TIMED = 16
"""One step in so many is timed: on a GPU that takes two events."""


class StepClock:
    """Adds the times of some steps to `stats`: of the whole step, and of the device's part of it.

    Call `start` before the forward pass is prepared and `stop` after verification. On a GPU both record an event in the
    stream, which is read once it has passed; the device's part then includes its wait for that preparation.
    """

    def __init__(self, device: torch.device, stats: SpeculationStats) -> None:
        self._uses_events = runs_later(device)
        self._stats = stats
        self._started = 0.0
        self._num_steps = 0
        self._marks: list[Any] = []  # of the step that is timed
        self._num_passes = 1  # of that step
        self._unread: deque[tuple[Any, Any, float, int]] = deque()

    def start(self, *, is_busy: bool, num_passes: int) -> None:
        """A step begins.

        Args:
            is_busy: Whether a request of the last step goes on, so that the engine has not been idle since.
            num_passes: Its forward passes, which count as steps.
        """
        last, self._started = self._started, time.perf_counter()
        if len(self._marks) == 2 and is_busy:
            began, ended = self._marks
            self._unread.append((began, ended, self._started - last, self._num_passes))
        self._num_steps, self._num_passes = self._num_steps + 1, num_passes
        self._marks = [] if self._num_steps % STEPS_PER_TIMED else [self._now()]
        self.read()

    def stop(self) -> None:
        """The last pass's verification has ended, or its work has been launched."""
        if len(self._marks) == 1:
            self._marks.append(self._now())

    def read(self) -> None:
        """Count the steps that the device has finished."""
        while self._unread and (not self._uses_events or self._unread[0][1].query()):
            began, ended, seconds, num_passes = self._unread.popleft()
            self._stats.timed_steps += num_passes
            self._stats.step_seconds += seconds
            self._stats.device_seconds += began.elapsed_time(ended) / 1e3 if self._uses_events else ended - began

    def _now(self) -> Any:
        if not self._uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
