"""Engines' calls for a drafter that knows requests one by one, such as a user's own."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters.base import BatchDrafter, Drafter
from rollout_spec.features.format import Features
from rollout_spec.types import Drafts, Int32Array


def as_batch_drafter(drafter: Drafter, max_draft_tokens: int) -> BatchDrafter:
    """The drafter itself, if it can draft for batches, or one that calls it.

    A class that overrides `propose`, `extend` or `observe` of a drafter for batches is called one by one.

    Args:
        max_draft_tokens: K.
    """
    is_batched = False
    for owner in type(drafter).__mro__:
        is_batched = "propose_batch" in vars(owner)
        if is_batched or vars(owner).keys() & {"propose", "extend", "observe"}:
            break
    return cast(BatchDrafter, drafter if is_batched else _OneByOne(drafter, max_draft_tokens))


class _OneByOne:
    """A `BatchDrafter` around a `Drafter`, all of whose other methods are the latter's."""

    def __init__(self, drafter: Drafter, max_draft_tokens: int) -> None:
        self._drafter = drafter
        self._max_draft_tokens = max_draft_tokens
        self._req_ids: list[str] = []  # by row
        self._rows: dict[str, int] = {}
        self._free: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def start_request(self, req_id: str, *args: Any, **kwargs: Any) -> None:
        self._drafter.start_request(req_id, *args, **kwargs)
        if not self._free:
            self._free.append(len(self._req_ids))
            self._req_ids.append("")
        row = self._rows[req_id] = self._free.pop()
        self._req_ids[row] = req_id

    def stop_request(self, req_id: str, *, keep: bool = True) -> None:
        self._drafter.stop_request(req_id, keep=keep)
        self._free.append(self._rows.pop(req_id))

    def row_of(self, req_id: str) -> int:
        if req_id not in self._rows:
            raise ValueError(f"request {req_id!r} is not live: start_request comes first")
        return self._rows[req_id]

    def extend_batch(
        self,
        rows: NDArray[np.int64],
        token_ids: Int32Array,
        starts: NDArray[np.int64],
        features: Features | None = None,
    ) -> None:
        for i, (row, tokens) in enumerate(zip(rows.tolist(), _split(token_ids, starts), strict=True)):
            if tokens:
                theirs: Any = () if features is None else (features[starts[i] : starts[i + 1]],)
                self._drafter.extend(self._req_ids[row], tokens, *theirs)

    def update_index(self) -> None:
        pass

    def propose_batch(self, rows: NDArray[np.int64], max_tokens: NDArray[np.int64]) -> Drafts:
        """See `BatchDrafter`.

        Raises:
            ValueError: a draft has the wrong type or length.
        """
        proposed = self._drafter.propose([self._req_ids[row] for row in rows.tolist()], max_tokens.astype(np.int32))
        if len(proposed) != rows.size:
            raise ValueError(f"drafted for {len(proposed)} requests where {rows.size} were asked for")
        drafts = Drafts(
            np.zeros((rows.size, self._max_draft_tokens), np.int32),
            np.zeros(rows.size, np.int64),
            np.zeros((rows.size, self._max_draft_tokens), np.float32),
        )
        for i, ((token_ids, confidence), limit) in enumerate(zip(proposed, max_tokens.tolist(), strict=True)):
            if (
                not isinstance(token_ids, np.ndarray)
                or token_ids.dtype != np.int32
                or len(confidence) != token_ids.size
            ):
                raise ValueError(
                    f"a draft needs int32 tokens and a confidence for each, got {token_ids!r} and {confidence!r}"
                )
            if token_ids.size > max(limit, 0):
                raise ValueError(f"drafted {token_ids.size} tokens where {limit} were asked for")
            drafts.token_ids[i, : token_ids.size] = token_ids
            drafts.confidence[i, : token_ids.size] = confidence
            drafts.lengths[i] = token_ids.size
        return drafts

    def observe_batch(
        self,
        rows: NDArray[np.int64],
        target_token_ids: NDArray[np.int64],
        starts: NDArray[np.int64],
        num_accepted: NDArray[np.int64],
    ) -> None:
        seen = []
        for targets, accepted in zip(_split(target_token_ids, starts), num_accepted.tolist(), strict=True):
            # The token after the accepted ones was emitted whatever it is: 0 where there was no sample.
            missing = [i for i, token in enumerate(targets) if token < 0 and i > accepted]
            seen.append([max(token, 0) for token in targets[: missing[0] if missing else None]])
        self._drafter.observe([self._req_ids[row] for row in rows.tolist()], seen, num_accepted.astype(np.int32))


def _split(values: NDArray[Any], starts: NDArray[np.int64]) -> list[list[int]]:
    flat, ends = values.tolist(), starts.tolist()
    return [flat[ends[i] : ends[i + 1]] for i in range(len(ends) - 1)]
