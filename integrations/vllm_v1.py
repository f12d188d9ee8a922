"""Speculation in vLLM's V1 model runner: the proposer that vLLM calls, and the adapter that takes over sampling.

One engine step: vLLM runs the target over every scheduled token and hands the logits to `RunnerAdapter.sample`, which
verifies the drafts; after vLLM has booked the sampled tokens it calls `RolloutSpecProposer.propose`, which tells the
drafter what became of its drafts, indexes the new tokens and returns the next drafts.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters import build_drafter
from rollout_spec.integrations import vllm_cpu
from rollout_spec.noise import derive_seed
from rollout_spec.stats import SpeculationStats
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, SamplingRows, VerifyResult
from rollout_spec.verify.api import verify
from rollout_spec.verify.vectorised import logprobs_matrix

logger = logging.getLogger(__name__)


def uncovered_parameters(params: Any) -> list[str]:
    """Names of the sampling parameters that only vLLM's own sampler implements. Such requests are handed to it."""
    checks = {
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "repetition_penalty": params.repetition_penalty != 1,
        "bad_words": bool(params.bad_words),
        "allowed_token_ids": bool(params.allowed_token_ids),
        "logit_bias": bool(params.logit_bias),
        "min_tokens": params.min_tokens > 0,
        "logprob_token_ids": bool(getattr(params, "logprob_token_ids", None)),
        "thinking_token_budget": getattr(params, "thinking_token_budget", None) is not None,
        "logprobs=-1": params.logprobs == -1,
    }
    return [name for name, used in checks.items() if used]


def problem_id_of(state: Any) -> int | None:
    """The problem of a request: the caller's `extra_args["rollout_spec"]["problem_id"]`, or what shapes its outputs.

    None leaves the choice to the drafter, which hashes the prompt; adapters and images are hashed with it here.
    """
    extra = (state.sampling_params.extra_args or {}).get("rollout_spec") or {}
    if (given := extra.get("problem_id")) is not None:
        return int(given)
    if state.lora_request is None and not state.mm_features:
        return None
    prompt = hashlib.blake2b(np.asarray(state.prompt_token_ids, np.int32).tobytes(), digest_size=16).hexdigest()
    adapter = state.lora_request.lora_name if state.lora_request is not None else ""
    return derive_seed(prompt, adapter, *(str(feature.identifier) for feature in state.mm_features or ()))


def trim_at_end(token_ids: Sequence[int], num_before: int, params: Any) -> list[int]:
    """Cut newly sampled tokens where the scheduler will: a step can sample past the end of a request.

    Args:
        token_ids: New output tokens.
        num_before: Output tokens before them.
    """
    stops = {params.eos_token_id, *(params.stop_token_ids or ())}
    kept: list[int] = []
    for token in token_ids[: max(0, params.max_tokens - num_before)]:
        kept.append(int(token))
        if token in stops and num_before + len(kept) > params.min_tokens:
            break
    return kept


class _Batch(NamedTuple):
    """What does not change while the same requests are scheduled in the same rows."""

    req_ids: list[str]
    seeds: torch.Tensor  # int64 [B]
    min_p: torch.Tensor | None  # float32 [B]
    uncovered: torch.Tensor | None  # bool [B], None when all are covered
    covered_rows: list[int]


class _Outcome(NamedTuple):
    """A verification that the drafter has not heard of yet."""

    req_ids: list[str]
    num_draft_tokens: list[int]
    result: VerifyResult


