"""Sample-and-compare on CPUs in one compiled pass: what fused kernels do on a GPU.

Same tokens as `reference`, bit for bit. Each request's rows are read up to its first difference. A row comes from
memory once, and the loops over it run in SIMD lanes: noise is hashed for every token, and its logarithms are taken only
for the few tokens that can still win. The features of the distribution are made of the maxima that sampling needs
anyway.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_spec.features import FEATURE_WORDS, LOGPROB_STEP, MAX_CODE, SIGNATURE_WORDS, TOP_TOKENS
from rollout_spec.jit import njit
from rollout_spec.noise.host import DOMAIN_TARGET, finish_hashes, gumbel_from_hash, row_state, token_keys
from rollout_spec.types import GREEDY_TEMPERATURE, PLACEHOLDER_TOKEN_ID, LogprobsMode, VerifyResult
from rollout_spec.verify.reference import Layout, pack_signatures

CHUNK = 64
"""Tokens per chunk of the vocabulary. Features count the largest logit of each chunk, and all logits of the three best.
"""
BLOCK = 512
"""Tokens that are hashed and compared at a time."""
MIN_EXPONENT = np.float32(-87.0)
"""exp of less is no normal float32; so much smaller terms do not change a float32 log-sum-exp."""
LOG2_E = np.float32(math.log2(math.e))
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
"""Their sum is ln 2; multiples of the first up to 2^9 are exact."""
ROUND = np.float32(1.5 * 2**23)
"""Adding it rounds a float32 to an integer, which then stands in the low bits."""
LARGEST_BITS = np.int32(0x7F800000)
"""Bits of infinity: those of a NaN are more."""
NOISE_BOUND_SLOPE = np.float32(math.log(2.0) * 2.0**-23)
NOISE_BOUND_START = np.float32(math.log(2.0) * (127 + 31) + 1e-4)
"""See `_noise_bound`; with some more for the rounding of its three operations."""


@lru_cache(maxsize=16)
def _keys(vocab_size: int) -> NDArray[np.uint32]:
    return token_keys(np.arange(vocab_size))


@njit(allocates=False)
def _as_ordered(bits):
    """The bits of a float32 as an int32 that compares like the float, and back: its maxima are taken in SIMD lanes."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(allocates=False)
def _order(value):
    """`_as_ordered` of a float32, of which -0.0 is 0.0."""
    return _as_ordered(np.float32(value + np.float32(0.0)).view(np.int32))


@njit(allocates=False)
def _noise_bound(h):
    """No less than the Gumbel noise of hash `h`.

    g = -log(-log1p(-u)) <= -log(u), and the bits of a float, read as a number, are its binary logarithm with a straight
    line in place of the mantissa's, which is never above it.
    """
    u = np.float32(np.int32(h >> np.uint32(1)))  # * 2^-31
    return np.float32(NOISE_BOUND_START - np.float32(u.view(np.int32)) * NOISE_BOUND_SLOPE)


@njit(allocates=False, fastmath={"contract"})
def _exp(x):
    """exp of a float32 of at most 0, to two units in the last place; the polynomial is the one of Cephes' expf."""
    x = np.float32(max(x, MIN_EXPONENT))
    rounded = np.float32(x * LOG2_E + ROUND)
    power = np.int32(np.int32(rounded.view(np.int32)) << np.int32(23))
    rounded = np.float32(rounded - ROUND)
    x = np.float32(np.float32(x - rounded * LN2_HIGH) - rounded * LN2_LOW)
    p = np.float32(1.9875691500e-4)
    p = np.float32(p * x + np.float32(1.3981999507e-3))
    p = np.float32(p * x + np.float32(8.3334519073e-3))
    p = np.float32(p * x + np.float32(4.1665795894e-2))
    p = np.float32(p * x + np.float32(1.6666665459e-1))
    p = np.float32(p * x + np.float32(5.0000001201e-1))
    p = np.float32(p * x * x + x + np.float32(1.0))
    return np.int32(p.view(np.int32) + power).view(np.float32)


@njit(allocates=False)
def _highest(logits, chunk_maxima):
    """(first token of the largest logit, whether one is NaN or +inf). O(V).

    Fills `chunk_maxima`, int32 [ceil(V / CHUNK)], with the largest logit of each chunk, by `_order`.
    """
    highest, largest, best = np.int32(-(2**31)), np.int32(0), 0
    for chunk in range(chunk_maxima.size):
        of_chunk = np.int32(-(2**31))
        for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, logits.size)):  # LLVM uses no SIMD lanes for an iterator
            magnitude = np.int32(np.float32(logits[i]).view(np.int32) & np.int32(0x7FFFFFFF))
            order = _order(logits[i])
            largest = magnitude if magnitude > largest else largest
            of_chunk = order if order > of_chunk else of_chunk
        chunk_maxima[chunk] = of_chunk
        if of_chunk > highest:
            best, highest = chunk, of_chunk
    token = best * CHUNK
    while token < logits.size - 1 and _order(logits[token]) != highest:
        token += 1
    return token, largest > LARGEST_BITS or logits[token] == np.inf


