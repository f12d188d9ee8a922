"""Every numba kernel of the drafters, in one file: numba notices a changed caller, not a changed callee elsewhere.

From the bottom up: the suffix tree, the context index, the distributions they give, drafting, learning from outcomes.
The structures are explained where they are owned: `suffix.py`, `ngram.py`, `mixture.py`. Kernels never allocate
capacity; their callers reserve it first.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np
from numpy.typing import NDArray

from rollout_spec.noise import gumbel_nb
from rollout_spec.types import Float32Array, Int32Array

MAX_DEPTH = 32
"""Longest context that is told apart. Longer matches were worth nothing on recorded rollouts."""
MAX_CONTINUATIONS = 16
"""Continuations kept per context; the one that was seen longest ago makes room for a new one."""
BLOCK_TOKENS = 256
"""Tokens per storage block. A block starts with a copy of the MAX_DEPTH tokens before it, so that a context is
always contiguous although rollouts grow side by side."""
NEGLIGIBLE_WEIGHT = 1e-4
"""Weights below this are what float32 rounding leaves of a removed rollout."""

# Indices into TreeArrays.counts
NUM_TOKENS, NUM_NODES, NUM_ENTRIES, NUM_CHILDREN, FREE_ENTRY = range(5)


NUM_HEADS = 4096
"""Hash buckets per request."""
MAX_CANDIDATES = 16
"""Chain positions that one lookup visits, newest first."""
MIN_MATCH = 2
"""Shortest match that counts. Single tokens recur everywhere in a rollout and predict little."""


SOURCES = ("problem", "shared", "own")
PROBLEM, SHARED, OWN = range(3)
MAX_LEVELS = 4
"""Nodes of a match's path that are blended, the deepest ones."""
BLEND = 0.3
"""Weight of the shorter context's distribution, in counts of the newest policy version."""
NEGLIGIBLE_MASS = 0.02
"""Blending stops where shorter contexts could add no more probability than this."""
OWN_BASE = 8.0
"""How much more a candidate weighs whose match is one token longer."""
MAX_MIXED = 64
"""Candidate tokens of one slot, all sources together."""
NUM_LENGTH_BINS, NUM_EVIDENCE_BINS, NUM_PROBABILITY_BINS = 10, 3, 10
MAX_TRIALS = 4096.0
"""Counters are halved here, so that calibration follows the policy."""


class TreeArrays(NamedTuple):
    """The tree's storage, as numba sees it. Capacities are grown by `SuffixTree`, never inside a kernel."""

    tokens: Int32Array  # [token capacity] text of all rollouts, in blocks
    node_end: Int32Array  # [node capacity] where in `tokens` an example of the node's context ends
    node_depth: Int32Array  # [node capacity] length of the node's context
    node_entries: Int32Array  # [node capacity] newest continuation entry, or -1
    node_weight: Float32Array  # [node capacity] sum of the node's continuation weights
    entry_token: Int32Array  # [entry capacity]
    entry_weight: Float32Array  # [entry capacity]
    entry_next: Int32Array  # [entry capacity] next older entry of the node, or -1; links free entries as well
    child_keys: NDArray[np.int64]  # [power of two] node << 32 | first token of the edge, or -1: open addressing
    child_nodes: Int32Array  # [power of two]
    counts: NDArray[np.int64]  # [5] used tokens, nodes, entries, children; head of the free entries


class ContextArrays(NamedTuple):
    """Contexts of the live requests, one row each, as numba sees them."""

    tokens: Int32Array  # [rows, length capacity]
    lengths: Int32Array  # [rows]
    previous: Int32Array  # [rows, length capacity] previous position in the same bucket, or -1
    heads: Int32Array  # [rows, NUM_HEADS] newest position in the bucket, or -1


class Calibration(NamedTuple):
    """Counters behind the mixture's weights and confidences. The last axis is (trials, hits)."""

    sources: NDArray[np.float64]  # [source, length bin, evidence bin, 2] was the source's first choice right?
    choices: NDArray[np.float64]  # [coupled?, probability bin, length bin, 2] was the drafted token accepted?


