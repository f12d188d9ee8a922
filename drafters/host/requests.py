"""What is known of the live requests, in arrays by row: the one place for a request's state.

A row is a request's from its start to its stop, and another's afterwards. Whatever names rows owns a `RequestTable`:
the history drafter, or the adapter around a drafter that knows requests by their ids.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.jit import by_reference
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, Float32Array, Int32Array

UNLIMITED = 1 << 31
"""Output tokens, where nothing bounds them."""


class HistoryDrafts(NamedTuple):
    """The last draft from history of each request, and what it takes to learn from it once its tokens are known."""

    lengths: NDArray[np.int64]  # [R]
    tokens: Int32Array  # [R, K]
    confidence: Float32Array  # [R, K] see `Draft.confidence`
    cells: Int32Array  # [R, K] where each token's outcome is counted


class Requests(NamedTuple):
    """All that is known of R live requests, by row. K is the longest draft, S the most stop tokens of a request."""

    num_prompt_tokens: NDArray[np.int64]  # [R]
    num_tokens: NDArray[np.int64]  # [R] of prompt and output, as far as they were learned
    max_tokens: NDArray[np.int64]  # [R] output tokens after which the request ends
    min_tokens: NDArray[np.int64]  # [R] output tokens before which no stop token ends it
    stop_token_ids: Int32Array  # [R, S] the end-of-sequence token among them, then placeholders
    is_complete: NDArray[np.bool_]  # [R] whether the last token has been sampled; the engine notices a step later
    seed: NDArray[np.int64]  # [R] of the noise
    has_seed: NDArray[np.bool_]  # [R] whether the target's noise is known
    document: NDArray[np.int64]  # [R] the output's number in the text store
    history: HistoryDrafts  # what history drafted for the step that is running
    num_offered: NDArray[np.int64]  # [R] the last draft's tokens before the budget cut it
    confidence: Float32Array  # [R, K] of these


class RequestTable:
    """Owns the rows.

    Attributes:
        arrays: By row. Replaced when they grow, as `reference` is.
        reference: `arrays` by reference, for calls that are made in every step.

    Args:
        max_draft_tokens: K.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self.arrays = _new_requests(4, 2, max_draft_tokens)
        self.reference = by_reference(self.arrays)
        self._free = list(range(3, -1, -1))

    def start(self, num_prompt_tokens: int, seed: int | None = None, document: int = -1) -> int:
        """The row of a new request, which has no draft and no end. Amortised O(1)."""
        if not self._free:
            size, num_stops = self.arrays.stop_token_ids.shape
            self._grow(2 * size, num_stops)
            self._free = list(range(2 * size - 1, size - 1, -1))
        row, arrays = self._free.pop(), self.arrays
        arrays.num_prompt_tokens[row] = arrays.num_tokens[row] = num_prompt_tokens
        arrays.max_tokens[row], arrays.min_tokens[row], arrays.stop_token_ids[row] = UNLIMITED, 0, PLACEHOLDER_TOKEN_ID
        arrays.seed[row], arrays.has_seed[row] = 0 if seed is None else seed, seed is not None
        arrays.is_complete[row], arrays.document[row] = False, document
        arrays.history.lengths[row] = arrays.num_offered[row] = 0
        return row

    def stop(self, row: int) -> None:
        """A request ends, and its row is free."""
        self._free.append(row)

    def limit(self, row: int, *, max_tokens: int, min_tokens: int, stop_token_ids: list[int]) -> None:
        """Say where a request ends, so that nothing after its end is learned."""
        size, num_stops = self.arrays.stop_token_ids.shape
        if len(stop_token_ids) > num_stops:
            self._grow(size, len(stop_token_ids))
        self.arrays.max_tokens[row] = min(max_tokens, UNLIMITED)
        self.arrays.min_tokens[row] = min(min_tokens, UNLIMITED)
        self.arrays.stop_token_ids[row, : len(stop_token_ids)] = stop_token_ids

    def memory_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in _flat(self.arrays))

    def check_integrity(self, rows: list[int]) -> None:
        """Check that the live requests have these rows. Raises AssertionError."""
        assert sorted(rows + self._free) == list(range(self.arrays.document.size)), "a row has two owners or none"

    def _grow(self, num_rows: int, num_stops: int) -> None:
        grown = _new_requests(num_rows, num_stops, self._max_draft_tokens)
        for old, new in zip(_flat(self.arrays), _flat(grown), strict=True):
            new[tuple(slice(size) for size in old.shape)] = old
        self.arrays = grown
        self.reference = by_reference(grown)


def _flat(requests: Requests) -> list[NDArray[Any]]:
    return [array for field in requests for array in (field if isinstance(field, tuple) else (field,))]


def _new_requests(num_rows: int, num_stops: int, k: int) -> Requests:
    def zeros(dtype: Any, *shape: int) -> NDArray[Any]:
        return np.zeros((num_rows, *shape), dtype)

    return Requests(
        num_prompt_tokens=zeros(np.int64),
        num_tokens=zeros(np.int64),
        max_tokens=zeros(np.int64),
        min_tokens=zeros(np.int64),
        stop_token_ids=zeros(np.int32, num_stops) + np.int32(PLACEHOLDER_TOKEN_ID),
        is_complete=zeros(np.bool_),
        seed=zeros(np.int64),
        has_seed=zeros(np.bool_),
        document=zeros(np.int64),
        history=HistoryDrafts(
            lengths=zeros(np.int64),
            tokens=zeros(np.int32, k),
            confidence=zeros(np.float32, k),
            cells=zeros(np.int32, k),
        ),
        num_offered=zeros(np.int64),
        confidence=zeros(np.float32, k),
    )
