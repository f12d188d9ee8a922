"""Sample-and-compare on CPUs in one compiled pass: what a fused kernel does on a GPU.

Same tokens as `reference`, bit for bit where no top-k, top-p or min-p is asked for (those are applied by `vectorised`
first, with torch's softmax). A row is read once, in blocks that stay in the cache, and the loops over a block run in
SIMD lanes: noise is hashed for every token, and its logarithms are taken only for the few tokens that can still win.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_spec.jit.compiler import inlined, njit
from rollout_spec.noise.host import DOMAIN_TARGET, finish_hashes_nb, gumbel_from_hash_nb, row_state_nb, token_keys
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, SamplingBatch, VerifyResult
from rollout_spec.verify.reference import GREEDY_TEMPERATURE, LogprobsMode
from rollout_spec.verify.vectorised import index_rows, process

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


@inlined(allocates=False)
def _as_ordered(bits):
    """The bits of a float32 as an int32 that compares like the float, and back: its maxima are taken in SIMD lanes."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inlined(allocates=False)
def _order(value):
    """`_as_ordered` of a float32, of which -0.0 is 0.0."""
    return _as_ordered(np.float32(value + np.float32(0.0)).view(np.int32))


@inlined(allocates=False)
def _noise_bound(h):
    """No less than the Gumbel noise of hash `h`.

    g = -log(-log1p(-u)) <= -log(u), and the bits of a float, read as a number, are its binary logarithm with a straight
    line in place of the mantissa's, which is never above it.
    """
    u = np.float32(np.int32(h >> np.uint32(1)))  # * 2^-31
    return np.float32(NOISE_BOUND_START - np.float32(u.view(np.int32)) * NOISE_BOUND_SLOPE)


@inlined(allocates=False, fastmath={"contract"})
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


@inlined(allocates=False)
def _highest(logits):
    """(first token of the largest logit, whether the row has a distribution: no NaN or +inf, not only -inf). O(V)."""
    token, highest, largest = 0, np.int32(-(2**31)), np.int32(0)
    for start in range(0, logits.size, BLOCK):
        block, best = logits[start : start + BLOCK], highest
        for i in range(block.size):  # by index, as LLVM uses no SIMD lanes for an iterator
            magnitude = np.int32(np.float32(block[i]).view(np.int32) & np.int32(0x7FFFFFFF))
            order = _order(block[i])
            largest = magnitude if magnitude > largest else largest
            best = order if order > best else best
        if best > highest:
            token, highest = start, best
    while token < logits.size - 1 and _order(logits[token]) != highest:
        token += 1
    return token, largest <= LARGEST_BITS and math.isfinite(logits[token])


@inlined(allocates=False)
def _is_broken(logits):
    """Whether a logit is NaN or +inf."""
    broken = False
    for i in range(logits.size):
        broken |= math.isnan(logits[i]) or logits[i] == np.inf
    return broken


@inlined(allocates=False)
def _bound_scores(logits, temperature, hashes, bounds):
    """Fill `bounds` with what the scores of a block's tokens cannot exceed. Returns the largest."""
    highest = np.int32(-(2**31))
    for i in range(logits.size):
        bounds[i] = np.float32(logits[i] / temperature + _noise_bound(hashes[i]))
        order = _order(bounds[i])
        highest = order if order > highest else highest
    return np.int32(_as_ordered(highest)).view(np.float32)


@inlined(allocates=False)
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


@inlined(allocates=False, fastmath={"contract", "reassoc"})
def _score_block(logits, scale, highest, chosen):
    """(sum of exp(logits / scale - highest), tokens with logits / scale >= chosen)."""
    total, rank = np.float32(0.0), np.int32(0)
    for i in range(logits.size):
        score = np.float32(logits[i] / scale)
        total += _exp(np.float32(score - highest))
        rank = np.int32(rank + np.int32(score >= chosen))
    return total, rank


@inlined(allocates=False)
def _score_row(logits, scale, token):
    """(log-probability of `token` under logits / scale, tokens at least as probable). O(V)."""
    likeliest, _ = _highest(logits)
    highest, chosen = np.float32(logits[likeliest] / scale), np.float32(logits[token] / scale)
    total, rank = 0.0, 0
    for start in range(0, logits.size, BLOCK):
        of_block, of_rank = _score_block(logits[start : start + BLOCK], scale, highest, chosen)
        total += of_block
        rank += of_rank
    return np.float32(np.float64(chosen) - highest - math.log(total)), rank


@inlined(allocates=False)
def _widen(narrow, row):
    """bfloat16, as uint16, to float32."""
    for i in range(row.size):
        row[i] = np.int32(np.uint32(narrow[i]) << np.uint32(16)).view(np.float32)


