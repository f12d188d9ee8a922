"""Verification as a few Triton kernels that read every logit once, in the model's dtype.

1. `_scan_kernel`: temperature, noise, argmax and log-sum-exp of each row in one pass over the vocabulary, which is
   split among programs where rows are few.
2. `_accept_kernel`: joins the splits, compares each row's token with its draft and cuts each request's tokens after
   the first difference.
3. Where log-probabilities are asked for, `_rank_kernel` reads the rows of emitted tokens again.
4. Where features are asked for, `_features_kernel` packs the projections of hidden states, and reads the three tiles of
   each emitted row that hold its most probable tokens, which the scan's maxima tell.

Nothing waits for the device, so all of it can be captured in CUDA graphs; nothing of the vocabulary's size is written.

Arithmetic per token. A token can win only if its noise reaches best - logit / T, that is, if its hash is at most
2**32 exp(logit / T - best). So a tile's smallest hash is compared with what the tile's largest logit allows; if it
passes, each hash with what its own logit allows; and only if one passes again are the noise's two logarithms taken. The
draft's score is taken first: where the target samples the draft, the bound is tight from the first tile on.

Per token the common path takes 22 instructions (sm_90, bf16): 3 multiplications, 3 shifts and 3 logical operations for
the hash (murmur3's last step, which changes h by at most h / 2**16, is left to the exact evaluation), 3 for the token's
key, which `ROWS` rows share, and the rest for conversion, maximum and sum of exponentials. Nearly 12 of them go to the
integer pipe, 64 lanes per clock: 0.18 clocks per token and multiprocessor, 2.9 TB/s of bf16 logits on an H200 at
1.98 GHz. Loads are vectorised only if 16 divides the vocabulary size, so pad it, as engines do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_spec import features as format
from rollout_spec.launches import Launcher, cdiv, next_power_of_2
from rollout_spec.noise import host as noise
from rollout_spec.noise.triton import finish_hash, gumbel, row_state, token_key, unfinished_hash, uniform
from rollout_spec.types import GREEDY_TEMPERATURE, PLACEHOLDER_TOKEN_ID, LogprobsMode, VerifyMethod, VerifyResult
from rollout_spec.verify.reference import Layout, project

ROWS, BLOCK = 2, 512
"""Logits rows per program of the scan, which share the tokens' keys, and tokens per tile: 32 logits per thread."""
MAX_REGISTERS = 168
"""Registers per thread of the scan: three of its one-warp programs fit each quarter of a multiprocessor, and nothing is
spilled on Hopper. The rare exact evaluation alone would take 230. With 128, four programs would fit, and every variant
with noise spills."""
TARGET_PROGRAMS = 132 * 12 * 2
"""Programs of the scan that fill an H200 (132 multiprocessors) twice."""
MAX_JOINED, SPLITS = 2048, 128
"""Partial results that the accept kernel holds at once, and the most of them per row. The latter is a constant: with
the launch's own number of splits the kernel would be compiled again for each power of two."""

GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PLACEHOLDER = tl.constexpr(PLACEHOLDER_TOKEN_ID)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
"""More than any token: of several that are equally probable, the least wins."""
HASH_BITS = tl.constexpr(32.0)
FEATURE_WORDS = tl.constexpr(format.FEATURE_WORDS)
SIGNATURE_WORDS = tl.constexpr(format.SIGNATURE_WORDS)
TOP_TOKENS = tl.constexpr(format.TOP_TOKENS)
LOGPROB_STEP, MAX_CODE = tl.constexpr(format.LOGPROB_STEP), tl.constexpr(format.MAX_CODE)
DOMAIN_TARGET, DOMAIN_ACCEPT = tl.constexpr(noise.DOMAIN_TARGET), tl.constexpr(noise.DOMAIN_ACCEPT)
DOMAIN_RESIDUAL = tl.constexpr(noise.DOMAIN_RESIDUAL)