@njit(allocates=False)
def _bound_scores(logits, temperature, hashes, bounds):
    """Fill `bounds` with what the scores of a block's tokens cannot exceed. Returns the largest."""
    highest = np.int32(-(2**31))
    for i in range(logits.size):
        bounds[i] = np.float32(logits[i] / temperature + _noise_bound(hashes[i]))
        order = _order(bounds[i])
        highest = order if order > highest else highest
    return np.int32(_as_ordered(highest)).view(np.float32)


@njit(allocates=False)
def _sample_row(logits, temperature, state, keys, hashes, bounds):
    """First token of the largest logits / temperature + noise. O(V)."""
    best_token, best = 0, np.float32(-np.inf)
    for start in range(0, logits.size, BLOCK):
        block = logits[start : start + BLOCK]
        finish_hashes(state, keys[start : start + BLOCK], hashes)
        highest = _bound_scores(block, temperature, hashes, bounds)
        if highest < best or highest == -np.inf:
            continue
        for i in range(block.size):
            if bounds[i] >= best and bounds[i] > -np.inf:
                score = np.float32(block[i] / temperature + gumbel_from_hash(hashes[i]))
                if score > best:
                    best_token, best = start + i, score
    return best_token


@njit(allocates=False, fastmath={"contract", "reassoc"})
def _score_block(logits, scale, highest, chosen):
    """(sum of exp(logits / scale - highest), tokens with logits / scale >= chosen)."""
    total, rank = np.float32(0.0), np.int32(0)
    for i in range(logits.size):
        score = np.float32(logits[i] / scale)
        total += _exp(np.float32(score - highest))
        rank = np.int32(rank + np.int32(score >= chosen))
    return total, rank


@njit(allocates=False)
def _score_row(logits, scale, likeliest, token):
    """(log-probability of `token` under logits / scale, tokens at least as probable). O(V)."""
    highest, chosen = np.float32(logits[likeliest] / scale), np.float32(logits[token] / scale)
    total, rank = 0.0, 0
    for start in range(0, logits.size, BLOCK):
        of_block, of_rank = _score_block(logits[start : start + BLOCK], scale, highest, chosen)
        total += of_block
        rank += of_rank
    return np.float32(np.float64(chosen) - highest - math.log(total)), rank


@njit(allocates=False, fastmath={"contract", "reassoc"})
def _sum_maxima(chunk_maxima, scale, highest):
    """Sum of exp(maximum / scale - highest)."""
    total = np.float32(0.0)
    for i in range(chunk_maxima.size):
        value = np.int32(_as_ordered(chunk_maxima[i])).view(np.float32)
        total += _exp(np.float32(np.float32(value / scale) - highest))
    return total


@njit(allocates=False)
def _largest_three(values):
    """Indices of the three largest values, of equal ones the first; -1 where there are fewer. O(n)."""
    a = b = c = -1
    for i in range(values.size):
        if c >= 0 and values[i] <= values[c]:
            continue
        if a < 0 or values[i] > values[a]:
            a, b, c = i, a, b
        elif b < 0 or values[i] > values[b]:
            b, c = i, b
        else:
            c = i
    return a, b, c


