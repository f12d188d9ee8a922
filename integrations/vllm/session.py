"""What vLLM's two model runners share: an engine's drafter, its budget, and their view of the requests."""

from __future__ import annotations

import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget.decide import Budget
from rollout_spec.budget.estimates import median
from rollout_spec.budget.model import ModelBudget
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters import DRAFTERS, build_drafter
from rollout_spec.drafters.host.step import Learned, Sampled
from rollout_spec.drafters.model.choice import ModelDrafts
from rollout_spec.drafting import Drafting
from rollout_spec.history.problems import Conversation, Problems
from rollout_spec.integrations.vllm.engine_history import EngineHistory
from rollout_spec.integrations.vllm.request_options import request_options
from rollout_spec.integrations.vllm.speculation import Speculation
from rollout_spec.noise.host import derive_seed
from rollout_spec.stats import SpeculationStats
from rollout_spec.types import Drafts

logger = logging.getLogger(__name__)

STEPS_PER_SHARING = 16
"""Tensor-parallel ranks take over the first rank's times once in this many steps, or at once where the budget waits for
a step's time (`StepCost.is_awaited`)."""
RECENT_STEPS = 16
"""The prompt tokens of the next step are predicted from those of this many last steps."""


def graph_sizes(vllm_config: Any) -> tuple[int, ...]:
    """The numbers of tokens to which CUDA graphs pad steps; empty without graphs."""
    compilation = vllm_config.compilation_config
    # Steps whose requests have drafts of different lengths run in the graphs for mixed batches.
    if compilation.cudagraph_mode is None or compilation.cudagraph_mode.mixed_mode().name == "NONE":
        return ()
    return tuple(compilation.cudagraph_capture_sizes or ())


class LiveRequest(NamedTuple):
    """A request that the drafter serves."""

    row: int
    """Its row in the drafter's table."""
    conversation: Conversation
    """What its prompt continues."""
    request: Any
    """vLLM's."""


