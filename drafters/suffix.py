"""A suffix tree in its binary form: every context of a problem, sorted, grown token by token.

Positions of the store are the nodes. A position stands for the text before it, read backwards and cut at MAX_DEPTH
tokens, and its continuation is the token at the position itself. There is one tree per problem and last token, a binary
search tree over these contexts: the suffix binary search tree (Irving and Love 2003, doi:10.1016/S1570-8667(03)00034-0)
of the reversed text. Compared with a suffix tree of nodes and edges it needs two links per token and nothing else:
internal nodes are implicit, as the positions between which a common prefix falls.

- A new position becomes the root and splits what was there (Stephenson 1980), so newer positions are above older ones:
  the way down to a context passes the newest position of every match length, and what is found first is newest.
- Rollouts in flight grow in any interleaving, and any rollout leaves at any time, in O(log n) per token.
- Contexts are ordered by a scrambled token number: then no text that occurs in practice gives long branches.
"""

from __future__ import annotations

import itertools

import numpy as np

from rollout_spec.drafters import kernels
from rollout_spec.drafters.kernels import EMPTY, MAX_DEPTH, PAGE_BITS, REMOVED, Index, Store
from rollout_spec.types import Int32Array


def new_roots(size: int) -> Int32Array:
    """An empty table of roots; `size` is a power of two."""
    return np.full(size, EMPTY, np.int32)


def reserve_roots(store: Store, index: Index, num_new: int) -> Index:
    """Make room for `num_new` more roots. Amortised O(1) per token."""
    used, size = int(index.counts.sum()) + num_new, index.roots.size
    if used * 4 <= size * 3:
        return index
    while (int(index.counts[0]) + num_new) * 2 > size:
        size *= 2
    old = index.roots
    index = index._replace(roots=new_roots(size), counts=np.zeros(2, np.int64))
    kernels.rehash_roots(store, index, old)
    return index


def check_integrity(store: Store, index: Index) -> None:
    """Check that every position is in its tree, once, and in order. O(size); raises AssertionError."""
    reached: set[int] = set()
    used = 0
    for root in index.roots.tolist():
        if root in (EMPTY, REMOVED):
            continue
        used += 1
        order: list[int] = []
        stack: list[int] = []
        node = root
        while stack or node >= 0:  # in-order
            while node >= 0:
                stack.append(node)
                node = int(index.children[node, 0])
            node = stack.pop()
            order.append(node)
            node = int(index.children[node, 1])
        text = np.empty(MAX_DEPTH, np.int32)
        for a, b in itertools.pairwise(order):
            found = kernels.read_back(store, _before(store, b), text, MAX_DEPTH)
            _, sign = kernels._compare(store.tokens, store.page_back, a, text[MAX_DEPTH - found :], found, 0)
            assert sign < 0 or (sign == 0 and kernels._scramble(a) < kernels._scramble(b)), (
                f"positions {a} and {b} are out of order"
            )
        assert not reached.intersection(order), "a position is in two trees"
        reached.update(order)
    assert used == index.counts[0], "number of roots"
    expected = set()
    for document in np.flatnonzero(store.document_problem >= 0).tolist():
        position = int(store.document_last[document])
        for _ in range(int(store.document_length[document])):
            before = _before(store, position)
            if before >= 0:
                expected.add(position)
            position = before
    assert reached == expected, "positions in the trees"


def _before(store: Store, position: int) -> int:
    return position - 1 if position & kernels.PAGE_MASK else int(store.page_back[position >> PAGE_BITS])
