"""A suffix tree in its binary form: every context of a problem, sorted, grown token by token.

Positions of the store are the nodes. A position stands for the text before it, read backwards and cut at MAX_DEPTH
tokens, and its continuation is the token at the position itself. There is one tree per problem and last token, a binary
search tree over these contexts: the suffix binary search tree (Irving and Love 2003, doi:10.1016/S1570-8667(03)00034-0)
of the reversed text. Compared with a suffix tree of nodes and edges it needs two links per token and nothing else:
internal nodes are implicit, as the positions between which a common prefix falls. Other problems are asked in a second
tree over the same positions, by last token alone, where `shared` is on: two more links per token.

- A new position becomes the root and splits what was there (Stephenson 1980), so newer positions are above older ones:
  the way down to a context passes the newest position of every match length, and what is found first is newest. (Where
  rollouts are taken out, two subtrees are merged by document number, which is age for most pairs but not for all.)
- Rollouts in flight grow in any interleaving, and any rollout leaves at any time, in O(log n) per token.
- Contexts are ordered by a scrambled token number: then no text that occurs in practice gives long branches.
"""

from __future__ import annotations

import itertools

import numpy as np

from rollout_spec.drafters import kernels
from rollout_spec.drafters.kernels import EMPTY, PAGE_BITS, REMOVED, Store, Tree
from rollout_spec.drafters.vote import MAX_DEPTH


def new_tree(num_positions: int, num_roots: int = 64) -> Tree:
    """An empty tree with room for positions below `num_positions`; `num_roots` is a power of two."""
    return Tree(
        children=np.full((num_positions, 2), -1, np.int32),
        roots=np.full(num_roots, EMPTY, np.int32),
        counts=np.zeros(2, np.int64),
    )


def reserve(store: Store, tree: Tree, num_new: int, *, is_shared: bool) -> Tree:
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
        kernels.rehash_roots(store, tree, is_shared, old_roots)
    return tree


def check_integrity(store: Store, tree: Tree, *, is_shared: bool) -> None:
    """Check that every position is in its tree, once, and in order. O(size); raises AssertionError."""
    reached: set[int] = set()
    used = 0
    for slot, root in enumerate(tree.roots.tolist()):
        if root in (EMPTY, REMOVED):
            continue
        used += 1
        problem = -1 if is_shared else kernels._problem_of(store, root)
        token = store.tokens[_before(store, root)]
        assert kernels._root_slot(store, tree.roots, problem, token) == slot, "a root is not found"
        order: list[int] = []
        stack: list[int] = []
        node = root
        while stack or node >= 0:  # in-order
            while node >= 0:
                stack.append(node)
                node = int(tree.children[node, 0])
            node = stack.pop()
            order.append(node)
            assert is_shared or kernels._problem_of(store, node) == problem, "a position of another problem"
            node = int(tree.children[node, 1])
        text = np.empty(MAX_DEPTH, np.int32)
        for a, b in itertools.pairwise(order):
            found = kernels.read_back(store, _before(store, b), text, MAX_DEPTH)
            length, sign = kernels._compare(store.tokens, store.page_back, a, text[MAX_DEPTH - found :], found, 0)
            assert length > 0, f"positions {a} and {b} have different last tokens"
            assert sign < 0 or (sign == 0 and kernels._scramble(a) < kernels._scramble(b)), (
                f"positions {a} and {b} are out of order"
            )
        assert not reached.intersection(order), "a position is in two trees"
        reached.update(order)
    assert used == tree.counts[0], "number of roots"
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
