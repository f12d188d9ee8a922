"""What vLLM's two model runners share: the drafter of an engine and what it is told about the requests."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters import DRAFTERS, build_drafter
from rollout_spec.noise import derive_seed
from rollout_spec.stats import SpeculationStats

logger = logging.getLogger(__name__)


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


class DraftingSession:
    """An engine's drafter, which outlives the batches: requests are told apart by their ids.

    Attributes:
        live: By request, the tokens that the drafter has seen, prompt included. A request leaves when it is named as
            ended.
        enabled: Whether anything is indexed and drafted; False after the drafter has raised.

    Raises:
        ValueError, TypeError: the drafter is unknown, or its options are wrong.
    """

    def __init__(self, config: RolloutSpecConfig, model_config: Any, stats: SpeculationStats) -> None:
        options = {"max_draft_tokens": config.num_speculative_tokens} if config.drafter in DRAFTERS else {}
        self.drafter = build_drafter(config.drafter, **{**options, **config.drafter_options})
        self.live: dict[str, int] = {}
        self.enabled = True
        self._config = config
        self._max_model_len = int(model_config.max_model_len)
        self._vocab_size = int(model_config.get_vocab_size())
        self._stats = stats
        self._complete: set[str] = set()  # live requests whose last token has been sampled

    def num_seen(self, req_id: str, request: Any) -> int:
        """Tokens of a request, prompt included, that need not be shown again."""
        return self.live.get(req_id, len(request.prompt_token_ids))

    def draft(
        self,
        ended: Iterable[str],
        outcomes: Mapping[str, tuple[list[int], int]],
        updates: Sequence[tuple[str, Any, Sequence[int]]],
    ) -> dict[str, list[int]]:
        """Draft for the next step.

        Args:
            ended: Requests of `live` that are over.
            outcomes: What became of the last drafts: (the target's tokens at the drafted positions, accepted drafts).
            updates: (id, vLLM's request, its tokens after those seen) of each request to draft for. A request has
                `prompt_token_ids`, `sampling_params`, `lora_request` and `mm_features`.

        Returns:
            Drafted tokens by request, at most num_speculative_tokens each; requests without a draft may be missing.
            Empty for good once the drafter has raised.
        """
        if not self.enabled:
            return {}
        started = time.perf_counter()
        try:
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
            del self.live[req_id]
            self._complete.discard(req_id)
        outcomes = {req_id: outcome for req_id, outcome in outcomes.items() if req_id in self.live}
        if outcomes:
            self.drafter.observe(
                list(outcomes),
                [targets for targets, _ in outcomes.values()],
                np.array([accepted for _, accepted in outcomes.values()], np.int32),
            )
        req_ids, room = [], []
        for req_id, request, tokens in updates:
            left = self._advance(req_id, request, tokens)
            if left > 1:  # the target's own sample is the last token, and needs no draft
                req_ids.append(req_id)
                in_model = self._max_model_len - self.live[req_id] - 1
                room.append(min(self._config.num_speculative_tokens, left - 1, in_model))
        drafts = self.drafter.propose(req_ids, np.array(room, np.int32))
        for draft, limit in zip(drafts, room, strict=True):
            ids = draft.token_ids
            if len(ids) > max(limit, 0) or np.any((ids < 0) | (ids >= self._vocab_size)):
                raise ValueError(f"drafted {ids}, where {limit} tokens below {self._vocab_size} were asked for")
        return {req_id: draft.token_ids.tolist() for req_id, draft in zip(req_ids, drafts, strict=True)}

    def _advance(self, req_id: str, request: Any, tokens: Sequence[int]) -> int:
        """Show the drafter a request's new tokens. Returns how many more may come, 0 when it is complete."""
        params = request.sampling_params
        prompt_size = len(request.prompt_token_ids)
        if req_id not in self.live:
            has_dice = params.temperature > 0 and self._config.verify == "sample"
            self.drafter.start_request(
                req_id,
                np.array(request.prompt_token_ids, np.int32),
                problem_id=problem_id_of(request),
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
