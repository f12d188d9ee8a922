"""The noise that samples are drawn with: Gumbel noise as a pure function of a request's seed, a position and a token.

    h = murmur3_32(seed low word, seed high word, position low word, token; initial state = domain)    uint32
    u = (h + 0.5) * 2**-32, rounded once to float32, at most 1 - 2**-24                                (0, 1)
    g = -log(-log1p(-u))                                                                               Gumbel(0, 1)

Then `argmax_v(logit_v / T + g(seed, position, v))` is an exact sample of softmax(logits / T), whose randomness is known
before the logits are. The formula is the one of vLLM's V2 model runner (0.31 and later,
`vllm/v1/worker/gpu/sample/gumbel.py`); murmur3 is Austin Appleby's, in the public domain. Hash and uniform have the
same bits in `torch.py` and `triton.py`. g is computed here in float64 and rounded once, there in float32.

Position: the index, in prompt plus output, of the token that is fed in to produce the logits.

Resolution. g is largest at h = 0, 33 ln 2 = 22.874, where float32 is finest, and smallest at u = 1 - 2**-24, -2.811. So
tokens whose logit / T lies 25.7 or more below the largest, of probability below 7e-12, are never drawn.

Streams. The target samples with `DOMAIN_TARGET`, which drafters may look at. Rejection sampling uses only
`DOMAIN_ACCEPT` and `DOMAIN_RESIDUAL`. The hash reduces a seed to 32 bits: two given seeds have the same noise at
every position with probability 2**-32, and equal seeds always. `derive_seed` gives each rollout a seed of its own.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numba.extending import register_jitable
from numpy.typing import ArrayLike, NDArray

from rollout_spec.checks import shown
from rollout_spec.jit import njit

DOMAIN_TARGET = 0
"""Stream of the target's sample at each position. The same as vLLM's fp32 noise."""
DOMAIN_ACCEPT = 0x5BD1E995
"""Stream of rejection sampling's acceptance test (token 0 of each position)."""
DOMAIN_RESIDUAL = 0x2545F491
"""Stream of rejection sampling's recovered and bonus tokens."""
MAX_UNIFORM = 1.0 - 2.0**-24
"""Upper clamp of u before the logarithms: the largest float32 below 1. The 128 largest hashes give u = 1."""

# Constants of murmur3_x86_32
C1, C2, ADD = 0xCC9E2D51, 0x1B873593, 0xE6546B64
FMIX1, FMIX2 = 0x85EBCA6B, 0xC2B2AE35
LENGTH = 16  # four 32-bit words, in bytes
MASK = 0xFFFFFFFF


def derive_seed(*parts: int | str) -> int:
    """A seed for one request out of what identifies it, stable across processes, machines and Python versions.

    Give parts that are unique to the rollout, e.g. `derive_seed(run_seed, step, rollout_ordinal)`: rollouts with the
    same seed and prompt are copies of each other. Any two distinct tuples collide with probability 2**-63.

    Returns:
        An int in [0, 2**63), so never -1, which vLLM reads as "no seed".

    Raises:
        TypeError: no parts, or a part is neither an integer nor a string.
    """
    if not parts:
        raise TypeError("derive_seed needs at least one part, e.g. derive_seed(run_seed, step, rollout_ordinal)")
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | np.integer | str):
            raise TypeError(f"parts of derive_seed must be integers and strings, got {shown(part)}")
        tag, text = (b"s", part) if isinstance(part, str) else (b"i", str(int(part)))
        payload = text.encode("utf-8", "surrogatepass")
        # Tag and length keep ("a", "b") from ("ab",) and (1,) from ("1",).
        digest.update(tag + len(payload).to_bytes(8, "little") + payload)
    return int.from_bytes(digest.digest(), "little") & 0x7FFF_FFFF_FFFF_FFFF


# The definition, for compiled functions, NumPy and torch: 64-bit integers, or int64 arrays, cut to 32 bits after each
# step. Products wrap. Where numba's compiler is off, numbers are Python's: of NumPy's, wrapping gives warnings.


