"""What vLLM's two model runners share: the drafter of an engine and what it is told about the requests."""

from __future__ import annotations

import hashlib
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
from rollout_spec.drafters.base import problem_of_prompt
from rollout_spec.estimates import flatten, median
from rollout_spec.integrations.request_options import requested_problem_id
from rollout_spec.noise import derive_seed
from rollout_spec.stats import SpeculationStats
from rollout_spec.types import Draft, Int32Array

logger = logging.getLogger(__name__)

STEPS_PER_AGREEMENT = 16
"""Steps after which ranks agree on what they took."""
RECENT_STEPS = 16
"""Steps whose prompts say what the next one reads."""


def needs_processing(params: Any) -> bool:
    """Whether a request's logits go through vLLM's own processors before they reach our verifier."""
    return bool(
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
        or params.bad_words
        or params.allowed_token_ids
        or params.logit_bias
        or params.min_tokens > 0
        or params.thinking_token_budget is not None
    )


def refuse_own_processors(processors: Iterable[Any]) -> None:
    """Raise ValueError if a logits processor is not vLLM's own: on drafted positions vLLM applies none of them."""
    for processor in processors:
        if not type(processor).__module__.startswith("vllm."):
            raise ValueError(
                f"the logits processor {type(processor).__name__} would be ignored by rollout_spec's sampler in the V1 "
                "model runner: remove it"
            )


def require_seed(params: Any, request: str) -> None:
    """Raise RuntimeError if a request, which `request` names, has no dice."""
    if params.seed is None:
        raise RuntimeError(
            f"{request} has no seed: it did not pass through vLLM's input processor with the rollout_spec plugin "
            "loaded. Give it one in SamplingParams(seed=...)"
        )


def verifier_scores(mode: str, num_logprobs: int | None, is_processed: bool) -> bool:
    """Whether the verifier's own log-probabilities are what a batch asks for; otherwise vLLM's code scores its tokens.

    Args:
        mode: The engine's `logprobs_mode`.
        num_logprobs: Tokens per position besides the sampled one; None, or negative: nothing is scored.
        is_processed: The verifier was given logits that vLLM had processed: raw ones it has not seen.
    """
    return num_logprobs == 0 and mode.endswith("_logprobs") and not (is_processed and mode == "raw_logprobs")


def raise_if_broken(num_broken_rows: NDArray[Any], req_ids: Sequence[str]) -> None:
    """Raise FloatingPointError if the model's logits are broken.

    Rows that masks have left empty (a grammar at its end, allowed tokens that min_tokens forbids) are no fault of the
    model's, and vLLM emits token 0 there.

    Args:
        num_broken_rows: Integer [B], each request's rows without a sample because a logit is NaN or +inf.
    """
    if not num_broken_rows.any():
        return
    first = req_ids[int(np.flatnonzero(num_broken_rows)[0])]
    raise FloatingPointError(
        f"{int(num_broken_rows.sum())} rows of logits hold NaN or +inf (first in request {first}), and nothing can be "
        "sampled from them: check the weights that were last loaded into the engine"
    )


def problem_id_of(request: Any) -> int | None:
    """The problem of a request: the one that the caller names, or what shapes its outputs.

    None leaves the choice to the drafter, which hashes the prompt; adapters and images are hashed with it here.
    """
    given = requested_problem_id(request.sampling_params.extra_args)
    if given is not None:
        return given
    if request.lora_request is None and not request.mm_features:
        return None
    prompt = hashlib.blake2b(np.asarray(request.prompt_token_ids, np.int32).tobytes(), digest_size=16).hexdigest()
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    return derive_seed(prompt, adapter, *(str(feature.identifier) for feature in request.mm_features or ()))


def graph_sizes(vllm_config: Any) -> tuple[int, ...]:
    """Numbers of tokens that steps are padded to, those of CUDA graphs; empty without them."""
    compilation = vllm_config.compilation_config
    # Steps whose requests have drafts of different lengths are mixed ones.
    if compilation.cudagraph_mode is None or compilation.cudagraph_mode.mixed_mode().name == "NONE":
        return ()
    return tuple(compilation.cudagraph_capture_sizes or ())


