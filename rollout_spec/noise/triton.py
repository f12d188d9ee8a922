"""The noise of `host.py` inside Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_spec.noise import host as noise

GUMBEL_TOLERANCE = 8e-6
"""Largest absolute difference to the host's `gumbel`: four units in the last place of the largest noise, of which the
hardware's log2 (relative error 2**-22) takes three."""

C1, C2, ADD = tl.constexpr(noise.C1), tl.constexpr(noise.C2), tl.constexpr(noise.ADD)
FMIX1, FMIX2, LENGTH = tl.constexpr(noise.FMIX1), tl.constexpr(noise.FMIX2), tl.constexpr(noise.LENGTH)


@triton.jit
def _rotl(x, BITS: tl.constexpr):
    return (x << BITS) | (x >> (32 - BITS))


@triton.jit
def token_key(token):
    """murmur3's part that depends on the token alone, the same for all rows. uint32 in and out."""
    return _rotl(token * C1, 15) * C2


@triton.jit
def _mix(state, key):
    return _rotl(state ^ key, 13) * 5 + ADD


@triton.jit
def row_state(seed, position, DOMAIN: tl.constexpr):
    """State after seed and position, uint32. Both are int64 tensors of one shape."""
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    state = (low ^ low) | DOMAIN
    state = _mix(state, token_key(low))
    state = _mix(state, token_key(high))
    return _mix(state, token_key((position & 0xFFFFFFFF).to(tl.uint32)))


@triton.jit
def unfinished_hash(state, key):
    """The hash without murmur3's last step, `h ^= h >> 16`, which changes it by at most h / 2**16. uint32."""
    h = _mix(state, key) ^ LENGTH
    h ^= h >> 16
    h *= FMIX1
    h ^= h >> 13
    return h * FMIX2


@triton.jit
def finish_hash(h):
    """The hash from `unfinished_hash`. uint32."""
    return h ^ (h >> 16)


@triton.jit
def uniform(h):
    """(h + 0.5) * 2**-32 rounded once, float32. Both halves are exact, so only their sum rounds."""
    high = (h >> 16).to(tl.int32).to(tl.float32) * 1.52587890625e-05
    return high + ((h & 0xFFFF).to(tl.int32).to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def gumbel(h):
    """-log(-log1p(-u)), float32, with the bits of vLLM's V2 noise on the same device.

    The hardware's logarithm has no correct digits left near 1, so log1p is its Taylor series for u < 1/4.
    """
    u = uniform(h)
    series = 1.0 / 7.0 + u * (1.0 / 8.0)
    series = 1.0 / 6.0 + u * series
    series = 1.0 / 5.0 + u * series
    series = 1.0 / 4.0 + u * series
    series = 1.0 / 3.0 + u * series
    series = 1.0 / 2.0 + u * series
    series = 1.0 + u * series
    log1p = tl.where(u < 0.25, -u * series, tl.log(tl.maximum(1.0 - u, 5.960464477539063e-08)))
    return -tl.log(-log1p)
