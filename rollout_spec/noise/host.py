"""The noise that samples are drawn with: Gumbel noise as a pure function of a request's seed, a position and a token.

    h = murmur3_32(seed low word, seed high word, position low word, token; initial state = domain)    uint32
    u = (h + 0.5) * 2**-32, rounded once to float32, at most 1 - 2**-24                                (0, 1)
    g = -log(-log1p(-u))                                                                               Gumbel(0, 1)

Then `argmax_v(logit_v / T + g(seed, position, v))` is an exact sample of softmax(logits / T), whose randomness is known
before the logits are. The formula is the one of vLLM's V2 model runner (0.31 and later,
`vllm/v1/worker/gpu/sample/gumbel.py`); murmur3 is Austin Appleby's, in the public domain. Hash and uniform have the
same bits here (numpy, numba) and in the torch and Triton twins. g has them in numpy and numba, which compute in float64
and round once; float32 logarithms elsewhere differ by a few units in the last place (see `rollout_spec.noise.torch`).

Position: the index, in prompt plus output, of the token that is fed in to produce the logits.

Resolution. u -> 0 gives the large g, where float32 is finest: g is largest at h = 0, 33 ln 2 = 22.874, and smallest at
u = 1 - 2**-24, -ln(24 ln 2) = -2.811. So tokens whose logit / T lies 25.7 or more below the largest are never drawn
(their probability is below e**-25.7 = 7e-12), and the rarest event that one draw resolves is h = 0, 2**-32 = 2.3e-10.

Streams. The target samples with `DOMAIN_TARGET`, which drafters may look at. Rejection sampling uses only
`DOMAIN_ACCEPT` and `DOMAIN_RESIDUAL`. The hash reduces a seed to 32 bits: two given seeds have the same noise at
every position with probability 2**-32, and equal seeds always. `derive_seed` gives each rollout a seed of its own.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollout_spec.checks import shown
from rollout_spec.jit.compiler import njit

DOMAIN_TARGET = 0
"""Stream of the target's sample at each position; drafters may look at it. The same as vLLM's fp32 noise."""
DOMAIN_ACCEPT = 0x5BD1E995
"""Stream of rejection sampling's acceptance test (token 0 of each position)."""
DOMAIN_RESIDUAL = 0x2545F491
"""Stream of rejection sampling's recovered and bonus tokens."""

MAX_GUMBEL = 33.0 * math.log(2.0)
"""Largest value of the noise, at h = 0."""
MIN_GUMBEL = -math.log(24.0 * math.log(2.0))
"""Smallest value of the noise, at u = 1 - 2**-24."""
MAX_UNIFORM = 1.0 - 2.0**-24
"""Upper clamp of u before the logarithms: the largest float32 below 1."""

# Constants of murmur3_x86_32
C1 = 0xCC9E2D51
C2 = 0x1B873593
ADD = 0xE6546B64
FMIX1 = 0x85EBCA6B
FMIX2 = 0xC2B2AE35
LENGTH = 16  # four 32-bit words, in bytes
MASK = 0xFFFFFFFF

UInt32Array = NDArray[np.uint32]


def derive_seed(*parts: int | str) -> int:
    """A seed for one request out of what identifies it, stable across processes, machines and Python versions.

    Give parts that are unique to the rollout, e.g. `derive_seed(run_seed, step, rollout_ordinal)`: rollouts with the
    same seed and prompt are copies of each other. Any two distinct tuples collide with probability 2**-63; the noise
    itself distinguishes 2**32 seeds (see above).

    Returns:
        An int in [0, 2**63), so never -1, which vLLM reads as "no seed".

    Raises:
        TypeError: no parts, or a part is neither an integer nor a string.
    """
    if not parts:
        raise TypeError("derive_seed needs at least one part, e.g. derive_seed(run_seed, step, rollout_ordinal)")
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, str):
            tag, payload = b"s", part.encode("utf-8", "surrogatepass")
        elif isinstance(part, bool) or not isinstance(part, int | np.integer):
            raise TypeError(
                f"parts of derive_seed must be integers and strings, got {type(part).__name__} {shown(part)}"
            )
        else:
            tag, payload = b"i", str(int(part)).encode("ascii")
        # Tag and length keep ("a", "b") from ("ab",) and (1,) from ("1",).
        digest.update(tag + len(payload).to_bytes(8, "little") + payload)
    return int.from_bytes(digest.digest(), "little") & 0x7FFF_FFFF_FFFF_FFFF


# ---------------------------------------------------------------------------------------------------------- NumPy


def _low_word(values: ArrayLike) -> UInt32Array:
    return (np.asarray(values, np.int64) & MASK).astype(np.uint32)


def _rotl(x: Any, bits: int) -> Any:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _key(word: Any) -> Any:
    """What a word adds to murmur3's state. uint32 arrays, wrapping."""
    return _rotl(word * np.uint32(C1), 15) * np.uint32(C2)


def _mix(state: Any, word: Any) -> Any:
    return _rotl(state ^ _key(word), 13) * np.uint32(5) + np.uint32(ADD)


