"""Copies between the host and the device, and the times of a step's parts.

Nothing waits for the device before `HostCopy.read`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_spec.stats import SpeculationStats


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these numbers. The copy of one that is not pinned would wait for all that the device has to do."""
    is_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=is_cuda)


def upload(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A new array as a tensor on the device; the copy does not wait, as it comes from pinned memory."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class HostCopy:
    """One copy of several tensors, which begins when it is made and which nothing waits for until it is read.

    Each copy of its own would be a wait of its own, and a copy to memory that is not pinned waits at once. Tensors that
    are on the host are kept as they are: nothing may write to them before `read`.

    Args:
        tensors: Integer tensors on one device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._event: Any = None
        assert not any(tensor.is_floating_point() for tensor in tensors)
        if tensors[0].is_cuda:
            values = torch.cat([tensor.flatten() for tensor in tensors])
            pinned = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._tensors = pinned.split([tensor.numel() for tensor in tensors])
            self._event = torch.cuda.Event()
            self._event.record()

    def has_arrived(self) -> bool:
        """Whether `read` would return at once."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[NDArray[np.int64]]:
        """The tensors, flattened. Waits for the device if they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy().reshape(-1).astype(np.int64, copy=False) for tensor in self._tensors]


class StepClock:
    """Adds the times of each step's forward pass and verification to `stats`.

    Call `start` before the forward pass is prepared, `mark` before verification and `stop` after it. On a GPU each
    records an event in the stream, which is read once it has passed; the forward pass's time then includes the device's
    wait for its preparation. Steps without all three calls are not counted.

    Attributes:
        started: When the last step was started, by `time.perf_counter`.
    """

    def __init__(self, device: torch.device, stats: SpeculationStats) -> None:
        self._uses_events = device.type == "cuda"
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
