"""The interface between drafters and what calls them: the vLLM plugin, `loop.py`, a replay.

A drafter of your own needs the four methods of `Drafter`. `as_batch_drafter` gives it those that engines call.

The calls for a request are `start_request`, then rounds of `propose` and `extend` in this order (`propose` is left out
of steps that do not draft), then `stop_request`; other requests may start and stop in between. What became of its
drafts a drafter sees from the tokens that follow them. The same calls must give the same drafts, which tensor-parallel
ranks rely on: a drafter must not depend on wall-clock time, threads or unseeded randomness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters.host import step
from rollout_spec.drafters.host.requests import RequestTable
from rollout_spec.drafters.host.step import Learned, Sampled, StepOptions
from rollout_spec.types import Draft, Int32Array

Tokens: TypeAlias = "Sequence[int] | NDArray[np.integer]"


class Drafter(Protocol):
    """Proposes continuations of live requests from what it has seen."""

    def start_request(
        self, req_id: str, prompt_token_ids: Tokens, *, problem_id: int | None = None, seed: int | None = None
    ) -> None:
        """Begin a request.

        Args:
            req_id: Unique among live requests.
            prompt_token_ids: The whole prompt. It may be empty; without a `problem_id` the request then shares no
                history.
            problem_id: Requests with the same id share history. None: the hash of the prompt.
            seed: Of the request's noise (see `rollout_spec.noise`), 64 bits. None: the noise does not exist or is not
                known, as for greedy requests and most recordings; the drafter then proposes what is most probable.

        Raises:
            ValueError: `req_id` is live already, a token is negative, or `seed` does not fit in 64 bits.
        """

    def extend(self, req_id: str, new_token_ids: Tokens) -> None:
        """Append sampled tokens that the request keeps. Siblings can be drafted from them from the next `propose` on.

        Raises:
            ValueError: `req_id` is not live, or a token is negative.
        """

    def propose(self, req_ids: Sequence[str], max_tokens: Int32Array) -> list[Draft]:
        """Draft for each request, at most `max_tokens[i]` tokens (int32 [len(req_ids)]). May return empty drafts.

        Raises:
            ValueError: a request is not live, or shapes differ.
        """

    def stop_request(self, req_id: str, *, keep: bool = True) -> None:
        """End a request.

        Args:
            keep: Whether its rollout stays in the history. False removes its text, but not what was learnt from
                outcomes.

        Raises:
            ValueError: `req_id` is not live.
        """


class BatchDrafter(Drafter, Protocol):
    """A drafter that engines call once per step, with arrays.

    It calibrates its confidence itself, by what becomes of its drafts: budgets take it as it is.

    Its `start_request` takes two more keywords. `num_known` (int): how many of the prompt's first tokens the problem's
    history holds already, from earlier turns; they are not stored again, unless all of the problem is gone. `own_only`
    (bool): draft this request from its own text alone, and no other request from it; it is not kept. Drafters that have
    only the methods of `Drafter` are not shown such requests.

    With a `history_dir` it also needs what `integrations/vllm/engine_history.py` names.
    """

    table: RequestTable
    """What is known of the live requests, by row."""

    def row_of(self, req_id: str) -> int:
        """A live request's row in `table`.

        Raises:
            ValueError: `req_id` is not live.
        """

    def output_of(self, req_id: str) -> Int32Array:
        """A live request's tokens without its prompt."""

    def learn_step(self, sampled: Sampled, targets: NDArray[np.int64] | None, options: StepOptions) -> Learned:
        """Learn what a step sampled: what became of the last drafts, and the tokens that requests keep.

        Unless `options.index_now`, nothing need be drafted from these tokens before `update_index` is called.

        Args:
            targets: int64 [N], what the target sampled at the step's rows of logits, PLACEHOLDER_TOKEN_ID where it has
                no sample; None unless the drafter's attribute `wants_rejected_targets` is true.
            options: What is the same in all steps.
        """

    def update_index(self) -> None:
        """Do what `learn_step` has left to do: engines call it while they wait for the device."""

    def propose_rows(self, rows: NDArray[np.int64], limits: NDArray[np.int64]) -> None:
        """`propose` for these requests, int64 [R], at most limits[i] tokens each: fills `Requests.history`."""


def as_batch_drafter(drafter: Drafter, max_draft_tokens: int) -> BatchDrafter:
    """The drafter itself, if it can draft for batches, or one that calls it.

    A class that overrides `propose` or `extend` of a drafter for batches is called one by one.

    Args:
        max_draft_tokens: K.
    """
    one_by_one = {"propose", "extend"}
    owner = next((o for o in type(drafter).__mro__ if vars(o).keys() & {"propose_rows", *one_by_one}), object)
    is_batched = "propose_rows" in vars(owner)
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
        rows, batch_rows = sampled.rows, sampled.batch_rows
        starts = self.table.arrays.num_tokens[rows] - sampled.first[batch_rows]
        limits = np.empty(rows.size, np.int64)
        counts = step.learn(self.table.reference, None, options, sampled, None, limits)
        ends = self.table.arrays.num_tokens[rows] - sampled.first[batch_rows]
        for row, batch_row, start, end in zip(rows.tolist(), batch_rows, starts, ends, strict=True):
            if start < end:
                self._drafter.extend(self._req_ids[row], sampled.token_ids[batch_row, start:end].tolist())
        return Learned(limits, *counts)

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