class RunnerAdapter:
    """Samples in place of vLLM's samplers, for one model runner.

    Args:
        runner: vLLM's `GPUModelRunner` (V1) or a subclass; its drafter, if it has one, is a `RolloutSpecProposer`.
    """

    def __init__(self, runner: Any, config: RolloutSpecConfig) -> None:
        self._runner = runner
        self._config = config
        self._batch: _Batch | None = None
        self._invalid_rows: torch.Tensor | None = None
        self._own_logits_processors = bool(runner.model_config.logits_processors)
        self.stats = SpeculationStats()
        self.proposer: RolloutSpecProposer | None = getattr(runner, "drafter", None)
        if self.proposer is not None:
            self.proposer.bind(runner, self.stats)
        if runner.device.type == "cpu" and vllm_cpu.repair_speculation():
            logger.info("repaired vLLM's CPU rejection sampler, which loses its sampling parameters")

    # -- commands from the front end ---------------------------------------------------------------------------------

    def command(self, name: str, *args: Any) -> Any:
        """Run one of: stats, set_enabled(bool), begin_policy_version(int).

        Raises:
            ValueError: the name is unknown, or the engine was built without speculation.
        """
        if name == "stats":
            memory = self.proposer.memory_bytes() if self.proposer is not None else 0
            return {**self.stats.to_dict(), "drafter_bytes": memory}
        if name not in ("set_enabled", "begin_policy_version"):
            raise ValueError(f"unknown rollout_spec command {name!r}")
        if self.proposer is None:
            raise ValueError(f"{name}: this engine was built with speculation=False")
        return getattr(self.proposer, name)(*args)

    # -- sampling ----------------------------------------------------------------------------------------------------

    def sample(self, logits: torch.Tensor, metadata: Any, fall_back: Callable[[], Any]) -> Any:
        """Verify the scheduled drafts, or sample one token per request where there are none.

        Args:
            logits: float [N, vocabulary].
            metadata: vLLM's `SpecDecodeMetadata`, None when nothing is drafted.
            fall_back: vLLM's own sampling of the same batch. May change `logits`.

        Raises:
            FloatingPointError: logits are NaN or +inf, or all of a row's are -inf.
        """
        started = time.perf_counter()
        batch = self._describe_batch()
        sampling = self._runner.input_batch.sampling_metadata
        if not batch.covered_rows or not self._covers_logprobs(sampling):
            self.stats.fall_back(len(batch.req_ids))
            return fall_back()
        num_draft_tokens = metadata.num_draft_tokens if metadata is not None else [0] * len(batch.req_ids)
        result = self._verify(logits, metadata, sampling, batch)
        output = self._to_vllm(logits, metadata, sampling, batch, result, max(num_draft_tokens))
        if batch.uncovered is not None:
            self.stats.fall_back(len(batch.req_ids) - len(batch.covered_rows))
            output = _choose_rows(batch.uncovered, fall_back(), output)
        if self.proposer is not None:
            covered = batch.covered_rows
            self.proposer.outcome = _Outcome(
                [batch.req_ids[i] for i in covered], [num_draft_tokens[i] for i in covered], _select(result, covered)
            )
        self._check_rows(result)
        self.stats.verify_seconds += time.perf_counter() - started
        return output

    def _verify(self, logits: torch.Tensor, metadata: Any, sampling: Any, batch: _Batch) -> VerifyResult:
        size, device = len(batch.req_ids), logits.device
        if metadata is None:
            first_row = self._runner.query_start_loc.gpu[1 : size + 1] - 1
            drafted = torch.empty(0, dtype=torch.int32, device=device)
            cu_num_draft_tokens = torch.zeros(size, dtype=torch.int32, device=device)
        else:
            cu_num_draft_tokens = metadata.cu_num_draft_tokens
            ends = metadata.cu_num_sampled_tokens.long()
            starts = torch.cat((ends.new_zeros(1), ends[:-1]))
            first_row = metadata.logits_indices.long()[starts]
            drafted = metadata.draft_token_ids
        temperature = sampling.temperature
        if sampling.all_greedy or temperature is None:
            temperature = torch.zeros(size, dtype=torch.float32, device=device)
        rows = SamplingRows(
            temperature=temperature,
            seeds=batch.seeds,
            positions=self._runner.positions[first_row],
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=batch.min_p,
        )
        mode = self._logprobs_mode if sampling.max_num_logprobs is not None else None
        return verify(logits, drafted, cu_num_draft_tokens, rows, method=self._config.verify, logprobs_mode=mode)

    @property
    def _logprobs_mode(self) -> Any:
        return self._runner.sampler.logprobs_mode

    def _covers_logprobs(self, sampling: Any) -> bool:
        return sampling.max_num_logprobs is None or self._logprobs_mode in ("raw_logprobs", "processed_logprobs")

    def _describe_batch(self) -> _Batch:
        req_ids = self._runner.input_batch.req_ids
        if self._batch is not None and self._batch.req_ids == req_ids:
            return self._batch
        params = [self._runner.requests[req_id].sampling_params for req_id in req_ids]
        device = self._runner.device
        for req_id, p in zip(req_ids, params, strict=True):
            if p.seed is None:
                raise RuntimeError(
                    f"request {req_id} has no seed: it did not pass through vLLM's input processor with the "
                    "rollout_spec plugin loaded. Give it one in SamplingParams(seed=...)"
                )
        uncovered = [self._own_logits_processors or bool(uncovered_parameters(p)) for p in params]
        min_p = [p.min_p for p in params]
        self._batch = _Batch(
            req_ids=list(req_ids),
            seeds=torch.tensor([p.seed for p in params], dtype=torch.int64, device=device),
            min_p=torch.tensor(min_p, dtype=torch.float32, device=device) if any(min_p) else None,
            uncovered=torch.tensor(uncovered, device=device) if any(uncovered) else None,
            covered_rows=[i for i, skip in enumerate(uncovered) if not skip],
        )
        return self._batch

    def _to_vllm(
        self, logits: torch.Tensor, metadata: Any, sampling: Any, batch: _Batch, result: VerifyResult, longest: int
    ) -> Any:
        """Lay the result out as vLLM's samplers do: log-probabilities padded to [B * (longest + 1), ...] rows."""
        tensors = None
        if sampling.max_num_logprobs is not None:
            tokens = result.target_token_ids.clamp(min=0)
            if sampling.max_num_logprobs == 0:
                tensors = LogprobsTensors(tokens[:, None].int(), result.logprobs[:, None], result.ranks)
            else:
                matrix = logprobs_matrix(logits, self._rows_of(metadata, sampling, batch), self._logprobs_mode)
                tensors = self._runner.sampler.gather_logprobs(matrix, sampling.max_num_logprobs, tokens)
            if metadata is not None:
                tensors = _pad_rows(tensors, metadata, longest)
        return SamplerOutput(sampled_token_ids=result.output_token_ids, logprobs_tensors=tensors)

    def _check_rows(self, result: VerifyResult) -> None:
        """Raise on rows without a sample. Asynchronous scheduling must not wait: there the last step's are checked."""
        count, self._invalid_rows = self._invalid_rows, result.num_invalid_rows
        if not self._runner.use_async_scheduling:
            count = self._invalid_rows
        if count is not None and int(count):
            raise FloatingPointError(
                f"{int(count)} rows of logits are NaN, +inf or all -inf, and nothing can be sampled from them: "
                "check the weights that were last loaded into the engine"
            )


def _select(result: VerifyResult, rows: list[int]) -> VerifyResult:
    return result


class RolloutSpecProposer:
    """vLLM's `custom_class` proposer around a `Drafter`. Named by path in `speculative_config`.

    Raises:
        ValueError: the configuration is wrong; see `rollout_spec.integrations.vllm_plugin.config_of`.
    """
