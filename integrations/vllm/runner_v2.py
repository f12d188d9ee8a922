"""Speculation in vLLM's V2 model runner: the speculator that vLLM calls, and the sampler in place of vLLM's.

One engine step: vLLM runs the target over every scheduled token and hands the logits to `VerifyingSampler`, which
replaces both of vLLM's samplers and verifies the drafts with Triton kernels; then vLLM records the sampled tokens and
calls `HostSpeculator.propose`, which copies the outcome to the host, tells the drafter and returns the next drafts.
That drafter lives on the host, so scheduling is synchronous; the scheduler is told each draft's length, so that a
request without a draft costs one token. `device.py` has the speculator that keeps scheduling asynchronous.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters.host.step import NO_FEATURES, Sampled
from rollout_spec.features.format import FEATURE_WORDS
from rollout_spec.integrations.vllm.config import config_of
from rollout_spec.integrations.vllm.ranks import sharing_from_first_rank
from rollout_spec.integrations.vllm.runner import RunnerAdapter
from rollout_spec.integrations.vllm.sampling import (
    keep_broken,
    needs_processing,
    raise_if_broken,
    require_seed,
    scored_tokens,
    verifier_scores,
)
from rollout_spec.integrations.vllm.session import HostSession
from rollout_spec.transfers import HostCopy, upload
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, Drafts, VerifyResult
from rollout_spec.verify import kernel
from rollout_spec.verify.layout import Layout
from rollout_spec.verify.reference import scaled


class _Verified(NamedTuple):
    """The last verification."""

    req_ids: list[str]
    starts: np.ndarray  # int32 [B + 1], each request's first row, then N
    first_positions: torch.Tensor  # int64 [B], input position of each request's first row
    result: VerifyResult


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
        speculator: A `HostSpeculator`, a `DeviceSpeculator` or a `ModelSpeculator`; None for an engine without
            speculation, which samples with our noise only.
        host_speculator: The same, if it is a `HostSpeculator`.
    """

    def __init__(self, runner: Any, config: RolloutSpecConfig) -> None:
        self._hidden: torch.Tensor | None = None  # of the step's tokens
        self.speculator: Any = runner.speculator
        self.host_speculator = self.speculator if isinstance(self.speculator, HostSpeculator) else None
        super().__init__(runner, config, None if self.speculator is None else self.speculator.session)

    def finish_counting(self) -> None:
        """See `RunnerAdapter`."""
        self._runner.sampler.read_counts(wait=True)

    def on_forward(self) -> None:
        """See `RunnerAdapter`. Keeps the step's hidden states."""
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
        """See `RunnerAdapter`. Replaces the runner's samplers, which exist by now."""
        super().on_load()
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

    def cut_drafts(self, drafts: Any) -> Any:
        """Cut the scheduler's drafts to their own lengths; vLLM would verify K tokens for every request."""
        if self.host_speculator is None:
            return drafts
        lengths = self.host_speculator.num_draft_tokens
        both = zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        cut = [tokens[: lengths.get(req_id, 0)] for req_id, tokens in both]
        return type(drafts)(drafts.req_ids, cut)


class VerifyingSampler:
    """Replaces vLLM's `Sampler` and `RejectionSampler`. Other attributes and methods are those of vLLM's `Sampler`.

    Args:
        inner: vLLM's `Sampler`, which holds the requests' sampling parameters.

    Attributes:
        outcome: Of the last step, until the host's speculator reads it.
        features: Of the last step's rows, until the adapter's `take_features` reads them; None where the drafter has no
            use for them.
    """

    enable_adaptive_verification = False

    def __init__(self, inner: Any, adapter: RunnerAdapterV2) -> None:
        self.inner = inner
        self.outcome: _Verified | None = None
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
        self._adapter.clock.mark()
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
            after_difference=self._adapter.wants_rejected_targets,
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
            input_batch.expanded_idx_mapping,
            input_batch.expanded_local_pos,
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
        """Keep the outcome for the speculator on the host; where there is none, copy its numbers to be counted."""
        if self._adapter.host_speculator is not None:
            positions = layout.position.index_select(0, layout.starts[:-1])
            self.outcome = _Verified(input_batch.req_ids, input_batch.cu_num_logits_np, positions, result)
            return
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


