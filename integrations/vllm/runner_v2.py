"""Verification in vLLM's V2 model runner: the sampler in place of vLLM's, and the adapter that brings it there.

One engine step: vLLM runs the target over every scheduled token and hands the logits to `VerifyingSampler`, which
replaces both of vLLM's samplers and verifies the drafts with Triton kernels; then vLLM records the sampled tokens and
calls the speculator, which drafts for the next step: `device.py`, and beside a model `hybrid.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from rollout_spec.config import RolloutSpecConfig
from rollout_spec.integrations.vllm.runner import RunnerAdapter
from rollout_spec.integrations.vllm.sampling import (
    keep_broken,
    needs_processing,
    raise_if_broken,
    require_seed,
    scored_tokens,
    verifier_scores,
)
from rollout_spec.transfers import HostCopy
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, VerifyResult
from rollout_spec.verify import kernel
from rollout_spec.verify.reference import Layout, scaled


class _Asked(NamedTuple):
    """What the requests of a step ask of sampling."""

    req_indices: np.ndarray  # integer [B]
    is_below_min_tokens: bool
    is_processed: bool  # vLLM's own processors come before the verifier
    num_logprobs: int  # most probable tokens besides the sampled one; -1: nothing is scored
    num_custom_ids: int  # tokens that requests name to be scored, at most
    scored_here: bool  # by the verifier; where other tokens than the sampled one are scored, by vLLM's code


class _Uncounted(NamedTuple):
    """A verification's numbers, which are being copied to the host."""

    copy: HostCopy  # broken rows, accepted drafts, rows, [B] each
    has_sampled: np.ndarray  # bool [B], False for prompts not yet read to their end
    req_ids: list[str]


class RunnerAdapterV2(RunnerAdapter):
    """Follows one V2 model runner's requests, whose samplers it replaces.

    Attributes: those of `RunnerAdapter`, and
        speculator: A `DeviceSpeculator` or a `ModelSpeculator`; None for an engine without speculation, which samples
            with our noise only.
    """

    def __init__(self, runner: Any, config: RolloutSpecConfig) -> None:
        self._hidden: torch.Tensor | None = None  # of the step's tokens
        self.speculator: Any = runner.speculator
        super().__init__(runner, config, None if self.speculator is None else self.speculator.session)

    def finish_counting(self) -> None:
        self._runner.sampler.read_counts(wait=True)

    def on_forward(self) -> None:
        """Keeps the step's hidden states."""
        super().on_forward()
        state = self._runner.execute_model_state
        keeps = self.wants_features and not self.warming_up and state is not None
        self._hidden = state.hidden_states if keeps else None

    def is_serving(self, req_ids: Sequence[str]) -> bool:
        """Whether a batch is of the step that was scheduled, and no made-up one."""
        scheduled = self.scheduled
        return not self.warming_up and scheduled is not None and req_ids[0] in scheduled.num_scheduled_tokens

    def take_hidden(self, input_batch: Any) -> torch.Tensor | None:
        """The states that the step's logits were computed from, [N, hidden size]; None if features are not wanted."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            return None
        num_rows = input_batch.logits_indices.shape[0]
        if num_rows == input_batch.num_tokens:  # every token has logits; what follows pads the batch
            return hidden[:num_rows]
        return hidden[input_batch.logits_indices]

    def take_features(self) -> torch.Tensor | None:
        """What the target saw at the step's rows, int64 [N, FEATURE_WORDS]; None if features are not wanted."""
        sampler = self._runner.sampler
        features, sampler.features = sampler.features, None
        return None if features is None else self._from_first_rank(features)  # ranks round sums differently

    def on_load(self) -> None:
        """Replaces the runner's samplers, which exist by now."""
        runner = self._runner
        sampler = VerifyingSampler(runner.sampler, self)
        runner.sampler = sampler
        sampler.enable_adaptive_verification = getattr(self.speculator, "enable_adaptive_verification", False)
        if runner.rejection_sampler is not None:
            runner.rejection_sampler = sampler
        if self.speculator is not None:
            self.speculator.bind(runner)
            map_adapters = runner.lora_state.make_lora_inputs
            runner.lora_state.make_lora_inputs = lambda req_ids, *args: self._with_adapters_of_rows(
                req_ids, *map_adapters(req_ids, *args)
            )

    def _with_adapters_of_rows(self, req_ids: Sequence[str], adapters: Any, *more: Any) -> tuple[Any, ...]:
        """vLLM's V2 runner names an adapter per request for the LM head, which has a row per drafted token as well."""
        drafts = self.scheduled.scheduled_spec_decode_tokens
        counts = [1 + len(drafts.get(req_id, ())) for req_id in req_ids]
        return tuple(np.repeat(adapters, counts).tolist()), *more