def _is_stop_token(token_id: int, num_output_tokens: int, params: Any) -> bool:
    """Whether a request ends here because of the token itself."""
    stops = token_id == params.eos_token_id or token_id in (params.stop_token_ids or ())
    return stops and num_output_tokens >= params.min_tokens


def ends_with_stop_token(token_ids: Sequence[int], params: Any, num_before: int = 0) -> bool:
    """Whether output tokens, after `num_before` others, end with a token that ends the request by itself."""
    return bool(token_ids) and _is_stop_token(token_ids[-1], num_before + len(token_ids), params)


def _is_last(token_id: int, num_output_tokens: int, params: Any) -> bool:
    """Whether the scheduler ends a request here. It knows nothing of stop strings, which the front end looks for."""
    return num_output_tokens >= params.max_tokens or _is_stop_token(token_id, num_output_tokens, params)


def trim_at_end(token_ids: Sequence[int], num_before: int, params: Any) -> list[int]:
    """Cut newly sampled tokens where the scheduler will: a step can sample past the end of a request.

    Args:
        token_ids: New output tokens.
        num_before: Output tokens before them.
    """
    for i, token in enumerate(token_ids):
        if _is_last(token, num_before + i + 1, params):
            return list(token_ids[: i + 1])
    return list(token_ids)


def sampled_tokens(targets: Sequence[int], accepted: int) -> list[int]:
    """What the target sampled at a draft's positions, up to a row without a sample.

    Args:
        targets: `VerifyResult.target_token_ids` of one request's rows.
        accepted: Accepted drafts. The token after them has been emitted whatever it is: 0 where there was no sample.
    """
    kept = []
    for j, token in enumerate(targets):
        if token < 0 and j > accepted:
            break
        kept.append(max(int(token), 0))
    return kept


class Outcome(NamedTuple):
    """What became of a request's draft."""

    target_token_ids: list[int]
    """What the target sampled at the verified positions."""
    num_accepted: int
    num_verified: int
    """The scheduler may cut a draft further than was asked for."""


class Proposal(NamedTuple):
    """A draft for the next step."""

    token_ids: Int32Array
    num_verified: int
    """So many of them are worth verifying."""


