"""A depth-capped suffix tree of everything that a problem's rollouts have said, grown token by token.

The tree indexes *reversed* contexts: the path from a root spells the last token, the token before it, and so on.
It is the suffix tree of the reversed text (Weiner 1973), built by appending instead of prepending, and it fits
drafting better than the forward tree does:

- rollouts in flight can grow in any interleaving; there are no open leaves and no active points to keep;
- the longest match of a context is one walk from the root, and the nodes passed on the way are exactly the shorter
  matches that a blended prediction needs;
- unary runs are compressed, so a tree of n tokens has at most 2 n nodes, and rollouts that repeat share theirs.

Each node keeps the continuations that followed its context, with weights. All problems live in one set of flat
arrays; a problem is a root. Inserting and looking up cost O(depth) per token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters import kernels
from rollout_spec.drafters.kernels import (
    BLOCK_TOKENS,
    MAX_CONTINUATIONS,
    MAX_DEPTH,
    NUM_CHILDREN,
    NUM_ENTRIES,
    NUM_NODES,
    NUM_TOKENS,
    TreeArrays,
)
from rollout_spec.types import Int32Array


class SuffixTree:
    """Owns the arrays of one forest of problems. Weights are in units of the newest policy version's.

    Attributes:
        arrays: what the kernels read and write; replaced whenever a capacity grows.
    """

    def __init__(self) -> None:
        self.arrays = TreeArrays(
            tokens=np.zeros(1 << 12, np.int32),
            node_end=np.zeros(1 << 10, np.int32),
            node_depth=np.zeros(1 << 10, np.int32),
            node_entries=np.zeros(1 << 10, np.int32),
            node_weight=np.zeros(1 << 10, np.float32),
            entry_token=np.zeros(1 << 12, np.int32),
            entry_weight=np.zeros(1 << 12, np.float32),
            entry_next=np.zeros(1 << 12, np.int32),
            child_keys=np.full(1 << 11, -1, np.int64),
            child_nodes=np.zeros(1 << 11, np.int32),
            counts=np.array([0, 0, 0, 0, -1], np.int64),
        )

    def new_root(self) -> int:
        """Add a problem and return its root."""
        self.reserve(0, num_nodes=1)
        return int(kernels.new_node(self.arrays, -1, 0))

    def reserve(self, num_tokens: int, *, num_nodes: int = 0, num_blocks: int = 1) -> None:
        """Make room for `num_tokens` tokens of `num_blocks` texts, in two trees. Amortised O(1) per token."""
        tree = self.arrays
        used = tree.counts
        num_blocks += 1 + num_tokens // BLOCK_TOKENS
        num_nodes += 4 * num_tokens
        new: dict[str, NDArray] = {}

        def grow(fields: tuple[str, ...], needed: int) -> None:
            capacity = getattr(tree, fields[0]).size
            if needed > capacity:
                for field in fields:
                    old = getattr(tree, field)
                    new[field] = np.empty(max(needed, capacity + capacity // 2), old.dtype)
                    new[field][:capacity] = old

        grow(("tokens",), int(used[NUM_TOKENS]) + num_blocks * (BLOCK_TOKENS + MAX_DEPTH))
        grow(("node_end", "node_depth", "node_entries", "node_weight"), int(used[NUM_NODES]) + num_nodes)
        # A token enters at most MAX_DEPTH nodes per tree, and a split copies a node's continuations.
        entries = int(used[NUM_ENTRIES]) + 2 * num_tokens * (MAX_DEPTH + MAX_CONTINUATIONS)
        grow(("entry_token", "entry_weight", "entry_next"), entries)
        if (int(used[NUM_CHILDREN]) + num_nodes) * 3 > tree.child_keys.size * 2:
            size = tree.child_keys.size
            while (int(used[NUM_CHILDREN]) + num_nodes) * 3 > size * 2:
                size *= 2
            new["child_keys"] = np.full(size, -1, np.int64)
            new["child_nodes"] = np.zeros(size, np.int32)
        if new:
            self.arrays = tree._replace(**new)
            if "child_keys" in new:
                kernels.rehash(self.arrays, tree.child_keys, tree.child_nodes)

    def scale(self, factor: float) -> None:
        """Multiply every weight, so that the newest policy version's rollouts can weigh 1 again. O(entries)."""
        self.arrays.entry_weight[: self.arrays.counts[NUM_ENTRIES]] *= np.float32(factor)
        self.arrays.node_weight[: self.arrays.counts[NUM_NODES]] *= np.float32(factor)

    def continuations(self, node: int) -> dict[int, float]:
        """The continuation weights of a node, newest first."""
        tree, found = self.arrays, {}
        entry = int(tree.node_entries[node])
        while entry >= 0:
            found[int(tree.entry_token[entry])] = float(tree.entry_weight[entry])
            entry = int(tree.entry_next[entry])
        return found

    def levels(self, root: int, context: Int32Array) -> list[tuple[int, dict[int, float]]]:
        """(match length, continuation weights) of every node on the context's path, shallowest first."""
        path = np.zeros(MAX_DEPTH, np.int32)
        count, length = kernels.match(self.arrays, root, context, min(context.size, MAX_DEPTH), path)
        return [(min(int(self.arrays.node_depth[n]), int(length)), self.continuations(n)) for n in path[:count]]

    def memory_bytes(self) -> int:
        """Bytes of all arrays, unused capacity included."""
        return sum(array.nbytes for array in self.arrays)

    def check_integrity(self) -> None:
        """Check the invariants that every operation keeps. O(size); raises AssertionError with the node."""
        tree = self.arrays
        num_nodes = int(tree.counts[NUM_NODES])
        parents = np.full(num_nodes, -1)
        for key, child in zip(tree.child_keys, tree.child_nodes, strict=True):
            if key == -1:
                continue
            node, token = int(key >> 32), int(key & 0xFFFFFFFF)
            assert tree.node_depth[node] < tree.node_depth[child] <= MAX_DEPTH, f"depth at node {child}"
            assert tree.tokens[tree.node_end[child] - tree.node_depth[node]] == token, f"edge label at node {child}"
            assert parents[child] == -1, f"node {child} has two parents"
            parents[child] = node
        for node in range(num_nodes):
            seen = self.continuations(node)
            assert len(seen) <= MAX_CONTINUATIONS, f"continuations at node {node}"
            assert all(w >= 0 for w in seen.values()), f"weight at node {node}"  # scaling can underflow to 0
            total = float(tree.node_weight[node])
            assert abs(total - sum(seen.values())) <= 1e-3 * max(1.0, total), f"total weight at node {node}"
            assert (tree.node_depth[node] == 0) == (parents[node] == -1), f"node {node} is not reachable"
