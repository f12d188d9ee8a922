"""Every numba kernel of the drafters.

From the bottom up: the text store, the suffix tree, the n-gram table, what they find, the continuation model, drafting,
learning from outcomes. The structures are explained where they are owned: `store.py`, `suffix.py`, `ngram.py`,
`mixture.py`. Kernels never allocate capacity; their callers reserve it first.

Compiling them takes long, once per installation, and so each helper is compiled for one signature only: what is no
array is np.int64. numba compiles a function again for every literal that it is given, and for int32.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec import jit
from rollout_spec.drafters.vote import (
    ASKED,
    BINS_PER_HALVING,
    BLEND,
    COARSE_PRIOR,
    DISTANCE_EDGES,
    ENOUGH_CANDIDATES,
    FINE_PRIOR,
    HEAD_START,
    INVERSE_TEMPERATURES,
    LENGTH_EDGES,
    LOOKAHEAD,
    LOOKAHEAD_WEIGHT,
    MAX_CANDIDATES,
    MAX_DEPTH,
    MAX_TRIALS,
    MIN_DISTANCE_FROM_ONE,
    NUM_DISTANCE_BINS,
    NUM_PROBABILITY_BINS,
    OUTCOME_DECAY,
    OWN,
    SHARED,
    SIBLING,
)
from rollout_spec.jit import njit
from rollout_spec.noise import gumbel_nb
from rollout_spec.types import Float32Array, Int32Array

# Nothing counts references, which took more than half of the time, and so nothing allocates: buffers come from Python.
entry = partial(njit, _nrt=False)
inlined = partial(jit.inlined, _nrt=False)

PAGE_BITS = 5
PAGE_TOKENS = 1 << PAGE_BITS
"""Tokens per page of the store."""
PAGE_MASK = PAGE_TOKENS - 1
WAYS = 8
"""Positions per bucket of the n-gram table: half a cache line."""
POSITION_BITS = 26
"""Bits of a position in the n-gram table; the other six hold a part of the key's hash."""
POSITION_MASK = (1 << POSITION_BITS) - 1
LONG_ORDER, SHORT_ORDER = 3, 1
"""Context lengths by which the n-gram table finds positions of the same problem."""
LOOKAHEAD_ORDER = 3
"""Context length of the lookahead pool."""
SHARED_ORDER = 4
"""Context length by which positions of other problems are found."""
MAX_WALK = 96
"""Nodes of the suffix tree that one lookup visits on its way down."""
MAX_OWN_CANDIDATES = 24
"""How many of them may come from the problem's own tree where other problems are asked too."""
LONG_MATCH = 4
"""Tokens that a match among the problem's own texts must have so that other problems are not asked."""
MAX_VISITS = 96
"""Nodes beside the way down that one lookup visits."""
EMPTY, REMOVED = -1, -2

# Indices into Store.counts
NUM_FREE_PAGES, NUM_TOKENS = range(2)
PROMPT, ROLLOUT = range(2)
DECAY = np.float32(OUTCOME_DECAY)


class Store(NamedTuple):
    """The text of prompts and rollouts, as numba sees it. P pages, D documents."""

    tokens: Int32Array  # [P * PAGE_TOKENS]
    page_document: Int32Array  # [P], -1: free
    page_back: Int32Array  # [P] position of the token before the page's first, -1: none
    page_next: Int32Array  # [P] the document's next page, -1: none
    page_start: Int32Array  # [P] index, in the document, of the page's first token
    free_pages: Int32Array  # [P] stack
    document_problem: Int32Array  # [D], -1: no document
    document_kind: NDArray[np.int8]  # [D] PROMPT or ROLLOUT
    document_version: Int32Array  # [D] policy version
    document_first: Int32Array  # [D] first position, -1: empty
    document_last: Int32Array  # [D] last position; of an empty rollout its prompt's last one, -1: none
    document_length: Int32Array  # [D] tokens
    counts: NDArray[np.int64]  # [2] see NUM_FREE_PAGES


class Tree(NamedTuple):
    """A suffix tree over the store: of each problem apart, or of all together."""

    children: Int32Array  # [P * PAGE_TOKENS, 2] smaller and larger contexts, -1: none
    roots: Int32Array  # [power of two] root by (problem, last token), open addressing
    counts: NDArray[np.int64]  # [2] used and removed slots of `roots`


class Index(NamedTuple):
    """What finds positions in the store. Unused parts have size 0."""

    tree: Tree  # of each problem apart
    shared: Tree  # of all problems together
    buckets: NDArray[np.uint32]  # [power of two, WAYS] n-gram table, newest first


class Pool(NamedTuple):
    """N-grams that the target sampled after a rejected draft."""

    keys: NDArray[np.uint64]  # [power of two]
    tokens: Int32Array  # [power of two], -1: empty


class Settings(NamedTuple):
    """Scalars and small tables of the kernels."""

    use_tree: bool
    use_table: bool
    use_shared: bool
    use_lookahead: bool
    sharpness: float  # 0: the exponent that was right most often so far
    min_survival: float
    version: int
    decay: Float32Array  # [256] weight by age in policy versions
    preference: Float32Array  # [sources, NUM_DISTANCE_BINS] weight by source and distance


