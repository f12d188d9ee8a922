"""A flat table of n-grams: where did the last few tokens occur before?

A bucket holds the WAYS newest positions of the contexts that hash to it; a position's continuation is the token at the
position itself (see `store.py`). Inserting shifts one bucket and looking up reads one bucket per context length, with
no pointers to follow. An entry has 26 bits of position and 6 of the hash. Whatever is found is compared with the text,
so entries of removed rollouts need not be deleted: they fail the comparison until newer ones replace them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters.host.store import (
    DOCUMENT,
    INDEXED,
    PAGE_BITS,
    PAGE_MASK,
    POSITION_BITS,
    PROBLEM,
    START,
    before,
    compare_context,
    problem_of,
    read_back,
)
from rollout_spec.jit import njit

WAYS = 8
"""Positions per bucket: half a cache line."""
TABLE_ENTRIES_PER_TOKEN = 1.3
"""The table doubles when it has fewer entries than this times the tokens."""
POSITION_MASK = (1 << POSITION_BITS) - 1
LONG_ORDER, SHORT_ORDER = 3, 1
"""Context lengths by which positions of the same problem are found. Others are not looked for."""


def new_buckets(num_entries: float) -> NDArray[np.uint32]:
    """An empty table with room for at least `num_entries` entries."""
    size = 1
    while size * WAYS < num_entries:
        size *= 2
    return np.full((size, WAYS), np.uint32(0xFFFFFFFF))


@njit(allocates=False)
def hash_context(problem, text, end, order):
    """64-bit FNV-like hash of the last `order` tokens of text[:end] and the problem."""
    mixed = (np.uint64(problem + 1) << np.uint64(8)) ^ np.uint64(order)
    for i in range(end - order, end):
        mixed = (mixed ^ np.uint64(text[i])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


@njit(allocates=False)
def place_of(buckets, problem, text, end, order):
    """(bucket of a context, the hash's part that an entry keeps: 0 to 62, as 63 is an empty entry's)."""
    mixed = hash_context(problem, text, end, order)
    bucket = np.int64(mixed >> np.uint64(32)) & (buckets.shape[0] - 1)
    return bucket, np.uint32(min(mixed & np.uint64(63), np.uint64(62)))


@njit(allocates=False)
def insert(buckets, problem, position, text, end, order):
    """Put a position in front of the bucket of its context; the oldest of a full bucket is forgotten. O(WAYS)."""
    place, tag = place_of(buckets, problem, text, end, order)
    bucket = buckets[place]
    for way in range(WAYS - 1, 0, -1):
        bucket[way] = bucket[way - 1]
    bucket[0] = np.uint32((tag << np.uint32(POSITION_BITS)) | np.uint32(position))


@njit(allocates=False)
def gather(store, buckets, problem, text, end, order, positions, lengths, count):
    """Collect positions of a problem whose context shares at least `order` tokens with text[:end], newest first.

    Returns:
        The number of candidates, those before included. What a bucket holds is checked against the text, so that
        stale positions do no harm.
    """
    if end < order:
        return count
    tokens, pages = store.tokens, store.pages
    place, tag = place_of(buckets, problem, text, end, order)
    bucket = buckets[place]
    for way in range(WAYS):
        if bucket[way] >> np.uint32(POSITION_BITS) != tag or count == positions.size:
            continue
        position = np.int64(bucket[way] & np.uint32(POSITION_MASK))
        document = store.pages[position >> PAGE_BITS, DOCUMENT]
        if document < 0 or store.documents[document, PROBLEM] != problem:
            continue
        if store.pages[position >> PAGE_BITS, START] + (position & PAGE_MASK) >= store.documents[document, INDEXED]:
            continue  # a page that was used before, and is not indexed this far
        length, _ = compare_context(tokens, pages, position, text, end, np.int64(0))
        if length < order:
            continue
        if position not in positions[:count]:
            positions[count], lengths[count] = position, length
            count += 1
    return count


@njit(allocates=False)
def rehash(store, buckets, old, text):
    """Insert the entries of a smaller table again, oldest first.

    Args:
        text: int32, scratch for LONG_ORDER tokens.
    """
    for bucket in range(old.shape[0]):
        for way in range(WAYS - 1, -1, -1):
            entry = old[bucket, way]
            position = np.int64(entry & np.uint32(POSITION_MASK))
            if entry == np.uint32(0xFFFFFFFF) or store.pages[position >> PAGE_BITS, DOCUMENT] < 0:
                continue
            problem = problem_of(store, position)
            size = read_back(store, before(store.pages, position), text, np.int64(LONG_ORDER))
            context = text[LONG_ORDER - size : LONG_ORDER]
            for order in (SHORT_ORDER, LONG_ORDER):
                if size >= order and place_of(old, problem, context, size, order) == (bucket, entry >> POSITION_BITS):
                    insert(buckets, problem, position, context, size, order)
