"""What vLLM's two model runners share: an engine's drafter, its budget, and their view of the requests."""

from __future__ import annotations

import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget.decide import Budget
from rollout_spec.budget.estimates import median
from rollout_spec.budget.model import ModelBudget
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters import DRAFTERS, build_drafter
from rollout_spec.drafters.base import BatchDrafter
from rollout_spec.drafters.batch import as_batch_drafter
from rollout_spec.drafters.model.choice import DraftChoice, ModelDrafts, no_model_drafts
from rollout_spec.features.format import take
from rollout_spec.history.rollout import Root
from rollout_spec.history.roots import Roots
from rollout_spec.integrations.vllm import live_requests
from rollout_spec.integrations.vllm.engine_history import EngineHistory
from rollout_spec.integrations.vllm.live_requests import LiveRequest, Sampled, ends_with_stop_token, pieces, select
from rollout_spec.integrations.vllm.problems import has_tenant, recognise
from rollout_spec.integrations.vllm.request_options import request_options
from rollout_spec.integrations.vllm.speculation import Speculation
from rollout_spec.report.stats import SpeculationStats
from rollout_spec.types import Drafts, Float32Array, Int32Array

logger = logging.getLogger(__name__)

STEPS_PER_SHARING = 16
"""Tensor-parallel ranks take over the first rank's times once in this many steps, or at once where the budget waits for
a step's time (`StepCost.is_awaited`)."""
DRAFT_DTYPES = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)
"""Of `Drafts`. Comparing types is much faster than comparing their names."""
RECENT_STEPS = 16
"""The prompt tokens of the next step are predicted from those of this many last steps."""


def graph_sizes(vllm_config: Any) -> tuple[int, ...]:
    """The numbers of tokens to which CUDA graphs pad steps; empty without graphs."""
    compilation = vllm_config.compilation_config
    # Steps whose requests have drafts of different lengths run in the graphs for mixed batches.
    if compilation.cudagraph_mode is None or compilation.cudagraph_mode.mixed_mode().name == "NONE":
        return ()
    return tuple(compilation.cudagraph_capture_sizes or ())


class _Proposal(NamedTuple):
    """What the drafter proposed for the step that is running."""

    rows: NDArray[np.int64]  # [B] the requests'
    confidence: Float32Array  # [D], of all drafted tokens
    starts: NDArray[np.int64]  # [B + 1], each draft's first token, then D


class _Step(NamedTuple):
    """What a step took; see `Budget.observe_step` and `ModelBudget.observe_step`."""

    num_tokens: int
    seconds: float
    drafted: bool
    draft_seconds: float
    num_asked: int
    num_requests: int
    num_emitted: int
    reads_prompts: bool
    uses_model: bool


