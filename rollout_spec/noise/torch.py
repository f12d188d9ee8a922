"""The noise of `rollout_spec.noise` as torch tensors, on any device.

Hash and uniform have the same bits as in NumPy. The Gumbel noise goes through the device's float32 logarithms: it
differs from NumPy's (float64, rounded once) by at most 4e-6 (`GUMBEL_TOLERANCE`), two units in the last place of the
largest noise.

torch has no unsigned 32-bit arithmetic: the hash runs in int32, which wraps, and right shifts are masked. On the CPU a
compiled loop fills the uniforms instead, in one pass and one call where torch takes 25.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch

from rollout_spec.checks import integer, shown, shown_array
from rollout_spec.jit.compiler import njit
from rollout_spec.noise.host import (
    ADD,
    C1,
    C2,
    DOMAIN_TARGET,
    FMIX1,
    FMIX2,
    LENGTH,
    MASK,
    MAX_UNIFORM,
    finish_hashes_nb,
    row_state_nb,
    uniforms_from_hashes_nb,
)

GUMBEL_TOLERANCE = 4e-6
"""Largest absolute difference between `gumbel` here and `rollout_spec.noise.host.gumbel`."""


def _signed(word: int) -> int:
    """The int32 with the bits of a uint32."""
    return word - 2**32 if word >= 2**31 else word


def _rotl_(x: torch.Tensor, bits: int) -> torch.Tensor:
    low = x >> (32 - bits)  # arithmetic shift: clear what the sign filled in
    low &= (1 << bits) - 1
    x <<= bits
    x |= low
    return x


def _xor_shift_(x: torch.Tensor, bits: int) -> torch.Tensor:
    shifted = x >> bits
    shifted &= (1 << (32 - bits)) - 1
    x ^= shifted
    return x


def _key(word: torch.Tensor) -> torch.Tensor:
    """murmur3's part that depends on the word alone. int32, a new tensor."""
    return _rotl_(word * _signed(C1), 15).mul_(_signed(C2))


def _mix_(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    state ^= key
    return _rotl_(state, 13).mul_(5).add_(_signed(ADD))


@lru_cache(maxsize=16)
def _vocabulary_keys(vocab_size: int, device: torch.device) -> torch.Tensor:
    """`_key` of every token, int32 [V]: kept, as it is the same for all requests and positions."""
    with torch.inference_mode(False):
        return _key(torch.arange(vocab_size, dtype=torch.int32, device=device))


def _words(values: torch.Tensor) -> torch.Tensor:
    """int64 [N] as int32 [N, 2]: low word, high word."""
    return values.contiguous().view(torch.int32).view(-1, 2)


def _token_keys(tokens: int | torch.Tensor, num_rows: int, device: torch.device) -> torch.Tensor:
    if isinstance(tokens, int | np.integer) and not isinstance(tokens, bool):
        if not 1 <= tokens < 2**31:
            raise ValueError(f"tokens must be a vocabulary size from 1 to 2^31 - 1, got {shown(tokens)}")
        return _vocabulary_keys(int(tokens), device)
    if not isinstance(tokens, torch.Tensor) or tokens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"tokens must be an int or a tensor, int32 or int64, got {shown_array(tokens)}")
    if tokens.device != device:
        raise ValueError(f"tokens must be on the device of seeds, {device}, got {tokens.device}")
    if tokens.dim() == 0 or tokens.dim() > 2 or (tokens.dim() == 2 and tokens.shape[0] != num_rows):
        raise ValueError(f"tokens must have shape [K] or [{num_rows}, K], got {list(tokens.shape)}")
    return _key(tokens.to(torch.int32))


def _hash32_torch(seeds: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, domain: int) -> torch.Tensor:
    """int32 [N, K] with the bits of the uint32 hash; torch operations only."""
    seed_words = _words(seeds)
    state = torch.full_like(seed_words[:, 0], _signed(domain & MASK))
    for word in (seed_words[:, 0], seed_words[:, 1], _words(positions)[:, 0]):
        _mix_(state, _key(word))
    h = state.unsqueeze(1) ^ keys  # the only step that broadcasts: all below is in place
    _rotl_(h, 13).mul_(5).add_(_signed(ADD))
    h ^= LENGTH
    _xor_shift_(h, 16).mul_(_signed(FMIX1))
    _xor_shift_(h, 13).mul_(_signed(FMIX2))
    return _xor_shift_(h, 16)


