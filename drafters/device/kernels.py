"""Triton kernels of the device drafter; `tests/drafters/device/reference.py` says what they compute.

A step is three launches, whatever the batch: `_extend_kernel` copies the new tokens and counts the last drafts'
outcomes, `_scan_kernel` finds each request's matches in its problem's texts and looks other problems' up in the index,
and `_draft_kernel` drafts from them. `_move_kernel` copies texts to where there is more room; `_retire_kernel` finds
where requests have ended, and indexes texts that come from the host. Counters are integers, and of the entries for one
place of the index the largest stays, so that the order in which programs run does not matter: the same input gives the
same drafts on every rank. Nothing waits for the device and sizes that change are read from memory, so a step can be
captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_spec import features as target_features
from rollout_spec.drafters.host import constants
from rollout_spec.launches import Launcher
from rollout_spec.noise import host as noise
from rollout_spec.noise.triton import finish_hash, gumbel, row_state, token_key, unfinished_hash

TILE = 1024
"""Tokens that one program of the scan compares at once."""
NEW_TOKENS = 64
"""Tokens of a request that are copied at once: a step brings some nine, only its first one a whole prompt."""
SPLITS = (2, 8, 32)
"""How many programs may share one request's scan. `_draft_kernel` joins their candidates."""
TARGET_PROGRAMS = 132 * 5
"""Programs of the scan that an H200 has registers for at once: at most as many are launched, where the least split
allows."""
MOVE_SPLITS = 16
"""Programs that share the copying of one text."""
TILE_SPLITS = 2
"""How many of the programs of a scan share each document, by tiles."""

OFFSET, LENGTH, PROMPT, PROBLEM, COLUMN, CAPACITY, STAMP = (tl.constexpr(i) for i in range(7))
FIELDS = tl.constexpr(7)
"""Columns of the table of documents, int64: first token in the text, number of tokens, how many of these are prompt,
its problem's row in `Texts.members`, its problem's column in the index, for live requests how many tokens there is room
for, and its stamp. A later text has a larger stamp; one that other problems must not see has 0."""
RETIRED_FIELDS = tl.constexpr(6)
"""Columns of a row of `retire`: the document that ends (a slot), the new one, its capacity, two lengths, prompt
included (the least at which a stop token ends it, and the one at which it ends in any case), and the new one's stamp.
"""
MAX_MEMBERS = tl.constexpr(255)
"""Most documents of one problem that are scanned, newest first; ended ones are the first to be left out."""
SHARED_ORDER = tl.constexpr(3)
"""Tokens of context by which other problems' texts are found. Four and six gave fewer tokens per step on recorded
rollouts."""
COLUMNS = tl.constexpr(8)
"""Texts that the index holds for a context, of different problems: each has the column `problem_id % COLUMNS`."""
MAX_POSITION = tl.constexpr(2**31 - 1)
SHARED_NUMBER = tl.constexpr(1 << 16)
"""Documents found in the index are numbered from here by column; those of the problem have lower numbers."""

MAX_DEPTH = tl.constexpr(constants.MAX_DEPTH)
MAX_CANDIDATES = tl.constexpr(constants.MAX_CANDIDATES)
ENOUGH_CANDIDATES = tl.constexpr(constants.ENOUGH_CANDIDATES)
STEP = tl.constexpr(4)
"""Tokens that are compared between two checks whether any match is left."""
PARTS = tl.constexpr(8)
"""In how many parts choices are compared with each other: in fewer, `_draft_kernel` spills."""
LENGTH_SHIFT, RANK_SHIFT = tl.constexpr(52), tl.constexpr(32)
MAX_RANK = tl.constexpr((1 << 20) - 1)
"""A match is one int64 of three fields, larger is better: its length, MAX_RANK minus its document's number, and its
position."""
BLEND = tl.constexpr(constants.BLEND)
PRIOR = tl.constexpr(constants.PRIOR)
LENGTH_EDGES = tl.constexpr(constants.LENGTH_EDGES)
LENGTH_BINS = tl.constexpr(constants.NUM_LENGTH_BINS)
PROBABILITY_BINS = tl.constexpr(constants.NUM_PROBABILITY_BINS)
BINS_PER_HALVING = tl.constexpr(constants.BINS_PER_HALVING)
MIN_DISTANCE_FROM_ONE = tl.constexpr(constants.MIN_DISTANCE_FROM_ONE)
OWN_WEIGHT, SIBLING_WEIGHT = tl.constexpr(constants.OWN_WEIGHT), tl.constexpr(constants.SIBLING_WEIGHT)
PROMPT_WEIGHT, SHARED_WEIGHT = tl.constexpr(constants.PROMPT_WEIGHT), tl.constexpr(constants.SHARED_WEIGHT)
DOMAIN = tl.constexpr(noise.DOMAIN_TARGET)
SIMILARITY, MAX_DISAGREEMENT = tl.constexpr(constants.SIMILARITY), tl.constexpr(constants.MAX_DISAGREEMENT)
UNKNOWN_DISAGREEMENT = tl.constexpr(constants.UNKNOWN_DISAGREEMENT)
MIN_REMEMBERED = tl.constexpr(constants.MIN_REMEMBERED)
SIGNATURE_WORDS, SIGNATURE_BITS = (tl.constexpr(getattr(target_features, f"SIGNATURE_{n}")) for n in ("WORDS", "BITS"))
FEATURE_WORDS, TOP_TOKENS = tl.constexpr(target_features.FEATURE_WORDS), tl.constexpr(target_features.TOP_TOKENS)
LOGPROB_STEP, MAX_CODE = tl.constexpr(target_features.LOGPROB_STEP), tl.constexpr(target_features.MAX_CODE)
NOT_KEPT, UNKNOWN, GIVEN = (tl.constexpr(i) for i in range(3))
"""What `_extend_kernel` knows of the features of the new tokens."""