class VerifyingSampler:
    """Replaces vLLM's `Sampler` and `RejectionSampler`. Other attributes and methods are those of vLLM's `Sampler`.

    Args:
        inner: vLLM's `Sampler`, which holds the requests' sampling parameters.

    Attributes:
        features: Of the last step's rows, until the adapter's `take_features` reads them; None where the drafter has no
            use for them.
    """

    enable_adaptive_verification = False

    def __init__(self, inner: Any, adapter: RunnerAdapterV2) -> None:
        self.inner = inner
        self.features: torch.Tensor | None = None
        self._adapter = adapter
        self._own_processors = any(not type(p).__module__.startswith("vllm.") for p in inner.logits_processors)
        self._needs_vllm: np.ndarray = np.zeros(inner.sampling_states.max_num_reqs, bool)
        self._min_tokens: np.ndarray = np.zeros(self._needs_vllm.size, np.int64)
        self._num_steps: np.ndarray = np.zeros(self._needs_vllm.size, np.int64)
        """A lower bound on each request's output tokens: counted only in steps in which a request is below its
        `min_tokens`, and from 0 again after a preemption."""
        self._asked: _Asked | None = None  # of the last step, for one of the same requests
        self._unread: deque[_Uncounted] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def add_request(self, req_idx: int, sampling_params: Any) -> Any:
        """Keep a request's sampling parameters, as vLLM's `Sampler` does.

        Raises:
            RuntimeError: the request has no seed.
        """
        if not self._adapter.warming_up:
            require_seed(sampling_params, "a request")
        self._needs_vllm[req_idx] = self._own_processors or needs_processing(sampling_params)
        self._min_tokens[req_idx], self._num_steps[req_idx] = sampling_params.min_tokens, 0
        self._asked = None
        return self.inner.add_request(req_idx, sampling_params)

    def __call__(
        self, logits: torch.Tensor, input_batch: Any, draft_logits: Any = None, invalid_drafts: Any = None
    ) -> Any:
        """Verify the scheduled drafts and sample what follows; a request without drafts has one row.

        Args:
            logits: float [N, vocabulary].
            input_batch: vLLM's `InputBatch`.
            draft_logits: Part of vLLM's interface; not used, as our drafts are point masses.
            invalid_drafts: bool [N], from vLLM 0.32 on: rows whose input is a draft that breaks the request's grammar.

        Raises:
            FloatingPointError: an earlier step's logits held NaN or +inf.
        """
        self.read_counts()
        num_nans = get_num_nans(logits) if self.inner.compute_nans else None
        asked = self._what_is_asked(input_batch.idx_mapping_np)
        is_serving = self._adapter.is_serving(input_batch.req_ids)
        hidden = self._adapter.take_hidden(input_batch) if is_serving else None
        layout, processed = self._lay_out(input_batch, invalid_drafts), logits
        if asked.is_processed:
            processed = self._process(logits, input_batch, layout)
            layout = layout.with_temperature_applied()
        result = kernel.verify_rows(
            processed,
            layout,
            method=self._adapter.config.verify,
            logprobs_mode=self.inner.logprobs_mode if asked.scored_here else None,
            hidden=hidden,
            max_draft_tokens=self._adapter.config.max_draft_tokens if input_batch.num_draft_tokens > 0 else 0,
        )
        tensors = None
        if asked.num_logprobs >= 0 or asked.num_custom_ids:
            tensors = self._logprobs(asked, result, logits, processed, input_batch, layout)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            result.num_accepted + 1,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.inner.req_states.prefill_len.gpu,
        )
        if is_serving:
            self.features = result.features
            if asked.is_below_min_tokens:
                self._num_steps[asked.req_indices] += _has_sampled(input_batch)
            self._book(input_batch, layout, result)
            self._adapter.clock.stop()
        return SamplerOutput(
            # A row without a sample emits token 0, as in vLLM.
            sampled_token_ids=result.output_token_ids.clamp(min=0).long(),
            logprobs_tensors=tensors,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _what_is_asked(self, req_indices: np.ndarray) -> _Asked:
        if self._asked is not None and np.array_equal(self._asked.req_indices, req_indices):
            return self._asked
        is_below = self._num_steps[req_indices] < self._min_tokens[req_indices]
        is_processed = bool((self._needs_vllm[req_indices] | is_below).any())
        num_logprobs = self.inner.sampling_states.max_num_logprobs(req_indices)
        num_custom_ids = self.inner.logprob_token_ids_state.max_num_token_ids(req_indices)
        scored_here = not num_custom_ids and verifier_scores(self.inner.logprobs_mode, num_logprobs, is_processed)
        asked = _Asked(
            req_indices=req_indices.copy(),
            is_below_min_tokens=bool(is_below.any()),
            is_processed=is_processed,
            num_logprobs=num_logprobs,
            num_custom_ids=num_custom_ids,
            scored_here=scored_here,
        )
        self._asked = None if asked.is_below_min_tokens else asked  # who is no longer below stays so
        return asked

    def _lay_out(self, input_batch: Any, invalid_drafts: torch.Tensor | None) -> Layout:
        layout = kernel.gather_layout(
            input_batch.input_ids,
            input_batch.positions,
            input_batch.logits_indices,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.inner.req_states.prefill_len.gpu,
            self.inner.sampling_states.temperature.gpu,
            self.inner.sampling_states.seeds.gpu,
        )
        if invalid_drafts is not None:
            layout.draft[:-1].masked_fill_(invalid_drafts[1:], PLACEHOLDER_TOKEN_ID)
        return layout

    def _process(self, logits: torch.Tensor, input_batch: Any, layout: Layout) -> torch.Tensor:
        """vLLM's own processing of a copy of the logits, float32 [N, V]: penalties, masks, temperature, truncation."""
        processed = self.inner.apply_sampling_params(
            logits,
            expanded_idx_mapping=input_batch.expanded_idx_mapping,
            idx_mapping=input_batch.idx_mapping,
            idx_mapping_np=input_batch.idx_mapping_np,
            pos=layout.position,
            input_ids=input_batch.input_ids[input_batch.logits_indices],
            expanded_local_pos=input_batch.expanded_local_pos,
            seq_lens_upper_bound_np=input_batch.seq_lens_cpu_upper_bound.numpy(),
        )
        return keep_broken(processed, logits)

    def _logprobs(
        self,
        asked: _Asked,
        result: VerifyResult,
        logits: torch.Tensor,
        processed: torch.Tensor,
        input_batch: Any,
        layout: Layout,
    ) -> LogprobsTensors:
        """The log-probabilities that requests ask for.

        Args:
            logits, processed: float [N, V], the model's and those that the verifier got.
        """
        mode, starts = self.inner.logprobs_mode, None
        if logits.shape[0] != asked.req_indices.size:
            if self.enable_adaptive_verification:  # only the device knows where drafts end; the next step writes there
                starts = input_batch.cu_num_logits.clone()
            else:
                starts = input_batch.cu_num_logits_np.tolist()
        if asked.scored_here:
            field = "cu_num_generated_tokens" + ("_tensor" if isinstance(starts, torch.Tensor) else "")
            temperature = None if mode.startswith("raw_") else layout.temperature
            tokens, logprobs = scored_tokens(result, processed, temperature, asked.num_logprobs)
            return LogprobsTensors(tokens, logprobs, result.ranks, **{field: starts})
        tensors: LogprobsTensors = compute_topk_scores(
            logits if mode.startswith("raw_") else scaled(processed, layout.temperature),
            max(asked.num_logprobs, 0),
            result.target_token_ids.clamp(min=0),
            starts,
            logprob_token_ids_state=self.inner.logprob_token_ids_state,
            expanded_idx_mapping=input_batch.expanded_idx_mapping,
            max_per_req_token_ids=asked.num_custom_ids,
            logits_mode=mode.endswith("_logits"),
        )
        return tensors

    def _book(self, input_batch: Any, layout: Layout, result: VerifyResult) -> None:
        """Copy the outcome's numbers to the host, to be counted once they have arrived."""
        # Waiting for the device would undo asynchronous scheduling. Draft lengths come from the device, too: where
        # vLLM's adaptive verification cuts drafts, the host does not know them.
        copy = HostCopy((result.num_broken_rows, result.num_accepted, layout.starts.diff()))
        self._unread.append(_Uncounted(copy, _has_sampled(input_batch), input_batch.req_ids))
        self.read_counts()

    def read_counts(self, *, wait: bool = False) -> None:
        """Count the verifications whose numbers have arrived from the device, or wait for all of them.

        Raises:
            FloatingPointError: a row had no sample because the model's logits are NaN or +inf.
        """
        while self._unread and (wait or self._unread[0].copy.has_arrived()):
            counts = self._unread.popleft()
            broken, accepted, num_rows = counts.copy.read()
            raise_if_broken(broken, counts.req_ids)
            rows = counts.has_sampled
            self._adapter.stats.record(num_rows[rows] - 1, accepted[rows])


def _has_sampled(input_batch: Any) -> np.ndarray:
    """bool [B], False for prompts not yet read to their end."""
    num_read: np.ndarray = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
    return num_read >= input_batch.prefill_len_np
