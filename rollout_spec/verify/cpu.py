"""Sample-and-compare on CPUs in one compiled pass: what fused kernels do on a GPU.

Same tokens as `reference`, bit for bit. Each request's rows are read up to its first difference. A row comes from
memory once, and the loops over it run in SIMD lanes: noise is hashed for every token, and its logarithms are taken only
for the few tokens that can still win. The features of the distribution are made of the maxima that sampling needs
anyway.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_spec.features.format import FEATURE_WORDS, LOGPROB_STEP, MAX_CODE, SIGNATURE_WORDS, TOP_TOKENS
from rollout_spec.features.torch import pack_signatures
from rollout_spec.jit.compiler import njit
from rollout_spec.noise.host import DOMAIN_TARGET, finish_hashes_nb, gumbel_from_hash_nb, row_state_nb, token_keys
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, VerifyResult
from rollout_spec.verify.layout import Layout
from rollout_spec.verify.reference import GREEDY_TEMPERATURE, LogprobsMode

CHUNK = 64
"""Tokens of the vocabulary of which only the largest logit is kept, and of three chunks all."""
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
    """(first token of the largest logit, whether the row has a distribution: no NaN or +inf, not only -inf). O(V).

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
    return token, largest <= LARGEST_BITS and math.isfinite(logits[token])


@njit(allocates=False)
def _is_broken(logits):
    """Whether a logit is NaN or +inf."""
    broken = False
    for i in range(logits.size):
        broken |= math.isnan(logits[i]) or logits[i] == np.inf
    return broken


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
        finish_hashes_nb(state, keys[start : start + BLOCK], hashes)
        highest = _bound_scores(block, temperature, hashes, bounds)
        if highest < best or highest == -np.inf:
            continue
        for i in range(block.size):
            if bounds[i] >= best and bounds[i] > -np.inf:
                score = np.float32(block[i] / temperature + gumbel_from_hash_nb(np.int64(hashes[i])))
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
    for i in range(min(values.size, 3)):
        if a < 0 or values[i] > values[a]:
            a, b, c = i, a, b
        elif b < 0 or values[i] > values[b]:
            b, c = i, b
        else:
            c = i
    if values.size > 3:
        third = values[c]
        for i in range(3, values.size):
            if values[i] > third:
                if values[i] > values[a]:
                    a, b, c = i, a, b
                elif values[i] > values[b]:
                    b, c = i, b
                else:
                    c = i
                third = values[c]
    return a, b, c


