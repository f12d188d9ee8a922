"""The noise of `rollout_spec.noise` as torch tensors, on any device.

Hash and uniform have the same bits as in NumPy. The Gumbel noise goes through the device's float32 logarithms: it
differs from NumPy's (float64, rounded once) by at most 4e-6 (`GUMBEL_TOLERANCE`), two units in the last place of the
largest noise.

torch has no unsigned 32-bit arithmetic: the hash runs in int32, which wraps, and right shifts are masked.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from rollout_spec.noise.host import ADD, C1, C2, DOMAIN_TARGET, FMIX1, FMIX2, LENGTH, MASK, MAX_UNIFORM

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


def _hash32(seeds: torch.Tensor, positions: torch.Tensor, tokens: int | torch.Tensor, domain: int) -> torch.Tensor:
    """int32 [N, K] with the bits of the uint32 hash."""
    seed_words = _words(seeds)
    state = torch.full_like(seed_words[:, 0], _signed(domain & MASK))
    for word in (seed_words[:, 0], seed_words[:, 1], _words(positions)[:, 0]):
        _mix_(state, _key(word))
    keys = _vocabulary_keys(tokens, seeds.device) if isinstance(tokens, int) else _key(tokens.to(torch.int32))
    h = state.unsqueeze(1) ^ keys  # the only step that broadcasts: all below is in place
    _rotl_(h, 13).mul_(5).add_(_signed(ADD))
    h ^= LENGTH
    _xor_shift_(h, 16).mul_(_signed(FMIX1))
    _xor_shift_(h, 13).mul_(_signed(FMIX2))
    return _xor_shift_(h, 16)


def uniform32(
    seeds: torch.Tensor, positions: torch.Tensor, tokens: int | torch.Tensor, *, domain: int = DOMAIN_TARGET
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
    """
    h = _hash32(seeds, positions, tokens, domain)
    high = h >> 16
    high &= 0xFFFF
    h &= 0xFFFF
    # Both halves and their scaled values are exact in float32, so the sum is rounded once.
    uniform = h.to(torch.float32).add_(0.5).mul_(2.0**-32)
    return uniform.add_(high.to(torch.float32), alpha=2.0**-16)


def gumbel(
    seeds: torch.Tensor, positions: torch.Tensor, tokens: int | torch.Tensor, *, domain: int = DOMAIN_TARGET
) -> torch.Tensor:
    """Gumbel(0, 1) noise, float32 [N, V] or [N, K]. Arguments as `uniform32`.

    Within `GUMBEL_TOLERANCE` of the host's `gumbel`; on one device, the same bits whatever the other rows are.
    """
    uniform = uniform32(seeds, positions, tokens, domain=domain)
    return uniform.clamp_(max=MAX_UNIFORM).neg_().log1p_().neg_().log_().neg_()