class Texts(NamedTuple):
    """What requests and ended rollouts have said, and which of them belong together."""

    members: Tensor
    """int32 [P, 1 + MAX_MEMBERS]: how many documents a problem has, and which, newest first."""
    tokens: Tensor
    """int32 [T], of live requests and of ended rollouts."""
    documents: Tensor
    """int64 [D, FIELDS]; those of live requests are numbered by slot."""
    features: Tensor
    """int64 [T, FEATURE_WORDS], what the target saw at each token; of length 0 where it is not kept."""
    index: Tensor
    """int64 [a power of two, COLUMNS]. Row: a hash of the SHARED_ORDER tokens before a token; column: its problem's.
    The entry says where the token is. Of several the newest text's stays, and in it the last. 0: there is none."""
    layout: tuple[int, int, int]
    """(bits of the position, first bit of the stamp, rows) of the index: from high to low an entry is stamp, document
    number, position."""

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the texts are, without what helps to find them."""
        return self.tokens, self.documents, self.features


class EngineSlots(NamedTuple):
    """What an engine knows of the requests in its slots."""

    token_ids: Tensor
    """int32 [R, >= max_model_len], prompts included."""
    lengths: Tensor
    """int32 [R], how many tokens there are."""
    seeds: Tensor
    """int64 [R], of the noise."""
    temperature: Tensor
    """float32 [R]; requests of temperature 0 have no noise."""


class LastDrafts(NamedTuple):
    """The last drafts of all slots."""

    lengths: Tensor
    """int32 [R]."""
    tokens: Tensor
    """int32 [R, K]."""
    cells: Tensor
    """int32 [R, K], the cell in which each token's outcome is counted."""


@triton.jit
def _bucket(tokens_ptr, mask, num_buckets):
    """The row of the index for the SHARED_ORDER tokens before each pointer, int64."""
    state = 0
    for i in tl.static_range(SHARED_ORDER):
        token = tl.load(tokens_ptr - 1 - i, mask=mask, other=0).to(tl.uint32)
        state = unfinished_hash(state, token_key(token))
    return finish_hash(state).to(tl.int64) & (num_buckets - 1)


@triton.jit
def _enter(index_ptr, tokens_ptr, position, is_new, prompt, column, entry, LAYOUT: tl.constexpr):
    """Enter tokens of a document's output into the index, by what was said before them.

    Args:
        tokens_ptr: Where the tokens are; those before them are there, too.
        position: Their positions in the document, int32.
        is_new: Which of them to enter.
        prompt: How many of the document's tokens are prompt.
        column: Of its problem.
        entry: Its stamp and number, of `_entry`.
    """
    is_new &= position >= tl.where(entry >> LAYOUT[1] > 0, tl.maximum(prompt, SHARED_ORDER), MAX_POSITION)
    at = _bucket(tokens_ptr, is_new, LAYOUT[2]) * COLUMNS + column
    tl.atomic_max(index_ptr + at, entry + position, mask=is_new, sem="relaxed")


@triton.jit
def _entry(stamp, document, LAYOUT: tl.constexpr):
    """An entry of the index for the document's first token, int64; see `Texts.layout`."""
    return (stamp << LAYOUT[1]) | (document << LAYOUT[0])


