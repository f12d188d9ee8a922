"""Signatures of hidden states, computed where these are.

Nothing here waits for the device, but the first signatures of a model: `prepare` is called before it serves.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from rollout_spec.features import signature_matrix


@functools.lru_cache(maxsize=4)
def _matrix(hidden_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(signature_matrix(hidden_size)).to(device, dtype)


def prepare(hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Make the matrix of random projections and copy it to the device."""
    _matrix(hidden_size, dtype if device.type == "cuda" else torch.float32, device)


def project(hidden: Tensor) -> Tensor:
    """Random projections of states, [N, SIGNATURE_BITS], of which signatures keep the signs: one product.

    In the states' own dtype on a GPU. In bfloat16 six signs in ten thousand differ from those in float32.
    """
    if not hidden.is_cuda:
        hidden = hidden.float()
    return hidden @ _matrix(hidden.shape[1], hidden.dtype, hidden.device)


def pack_signatures(hidden: Tensor) -> Tensor:
    """The first words of the features, on the CPU: float [N, H] to int64 [N, SIGNATURE_WORDS]."""
    signs = project(hidden).numpy() > 0
    return torch.from_numpy(np.packbits(signs, axis=1, bitorder="little").view(np.int64))
