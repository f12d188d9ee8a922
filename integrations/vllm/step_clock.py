"""The times of a step's parts."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from rollout_spec.stats import SpeculationStats
from rollout_spec.transfers import runs_later


class StepClock:
    """Adds the times of each step's forward pass and verification to `stats`.

    Call `start` before the forward pass is prepared, `mark` before verification and `stop` after it. On a GPU each
    records an event in the stream, which is read once it has passed; the forward pass's time then includes the device's
    wait for its preparation. Steps without all three calls are not counted.

    Attributes:
        started: When the last step was started, by `time.perf_counter`.
    """

    def __init__(self, device: torch.device, stats: SpeculationStats) -> None:
        self._uses_events = runs_later(device)
        self._stats = stats
        self.started = 0.0
        self._marks: list[Any] = []
        self._unread: deque[list[Any]] = deque()

    def start(self) -> None:
        """A step begins."""
        self.started = time.perf_counter()
        self._marks = [self._now()]

    def mark(self) -> None:
        """Verification begins."""
        self._marks.append(self._now())

    def stop(self) -> None:
        """Verification has ended, or its work has been launched."""
        self.mark()
        if len(self._marks) == 3:
            self._unread.append(self._marks)
        self._marks = []
        self.read()

    def read(self) -> None:
        """Count the steps that the device has finished."""
        while self._unread:
            started, marked, stopped = self._unread[0]
            if self._uses_events and not stopped.query():
                return
            self._unread.popleft()
            self._stats.forward_seconds += self._between(started, marked)
            self._stats.verify_seconds += self._between(marked, stopped)

    def _now(self) -> Any:
        if not self._uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, earlier: Any, later: Any) -> float:
        return earlier.elapsed_time(later) / 1e3 if self._uses_events else later - earlier
