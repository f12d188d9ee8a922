"""The noise of `host.py` as torch tensors, on CPUs and CUDA devices: its hash takes int64 tensors like NumPy arrays."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_spec.noise.host import DOMAIN_TARGET, MAX_UNIFORM, hash_words

GUMBEL_TOLERANCE = 4e-6
"""Largest absolute difference to the host's `gumbel`, from float32 logarithms: two units in the last place of the
largest noise."""


def uniform32(seeds: Tensor, positions: Tensor, tokens: int | Tensor, *, domain: int = DOMAIN_TARGET) -> Tensor:
    """Uniform noise in (0, 1], float32 [N, V] or [N, K], with the same bits as the host's.

    Args:
        seeds, positions: int64 [N], on one device.
        tokens: A vocabulary size V for tokens 0 … V - 1, or int32/int64 [K] for the same tokens in all rows, or
            [N, K].
        domain: The stream.
    """
    tokens = torch.arange(tokens, device=seeds.device) if isinstance(tokens, int) else tokens.long()
    hashes: Tensor = hash_words(seeds[:, None], positions[:, None], tokens, domain)
    return hashes.double().add_(0.5).mul_(2.0**-32).float()  # exact until it is rounded, once


def gumbel(seeds: Tensor, positions: Tensor, tokens: int | Tensor, *, domain: int = DOMAIN_TARGET) -> Tensor:
    """Gumbel(0, 1) noise, float32; arguments as `uniform32`. Each row's bits are the same whatever the others are."""
    uniform = uniform32(seeds, positions, tokens, domain=domain)
    return uniform.clamp_(max=MAX_UNIFORM).neg_().log1p_().neg_().log_().neg_()
