"""Where top-k, top-p and min-p cut a row of logits, found without sorting it.

A row is searched for the largest logit t such that at least k tokens (or tokens of at least mass p) have a logit of t
or more. Each pass over the row counts what lies at or above a pivot and moves one end of the bracket to a logit that
occurs in the row; the search ends when both ends are equal: about 10 passes over bf16 rows, 20 over float32, all but
the first from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_spec.types import SamplingBatch
from rollout_spec.verify import reference

GREEDY = tl.constexpr(reference.GREEDY_TEMPERATURE)
MASS = tl.constexpr(1.0 - reference.MASS_TOLERANCE)
LOG2E = tl.constexpr(1.4426950408889634)
BLOCK = 4096


@triton.jit
def _search(logits_ptr, vocab_size, low, high, target, highest, scale, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """(largest t in [low, high] that occurs with measure(x >= t) >= target, measure(x > t)).

    `low` and `high` occur in the row, nothing above `high` does, and measure(x >= low) >= target.
    """
    above = 0.0
    while low < high:
        pivot = 0.5 * low + 0.5 * high
        pivot = tl.where(pivot > low, pivot, high)
        measure = 0.0
        next_above = float("inf")
        next_below = float("-inf")
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
            is_above = x >= pivot
            if BY_MASS:
                weight = tl.exp2((x - highest) * scale)
            else:
                weight = tl.full([BLOCK], 1.0, tl.float32)
            measure += tl.sum(tl.where(is_above, weight, 0.0))
            next_above = tl.minimum(next_above, tl.min(tl.where(is_above, x, float("inf"))))
            next_below = tl.maximum(next_below, tl.max(tl.where(is_above, float("-inf"), x)))
        if measure >= target:
            low = next_above
        else:
            high = next_below
            above = measure
    return low, above


@triton.jit
def _cutoff_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    request_ptr,  # int32 [N]
    temperature_ptr,  # float32 [N]
    top_k_ptr,  # int32 or int64 [R]
    top_p_ptr,  # float32 [R]
    min_p_ptr,  # float32 [R]
    cutoff_ptr,  # float32 [N], written
    cut_token_ptr,  # int32 [N], written
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + request).to(tl.int32)
    top_k = tl.where((top_k < 1) | (top_k > vocab_size), vocab_size, top_k)
    top_p = tl.load(top_p_ptr + request).to(tl.float32)
    min_p = tl.load(min_p_ptr + request).to(tl.float32)
    cutoff = float("-inf")
    cut_token = vocab_size
    if (temperature >= GREEDY) & ((top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0)):
        logits_ptr += row * logits_stride
        highest = float("-inf")
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
            highest = tl.maximum(highest, tl.max(x))

        # What min-p leaves; without it, all tokens that can be drawn.
        scale = (1.0 / temperature) * LOG2E
        floor = float("-inf")
        if min_p > 0.0:
            floor = highest / temperature + tl.log(min_p)
        low = float("inf")
        count = 0.0
        mass = 0.0
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
            kept = (x / temperature >= floor) & (x > float("-inf"))
            low = tl.minimum(low, tl.min(tl.where(kept, x, float("inf"))))
            count += tl.sum(kept.to(tl.float32))
            mass += tl.sum(tl.where(kept, tl.exp2((x - highest) * scale), 0.0))

        # Of the tokens whose logit equals the cut, the `ties` with the lowest ids are kept.
        cutoff = low
        ties = vocab_size
        if top_k < count:
            cutoff, above = _search(logits_ptr, vocab_size, low, highest, top_k, highest, scale, False, BLOCK)
            ties = top_k - above.to(tl.int32)
            above_mass = 0.0
            for start in range(0, vocab_size, BLOCK):
                token = start + tl.arange(0, BLOCK)
                x = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
                above_mass += tl.sum(tl.where(x > cutoff, tl.exp2((x - highest) * scale), 0.0))
            mass = above_mass + ties * tl.exp2((cutoff - highest) * scale)
        if top_p < 1.0:
            target = top_p * MASS * mass
            lowest = cutoff
            cutoff, above = _search(logits_ptr, vocab_size, lowest, highest, target, highest, scale, True, BLOCK)
            wanted = tl.ceil((target - above) / tl.exp2((cutoff - highest) * scale)).to(tl.int32)
            wanted = tl.maximum(wanted, 1)
            ties = tl.where(cutoff == lowest, tl.minimum(wanted, ties), wanted)

        seen = 0
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
            tied = (x == cutoff).to(tl.int32)
            here = tl.sum(tied)
            if (seen < ties) & (seen + here >= ties):
                is_last = (tied > 0) & (seen + tl.cumsum(tied, 0) == ties)
                cut_token = tl.max(tl.where(is_last, token, 0))
            seen += here
    tl.store(cutoff_ptr + row, cutoff)
    tl.store(cut_token_ptr + row, cut_token)


def find_cutoffs(logits: Tensor, request: Tensor, temperature: Tensor, rows: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Where each row is cut.

    Args:
        logits: floating point [N, V], unit stride along V.
        request: int32 [N], each row's index into the fields of `rows`.
        temperature: float32 [N], each row's.
        rows: At least one of `top_k`, `top_p`, `min_p` is given; only these are read.

    Returns:
        (cutoff float32 [N], cut_token int32 [N]): token v of a row is kept if its logit is above the cutoff, or equal
        to it and v <= cut_token. Rows that keep everything, greedy ones among them, have -inf and V.
    """
    num_rows, vocab_size = logits.shape
    (given, *_) = (limit for limit in (rows.top_k, rows.top_p, rows.min_p) if limit is not None)

    def all_of(keeps_all: float, dtype: torch.dtype) -> Tensor:
        """In place of a limit that is not given, for which the kernel would be compiled again."""
        return torch.full(given.shape, keeps_all, dtype=dtype, device=logits.device)

    top_k = rows.top_k if rows.top_k is not None else all_of(0, torch.int32)
    top_p = rows.top_p if rows.top_p is not None else all_of(1.0, torch.float32)
    min_p = rows.min_p if rows.min_p is not None else all_of(0.0, torch.float32)
    cutoff = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    cut_token = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    _cutoff_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        request,
        temperature,
        top_k,
        top_p,
        min_p,
        cutoff,
        cut_token,
        vocab_size,
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )
    return cutoff, cut_token
