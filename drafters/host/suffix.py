"""A suffix tree in its binary form: every context of a problem, sorted, grown token by token.

Positions of the store are the nodes. A position stands for the text before it, read backwards and cut at MAX_DEPTH
tokens, and its continuation is the token at the position itself. There is one tree per problem and last token, a binary
search tree over these contexts: the suffix binary search tree (Irving and Love 2003, doi:10.1016/S1570-8667(03)00034-0)
of the reversed text. Compared with a suffix tree of nodes and edges it needs two links per token and nothing else:
internal nodes are implicit, as the positions between which a common prefix falls. Other problems are searched in a
second tree over the same positions, by last token alone, where `shared` is on: two more links per token. Private
documents are not in that one.

- A new position becomes the root and splits what was there (Stephenson 1980), so newer positions are above older ones:
  the way down to a context passes the newest position of every match length, and what is found first is newest. (Where
  rollouts are taken out, two subtrees are merged by document number, which is age for most pairs but not for all.)
- Rollouts in flight grow in any interleaving, and any rollout leaves at any time, in O(log n) per token.
- Contexts are ordered by a hash of their tokens, so that no real text degenerates the tree into a list.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters.host.constants import ENOUGH_CANDIDATES, MAX_DEPTH
from rollout_spec.drafters.host.store import (
    DOCUMENT,
    INDEXED,
    LAST,
    PAGE_BITS,
    PROBLEM,
    TextArrays,
    before,
    compare_context,
    is_private,
    order_hash,
    problem_of,
    read_back,
)
from rollout_spec.jit import njit
from rollout_spec.types import Int32Array

MAX_WALK = 96
"""Nodes that one lookup visits on its way down."""
MAX_VISITS = 96
"""Nodes beside the way down that one lookup visits."""
EMPTY, REMOVED = -1, -2


class Tree(NamedTuple):
    """A suffix tree over the store: of each problem apart, or of all together."""

    children: Int32Array  # [P * PAGE_TOKENS, 2] smaller and larger contexts, -1: none
    roots: Int32Array  # [power of two] root by (problem, last token), open addressing
    counts: NDArray[np.int64]  # [2] used and removed entries of `roots`


class Path(NamedTuple):
    """Buffers of one lookup: the nodes on its way down, longest match first, and what lies beside them."""

    nodes: Int32Array  # [MAX_WALK]
    lengths: Int32Array  # [MAX_WALK] how far they match
    away: Int32Array  # [MAX_WALK] the child on the side that the walk did not take
    below: Int32Array  # [MAX_WALK] how far everything below that child matches at least
    stack: Int32Array  # [MAX_WALK]


def new_tree() -> Tree:
    """An empty tree; `reserve` makes room."""
    return Tree(np.full((0, 2), -1, np.int32), np.full(64, EMPTY, np.int32), np.zeros(2, np.int64))


def new_path() -> Path:
    """Buffers of one lookup."""
    return Path(*(np.empty(MAX_WALK, np.int32) for _ in Path._fields))


def reserve(store: TextArrays, tree: Tree, num_new: int, *, is_shared: bool) -> Tree:
    """Make room for every position of the store and `num_new` more roots. Amortised O(1) per token."""
    size, old_size = store.tokens.size, tree.children.shape[0]
    if size > old_size:
        children = np.full((size, 2), -1, np.int32)
        children[:old_size] = tree.children
        tree = tree._replace(children=children)
    num_roots = tree.roots.size
    if (int(tree.counts.sum()) + num_new) * 4 > num_roots * 3:
        while (int(tree.counts[0]) + num_new) * 2 > num_roots:
            num_roots *= 2
        old_roots = tree.roots
        tree = tree._replace(roots=np.full(num_roots, EMPTY, np.int32), counts=np.zeros(2, np.int64))
        _rehash(store, tree, is_shared, old_roots)
    return tree


@njit(allocates=False)
def _find_root(store, roots, problem, token):
    """Entry of the root for (problem, last token), or the empty one where it belongs. Problem -1: all together."""
    mask = roots.size - 1
    mixed = (np.uint64(np.int64(problem)) * np.uint64(0x9E3779B97F4A7C15)) ^ (
        np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    )
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    entry = np.int64(mixed >> np.uint64(32)) & mask
    free = np.int64(-1)
    while True:
        root = np.int64(roots[entry])
        if root == EMPTY:
            return entry if free < 0 else free
        if root == REMOVED:
            if free < 0:
                free = entry
        elif (problem < 0 or problem_of(store, root) == problem) and store.tokens[before(store.pages, root)] == token:
            return entry
        entry = (entry + 1) & mask


@njit(allocates=False)
def insert(store, tree, problem, position, text, end):
    """Make `position`, whose context is text[:end], the root of its tree; the old tree is split into its two subtrees.

    Expected O(log n) comparisons.
    """
    tokens, pages, children, roots = store.tokens, store.pages, tree.children, tree.roots
    entry = _find_root(store, roots, problem, text[end - 1])
    node = np.int64(roots[entry])
    if node < 0:
        tree.counts[0] += 1
        if node == REMOVED:
            tree.counts[1] -= 1
    roots[entry] = position
    smaller, larger = position, position  # nodes whose free link takes the next smaller or larger subtree
    smaller_side, larger_side = 0, 1
    smaller_length, larger_length = 1, 1
    while node >= 0:
        length, sign = compare_context(tokens, pages, node, text, end, min(smaller_length, larger_length))
        if sign < 0 or (sign == 0 and order_hash(node) < order_hash(position)):
            children[smaller, smaller_side] = node
            smaller, smaller_side, smaller_length = node, 1, length
            node = np.int64(children[node, 1])
        else:
            children[larger, larger_side] = node
            larger, larger_side, larger_length = node, 0, length
            node = np.int64(children[node, 0])
    children[smaller, smaller_side] = -1
    children[larger, larger_side] = -1


@njit(allocates=False)
def remove(store, tree, problem, position, text):
    """Take a position out of its tree, wherever it is. Expected O(log n)."""
    tokens, pages, children, roots = store.tokens, store.pages, tree.children, tree.roots
    found = read_back(store, before(pages, position), text, np.int64(MAX_DEPTH))
    context = text[MAX_DEPTH - found : MAX_DEPTH]
    entry = _find_root(store, roots, problem, context[found - 1])
    parent, side = np.int64(-1), 0
    node = np.int64(roots[entry])
    smaller_length, larger_length = 1, 1
    while node != position:
        length, sign = compare_context(tokens, pages, node, context, found, min(smaller_length, larger_length))
        parent = node
        if sign < 0 or (sign == 0 and order_hash(node) < order_hash(position)):
            side, smaller_length = 1, length
        else:
            side, larger_length = 0, length
        node = np.int64(children[node, side])
    smaller, larger = np.int64(children[position, 0]), np.int64(children[position, 1])
    while True:
        if smaller < 0 or larger < 0:
            kept = max(smaller, larger)
        elif store.pages[smaller >> PAGE_BITS, DOCUMENT] > store.pages[larger >> PAGE_BITS, DOCUMENT]:
            kept = smaller
        else:
            kept = larger
        if parent >= 0:
            children[parent, side] = kept
        elif kept >= 0:
            roots[entry] = kept
        else:
            roots[entry] = REMOVED
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


@njit(allocates=False)
def _rehash(store, tree, is_shared, old_roots):
    for i in range(old_roots.size):
        root = np.int64(old_roots[i])
        if root >= 0:
            problem = np.int64(-1) if is_shared else problem_of(store, root)
            entry = _find_root(store, tree.roots, problem, store.tokens[before(store.pages, root)])
            tree.roots[entry] = root
            tree.counts[0] += 1


@njit(allocates=False)
def gather(store, tree, problem, excluded_problem, text, end, first, limit, positions, lengths, path):
    """Collect continuations of the longest matches of text[:end].

    Args:
        problem: Whose tree; -1 for the tree of all problems.
        excluded_problem: Skip positions of this problem. Where there are many of them, what is added of the others is
            not always the longest.
        first: Candidates that there are already.
        limit: Most candidates, those included.

    Returns:
        The number of candidates. O(log n + MAX_VISITS).
    """
    tokens, pages, children = store.tokens, store.pages, tree.children
    node = np.int64(tree.roots[_find_root(store, tree.roots, problem, text[end - 1])])
    path_node, path_length, path_away, path_below = path.nodes, path.lengths, path.away, path.below
    steps = 0
    smaller_length, larger_length = 1, 1
    while node >= 0 and steps < MAX_WALK:
        length, sign = compare_context(tokens, pages, node, text, end, min(smaller_length, larger_length))
        i = steps  # kept in order of falling length, newer ones first among equals
        while i > 0 and path_length[i - 1] < length:
            path_node[i], path_length[i] = path_node[i - 1], path_length[i - 1]
            path_away[i], path_below[i] = path_away[i - 1], path_below[i - 1]
            i -= 1
        path_node[i], path_length[i] = node, length
        steps += 1
        if sign <= 0:
            path_away[i], path_below[i] = children[node, 0], smaller_length
            smaller_length = length
            node = np.int64(children[node, 1])
        else:
            path_away[i], path_below[i] = children[node, 1], larger_length
            larger_length = length
            node = np.int64(children[node, 0])
    stack = path.stack
    count, enough, visits = first, min(first + ENOUGH_CANDIDATES, limit), 0
    for i in range(steps):
        if count == limit or (count >= enough and path_length[i] < lengths[count - 1]):
            break
        if excluded_problem < 0 or problem_of(store, np.int64(path_node[i])) != excluded_problem:
            positions[count], lengths[count] = path_node[i], path_length[i]
            count += 1
        # Once there are enough candidates, only those are added that match as far as this one.
        stack[0], depth = path_away[i], 1 if path_away[i] >= 0 else 0
        while depth > 0 and count < limit and visits < MAX_VISITS:
            depth -= 1
            visits += 1
            node = np.int64(stack[depth])
            length, sign = compare_context(tokens, pages, node, text, end, np.int64(path_below[i]))
            near, far = (1, 0) if sign < 0 else (0, 1)
            is_near = length >= path_length[i] or count < enough
            if is_near and (excluded_problem < 0 or problem_of(store, node) != excluded_problem):
                positions[count], lengths[count] = node, length
                count += 1
            for side in (far, near):
                if (is_near or side == near) and children[node, side] >= 0 and depth < stack.size:
                    stack[depth] = children[node, side]
                    depth += 1
    return count


def check_integrity(store: TextArrays, tree: Tree, *, is_shared: bool) -> None:
    """Check that every position is in its tree, once, and in order. O(size); raises AssertionError."""
    reached: set[int] = set()
    entries = np.flatnonzero(tree.roots >= 0).tolist()
    assert len(entries) == tree.counts[0], "number of roots"
    for entry in entries:
        root = int(tree.roots[entry])
        problem = -1 if is_shared else problem_of(store, root)
        token = store.tokens[before(store.pages, root)]
        assert _find_root(store, tree.roots, problem, token) == entry, "a root is not found"
        order: list[int] = []
        stack: list[int] = []
        node = root
        while stack or node >= 0:  # in-order
            while node >= 0:
                stack.append(node)
                node = int(tree.children[node, 0])
            node = stack.pop()
            order.append(node)
            assert is_shared or problem_of(store, node) == problem, "a position of another problem"
            node = int(tree.children[node, 1])
        text = np.empty(MAX_DEPTH, np.int32)
        for a, b in itertools.pairwise(order):
            found = read_back(store, before(store.pages, b), text, MAX_DEPTH)
            length, sign = compare_context(store.tokens, store.pages, a, text[MAX_DEPTH - found :], found, 0)
            assert length > 0, f"positions {a} and {b} have different last tokens"
            assert sign < 0 or (sign == 0 and order_hash(a) < order_hash(b)), f"positions {a} and {b} are out of order"
        assert not reached.intersection(order), "a position is in two trees"
        reached.update(order)
    expected = set()
    for document in np.flatnonzero(store.documents[:, PROBLEM] >= 0).tolist():
        if is_shared and is_private(int(store.documents[document, PROBLEM])):
            continue
        position = int(store.documents[document, LAST])
        for _ in range(int(store.documents[document, INDEXED])):
            previous = int(before(store.pages, position))
            if previous >= 0:
                expected.add(position)
            position = previous
    assert reached == expected, "positions in the trees"
