"""Notices when a worker gets new weights, in whichever way its trainer hands them over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORD_BYTES = 8


class WeightWatch:
    """Counts policy versions of one worker.

    Trainers load weights in many calls, one per parameter or per bucket, some announce what they do in others, and some
    load the same weights again before every generation. So calls only leave a mark. With the next step of the engine a
    version begins if a checksum of the model's parameters has changed. Tensor-parallel ranks get the same calls between
    the same steps, but hold different parts of the parameters: a version begins on all of them if one part has changed.

    Args:
        on_any_rank: See `ranks.agreeing_on_any`. None: there is a single rank.

    Attributes:
        version: Policy versions so far; 0 as long as the engine has the weights that it was built with.
    """

    def __init__(self, on_any_rank: Callable[[bool], bool] | None = None) -> None:
        self.version = 0
        self._on_any_rank = on_any_rank
        self._model: Any = None
        self._checksum: Any = None  # of the last version's parameters
        self._is_marked = False
        self._num_announced = 0

    def mark(self) -> None:
        """Weights may have been loaded. Where no model is watched, they have."""
        self._is_marked = True

    def announce(self, num_versions: int = 1) -> None:
        """There are new weights, in the parameters or elsewhere; several versions make older history go sooner."""
        self._num_announced = max(self._num_announced, num_versions)

    def watch(self, model: Any) -> None:
        """Compare this model's parameters from now on, which are those that the engine was built with.

        Also marks when `model.load_weights` is called, as TRL does without a method of the worker.
        """
        self._model, self._checksum = model, checksum(model)
        load_weights = getattr(model, "load_weights", None)
        if load_weights is None:
            return

        @functools.wraps(load_weights)
        def load_and_mark(*args: Any, **kwargs: Any) -> Any:
            self.mark()
            return load_weights(*args, **kwargs)

        model.load_weights = load_and_mark

    def begin_step(self) -> int | None:
        """The number of the policy version that begins with this step; None: it is still the last one's.

        Waits for the device if there is a mark.
        """
        if not self._is_marked and not self._num_announced:
            return None
        num_versions = max(self._num_announced, int(self._have_weights_changed()))
        self._is_marked, self._num_announced = False, 0
        self.version += num_versions
        return self.version if num_versions else None

    def _have_weights_changed(self) -> bool:
        """Whether the parameters are others than when this was last called, or first watched."""
        if self._model is None:
            return self._is_marked
        before, self._checksum = self._checksum, checksum(self._model)
        has_changed = not self._checksum.equal(before)
        return has_changed if self._on_any_rank is None else self._on_any_rank(has_changed)


@torch.no_grad()
def checksum(model: nn.Module) -> Tensor:
    """A number for each of a model's tensors, the sum of its bits as 64-bit words: int64 [tensors], on the host.

    These are the parameters and the buffers that a checkpoint holds; other buffers are computed from them, or change
    while the model runs. Each tensor is read once, where it is, and not copied unless its layout has gaps. Waits once
    for each device. The order of a tensor's words does not count.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    held = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)}
    for tensor in (part for whole in held.values() for part in _parts(whole)):
        sums.setdefault(tensor.device, []).append(_sum_of_bits(tensor))
    on_host = [torch.stack(of_device).cpu() for of_device in sums.values()]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *on_host])


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the bits: of quantised ones, for example, values and scales."""
    if not hasattr(tensor, "__tensor_flatten__"):
        if not tensor.is_meta:
            yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _parts(getattr(tensor, name))


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of a tensor's 64-bit words, int64 []; the last one is filled up with zeros."""
    in_memory = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    data = tensor.detach().permute(in_memory).contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % WORD_BYTES:
        data = data.clone()
    end = data.numel() // WORD_BYTES * WORD_BYTES
    total = data[:end].view(torch.int64).sum()
    if end < data.numel():
        total = total + functional.pad(data[end:], (0, end + WORD_BYTES - data.numel())).view(torch.int64).sum()
    return total