def hash32(seeds: ArrayLike, positions: ArrayLike, tokens: ArrayLike, domain: int = DOMAIN_TARGET) -> UInt32Array:
    """murmur3-32 of (seed, position, token), initial state `domain`.

    Args:
        seeds: Integers of 64 bits; both words count, negative ones as two's complement.
        positions: Integers; the low 32 bits count.
        tokens: Integers; the low 32 bits count.
        domain: The stream, see the module's docstring.

    Returns:
        uint32, shape of the three broadcast together. The work before the token is done on the shape of seeds and
        positions: pass `seeds[:, None], positions[:, None], np.arange(vocab_size)`.
    """
    with np.errstate(over="ignore"):  # NumPy reports wrapping of 0-d arrays, not of others
        h = _mix(np.uint32(domain), _low_word(seeds))
        h = _mix(h, _low_word(np.asarray(seeds, np.int64) >> 32))
        h = _mix(h, _low_word(positions))
        h = _mix(h, _low_word(tokens)) ^ np.uint32(LENGTH)
        h ^= h >> np.uint32(16)
        h = h * np.uint32(FMIX1)
        h ^= h >> np.uint32(13)
        h = h * np.uint32(FMIX2)
        h ^= h >> np.uint32(16)
    return np.asarray(h, dtype=np.uint32)


def uniform_from_hash(hashes: UInt32Array) -> NDArray[np.float32]:
    """float32 (h + 0.5) * 2**-32, rounded once. In (0, 1]: the 128 largest hashes round to 1."""
    # Exact in float64. vLLM adds the two 16-bit halves, each exact in float32: the same single rounding.
    return np.asarray(((hashes.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32))


def gumbel_from_uniform(uniforms: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 -log(-log1p(-u)) with u clamped to at most 1 - 2**-24, so that u = 1 is finite."""
    u = np.minimum(uniforms.astype(np.float64), MAX_UNIFORM)
    return np.asarray((-np.log(-np.log1p(-u))).astype(np.float32))


def uniform32(
    seeds: ArrayLike, positions: ArrayLike, tokens: ArrayLike, domain: int = DOMAIN_TARGET
) -> NDArray[np.float32]:
    """Uniform noise in (0, 1], float32. Arguments and broadcasting as `hash32`."""
    return uniform_from_hash(hash32(seeds, positions, tokens, domain))


def gumbel(
    seeds: ArrayLike, positions: ArrayLike, tokens: ArrayLike, domain: int = DOMAIN_TARGET
) -> NDArray[np.float32]:
    """Gumbel(0, 1) noise in [MIN_GUMBEL, MAX_GUMBEL], float32. Arguments and broadcasting as `hash32`."""
    return gumbel_from_uniform(uniform32(seeds, positions, tokens, domain))


def token_keys(tokens: ArrayLike) -> UInt32Array:
    """murmur3's part that depends on the token alone, for `finish_hashes_nb`. uint32, shape of `tokens`."""
    with np.errstate(over="ignore"):
        return np.asarray(_key(_low_word(tokens)), dtype=np.uint32)


# ---------------------------------------------------------------------------------------------------------- numba
# int64 arithmetic, cut to 32 bits after each step: products wrap in compiled code and are big integers without it
# (NUMBA_DISABLE_JIT=1); the low 32 bits are the same.


@njit
def _mix_nb(state, word):  # type: ignore[no-untyped-def]
    word = (word * C1) & MASK
    word = ((word << 15) | (word >> 17)) & MASK
    state ^= (word * C2) & MASK
    state = ((state << 13) | (state >> 19)) & MASK
    return (state * 5 + ADD) & MASK


@njit
def row_state_nb(seed, position, domain):  # type: ignore[no-untyped-def]
    """State after seed and position, an integer below 2**32. Compute it once for many tokens of one position."""
    seed = int(seed)
    h = _mix_nb(int(domain) & MASK, seed & MASK)
    h = _mix_nb(h, (seed >> 32) & MASK)
    return _mix_nb(h, int(position) & MASK)


@njit
def gumbel_from_hash_nb(h):  # type: ignore[no-untyped-def]
    """float32 Gumbel noise of one hash (an integer below 2**32)."""
    u = min(float(np.float32((h + 0.5) * 2.0**-32)), MAX_UNIFORM)
    return np.float32(-math.log(-math.log1p(-u)))


@njit
def gumbel_nb(seed, position, token, domain=DOMAIN_TARGET):  # type: ignore[no-untyped-def]
    """Scalar `gumbel` for compiled code. int64 in, float32 out (called from Python: a float with that value)."""
    h = _mix_nb(row_state_nb(seed, position, domain), int(token) & MASK) ^ LENGTH
    h ^= h >> 16
    h = (h * FMIX1) & MASK
    h ^= h >> 13
    h = (h * FMIX2) & MASK
    return gumbel_from_hash_nb(h ^ (h >> 16))


@njit
def finish_hashes_nb(row_state, keys, hashes):  # type: ignore[no-untyped-def]
    """The hashes of many tokens of one row, from `row_state_nb`: about 0.5 ns each.

    row_state: integer below 2**32; keys: uint32 [n] from `token_keys`; hashes: uint32 [n], written.
    """
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
