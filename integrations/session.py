"""What vLLM's two model runners share: an engine's drafter, its budget, and their view of the requests."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget import Budget
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters import DRAFTERS, build_drafter
from rollout_spec.estimates import flatten, median
from rollout_spec.integrations.requests import (
    LiveRequest,
    ends_with_stop_token,
    is_last,
    problem_id_of,
    trim_at_end,
)
from rollout_spec.stats import SpeculationStats
from rollout_spec.types import Draft, Int32Array

logger = logging.getLogger(__name__)

STEPS_PER_SHARING = 16
"""Tensor-parallel ranks take over the first rank's times once in this many steps."""
RECENT_STEPS = 16
"""The prompt tokens of the next step are predicted from those of this many last steps."""


def graph_sizes(vllm_config: Any) -> tuple[int, ...]:
    """The numbers of tokens to which CUDA graphs pad steps; empty without graphs."""
    compilation = vllm_config.compilation_config
    # Steps whose requests have drafts of different lengths run in the graphs for mixed batches.
    if compilation.cudagraph_mode is None or compilation.cudagraph_mode.mixed_mode().name == "NONE":
        return ()
    return tuple(compilation.cudagraph_capture_sizes or ())


class Outcome(NamedTuple):
    """What became of a request's draft."""

    target_token_ids: list[int]
    """What the target sampled at the verified positions."""
    num_accepted: int
    num_verified: int
    """Verified draft tokens; the scheduler may have cut the draft further than the budget did."""


class Proposal(NamedTuple):
    """A draft for the next step."""

    token_ids: Int32Array
    num_verified: int
    """How many of them to verify."""


class _Drafts(NamedTuple):
    """What the drafter proposed for a step."""

    rows: dict[str, int]  # index of each request's draft, by request id
    confidence: NDArray[np.float32]  # [D], of all drafted tokens
    starts: NDArray[np.int64]  # [B + 1], each draft's first token, then D


class _Step(NamedTuple):
    """What a step took; see `Budget.observe_step`."""

    num_tokens: int
    seconds: float
    drafted: bool
    draft_seconds: float
    num_asked: int