class Rows(NamedTuple):
    """State of the live requests, one entry each."""

    document: Int32Array
    prompt_length: NDArray[np.int64]
    seed: NDArray[np.int64]
    has_dice: NDArray[np.bool_]


class Calibration(NamedTuple):
    """Outcomes of drafted tokens that the target reached. The last axis is (trials, hits)."""

    coarse: Float32Array  # [coupled?, probability bin, length bin, 2]
    fine: Float32Array  # [coupled?, probability bin, length bin, nature, 2]
    by_source: NDArray[np.int64]  # [source, 2]
    by_sharpness: NDArray[np.float64]  # [sharpness, 2]; of coupled choices, made or not


class Proposals(NamedTuple):
    """The last proposal of each live row, kept for `observe` and returned to the caller."""

    lengths: Int32Array  # [rows]
    tokens: Int32Array  # [rows, K]
    confidence: Float32Array  # [rows, K]
    cells: Int32Array  # [rows, K, 4] index into the calibration
    alternatives: Int32Array  # [rows, K, sharpness] what each exponent would have drafted; -1: there was no choice


class Scratch(NamedTuple):
    """Buffers of one lookup and of the draft that is made from it."""

    text: Int32Array  # [MAX_DEPTH + K]
    path: Int32Array  # [MAX_WALK] nodes on the way down
    path_length: Int32Array  # [MAX_WALK] how far they match
    path_away: Int32Array  # [MAX_WALK] the child on the side that the walk did not take
    path_known: Int32Array  # [MAX_WALK] how far everything below that child matches at least
    stack: Int32Array  # [MAX_WALK]
    positions: Int32Array  # [MAX_CANDIDATES]
    lengths: Int32Array  # [MAX_CANDIDATES] how far they match
    weights: NDArray[np.float64]  # [MAX_CANDIDATES]
    natures: Int32Array  # [MAX_CANDIDATES] source and distance
    found: Int32Array  # [MAX_CANDIDATES + 1] distinct next tokens
    mass: NDArray[np.float64]  # [MAX_CANDIDATES + 1] their probabilities, or the logarithms
    noise: NDArray[np.float64]  # [MAX_CANDIDATES + 1]
    by_length: NDArray[np.float64]  # [MAX_DEPTH + 1] weight of the candidates that match so far
    share: NDArray[np.float64]  # [MAX_DEPTH + 1] weight of a candidate that matches so far


# -- the text store ------------------------------------------------------------------------------------------------


@inlined
def _before(page_back, position):
    """Position of the token before, -1 when there is none."""
    if position & PAGE_MASK:
        return position - 1
    return np.int64(page_back[position >> PAGE_BITS])


@inlined
def _step_back(page_back, position, steps):
    """Position `steps` tokens before, -1 when there is none."""
    while position >= 0:
        offset = position & PAGE_MASK
        if steps <= offset:
            return position - steps
        steps -= offset + 1
        position = np.int64(page_back[position >> PAGE_BITS])
    return np.int64(-1)


@inlined
def read_back(store, position, text, end):
    """Copy the tokens that end at `position` to text[..end - 1]. Returns how many there were, at most `end`."""
    tokens, page_back = store.tokens, store.page_back
    at = end
    while at > 0 and position >= 0:
        at -= 1
        text[at] = tokens[position]
        position = _before(page_back, position)
    return end - at


@inlined
def _append(store, document, token):
    """Store a token behind a document's last one and return its position."""
    last = _last(store, document)
    length = store.document_length[document]
    if length > 0 and (last & PAGE_MASK) != PAGE_MASK:
        position = last + 1
    else:
        store.counts[NUM_FREE_PAGES] -= 1
        page = np.int64(store.free_pages[store.counts[NUM_FREE_PAGES]])
        position = page << PAGE_BITS
        store.page_document[page] = document
        store.page_back[page] = last
        store.page_next[page] = -1
        store.page_start[page] = length
        if length > 0:
            store.page_next[last >> PAGE_BITS] = page
        else:
            store.document_first[document] = position
    store.tokens[position] = token
    store.document_last[document] = position
    store.document_length[document] = length + 1
    store.counts[NUM_TOKENS] += 1
    return position


# -- the suffix tree -----------------------------------------------------------------------------------------------


@inlined
def _scramble(token):
    """Order tokens, and positions of equal contexts, by what is unrelated to their coming: no text makes a list."""
    return (np.uint64(token) * np.uint64(0x9E3779B1)) & np.uint64(0xFFFFFFFF)  # numba widens uint32 products