def _end_of(params: Any) -> dict[str, Any]:
    """Where the scheduler ends a request, for `RequestTable.limit`."""
    stops = list(params.stop_token_ids or ())
    if params.eos_token_id is not None:
        stops.append(params.eos_token_id)
    return {"max_tokens": params.max_tokens, "min_tokens": params.min_tokens, "stop_token_ids": stops}


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
        drafting: The drafter and its budget, step by step.
        live: The requests that the drafter serves, by id, until `follow` finds that they have ended.
        follows_all: Whether the last call of `follow` gave every request a row.
        broken: Whether the drafter has raised, after which nothing is indexed or drafted.

    Args:
        share_from_first_rank: Returns the first rank's object on every rank, as all must draft alike. None for a single
            rank.
        has_model: Whether a model drafts, too.
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
        has_model: bool = False,
        index_late: bool = False,
    ) -> None:
        options = {"max_draft_tokens": config.max_draft_tokens} if config.drafter in DRAFTERS else {}
        drafter = build_drafter(config.drafter, **{**options, **config.drafter_options})
        self.budget = Budget() if config.budget else None
        self.drafting = Drafting(
            drafter,
            config.max_draft_tokens,
            max_model_len=int(vllm_config.model_config.max_model_len),
            vocab_size=int(vllm_config.model_config.get_vocab_size()),
            budget=self.budget,
            has_model=has_model,
        )
        if index_late:
            self.drafting.index_late()
        self.drafter, self.choice = self.drafting.drafter, self.drafting.choice
        # A user's own may lack some: it stores every turn's whole prompt, or keeps problems apart.
        self._keywords = {"num_known", "own_only"} & inspect.signature(drafter.start_request).parameters.keys()
        self.problems = Problems(getattr(drafter, "max_history_tokens", None))
        self.live: dict[str, LiveRequest] = {}
        self._expected: dict[str, Conversation] = {}  # of requests whose prompts are being read
        self.follows_all = True
        self.broken = False
        self.num_speculative_tokens = config.max_draft_tokens
        self._config = config
        self._stats = stats
        self._uses_model = True  # in this step
        self._model_budget = ModelBudget() if has_model and config.budget else None
        self._share_from_first_rank = share_from_first_rank
        self._vllm_config = vllm_config
        scheduler = vllm_config.scheduler_config
        self._max_step_tokens = int(scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens)
        self._followed: list[str] = []  # the last step's requests
        self._rows = np.zeros(0, np.int64)  # theirs
        self._follows_any = False  # whether any of them has a row
        self._has_resumed = False  # whether any of them was in an earlier step, too
        self._prompt_tokens: deque[int] = deque(maxlen=RECENT_STEPS)  # read in each of the last steps
        self._last_call: float | None = None  # when `draft` was called last
        self._unshared: list[_Step] = []  # steps that the budget has not been told
        if config.history_dir is not None:
            keeper: Any = drafter  # `registry.check_keeps_history` has made sure
            self.engine_history = EngineHistory(config, vllm_config, keeper, self.problems, share_from_first_rank)

    def follow(self, req_ids: list[str], requests: Mapping[str, Any], *, has_changed: bool) -> NDArray[np.int64]:
        """Begin the requests that are new in a step, and end those that have ended. Called once before `draft`.

        Args:
            req_ids: The step's requests that have sampled something.
            requests: vLLM's requests by id, all that have not ended. A request has `prompt_token_ids`,
                `sampling_params`, `lora_request` and `mm_features`.
            has_changed: Whether requests may have come, ended or got another prompt since the last call.

        Returns:
            int64 [len(req_ids)], the requests' rows; -1 for prompts of embeddings, and once the drafter has raised.

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

    def expect(self, requests: Iterable[Any]) -> None:
        """See `Speculation`."""
        if self.engine_history is not None and self.enabled:
            self._ask(lambda: self._begin_in_history(requests))

    def _begin_in_history(self, requests: Iterable[Any]) -> None:
        for request in requests:
            is_known = request.req_id in self.live or request.req_id in self._expected
            if not is_known and request.prompt_token_ids is not None:  # a prompt of embeddings has no history
                prompt = np.array(request.prompt_token_ids, np.int32)
                self._expected[request.req_id] = self.begin_conversation(request, prompt)

    def draft(
        self,
        sampled: Sampled,
        *,
        num_tokens: int,
        began: float,
        targets: NDArray[np.int64] | None = None,
        model: ModelDrafts | None = None,
    ) -> Drafts:
        """Draft for the next step. Called once per step.

        Args:
            num_tokens: Tokens that the step computed, those of prompts among them.
            began: When it began, by `time.perf_counter`.
            targets: See `BatchDrafter.learn_step`.
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
            return self.drafting.no_drafts(sampled.rows.size)
        if self.budget is not None and self._last_call is None:  # vLLM chooses the sizes after the session is made
            self.budget.cost.pad_to(graph_sizes(self._vllm_config))
        started = time.perf_counter()
        try:
            learned = self.drafting.learn(sampled, targets)
            self._stats.emitted_tokens -= learned.num_sampled - learned.num_emitted  # all were counted
            self._time_step(started, began, num_tokens, sampled.rows.size, learned)
            # The median and not the mean: steps of the mean's size may never occur, so that their cost is not known.
            next_tokens = learned.num_live + (median(self._prompt_tokens) if self._prompt_tokens else 0)
            drafts = self.drafting.draft(
                sampled.rows,
                learned,
                num_tokens=next_tokens,
                max_draft_tokens=self._max_step_tokens - next_tokens,
                model=model,
            )
            self._end_with_the_batch()
            return drafts
        except Exception as error:
            self._switch_off(error)
            return self.drafting.no_drafts(sampled.rows.size)
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
        if self.enabled:
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
            if self.engine_history is not None and not self.broken:
                # The last step may have ended requests, which only a further one would say; others keep what they said.
                self._stop_missing({})
            super().close()
        except Exception as error:
            self._switch_off(error)

    def pause(self) -> None:
        """In place of `draft` while the session is not enabled."""
        self._last_call = None
        self.drafter.table.forget_drafts()

    def _switch_off(self, error: Exception) -> None:
        """End speculation after the drafter, which may be a user's own, has raised: its errors must not end a run.

        Raises:
            Exception: `error`, under tensor parallelism.
        """
        if self._share_from_first_rank is not None:
            raise error
        self.enabled, self.broken = False, True
        if self.engine_history is not None:
            self.engine_history.end_requests()
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
        return 0 if self.broken else int(np.count_nonzero(~self.drafter.table.arrays.is_complete[rows]))

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
        if request.prompt_token_ids is None:  # a prompt of embeddings has no history
            return -1
        live = self.live.get(req_id)
        if live is not None and live.conversation.length != len(request.prompt_token_ids):
            # A streaming session goes on with a longer prompt: as good as a new request.
            self._stop(req_id)
            live = None
        return (live or self._start(req_id, request)).row

    def _start(self, req_id: str, request: Any) -> LiveRequest:
        params, prompt = request.sampling_params, np.array(request.prompt_token_ids, np.int32)
        conversation = self._expected.pop(req_id, None) or self.begin_conversation(request, prompt)
        is_seeded = params.temperature > 0 and self._config.verify == "sample"
        problem_id, own_only = conversation.problem_id, request_options(params.extra_args).own_only
        if own_only and "own_only" not in self._keywords:
            problem_id = derive_seed("own_only", req_id)  # without one it would be the prompt's
        more: dict[str, Any] = {"num_known": conversation.num_known, "own_only": own_only}
        self.drafter.start_request(
            req_id,
            prompt,
            problem_id=problem_id,
            seed=params.seed if is_seeded else None,
            **{name: more[name] for name in self._keywords},
        )
        live = LiveRequest(self.drafter.row_of(req_id), conversation, request)
        table = self.drafter.table
        table.limit(live.row, **_end_of(params))
        table.arrays.is_sampled[live.row] = params.temperature > 0
        self.live[req_id] = live
        return live

    def _stop_missing(self, requests: Mapping[str, Any]) -> None:
        for req_id in [req_id for req_id in self.live if req_id not in requests]:
            self._stop(req_id)
        for req_id in [req_id for req_id in self._expected if req_id not in requests]:
            conversation = self._expected.pop(req_id)
            if self.engine_history is not None:
                self.engine_history.end_request(conversation.problem_id)

    def _stop(self, req_id: str) -> None:
        """Show the drafter a request's end."""
        live = self.live[req_id]
        keep = request_options(live.request.sampling_params.extra_args).keep_in_history
        if keep and "num_known" in self._keywords:
            drafter: Any = self.drafter
            self.problems.stop(live.conversation, drafter.output_of(req_id))
        self.drafter.stop_request(req_id, keep=keep)
        if self.engine_history is not None:
            self.engine_history.end_request(live.conversation.problem_id)
        del self.live[req_id]

    def _end_with_the_batch(self) -> None:
        """Hand over a batch's last rollouts where all are complete: the engine's next step may be long in coming."""
        if self.engine_history is None:
            return
        rows = self._rows[self._rows >= 0]
        if not rows.size or not self.drafter.table.arrays.is_complete[rows].all():
            return
        for req_id in self._followed:
            if req_id in self.live:
                self._stop(req_id)
        self._followed, self._rows = [], np.zeros(0, np.int64)
        self.engine_history.exchange()

    def _time_step(self, now: float, began: float, num_tokens: int, num_requests: int, learned: Learned) -> None:
        """Count the time of the step that has ended, from the last call to this one, and tell it to the budget.

        Args:
            num_tokens: Tokens that it computed.
        """
        num_draft_tokens, num_emitted = learned.num_verified, learned.num_emitted
        last, self._last_call = self._last_call, now
        num_prompt_tokens = max(num_tokens - num_requests - num_draft_tokens, 0)
        self._prompt_tokens.append(num_prompt_tokens)
        if last is None or not self._has_resumed:
            self._stats.step_seconds += now - began  # the engine may have been idle before
            return
        took = now - last
        self._stats.record_time(
            took,
            requests=num_requests,
            draft_tokens=num_draft_tokens,
            tokens=num_emitted,
            draft_seconds=self.drafting.seconds,
            has_prompts=num_prompt_tokens > 0,
        )
        if self.budget is None:
            return
        self._unshared.append(
            _Step(
                num_tokens,
                took,
                num_draft_tokens > 0,
                self.drafting.seconds,
                self.drafting.num_asked,
                num_requests,
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