@triton.jit(do_not_specialize=["all_token_ids_stride"])
def _extend_kernel(
    slots_ptr,  # int32 [B]
    all_token_ids_ptr,  # `EngineSlots.token_ids`
    all_token_ids_stride,
    total_len_ptr,  # `EngineSlots.lengths`
    text_ptr,  # `Texts.tokens`
    documents_ptr,  # `Texts.documents`
    features_ptr,  # `Texts.features`
    index_ptr,  # `Texts.index`
    num_drafted_ptr,  # `LastDrafts.lengths`
    drafted_ptr,  # `LastDrafts.tokens`
    cells_ptr,  # `LastDrafts.cells`
    counts_ptr,  # int32 [cells, 2]: trials and hits
    new_features_ptr,  # int64 [N, FEATURE_WORDS], of the tokens that each row of the step's logits says
    first_rows_ptr,  # int32 [B]: the first of each request's rows
    num_sampled_ptr,  # int32 [B]: how many of its last tokens come from them
    FEATURES: tl.constexpr,
    LAYOUT: tl.constexpr,  # of the index
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two, at least K
    BLOCK: tl.constexpr,
):
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    documents_ptr += slot * FIELDS
    all_token_ids_ptr += slot * all_token_ids_stride
    offset = tl.load(documents_ptr + OFFSET)
    text_ptr += offset
    length = tl.load(documents_ptr + LENGTH).to(tl.int32)
    total_len = tl.load(total_len_ptr + slot).to(tl.int32)
    end = tl.minimum(total_len, tl.load(documents_ptr + CAPACITY).to(tl.int32))

    # In the first step of a request, the slot's last drafts are those of the request before it.
    num_drafted = tl.where(length > 0, tl.load(num_drafted_ptr + slot), 0)
    j = tl.arange(0, WIDTH)
    reached = j < tl.minimum(num_drafted, end - length)
    token = tl.load(all_token_ids_ptr + length + j, mask=reached, other=-1)
    at = slot * K + j
    hit = reached & (tl.load(drafted_ptr + at, mask=reached, other=-2) == token)
    # Where another drafter's draft was verified, the request may have said more after this one's first wrong token.
    first_miss = tl.min(tl.where(reached & ~hit, j, WIDTH), 0)
    reached &= j <= first_miss
    hit &= j < first_miss
    cell = tl.load(cells_ptr + at, mask=reached, other=0)
    tl.atomic_add(counts_ptr + cell * 2, 1, mask=reached, sem="relaxed")
    tl.atomic_add(counts_ptr + cell * 2 + 1, 1, mask=hit, sem="relaxed")

    prompt, column = tl.load(documents_ptr + PROMPT).to(tl.int32), tl.load(documents_ptr + COLUMN)
    entry = _entry(tl.load(documents_ptr + STAMP), slot, LAYOUT)
    for start in range(length, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(text_ptr + i, tl.load(all_token_ids_ptr + i, mask=i < end, other=0), mask=i < end)
        _enter(index_ptr, all_token_ids_ptr + i, i, i < end, prompt, column, entry, LAYOUT)
        if FEATURES != NOT_KEPT:
            i, word = i[:, None], tl.arange(0, FEATURE_WORDS)[None, :]
            value = tl.zeros([BLOCK, FEATURE_WORDS], tl.int64)
            if FEATURES == GIVEN:
                n = i - (total_len - tl.load(num_sampled_ptr + tl.program_id(0)))
                row = tl.load(first_rows_ptr + tl.program_id(0)).to(tl.int64) + n
                value = tl.load(new_features_ptr + row * FEATURE_WORDS + word, mask=(n >= 0) & (i < end), other=0)
            tl.store(features_ptr + (offset + i) * FEATURE_WORDS + word, value, mask=i < end)
    tl.store(documents_ptr + LENGTH, tl.maximum(length, end).to(tl.int64))
    tl.store(num_drafted_ptr + slot, 0)


@triton.jit(do_not_specialize=["tokens_stride"])
def _lengthen_kernel(
    slots_ptr,  # int32 [B]
    wanted_ptr,  # int32 [B]
    tokens_ptr,  # int64 [B, M], tokens_stride
    tokens_stride,
    text_ptr,  # `Texts.tokens`
    documents_ptr,  # `Texts.documents`
    features_ptr,  # `Texts.features`
    lengthened_ptr,  # int32 [B], written: 1 where the text was lengthened; read where it is shortened again
    SHORTEN: tl.constexpr,
    FEATURES: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two, at least M
):
    """Append tokens that may come to the texts of some live requests, or take them away again."""
    row = tl.program_id(0).to(tl.int64)
    documents_ptr += tl.load(slots_ptr + row).to(tl.int64) * FIELDS
    length = tl.load(documents_ptr + LENGTH)
    if SHORTEN:
        is_longer = tl.load(lengthened_ptr + row)
        tl.store(documents_ptr + LENGTH, length - is_longer * M)
    else:
        has_room = length + M < tl.load(documents_ptr + CAPACITY)
        is_longer = tl.where(has_room, tl.load(wanted_ptr + row), 0).to(tl.int32)
        tl.store(lengthened_ptr + row, is_longer)
        j = tl.arange(0, WIDTH)
        is_token = j < is_longer * M
        at = tl.load(documents_ptr + OFFSET) + length + j
        token = tl.load(tokens_ptr + row * tokens_stride + j, mask=is_token, other=0)
        tl.store(text_ptr + at, token.to(tl.int32), mask=is_token)
        if FEATURES:
            for word in tl.static_range(FEATURE_WORDS):
                tl.store(features_ptr + at * FEATURE_WORDS + word, tl.zeros([WIDTH], tl.int64), mask=is_token)
        tl.store(documents_ptr + LENGTH, length + is_longer * M)


@triton.jit
def _scan_document(text_ptr, own_end, depth_limit, offset, begin, length, step, rank, kept, TILE: tl.constexpr):
    """Merge into `kept` the matches of the tokens before `own_end` in one document, from `begin` on.

    Tiles are read from the last to the first, as later positions win among equals.
    """
    lane, j = tl.arange(0, MAX_CANDIDATES), tl.arange(0, TILE)
    last = tl.load(text_ptr + own_end - 1)
    num_tiles = tl.cdiv(tl.maximum(length - begin, 0), step)
    for n in range(num_tiles):
        start = begin + (num_tiles - 1 - n) * step
        i = start + j
        here = text_ptr + offset + i - 1  # the token before the continuation
        alive = (i < length) & (tl.load(here, mask=i < length, other=-1) == last)
        matched = alive.to(tl.int32)
        depth = tl.full([], 1, tl.int32)
        go_on = tl.max(matched) > 0
        while go_on:
            for d in tl.static_range(STEP):
                wanted = tl.load(text_ptr + own_end - 1 - depth - d, mask=depth + d < depth_limit, other=-1)
                alive &= i > depth + d
                alive &= tl.load(here - depth - d, mask=alive, other=-2) == wanted
                matched += alive.to(tl.int32)
            depth += STEP
            go_on = tl.max(alive.to(tl.int32)) > 0

        # Within the tile a match is a small integer: its length, then its place. Once ENOUGH_CANDIDATES are kept, only
        # matches as long as the last of them are added.
        key = tl.where(matched > 0, matched * TILE + j, 0)
        best, lowest = tl.max(key), tl.min(kept)
        if (best // TILE).to(tl.int64) >= lowest >> LENGTH_SHIFT:
            lengths = kept >> LENGTH_SHIFT
            as_long = tl.sum((lengths[None, :] >= lengths[:, None]).to(tl.int32), 1)
            floor = tl.max(tl.where(as_long >= ENOUGH_CANDIDATES, lengths, 0)).to(tl.int32)
            found = _join(best, start, rank, TILE)
            while (best // TILE >= floor) & (found > lowest):
                kept = tl.where(lane == tl.argmin(kept, 0), found, kept)
                key = tl.where(key == best, 0, key)
                best, lowest = tl.max(key), tl.min(kept)
                found = _join(best, start, rank, TILE)
    return kept


@triton.jit
def _join(key, start, rank, TILE: tl.constexpr):
    """A match's key among all texts, int64, from the one within a tile; 0: no match."""
    length, position = (key // TILE).to(tl.int64), (start + key % TILE).to(tl.int64)
    return tl.where(key > 0, (length << LENGTH_SHIFT) | (rank << RANK_SHIFT) | position, 0)


@triton.jit
def _look_up(index_ptr, num_buckets, text_ptr, documents_ptr, slot, found_ptr, LAYOUT: tl.constexpr):
    """The matches of a request's last tokens in other problems' texts: int64 [MAX_CANDIDATES], at most COLUMNS of them.

    Writes their documents to `found_ptr`. An entry is out of date if its document has another stamp by now.
    """
    column, depth = tl.arange(0, COLUMNS), tl.arange(0, MAX_DEPTH)[None, :]
    own = documents_ptr + slot * FIELDS
    own_length = tl.load(own + LENGTH).to(tl.int32)
    own_end = text_ptr + tl.load(own + OFFSET) + own_length
    can_look = (tl.load(own + STAMP) > 0) & (own_length >= SHARED_ORDER)
    bucket = _bucket(own_end, can_look, num_buckets)
    entry = tl.where(can_look, tl.load(index_ptr + bucket * COLUMNS + column), 0)
    position = (entry & ((1 << LAYOUT[0]) - 1)).to(tl.int32)
    document = (entry >> LAYOUT[0]) & ((1 << LAYOUT[1] - LAYOUT[0]) - 1)
    fields = documents_ptr + document * FIELDS
    is_known = (entry > 0) & (tl.load(fields + STAMP, mask=entry > 0, other=-1) == entry >> LAYOUT[1])
    is_known &= tl.load(fields + PROBLEM, mask=is_known, other=0) != tl.load(own + PROBLEM)
    theirs = text_ptr + tl.load(fields + OFFSET, mask=is_known, other=0) + position - 1
    is_inside = is_known[:, None] & (depth < position[:, None])
    is_same = tl.load(theirs[:, None] - depth, mask=is_inside, other=-1) == tl.load(
        own_end - 1 - depth, mask=depth < own_length, other=-2
    )
    length = tl.min(tl.where(is_same, MAX_DEPTH, depth), 1)
    tl.store(found_ptr + column, document.to(tl.int32))
    rank = (column + SHARED_NUMBER).to(tl.int64) ^ MAX_RANK
    key = (length.to(tl.int64) << LENGTH_SHIFT) | (rank << RANK_SHIFT) | position
    key = tl.where(is_known & (length >= SHARED_ORDER), key, 0)
    lane = tl.arange(0, MAX_CANDIDATES)
    return tl.sum(tl.where(lane[:, None] == column[None, :], key[None, :], 0), 1)


@triton.jit(do_not_specialize=["doc_splits", "num_buckets"])
def _scan_kernel(
    slots_ptr,  # int32 [B]
    wanted_ptr,  # int32 [B], 0: nothing is drafted for the request
    members_ptr,  # `Texts.members`
    text_ptr,  # `Texts.tokens`
    documents_ptr,  # `Texts.documents`
    index_ptr,  # `Texts.index`
    keys_ptr,  # int64 [B, splits, MAX_CANDIDATES], written
    found_ptr,  # int32 [B, COLUMNS], written: the documents that the index named
    doc_splits,
    num_buckets,  # of the index: as a constant it would make ptxas spill for Hopper
    LAYOUT: tl.constexpr,  # of the index
    TILE_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    own = documents_ptr + slot * FIELDS
    own_length = tl.load(own + LENGTH).to(tl.int32)
    kept = tl.zeros([MAX_CANDIDATES], tl.int64)
    # A text without room may lack its last tokens: nothing is drafted for it.
    if (tl.load(wanted_ptr + row) > 0) & (own_length < tl.load(own + CAPACITY)):
        if split == 0:
            kept = _look_up(index_ptr, num_buckets, text_ptr, documents_ptr, slot, found_ptr + row * COLUMNS, LAYOUT)
        members_ptr += tl.load(own + PROBLEM) * (1 + MAX_MEMBERS)
        own_offset = tl.load(own + OFFSET)
        own_end, depth_limit = own_offset + own_length, tl.minimum(own_length, MAX_DEPTH)
        skip = (split % TILE_SPLITS) * TILE
        count = tl.load(members_ptr)
        for n in range(split // TILE_SPLITS, count + 1, doc_splits):
            # Number 0 is the request's own document (entry 0 of the members is their count). Among the members it is
            # skipped.
            number = tl.full([], 0, tl.int64) + n
            document = tl.where(number == 0, slot, tl.load(members_ptr + number).to(tl.int64))
            if (number == 0) | (document != slot):
                fields = documents_ptr + document * FIELDS
                first = tl.where(number == 0, 1, tl.maximum(tl.load(fields + PROMPT).to(tl.int32), 1))
                kept = _scan_document(
                    text_ptr,
                    own_end,
                    depth_limit,
                    tl.load(fields + OFFSET),
                    first + skip,
                    tl.load(fields + LENGTH).to(tl.int32),
                    TILE * TILE_SPLITS,
                    (number ^ MAX_RANK),
                    kept,
                    TILE,
                )
    tl.store(keys_ptr + (row * tl.num_programs(1) + split) * MAX_CANDIDATES + tl.arange(0, MAX_CANDIDATES), kept)


@triton.jit
def _best_matches(keys):
    """The candidates in order, best first. Returns (keys [MAX_CANDIDATES], 0: none; how many)."""
    lane = tl.arange(0, MAX_CANDIDATES)
    chosen = tl.zeros([MAX_CANDIDATES], tl.int64)
    count = 0
    best = tl.max(keys)
    shortest = best >> LENGTH_SHIFT
    while (best > 0) & (count < MAX_CANDIDATES) & ((count < ENOUGH_CANDIDATES) | ((best >> LENGTH_SHIFT) >= shortest)):
        chosen = tl.where(lane == count, best, chosen)
        shortest = best >> LENGTH_SHIFT
        keys = tl.where(keys == best, 0, keys)
        best = tl.max(keys)
        count += 1
    return chosen, count


@triton.jit
def _rate(counts_ptr, cell, expected):
    """Probability that a drafted token is accepted: the rate of its cell, whose prior is the expected probability."""
    return (tl.load(counts_ptr + cell * 2 + 1) + PRIOR * expected) / (tl.load(counts_ptr + cell * 2) + PRIOR)


@triton.jit
def _count_bits(word):
    """How many bits of an int64 are set. Where shifts copy the sign, the masks take it away."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((word * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _by_similarity(mine, theirs, alive):
    """See `voting.compare_states`.

    Args:
        mine: Where the request's last signature is.
        theirs: Where the candidates' signatures are.

    Returns:
        (each candidate's factor by the similarity of its state, whether it is left).
    """
    differing = tl.zeros([MAX_CANDIDATES], tl.int32)
    known_mine, known_theirs = tl.zeros([], tl.int64), tl.zeros([MAX_CANDIDATES], tl.int64)
    for word in tl.static_range(SIGNATURE_WORDS):
        a, b = tl.load(mine + word), tl.load(theirs + word, mask=alive, other=0)
        known_mine, known_theirs = known_mine | a, known_theirs | b
        differing += _count_bits(a ^ b)
    known = alive & (known_mine != 0) & (known_theirs != 0)
    fewest = tl.min(tl.where(known, differing, SIGNATURE_BITS + 1))
    more = tl.where(known, differing - fewest, UNKNOWN_DISAGREEMENT)
    more = tl.where(fewest <= SIGNATURE_BITS, more, 0)
    return tl.exp(-more.to(tl.float32) * SIMILARITY), alive & (more <= MAX_DISAGREEMENT)


@triton.jit
def _remembered(theirs, token, alive, is_stored):
    """What the candidates vote for, [MAX_CANDIDATES, TOP_TOKENS + 1]: the remembered tokens and the one that was said.

    Args:
        theirs: Where the features of the candidates' next tokens are.
        token: These tokens.
        is_stored: Whether they have features; those of the draft itself have none.

    Returns:
        (tokens, their probabilities, whether they are choices, by candidate the probability that none of them has).
    """
    rank = tl.arange(0, TOP_TOKENS + 1)[None, :]
    is_top = is_stored[:, None] & (rank < TOP_TOKENS)
    word = tl.load(theirs[:, None] + SIGNATURE_WORDS + (rank >> 1), mask=is_top, other=0)
    top = ((word >> 32 * (rank & 1)) & 0x7FFFFFFF).to(tl.int32)
    codes = (tl.load(theirs + FEATURE_WORDS - 1, mask=is_stored, other=0) >> 32).to(tl.int32)
    code = (codes[:, None] >> 8 * rank) & MAX_CODE
    probability = tl.exp((1 - code).to(tl.float32) * LOGPROB_STEP)
    is_top &= (code > 0) & (probability >= MIN_REMEMBERED)
    probability = tl.where(is_top, probability, 0.0)
    rest = tl.maximum(1.0 - tl.sum(probability, 1), 0.0)
    says_top = tl.sum((is_top & (top == token[:, None])).to(tl.int32), 1) > 0
    is_said = alive[:, None] & (rank == TOP_TOKENS) & ~says_top[:, None]
    probability = tl.where(is_said, rest[:, None], probability)
    return tl.where(is_said, token[:, None], top), probability, is_top | is_said, tl.where(says_top, rest, 0.0)


@triton.jit
def _shares(alive, length, votes):
    """(each candidate's factor by its match length, probability that no candidate is right); see `voting.blend`."""
    lane = tl.arange(0, MAX_CANDIDATES)
    # The first candidate of a length stands for it.
    earlier = alive[None, :] & (lane[None, :] < lane[:, None]) & (length[None, :] == length[:, None])
    is_first = alive & (tl.sum(earlier.to(tl.int32), 1) == 0)
    total = tl.sum(tl.where(length[None, :] >= length[:, None], votes[None, :], 0.0), 1) + BLEND
    shrink = tl.where(is_first, tl.log2(1.0 / total * BLEND), 0.0)
    before = tl.sum(tl.where(length[None, :] > length[:, None], shrink[None, :], 0.0), 1)
    of_length = tl.where(is_first, tl.exp2(before) / total, 0.0)
    share = tl.sum(tl.where(length[None, :] <= length[:, None], of_length[None, :], 0.0), 1)
    return share, tl.exp2(tl.sum(shrink))


@triton.jit
def _candidates(matches, alive, slot, members_ptr, found_ptr, documents_ptr):
    """Where the matches are: (length, position, whether in the request's own text, offset and length of the document,
    weight)."""
    length = (matches >> LENGTH_SHIFT).to(tl.int32)
    number = (((matches >> RANK_SHIFT) & MAX_RANK) ^ MAX_RANK).to(tl.int32)
    position = (matches & 0xFFFFFFFF).to(tl.int32)
    is_own, is_shared = number == 0, number >= SHARED_NUMBER
    documents = tl.where(is_shared, found_ptr - SHARED_NUMBER, members_ptr) + number
    document = tl.load(documents, mask=alive & ~is_own, other=0).to(tl.int64)
    fields = documents_ptr + tl.where(is_own, slot, document) * FIELDS
    offset, limit = tl.load(fields + OFFSET), tl.load(fields + LENGTH).to(tl.int32)
    is_output = position >= tl.load(fields + PROMPT).to(tl.int32)
    others_weight = tl.where(is_shared, SHARED_WEIGHT, SIBLING_WEIGHT)
    weight = tl.where(is_own, tl.where(is_output, OWN_WEIGHT, PROMPT_WEIGHT), others_weight)
    return length, position, is_own, offset, limit, weight


@triton.jit
def _join_votes(choices, shares, is_choice, NUM_CHOICES: tl.constexpr):
    """Sum what was voted for each token: (mass, whether it is the first choice of its token, number of tokens)."""
    lane = tl.arange(0, NUM_CHOICES)
    largest = tl.max(choices)
    mass = tl.zeros([NUM_CHOICES], tl.float32) + tl.sum(shares)
    num_tokens = tl.full([], 1, tl.int32)
    if tl.min(tl.where(is_choice, choices, largest)) < largest:  # more than one distinct token
        mass = tl.zeros([NUM_CHOICES], tl.float32)
        for start in range(0, NUM_CHOICES, NUM_CHOICES // PARTS):
            other = start + tl.arange(0, NUM_CHOICES // PARTS)
            same = tl.gather(choices, other, 0)[None, :] == choices[:, None]
            mass += tl.sum(tl.where(same, tl.gather(shares, other, 0)[None, :], 0.0), 1)
            earlier = same & (other[None, :] < lane[:, None])
            is_choice &= tl.sum(earlier.to(tl.int32), 1) == 0
        num_tokens = tl.sum(is_choice.to(tl.int32))
    else:
        is_choice = lane == tl.argmax(choices, 0)
    return mass, is_choice, num_tokens


@triton.jit
def _choose(choices, mass, is_choice, num_tokens, no_choice, coupled, seed, position, NUM_CHOICES: tl.constexpr):
    """(the token that is drafted, with the target's noise if `coupled`; the probability that the target agrees)."""
    lane = tl.arange(0, NUM_CHOICES)
    if coupled & (num_tokens > 1):
        state = row_state(seed, position.to(tl.int64), DOMAIN)
        noises = gumbel(finish_hash(unfinished_hash(state, token_key(choices.to(tl.uint32)))))
        log_mass = tl.log(tl.where(is_choice, mass, 1.0))
        score = tl.where(is_choice, log_mass + noises, float("-inf"))
        best = tl.argmax(score, 0)
        lead = tl.max(score) - tl.max(tl.where(lane == best, float("-inf"), score))
        expected = (1.0 - no_choice) / (1.0 + tl.exp(-lead))
    else:
        best = tl.argmax(tl.where(is_choice, mass, -1.0), 0)
        expected = tl.where(coupled, 1.0 - no_choice, tl.sum(tl.where(lane == best, mass, 0.0)))
    return tl.sum(tl.where(lane == best, choices, 0)), expected


@triton.jit
def _cell(coupled, expected, longest):
    """The cell of `constants.CELLS` whose outcomes calibrate a drafted token."""
    from_one = tl.maximum(1.0 - expected, MIN_DISTANCE_FROM_ONE)
    probability_bin = tl.minimum((tl.log2(from_one) * -BINS_PER_HALVING).to(tl.int32), PROBABILITY_BINS - 1)
    cell = (coupled.to(tl.int32) * PROBABILITY_BINS + probability_bin) * LENGTH_BINS
    for n in tl.static_range(LENGTH_BINS - 1):
        cell += (longest > LENGTH_EDGES[n]).to(tl.int32)
    return cell


@triton.jit
def _draft_kernel(
    slots_ptr,  # int32 [B]
    keys_ptr,  # int64 [B, splits, MAX_CANDIDATES]
    found_ptr,  # int32 [B, COLUMNS]
    members_ptr,  # `Texts.members`
    text_ptr,  # `Texts.tokens`
    documents_ptr,  # `Texts.documents`
    features_ptr,  # `Texts.features`
    seeds_ptr,  # int64 [R]
    temperature_ptr,  # float32 [R]
    counts_ptr,  # int32, see `_extend_kernel`
    num_drafted_ptr,  # `LastDrafts.lengths`, written
    drafted_ptr,  # `LastDrafts.tokens`, written
    cells_ptr,  # `LastDrafts.cells`, written
    output_ptr,  # int64 [B, K], written: the drafts; positions without one repeat the last token
    rates_ptr,  # float32 [B, K], written
    BY_SLOT: tl.constexpr,  # these two are [R, K], by slot
    FEATURES: tl.constexpr,  # whether they are kept
    USE_NOISE: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two, at least K
    NUM_KEYS: tl.constexpr,  # splits * MAX_CANDIDATES
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    output_ptr += (slot if BY_SLOT else row) * K
    rates_ptr += (slot if BY_SLOT else row) * K
    matches, count = _best_matches(tl.load(keys_ptr + row * NUM_KEYS + tl.arange(0, NUM_KEYS)))
    lane, j = tl.arange(0, MAX_CANDIDATES), tl.arange(0, WIDTH)
    NUM_CHOICES: tl.constexpr = MAX_CANDIDATES * (TOP_TOKENS + 1) if FEATURES else MAX_CANDIDATES
    alive = lane < count
    own = documents_ptr + slot * FIELDS
    own_offset, own_length = tl.load(own + OFFSET), tl.load(own + LENGTH).to(tl.int32)
    members_ptr += tl.load(own + PROBLEM) * (1 + MAX_MEMBERS)
    length, position, is_own, offset, limit, weight = _candidates(
        matches, alive, slot, members_ptr, found_ptr + row * COLUMNS, documents_ptr
    )
    if FEATURES:
        last = features_ptr + (own_offset + tl.maximum(own_length - 1, 0)) * FEATURE_WORDS
        before = features_ptr + (offset + position - 1) * FEATURE_WORDS
        similarity, alive = _by_similarity(last, before, alive)
        weight *= similarity
        count = tl.sum(alive.to(tl.int32))
    coupled = (tl.load(temperature_ptr + slot) > 0.0) & USE_NOISE
    seed = tl.load(seeds_ptr + slot)

    # The tokens drafted so far: a candidate in the request's own text continues into them.
    draft = tl.zeros([WIDTH], tl.int32)
    num = 0
    votes = tl.where(alive, weight, 0.0)
    share, left = _shares(alive, length, votes)
    while (num < K) & (count > 0):
        in_draft = position - own_length
        of_draft = tl.sum(tl.where(in_draft[:, None] == j[None, :], draft[None, :], 0), 1)
        is_stored = alive & ((position < own_length) | ~is_own)
        token = tl.where(is_stored, tl.load(text_ptr + offset + position, mask=is_stored, other=0), of_draft)
        if FEATURES:
            their_features = features_ptr + (offset + position) * FEATURE_WORDS
            tops, probability, is_vote, unheld = _remembered(their_features, token, alive, is_stored)
            choices = tl.reshape(tops, [NUM_CHOICES])
            shares_of = tl.reshape(probability * (votes * share)[:, None], [NUM_CHOICES])
            is_choice = tl.reshape(is_vote, [NUM_CHOICES])
            no_choice = tl.minimum(left + tl.sum(votes * share * unheld), 1.0)
        else:
            choices, shares_of, is_choice, no_choice = token, votes * share, alive, left
        choices = tl.where(is_choice, choices, -1 - tl.arange(0, NUM_CHOICES))  # what is no choice equals no other
        mass, is_choice, num_tokens = _join_votes(choices, shares_of, is_choice, NUM_CHOICES)
        at = own_length - 1 + num
        chosen, expected = _choose(choices, mass, is_choice, num_tokens, no_choice, coupled, seed, at, NUM_CHOICES)

        agrees = alive & (token == chosen)
        longest = tl.max(tl.where(alive, length, 0))
        cell = _cell(coupled, expected, longest)
        tl.store(drafted_ptr + slot * K + num, chosen)
        tl.store(cells_ptr + slot * K + num, cell)
        tl.store(output_ptr + num, chosen.to(tl.int64))
        tl.store(rates_ptr + num, _rate(counts_ptr, cell, expected))

        draft = tl.where(j == num, chosen, draft)
        num += 1
        position += 1
        alive = agrees & (position < tl.where(is_own, own_length + num, limit))
        was, count = count, tl.sum(alive.to(tl.int32))
        # While no candidate drops out and none reaches MAX_DEPTH, all lengths grow by one and the shares stay.
        if (count < was) | (longest >= MAX_DEPTH - 1):
            length = tl.minimum(length + 1, MAX_DEPTH)
            votes = tl.where(alive, weight, 0.0)
            share, left = _shares(alive, length, votes)
        else:
            length += 1
    tl.store(num_drafted_ptr + slot, num)
    last = tl.load(text_ptr + own_offset + own_length - 1, mask=own_length > 0, other=0)
    last = tl.where(num > 0, tl.sum(tl.where(j == num - 1, draft, 0)), last).to(tl.int64)
    empty = (j >= num) & (j < K)
    tl.store(output_ptr + j, tl.broadcast_to(last, [WIDTH]), mask=empty)
    tl.store(rates_ptr + j, tl.zeros([WIDTH], tl.float32), mask=empty)


@triton.jit
def _move_kernel(
    rows_ptr,  # int64 [N, 3]: slot, where its text begins from now on, and how many tokens there is room for
    text_ptr,  # `Texts.tokens`
    documents_ptr,  # `Texts.documents`
    features_ptr,  # `Texts.features`
    FEATURES: tl.constexpr,  # whether they are kept
    BLOCK: tl.constexpr,
):
    rows_ptr += tl.program_id(0) * 3
    documents_ptr += tl.load(rows_ptr) * FIELDS
    offset, new_offset = tl.load(documents_ptr + OFFSET), tl.load(rows_ptr + 1)
    length = tl.load(documents_ptr + LENGTH).to(tl.int32)
    for start in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(text_ptr + new_offset + i, tl.load(text_ptr + offset + i, mask=i < length), mask=i < length)
        if FEATURES:
            for word in tl.static_range(FEATURE_WORDS):
                value = tl.load(features_ptr + (offset + i) * FEATURE_WORDS + word, mask=i < length)
                tl.store(features_ptr + (new_offset + i) * FEATURE_WORDS + word, value, mask=i < length)


@triton.jit(do_not_specialize=["num_stops"])
def _retire_kernel(
    rows_ptr,  # int64 [N, RETIRED_FIELDS]
    stops_ptr,  # int32 [N, num_stops]: tokens that end the request, -1: unused
    num_stops,
    text_ptr,  # `Texts.tokens`
    documents_ptr,  # `Texts.documents`
    index_ptr,  # `Texts.index`
    LAYOUT: tl.constexpr,  # of the index
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    rows_ptr += n * RETIRED_FIELDS
    slot, document, capacity = tl.load(rows_ptr), tl.load(rows_ptr + 1), tl.load(rows_ptr + 2).to(tl.int32)
    may_stop, must_stop = tl.load(rows_ptr + 3).to(tl.int32), tl.load(rows_ptr + 4).to(tl.int32)
    stamp = tl.load(rows_ptr + 5)
    entry = _entry(stamp, document, LAYOUT)
    source = documents_ptr + slot * FIELDS
    prompt = tl.load(source + PROMPT).to(tl.int32)
    problem, column = tl.load(source + PROBLEM), tl.load(source + COLUMN)
    context = tl.minimum(prompt, MAX_DEPTH)
    begin = prompt - context
    offset = tl.load(source + OFFSET) + begin
    text_ptr += offset
    end = tl.minimum(tl.load(source + LENGTH).to(tl.int32), must_stop) - begin
    end = tl.minimum(end, capacity)
    start = tl.zeros([], tl.int32)
    while start < end:
        i = start + tl.arange(0, BLOCK)
        token = tl.load(text_ptr + i, mask=i < end, other=-2)
        stops = tl.zeros([BLOCK], tl.int1)
        for s in range(num_stops):
            stops |= token == tl.load(stops_ptr + n * num_stops + s)
        stops &= (i < end) & (begin + i + 1 >= may_stop)
        end = tl.minimum(end, tl.min(tl.where(stops, i + 1, end)))
        _enter(index_ptr, text_ptr + i, i, i < end, context, column, entry, LAYOUT)
        start += BLOCK
    target = documents_ptr + document * FIELDS
    tl.store(target + OFFSET, offset)
    tl.store(target + LENGTH, tl.maximum(end, 0).to(tl.int64))
    tl.store(target + PROMPT, context.to(tl.int64))
    tl.store(target + PROBLEM, problem)
    tl.store(target + COLUMN, column)
    tl.store(target + STAMP, stamp)


launch_extend, launch_lengthen = Launcher(_extend_kernel), Launcher(_lengthen_kernel)
launch_scan, launch_draft = Launcher(_scan_kernel), Launcher(_draft_kernel)


def halve_full(counters: Tensor) -> None:
    """Halve counters that have MAX_TRIALS trials: they follow the policy. counters: int32 [n, 2], trials and hits."""
    counters.copy_(torch.where(counters[:, :1] >= constants.MAX_TRIALS, counters // 2, counters))


def move(rows: Tensor, texts: Texts) -> None:
    """Move live requests' texts to where there is more room. Arguments as of the kernel."""
    has_features = texts.features.shape[0] > 0
    _move_kernel[(rows.shape[0], MOVE_SPLITS)](rows, *texts.stored, FEATURES=has_features, BLOCK=TILE, num_warps=4)
    slots, offsets, capacities = rows.unbind(1)
    texts.documents[slots, OFFSET.value] = offsets
    texts.documents[slots, CAPACITY.value] = capacities


def retire(rows: Tensor, stops: Tensor, texts: Texts) -> None:
    """Make documents of ended requests' last MAX_DEPTH prompt tokens and output, where these are, and index them.

    A text that comes from the host is a document already: of it a row makes itself. Arguments as of the kernel.
    """
    where = texts.tokens, texts.documents, texts.index
    _retire_kernel[(rows.shape[0],)](rows, stops, stops.shape[1], *where, LAYOUT=texts.layout, BLOCK=TILE, num_warps=4)