@inlined
def _compare(tokens, page_back, node, text, end, known):
    """Compare the context of `node` with text[..end - 1], from the last token backwards.

    `known` last tokens agree already. Returns (tokens that agree, sign): sign is -1 where the node's context comes
    first, 1 where it comes last, 0 where they agree over MAX_DEPTH tokens or over all there are.
    """
    length = known
    position = _step_back(page_back, node, known + 1)
    limit = min(end, MAX_DEPTH)
    while length < limit and position >= 0:
        here = min(limit - length, (position & PAGE_MASK) + 1)  # tokens to compare on this page
        at = end - 1 - length
        same = 0
        while same < here and tokens[position - same] == text[at - same]:
            same += 1
        length += same
        if same < here:
            first = _scramble(tokens[position - same]) < _scramble(text[at - same])
            return length, -1 if first else 1
        position = np.int64(page_back[position >> PAGE_BITS]) if here == (position & PAGE_MASK) + 1 else position - here
    if length == MAX_DEPTH:
        return length, 0
    if position < 0:
        return length, -1 if length < end else 0
    return length, 1


@inlined
def _last(store, document):
    return np.int64(store.document_last[document])


@inlined
def _problem_of(store, position):
    return np.int64(store.document_problem[store.page_document[position >> PAGE_BITS]])


@inlined
def _root_slot(store, roots, problem, token):
    """Slot of the root for (problem, last token), or the empty slot where it belongs. Problem -1: all together."""
    mask = roots.size - 1
    mixed = (np.uint64(np.int64(problem)) * np.uint64(0x9E3779B97F4A7C15)) ^ (
        np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    )
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    slot = np.int64(mixed >> np.uint64(32)) & mask
    free = np.int64(-1)
    while True:
        root = np.int64(roots[slot])
        if root == EMPTY:
            return slot if free < 0 else free
        if root == REMOVED:
            if free < 0:
                free = slot
        elif (problem < 0 or _problem_of(store, root) == problem) and store.tokens[
            _before(store.page_back, root)
        ] == token:
            return slot
        slot = (slot + 1) & mask


@inlined
def _tree_insert(store, tree, problem, position, text, end):
    """Make `position`, whose context is text[..end - 1], the root of its tree; what was there is split around it.

    Expected O(log n) comparisons.
    """
    tokens, page_back, children, roots = store.tokens, store.page_back, tree.children, tree.roots
    slot = _root_slot(store, roots, problem, text[end - 1])
    node = np.int64(roots[slot])
    if node < 0:
        tree.counts[0] += 1
        if node == REMOVED:
            tree.counts[1] -= 1
    roots[slot] = position
    smaller, larger = position, position  # nodes whose free link takes the next smaller or larger subtree
    smaller_side, larger_side = 0, 1
    smaller_length, larger_length = 1, 1
    while node >= 0:
        length, sign = _compare(tokens, page_back, node, text, end, min(smaller_length, larger_length))
        if sign < 0 or (sign == 0 and _scramble(node) < _scramble(position)):
            children[smaller, smaller_side] = node
            smaller, smaller_side, smaller_length = node, 1, length
            node = np.int64(children[node, 1])
        else:
            children[larger, larger_side] = node
            larger, larger_side, larger_length = node, 0, length
            node = np.int64(children[node, 0])
    children[smaller, smaller_side] = -1
    children[larger, larger_side] = -1


@inlined
def _tree_remove(store, tree, problem, position, text):
    """Take a position out of its tree, wherever it is. Expected O(log n)."""
    tokens, page_back, children, roots = store.tokens, store.page_back, tree.children, tree.roots
    found = read_back(store, _before(page_back, position), text, np.int64(MAX_DEPTH))
    context = text[MAX_DEPTH - found : MAX_DEPTH]
    slot = _root_slot(store, roots, problem, context[found - 1])
    parent, side = np.int64(-1), 0
    node = np.int64(roots[slot])
    smaller_length, larger_length = 1, 1
    while node != position:
        length, sign = _compare(tokens, page_back, node, context, found, min(smaller_length, larger_length))
        parent = node
        if sign < 0 or (sign == 0 and _scramble(node) < _scramble(position)):
            side, smaller_length = 1, length
        else:
            side, larger_length = 0, length
        node = np.int64(children[node, side])
    smaller, larger = np.int64(children[position, 0]), np.int64(children[position, 1])
    while True:
        if smaller < 0 or larger < 0:
            kept = max(smaller, larger)
        elif store.page_document[smaller >> PAGE_BITS] > store.page_document[larger >> PAGE_BITS]:
            kept = smaller
        else:
            kept = larger
        if parent >= 0:
            children[parent, side] = kept
        elif kept >= 0:
            roots[slot] = kept
        else:
            roots[slot] = REMOVED
            tree.counts[0] -= 1
            tree.counts[1] += 1
        if smaller < 0 or larger < 0:
            return
        parent = kept
        if kept == smaller:
            side = 1
            smaller = np.int64(children[smaller, 1])
        else:
            side = 0
            larger = np.int64(children[larger, 0])


@entry
def rehash_roots(store, tree, is_shared, old_roots):
    for i in range(old_roots.size):
        root = np.int64(old_roots[i])
        if root >= 0:
            problem = np.int64(-1) if is_shared else _problem_of(store, root)
            slot = _root_slot(store, tree.roots, problem, store.tokens[_before(store.page_back, root)])
            tree.roots[slot] = root
            tree.counts[0] += 1