class StepOutput(NamedTuple):
    """Where vLLM's V2 runner wants what a verification gives, in its dtypes: 0 stands for the placeholder.

    Tensors may be longer.
    """

    output: Tensor
    """int64 [B * width]"""
    targets: Tensor
    """int64 [N]"""
    logprobs: Tensor
    """float32 [N]"""
    ranks: Tensor
    """int64 [N]"""
    num_broken: Tensor
    """int32 [B]"""
    num_sampled: Tensor
    """int32 [B]: 0 for a chunk of a prompt without its end, otherwise accepted drafts and one."""
    num_rows: Tensor
    """int32 [B]"""
    num_rejected: Tensor
    """int32 [B]: drafted tokens; 0 for a chunk of a prompt."""
    seq_lens: Tensor
    """int32 [B], read: each request's tokens, the step's included."""
    slots: Tensor
    """integer [B], read."""
    prefill_len: Tensor
    """int32 [R], read: tokens that a request came with, by slot."""


class Memory:
    """Tensors that one stream's verifications write one after the other, so that a step allocates nothing."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def __call__(self, name: str, dtype: torch.dtype, size: int, device: torch.device) -> Tensor:
        """At least `size` numbers, of one dimension. What a tensor of this name held is lost."""
        kept = self._kept.get(name)
        if kept is None or kept.shape[0] < size:
            kept = self._kept[name] = torch.empty(next_power_of_2(size), dtype=dtype, device=device)
        return kept


class Parts(NamedTuple):
    """Partial results of the scan, [N, splits] each. Exponents are in units of ln 2."""

    score: Tensor  # float32, the largest logit / T + noise
    token: Tensor  # int32, its token
    high: Tensor  # float32, the largest exponent logit / T
    mass: Tensor  # float32, sum of 2**(exponent - high)
    unscaled_high: Tensor  # float32, these two at T = 1; where they are not asked for, the same tensors as above
    unscaled_mass: Tensor


@triton.jit
def _layout_kernel(
    starts_ptr,  # int32 [B + 1], read; the other fields of `Layout` are written
    row_temperature_ptr,
    row_seed_ptr,
    row_position_ptr,
    row_draft_ptr,
    positions_ptr,  # integer [T]
    temperature_ptr,  # float [R]
    seed_ptr,  # int64 [R]
    input_ids_ptr,  # integer [T]
    at_ptr,  # integer [N]: the rows' places among the T input tokens
    request_ptr,  # integer [B]: among R
    prefill_len_ptr,  # int32 [R]
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    first_row = tl.load(starts_ptr + index)
    num_drafts = tl.load(starts_ptr + index + 1) - first_row - 1
    position = tl.load(positions_ptr + tl.load(at_ptr + first_row)).to(tl.int64)
    request = tl.load(request_ptr + index)
    # Nothing has been drafted for a step that starts within the prompt: what stands there are placeholders.
    has_drafts = position >= tl.load(prefill_len_ptr + request)
    temperature = tl.load(temperature_ptr + request).to(tl.float32)
    seed = tl.load(seed_ptr + request)
    for offset in range(0, num_drafts + 1, BLOCK):
        j = offset + tl.arange(0, BLOCK)
        row, is_row, is_drafted = first_row + j, j <= num_drafts, (j < num_drafts) & has_drafts
        at = tl.load(at_ptr + row + 1, mask=is_drafted, other=0)  # a draft is the input of the next row
        draft = tl.load(input_ids_ptr + at, mask=is_drafted, other=-1).to(tl.int64)
        draft = tl.where((draft >= 0) & (draft < 2147483648), draft, PLACEHOLDER).to(tl.int32)
        tl.store(row_temperature_ptr + row, temperature, mask=is_row)
        tl.store(row_seed_ptr + row, seed, mask=is_row)
        tl.store(row_position_ptr + row, position + j, mask=is_row)
        tl.store(row_draft_ptr + row, draft, mask=is_row)


@triton.jit
def _load_temperature(temperature_ptr, row, is_row):
    """(temperature, whether greedy) of each row; a greedy row's temperature is 1."""
    temperature = tl.load(temperature_ptr + row, mask=is_row, other=1.0)
    is_greedy = temperature < GREEDY
    return tl.where(is_greedy, 1.0, temperature), is_greedy