@njit(allocates=False)
def _pack_distribution(logits, chunk_maxima, scale, top_logits, words):
    """Fill the words of the features that hold the most probable tokens. O(V / CHUNK).

    Their probabilities are slightly too large: of all chunks but the three with the largest logits, only the largest
    one is counted in the sum that they are divided by.

    Args:
        chunk_maxima: Of `_highest`, of a row that has a distribution.
        scale: The temperature that is sampled at; 1 for greedy rows.
        top_logits: float32 [TOP_TOKENS * CHUNK], scratch.
        words: int64 [2], filled.
    """
    chunks = _largest_three(chunk_maxima)
    highest = np.float32(np.int32(_as_ordered(chunk_maxima[chunks[0]])).view(np.float32) / scale)
    total = np.float64(_sum_maxima(chunk_maxima, scale, highest))
    for k in range(TOP_TOKENS):
        chunk = chunks[k]
        if chunk >= 0:
            total -= _sum_maxima(chunk_maxima[chunk : chunk + 1], scale, highest)  # all of its tokens are counted below
        for i in range(CHUNK):
            token = chunk * CHUNK + i
            top_logits[k * CHUNK + i] = logits[token] if chunk >= 0 and token < logits.size else np.float32(-np.inf)
    of_top, _ = _score_block(top_logits, scale, highest, np.float32(np.inf))
    shift = math.log(total + of_top)
    words[0] = words[1] = 0
    for place, at in enumerate(_largest_three(top_logits)):
        if at >= 0 and top_logits[at] > -np.inf:
            logprob = np.float64(np.float32(top_logits[at] / scale)) - highest - shift
            code = np.int64(min(max(np.rint(1.0 - logprob / LOGPROB_STEP), 1.0), MAX_CODE))
            token = np.int64(chunks[at // CHUNK] * CHUNK + at % CHUNK)
            words[place // 2] |= token << np.int64(32 * (place % 2))
            words[1] |= code << np.int64(32 + 8 * place)


@njit(allocates=False)
def _widen(bits, logits):
    """Fill `logits`, float32 [V], from bfloat16, as uint16."""
    for i in range(logits.size):
        logits[i] = np.int32(np.uint32(bits[i]) << np.uint32(16)).view(np.float32)


@njit(nogil=True, allocates=False)
def _verify(
    all_logits, all_bits, starts, temperature, seed, position, draft, is_raw, keys, after_difference, scratch,
    output, num_accepted, targets, logprobs, ranks, num_broken, features,
):  # fmt: skip
    """Fill the fields of a `VerifyResult`; `logprobs`, `ranks` and `features` may be of length 0.

    Args:
        all_logits, all_bits: float32 [N, V], or bfloat16 as uint16; the other is of length 0.
        is_raw: Whether log-probabilities are those of temperature 1.
        scratch: uint32 [BLOCK], float32 [BLOCK], int32 [ceil(V / CHUNK)], float32 [TOP_TOKENS * CHUNK], float32 [V].
    """
    hashes, bounds, chunk_maxima, top_logits, widened = scratch
    for request in range(num_accepted.size):
        is_accepted = True
        for row in range(starts[request], starts[request + 1]):
            if not is_accepted and not after_difference:
                break
            if all_bits.size:
                _widen(all_bits[row], widened)
            logits = widened if all_bits.size else all_logits[row]
            likeliest, is_broken = _highest(logits, chunk_maxima)
            is_valid = not is_broken and logits[likeliest] > -np.inf
            is_greedy = temperature[row] < GREEDY_TEMPERATURE
            token = likeliest
            if not is_valid:
                token = PLACEHOLDER_TOKEN_ID
            elif not is_greedy:
                state = row_state(int(seed[row]), int(position[row]), DOMAIN_TARGET)
                token = _sample_row(logits, temperature[row], state, keys, hashes, bounds)
            targets[row] = token
            if not is_accepted:
                continue
            output[request, row - starts[request]] = token
            if is_valid and features.size:
                scale = np.float32(1.0) if is_greedy else temperature[row]
                _pack_distribution(logits, chunk_maxima, scale, top_logits, features[row, SIGNATURE_WORDS:])
            if is_valid and logprobs.size:
                scale = np.float32(1.0) if is_greedy or is_raw else temperature[row]
                logprobs[row], ranks[row] = _score_row(logits, scale, likeliest, token)
            num_broken[request] = is_broken
            is_accepted = is_valid and token == draft[row]
            num_accepted[request] += is_accepted


def verify_rows(
    logits: Tensor,
    layout: Layout,
    *,
    logprobs_mode: LogprobsMode | None = None,
    hidden: Tensor | None = None,
    after_difference: bool = False,
    max_draft_tokens: int,
) -> VerifyResult:
    """`rollout_spec.verify.api.verify_rows` with `method="sample"` for tensors on the CPU."""
    num_rows, vocab_size = logits.shape
    num_requests = layout.starts.shape[0] - 1
    all_logits, all_bits = np.empty((0, vocab_size), np.float32), np.empty((0, vocab_size), np.uint16)
    if logits.dtype == torch.bfloat16:  # widened row by row
        all_bits = logits.detach().contiguous().view(torch.uint16).numpy()
    else:
        all_logits = logits.detach().float().contiguous().numpy()
    num_scored, num_kept = 0 if logprobs_mode is None else num_rows, 0 if hidden is None else num_rows
    fields = VerifyResult(
        output_token_ids=np.full((num_requests, max_draft_tokens + 1), PLACEHOLDER_TOKEN_ID, np.int32),
        num_accepted=np.zeros(num_requests, np.int32),
        target_token_ids=np.full(num_rows, PLACEHOLDER_TOKEN_ID, np.int64),
        logprobs=np.zeros(num_scored, np.float32),
        ranks=np.ones(num_scored, np.int64),
        num_broken_rows=np.zeros(num_requests, np.int32),
        features=np.zeros((num_kept, FEATURE_WORDS), np.int64),
    )
    sizes = BLOCK, BLOCK, -(-vocab_size // CHUNK), TOP_TOKENS * CHUNK, vocab_size
    kinds = np.uint32, np.float32, np.int32, np.float32, np.float32
    scratch = tuple(np.empty(size, kind) for size, kind in zip(sizes, kinds, strict=True))
    inputs = all_logits, all_bits, *(field.numpy() for field in layout), logprobs_mode == "raw_logprobs"
    _verify(*inputs, _keys(vocab_size), after_difference, scratch, *fields)
    result = VerifyResult(*map(torch.from_numpy, fields))
    if logprobs_mode is None:
        result = result._replace(logprobs=None, ranks=None)
    if hidden is None:
        return result._replace(features=None)
    rows = np.flatnonzero(fields.target_token_ids >= 0)  # projecting a state costs as much as reading some 1,000 logits
    fields.features[rows, :SIGNATURE_WORDS] = pack_signatures(hidden[torch.from_numpy(rows)]).numpy()
    return result
