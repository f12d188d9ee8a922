"""The noise of `host.py` as torch tensors, on any device.

torch has no unsigned 32-bit arithmetic: the hash runs in int32, which wraps, and right shifts are masked.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from rollout_spec.noise.host import ADD, C1, C2, DOMAIN_TARGET, FMIX1, FMIX2, LENGTH, MASK, MAX_UNIFORM

GUMBEL_TOLERANCE = 4e-6
"""Largest absolute difference to the host's `gumbel`, from float32 logarithms: two units in the last place of the
largest noise."""


def _signed(word: int) -> int:
    """The int32 with the bits of a uint32."""
    return word - 2**32 if word >= 2**31 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits without what the sign fills in, a new tensor."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _rotl_(x: Tensor, bits: int) -> Tensor:
    low = _shifted(x, 32 - bits)
    return x.bitwise_left_shift_(bits).bitwise_or_(low)


def _xor_shift_(x: Tensor, bits: int) -> Tensor:
    return x.bitwise_xor_(_shifted(x, bits))


def _key(word: Tensor) -> Tensor:
    """murmur3's part that depends on the word alone, a new tensor."""
    return _rotl_(word * _signed(C1), 15).mul_(_signed(C2))


def _mix_(x: Tensor) -> Tensor:
    """What becomes of murmur3's state with a key xored in."""
    return _rotl_(x, 13).mul_(5).add_(_signed(ADD))


@lru_cache(maxsize=16)
def _vocabulary_keys(vocab_size: int, device: torch.device) -> Tensor:
    """`_key` of every token, int32 [V]: the same for all requests and positions."""
    with torch.inference_mode(False):
        return _key(torch.arange(vocab_size, dtype=torch.int32, device=device))


def _words(values: Tensor) -> Tensor:
    """int64 [N] as int32 [N, 2]: low word, high word."""
    return values.contiguous().view(torch.int32).view(-1, 2)


def _hash32(seeds: Tensor, positions: Tensor, tokens: int | Tensor, domain: int) -> Tensor:
    """int32 [N, K] with the bits of the uint32 hash."""
    seed_words = _words(seeds)
    state = torch.full_like(seed_words[:, 0], _signed(domain & MASK))
    for word in (seed_words[:, 0], seed_words[:, 1], _words(positions)[:, 0]):
        _mix_(state.bitwise_xor_(_key(word)))
    keys = _vocabulary_keys(tokens, seeds.device) if isinstance(tokens, int) else _key(tokens.to(torch.int32))
    h = _mix_(state.unsqueeze(1) ^ keys)  # the only step that broadcasts: all below is in place
    h ^= LENGTH
    _xor_shift_(h, 16).mul_(_signed(FMIX1))
    _xor_shift_(h, 13).mul_(_signed(FMIX2))
    return _xor_shift_(h, 16)


def uniform32(seeds: Tensor, positions: Tensor, tokens: int | Tensor, *, domain: int = DOMAIN_TARGET) -> Tensor:
    """Uniform noise in (0, 1], float32 [N, V] or [N, K], with the same bits as the host's.

    Args:
        seeds, positions: int64 [N], on one device.
        tokens: A vocabulary size V for tokens 0 … V - 1, or int32/int64 [K] for the same tokens in all rows, or
            [N, K].
        domain: The stream.
    """
    h = _hash32(seeds, positions, tokens, domain)
    high = _shifted(h, 16)
    h &= 0xFFFF
    # Both halves and their scaled values are exact in float32, so the sum is rounded once.
    uniform = h.to(torch.float32).add_(0.5).mul_(2.0**-32)
    return uniform.add_(high.to(torch.float32), alpha=2.0**-16)


def gumbel(seeds: Tensor, positions: Tensor, tokens: int | Tensor, *, domain: int = DOMAIN_TARGET) -> Tensor:
    """Gumbel(0, 1) noise, float32; arguments as `uniform32`. Each row's bits are the same whatever the others are."""
    uniform = uniform32(seeds, positions, tokens, domain=domain)
    return uniform.clamp_(max=MAX_UNIFORM).neg_().log1p_().neg_().log_().neg_()