class Proposals(NamedTuple):
    """The last proposal of each live row, kept for `observe` and returned to the caller."""

    lengths: Int32Array  # [rows]
    tokens: Int32Array  # [rows, K]
    confidence: Float32Array  # [rows, K]
    choice_cells: Int32Array  # [rows, K, 3] index into Calibration.choices
    source_tokens: Int32Array  # [rows, K, source] first choice of each source, -1: it had none
    source_cells: Int32Array  # [rows, K, source, 2] index into Calibration.sources[source]


class Rows(NamedTuple):
    """State of the live requests, one entry each."""

    root: NDArray[np.int64]  # suffix-tree root of the problem, -1: no problem
    block_end: NDArray[np.int64]  # where the newest token is stored in the tree's text, -1: nowhere yet
    stored: NDArray[np.int64]  # tokens stored there
    weight: Float32Array  # weight of the request's policy version
    seed: NDArray[np.int64]
    has_dice: NDArray[np.bool_]


class Settings(NamedTuple):
    """Scalars of the kernels."""

    uses: tuple[bool, bool, bool]  # by source
    shared_root: int
    sharpness: float
    min_survival: float
    unit_weight: float  # weight of one rollout of the newest policy version


# -- the suffix tree -----------------------------------------------------------------------------------------------


@nb.njit(cache=True, inline="always")
def _child_slot(child_keys, node, token):
    """Slot of the edge (node, token) in the child table, or the empty slot where it belongs."""
    mask = child_keys.size - 1
    key = (np.int64(node) << 32) | np.int64(token)
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: only the high half mixes all bits
    slot = np.int64(mixed >> np.uint64(32)) & mask
    while child_keys[slot] != key and child_keys[slot] != -1:
        slot = (slot + 1) & mask
    return slot


@nb.njit(cache=True)
def new_node(tree, end, depth):
    node = tree.counts[NUM_NODES]
    tree.counts[NUM_NODES] += 1
    tree.node_end[node] = end
    tree.node_depth[node] = depth
    tree.node_entries[node] = -1
    tree.node_weight[node] = 0.0
    return node


@nb.njit(cache=True)
def _add_child(tree, node, token, child):
    slot = _child_slot(tree.child_keys, node, token)
    if tree.child_keys[slot] == -1:
        tree.counts[NUM_CHILDREN] += 1
    tree.child_keys[slot] = (np.int64(node) << 32) | np.int64(token)
    tree.child_nodes[slot] = child


@nb.njit(cache=True)
def _new_entry(tree, token, weight, following):
    entry = tree.counts[FREE_ENTRY]
    if entry >= 0:
        tree.counts[FREE_ENTRY] = tree.entry_next[entry]
    else:
        entry = tree.counts[NUM_ENTRIES]
        tree.counts[NUM_ENTRIES] += 1
    tree.entry_token[entry] = token
    tree.entry_weight[entry] = weight
    tree.entry_next[entry] = following
    return entry


@nb.njit(cache=True)
def _count(tree, node, token, weight):
    """Add `weight` (negative: take back) to one continuation of a node and move it to the front."""
    entry_token, entry_next = tree.entry_token, tree.entry_next
    previous = -1
    entry = tree.node_entries[node]
    length = 0
    while entry >= 0 and entry_token[entry] != token:
        length += 1
        if length == MAX_CONTINUATIONS:  # `entry` is the last one kept, and it is not `token`
            break
        previous, entry = entry, entry_next[entry]
    if entry < 0:
        if weight > 0:
            tree.node_entries[node] = _new_entry(tree, token, weight, tree.node_entries[node])
            tree.node_weight[node] += weight
        return
    if tree.entry_token[entry] != token:
        if weight <= 0:
            return  # what is taken back was dropped earlier; what weighs 0 (an underflow) drops nothing
        tree.node_weight[node] -= tree.entry_weight[entry]
        tree.entry_token[entry] = token
        tree.entry_weight[entry] = 0.0
    tree.entry_weight[entry] += weight
    tree.node_weight[node] += weight
    if tree.entry_weight[entry] < NEGLIGIBLE_WEIGHT:
        tree.node_weight[node] -= tree.entry_weight[entry]
        if previous < 0:
            tree.node_entries[node] = tree.entry_next[entry]
        else:
            tree.entry_next[previous] = tree.entry_next[entry]
        tree.entry_next[entry] = tree.counts[FREE_ENTRY]
        tree.counts[FREE_ENTRY] = entry
    elif previous >= 0 and weight > 0:
        tree.entry_next[previous] = tree.entry_next[entry]
        tree.entry_next[entry] = tree.node_entries[node]
        tree.node_entries[node] = entry