class DraftingSession:
    """An engine's drafter and its budget, which outlive the batches: requests are told apart by their ids.

    Attributes:
        live: The requests that the drafter serves, by id, until `draft` is told that they ended.
        enabled: Whether anything is indexed and drafted; False after the drafter has raised.
        broken: Whether the drafter has raised, after which it stays switched off.
        budget: Decides how much of each draft is verified. None: all of it.
        num_speculative_tokens: K.

    Args:
        share_from_first_rank: Returns the first rank's list of numbers on every rank, as all must draft alike. None
            for a single rank.

    Raises:
        ValueError, TypeError: the drafter is unknown, or its options are wrong.
    """

    def __init__(
        self,
        config: RolloutSpecConfig,
        vllm_config: Any,
        stats: SpeculationStats,
        share_from_first_rank: Callable[[list[float]], list[float]] | None = None,
    ) -> None:
        options = {"max_draft_tokens": config.num_speculative_tokens} if config.drafter in DRAFTERS else {}
        self.drafter = build_drafter(config.drafter, **{**options, **config.drafter_options})
        self.live: dict[str, LiveRequest] = {}
        self.enabled = True
        self.broken = False
        self.num_speculative_tokens = config.num_speculative_tokens
        self._config = config
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())
        self._stats = stats
        self.budget = Budget() if config.budget else None
        self._share_from_first_rank = share_from_first_rank
        self._vllm_config = vllm_config
        scheduler = vllm_config.scheduler_config
        self._max_step_tokens = int(scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens)
        self._drafts: _Drafts | None = None  # of the step that is running
        self._draft_seconds = 0.0  # spent on drafting them
        self._num_asked = 0  # requests for which the drafter was asked
        self._prompt_tokens: deque[int] = deque(maxlen=RECENT_STEPS)  # read in each of the last steps
        self._finds_stop_strings = True
        self._last_call: float | None = None  # when `draft` was called last
        self._unshared: list[_Step] = []  # steps that the budget has not been told

    def num_seen(self, req_id: str, request: Any) -> int:
        """A request's tokens, prompt included, that need not be passed to `draft`; for a new one, its prompt's."""
        live = self.live.get(req_id)
        is_known = live is not None and live.num_prompt_tokens == len(request.prompt_token_ids)
        return live.num_seen if live is not None and is_known else len(request.prompt_token_ids)

    def draft(
        self,
        ended: Iterable[str],
        outcomes: Mapping[str, Outcome],
        updates: Sequence[tuple[str, Any, Sequence[int]]],
        num_step_tokens: int,
        step_started: float,
    ) -> dict[str, Proposal]:
        """Draft for the next step. Called once per step.

        Args:
            ended: Ids of requests of `live` that have ended.
            outcomes: What became of the last drafts, by request.
            updates: (id, vLLM's request, its tokens after those seen) of each request to draft for. A request has
                `prompt_token_ids`, `sampling_params`, `lora_request` and `mm_features`.
            num_step_tokens: Tokens that the step computed, those of prompts among them.
            step_started: When it began, by `time.perf_counter`.

        Returns:
            At most num_speculative_tokens drafted tokens by request; requests without a draft may be missing. Always
            empty once the drafter has raised.

        Raises:
            Exception: what the drafter raised, under tensor parallelism: the other ranks would go on drafting, and
                sample other tokens than this one.
        """
        if not self.enabled:
            self._last_call = self._drafts = None
            return {}
        if self.budget is not None and self._last_call is None:  # vLLM chooses the sizes after the session is made
            self.budget.cost.pad_to(graph_sizes(self._vllm_config))
        started = time.perf_counter()
        try:
            self._time_step(started, outcomes, updates, num_step_tokens, step_started)
            return self._draft(ended, outcomes, updates)
        except Exception as error:
            self._switch_off(error)
            return {}
        finally:
            self._stats.draft_seconds += time.perf_counter() - started

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
        self.enabled = bool(enabled)

    def begin_policy_version(self, version: int) -> None:
        """Tell the drafter that weights have changed. Raises like `draft`."""
        if not self.broken:
            self._ask(lambda: self.drafter.begin_policy_version(version))

    def memory_bytes(self) -> int:
        """Bytes that the drafter holds; 0 once it has raised."""
        return 0 if self.broken else int(self._ask(lambda: self.drafter.memory_bytes()) or 0)

    def source_counts(self) -> dict[str, list[int]]:
        """By source, [drafted tokens that the target reached, those that were right]; empty if it has no sources."""
        drafter: Any = self.drafter  # not every drafter has sources
        if self.broken or not hasattr(drafter, "source_counts"):
            return {}
        counts = self._ask(lambda: drafter.source_counts()) or {}
        return {name: list(values) for name, values in counts.items()}

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Call the drafter outside a step. If it raises, switch it off and return None."""
        try:
            return call()
        except Exception as error:
            return self._switch_off(error)

    def _draft(
        self,
        ended: Iterable[str],
        outcomes: Mapping[str, Outcome],
        updates: Sequence[tuple[str, Any, Sequence[int]]],
    ) -> dict[str, Proposal]:
        for req_id in ended:
            self.drafter.stop_request(req_id)
            live = self.live.pop(req_id)
            if self.budget is not None and live.is_complete:  # an aborted one says nothing about lengths
                self.budget.lengths.observe(live.problem, live.num_output_tokens)
        self._observe(outcomes, updates)
        req_ids, room, left, num_live = [], [], [], 0
        for req_id, request, tokens in updates:
            to_come = self._advance(req_id, request, tokens)
            num_live += to_come > 0
            if to_come > 1:  # a request's last token needs no draft: the step samples one in any case
                req_ids.append(req_id)
                in_model = self._max_model_len - self.live[req_id].num_seen - 1
                room.append(min(self._config.num_speculative_tokens, to_come - 1, in_model))
                left.append(to_come)
        # The median and not the mean: steps of the mean's size may never occur, so that their cost is not known.
        num_tokens = num_live + (median(self._prompt_tokens) if self._prompt_tokens else 0)
        wanted = bool(req_ids) and (self.budget is None or self.budget.wants_drafts(num_tokens))
        self._num_asked, self._draft_seconds = len(req_ids) if wanted else 0, 0.0
        if not wanted:
            return {}
        started = time.perf_counter()
        drafts = self.drafter.propose(req_ids, np.array(room, np.int32))
        confidence, starts = flatten(drafts)
        sizes = np.diff(starts).tolist()
        self._check(drafts, sizes, confidence, room)
        if self.budget is not None:
            others_wait = any(self._prompt_tokens)
            sizes = self.budget.decide(
                confidence,
                starts,
                None if others_wait else self._expect(self.budget, req_ids, left),
                num_tokens=num_tokens,
                max_draft_tokens=self._max_step_tokens - num_tokens,
            ).tolist()
        self._draft_seconds = time.perf_counter() - started
        self._drafts = _Drafts({req_id: row for row, req_id in enumerate(req_ids)}, confidence, starts)
        return {req_id: Proposal(draft.token_ids, n) for req_id, draft, n in zip(req_ids, drafts, sizes, strict=True)}

    def _check(
        self, drafts: Sequence[Draft], sizes: Sequence[int], confidence: NDArray[np.float32], room: Sequence[int]
    ) -> None:
        """Raise ValueError if the drafter, which may be a user's own, proposes drafts that cannot be verified."""
        if len(sizes) != len(room) or any(size > max(limit, 0) for size, limit in zip(sizes, room, strict=True)):
            raise ValueError(f"drafted {list(sizes)} tokens where {list(room)} were asked for")
        for (ids, sure), size in zip(drafts, sizes, strict=True):
            if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or len(sure) != size:
                raise ValueError(f"a draft needs int32 tokens and a confidence for each, got {ids!r} and {sure!r}")
        if not confidence.size:
            return
        tokens = np.concatenate([draft.token_ids for draft in drafts])
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ValueError(f"drafted tokens from {tokens.min()} to {tokens.max()}, of {self._vocab_size}")
        if not (confidence.min() >= 0 and confidence.max() <= 1):  # NaN fails, too
            raise ValueError(f"confidence from {confidence.min()} to {confidence.max()} is no probability")

    def _observe(self, outcomes: Mapping[str, Outcome], updates: Sequence[tuple[str, Any, Sequence[int]]]) -> None:
        """Tell drafter and budget the outcomes of the last drafts, verified or not."""
        drafts, self._drafts = self._drafts, None
        learnt = {req_id: outcome for req_id, outcome in outcomes.items() if req_id in self.live}
        if drafts is not None:
            for req_id, _, tokens in updates:
                # Of a draft that was not verified, the target's next token shows whether its first token was right.
                if req_id in drafts.rows and req_id not in learnt and req_id in self.live and len(tokens):
                    learnt[req_id] = Outcome([int(tokens[0])], 0, 0)
        if not learnt:
            return
        seen = [outcome.target_token_ids for outcome in learnt.values()]
        self.drafter.observe(list(learnt), seen, np.array([o.num_accepted for o in learnt.values()], np.int32))
        if self.budget is not None and drafts is not None:
            verified, accepted = np.zeros((2, len(drafts.rows)), np.int64)
            for req_id, outcome in outcomes.items():
                row = drafts.rows.get(req_id, -1)
                if row >= 0:
                    verified[row], accepted[row] = outcome.num_verified, outcome.num_accepted
            self.budget.survival.observe(drafts.confidence, drafts.starts, verified, accepted)

    def _expect(
        self, budget: Budget, req_ids: Sequence[str], left: Sequence[int]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation of the tokens to come, float64 [B] each."""
        requests = [self.live[req_id] for req_id in req_ids]
        so_far = np.array([request.num_output_tokens for request in requests], np.int64)
        return budget.lengths.predict([request.problem for request in requests], so_far, np.array(left, np.int64))

    def _time_step(
        self,
        now: float,
        outcomes: Mapping[str, Outcome],
        updates: Sequence[tuple[str, Any, Sequence[int]]],
        num_step_tokens: int,
        step_started: float,
    ) -> None:
        """Count the time of the step that has ended, from the last call to this one, and tell it to the budget."""
        last, self._last_call = self._last_call, now
        num_draft_tokens = sum(outcome.num_verified for outcome in outcomes.values())
        num_prompt_tokens = max(num_step_tokens - len(updates) - num_draft_tokens, 0)
        self._prompt_tokens.append(num_prompt_tokens)
        if last is None or not any(req_id in self.live for req_id, _, _ in updates):
            self._stats.step_seconds += now - step_started  # the engine may have been idle before
            return
        took = now - last
        self._stats.record_time(
            took,
            num_requests=len(updates),
            draft_tokens=num_draft_tokens,
            tokens=sum(len(tokens) for _, _, tokens in updates),
            draft_seconds=self._draft_seconds,
            reads_prompts=num_prompt_tokens > 0,
        )
        if self.budget is None:
            return
        self._unshared.append(_Step(num_step_tokens, took, num_draft_tokens > 0, self._draft_seconds, self._num_asked))
        if self._share_from_first_rank is not None:
            if len(self._unshared) < STEPS_PER_SHARING:
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
        self._unshared = []

    def _advance(self, req_id: str, request: Any, tokens: Sequence[int]) -> int:
        """Show the drafter a request's new tokens. Returns the most tokens that can follow, 0 when it is complete."""
        params = request.sampling_params
        live = self.live.get(req_id)
        if live is not None and live.num_prompt_tokens != len(request.prompt_token_ids):
            # A streaming session has continued with a longer prompt: to the drafter, a new request.
            self.drafter.stop_request(req_id)
            live = None
        live = live or self._start(req_id, request)
        num_output = live.num_output_tokens
        if not live.is_complete:
            kept = trim_at_end(tokens, num_output, params)
            ends = bool(kept) and is_last(kept[-1], num_output + len(kept), params)
            if params.stop and kept:
                num_kept = self._find_stop_string(live, request, kept, num_output)
                if num_kept is not None:
                    kept, ends = kept[:num_kept], True
            self.drafter.extend(req_id, kept)
            live.num_seen += len(kept)
            live.is_complete = ends
        return 0 if live.is_complete else int(params.max_tokens) - live.num_output_tokens

    def _start(self, req_id: str, request: Any) -> LiveRequest:
        """Show the drafter a new request."""
        params, problem_id = request.sampling_params, problem_id_of(request)
        is_seeded = params.temperature > 0 and self._config.verify == "sample"
        self.drafter.start_request(
            req_id,
            np.array(request.prompt_token_ids, np.int32),
            problem_id=problem_id,
            seed=params.seed if is_seeded else None,
        )
        num_prompt_tokens = len(request.prompt_token_ids)
        live = LiveRequest(problem_id or 0, num_prompt_tokens, num_seen=num_prompt_tokens)
        self.live[req_id] = live
        return live

    def _find_stop_string(self, live: LiveRequest, request: Any, tokens: Sequence[int], num_before: int) -> int | None:
        """How many of a request's new tokens end with a stop string's completion; None: no stop string found."""
        if not self._finds_stop_strings:
            return None
        try:
            if live.stop_search is None:
                from rollout_spec.integrations.stop_strings import StopStringSearch  # imports vLLM and its tokenizers

                live.stop_search = StopStringSearch(self._vllm_config.model_config, request)
            stops = ends_with_stop_token(tokens, request.sampling_params, num_before)
            return live.stop_search.find(tokens, ends_with_stop_token=stops)
        except Exception:  # e.g. a tokenizer that only the front end can load
            if self._share_from_first_rank is not None:  # the other ranks would draft differently
                raise
            self._finds_stop_strings = False
            logger.exception("stop strings cannot be found here: the history may hold some tokens past them")
            return None
