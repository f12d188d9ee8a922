"""What vLLM's two model runners share: the drafter of an engine and what it is told about the requests."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget import Budget
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters import DRAFTERS, build_drafter
from rollout_spec.drafters.base import problem_of_prompt
from rollout_spec.noise import derive_seed
from rollout_spec.stats import SpeculationStats
from rollout_spec.types import Draft

logger = logging.getLogger(__name__)

STEPS_PER_AGREEMENT = 16
"""Steps after which ranks agree on what they took."""


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
        or getattr(params, "thinking_token_budget", None) is not None
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
    """The problem of a request: the caller's `extra_args["rollout_spec"]["problem_id"]`, or what shapes its outputs.

    None leaves the choice to the drafter, which hashes the prompt; adapters and images are hashed with it here.
    """
    extra = (request.sampling_params.extra_args or {}).get("rollout_spec") or {}
    if (given := extra.get("problem_id")) is not None:
        return int(given)
    if request.lora_request is None and not request.mm_features:
        return None
    prompt = hashlib.blake2b(np.asarray(request.prompt_token_ids, np.int32).tobytes(), digest_size=16).hexdigest()
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    return derive_seed(prompt, adapter, *(str(feature.identifier) for feature in request.mm_features or ()))


def _padded(rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Rows of different lengths as one matrix, 0 behind their ends."""
    matrix = np.zeros((len(rows), max(map(len, rows), default=0)))
    for i, row in enumerate(rows):
        matrix[i, : len(row)] = row
    return matrix


def _is_last(token_id: int, num_output_tokens: int, params: Any) -> bool:
    """Whether the scheduler ends a request here. Stop strings are the front end's affair."""
    if num_output_tokens >= params.max_tokens:
        return True
    stops = token_id == params.eos_token_id or token_id in (params.stop_token_ids or ())
    return stops and num_output_tokens >= params.min_tokens


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


class _Proposal(NamedTuple):
    """What the drafter proposed for a request, and how much of it the budget left."""

    confidence: NDArray[np.float32]
    num_verified: int