class DraftingSession(Speculation):
    """An engine's drafter and its budget, which outlive the batches: requests are told apart by their ids.

    Attributes: those of `Speculation`, and
        live: The requests that the drafter serves, by id, until `follow` finds that they have ended.
        arrays: What is known of them, by their rows.
        roots: By what their problems are recognised.
        follows_all: Whether the last call of `follow` gave every request a row.
        broken: Whether the drafter has raised, after which nothing is indexed or drafted.

    Args:
        share_from_first_rank: Returns the first rank's object on every rank, as all must draft alike. None for a single
            rank.
        num_model_tokens: How many tokens a model drafts for each request; 0: there is none.
        index_late: Index sampled tokens in `update_index`, which is called while the device computes, and not in
            `draft`, for which the device waits. Drafts then find them a step later. Of no use on a CPU, whose forward
            pass has ended when it returns.

    Raises:
        ValueError, TypeError: the drafter is unknown, or its options are wrong.
    """

    def __init__(
        self,
        config: RolloutSpecConfig,
        vllm_config: Any,
        stats: SpeculationStats,
        share_from_first_rank: Callable[[Any], Any] | None = None,
        *,
        num_model_tokens: int = 0,
        index_late: bool = False,
    ) -> None:
        options = {"max_draft_tokens": config.num_speculative_tokens} if config.drafter in DRAFTERS else {}
        drafter = build_drafter(config.drafter, **{**options, **config.drafter_options})
        self.drafter: BatchDrafter = as_batch_drafter(drafter, config.num_speculative_tokens)
        # A user's own may lack some: it stores every turn's whole prompt, or keeps problems apart.
        self._keywords = {"num_known", "isolated"} & inspect.signature(drafter.start_request).parameters.keys()
        self.roots = Roots()
        self.live: dict[str, LiveRequest] = {}
        self.arrays = live_requests.new_arrays()
        self.follows_all = True
        self.broken = False
        self.num_speculative_tokens = config.num_speculative_tokens
        self._config = config
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())
        self._stats = stats
        self.budget = Budget() if config.budget else None
        self.choice = DraftChoice(config.num_speculative_tokens, num_model_tokens) if num_model_tokens else None
        # Of a drafter that a user has derived from ours the adapter's class is asked, which has no such method.
        self._continues = hasattr(type(self.drafter), "continue_batch")
        self._uses_model = True  # in this step
        self._model_budget = ModelBudget() if num_model_tokens and config.budget else None
        self._share_from_first_rank = share_from_first_rank
        self._index_late = index_late
        self._vllm_config = vllm_config
        scheduler = vllm_config.scheduler_config
        self._max_step_tokens = int(scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens)
        self._followed: list[str] = []  # the last step's requests
        self._rows = np.zeros(0, np.int64)  # theirs
        self._stop_strings_by_row: dict[int, LiveRequest] = {}  # the requests that have any
        self._follows_any = False  # whether any of them has a row
        self._has_resumed = False  # whether any of them was in an earlier step, too
        self._ended: dict[str, LiveRequest] = {}  # by `_end_with_the_batch`, and vLLM still has them
        self._proposal: _Proposal | None = None  # of the step that is running
        self._draft_seconds = 0.0  # spent on drafting them
        self._num_asked = 0  # requests for which the drafter was asked
        self._prompt_tokens: deque[int] = deque(maxlen=RECENT_STEPS)  # read in each of the last steps
        self._finds_stop_strings = True
        self._last_call: float | None = None  # when `draft` was called last
        self._unshared: list[_Step] = []  # steps that the budget has not been told
        if config.history_dir is not None:
            keeper: Any = drafter  # `registry.check_keeps_history` has made sure
            self.engine_history = EngineHistory(config, vllm_config, keeper, self.roots, share_from_first_rank)

    def follow(self, req_ids: list[str], requests: Mapping[str, Any], *, has_changed: bool) -> NDArray[np.int64]:
        """Begin the requests that are new in a step, and end those that have ended. Called once before `draft`.

        Args:
            req_ids: The step's requests that have sampled something.
            requests: vLLM's requests by id, all that have not ended. A request has `prompt_token_ids`,
                `sampling_params`, `lora_request` and `mm_features`.
            has_changed: Whether requests may have come, ended or got another prompt since the last call.

        Returns:
            int64 [len(req_ids)], the requests' rows; -1 for prompts of embeddings, for requests that vLLM goes on with
            though a stop string has completed them, and once the drafter has raised.

        Raises:
            Exception: as `draft`.
        """
        self._has_resumed = self._follows_any
        if not has_changed and req_ids == self._followed:
            return self._rows
        started = time.perf_counter()
        self._has_resumed = any(req_id in self.live for req_id in req_ids)
        try:
            self._stop_missing(requests)
            self._ended = {  # without other requests of the same id, and streaming sessions with a longer prompt
                req_id: live
                for req_id, live in self._ended.items()
                if requests.get(req_id) is live.request
                and len(requests[req_id].prompt_token_ids) == live.conversation.length
            }
            self._rows = np.array([self._row(req_id, requests[req_id]) for req_id in req_ids], np.int64)
            self._followed = list(req_ids)
            self.follows_all, self._follows_any = bool((self._rows >= 0).all()), bool((self._rows >= 0).any())
        except Exception as error:
            self._switch_off(error)
            self.follows_all = self._follows_any = False
            return np.full(len(req_ids), -1)
        finally:
            self._stats.draft_seconds += time.perf_counter() - started
        return self._rows

    def draft(self, sampled: Sampled, model: ModelDrafts | None = None) -> Drafts:
        """Draft for the next step. Called once per step.

        Args:
            model: What the model drafted for the same requests, if there is one.

        Returns:
            The drafts of the requests in `sampled.rows`; `lengths` is how many tokens of each to verify. None of any
            once the drafter has raised.

        Raises:
            Exception: what the drafter raised, under tensor parallelism: the other ranks would go on drafting, and
                sample other tokens than this one.
        """
        if not self.enabled:  # as after an error in `follow`
            self.pause()
            return self._no_drafts(sampled.rows.size)
        if self.budget is not None and self._last_call is None:  # vLLM chooses the sizes after the session is made
            self.budget.cost.pad_to(graph_sizes(self._vllm_config))
        started = time.perf_counter()
        try:
            self._observe(sampled)
            to_come, num_emitted = self._extend(sampled)
            self._time_step(started, sampled, num_emitted)
            drafts = self._draft(sampled, to_come, model)
            self._end_with_the_batch()
            return drafts
        except Exception as error:
            self._switch_off(error)
            return self._no_drafts(sampled.rows.size)
        finally:
            self._stats.draft_seconds += time.perf_counter() - started

    def wants_model(self, num_requests: int) -> bool:
        """Whether a model shall draft at the end of a step with so many requests."""
        if not self.enabled:
            return self.broken  # then the model drafts alone
        self._uses_model = self._model_budget is None or self._model_budget.wants_model(num_requests)
        return self._uses_model

    def update_index(self) -> None:
        """Do the last step's work that could wait. Called while the device computes. Raises like `draft`."""
        if self.enabled and self._index_late:
            started = time.perf_counter()
            self._ask(self.drafter.update_index)
            self._stats.index_seconds += time.perf_counter() - started

    def exchange_history(self) -> None:
        """See `Speculation`."""
        if self.engine_history is not None and self.enabled:
            started = time.perf_counter()
            super().exchange_history()
            self._stats.index_seconds += time.perf_counter() - started

    def close(self) -> None:
        """See `Speculation`. Also once the drafter has raised."""
        try:
            super().close()
        except Exception as error:
            self._switch_off(error)

    def pause(self) -> None:
        """In place of `draft` while the session is not enabled."""
        self._last_call = self._proposal = None
        self.arrays.draft[:] = -1
        if self.choice is not None:
            self.choice.forget()

    def _switch_off(self, error: Exception) -> None:
        """End speculation after the drafter, which may be a user's own, has raised: its errors must not end a run.

        Raises:
            Exception: `error`, under tensor parallelism.
        """
        if self._share_from_first_rank is not None:
            raise error
        self.enabled, self.broken = False, True
        self._stats.drafter_errors += 1
        logger.error("the drafter raised: speculation is off from here on, sampling goes on unchanged", exc_info=error)

    # -- commands from the front end ---------------------------------------------------------------------------------

    def set_enabled(self, enabled: bool) -> None:
        """Index and draft from now on, or no longer.

        Raises:
            RuntimeError: the drafter has raised, and stays off.
        """
        if enabled and self.broken:
            raise RuntimeError(
                "speculation stays off in this engine, because its drafter has raised: see the log for the cause, and "
                "build the engine again"
            )
        super().set_enabled(enabled)

    def end_missing(self, requests: Mapping[str, Any]) -> None:
        """See `Speculation`. Without a further step `follow` would not be told."""
        self._ask(lambda: self._stop_missing(requests))

    def num_live_requests(self) -> int:
        """Requests that have not ended, as far as is known; 0 once the drafter has raised."""
        rows = [live.row for live in self.live.values()]
        return 0 if self.broken else int(np.count_nonzero(~self.arrays.is_complete[rows]))

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Call the drafter outside of `draft`. If it raises, switch it off and return None, as from then on."""
        if self.broken:
            return None
        try:
            return call()
        except Exception as error:
            return self._switch_off(error)

    def _row(self, req_id: str, request: Any) -> int:
        """A request's row. Shows the drafter a new request."""
        if request.prompt_token_ids is None or req_id in self._ended:  # a prompt of embeddings has no history
            return -1
        live = self.live.get(req_id)
        if live is not None and self.arrays.num_prompt_tokens[live.row] != len(request.prompt_token_ids):
            # A streaming session goes on with a longer prompt: as good as a new request.
            self._stop(req_id)
            live = None
        return (live or self._start(req_id, request)).row

    def _start(self, req_id: str, request: Any) -> LiveRequest:
        params, prompt = request.sampling_params, np.array(request.prompt_token_ids, np.int32)
        by_text = None if self.engine_history is None else self.engine_history.problem_by_text
        conversation = recognise(self.roots, request, prompt, by_text)
        is_seeded = params.temperature > 0 and self._config.verify == "sample"
        more: dict[str, Any] = {"num_known": conversation.num_known, "isolated": has_tenant(request)}
        self.drafter.start_request(
            req_id,
            prompt,
            problem_id=conversation.problem_id,
            seed=params.seed if is_seeded else None,
            **{name: more[name] for name in self._keywords},
        )
        live = LiveRequest(self.drafter.row_of(req_id), conversation, request)
        self.arrays = live_requests.start(self.arrays, live.row, request)
        if self.choice is not None:
            self.choice.start(live.row, is_sampled=params.temperature > 0)
        self.live[req_id] = live
        if params.stop:
            self._stop_strings_by_row[live.row] = live
        return live

    def _stop_missing(self, requests: Mapping[str, Any]) -> None:
        for req_id in [req_id for req_id in self.live if req_id not in requests]:
            self._stop(req_id)

    def _stop(self, req_id: str) -> None:
        """Show the drafter a request's end."""
        live = self.live[req_id]
        options = request_options(live.request.sampling_params.extra_args)
        keep = options.keep_in_history
        if keep and "num_known" in self._keywords:
            drafter: Any = self.drafter
            self.roots.stop(live.conversation, drafter.output_of(req_id))
        self.drafter.stop_request(req_id, keep=keep)
        if self.engine_history is not None:
            problem_id, _, turn, length, state = live.conversation
            root = None
            if problem_id is not None and turn == 0:
                # A problem that the caller names may have several first prompts.
                root = self.roots.root_of(problem_id) if options.problem_id is None else Root(length, state)
            self.engine_history.record(root)
        del self.live[req_id]
        self.arrays.draft[live.row] = -1
        self._stop_strings_by_row.pop(live.row, None)

    def _end_with_the_batch(self) -> None:
        """Hand over a batch's last rollouts where all are complete: the engine's next step may be long in coming."""
        rows = self._rows[self._rows >= 0]
        if self.engine_history is None or not rows.size or not self.arrays.is_complete[rows].all():
            return
        for req_id in self._followed:
            if req_id in self.live:
                # Until the front end has told the engine of a stop string, the engine goes on with the request.
                self._ended[req_id] = self.live[req_id]
                self._stop(req_id)
        self._followed, self._rows = [], np.zeros(0, np.int64)
        self.engine_history.exchange()

    def _draft(self, sampled: Sampled, to_come: NDArray[np.int64], model: ModelDrafts | None) -> Drafts:
        chosen, room = np.empty_like(to_come), np.empty_like(to_come)
        num_chosen, num_live = live_requests.choose(
            self.arrays, sampled.rows, to_come, self.num_speculative_tokens, self._max_model_len, chosen, room
        )
        room = room[:num_chosen]
        # The median and not the mean: steps of the mean's size may never occur, so that their cost is not known.
        num_tokens = num_live + (median(self._prompt_tokens) if self._prompt_tokens else 0)
        wanted = num_chosen > 0 and (self.budget is None or self.budget.wants_drafts(num_tokens))
        self._num_asked, self._draft_seconds = num_chosen if wanted else 0, 0.0
        if not wanted:
            return self._no_drafts(sampled.rows.size)
        started = time.perf_counter()
        rows = sampled.rows if num_chosen == sampled.rows.size else sampled.rows[chosen[:num_chosen]]
        drafts = self.drafter.propose_batch(rows, room)
        confidence, starts = self._check(drafts, room)
        if self.choice is not None:
            some = chosen[:num_chosen]
            theirs = model if model is not None else no_model_drafts(sampled.rows.size)
            theirs = ModelDrafts(theirs.token_ids[some], theirs.probabilities[some])
            drafts = self.choice.choose(rows, drafts, theirs, room)
            if self._continues:
                self._continue_model_drafts(rows, drafts, room, theirs.token_ids.shape[1])
            confidence, starts = self._check(drafts, room)
        if self.budget is not None:
            room_in_step = self._max_step_tokens - num_tokens
            taken = self.budget.decide(confidence, starts, num_tokens=num_tokens, max_draft_tokens=room_in_step)
            drafts = drafts._replace(lengths=taken)
        self._draft_seconds = time.perf_counter() - started
        self._proposal = _Proposal(rows, confidence, starts)
        self.arrays.draft[rows] = np.arange(rows.size)
        width = drafts.token_ids.shape[1]  # a drafter may have a limit of its own
        if num_chosen == sampled.rows.size and width == self.num_speculative_tokens:
            return drafts
        width = min(width, self.num_speculative_tokens)
        of_all = self._no_drafts(sampled.rows.size)
        chosen = chosen[:num_chosen]
        of_all.lengths[chosen] = drafts.lengths
        of_all.token_ids[chosen, :width] = drafts.token_ids[:, :width]
        of_all.confidence[chosen, :width] = drafts.confidence[:, :width]
        return of_all

    def _continue_model_drafts(
        self, rows: NDArray[np.int64], drafts: Drafts, room: NDArray[np.int64], num_model: int
    ) -> None:
        """Let history go on, in place, where all of a model's draft was chosen and there is room for more.

        Args:
            num_model: How many tokens the model drafted.
        """
        assert self.choice is not None
        if num_model == 0:
            return
        some = np.flatnonzero(self.choice.is_model(rows) & (drafts.lengths == num_model) & (room > num_model))
        if not some.size:
            return
        drafter: Any = self.drafter
        survival = drafts.confidence[some, num_model - 1].astype(np.float64)
        continued = drafter.continue_batch(rows[some], drafts.token_ids[some, :num_model], survival, room[some])
        drafts.lengths[some] = continued.lengths
        width = continued.token_ids.shape[1]
        drafts.token_ids[some, num_model:width] = continued.token_ids[:, num_model:]
        drafts.confidence[some, num_model:width] = continued.confidence[:, num_model:]

    def _no_drafts(self, size: int) -> Drafts:
        shape = (size, self.num_speculative_tokens)
        return Drafts(np.zeros(shape, np.int32), np.zeros(size, np.int64), np.zeros(shape, np.float32))

    def _check(self, drafts: Drafts, room: NDArray[np.int64]) -> tuple[Float32Array, NDArray[np.int64]]:
        """(confidence of all drafted tokens, float32 [D]; each draft's first one, then D, int64 [B + 1]).

        Raises:
            ValueError: the drafter, which may be a user's own, proposes drafts that cannot be verified.
        """
        shape = drafts.token_ids.shape
        if len(shape) != 2 or drafts.confidence.shape != shape or not shape[0] == drafts.lengths.size == room.size:
            raise ValueError(
                f"drafts for {room.size} requests must have shape [{room.size}, K], got "
                f"{[list(array.shape) for array in drafts]}"
            )
        if tuple(array.dtype for array in drafts) != DRAFT_DTYPES:
            dtypes = [str(array.dtype) for array in drafts]
            raise ValueError(f"drafts must be int32 tokens, int64 lengths and float32 confidences, got {dtypes}")
        confidence, starts = np.empty(drafts.confidence.size, np.float32), np.empty(room.size + 1, np.int64)
        wrong = live_requests.flatten_drafts(drafts, room, self._vocab_size, confidence, starts)
        if wrong == live_requests.TOO_LONG:
            raise ValueError(f"drafted {drafts.lengths.tolist()} tokens where {room.tolist()} were asked for")
        if wrong == live_requests.BAD_TOKEN:
            raise ValueError(f"drafted tokens outside of the vocabulary of {self._vocab_size}: {drafts}")
        if wrong == live_requests.BAD_CONFIDENCE:
            raise ValueError(f"a draft's confidence is no probability: {drafts}")
        return confidence[: starts[-1]], starts

    def _observe(self, sampled: Sampled) -> None:
        """Tell drafter and budget the outcomes of the last drafts, verified or not."""
        proposal, self._proposal = self._proposal, None
        if proposal is None:
            return
        # Of a draft that was not verified, the target's next token shows whether its first token was right.
        told, by_draft = np.empty_like(sampled.rows), np.zeros((2, proposal.rows.size), np.int64)
        num_told = live_requests.match_outcomes(
            self.arrays.draft, proposal.starts, sampled.rows, sampled.target_starts, sampled.num_verified,
            sampled.num_accepted, told, by_draft,
        )  # fmt: skip
        self.arrays.draft[proposal.rows] = -1
        if num_told == 0:
            return
        rows, accepted = sampled.rows, sampled.num_accepted
        if num_told < rows.size:
            rows, accepted = rows[told[:num_told]], accepted[told[:num_told]]
        targets, starts = select(sampled.target_token_ids, sampled.target_starts, told[:num_told])
        if self.choice is not None:
            if self._continues:
                some = np.flatnonzero(self.choice.is_model(rows))
                drafter: Any = self.drafter
                if some.size:
                    drafter.observe_continued(rows[some], *select(targets, starts, some), accepted[some])
            targets, starts, accepted = self.choice.observe(rows, targets, starts, accepted)
        self.drafter.observe_batch(rows, targets, starts, accepted)
        if self.budget is not None:
            self.budget.survival.observe(proposal.confidence, proposal.starts, *by_draft)

    def _extend(self, sampled: Sampled) -> tuple[NDArray[np.int64], int]:
        """Show the drafter the tokens that requests keep, and count this step's without those past a request's end.

        Returns:
            (how many more may come, int64 [B], 0: none; how many of this step's tokens are kept).
        """
        kept = np.empty(sampled.token_ids.size, np.int32)
        starts, to_come = np.empty_like(sampled.starts), np.empty(sampled.rows.size, np.int64)
        live_requests.advance(self.arrays, sampled.rows, sampled.token_ids, sampled.starts, kept, starts, to_come)
        kept = kept[: starts[-1]]
        if self._stop_strings_by_row:
            kept, starts = self._cut_at_stop_strings(sampled.rows, kept, starts, to_come)
        if sampled.features is not None:
            rows = np.empty(kept.size, np.int64)
            live_requests.find_rows(sampled.starts, starts, sampled.target_starts, sampled.num_accepted, rows)
            extend_batch: Any = self.drafter.extend_batch
            extend_batch(sampled.rows, kept, starts, take(sampled.features, rows))
        else:
            self.drafter.extend_batch(sampled.rows, kept, starts)
        if not self._index_late:
            self.drafter.update_index()
        num_sampled = sampled.num_accepted + 1
        num_earlier = np.diff(sampled.starts) - num_sampled  # tokens of earlier steps, which had not been seen
        num_emitted = int(np.maximum(np.diff(starts) - num_earlier, 0).sum())
        self._stats.emitted_tokens -= int(num_sampled.sum()) - num_emitted  # all were counted
        return to_come, num_emitted

    def _cut_at_stop_strings(
        self,
        rows: NDArray[np.int64],
        kept: Int32Array,
        starts: NDArray[np.int64],
        to_come: NDArray[np.int64],
    ) -> tuple[Int32Array, NDArray[np.int64]]:
        """(kept, starts) without the tokens past stop strings."""
        sizes = np.diff(starts)
        for i, row in enumerate(rows.tolist()):
            live = self._stop_strings_by_row.get(row)
            if live is None or not sizes[i]:
                continue
            tokens = kept[starts[i] : starts[i + 1]].tolist()
            num_before = int(self.arrays.num_seen[row] - self.arrays.num_prompt_tokens[row]) - len(tokens)
            num_kept = self._find_stop_string(live, tokens, num_before)
            if num_kept is not None:
                self.arrays.num_seen[row] -= len(tokens) - num_kept
                self.arrays.is_complete[row] = True
                sizes[i], to_come[i] = num_kept, 0
        return pieces(kept, starts[:-1], sizes)

    def _time_step(self, now: float, sampled: Sampled, num_emitted: int) -> None:
        """Count the time of the step that has ended, from the last call to this one, and tell it to the budget.

        Args:
            num_emitted: Tokens that it brought, without those past a request's end.
        """
        last, self._last_call = self._last_call, now
        num_draft_tokens = int(sampled.num_verified.sum())
        num_prompt_tokens = max(sampled.num_tokens - sampled.rows.size - num_draft_tokens, 0)
        self._prompt_tokens.append(num_prompt_tokens)
        if last is None or not self._has_resumed:
            self._stats.step_seconds += now - sampled.started  # the engine may have been idle before
            return
        took = now - last
        self._stats.record_time(
            took,
            num_requests=sampled.rows.size,
            draft_tokens=num_draft_tokens,
            tokens=num_emitted,
            draft_seconds=self._draft_seconds,
            reads_prompts=num_prompt_tokens > 0,
        )
        if self.budget is None:
            return
        self._unshared.append(
            _Step(
                sampled.num_tokens,
                took,
                num_draft_tokens > 0,
                self._draft_seconds,
                self._num_asked,
                sampled.rows.size,
                num_emitted,
                num_prompt_tokens > 0,
                self._uses_model,
            )
        )
        if self._share_from_first_rank is not None:
            step = self._unshared[-1]
            is_awaited = self.budget.cost.is_awaited(step.num_tokens, drafted=step.drafted)
            if len(self._unshared) < STEPS_PER_SHARING and not is_awaited:
                return
            seconds = self._share_from_first_rank(
                [value for step in self._unshared for value in (step.seconds, step.draft_seconds)]
            )
            self._unshared = [
                step._replace(seconds=seconds[2 * i], draft_seconds=seconds[2 * i + 1])
                for i, step in enumerate(self._unshared)
            ]
        for step in self._unshared:
            self.budget.observe_step(
                step.num_tokens,
                step.seconds,
                drafted=step.drafted,
                num_asked=step.num_asked,
                draft_seconds=step.draft_seconds,
            )
            if self._model_budget is not None and not step.reads_prompts:
                self._model_budget.observe_step(
                    step.num_requests, step.num_emitted, step.seconds, uses_model=step.uses_model
                )
        self._unshared = []

    def _find_stop_string(self, live: LiveRequest, tokens: Sequence[int], num_before: int) -> int | None:
        """How many of a request's new tokens end with a stop string's completion; None: no stop string found."""
        if not self._finds_stop_strings:
            return None
        try:
            if live.stop_search is None:
                from rollout_spec.integrations.vllm.stop_strings import (
                    StopStringSearch,  # imports vLLM and its tokenizers
                )

                live.stop_search = StopStringSearch(self._vllm_config.model_config, live.request)
            stops = ends_with_stop_token(tokens, live.request.sampling_params, num_before)
            return live.stop_search.find(tokens, ends_with_stop_token=stops)
        except Exception:  # e.g. a tokenizer that only the front end can load
            if self._share_from_first_rank is not None:  # the other ranks would draft differently
                raise
            self._finds_stop_strings = False
            logger.exception("stop strings cannot be found here: the history may hold some tokens past them")
            return None
