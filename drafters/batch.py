"""Engines' calls for a drafter that knows requests one by one, such as a user's own."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters.base import BatchDrafter, Drafter, Tokens
from rollout_spec.drafters.host import step
from rollout_spec.drafters.host.requests import RequestTable
from rollout_spec.drafters.host.step import Learned, Sampled, StepOptions


def as_batch_drafter(drafter: Drafter, max_draft_tokens: int) -> BatchDrafter:
    """The drafter itself, if it can draft for batches, or one that calls it.

    A class that overrides `propose` or `extend` of a drafter for batches is called one by one.

    Args:
        max_draft_tokens: K.
    """
    is_batched = False
    for owner in type(drafter).__mro__:
        is_batched = "propose_rows" in vars(owner)
        if is_batched or vars(owner).keys() & {"propose", "extend"}:
            break
    return cast(BatchDrafter, drafter if is_batched else _OneByOne(drafter, max_draft_tokens))


class _OneByOne:
    """A `BatchDrafter` around a `Drafter`, all of whose other methods are the latter's.

    Raises:
        AttributeError: the drafter lacks a method of `Drafter`.
    """

    wants_features = wants_rejected_targets = False

    def __init__(self, drafter: Drafter, max_draft_tokens: int) -> None:
        for method in ("start_request", "extend", "propose", "stop_request"):
            getattr(drafter, method)  # raises now, and not while rollouts wait, if it is missing
        self.table = RequestTable(max_draft_tokens)
        self._drafter = drafter
        self._req_ids: dict[int, str] = {}  # by row
        self._rows: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def start_request(self, req_id: str, prompt_token_ids: Tokens, *, seed: int | None = None, **kwargs: Any) -> None:
        self._drafter.start_request(req_id, prompt_token_ids, seed=seed, **kwargs)
        row = self._rows[req_id] = self.table.start(len(prompt_token_ids), seed)
        self._req_ids[row] = req_id

    def stop_request(self, req_id: str, *, keep: bool = True) -> None:
        self._drafter.stop_request(req_id, keep=keep)
        row = self._rows.pop(req_id)
        del self._req_ids[row]
        self.table.stop(row)

    def extend(self, req_id: str, new_token_ids: Tokens) -> None:
        row = self.row_of(req_id)
        self._drafter.extend(req_id, new_token_ids)
        self.table.arrays.num_tokens[row] += len(new_token_ids)

    def row_of(self, req_id: str) -> int:
        return self._rows[req_id]

    def learn_step(self, sampled: Sampled, targets: NDArray[np.int64] | None, options: StepOptions) -> Learned:
        requests = self.table.arrays
        before = requests.num_tokens[sampled.rows]
        learned = step.learn_without_text(self.table, sampled, options)
        for i, (row, batch_row) in enumerate(zip(sampled.rows.tolist(), sampled.batch_rows.tolist(), strict=True)):
            start, end = (int(n - sampled.first[batch_row]) for n in (before[i], requests.num_tokens[row]))
            if start < end:
                self._drafter.extend(self._req_ids[row], sampled.token_ids[batch_row, start:end].tolist())
        return learned

    def update_index(self) -> None:
        pass

    def propose_rows(self, rows: NDArray[np.int64], limits: NDArray[np.int64]) -> None:
        proposed = self._drafter.propose([self._req_ids[row] for row in rows.tolist()], limits.astype(np.int32))
        drafts = self.table.arrays.history
        for row, (token_ids, confidence) in zip(rows.tolist(), proposed, strict=True):
            drafts.lengths[row] = size = len(token_ids)
            if len(confidence) != size:
                raise ValueError(f"a draft needs a confidence for each token, got {token_ids!r} and {confidence!r}")
            drafts.tokens[row, :size], drafts.confidence[row, :size] = token_ids, confidence
