"""Copies between the host and a device. Nothing waits for the device before `HostCopy.read`.

A copy from or to memory that is not pinned would wait for all that the device has been given to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def runs_later(device: torch.device) -> bool:
    """Whether the host goes on while the device does what it was given."""
    return device.type == "cuda"


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """A new array as a tensor on the device."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if runs_later(device) else tensor


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy on the host. Read it once an event after it has passed."""
    is_later = runs_later(tensor.device)
    return torch.empty_like(tensor, device="cpu", pin_memory=is_later).copy_(tensor, non_blocking=is_later)


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] on the host, all 0, into which a copy from the device does not make the host wait."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=runs_later(device))


class HostCopy:
    """Copies several tensors to the host at once. The copy begins now, and `read` waits for it.

    Tensors that are on the host are kept as they are: nothing may write to them before `read`.

    Args:
        tensors: Integer tensors on one device.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._event: Any = None
        assert not any(tensor.is_floating_point() for tensor in tensors)
        if runs_later(tensors[0].device):
            values = copy_to_host(torch.cat([tensor.flatten() for tensor in tensors]))
            self._tensors = values.split([tensor.numel() for tensor in tensors])
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