@nb.njit(cache=True)
def _split(tree, parent, child, depth):
    """Put a node of the given depth on the edge above `child`; it has seen what `child` has seen."""
    end = tree.node_end[child]
    middle = new_node(tree, end, depth)
    last = -1
    entry = tree.node_entries[child]
    while entry >= 0:
        copy = _new_entry(tree, tree.entry_token[entry], tree.entry_weight[entry], -1)
        if last < 0:
            tree.node_entries[middle] = copy
        else:
            tree.entry_next[last] = copy
        last = copy
        entry = tree.entry_next[entry]
    tree.node_weight[middle] = tree.node_weight[child]
    _add_child(tree, parent, tree.tokens[end - tree.node_depth[parent]], middle)
    _add_child(tree, middle, tree.tokens[end - depth], child)
    return middle


@nb.njit(cache=True)
def insert(tree, text, root, end, context_length, token, weight):
    """Record that `token` followed the context that ends at `text[end]`. O(MAX_DEPTH).

    A negative weight takes back what an equal insertion recorded; `text` must be `tree.tokens` for a positive one,
    because new nodes refer to it.
    """
    # Arrays are taken out of the tuple once: numba counts references at each access.
    tokens, child_keys, child_nodes = tree.tokens, tree.child_keys, tree.child_nodes
    node_end, node_depth = tree.node_end, tree.node_depth
    node, depth = root, 0
    while depth < context_length:
        first = text[end - depth]
        slot = _child_slot(child_keys, node, first)
        if child_keys[slot] == -1:
            if weight > 0:
                leaf = new_node(tree, end, context_length)
                _add_child(tree, node, first, leaf)
                _count(tree, leaf, token, weight)
            return
        child = child_nodes[slot]
        child_end, child_depth = node_end[child], node_depth[child]
        shared = depth + 1
        limit = min(child_depth, context_length)
        while shared < limit and tokens[child_end - shared] == text[end - shared]:
            shared += 1
        if shared < child_depth:
            if weight <= 0:
                return
            child = _split(tree, node, child, shared)
        _count(tree, child, token, weight)
        node, depth = child, shared


@nb.njit(cache=True)
def match(tree, root, context, context_length, path_nodes):
    """Walk the longest indexed suffix of a context.

    Args:
        context: int32 array; the context is its last `context_length` of `context.size` tokens.
        path_nodes: int32 [MAX_DEPTH]; filled with the nodes passed, shallowest first. The last one may be longer than
            the match: its context then continues on an edge without a branch, so its counts are the match's.

    Returns:
        (number of nodes, length of the match). O(MAX_DEPTH).
    """
    tokens, child_keys, child_nodes = tree.tokens, tree.child_keys, tree.child_nodes
    node_end, node_depth, node_weight = tree.node_end, tree.node_depth, tree.node_weight
    node, depth, count = root, 0, 0
    last = context.size - 1
    while depth < context_length:
        slot = _child_slot(child_keys, node, context[last - depth])
        if child_keys[slot] == -1:
            break
        child = child_nodes[slot]
        if node_weight[child] < NEGLIGIBLE_WEIGHT:
            break
        child_end, child_depth = node_end[child], node_depth[child]
        shared = depth + 1
        limit = min(child_depth, context_length)
        while shared < limit and tokens[child_end - shared] == context[last - shared]:
            shared += 1
        path_nodes[count] = child
        count += 1
        depth = shared
        if shared < child_depth:
            break
        node = child
    return count, depth


@nb.njit(cache=True)
def append_text(tree, block_end, sequence_length, token):
    """Store one token behind a sequence. Opens a new block, with the overlap copied, when the last one is full.

    Args:
        block_end: where the sequence's last token is stored, or -1 when it has none.
        sequence_length: tokens stored so far.

    Returns:
        Where the token is stored; its predecessors lie directly before it, at least MAX_DEPTH of them if there are.
    """
    payload = sequence_length % BLOCK_TOKENS
    if payload == 0:
        overlap = min(sequence_length, MAX_DEPTH)
        start = tree.counts[NUM_TOKENS]
        tree.counts[NUM_TOKENS] += BLOCK_TOKENS + overlap
        for i in range(overlap):
            tree.tokens[start + i] = tree.tokens[block_end - overlap + 1 + i]
        block_end = start + overlap - 1
    tree.tokens[block_end + 1] = token
    return block_end + 1