@njit(nogil=True, allocates=False)
def _verify(
    logits, scored, narrow, temperature, scored_temperature, seeds, positions, drafts, cu_drafts, keys, want_logprobs,
    scratch, output, num_accepted, targets, logprobs, ranks, num_invalid, num_broken,
):  # fmt: skip
    """Fill the outputs. See `VerifyResult` for the shapes, and `verify` for `logits`, `scored` and `narrow`."""
    hashes, bounds, widened = scratch
    row = draft = 0
    for request in range(cu_drafts.size):
        alive = True
        position = 0
        while True:
            is_draft = draft < cu_drafts[request]
            if narrow.size:
                _widen(narrow[row], widened)
            row_logits = widened if narrow.size else logits[row]
            token, is_valid = _highest(row_logits)
            if not is_valid:
                token = PLACEHOLDER_TOKEN_ID
                num_invalid[request] += 1
                num_broken[request] += 1 if _is_broken(row_logits) else 0
            elif temperature[request] >= GREEDY_TEMPERATURE:
                state = row_state_nb(seeds[request], positions[request] + position, DOMAIN_TARGET)
                token = _sample_row(row_logits, temperature[request], state, keys, hashes, bounds)
            targets[row] = token
            if want_logprobs and alive and is_valid:
                row_scored = widened if narrow.size else scored[row]
                logprobs[row], ranks[row] = _score_row(row_scored, scored_temperature[request], token)
            if alive:
                output[request, position] = token
                alive = is_draft and token >= 0 and token == drafts[draft]
                num_accepted[request] += 1 if alive else 0
            row += 1
            if not is_draft:
                break
            draft += 1
            position += 1


def verify(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    rows: SamplingBatch,
    *,
    logprobs_mode: LogprobsMode | None = None,
    max_draft_tokens: int | None = None,
) -> VerifyResult:
    """`rollout_spec.verify.api.verify` with `method="sample"` for tensors on the CPU."""
    raw = target_logits.detach().contiguous()
    num_rows, vocab_size = raw.shape
    num_requests = cu_num_draft_tokens.shape[0]
    cu_drafts = _numpy(cu_num_draft_tokens.long())
    if max_draft_tokens is None:
        max_draft_tokens = int(np.diff(cu_drafts, prepend=0).max(initial=0))
    truncates = rows.seeds is not None and any(values is not None for values in (rows.top_k, rows.top_p, rows.min_p))
    temperature = torch.zeros(num_requests) if rows.seeds is None else rows.temperature.float()
    seeds = torch.zeros(num_requests, dtype=torch.int64) if rows.seeds is None else rows.seeds
    narrow = torch.empty(0, vocab_size, dtype=torch.uint16)  # bfloat16 logits, which are widened row by row
    if raw.dtype == torch.bfloat16 and not truncates:
        narrow, raw = raw.view(torch.uint16), torch.empty(0, vocab_size)
    logits = raw = raw.float()
    if truncates:
        # Greedy rows come back as they were; the others are scaled already.
        logits = process(raw, rows, index_rows(cu_num_draft_tokens, num_rows).request).contiguous()
        temperature = torch.where(temperature < GREEDY_TEMPERATURE, 0.0, 1.0)
    processed = logprobs_mode == "processed_logprobs"
    output = np.full((num_requests, max_draft_tokens + 1), PLACEHOLDER_TOKEN_ID, np.int32)
    num_accepted = np.zeros(num_requests, np.int32)
    targets = np.empty(num_rows, np.int64)
    logprobs = np.zeros(num_rows, np.float32)
    ranks = np.ones(num_rows, np.int64)
    num_invalid, num_broken = np.zeros((2, num_requests), np.int32)
    scale = torch.where(temperature < GREEDY_TEMPERATURE, 1.0, temperature)
    _verify(
        _numpy(logits),
        _numpy(logits if processed else raw),
        _numpy(narrow),
        _numpy(temperature),
        _numpy(scale if processed else torch.ones_like(scale)),
        _numpy(seeds),
        _numpy(rows.positions.long()),
        _numpy(draft_token_ids.long()),
        cu_drafts,
        _keys(vocab_size),
        logprobs_mode is not None,
        (np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.float32), np.empty(vocab_size, np.float32)),
        output,
        num_accepted,
        targets,
        logprobs,
        ranks,
        num_invalid,
        num_broken,
    )
    wanted = logprobs_mode is not None
    return VerifyResult(
        torch.from_numpy(output),
        torch.from_numpy(num_accepted),
        torch.from_numpy(targets),
        torch.from_numpy(logprobs) if wanted else None,
        torch.from_numpy(ranks) if wanted else None,
        torch.from_numpy(num_invalid),
        torch.from_numpy(num_broken),
    )


def _numpy(tensor: Tensor) -> Any:
    return tensor.contiguous().numpy()
