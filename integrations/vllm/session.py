"""What vLLM's two model runners and the engine's commands ask of a drafter: `Session`, on the host `HostSession`."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median_high
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget import Budget
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters import DRAFTERS, build_drafter
from rollout_spec.drafters.host.step import Learned, Sampled
from rollout_spec.drafting import Drafting
from rollout_spec.history.problems import Conversation, Problems
from rollout_spec.integrations.vllm.engine_history import EngineHistory
from rollout_spec.integrations.vllm.requests import request_options
from rollout_spec.stats import SpeculationStats
from rollout_spec.types import Drafts, Int32Array

logger = logging.getLogger(__name__)

STEPS_PER_SHARING = 16
"""Tensor-parallel ranks take over the first rank's times once in this many steps, or at once where the budget waits for
a step's time (`StepTimes.is_awaited`)."""
RECENT_STEPS = 16
"""The prompt tokens of the next step are predicted from those of this many last steps."""


class Session:
    """An engine's drafter from history, what chooses between its drafts and a model's, and the folder of its history.

    The schedule says which requests are alive: each step calls `finish_requests` before it runs, and `start_requests`
    and `exchange_history` while the device computes.
    """

    drafter: Any  # from history
    stats: SpeculationStats  # this engine's counters
    live: dict[str, Any]  # the requests that the drafter serves, by id; on the host preempted ones, too
    choice: Any = None  # chooses between its drafts and those of a model; None where there is no model
    problems: Problems  # by what the problems of requests are recognised
    engine_history: EngineHistory | None = None  # keeps history beyond this engine; None without `history_dir`
    budget: Budget | None = None  # decides how much of each draft is verified; None: all of it
    enabled: bool = True  # whether drafts are made; history grows also while they are not
    is_drafter_alive: bool = True  # whether history grows: False once a drafter on the host has raised

    def start_requests(self, requests: Iterable[Any]) -> None:
        """Requests were scheduled for the first time, in V2 also after a preemption, or with a longer prompt.

        Args:
            requests: vLLM's `NewRequestData`.
        """
        raise NotImplementedError

    def finish_requests(self, finished: Iterable[str], preempted: Iterable[str]) -> None:
        """Called before a step runs: the ids of requests that have ended, and of those that are preempted."""
        raise NotImplementedError

    def num_live_requests(self) -> int:
        """Requests that have not ended, as far as is known."""
        return len(self.live)

    def set_enabled(self, enabled: bool) -> None:
        """Draft from now on, or no longer."""
        self.enabled = bool(enabled)

    def memory_bytes(self) -> int:
        """Bytes that the drafter holds; 0 if it does not say."""
        return self._report("memory_bytes") or 0

    def history_summary(self) -> dict[str, int]:
        """What the drafter's history holds; empty if it does not say."""
        return self._report("history_summary") or {}

    def _report(self, method: str) -> Any:
        """What a method of the drafter says, which a user's own need not have."""
        return self._ask(getattr(self.drafter, method, lambda: None))

    def begin_conversation(self, request: Any, prompt_token_ids: Int32Array) -> Conversation:
        """Find a new request's problem, and begin to read what other engines have sampled for it.

        Conversations with different LoRA adapters or images are different. An adapter's versions are one adapter, as
        those of a policy are one policy. A request that is drafted from its own text alone has no problem.

        Args:
            prompt_token_ids: int32 [n], the request's.

        Raises:
            ValueError: the request's own options are wrong.
        """
        options = request_options(request.sampling_params.extra_args)
        if options.own_only:
            return Conversation(None, length=len(prompt_token_ids))
        given = options.problem_id
        # TRL's AsyncGRPO publishes each version of its adapter under a name of its own, which ends in -v and a number.
        adapter = "" if request.lora_request is None else re.sub(r"-v\d+$", "", request.lora_request.lora_name)
        told_apart = given, adapter if given is None else ""
        images = [(int(image.mm_position.offset), str(image.identifier)) for image in request.mm_features or ()]
        model = "" if told_apart == (None, "") else repr(told_apart)
        conversation = self.problems.start(prompt_token_ids, model=model, images=images)
        if given is not None:
            conversation = conversation._replace(problem_id=given)
        if self.engine_history is not None:
            self.engine_history.begin_request(conversation.problem_id)
        return conversation

    def exchange_history(self) -> None:
        """Hand over what has ended and take in what ended elsewhere."""
        if self.engine_history is not None:
            self._ask(self.engine_history.exchange)

    def close(self) -> None:
        """The engine ends: write what has ended."""
        if self.engine_history is not None:
            self.engine_history.close()

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Call the drafter; None if it cannot answer."""
        return call()


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
    keep: bool
    """Whether history keeps its rollout."""


def end_of(params: Any) -> dict[str, Any]:
    """Where the scheduler ends a request, as both drafters are told."""
    stops = list(params.stop_token_ids or ())
    if params.eos_token_id is not None:
        stops.append(params.eos_token_id)
    return {"max_tokens": params.max_tokens, "min_tokens": params.min_tokens, "stop_token_ids": stops}


class HostSession(Session):
    """A drafter on the host and its budget, which outlive the batches: requests are told apart by their ids.

    Attributes: those of `Session`, and
        drafting: The drafter and its budget, step by step.

    Args:
        share_from_first_rank: See `sharing_from_first_rank`: all ranks must draft alike.
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
        share_from_first_rank: Callable[[Any], Any] | None = None,
        *,
        index_late: bool = False,
    ) -> None:
        options = {"max_draft_tokens": config.max_draft_tokens} if config.drafter in DRAFTERS else {}
        drafter = build_drafter(config.drafter, **{**options, **config.drafter_options})
        self.stats = SpeculationStats()
        self.budget = Budget() if config.budget else None
        scheduler = vllm_config.scheduler_config
        self.drafting = Drafting(
            drafter,
            config.max_draft_tokens,
            max_model_len=int(vllm_config.model_config.max_model_len),
            vocab_size=int(vllm_config.model_config.get_vocab_size()),
            max_step_tokens=int(scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens),
            budget=self.budget,
            index_late=index_late,
        )
        self.drafter = self.drafting.drafter
        self.problems = Problems(getattr(drafter, "max_history_tokens", None))
        self.live: dict[str, LiveRequest] = {}
        self._config = config
        self._share_from_first_rank = share_from_first_rank
        self._vllm_config = vllm_config
        self._batch: tuple[list[str], NDArray[np.int64]] | None = None  # the last step's requests, and their rows
        self._was_idle = True  # no request was live when this step began
        self._prompt_tokens: deque[int] = deque(maxlen=RECENT_STEPS)  # read in each of the last steps
        self._last_call: float | None = None  # when `draft` was called last
        self._unshared: list[dict[str, Any]] = []  # steps that the budget has not been told, as it takes them
        if config.history_dir is not None:
            self.engine_history = EngineHistory(config, vllm_config, self.drafter, self.problems, share_from_first_rank)

    # -- which requests are alive ------------------------------------------------------------------------------------

    def start_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            if request.prompt_token_ids is not None:  # a prompt of embeddings has no history
                self._ask(partial(self._start, request))

    def finish_requests(self, finished: Iterable[str], preempted: Iterable[str]) -> None:
        """Preempted requests keep their rows."""
        for req_id in sorted(finished):  # all ranks in the same order
            if req_id in self.live:
                self._ask(partial(self._stop, req_id))
        self._was_idle |= not self.live

    def rows_of(self, req_ids: list[str]) -> NDArray[np.int64]:
        """The requests' rows in the drafter's table, int64 [len(req_ids)]; -1 for those that it does not serve."""
        if self._batch is None or self._batch[0] != req_ids:
            rows = [self.live[req_id].row if req_id in self.live else -1 for req_id in req_ids]
            self._batch = list(req_ids), np.array(rows, np.int64)
        return self._batch[1]

    def num_live_requests(self) -> int:
        """0 once the drafter has raised."""
        if not self.is_drafter_alive:
            return 0
        rows = [live.row for live in self.live.values()]
        return int(np.count_nonzero(~self.drafter.table.arrays.is_complete[rows]))

    def _start(self, request: Any) -> None:
        req_id, params, prompt = request.req_id, request.sampling_params, np.array(request.prompt_token_ids, np.int32)
        if req_id in self.live:
            self._stop(req_id)  # a streaming session goes on with a longer prompt: as good as a new request
        options, is_batched = request_options(params.extra_args), self.drafting.is_batched
        if options.own_only and not is_batched:
            return  # a drafter of a user's own may draft one request from another's text
        conversation = self.begin_conversation(request, prompt)
        is_seeded = params.temperature > 0 and self._config.verify == "sample"
        self.drafter.start_request(
            req_id,
            prompt,
            problem_id=conversation.problem_id,
            seed=params.seed if is_seeded else None,
            **({"num_known": conversation.num_known, "own_only": options.own_only} if is_batched else {}),
        )
        row = self.drafter.row_of(req_id)
        self.drafter.table.limit(row, **end_of(params))
        self.live[req_id], self._batch = LiveRequest(row, conversation, options.keep_in_history), None

    def _stop(self, req_id: str) -> None:
        live, self._batch = self.live.pop(req_id), None
        arrays = self.drafter.table.arrays
        keep = live.keep and bool(arrays.num_tokens[live.row] > arrays.num_prompt_tokens[live.row])
        if keep and self.drafting.is_batched:
            self.problems.stop(live.conversation, self.drafter.output_of(req_id))
        self.drafter.stop_request(req_id, keep=keep)
        if self.engine_history is not None:
            self.engine_history.end_request(live.conversation.problem_id)

    # -- a step ------------------------------------------------------------------------------------------------------

    def draft(self, sampled: Sampled, *, num_step_tokens: int, targets: NDArray[np.int64] | None = None) -> Drafts:
        """Draft for the next step. Called once per step.

        Args:
            sampled: What the step has sampled, of the requests that have rows.
            num_step_tokens: Tokens that the step computed, those of prompts among them.
            targets: See `BatchDrafter.learn_step`.

        Returns:
            The drafts of the requests in `sampled.rows`; `lengths` is how many tokens of each to verify. None of any
            while drafts are off, and once the drafter has raised.

        Raises:
            Exception: what the drafter raised, under tensor parallelism: the other ranks would go on drafting, and
                sample other tokens than this one.
        """
        if self.budget is not None and self._last_call is None:  # vLLM chooses the sizes after the session is made
            self.budget.times.pad_to(graph_sizes(self._vllm_config))
        started = time.perf_counter()
        try:
            learned = self.drafting.learn(sampled, targets)
            self.stats.emitted_tokens -= learned.num_sampled - learned.num_emitted  # all were counted
            self._time_step(started, num_step_tokens, sampled.rows.size, learned)
            limits = learned.limits if self.enabled else np.zeros_like(learned.limits)
            # The median, not the mean: a step of the mean's size may never have occurred, so its cost is not known.
            next_tokens = learned.num_live + median_high(self._prompt_tokens)
            drafts = self.drafting.draft(sampled.rows, limits, num_tokens=next_tokens)
            self._end_with_the_batch()
            return drafts
        except Exception as error:
            self._switch_off(error)
            return self.drafting.no_drafts(sampled.rows.size)
        finally:
            self.stats.draft_seconds += time.perf_counter() - started

    def update_index(self) -> None:
        """Do the last step's work that could wait. Called while the device computes. Raises like `draft`."""
        self._ask(self.drafter.update_index)

    def _end_with_the_batch(self) -> None:
        """Hand over a batch's last rollouts where all are complete: the engine's next step may be long in coming."""
        if self.engine_history is None or self._batch is None:
            return
        req_ids, rows = self._batch
        rows = rows[rows >= 0]
        if rows.size and self.drafter.table.arrays.is_complete[rows].all():
            for req_id in [req_id for req_id in req_ids if req_id in self.live]:
                self._stop(req_id)
            self.engine_history.exchange()

    # -- on and off --------------------------------------------------------------------------------------------------

    def set_enabled(self, enabled: bool) -> None:
        """Draft from now on, or no longer.

        Raises:
            RuntimeError: the drafter has raised, and stays off.
        """
        if enabled and not self.is_drafter_alive:
            raise RuntimeError(
                "speculation stays off in this engine, because its drafter has raised: see the log for the cause, and "
                "build the engine again"
            )
        super().set_enabled(enabled)

    def close(self) -> None:
        """Also once the drafter has raised."""
        try:
            if self.engine_history is not None and self.is_drafter_alive:
                for req_id in list(self.live):  # the last step may have ended some; others keep what they said
                    self._stop(req_id)
            super().close()
        except Exception as error:
            self._switch_off(error)

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Call the drafter outside of `draft`. If it raises, switch it off and return None, as from then on."""
        if not self.is_drafter_alive:
            return None
        try:
            return call()
        except Exception as error:
            return self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        """End speculation after the drafter, which may be a user's own, has raised: its errors must not end a run.

        Raises:
            Exception: `error`, under tensor parallelism.
        """
        if self._share_from_first_rank is not None:
            raise error
        self.enabled = self.is_drafter_alive = False
        if self.engine_history is not None:
            self.engine_history.end_requests()
        self.stats.drafter_errors += 1
        logger.error("the drafter raised: speculation is off from here on, sampling goes on unchanged", exc_info=error)

    # -- times -------------------------------------------------------------------------------------------------------

    def _time_step(self, now: float, num_tokens: int, num_requests: int, learned: Learned) -> None:
        """Tell the budget the time of the step that has ended, from the last call to this one.

        Args:
            num_tokens: Tokens that it computed.
        """
        num_draft_tokens = learned.num_verified
        last, self._last_call = self._last_call, now
        was_idle, self._was_idle = self._was_idle, False
        num_prompt_tokens = max(num_tokens - num_requests - num_draft_tokens, 0)
        self._prompt_tokens.append(num_prompt_tokens)
        if self.budget is None or last is None or was_idle or num_requests == 0:
            return
        took = {"seconds": now - last, "draft_seconds": self.drafting.seconds}
        self._unshared.append(
            {**took, "num_tokens": num_tokens, "drafted": num_draft_tokens > 0, "num_asked": self.drafting.num_asked}
        )
        if self._share_from_first_rank is not None:
            is_awaited = self.budget.times.is_awaited(num_tokens, drafted=num_draft_tokens > 0)
            if len(self._unshared) < STEPS_PER_SHARING and not is_awaited:
                return
            self._unshared = self._share_from_first_rank(self._unshared)
        for step in self._unshared:
            self.budget.observe_step(**step)
        self._unshared = []