@nb.njit(cache=True)
def rehash(tree, keys, nodes):
    for i in range(keys.size):
        if keys[i] != -1:
            slot = _child_slot(tree.child_keys, keys[i] >> 32, keys[i] & 0xFFFFFFFF)
            tree.child_keys[slot] = keys[i]
            tree.child_nodes[slot] = nodes[i]


# -- the request's own context -------------------------------------------------------------------------------------


@nb.njit(cache=True, inline="always")
def bucket_of(first, second):
    mixed = (np.uint32(first) * np.uint32(0x9E3779B1)) ^ (np.uint32(second) * np.uint32(0x85EBCA77))
    return (mixed ^ (mixed >> np.uint32(15))) & np.uint32(NUM_HEADS - 1)


@nb.njit(cache=True)
def append_token(contexts, row, token):
    """Append one token to a row; its predecessor, whose continuation is now known, enters the index. O(1)."""
    length = contexts.lengths[row]
    contexts.tokens[row, length] = token
    contexts.lengths[row] = length + 1
    if length >= MIN_MATCH:
        bucket = bucket_of(contexts.tokens[row, length - 2], contexts.tokens[row, length - 1])
        contexts.previous[row, length - 1] = contexts.heads[row, bucket]
        contexts.heads[row, bucket] = length - 1


@nb.njit(cache=True)
def match_own(contexts, row, context, max_match, ends, match_lengths):
    """Find where the end of `context` occurred before in the row.

    Args:
        context: int32 array, at least MIN_MATCH tokens: the row's newest tokens, then drafted ones.
        ends, match_lengths: int32 [MAX_CANDIDATES]; filled with positions whose next token is a candidate, newest
            first, and how many tokens before it agree with the context (MIN_MATCH..max_match).

    Returns:
        The number of candidates. O(MAX_CANDIDATES * max_match).
    """
    last = context.size - 1
    position = contexts.heads[row, bucket_of(context[last - 1], context[last])]
    count = visited = 0
    while position >= 0 and visited < MAX_CANDIDATES:
        visited += 1
        limit = min(max_match, position + 1, context.size)
        length = 0
        while length < limit and contexts.tokens[row, position - length] == context[last - length]:
            length += 1
        if length >= MIN_MATCH:
            ends[count] = position
            match_lengths[count] = length
            count += 1
        position = contexts.previous[row, position]
    return count


# -- drafting ------------------------------------------------------------------------------------------------------


@nb.njit(cache=True)
def _length_bin(length):
    if length <= 4:
        return length - 1
    if length <= 6:
        return 4
    if length <= 8:
        return 5
    if length <= 12:
        return 6
    if length <= 16:
        return 7
    return 8 if length <= 24 else 9


@nb.njit(cache=True)
def _evidence_bin(weight):
    if weight < 1.5:
        return 0
    return 1 if weight < 4.5 else 2


@nb.njit(cache=True, inline="always")
def _add(tokens, weights, count, token, weight):
    """Add weight to a token of an unordered list, appending it if there is room. Returns the list's length."""
    for i in range(count):
        if tokens[i] == token:
            weights[i] += weight
            return count
    if count < tokens.size:
        tokens[count] = token
        weights[count] = weight
        return count + 1
    return count


@nb.njit(cache=True)
def _tree_distribution(tree, root, context, unit_weight, tokens, weights, path):
    """Blend the nodes of a match: q_l = (count_l + BLEND * q_{l-1}) / (total_l + BLEND), unrolled from the deepest l.

    Returns (candidates, match length, evidence in rollouts).
    """
    levels, length = match(tree, root, context, min(context.size, MAX_DEPTH), path)
    if levels == 0:
        return 0, 0, 0.0
    node_weight, node_entries = tree.node_weight, tree.node_entries
    entry_token, entry_weight, entry_next = tree.entry_token, tree.entry_weight, tree.entry_next
    prior = BLEND * unit_weight
    mass, count = 1.0, 0
    for level in range(levels - 1, -1, -1):
        node = path[level]
        is_last = level == 0 or levels - level == MAX_LEVELS
        scale = mass / (node_weight[node] + (0.0 if is_last else prior))
        entry = node_entries[node]
        while entry >= 0:
            count = _add(tokens, weights, count, entry_token[entry], scale * entry_weight[entry])
            entry = entry_next[entry]
        mass = scale * prior
        if is_last or mass < NEGLIGIBLE_MASS:
            break
    return count, length, node_weight[path[levels - 1]] / unit_weight


