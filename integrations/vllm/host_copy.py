"""Copies between the host and the device that nothing waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these numbers. The copy of one that is not pinned would wait for all that the device has to do."""
    is_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=is_cuda)


class HostCopy:
    """One copy of several tensors, which begins when it is made and which nothing waits for until it is read.

    Each copy of its own would be a wait of its own, and a copy to memory that is not pinned waits at once.

    Args:
        tensors: Integer tensors on one device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sizes = [tensor.numel() for tensor in tensors]
        self._values = torch.cat([tensor.flatten() for tensor in tensors])
        self._event: Any = None
        if self._values.is_cuda:
            pinned = torch.empty_like(self._values, device="cpu", pin_memory=True)
            self._values = pinned.copy_(self._values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        elif self._values.device.type != "cpu":
            self._values = self._values.cpu()

    def has_arrived(self) -> bool:
        """Whether `read` would return at once."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[NDArray[Any]]:
        """The tensors, flattened. Waits for the device if they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
        return [part.numpy() for part in self._values.split(self._sizes)]
