"""Prompt lookup: an incremental index of a request's own context, prompt and output alike.

Hash chains of positions, as in LZ77: each position is linked to the previous one with the same last two tokens, and
a lookup follows the chain from the newest position, measuring how far each match reaches back. Nothing is rescanned
when the context grows, and an indexed token costs 8 bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters import kernels
from rollout_spec.drafters.kernels import NUM_HEADS, ContextArrays
from rollout_spec.types import Int32Array


class NgramIndex:
    """Owns one row per live request. Rows are reused; capacities double.

    Attributes:
        arrays: what the kernels read and write; replaced whenever a capacity grows.
    """

    def __init__(self) -> None:
        self.arrays = ContextArrays(
            tokens=np.zeros((4, 512), np.int32),
            lengths=np.zeros(4, np.int32),
            previous=np.full((4, 512), -1, np.int32),
            heads=np.full((4, NUM_HEADS), -1, np.int32),
        )

    def clear_row(self, row: int) -> None:
        """Empty a row, adding rows when there are too few."""
        rows, capacity = self.arrays.tokens.shape
        if row >= rows:
            self._grow(max(row + 1, 2 * rows), capacity)
        self.arrays.lengths[row] = 0
        self.arrays.heads[row] = -1

    def reserve(self, length: int) -> None:
        """Make room for contexts of `length` tokens."""
        rows, capacity = self.arrays.tokens.shape
        if length > capacity:
            self._grow(rows, max(length, 2 * capacity))

    def context(self, row: int) -> Int32Array:
        """View of a row's tokens, valid until the next change."""
        return self.arrays.tokens[row, : self.arrays.lengths[row]]

    def memory_bytes(self) -> int:
        """Bytes of all arrays, unused capacity included."""
        return sum(array.nbytes for array in self.arrays)

    def check_integrity(self, row: int) -> None:
        """Check that every position of a row can be found again. O(length); raises AssertionError."""
        tokens, previous = self.context(row), self.arrays.previous[row]
        found: set[int] = set()
        for bucket in range(NUM_HEADS):
            position = int(self.arrays.heads[row, bucket])
            while position >= 0:
                assert kernels.bucket_of(tokens[position - 1], tokens[position]) == bucket, (
                    f"position {position} of row {row}"
                )
                assert previous[position] < position, f"chain at position {position} of row {row}"
                found.add(position)
                position = int(previous[position])
        assert found == set(range(1, len(tokens) - 1)), f"positions of row {row}"

    def _grow(self, rows: int, capacity: int) -> None:
        def grown(old: NDArray[np.int32], shape: tuple[int, ...], fill: int) -> Int32Array:
            new = np.full(shape, fill, np.int32)
            new[tuple(slice(n) for n in old.shape)] = old
            return new

        old = self.arrays
        self.arrays = ContextArrays(
            tokens=grown(old.tokens, (rows, capacity), 0),
            lengths=grown(old.lengths, (rows,), 0),
            previous=grown(old.previous, (rows, capacity), -1),
            heads=grown(old.heads, (rows, NUM_HEADS), -1),
        )