@nb.njit(cache=True)
def _own_distribution(contexts, row, context, tokens, weights, ends, lengths):
    """Weigh the candidates of the request's own context. Returns (candidates, match length, evidence)."""
    if context.size < MIN_MATCH:
        return 0, 0, 0.0
    found = match_own(contexts, row, context, MAX_DEPTH, ends, lengths)
    longest = 0
    for i in range(found):
        longest = max(longest, lengths[i])
    count, total, evidence = 0, 0.0, 0.0
    for i in range(found):
        weight = OWN_BASE ** float(lengths[i] - longest)
        total += weight
        evidence += 1.0 if lengths[i] == longest else 0.0
        count = _add(tokens, weights, count, contexts.tokens[row, ends[i] + 1], weight)
    for i in range(count):
        weights[i] /= total
    return count, longest, evidence


@nb.njit(cache=True)
def _source_weight(counters, length):
    """Odds that the source's first choice is right. A longer match is trusted more until outcomes say otherwise."""
    prior = length / (length + 1.0)
    rate = (counters[1] + 4.0 * prior) / (counters[0] + 4.0)
    return rate / (1.0 - min(rate, 0.998))


@nb.njit(cache=True)
def _propose_one(tree, contexts, rows, row, max_tokens, settings, calibration, out):
    """Fill `out` for one row. O(max_tokens * MAX_DEPTH)."""
    known = contexts.lengths[row]
    kept = min(known, MAX_DEPTH)
    text = np.empty(kept + max_tokens, np.int32)
    text[:kept] = contexts.tokens[row, known - kept : known]
    tokens, weights = np.empty(MAX_MIXED, np.int32), np.empty(MAX_MIXED, np.float64)
    mixed_tokens, mixed = np.empty(MAX_MIXED, np.int32), np.empty(MAX_MIXED, np.float64)
    path = np.empty(MAX_DEPTH, np.int32)
    ends, lengths = np.empty(MAX_CANDIDATES, np.int32), np.empty(MAX_CANDIDATES, np.int32)
    coupled = 1 if rows.has_dice[row] else 0
    survival = 1.0
    out.lengths[row] = 0
    for slot in range(max_tokens):
        context = text[: kept + slot]
        num_mixed, longest, total = 0, 0, 0.0
        for source in range(3):
            out.source_tokens[row, slot, source] = -1
            if not settings.uses[source]:
                continue
            if source == OWN:
                count, length, evidence = _own_distribution(contexts, row, context, tokens, weights, ends, lengths)
            else:
                root = rows.root[row] if source == PROBLEM else settings.shared_root
                if root < 0:
                    continue
                count, length, evidence = _tree_distribution(
                    tree, root, context, settings.unit_weight, tokens, weights, path
                )
            if count == 0:
                continue
            length_bin, evidence_bin = _length_bin(length), _evidence_bin(evidence)
            favourite = 0
            for i in range(1, count):
                if weights[i] > weights[favourite]:
                    favourite = i
            out.source_tokens[row, slot, source] = tokens[favourite]
            out.source_cells[row, slot, source, 0] = length_bin
            out.source_cells[row, slot, source, 1] = evidence_bin
            source_weight = _source_weight(calibration.sources[source, length_bin, evidence_bin], length)
            longest = max(longest, length)
            total += source_weight
            for i in range(count):
                num_mixed = _add(mixed_tokens, mixed, num_mixed, tokens[i], source_weight * weights[i])
        if num_mixed == 0:
            break
        best, best_score = 0, -np.inf
        for i in range(num_mixed):
            score = settings.sharpness * np.log(mixed[i] / total) if coupled else mixed[i]
            if coupled:
                score += gumbel_nb(rows.seed[row], np.int64(known - 1 + slot), np.int64(mixed_tokens[i]))
            if score > best_score:
                best, best_score = i, score
        probability = min(mixed[best] / total, 1.0)  # above 1 by rounding only
        probability_bin = min(int(probability * NUM_PROBABILITY_BINS), NUM_PROBABILITY_BINS - 1)
        length_bin = _length_bin(longest)
        cell = calibration.choices[coupled, probability_bin, length_bin]
        survival *= (cell[1] + 2.0 * probability) / (cell[0] + 2.0)
        if survival < settings.min_survival:
            break
        out.choice_cells[row, slot, 0] = coupled
        out.choice_cells[row, slot, 1] = probability_bin
        out.choice_cells[row, slot, 2] = length_bin
        out.tokens[row, slot] = mixed_tokens[best]
        out.confidence[row, slot] = survival
        out.lengths[row] = slot + 1
        text[kept + slot] = mixed_tokens[best]