@inlined
def _tree_gather(store, tree, problem, other_than, text, end, first, limit, scratch):
    """Collect continuations of the longest matches of text[..end - 1].

    Args:
        problem: Whose tree; -1 for the tree of all problems.
        other_than: Skip positions of this problem.
        first: Candidates that there are already.
        limit: Most candidates, those included.

    Returns:
        The number of candidates. O(log n + MAX_VISITS).
    """
    tokens, page_back, children = store.tokens, store.page_back, tree.children
    positions, lengths = scratch.positions, scratch.lengths
    node = np.int64(tree.roots[_root_slot(store, tree.roots, problem, text[end - 1])])
    path, path_length, path_away = scratch.path, scratch.path_length, scratch.path_away
    path_known = scratch.path_known
    steps = 0
    smaller_length, larger_length = 1, 1
    while node >= 0 and steps < MAX_WALK:
        length, sign = _compare(tokens, page_back, node, text, end, min(smaller_length, larger_length))
        i = steps  # kept in order of falling length, newer ones first among equals
        while i > 0 and path_length[i - 1] < length:
            path[i], path_length[i] = path[i - 1], path_length[i - 1]
            path_away[i], path_known[i] = path_away[i - 1], path_known[i - 1]
            i -= 1
        path[i], path_length[i] = node, length
        steps += 1
        if sign <= 0:
            path_away[i], path_known[i] = children[node, 0], smaller_length
            smaller_length = length
            node = np.int64(children[node, 1])
        else:
            path_away[i], path_known[i] = children[node, 1], larger_length
            larger_length = length
            node = np.int64(children[node, 0])
    stack = scratch.stack
    count, enough, visits = first, min(first + ENOUGH_CANDIDATES, limit), 0
    for i in range(steps):
        if count == limit or (count >= enough and path_length[i] < lengths[count - 1]):
            break
        if other_than < 0 or _problem_of(store, np.int64(path[i])) != other_than:
            positions[count], lengths[count] = path[i], path_length[i]
            count += 1
        # Beyond enough candidates only those count that match as far as this one.
        depth = 0
        if path_away[i] >= 0:
            stack[0], depth = path_away[i], 1
        while depth > 0 and count < limit and visits < MAX_VISITS:
            depth -= 1
            visits += 1
            node = np.int64(stack[depth])
            length, sign = _compare(tokens, page_back, node, text, end, np.int64(path_known[i]))
            near, far = (1, 0) if sign < 0 else (0, 1)
            if length >= path_length[i] or count < enough:
                if other_than < 0 or _problem_of(store, node) != other_than:
                    positions[count], lengths[count] = node, length
                    count += 1
                if children[node, far] >= 0 and depth < stack.size:
                    stack[depth] = children[node, far]
                    depth += 1
            if children[node, near] >= 0 and depth < stack.size:
                stack[depth] = children[node, near]
                depth += 1
    return count


# -- the n-gram table ----------------------------------------------------------------------------------------------


