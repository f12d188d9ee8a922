"""Tells whether a model's weights have changed, without a copy of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

WORD_BYTES = 8


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