def _uniform32_torch(seeds: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, domain: int) -> torch.Tensor:
    h = _hash32_torch(seeds, positions, keys, domain)
    high = h >> 16
    high &= 0xFFFF
    h &= 0xFFFF
    # Both halves and their scaled values are exact in float32, so the sum is rounded once.
    uniform = h.to(torch.float32).add_(0.5).mul_(2.0**-32)
    return uniform.add_(high.to(torch.float32), alpha=2.0**-16)


@njit(nogil=True)
def _uniform32_nb(seeds, positions, keys, domain, hashes, uniforms):  # type: ignore[no-untyped-def]
    """seeds, positions: int64 [N]; keys: uint32 [1 or N, K]; hashes: uint32 [K], scratch; uniforms: float32 [N, K]."""
    for row in range(uniforms.shape[0]):
        state = row_state_nb(seeds[row], positions[row], domain)
        finish_hashes_nb(state, keys[row if keys.shape[0] > 1 else 0], hashes)
        uniforms_from_hashes_nb(hashes, uniforms[row])


def _numpy(tensor: torch.Tensor) -> Any:
    return tensor.detach().numpy()


def uniform32(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    tokens: int | torch.Tensor,
    *,
    domain: int = DOMAIN_TARGET,
) -> torch.Tensor:
    """Uniform noise in (0, 1], same bits as `rollout_spec.noise.host.uniform32`.

    Args:
        seeds: int64 [N].
        positions: int64 [N], on the same device.
        tokens: A vocabulary size V for tokens 0 … V - 1, or int32/int64 [K] for the same tokens in all rows, or
            [N, K].
        domain: The stream.

    Returns:
        float32 [N, V] or [N, K], newly allocated on the device of `seeds`.

    Raises:
        TypeError: `seeds` or `positions` is not int64, or `tokens` holds no integers.
        ValueError: shapes or devices do not fit.
    """
    for name, values in (("seeds", seeds), ("positions", positions)):
        if not isinstance(values, torch.Tensor) or values.dtype != torch.int64:
            raise TypeError(f"{name} must be an int64 tensor, got {shown_array(values)}")
        if values.device != seeds.device:
            raise ValueError(f"{name} must be on the device of seeds, {seeds.device}, got {values.device}")
        if values.dim() != 1 or values.shape != seeds.shape:
            raise ValueError(f"{name} must have shape [N] like seeds {list(seeds.shape)}, got {list(values.shape)}")
    domain = integer("domain", domain)
    keys = _token_keys(tokens, seeds.shape[0], seeds.device)
    if seeds.device.type != "cpu" or numba.config.DISABLE_JIT:
        return _uniform32_torch(seeds, positions, keys, domain)
    uniforms = torch.empty(seeds.shape[0], keys.shape[-1], dtype=torch.float32)
    keys_np = _numpy(keys if keys.dim() == 2 else keys.unsqueeze(0)).view(np.uint32)
    hashes = np.empty(keys_np.shape[-1], np.uint32)
    _uniform32_nb(_numpy(seeds), _numpy(positions), keys_np, domain, hashes, _numpy(uniforms))
    return uniforms


def negative_gumbel(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    tokens: int | torch.Tensor,
    *,
    domain: int = DOMAIN_TARGET,
) -> torch.Tensor:
    """-`gumbel`, one pass cheaper: `logits - negative_gumbel(...)` are the scores. Arguments as `uniform32`."""
    uniform = uniform32(seeds, positions, tokens, domain=domain)
    return uniform.clamp_(max=MAX_UNIFORM).neg_().log1p_().neg_().log_()


def gumbel(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    tokens: int | torch.Tensor,
    *,
    domain: int = DOMAIN_TARGET,
) -> torch.Tensor:
    """Gumbel(0, 1) noise, float32 [N, V] or [N, K]. Arguments and errors as `uniform32`.

    Within `GUMBEL_TOLERANCE` of the host's `gumbel`; on one device, the same bits whatever the other rows are.
    """
    return negative_gumbel(seeds, positions, tokens, domain=domain).neg_()