@triton.jit
def _load_tile(logits_ptr, token, is_row, vocab_size):
    """float32 [ROWS, BLOCK], -inf past the ends. logits_ptr: [ROWS] rows' addresses; token: [BLOCK]."""
    mask = is_row[:, None] & (token < vocab_size)[None, :]
    return tl.load(logits_ptr[:, None] + token[None, :], mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _scan_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    temperature_ptr,  # float32 [N]
    seed_ptr,  # int64 [N]
    position_ptr,  # int64 [N]
    draft_ptr,  # int32 [N]
    score_ptr,  # the fields of `Parts`, [N, splits]
    token_ptr,
    high_ptr,
    mass_ptr,
    unscaled_high_ptr,
    unscaled_mass_ptr,
    tile_max_ptr,  # float32 [ceil(N / ROWS), tiles, ROWS]: the largest logit of each tile, written
    num_rows,
    vocab_size,
    tokens_per_split,
    REJECTION: tl.constexpr,  # sample what follows a rejected point-mass draft
    RAW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    split = tl.program_id(1)
    is_row = row < num_rows
    temperature, is_greedy = _load_temperature(temperature_ptr, row, is_row)
    scale = (1.0 / temperature) * LOG2E
    draft = tl.load(draft_ptr + row, mask=is_row, other=-1)
    logits_ptr += row * logits_stride  # [ROWS]

    best_score = tl.full([ROWS], float("-inf"), tl.float32)
    best_token = tl.full([ROWS], NO_TOKEN, tl.int32)
    seed = tl.load(seed_ptr + row, mask=is_row, other=0)
    position = tl.load(position_ptr + row, mask=is_row, other=0)
    if REJECTION:
        state = row_state(seed, position, DOMAIN_RESIDUAL)
    else:
        state = row_state(seed, position, DOMAIN_TARGET)
        # The draft is probably the winner: its score is a bound from the start.
        is_token = (draft >= 0) & (draft < vocab_size) & is_row
        drafted = tl.load(logits_ptr + draft, mask=is_token, other=float("-inf")).to(tl.float32)
        g = gumbel(finish_hash(unfinished_hash(state, token_key(draft.to(tl.uint32)))))
        best_score = drafted / temperature + tl.where(is_greedy, 0.0, g)
        best_token = tl.where(is_token, draft, best_token)

    high = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.full([ROWS], 0.0, tl.float32)
    unscaled_high = high
    unscaled_mass = mass
    first = split * tokens_per_split
    tile_max_ptr += tl.program_id(0).to(tl.int64) * ROWS * tl.cdiv(vocab_size, BLOCK)
    for start in range(first, tl.minimum(first + tokens_per_split, vocab_size), BLOCK):
        token = start + tl.arange(0, BLOCK)  # [BLOCK]
        logits = _load_tile(logits_ptr, token, is_row, vocab_size)  # [ROWS, BLOCK]
        if RAW:
            new_high = tl.maximum(unscaled_high, tl.max(logits, axis=1) * LOG2E)
            base = tl.where(new_high == float("-inf"), 0.0, new_high)
            weight = tl.exp2(logits * LOG2E - base[:, None])
            unscaled_mass = unscaled_mass * tl.exp2(unscaled_high - base) + tl.sum(weight, axis=1)
            unscaled_high = new_high
        tile_max = tl.max(logits, axis=1)
        tl.store(tile_max_ptr + start // BLOCK * ROWS + tl.arange(0, ROWS), tile_max)
        tile_high = tile_max * scale
        new_high = tl.maximum(high, tile_high)
        base = tl.where(new_high == float("-inf"), 0.0, new_high)
        weight = tl.exp2(tl.fma(logits, scale[:, None], -base[:, None]))  # [ROWS, BLOCK]
        mass = mass * tl.exp2(high - base) + tl.sum(weight, axis=1)
        high = new_high

        # weight * limit is the largest hash with which a token still wins. The slack of 0.07 % covers what
        # unfinished_hash leaves out (h ^ (h >> 16) differs from h by at most h / 2**16) and the rounding of what stands
        # here; that of the scores grows with them.
        slack = 1e-3 + 1e-6 * tl.abs(base)
        limit = tl.exp2(tl.minimum(base - best_score * LOG2E + slack, 60.0) + HASH_BITS)
        tile_limit = tl.exp2(tile_high - base) * limit
        reaches = is_greedy & (tile_max >= best_score)
        # Below 1/2 not even hash 0 wins.
        if tl.max((~is_greedy & (tile_limit >= 0.5)).to(tl.int32), axis=0) > 0:
            h = unfinished_hash(state[:, None], token_key(token.to(tl.uint32))[None, :])
            may_reach = tl.min(h, axis=1).to(tl.float32) <= tile_limit
            if tl.max((~is_greedy & may_reach).to(tl.int32), axis=0) > 0:
                excess = weight * limit[:, None] - h.to(tl.float32)
                reaches |= ~is_greedy & (tl.max(excess, axis=1) >= 0.0)
        if tl.max(reaches.to(tl.int32), axis=0) > 0:
            # Loaded a second time: kept in registers, they would slow every tile.
            logits = _load_tile(logits_ptr, token, is_row, vocab_size)
            h = finish_hash(unfinished_hash(state[:, None], token_key(token.to(tl.uint32))[None, :]))
            score = logits / temperature[:, None] + tl.where(is_greedy[:, None], 0.0, gumbel(h))
            if REJECTION:
                is_draft = (token[None, :] == draft[:, None]) & ~is_greedy[:, None]
                score = tl.where(is_draft, float("-inf"), score)
            # Which of NaN and a number is larger depends on their order here: lanes of a warp would find different
            # maxima and branch apart, which spoils the program's other rows. The row's mass shows that it is broken.
            score = tl.where(score == score, score, float("-inf"))
            tile_best, at = tl.max(score, axis=1, return_indices=True)
            tile_token = start + at
            better = (tile_best > best_score) | ((tile_best == best_score) & (tile_token < best_token))
            best_score = tl.where(better, tile_best, best_score)
            best_token = tl.where(better, tile_token, best_token)

    part = row * tl.num_programs(1) + split
    tl.store(score_ptr + part, best_score, mask=is_row)
    tl.store(token_ptr + part, best_token, mask=is_row)
    tl.store(high_ptr + part, high, mask=is_row)
    tl.store(mass_ptr + part, mass, mask=is_row)
    if RAW:
        tl.store(unscaled_high_ptr + part, unscaled_high, mask=is_row)
        tl.store(unscaled_mass_ptr + part, unscaled_mass, mask=is_row)


@triton.jit
def _join_sums(high, mass, high_ptr, mass_ptr, part, is_part):
    """Add splits' partial sums of exponentials to (high, mass), [WIDTH] each."""
    highs = tl.load(high_ptr + part, mask=is_part, other=float("-inf"))
    masses = tl.load(mass_ptr + part, mask=is_part, other=0.0)
    new_high = tl.maximum(high, tl.max(highs, axis=1))
    base = tl.where(new_high == float("-inf"), 0.0, new_high)
    # Selected, so that the products are rounded before lanes add them up: within a fused multiply-add only one of two
    # would be, and lanes would get sums that differ in their last bit.
    masses = tl.where(is_part, masses * tl.exp2(highs - base[:, None]), 0.0)
    return new_high, mass * tl.exp2(high - base) + tl.sum(masses, axis=1)


@triton.jit
def _join_splits(
    score_ptr,  # the fields of `Parts`
    token_ptr,
    high_ptr,
    mass_ptr,
    unscaled_high_ptr,
    unscaled_mass_ptr,
    row,
    is_row,
    num_splits,
    RAW: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The fields of `Parts` of whole rows, [WIDTH] each. Of equal scores' tokens the first."""
    best_score = tl.full([WIDTH], float("-inf"), tl.float32)
    best_token = tl.full([WIDTH], NO_TOKEN, tl.int32)
    high = tl.full([WIDTH], float("-inf"), tl.float32)
    mass = tl.full([WIDTH], 0.0, tl.float32)
    unscaled_high = high
    unscaled_mass = mass
    for first in range(0, num_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        part = row[:, None] * num_splits + split[None, :]  # [WIDTH, SPLITS]
        is_part = is_row[:, None] & (split < num_splits)[None, :]
        score = tl.load(score_ptr + part, mask=is_part, other=float("-inf"))
        top = tl.max(score, axis=1)
        token = tl.load(token_ptr + part, mask=is_part, other=NO_TOKEN)
        top_token = tl.min(tl.where(score == top[:, None], token, NO_TOKEN), axis=1)
        better = (top > best_score) | ((top == best_score) & (top_token < best_token))
        best_score = tl.where(better, top, best_score)
        best_token = tl.where(better, top_token, best_token)
        high, mass = _join_sums(high, mass, high_ptr, mass_ptr, part, is_part)
        if RAW:
            unscaled_high, unscaled_mass = _join_sums(
                unscaled_high, unscaled_mass, unscaled_high_ptr, unscaled_mass_ptr, part, is_part
            )
    return best_score, best_token, high, mass, unscaled_high, unscaled_mass


@triton.jit
def _accepts(seed_ptr, position_ptr, row, is_row, p, best_score, WIDTH: tl.constexpr):
    """The ratio test of point-mass drafts, which the target has with probability `p`: bool [WIDTH]."""
    seed = tl.load(seed_ptr + row, mask=is_row, other=0)
    position = tl.load(position_ptr + row, mask=is_row, other=0)
    h = unfinished_hash(row_state(seed, position, DOMAIN_ACCEPT), token_key(tl.zeros([WIDTH], tl.uint32)))
    # Without a score nothing but the draft can be drawn: the residual is empty.
    return (p > 0.0) & ((uniform(finish_hash(h)) <= p) | (best_score == float("-inf")))


@triton.jit(do_not_specialize=["num_splits", "width", "after_difference"])
def _accept_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    starts_ptr,  # int32 [B + 1]
    temperature_ptr,  # float32 [N]
    seed_ptr,  # int64 [N]
    position_ptr,  # int64 [N]
    draft_ptr,  # int32 [N]
    score_ptr,  # the fields of `Parts`
    token_ptr,
    high_ptr,
    mass_ptr,
    unscaled_high_ptr,
    unscaled_mass_ptr,
    output_ptr,  # int32 [B, width], written, and all until `joined_mass_ptr`; int64 of a `StepOutput`
    num_accepted_ptr,  # int32 [B]
    num_broken_ptr,  # int32 [B]
    target_ptr,  # int64 [N]
    logprob_ptr,  # float32 [N] or None
    rank_ptr,  # int64 [N] or None: set to 0, for the rank kernel
    joined_high_ptr,  # float32 [N]: `Parts.high` and `Parts.mass` of whole rows
    joined_mass_ptr,
    num_sampled_ptr,  # the last fields of `StepOutput`, or None
    num_rows_ptr,
    num_rejected_ptr,
    seq_lens_ptr,
    slots_ptr,
    prefill_len_ptr,
    vocab_size,
    num_splits,
    width,
    after_difference,  # 1: store the target's tokens after the first difference, too
    REJECTION: tl.constexpr,
    RAW: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    start = tl.load(starts_ptr + index)
    num_rows = tl.load(starts_ptr + index + 1) - start
    j = tl.arange(0, WIDTH)
    row = start.to(tl.int64) + j  # [WIDTH]
    is_row = j < num_rows
    best_score, token, high, mass, unscaled_high, unscaled_mass = _join_splits(
        score_ptr, token_ptr, high_ptr, mass_ptr, unscaled_high_ptr, unscaled_mass_ptr, row, is_row, num_splits,
        RAW, WIDTH, SPLITS,
    )  # fmt: skip
    is_valid = (mass > 0.0) & (mass < float("inf"))  # of NaN or +inf the mass is NaN, of a row of -inf 0

    temperature, is_greedy = _load_temperature(temperature_ptr, row, is_row)
    scale = (1.0 / temperature) * LOG2E
    draft = tl.load(draft_ptr + row, mask=is_row, other=-1)
    is_token = (j < num_rows - 1) & (draft >= 0) & (draft < vocab_size)
    accepted = token == draft
    if REJECTION:
        logit = tl.load(logits_ptr + row * logits_stride + draft, mask=is_token, other=float("-inf")).to(tl.float32)
        # Rounded as in the scan, so that p is exactly 1 where nothing else can be drawn.
        p = tl.div_rn(tl.exp2(tl.fma(logit, scale, -high)), mass)
        accepted = tl.where(is_greedy, accepted, _accepts(seed_ptr, position_ptr, row, is_row, p, best_score, WIDTH))
        token = tl.where(is_token & accepted, draft, token)
    accepted = is_token & accepted & is_valid
    token = tl.where(is_valid, token, PLACEHOLDER)
    num_accepted = tl.min(tl.where(accepted, WIDTH, j), axis=0)
    is_emitted = is_row & (j <= num_accepted)
    NOTHING: tl.constexpr = PLACEHOLDER if num_sampled_ptr is None else 0
    target = tl.where(is_emitted & is_valid, token, NOTHING)
    tl.store(output_ptr + index * width + j, target.to(output_ptr.dtype.element_ty), mask=j < width)
    tl.store(num_accepted_ptr + index, num_accepted)
    tl.store(num_broken_ptr + index, tl.sum((is_emitted & (mass != mass)).to(tl.int32), axis=0))
    if num_sampled_ptr is not None:
        slot = tl.load(slots_ptr + index)
        is_chunk = tl.load(seq_lens_ptr + index) < tl.load(prefill_len_ptr + slot)
        num_sampled = tl.where(is_chunk, 0, num_accepted + 1)
        tl.store(num_sampled_ptr + index, num_sampled)
        tl.store(num_rows_ptr + index, num_rows)
        tl.store(num_rejected_ptr + index, tl.where(is_chunk, 0, num_rows - num_sampled))
    elif not REJECTION:  # which samples nothing after the first difference
        target = tl.where(after_difference != 0, token, target)
    tl.store(target_ptr + row, target.to(tl.int64), mask=is_row)
    tl.store(joined_high_ptr + row, high, mask=is_row)
    tl.store(joined_mass_ptr + row, mass, mask=is_row)
    if logprob_ptr is not None:
        logit = tl.load(logits_ptr + row * logits_stride + token, mask=is_row & is_valid, other=0.0).to(tl.float32)
        if RAW:
            logprob = logit * LOG2E - unscaled_high - tl.log2(unscaled_mass)
        else:
            logprob = tl.fma(logit, scale, -high) - tl.log2(mass)
        tl.store(logprob_ptr + row, tl.minimum(logprob, 0.0) * LN2, mask=is_row)
        tl.store(rank_ptr + row, tl.zeros([WIDTH], tl.int64), mask=is_row)


@triton.jit
def _rank_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    starts_ptr,  # int32 [B + 1]
    num_accepted_ptr,  # int32 [B]
    target_ptr,  # int64 [N]
    rank_ptr,  # int64 [N], added to
    vocab_size,
    tokens_per_split,
    BLOCK: tl.constexpr,
):
    """Count the tokens that are at least as probable as the emitted one."""
    index = tl.program_id(0)
    start = tl.load(starts_ptr + index)
    row = start.to(tl.int64) + tl.program_id(1)
    is_emitted = tl.program_id(1) <= tl.load(num_accepted_ptr + index)
    if is_emitted:
        target = tl.load(target_ptr + row)
        if target >= 0:
            logits_ptr += row * logits_stride
            chosen = tl.load(logits_ptr + target).to(tl.float32)
            count = tl.zeros([BLOCK], tl.int32)
            first = tl.program_id(2) * tokens_per_split
            for offset in range(first, tl.minimum(first + tokens_per_split, vocab_size), BLOCK):
                token = offset + tl.arange(0, BLOCK)
                logits = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
                is_above = (logits >= chosen) & (token < vocab_size)
                count += is_above.to(tl.int32)
            tl.atomic_add(rank_ptr + row, tl.sum(count).to(tl.int64), sem="relaxed")


@triton.jit
def _features_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    projection_ptr,  # float [N, SIGNATURE_BITS]
    starts_ptr,  # int32 [B + 1]
    num_accepted_ptr,  # int32 [B]
    temperature_ptr,  # float32 [N]
    tile_max_ptr,  # float32 [ceil(N / ROWS), tiles, ROWS], of the scan
    high_ptr,  # float32 [N]: `Parts.high` and `Parts.mass` of whole rows
    mass_ptr,
    features_ptr,  # int64 [N, FEATURE_WORDS], written for the rows of emitted tokens
    vocab_size,
    TILES: tl.constexpr,  # power of two
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(starts_ptr + index).to(tl.int64) + tl.program_id(1)
    if tl.program_id(1) <= tl.load(num_accepted_ptr + index):
        features_ptr += row * FEATURE_WORDS
        bit = tl.arange(0, 64)
        for word in tl.static_range(SIGNATURE_WORDS):
            sign = tl.load(projection_ptr + row * SIGNATURE_WORDS * 64 + word * 64 + bit).to(tl.float32) > 0.0
            tl.store(features_ptr + word, tl.sum(sign.to(tl.int64) << bit, axis=0))

        high = tl.load(high_ptr + row)
        mass = tl.load(mass_ptr + row)
        ids = tl.zeros([2], tl.int64)  # the last two words
        if (mass > 0.0) & (mass < float("inf")):  # otherwise there is no distribution
            tile = tl.arange(0, TILES)
            num_tiles = tl.cdiv(vocab_size, BLOCK)
            at = (row // ROWS * num_tiles + tile) * ROWS + row % ROWS
            tile_max = tl.load(tile_max_ptr + at, mask=tile < num_tiles, other=float("-inf"))
            j = tl.arange(0, (TOP_TOKENS + 1) * BLOCK)
            token = tl.full([(TOP_TOKENS + 1) * BLOCK], NO_TOKEN, tl.int32)
            for i in tl.static_range(TOP_TOKENS):
                best = tl.max(tile_max, axis=0)
                at = tl.min(tl.where(tile_max == best, tile, TILES), axis=0)
                token = tl.where(j // BLOCK == i, at * BLOCK + j % BLOCK, token)
                tile_max = tl.where(tile == at, float("-inf"), tile_max)
            logits_ptr += row * logits_stride
            logits = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
            temperature, _ = _load_temperature(temperature_ptr, row, True)
            scale = (1.0 / temperature) * LOG2E
            place = tl.arange(0, 2)
            for i in tl.static_range(TOP_TOKENS):
                best = tl.max(logits, axis=0)
                at = tl.min(tl.where(logits == best, token, NO_TOKEN), axis=0)
                logprob = (tl.fma(best, scale, -high) - tl.log2(mass)) * LN2
                code = tl.minimum(tl.maximum(tl.floor(1.5 - logprob / LOGPROB_STEP), 1.0), MAX_CODE)
                if best > float("-inf"):
                    ids |= tl.where(place == i // 2, at.to(tl.int64) << (32 * (i % 2)), 0)
                    ids |= tl.where(place == 1, code.to(tl.int64) << (32 + 8 * i), 0)
                logits = tl.where(token == at, float("-inf"), logits)
        tl.store(features_ptr + SIGNATURE_WORDS + tl.arange(0, 2), ids)


_launch_layout = Launcher(_layout_kernel)
_launch_scan = Launcher(_scan_kernel)
_launch_accept = Launcher(_accept_kernel)
_launch_rank = Launcher(_rank_kernel)
_launch_features = Launcher(_features_kernel)


def gather_layout(
    input_ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
    starts: Tensor,
    request: Tensor,
    prefill_len: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    memory: Memory | None = None,
) -> Layout:
    """The layout of rows whose drafts were fed to the model as input tokens, as in vLLM's V2 model runner.

    Args:
        input_ids, positions: integer [T], the step's input tokens.
        logits_indices: integer [N], the rows' places among them.
        starts: int32 [B + 1], each request's first row, then N.
        request: integer [B], each request's index into the tensors that follow.
        prefill_len: int32 [R], tokens that a request came with.
        temperature, seeds: float32 and int64 [R].
        memory: Where the layout is written; its tensors may be longer then. None: new ones.
    """
    dtypes = {"temperature": torch.float32, "seed": torch.int64, "position": torch.int64, "draft": torch.int32}
    new, num_rows = memory or _new, logits_indices.shape[0]
    layout = Layout(starts, *(new(name, dtype, num_rows, starts.device) for name, dtype in dtypes.items()))
    # vLLM's dummy steps and its versions have other types here, for which the kernel would be compiled again.
    at, request = logits_indices.long(), request.int()
    tensors = positions, temperature, seeds, input_ids, at, request, prefill_len
    _launch_layout[(request.shape[0],)](*layout, *tensors, BLOCK=16, num_warps=1)
    return layout


def _new(name: str, dtype: torch.dtype, size: int, device: torch.device) -> Tensor:
    """In place of `Memory`."""
    return torch.empty(size, dtype=dtype, device=device)


def verify_rows(
    logits: Tensor,
    layout: Layout,
    *,
    method: VerifyMethod = "sample",
    logprobs_mode: LogprobsMode | None = None,
    with_ranks: bool = True,
    hidden: Tensor | None = None,
    after_difference: bool = False,
    max_draft_tokens: int,
    step: StepOutput | None = None,
    memory: Memory | None = None,
) -> VerifyResult:
    """See `rollout_spec.verify.api.verify_rows`.

    Args:
        step: Where the result is written, for vLLM's V2 runner.
        memory: Where all else is. None: new tensors.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    num_requests, width = layout.starts.shape[0] - 1, max_draft_tokens + 1
    is_raw, is_rejection = logprobs_mode == "raw_logprobs", method == "rejection"

    # One tensor each: slices of one would have other alignments, for which Triton compiles the kernel again.
    new = memory or _new

    def empty(name: str, dtype: torch.dtype, size: int) -> Tensor:
        return new(name, dtype, size, logits.device)

    num_groups, num_tiles = cdiv(num_rows, ROWS), cdiv(vocab_size, BLOCK)
    tokens_per_split, num_splits = _split(vocab_size, num_groups)
    num_parts = num_rows * num_splits
    score, token = empty("score", torch.float32, num_parts), empty("token", torch.int32, num_parts)
    high, mass = empty("high", torch.float32, num_parts), empty("mass", torch.float32, num_parts)
    unscaled = [empty(f"unscaled {i}", torch.float32, num_parts) for i in range(2)] if is_raw else [high, mass]
    parts = Parts(score, token, high, mass, *unscaled)
    tile_max = empty("tile_max", torch.float32, num_groups * num_tiles * ROWS)
    _launch_scan[(num_groups, num_splits)](
        logits,
        logits.stride(0),
        *layout[1:],
        *parts,
        tile_max,
        num_rows,
        vocab_size,
        tokens_per_split,
        REJECTION=is_rejection,
        RAW=is_raw,
        ROWS=ROWS,
        BLOCK=BLOCK,
        num_warps=1,
        maxnreg=MAX_REGISTERS,
    )

    num_accepted = empty("num_accepted", torch.int32, num_requests)
    features = logprobs = ranks = None
    if step is None:
        output = torch.empty(num_requests, width, dtype=torch.int32, device=logits.device)
        num_broken, targets = empty("broken", torch.int32, num_requests), empty("targets", torch.int64, num_rows)
        if logprobs_mode is not None:
            logprobs, ranks = empty("logprobs", torch.float32, num_rows), empty("ranks", torch.int64, num_rows)
    else:
        output, targets, *scores, num_broken = step[:5]
        if logprobs_mode is not None:
            logprobs, ranks = scores
    joined = [empty(f"joined {i}", torch.float32, num_rows) for i in range(2)]
    padded_width = next_power_of_2(width)
    _launch_accept[(num_requests,)](
        logits,
        logits.stride(0),
        layout.starts,
        *layout[1:],
        *parts,
        output,
        num_accepted,
        num_broken,
        targets,
        logprobs,
        ranks,
        *joined,
        *((None,) * 6 if step is None else step[5:]),
        vocab_size,
        num_splits,
        width,
        int(after_difference),
        REJECTION=is_rejection,
        RAW=is_raw,
        WIDTH=padded_width,
        SPLITS=min(SPLITS, max(1, MAX_JOINED // padded_width)),
    )

    if not with_ranks:
        ranks = None
    if ranks is not None:
        tokens_per_split, num_splits = _split(vocab_size, num_rows)
        _launch_rank[(num_requests, width, num_splits)](
            logits,
            logits.stride(0),
            layout.starts,
            num_accepted,
            targets,
            ranks,
            vocab_size,
            tokens_per_split,
            BLOCK=BLOCK,
            num_warps=1,
        )
    if hidden is not None:
        features = empty("features", torch.int64, num_rows * format.FEATURE_WORDS).view(-1, format.FEATURE_WORDS)
        _launch_features[(num_requests, width)](
            logits,
            logits.stride(0),
            project(hidden),
            layout.starts,
            num_accepted,
            layout.temperature,
            tile_max,
            *joined,
            features,
            vocab_size,
            TILES=next_power_of_2(num_tiles),
            ROWS=ROWS,
            BLOCK=BLOCK,
        )
    return VerifyResult(output, num_accepted, targets, logprobs, ranks, num_broken, features)


def _split(vocab_size: int, num_programs: int) -> tuple[int, int]:
    """(tokens per split, splits) such that about `TARGET_PROGRAMS` programs run."""
    num_tiles = cdiv(vocab_size, BLOCK)
    wanted = min(num_tiles, cdiv(TARGET_PROGRAMS, num_programs))
    tiles = cdiv(num_tiles, wanted)
    return tiles * BLOCK, cdiv(num_tiles, tiles)