class DraftingSession:
    """An engine's drafter and its budget, which outlive the batches: requests are told apart by their ids.

    Attributes:
        live: By request, the tokens that the drafter has seen, prompt included. A request leaves when it is named as
            ended.
        enabled: Whether anything is indexed and drafted; False after the drafter has raised.
        budget: What decides how much of each draft is verified; None: all of it.

    Args:
        agree: Makes a list of numbers that ranks measured the same on all of them. Ranks must draft alike.

    Raises:
        ValueError, TypeError: the drafter is unknown, or its options are wrong.
    """

    def __init__(
        self,
        config: RolloutSpecConfig,
        model_config: Any,
        stats: SpeculationStats,
        agree: Callable[[list[float]], list[float]] | None = None,
    ) -> None:
        options = {"max_draft_tokens": config.num_speculative_tokens} if config.drafter in DRAFTERS else {}
        self.drafter = build_drafter(config.drafter, **{**options, **config.drafter_options})
        self.live: dict[str, int] = {}
        self.enabled = True
        self._config = config
        self._max_model_len = int(model_config.max_model_len)
        self._vocab_size = int(model_config.get_vocab_size())
        self._stats = stats
        self._complete: set[str] = set()  # live requests whose last token has been sampled
        self.budget = Budget() if config.budget else None
        self._agree = agree
        self._proposals: dict[str, _Proposal] = {}
        self._problems: dict[str, tuple[int, int]] = {}  # by live request, for the budget: (problem, prompt's length)
        self._last_call: float | None = None
        self._unshared: list[tuple[int, float, bool]] = []

    def num_seen(self, req_id: str, request: Any) -> int:
        """Tokens of a request, prompt included, that need not be shown again."""
        return self.live.get(req_id, len(request.prompt_token_ids))

    def draft(
        self,
        ended: Iterable[str],
        outcomes: Mapping[str, tuple[list[int], int]],
        updates: Sequence[tuple[str, Any, Sequence[int]]],
        *,
        reads_prompts: bool = False,
    ) -> dict[str, list[int]]:
        """Draft for the next step. Called once per step.

        Args:
            ended: Requests of `live` that are over.
            outcomes: What became of the last drafts: (the target's tokens at the drafted positions, accepted drafts).
            updates: (id, vLLM's request, its tokens after those seen) of each request to draft for. A request has
                `prompt_token_ids`, `sampling_params`, `lora_request` and `mm_features`.
            reads_prompts: Whether the step that ended also read prompts that go on.

        Returns:
            Drafted tokens by request, at most num_speculative_tokens each; requests without a draft may be missing.
            Empty for good once the drafter has raised.
        """
        if not self.enabled:
            return {}
        started = time.perf_counter()
        try:
            if self.budget is not None:
                self._time_step(self.budget, started, updates, reads_prompts)
            return self._draft(ended, outcomes, updates)
        except Exception:  # a drafter may be anybody's, and no fault of its may end a run
            self.enabled = False
            self._stats.drafter_errors += 1
            logger.exception("the drafter raised: speculation is off from here on, sampling goes on unchanged")
            return {}
        finally:
            self._stats.draft_seconds += time.perf_counter() - started

    def _draft(
        self,
        ended: Iterable[str],
        outcomes: Mapping[str, tuple[list[int], int]],
        updates: Sequence[tuple[str, Any, Sequence[int]]],
    ) -> dict[str, list[int]]:
        for req_id in ended:
            self.drafter.stop_request(req_id)
            if self.budget is not None:
                problem, prompt_size = self._problems.pop(req_id)
                self.budget.lengths.observe(problem, self.live[req_id] - prompt_size)
            del self.live[req_id]
            self._complete.discard(req_id)
            self._proposals.pop(req_id, None)
        self._observe(outcomes, updates)
        req_ids, room, left = [], [], []
        for req_id, request, tokens in updates:
            to_come = self._advance(req_id, request, tokens)
            if to_come > 1:  # the target's own sample is the last token, and needs no draft
                req_ids.append(req_id)
                in_model = self._max_model_len - self.live[req_id] - 1
                room.append(min(self._config.num_speculative_tokens, to_come - 1, in_model))
                left.append(to_come)
        if self.budget is not None and not self.budget.wants_drafts():
            return {}
        drafts = self.drafter.propose(req_ids, np.array(room, np.int32))
        for draft, limit in zip(drafts, room, strict=True):
            ids = draft.token_ids
            if len(ids) > max(limit, 0) or np.any((ids < 0) | (ids >= self._vocab_size)):
                raise ValueError(f"drafted {ids}, where {limit} tokens below {self._vocab_size} were asked for")
        lengths = [len(draft.token_ids) for draft in drafts]
        if self.budget is not None:
            lengths = self._cut(self.budget, req_ids, drafts, left)
        self._proposals = {
            req_id: _Proposal(draft.confidence, n)
            for req_id, draft, n in zip(req_ids, drafts, lengths, strict=True)
            if len(draft.token_ids)
        }
        return {req_id: draft.token_ids[:n].tolist() for req_id, draft, n in zip(req_ids, drafts, lengths, strict=True)}

    def _observe(
        self,
        outcomes: Mapping[str, tuple[list[int], int]],
        updates: Sequence[tuple[str, Any, Sequence[int]]],
    ) -> None:
        """Tell drafter and budget what became of the last drafts, whatever was verified of them."""
        learnt = {req_id: outcome for req_id, outcome in outcomes.items() if req_id in self.live}
        for req_id, _, tokens in updates:
            # The target's next token says something about a draft that was not verified, too.
            if req_id in self._proposals and req_id not in learnt and req_id in self.live and len(tokens):
                learnt[req_id] = ([int(tokens[0])], 0)
        proposals, self._proposals = self._proposals, {}
        if not learnt:
            return
        accepted = np.array([n for _, n in learnt.values()], np.int32)
        self.drafter.observe(list(learnt), [targets for targets, _ in learnt.values()], accepted)
        if self.budget is not None:
            rows = [(proposals[req_id], n) for req_id, (_, n) in learnt.items() if req_id in proposals]
            if rows:
                confidence = _padded([proposal.confidence for proposal, _ in rows])
                verified = np.array([proposal.num_verified for proposal, _ in rows], np.int64)
                self.budget.survival.observe(confidence, verified, np.array([n for _, n in rows], np.int64))

    def _cut(self, budget: Budget, req_ids: Sequence[str], drafts: Sequence[Draft], left: Sequence[int]) -> list[int]:
        """How many tokens of each draft to verify."""
        if not req_ids:
            return []
        expected = []
        for req_id, at_most in zip(req_ids, left, strict=True):
            problem, prompt_size = self._problems[req_id]
            expected.append(budget.lengths.predict(problem, self.live[req_id] - prompt_size, at_most))
        mean, deviation = np.array(expected).T
        lengths = np.array([len(draft.token_ids) for draft in drafts], np.int64)
        confidence = _padded([draft.confidence for draft in drafts])
        taken: list[int] = budget.decide(confidence, lengths, (mean, deviation)).tolist()
        return taken

    def _time_step(
        self, budget: Budget, now: float, updates: Sequence[tuple[str, Any, Sequence[int]]], reads_prompts: bool
    ) -> None:
        """Learn what the step that ended took: from the last call to this one, if the same requests went on."""
        last, self._last_call = self._last_call, now
        if last is None or reads_prompts or not updates or any(req_id not in self.live for req_id, _, _ in updates):
            return
        slots = sum(self._proposals[req_id].num_verified for req_id, _, _ in updates if req_id in self._proposals)
        self._unshared.append((len(updates) + slots, now - last, slots > 0))
        if self._agree is None:
            steps, self._unshared = self._unshared, []
        elif len(self._unshared) < STEPS_PER_AGREEMENT:
            return
        else:
            seconds = self._agree([took for _, took, _ in self._unshared])
            steps = [(n, s, drafted) for (n, _, drafted), s in zip(self._unshared, seconds, strict=True)]
            self._unshared = []
        for num_tokens, took, drafted in steps:
            budget.cost.observe(num_tokens, took, drafted=drafted)

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
            self.drafter.extend(req_id, kept)
            num_output += len(kept)
            self.live[req_id] = prompt_size + num_output
            if len(kept) < len(tokens) or (kept and _is_last(kept[-1], num_output, params)):
                self._complete.add(req_id)
        if req_id in self._complete:
            return 0
        return int(params.max_tokens) - (self.live[req_id] - prompt_size)


def run_command(session: Any, stats: SpeculationStats, name: str, *args: Any) -> Any:
    """Run a front end's command on a worker: stats, set_enabled(bool) or begin_policy_version(int).

    Args:
        session: What has a `drafter` and can be `enabled`; None for an engine without speculation.

    Raises:
        ValueError: the name is unknown, or the engine was built without speculation.
    """
    if name == "stats":
        memory = session.drafter.memory_bytes() if session is not None else 0
        return {**stats.to_dict(), "drafter_bytes": memory}
    if name not in ("set_enabled", "begin_policy_version"):
        raise ValueError(f"unknown rollout_spec command {name!r}")
    if session is None:
        raise ValueError(f"{name}: this engine was built with speculation=False")
    if name == "set_enabled":
        session.enabled = bool(*args)
        return None
    return session.drafter.begin_policy_version(*args)