class _Drafts(NamedTuple):
    """What the drafter proposed for a step."""

    rows: dict[str, int]  # by request
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
        live: By request, the tokens that the drafter has seen, prompt included. A request leaves when it is named as
            ended.
        enabled: Whether anything is indexed and drafted; False after the drafter has raised.
        broken: Whether it has, so that it stays switched off.
        budget: What decides how much of each draft is verified; None: all of it.
        num_speculative_tokens: K.

    Args:
        agree: Makes a list of numbers that ranks measured the same on all of them. Ranks must draft alike.

    Raises:
        ValueError, TypeError: the drafter is unknown, or its options are wrong.
    """

    def __init__(
        self,
        config: RolloutSpecConfig,
        vllm_config: Any,
        stats: SpeculationStats,
        agree: Callable[[list[float]], list[float]] | None = None,
    ) -> None:
        options = {"max_draft_tokens": config.num_speculative_tokens} if config.drafter in DRAFTERS else {}
        self.drafter = build_drafter(config.drafter, **{**options, **config.drafter_options})
        self.live: dict[str, int] = {}
        self.enabled = True
        self.broken = False
        self.num_speculative_tokens = config.num_speculative_tokens
        self._config = config
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())
        self._stats = stats
        self._complete: set[str] = set()  # live requests whose last token has been sampled
        self.budget = Budget() if config.budget else None
        self._agree = agree
        self._vllm_config = vllm_config
        scheduler = vllm_config.scheduler_config
        self._max_step_tokens = int(scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens)
        self._drafts: _Drafts | None = None  # of the step that runs
        self._draft_seconds = 0.0  # what it took to draft them
        self._num_asked = 0  # for so many requests
        self._stop_searches: dict[str, Any] = {}  # by live request that has stop strings
        self._problems: dict[str, tuple[int, int]] = {}  # by live request, for the budget: (problem, prompt's length)
        self._prompt_tokens: deque[int] = deque(maxlen=RECENT_STEPS)  # of the last steps
        self._last_call: float | None = None
        self._unshared: list[_Step] = []

    def num_seen(self, req_id: str, request: Any) -> int:
        """Tokens of a request, prompt included, that need not be shown again."""
        return self.live.get(req_id, len(request.prompt_token_ids))

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
            ended: Requests of `live` that are over.
            outcomes: What became of the last drafts, by request.
            updates: (id, vLLM's request, its tokens after those seen) of each request to draft for. A request has
                `prompt_token_ids`, `sampling_params`, `lora_request` and `mm_features`.
            num_step_tokens: Tokens that the step computed, those of prompts among them.
            step_started: When it began, by `time.perf_counter`.

        Returns:
            At most num_speculative_tokens drafted tokens by request; requests without a draft may be missing. Empty for
            good once the drafter has raised.

        Raises:
            Exception: what the drafter raised, where other ranks go on drafting: their tokens would part from ours.
        """
        if not self.enabled:
            self._last_call = self._drafts = None
            return {}
        if self.budget is not None and self._last_call is None:  # vLLM settles them after the engine's parts are made
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
        """End speculation, as the drafter has raised: it may be anybody's, and no fault of its may end a run.

        Raises:
            Exception: `error`, where other ranks go on drafting.
        """
        if self._agree is not None:
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
            self._ask("begin_policy_version", version)

    def memory_bytes(self) -> int:
        """Bytes that the drafter holds; 0 once it has raised."""
        return 0 if self.broken else int(self._ask("memory_bytes") or 0)

    def source_counts(self) -> dict[str, list[int]]:
        """By source, drafted tokens that the target reached and those that were right; empty where it does not tell."""
        if self.broken or not hasattr(self.drafter, "source_counts"):
            return {}
        counts = self._ask("source_counts") or {}
        return {name: list(values) for name, values in counts.items()}

    def _ask(self, method: str, *args: Any) -> Any:
        """Call the drafter outside of a step. None if it raises."""
        try:
            return getattr(self.drafter, method)(*args)
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
            if self.budget is not None:
                problem, prompt_size = self._problems.pop(req_id)
                if req_id in self._complete:  # an aborted one says nothing about lengths
                    self.budget.lengths.observe(problem, self.live[req_id] - prompt_size)
            del self.live[req_id]
            self._complete.discard(req_id)
            self._stop_searches.pop(req_id, None)
        self._observe(outcomes, updates)
        req_ids, room, left, num_live = [], [], [], 0
        for req_id, request, tokens in updates:
            to_come = self._advance(req_id, request, tokens)
            num_live += to_come > 0
            if to_come > 1:  # the target's own sample is the last token, and needs no draft
                req_ids.append(req_id)
                in_model = self._max_model_len - self.live[req_id] - 1
                room.append(min(self._config.num_speculative_tokens, to_come - 1, in_model))
                left.append(to_come)
        # As many prompt tokens as in half of the last steps: sizes that no step has cannot be measured.
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
                max_slots=self._max_step_tokens - num_tokens,
            ).tolist()
        self._draft_seconds = time.perf_counter() - started
        self._drafts = _Drafts({req_id: row for row, req_id in enumerate(req_ids)}, confidence, starts)
        return {req_id: Proposal(draft.token_ids, n) for req_id, draft, n in zip(req_ids, drafts, sizes, strict=True)}

    def _check(
        self, drafts: Sequence[Draft], sizes: Sequence[int], confidence: NDArray[np.float32], room: Sequence[int]
    ) -> None:
        """Raise ValueError if a drafter, which may be anybody's, proposes what cannot be verified."""
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
        """Tell drafter and budget what became of the last drafts, whatever was verified of them."""
        drafts, self._drafts = self._drafts, None
        learnt = {req_id: outcome for req_id, outcome in outcomes.items() if req_id in self.live}
        if drafts is not None:
            for req_id, _, tokens in updates:
                # The target's next token says something about a draft that was not verified, too.
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
        of_requests = [self._problems[req_id] for req_id in req_ids]
        so_far = [
            self.live[req_id] - prompt_size for req_id, (_, prompt_size) in zip(req_ids, of_requests, strict=True)
        ]
        problems = [problem for problem, _ in of_requests]
        return budget.lengths.predict(problems, np.array(so_far, np.int64), np.array(left, np.int64))

    def _time_step(
        self,
        now: float,
        outcomes: Mapping[str, Outcome],
        updates: Sequence[tuple[str, Any, Sequence[int]]],
        num_step_tokens: int,
        step_started: float,
    ) -> None:
        """Learn what the step that ended took: from the last call to this one."""
        last, self._last_call = self._last_call, now
        slots = sum(outcome.num_verified for outcome in outcomes.values())
        num_prompt_tokens = max(num_step_tokens - len(updates) - slots, 0)
        self._prompt_tokens.append(num_prompt_tokens)
        if last is None or not any(req_id in self.live for req_id, _, _ in updates):
            self._stats.step_seconds += now - step_started  # the engine may have been idle before
            return
        took = now - last
        self._stats.record_time(
            took,
            num_requests=len(updates),
            draft_tokens=slots,
            tokens=sum(len(tokens) for _, _, tokens in updates),
            draft_seconds=self._draft_seconds,
            reads_prompts=num_prompt_tokens > 0,
        )
        if self.budget is None:
            return
        self._unshared.append(_Step(num_step_tokens, took, slots > 0, self._draft_seconds, self._num_asked))
        if self._agree is not None:
            if len(self._unshared) < STEPS_PER_AGREEMENT:
                return
            seconds = self._agree([value for step in self._unshared for value in (step.seconds, step.draft_seconds)])
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
        """Show the drafter a request's new tokens. Returns how many more may come, 0 when it is complete."""
        params = request.sampling_params
        prompt_size = len(request.prompt_token_ids)
        if req_id not in self.live:
            problem_id = problem_id_of(request)
            if self.budget is not None:
                problem = problem_of_prompt(request.prompt_token_ids) if problem_id is None else problem_id
                self._problems[req_id] = (problem, prompt_size)
            has_dice = params.temperature > 0 and self._config.verify == "sample"
            self.drafter.start_request(
                req_id,
                np.array(request.prompt_token_ids, np.int32),
                problem_id=problem_id,
                seed=params.seed if has_dice else None,
            )
            self.live[req_id] = prompt_size
        if req_id not in self._complete:
            num_output = self.live[req_id] - prompt_size
            kept = trim_at_end(tokens, num_output, params)
            is_last = bool(kept) and _is_last(kept[-1], num_output + len(kept), params)
            if params.stop and kept:
                num_kept = self._find_stop_string(req_id, request, kept, num_output)
                if num_kept is not None:
                    kept, is_last = kept[:num_kept], True
            self.drafter.extend(req_id, kept)
            self.live[req_id] += len(kept)
            if is_last:
                self._complete.add(req_id)
        if req_id in self._complete:
            return 0
        return int(params.max_tokens) - (self.live[req_id] - prompt_size)

    def _find_stop_string(self, req_id: str, request: Any, tokens: Sequence[int], num_before: int) -> int | None:
        """How many of a request's new tokens, after `num_before`, lead up to its stop string; None without one."""
        if req_id not in self._stop_searches:
            from rollout_spec.integrations.stop_strings import StopStringSearch  # brings vLLM and the tokenizer

            self._stop_searches[req_id] = StopStringSearch(self._vllm_config.model_config, request)
        stops = ends_with_stop_token(tokens, request.sampling_params, num_before)
        return self._stop_searches[req_id].find(tokens, ends_with_stop_token=stops)