@nb.njit(cache=True)
def propose(tree, contexts, rows, batch, max_tokens, settings, calibration, out):
    for i in range(batch.size):
        _propose_one(tree, contexts, rows, batch[i], max_tokens[i], settings, calibration, out)


@nb.njit(cache=True)
def _trial(cell, hit):
    if cell[0] >= MAX_TRIALS:
        cell[0] *= 0.5
        cell[1] *= 0.5
    cell[0] += 1.0
    if hit:
        cell[1] += 1.0


@nb.njit(cache=True)
def observe(batch, targets, starts, num_accepted, calibration, out):
    """Update the counters from the slots that the target reached: the accepted ones and the first difference."""
    for i in range(batch.size):
        row = batch[i]
        reached = min(out.lengths[row], num_accepted[i] + 1, starts[i + 1] - starts[i])
        for slot in range(reached):
            target = targets[starts[i] + slot]
            coupled, probability_bin, length_bin = out.choice_cells[row, slot]
            _trial(calibration.choices[coupled, probability_bin, length_bin], out.tokens[row, slot] == target)
            for source in range(3):
                if out.source_tokens[row, slot, source] >= 0:
                    length_bin, evidence_bin = out.source_cells[row, slot, source]
                    hit = out.source_tokens[row, slot, source] == target
                    _trial(calibration.sources[source, length_bin, evidence_bin], hit)
        out.lengths[row] = 0


@nb.njit(cache=True)
def store(tree, rows, row, tokens, settings, indexed):
    """Append tokens to a row's text in the tree and, if `indexed`, record each as its context's continuation."""
    weight = rows.weight[row]
    for i in range(tokens.size):
        stored = rows.stored[row]
        end = append_text(tree, rows.block_end[row], stored, tokens[i])
        rows.block_end[row] = end
        rows.stored[row] = stored + 1
        if indexed:
            length = min(stored, MAX_DEPTH)
            if settings.uses[PROBLEM] and rows.root[row] >= 0:
                insert(tree, tree.tokens, rows.root[row], end - 1, length, tokens[i], weight)
            if settings.uses[SHARED]:
                insert(tree, tree.tokens, settings.shared_root, end - 1, length, tokens[i], weight)


@nb.njit(cache=True)
def append_context(contexts, row, tokens):
    for i in range(tokens.size):
        append_token(contexts, row, tokens[i])


@nb.njit(cache=True)
def commit(tree, contexts, rows, batch, tokens, starts, settings):
    for i in range(batch.size):
        new = tokens[starts[i] : starts[i + 1]]
        append_context(contexts, batch[i], new)
        if settings.uses[PROBLEM] or settings.uses[SHARED]:
            store(tree, rows, batch[i], new, settings, True)


@nb.njit(cache=True)
def take_back(tree, text, first, rows, row, settings):
    """Undo `_store` of text[first:], whose contexts reach back to the start of `text`."""
    for position in range(first, text.size):
        length = min(position, MAX_DEPTH)
        if settings.uses[PROBLEM] and rows.root[row] >= 0:
            insert(tree, text, rows.root[row], position - 1, length, text[position], -rows.weight[row])
        if settings.uses[SHARED]:
            insert(tree, text, settings.shared_root, position - 1, length, text[position], -rows.weight[row])