class HostSpeculator(BaseSpeculator):
    """vLLM's speculator around a `HostSession`.

    Attributes:
        session: Drafts.
        num_draft_tokens: Length of each request's last draft, by id; requests without a draft may be missing.
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        config = config_of(vllm_config)
        assert config is not None
        share = sharing_from_first_rank(vllm_config)
        self.session = HostSession(config, vllm_config, share, index_late=device.type != "cpu")
        self.num_draft_tokens: dict[str, int] = {}
        self._device = device
        self._runner: Any = None

    def bind(self, runner: Any) -> None:
        """Give the speculator the runner it serves."""
        self._runner = runner

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Part of vLLM's interface; nothing runs in graphs."""

    def capture(self) -> None:
        """Part of vLLM's interface; nothing runs in graphs."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft for the next step: int64 [B, K], of which the first `num_draft_tokens` of each request count.

        See vLLM for the arguments.
        """
        drafts = np.zeros((input_batch.num_reqs, self.session.num_speculative_tokens), np.int64)
        sampler, self.num_draft_tokens = self._runner.sampler, {}
        outcome, sampler.outcome = sampler.outcome, None
        if outcome is not None:  # a step, and none of vLLM's made-up batches
            batch_rows, proposed = self._draft(outcome, num_sampled, int(input_batch.num_tokens))
            drafts[batch_rows] = proposed.token_ids
            names = [outcome.req_ids[row] for row in batch_rows.tolist()]
            self.num_draft_tokens = dict(zip(names, proposed.lengths.tolist(), strict=True))
        return upload(drafts, self._device)

    def _draft(
        self, outcome: _Verified, num_sampled: torch.Tensor, num_step_tokens: int
    ) -> tuple[NDArray[np.int64], Drafts]:
        """Copy the outcome to the host, the step's only wait for the device, and draft with the session.

        Returns:
            (rows of the batch, int64 [R]; their drafts).
        """
        result, starts, size = outcome.result, outcome.starts.astype(np.int64), len(outcome.req_ids)
        session, adapter = self.session, self._runner.rollout_spec
        wants_targets, features = adapter.wants_rejected_targets, adapter.take_features()
        copy = HostCopy(
            (
                result.output_token_ids,
                result.num_accepted,
                result.num_broken_rows,
                num_sampled[:size],
                outcome.first_positions,
                *((result.target_token_ids,) if wants_targets else ()),
                *(() if features is None else (features,)),
            )
        )
        session.update_index()
        tokens, accepted, broken, num_new, positions, *more = copy.read()
        raise_if_broken(broken, outcome.req_ids)
        batch_rows = np.flatnonzero(num_new)  # not the chunks of prompts
        verified = np.diff(starts) - 1
        session.stats.record(verified[batch_rows], accepted[batch_rows])
        if not session.is_learning:
            return batch_rows, session.drafting.no_drafts(batch_rows.size)
        rows = session.rows_of([outcome.req_ids[row] for row in batch_rows.tolist()])
        batch_rows, rows = batch_rows[rows >= 0], rows[rows >= 0]
        texts = np.maximum(tokens, 0).astype(np.int32).reshape(size, -1)
        targets = more.pop(0) if wants_targets else None
        sampled = Sampled(
            rows,
            batch_rows,
            texts,
            positions + 1,
            (positions + 1 + num_new).astype(np.int32),
            verified,
            accepted,
            starts,
            more[0].reshape(-1, FEATURE_WORDS) if more else NO_FEATURES,
        )
        drafts = session.draft(sampled, num_step_tokens=num_step_tokens, began=adapter.clock.started, targets=targets)
        return batch_rows, drafts