@register_jitable
def _key(word: Any) -> Any:
    """murmur3's part that depends on the word alone."""
    word = (word * C1) & MASK
    word = ((word << 15) | (word >> 17)) & MASK
    return (word * C2) & MASK


@register_jitable
def _mix(state: Any, word: Any) -> Any:
    state = state ^ _key(word & MASK)
    state = ((state << 13) | (state >> 19)) & MASK
    return (state * 5 + ADD) & MASK


@register_jitable
def row_state(seed: Any, position: Any, domain: int) -> Any:
    """State after seed and position, below 2**32: the same for all tokens of one position."""
    return _mix(_mix(_mix(domain, seed), seed >> 32), position)


@register_jitable
def hash_words(seed: Any, position: Any, token: Any, domain: int) -> Any:
    """murmur3-32 of (seed, position, token), below 2**32; see `hash32`."""
    h = _mix(row_state(seed, position, domain), token) ^ LENGTH
    h = ((h ^ (h >> 16)) * FMIX1) & MASK
    h = ((h ^ (h >> 13)) * FMIX2) & MASK
    return h ^ (h >> 16)


@register_jitable
def uniform_from_hash(h: Any) -> Any:
    """float32 in (0, 1]: exact in float64, rounded once."""
    return np.float32((h + 0.5) * 2.0**-32)


@register_jitable
def gumbel_from_hash(h: Any) -> Any:
    """float32 Gumbel noise of a hash."""
    u = np.minimum(np.float64(uniform_from_hash(h)), MAX_UNIFORM)
    return np.float32(-np.log(-np.log1p(-u)))


@njit
def finish_hashes(row_state, keys, hashes):  # type: ignore[no-untyped-def]
    """`hash_words` for many tokens of one row, about 0.5 ns each: fills `hashes`, uint32 as `keys` of `token_keys`."""
    state = np.uint32(row_state)
    for i in range(keys.shape[0]):
        # numba widens uint32 products to 64 bits; casting back after each step lets LLVM use 32-bit lanes.
        h = np.uint32(state ^ keys[i])
        h = np.uint32((h << np.uint32(13)) | (h >> np.uint32(19)))
        h = np.uint32(h * np.uint32(5) + np.uint32(ADD))
        h = np.uint32(h ^ np.uint32(LENGTH))
        h = np.uint32(h ^ (h >> np.uint32(16)))
        h = np.uint32(h * np.uint32(FMIX1))
        h = np.uint32(h ^ (h >> np.uint32(13)))
        h = np.uint32(h * np.uint32(FMIX2))
        hashes[i] = h ^ (h >> np.uint32(16))


def token_keys(tokens: ArrayLike) -> NDArray[np.uint32]:
    """For `finish_hashes`, shape of `tokens`."""
    return _key(np.asarray(tokens, np.int64) & MASK).astype(np.uint32)  # type: ignore[no-any-return]


def hash32(
    seeds: ArrayLike, positions: ArrayLike, tokens: ArrayLike, domain: int = DOMAIN_TARGET
) -> NDArray[np.uint32]:
    """murmur3-32 of (seed, position, token) with initial state `domain`, the stream: uint32, broadcast together.

    Both words of a seed count, of positions and tokens the low 32 bits. The work before the token is done on the shape
    of seeds and positions: pass `seeds[:, None], positions[:, None], np.arange(vocab_size)`.
    """
    words = (np.asarray(values, np.int64) for values in (seeds, positions, tokens))
    with np.errstate(over="ignore"):  # NumPy reports wrapping of 0-d arrays, not of others
        return np.asarray(hash_words(*words, domain), np.uint32)


def gumbel(
    seeds: ArrayLike, positions: ArrayLike, tokens: ArrayLike, domain: int = DOMAIN_TARGET
) -> NDArray[np.float32]:
    """Gumbel(0, 1) noise, float32. Arguments and broadcasting as `hash32`."""
    return np.asarray(gumbel_from_hash(hash32(seeds, positions, tokens, domain)))