@njit(allocates=False)
def _pack_distribution(logits, chunk_maxima, temperature, near, words):
    """Fill the words of the features that hold the most probable tokens. O(V / CHUNK).

    Their probabilities are slightly too large: of all chunks but the three with the largest logits, only the largest
    one is counted in the sum that they are divided by.

    Args:
        chunk_maxima: Of `_highest`, of a row that has a distribution.
        temperature: That is sampled at; 0 as 1.
        near: float32 [TOP_TOKENS * CHUNK], scratch.
        words: int64 [2], filled.
    """
    scale = np.float32(1.0) if temperature < GREEDY_TEMPERATURE else np.float32(temperature)
    chunks = _largest_three(chunk_maxima)
    highest = np.float32(np.int32(_as_ordered(chunk_maxima[chunks[0]])).view(np.float32) / scale)
    total = np.float64(_sum_maxima(chunk_maxima, scale, highest))
    for k in range(TOP_TOKENS):
        chunk = chunks[k]
        if chunk >= 0:
            total -= _sum_maxima(chunk_maxima[chunk : chunk + 1], scale, highest)  # all of its tokens are counted below
        for i in range(CHUNK):
            token = chunk * CHUNK + i
            near[k * CHUNK + i] = logits[token] if chunk >= 0 and token < logits.size else np.float32(-np.inf)
    of_near, _ = _score_block(near, scale, highest, np.float32(np.inf))
    shift = math.log(total + of_near)
    words[0] = words[1] = 0
    for place, at in enumerate(_largest_three(near)):
        if at >= 0 and near[at] > -np.inf:
            logprob = np.float64(np.float32(near[at] / scale)) - highest - shift
            code = np.int64(min(max(np.rint(1.0 - logprob / LOGPROB_STEP), 1.0), MAX_CODE))
            token = np.int64(chunks[at // CHUNK] * CHUNK + at % CHUNK)
            words[place // 2] |= token << np.int64(32 * (place % 2))
            words[1] |= code << np.int64(32 + 8 * place)


@njit(allocates=False)
def _widen(narrow, row):
    """bfloat16, as uint16, to float32."""
    for i in range(row.size):
        row[i] = np.int32(np.uint32(narrow[i]) << np.uint32(16)).view(np.float32)


@njit(nogil=True, allocates=False)
def _verify(
    logits, narrow, starts, temperature, seed, position, draft, score_scale, keys, want_logprobs, want_features,
    after_difference, scratch, output, num_accepted, targets, logprobs, ranks, features, num_invalid, num_broken,
):  # fmt: skip
    """Fill the outputs. See `VerifyResult` for the shapes, and `verify_rows` for `logits` and `narrow`."""
    hashes, bounds, chunk_maxima, near, widened = scratch
    for request in range(num_accepted.size):
        alive = True
        for row in range(starts[request], starts[request + 1]):
            if not alive and not after_difference:
                break
            if narrow.size:
                _widen(narrow[row], widened)
            row_logits = widened if narrow.size else logits[row]
            likeliest, is_valid = _highest(row_logits, chunk_maxima)
            token = likeliest
            if not is_valid:
                token = PLACEHOLDER_TOKEN_ID
            elif temperature[row] >= GREEDY_TEMPERATURE:
                state = row_state_nb(seed[row], position[row], DOMAIN_TARGET)
                token = _sample_row(row_logits, temperature[row], state, keys, hashes, bounds)
            targets[row] = token
            if not alive:
                continue
            output[request, row - starts[request]] = token
            if not is_valid:
                num_invalid[request] = 1
                num_broken[request] = _is_broken(row_logits)
                alive = False
                continue
            if want_features:
                _pack_distribution(row_logits, chunk_maxima, temperature[row], near, features[row, SIGNATURE_WORDS:])
            if want_logprobs:
                logprobs[row], ranks[row] = _score_row(row_logits, score_scale[row], likeliest, token)
            alive = token == draft[row]
            num_accepted[request] += alive


_of_thread = threading.local()


def _scratch(vocab_size: int) -> tuple[NDArray[Any], ...]:
    """What compiled loops work in: this thread's."""
    kept: tuple[NDArray[Any], ...] | None = getattr(_of_thread, "scratch", None)
    if kept is None or kept[-1].size != vocab_size:
        sizes = (BLOCK, BLOCK, -(-vocab_size // CHUNK), TOP_TOKENS * CHUNK, vocab_size)
        dtypes = (np.uint32, np.float32, np.int32, np.float32, np.float32)
        kept = _of_thread.scratch = tuple(np.empty(size, kind) for size, kind in zip(sizes, dtypes, strict=True))
    return kept


def verify_rows(
    target_logits: Tensor,
    layout: Layout,
    *,
    logprobs_mode: LogprobsMode | None = None,
    hidden: Tensor | None = None,
    after_difference: bool = False,
    max_draft_tokens: int,
) -> VerifyResult:
    """`rollout_spec.verify.api.verify_rows` with `method="sample"` for tensors on the CPU; nothing is truncated."""
    num_rows, vocab_size = target_logits.shape
    num_requests = layout.starts.shape[0] - 1
    narrow, logits = np.empty((0, vocab_size), np.uint16), np.empty((0, vocab_size), np.float32)
    if target_logits.dtype == torch.bfloat16:  # widened row by row
        narrow = target_logits.detach().contiguous().view(torch.uint16).numpy()
    else:
        logits = target_logits.detach().float().contiguous().numpy()
    temperature, score_scale = layout.temperature.numpy(), np.ones(num_rows, np.float32)
    if logprobs_mode == "processed_logprobs":
        score_scale = np.where(temperature < GREEDY_TEMPERATURE, np.float32(1.0), temperature)
    features = np.zeros((0 if hidden is None else num_rows, FEATURE_WORDS), np.int64)
    seed = layout.position if layout.seed is None else layout.seed  # of greedy rows it is not read
    output = np.full((num_requests, max_draft_tokens + 1), PLACEHOLDER_TOKEN_ID, np.int32)
    num_accepted, num_invalid, num_broken = np.zeros((3, num_requests), np.int32)
    targets = np.full(num_rows, PLACEHOLDER_TOKEN_ID, np.int64)
    logprobs, ranks = np.zeros(num_rows, np.float32), np.ones(num_rows, np.int64)
    wanted = logprobs_mode is not None
    _verify(
        logits,
        narrow,
        layout.starts.numpy(),
        temperature,
        seed.numpy(),
        layout.position.numpy(),
        layout.draft.numpy(),
        score_scale,
        _keys(vocab_size),
        wanted,
        hidden is not None,
        after_difference,
        _scratch(vocab_size),
        output,
        num_accepted,
        targets,
        logprobs,
        ranks,
        features,
        num_invalid,
        num_broken,
    )
    if hidden is not None:
        _sign(features, hidden, targets >= 0)
    return VerifyResult(
        torch.from_numpy(output),
        torch.from_numpy(num_accepted),
        torch.from_numpy(targets),
        torch.from_numpy(logprobs) if wanted else None,
        torch.from_numpy(ranks) if wanted else None,
        torch.from_numpy(num_invalid),
        torch.from_numpy(num_broken),
        torch.from_numpy(features) if hidden is not None else None,
    )


@njit(nogil=True, allocates=False)
def _pack_distributions(logits, temperature, scratch, features):  # type: ignore[no-untyped-def]
    _, _, chunk_maxima, near, _ = scratch
    for row in range(features.shape[0]):
        _, is_valid = _highest(logits[row], chunk_maxima)
        if is_valid:
            _pack_distribution(logits[row], chunk_maxima, temperature[row], near, features[row, SIGNATURE_WORDS:])


def pack_features(target_logits: Tensor, layout: Layout, hidden: Tensor) -> Tensor:
    """The features of all rows, as `verify_rows` computes them for those that are emitted: int64 [N, FEATURE_WORDS]."""
    logits = target_logits.detach().float().contiguous().numpy()
    features = np.zeros((hidden.shape[0], FEATURE_WORDS), np.int64)
    _sign(features, hidden, np.ones(hidden.shape[0], np.bool_))
    _pack_distributions(logits, layout.temperature.numpy(), _scratch(logits.shape[1]), features)
    return torch.from_numpy(features)


def _sign(features: NDArray[np.int64], hidden: Tensor, is_wanted: NDArray[np.bool_]) -> None:
    """Fill the signatures of the wanted rows. Projecting a state costs as much as reading some thousand logits."""
    if is_wanted.all():
        features[:, :SIGNATURE_WORDS] = pack_signatures(hidden).numpy()
    else:
        rows = np.flatnonzero(is_wanted)
        features[rows, :SIGNATURE_WORDS] = pack_signatures(hidden[torch.from_numpy(rows)]).numpy()