@inlined
def _ngram_hash(problem, text, end, order):
    """64-bit FNV-like hash of the last `order` tokens of text[..end - 1] and the problem."""
    mixed = (np.uint64(problem + 1) << np.uint64(8)) ^ np.uint64(order)
    for i in range(end - order, end):
        mixed = (mixed ^ np.uint64(text[i])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


@inlined
def _tag(mixed):
    """The hash's part that an entry keeps, 0 to 62: 63 is an empty entry's."""
    return np.uint32(min(mixed & np.uint64(63), np.uint64(62)))


@inlined
def _table_insert(index, problem, position, text, end, order):
    """Put a position in front of the bucket of its context; the oldest of a full bucket is forgotten. O(WAYS)."""
    mixed = _ngram_hash(problem, text, end, order)
    bucket = index.buckets[np.int64(mixed >> np.uint64(32)) & (index.buckets.shape[0] - 1)]
    tag = _tag(mixed)
    for way in range(WAYS - 1, 0, -1):
        bucket[way] = bucket[way - 1]
    bucket[0] = np.uint32((tag << np.uint32(POSITION_BITS)) | np.uint32(position))


@inlined
def _table_gather(store, index, problem, text, end, order, other_than, positions, lengths, count):
    """Collect positions whose context shares at least `order` tokens with text[..end - 1], newest first.

    Args:
        problem: Of the key; -1 for the key that all problems share.
        other_than: Skip positions of this problem.

    Returns:
        The number of candidates, those before included. What a bucket holds is checked against the text, so that
        stale positions do no harm.
    """
    if end < order:
        return count
    tokens, page_back = store.tokens, store.page_back
    mixed = _ngram_hash(problem, text, end, order)
    bucket = index.buckets[np.int64(mixed >> np.uint64(32)) & (index.buckets.shape[0] - 1)]
    tag = _tag(mixed)
    for way in range(WAYS):
        if bucket[way] >> np.uint32(POSITION_BITS) != tag or count == positions.size:
            continue
        position = np.int64(bucket[way] & np.uint32(POSITION_MASK))
        document = store.page_document[position >> PAGE_BITS]
        if document < 0:
            continue
        theirs = store.document_problem[document]
        if (problem >= 0 and theirs != problem) or theirs == other_than:
            continue
        if store.page_start[position >> PAGE_BITS] + (position & PAGE_MASK) >= store.document_length[document]:
            continue  # a page that was used before and is not written this far yet
        length, _ = _compare(tokens, page_back, position, text, end, np.int64(0))
        if length < order:
            continue
        known = False
        for i in range(count):
            known |= positions[i] == position
        if not known:
            positions[count], lengths[count] = position, length
            count += 1
    return count


@entry
def _rehash_table(store, index, settings, old, text):
    for slot in range(old.shape[0]):
        for way in range(WAYS - 1, -1, -1):
            entry = old[slot, way]
            position = np.int64(entry & np.uint32(POSITION_MASK))
            if entry == np.uint32(0xFFFFFFFF) or store.page_document[position >> PAGE_BITS] < 0:
                continue
            problem = _problem_of(store, position)
            size = read_back(store, _before(store.page_back, position), text, text.size)
            context = text[text.size - size :]
            for kind in range(3):
                order = np.int64((SHORT_ORDER, LONG_ORDER, SHARED_ORDER)[kind])
                if size < order or (kind == 2 and not settings.use_shared):
                    continue
                key = np.int64(-1) if kind == 2 else problem
                mixed = _ngram_hash(key, context, size, order)
                same_tag = _tag(mixed) == entry >> np.uint32(POSITION_BITS)
                if same_tag and np.int64(mixed >> np.uint64(32)) & (old.shape[0] - 1) == slot:
                    _table_insert(index, key, position, context, size, order)


def rehash_table(store, index, settings, old):
    """Insert the entries of a smaller table again, oldest first."""
    _rehash_table(store, index, settings, old, np.empty(max(SHORT_ORDER, LONG_ORDER, SHARED_ORDER), np.int32))


# -- the lookahead pool --------------------------------------------------------------------------------------------


@inlined
def _pool_find(pool, problem, text, end):
    """The token that followed the last LOOKAHEAD_ORDER tokens of text[..end - 1], -1: none known."""
    if end < LOOKAHEAD_ORDER:
        return -1
    key = _ngram_hash(problem, text, end, np.int64(LOOKAHEAD_ORDER))
    slot = np.int64(key >> np.uint64(32)) & (pool.keys.size - 1)
    return pool.tokens[slot] if pool.keys[slot] == key else -1


@inlined
def _pool_insert(pool, problem, text, end, token):
    if end >= LOOKAHEAD_ORDER:
        key = _ngram_hash(problem, text, end, np.int64(LOOKAHEAD_ORDER))
        slot = np.int64(key >> np.uint64(32)) & (pool.keys.size - 1)
        pool.keys[slot] = key
        pool.tokens[slot] = token


# -- indexing ------------------------------------------------------------------------------------------------------


@inlined
def _index_position(store, index, settings, problem, position, context, size):
    """Index a position as the continuation of its context."""
    if settings.use_tree:
        _tree_insert(store, index.tree, problem, position, context, size)
        if settings.use_shared:
            _tree_insert(store, index.shared, np.int64(-1), position, context, size)
    if settings.use_table:
        if size >= SHORT_ORDER:
            _table_insert(index, problem, position, context, size, np.int64(SHORT_ORDER))
        if size >= LONG_ORDER:
            _table_insert(index, problem, position, context, size, np.int64(LONG_ORDER))
        if settings.use_shared and size >= SHARED_ORDER:
            _table_insert(index, np.int64(-1), position, context, size, np.int64(SHARED_ORDER))


@entry
def _append_all(store, index, settings, documents, tokens, starts, window):
    for i in range(documents.size):
        document = documents[i]
        problem = np.int64(store.document_problem[document])
        first = MAX_DEPTH - read_back(store, _last(store, document), window, np.int64(MAX_DEPTH))
        end = MAX_DEPTH
        for at in range(starts[i], starts[i + 1]):
            position = _append(store, document, tokens[at])
            first = max(first, end - MAX_DEPTH)
            if end > first:
                _index_position(store, index, settings, problem, position, window[first:end], end - first)
            if end == window.size:
                for j in range(MAX_DEPTH):
                    window[j] = window[end - MAX_DEPTH + j]
                first, end = 0, MAX_DEPTH
            window[end] = tokens[at]
            end += 1


def append_batch(store, index, settings, documents, tokens, starts):
    """Append tokens[starts[i] : starts[i + 1]] to documents[i], and index each as its context's continuation."""
    _append_all(store, index, settings, documents, tokens, starts, np.empty(8 * MAX_DEPTH, np.int32))


@entry
def _remove(store, index, settings, document, text):
    problem = np.int64(store.document_problem[document])
    if store.document_length[document] > 0:
        if settings.use_tree:
            position = _last(store, document)
            for _ in range(store.document_length[document]):
                before = _before(store.page_back, position)
                if before >= 0:
                    _tree_remove(store, index.tree, problem, position, text)
                    if settings.use_shared:
                        _tree_remove(store, index.shared, np.int64(-1), position, text)
                position = before
        page = np.int64(store.document_first[document]) >> PAGE_BITS
        while page >= 0:
            following = np.int64(store.page_next[page])
            store.page_document[page] = -1
            store.free_pages[store.counts[NUM_FREE_PAGES]] = page
            store.counts[NUM_FREE_PAGES] += 1
            page = following
    store.counts[NUM_TOKENS] -= store.document_length[document]
    store.document_length[document] = 0
    store.document_first[document] = -1
    store.document_last[document] = -1
    store.document_problem[document] = -1


def remove_document(store, index, settings, document):
    """Take a document out of the index and free its pages."""
    _remove(store, index, settings, document, np.empty(MAX_DEPTH, np.int32))


# -- drafting ------------------------------------------------------------------------------------------------------


@inlined
def _length_bin(length):
    length_bin = 0
    for edge in LENGTH_EDGES:
        length_bin += length > edge
    return length_bin


@inlined
def _probability_bin(probability):
    distance = max(1.0 - probability, MIN_DISTANCE_FROM_ONE)
    return min(int(-BINS_PER_HALVING * np.log2(distance)), NUM_PROBABILITY_BINS - 1)


@inlined
def _distance_bin(distance):
    distance_bin = 0
    for edge in DISTANCE_EDGES:
        distance_bin += abs(distance) > edge
    return distance_bin


@inlined
def _gather(store, index, settings, document, text, end, scratch):
    """Fill scratch.positions and lengths with earlier continuations of text[..end - 1]. Returns their number."""
    problem, everybody, nobody = np.int64(store.document_problem[document]), np.int64(-1), np.int64(-2)
    positions, lengths = scratch.positions, scratch.lengths
    count = np.int64(0)
    if settings.use_tree and end > 0:
        limit = MAX_OWN_CANDIDATES if settings.use_shared else MAX_CANDIDATES
        count = _tree_gather(store, index.tree, problem, nobody, text, end, count, limit, scratch)
        if settings.use_shared and (count == 0 or lengths[0] < LONG_MATCH):
            most = np.int64(MAX_CANDIDATES)
            count = _tree_gather(store, index.shared, everybody, problem, text, end, count, most, scratch)
    if settings.use_table:
        order = np.int64(LONG_ORDER)
        count = _table_gather(store, index, problem, text, end, order, nobody, positions, lengths, count)
        order = np.int64(SHORT_ORDER)
        count = _table_gather(store, index, problem, text, end, order, nobody, positions, lengths, count)
        if settings.use_shared:
            order = np.int64(SHARED_ORDER)
            count = _table_gather(store, index, everybody, text, end, order, problem, positions, lengths, count)
    return count


def _new_scratch(max_tokens):
    return Scratch(
        np.empty(MAX_DEPTH + max_tokens, np.int32),
        np.empty(MAX_WALK, np.int32),
        np.empty(MAX_WALK, np.int32),
        np.empty(MAX_WALK, np.int32),
        np.empty(MAX_WALK, np.int32),
        np.empty(MAX_WALK, np.int32),
        np.empty(MAX_CANDIDATES, np.int32),
        np.empty(MAX_CANDIDATES, np.int32),
        np.empty(MAX_CANDIDATES, np.float64),
        np.empty(MAX_CANDIDATES, np.int32),
        np.empty(MAX_CANDIDATES + 1, np.int32),
        np.empty(MAX_CANDIDATES + 1, np.float64),
        np.empty(MAX_CANDIDATES + 1, np.float64),
        np.zeros(MAX_DEPTH + 1, np.float64),
        np.empty(MAX_DEPTH + 1, np.float64),
    )


@inlined
def _rate(calibration, coupled, probability_bin, length_bin, nature, expected):
    """Probability that a drafted token is accepted: counted by cell, falling back on coarser cells and the model."""
    coarse = calibration.coarse[coupled, probability_bin, length_bin]
    fine = calibration.fine[coupled, probability_bin, length_bin, nature]
    rate = (coarse[1] + COARSE_PRIOR * expected) / (coarse[0] + COARSE_PRIOR)
    return (fine[1] + FINE_PRIOR * rate) / (fine[0] + FINE_PRIOR)


@inlined
def _fade(cell):
    cell[0] *= DECAY
    cell[1] *= DECAY


@inlined
def _best_sharpness(by_sharpness):
    best, most = 1.0, -1.0
    for a in range(len(INVERSE_TEMPERATURES)):
        hits = by_sharpness[a, 1] + (HEAD_START if INVERSE_TEMPERATURES[a] == 1.0 else 0.0)
        if hits > most:
            best, most = INVERSE_TEMPERATURES[a], hits
    return best


@inlined
def _weigh(store, settings, document, offset, count, positions, weights, natures):
    """Give each candidate its weight and nature: where it comes from, and how near it is to `offset`."""
    problem = store.document_problem[document]
    for i in range(count):
        page = positions[i] >> PAGE_BITS
        theirs = store.page_document[page]
        if theirs == document:
            source = OWN
        elif store.document_problem[theirs] != problem:
            source = SHARED
        elif store.document_kind[theirs] == ROLLOUT:
            source = SIBLING
        else:
            source = ASKED
        near = _distance_bin(store.page_start[page] + (positions[i] & PAGE_MASK) - offset)
        age = min(settings.version - store.document_version[theirs], settings.decay.size - 1)
        if source == ASKED:  # no policy's words
            age = 0
        natures[i] = source * NUM_DISTANCE_BINS + near
        weights[i] = settings.decay[age] * settings.preference[source, near]


@inlined
def _blend(tokens, count, positions, lengths, weights, by_length, share, found, mass):
    """Probability of each next token: q_l = (c_l + BLEND q_{l-1}) / (n_l + BLEND) over match lengths l.

    Unrolled from the longest: a candidate that matches l tokens counts at every length up to l, and share[l] is what it
    gets for all of them together.

    Returns:
        (number of tokens found, longest match, probability that none of them follows).
    """
    longest, shortest = 0, MAX_DEPTH
    for i in range(count):
        by_length[lengths[i]] += weights[i]
        longest = max(longest, lengths[i])
        shortest = min(shortest, lengths[i])
    left, total = 1.0, 0.0
    for length in range(longest, shortest - 1, -1):
        share[length] = 0.0
        if by_length[length] > 0.0:
            total += by_length[length]
            share[length] = left / (total + BLEND)
            left *= BLEND / (total + BLEND)
            by_length[length] = 0.0
    for length in range(shortest + 1, longest + 1):
        share[length] += share[length - 1]
    num_found = 0
    for i in range(count):
        token = tokens[positions[i]]
        at = 0
        while at < num_found and found[at] != token:
            at += 1
        if at == num_found:
            found[at], mass[at] = token, 0.0
            num_found += 1
        mass[at] += weights[i] * share[lengths[i]]
    return num_found, longest, left


@inlined
def _blend_in(token, weight, num_found, found, mass):
    """Give `token` this much of the probability and the others the rest. Returns the number of tokens found."""
    at = num_found
    for i in range(num_found):
        mass[i] *= 1.0 - weight
        if found[i] == token:
            at = i
    if at == num_found:
        found[at], mass[at] = token, 0.0
        num_found += 1
    mass[at] += weight
    return num_found


@inlined
def _throw_dice(seed, position, num_found, found, mass, noise, alternatives):
    """Replace `mass` by its logarithm, fill `noise`, and note what each exponent would choose."""
    for i in range(num_found):
        mass[i] = np.log(mass[i])
        noise[i] = gumbel_nb(seed, position, np.int64(found[i]))
    for a in range(len(INVERSE_TEMPERATURES)):
        best = 0
        for i in range(1, num_found):
            if INVERSE_TEMPERATURES[a] * (mass[i] - mass[best]) + noise[i] - noise[best] > 0.0:
                best = i
        alternatives[a] = found[best]


@inlined
def _choose(num_found, mass, sharpness, noise):
    """(index of the best token, lead of its score over the next one's). sharpness 0: the most probable."""
    best, best_score, second_score = 0, -np.inf, -np.inf
    for i in range(num_found):
        score = sharpness * mass[i] + noise[i] if sharpness > 0.0 else mass[i]
        if score > best_score:
            best, best_score, second_score = i, score, best_score
        elif score > second_score:
            second_score = score
    return best, best_score - second_score


@inlined
def _advance(store, token, count, positions, lengths, weights, natures):
    """Keep the candidates that say `token`, moved on by one. Returns their number."""
    tokens, alive = store.tokens, 0
    for i in range(count):
        position = positions[i]
        page = position >> PAGE_BITS
        if tokens[position] != token or position == store.document_last[store.page_document[page]]:
            continue
        at_end = (position & PAGE_MASK) == PAGE_MASK
        positions[alive] = store.page_next[page] << PAGE_BITS if at_end else position + 1
        lengths[alive] = min(lengths[i] + 1, MAX_DEPTH)
        weights[alive], natures[alive] = weights[i], natures[i]
        alive += 1
    return alive


@inlined
def _propose_one(store, index, pool, rows, row, max_tokens, settings, sharpness, calibration, scratch, out):
    """Fill `out` for one row."""
    positions, lengths, weights, natures = scratch.positions, scratch.lengths, scratch.weights, scratch.natures
    found, mass, noise = scratch.found, scratch.mass, scratch.noise
    document = rows.document[row]
    generated = store.document_length[document]
    known = rows.prompt_length[row] + generated
    coupled = 1 if rows.has_dice[row] else 0
    kept = read_back(store, _last(store, document), scratch.text, np.int64(MAX_DEPTH))
    text = scratch.text[MAX_DEPTH - kept :]
    survival, count = 1.0, 0
    out.lengths[row] = 0
    for slot in range(max_tokens):
        end = kept + slot
        if count == 0:
            start = max(0, end - MAX_DEPTH)
            count = _gather(store, index, settings, document, text[start:end], end - start, scratch)
            _weigh(store, settings, document, generated + slot, count, positions, weights, natures)
        num_found, longest, left = _blend(
            store.tokens, count, positions, lengths, weights, scratch.by_length, scratch.share, found, mass
        )
        guess = -1
        if settings.use_lookahead:
            guess = _pool_find(pool, np.int64(store.document_problem[document]), text, end)
        if guess >= 0:
            num_found = _blend_in(guess, LOOKAHEAD_WEIGHT, num_found, found, mass)
            left *= 1.0 - LOOKAHEAD_WEIGHT
            longest = max(longest, LOOKAHEAD_ORDER)
        elif num_found == 0:
            break
        out.alternatives[row, slot, 0] = -1
        if coupled and num_found > 1:
            _throw_dice(
                rows.seed[row], np.int64(known - 1 + slot), num_found, found, mass, noise, out.alternatives[row, slot]
            )
            best, lead = _choose(num_found, mass, sharpness, noise)
            likely, expected = np.exp(mass[best]), (1.0 - left) / (1.0 + np.exp(-lead))
        else:
            best, lead = _choose(num_found, mass, 0.0, noise)
            likely = mass[best]
            expected = 1.0 - left if coupled else likely
        token = found[best]
        heaviest, nature = -1.0, LOOKAHEAD * NUM_DISTANCE_BINS
        for i in range(count):
            if store.tokens[positions[i]] == token and weights[i] > heaviest:
                heaviest, nature = weights[i], natures[i]
        if coupled:  # how likely the token was without the dice says more than how near it lies
            nature = nature // NUM_DISTANCE_BINS * NUM_DISTANCE_BINS + min(
                int(NUM_DISTANCE_BINS * likely), NUM_DISTANCE_BINS - 1
            )
        probability_bin, length_bin = _probability_bin(expected), _length_bin(longest)
        survival *= _rate(calibration, coupled, probability_bin, length_bin, nature, expected)
        if survival < settings.min_survival:
            _fade(calibration.coarse[coupled, probability_bin, length_bin])
            _fade(calibration.fine[coupled, probability_bin, length_bin, nature])
            break
        out.cells[row, slot, 0], out.cells[row, slot, 1] = coupled, probability_bin
        out.cells[row, slot, 2], out.cells[row, slot, 3] = length_bin, nature
        out.tokens[row, slot] = token
        out.confidence[row, slot] = survival
        out.lengths[row] = slot + 1
        text[end] = token
        count = _advance(store, token, count, positions, lengths, weights, natures)


@entry
def _propose_all(store, index, pool, rows, batch, max_tokens, settings, calibration, scratch, out):
    sharpness = settings.sharpness if settings.sharpness > 0.0 else _best_sharpness(calibration.by_sharpness)
    for i in range(batch.size):
        _propose_one(store, index, pool, rows, batch[i], max_tokens[i], settings, sharpness, calibration, scratch, out)


def propose(store, index, pool, rows, batch, max_tokens, settings, calibration, out):
    """Fill `out` for the rows in `batch`, at most max_tokens[i] tokens each.

    O(log n + MAX_CANDIDATES) for the first token of a draft and O(candidates left) for each later one.
    """
    scratch = _new_scratch(out.tokens.shape[1])
    _propose_all(store, index, pool, rows, batch, max_tokens, settings, calibration, scratch, out)


@inlined
def _trial(cell, hit):
    if cell[0] >= MAX_TRIALS:
        cell[0] *= 0.5
        cell[1] *= 0.5
    cell[0] += 1.0
    if hit:
        cell[1] += 1.0


@entry
def _observe_all(store, pool, rows, batch, targets, starts, num_accepted, settings, calibration, out, text):
    for i in range(batch.size):
        row = batch[i]
        if settings.use_lookahead and starts[i + 1] - starts[i] > num_accepted[i] + 1:
            document = rows.document[row]
            problem = np.int64(store.document_problem[document])
            kept = read_back(store, _last(store, document), text, np.int64(LOOKAHEAD_ORDER))
            context = text[LOOKAHEAD_ORDER - kept :]
            length = out.lengths[row]
            for slot in range(length):
                context[kept + slot] = out.tokens[row, slot]
            for slot in range(num_accepted[i] + 1, min(starts[i + 1] - starts[i], length + 1)):
                _pool_insert(pool, problem, context, kept + slot, targets[starts[i] + slot])
        reached = min(out.lengths[row], num_accepted[i] + 1, starts[i + 1] - starts[i])
        for slot in range(reached):
            coupled, probability_bin, length_bin, nature = out.cells[row, slot]
            hit = out.tokens[row, slot] == targets[starts[i] + slot]
            _trial(calibration.coarse[coupled, probability_bin, length_bin], hit)
            _trial(calibration.fine[coupled, probability_bin, length_bin, nature], hit)
            if out.alternatives[row, slot, 0] >= 0:
                for a in range(len(INVERSE_TEMPERATURES)):
                    _trial(calibration.by_sharpness[a], out.alternatives[row, slot, a] == targets[starts[i] + slot])
            calibration.by_source[nature // NUM_DISTANCE_BINS, 0] += 1
            calibration.by_source[nature // NUM_DISTANCE_BINS, 1] += hit
        out.lengths[row] = 0


def observe(store, pool, rows, batch, targets, starts, num_accepted, settings, calibration, out):
    """Learn from the slots that the target reached, and fill the lookahead pool from those that it did not."""
    text = np.empty(LOOKAHEAD_ORDER + out.tokens.shape[1], np.int32)
    _observe_all(store, pool, rows, batch, targets, starts, num_accepted, settings, calibration, out, text)
