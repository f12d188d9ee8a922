"""Speculation in vLLM's V1 model runner: the proposer that vLLM calls, and `EngineV1`, which owns a step.

One engine step: vLLM runs the target over every scheduled token and hands the logits to `EngineV1.sample`, which
verifies the drafts; after vLLM has recorded the sampled tokens it calls `RolloutSpecProposer.propose`, and so
`EngineV1.draft`, which tells the session what became of its drafts and what was sampled, and returns the next
drafts.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.sampling_params import SamplingType
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor

from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters.host.step import NO_FEATURES, Sampled
from rollout_spec.features import FEATURE_WORDS, Features
from rollout_spec.integrations.vllm.engine import Engine
from rollout_spec.integrations.vllm.ranks import sharing_from_first_rank
from rollout_spec.integrations.vllm.sampling import (
    keep_broken,
    needs_processing,
    raise_if_broken,
    refuse_own_processors,
    require_seed,
    scored_tokens,
    truncate,
    verifier_scores,
)
from rollout_spec.integrations.vllm.session import HostSession
from rollout_spec.transfers import HostCopy, upload
from rollout_spec.types import SamplingBatch, VerifyResult
from rollout_spec.verify.api import verify_rows
from rollout_spec.verify.reference import Layout, lay_out, scaled


class _Batch(NamedTuple):
    """What stays the same while the same requests are scheduled in the same rows."""

    req_ids: list[str]
    sampling: Any  # vLLM's `SamplingMetadata`
    rows: SamplingBatch  # how each request is sampled; without positions
    min_p: torch.Tensor | None  # float32 [B]; None: nobody asks for it
    needs_processing: bool  # some request's logits always go through vLLM's own processors
    below_min_tokens: list[Any]  # requests whose logits do so until they have `min_tokens` output tokens
    biases: dict[int, tuple[torch.Tensor, torch.Tensor]]  # by row: token ids, and what is added to their logits


class _Uncounted(NamedTuple):
    """A verification that has not been counted yet: reading it at once would make the engine wait for the device."""

    req_ids: list[str]
    is_counted: NDArray[np.bool_]  # [B], False for chunks of prompts
    num_draft_tokens: list[int]
    copy: HostCopy  # accepted drafts and broken rows, [B] each; targets [N] and features, as the drafter wants
    has_targets: bool


class EngineV1(Engine):
    """Samples in place of vLLM's samplers, for one model runner.

    Attributes: those of `Engine`, and
        session: A `HostSession`; None without speculation.

    Args:
        runner: vLLM's `GPUModelRunner` (V1) or a subclass.
    """

    def __init__(self, runner: Any, config: RolloutSpecConfig) -> None:
        self._batch: _Batch | None = None
        self._outcome: _Uncounted | None = None
        processors = list(runner.input_batch.logitsprocs.all)
        self._adds_biases = not any(isinstance(processor, LogitBiasLogitsProcessor) for processor in processors)
        self._hidden: torch.Tensor | None = None  # the states that the step's logits were computed from
        session: HostSession | None = None
        drafter = getattr(runner, "drafter", None)  # without speculation there is none
        if drafter is not None:  # made here and not by the proposer, whose errors vLLM hides behind a hint of its own
            share, late = sharing_from_first_rank(runner.vllm_config), runner.device.type != "cpu"
            session = HostSession(config, runner.vllm_config, share, index_late=late)
        super().__init__(runner, config, session)
        self.session: HostSession | None = session
        if isinstance(drafter, RolloutSpecProposer):
            drafter.engine = self
        refuse_own_processors(processors)

    def compile_kernels(self, **buffers: Any) -> None:
        """On CPUs the verifier has no kernels."""
        if self._runner.device.type == "cuda":
            super().compile_kernels(**buffers)
        self._compile_ranks()

    @torch.inference_mode()
    def _compile_ranks(self) -> None:
        """Let torch compile vLLM's ranks of tokens: the first request that vLLM's code scores would wait for that."""
        runner = self._runner
        for rows in (2, 3, 1):  # torch may compile for one size first, then for any, and for 1 apart
            scores = torch.zeros(rows, runner.model_config.get_vocab_size(), dtype=torch.float32, device=runner.device)
            runner.sampler.gather_logprobs(scores, 1, torch.zeros(rows, dtype=torch.int64, device=runner.device))

    def on_forward(self) -> None:
        """Keeps the step's hidden states."""
        super().on_forward()
        state = self._runner.execute_model_state
        self._hidden = None if state is None else state.sample_hidden_states

    def begin_step(self, scheduled: Any) -> Any:
        for request in scheduled.scheduled_new_reqs:
            params = request.sampling_params
            if params is not None and params.sampling_type == SamplingType.RANDOM_SEED:
                # No torch generator for a seed: ours uses none, and on CPUs vLLM fails with one if prompts are chunked.
                params.__dict__["sampling_type"] = SamplingType.RANDOM  # the cached value of a property
        return super().begin_step(scheduled)

    @property
    def wants_rejected_targets(self) -> bool:
        """Whether what the target samples after rejected drafts is of use to the drafter."""
        session = self.session
        return session is not None and session.is_drafter_alive and session.drafting.wants_rejected_targets

    # -- sampling ----------------------------------------------------------------------------------------------------

    def sample(self, logits: torch.Tensor, metadata: Any) -> Any:
        """Verify the scheduled drafts, or sample one token per request where there are none.

        Args:
            logits: float [N, vocabulary].
            metadata: vLLM's `SpecDecodeMetadata`, None when nothing is drafted.

        Raises:
            FloatingPointError: logits hold NaN or +inf. Where there is a drafter, `draft` raises it later in the step;
                under asynchronous scheduling the next step does.
        """
        sampling = self._runner.input_batch.sampling_metadata
        batch = self._describe_batch(sampling)
        self.finish_counting()
        num_draft_tokens = metadata.num_draft_tokens if metadata is not None else [0] * len(batch.req_ids)
        batch.below_min_tokens[:] = [
            r for r in batch.below_min_tokens if len(r.output_token_ids) < r.sampling_params.min_tokens
        ]
        is_processed = batch.needs_processing or bool(batch.below_min_tokens)
        layout, processed = self._lay_out(metadata, batch.rows), logits
        if is_processed:
            layout, processed = layout.with_temperature_applied(), self._process(logits, metadata, batch, layout)
        mode = self._runner.sampler.logprobs_mode
        scored_here = verifier_scores(mode, sampling.max_num_logprobs, is_processed)
        hidden, self._hidden = self._hidden, None
        result = verify_rows(
            processed,
            layout,
            method=self.config.verify,
            logprobs_mode=mode if scored_here else None,
            hidden=hidden if self.wants_features else None,
            after_difference=self.wants_rejected_targets,
            # Not the longest draft of the step: each width is another variant of the kernel.
            max_draft_tokens=self.config.max_draft_tokens if metadata is not None else 0,
        )
        self._book(batch, result, num_draft_tokens)
        tensors = None
        if sampling.max_num_logprobs is not None:
            tensors = self._logprobs(result, logits, processed, layout, sampling.max_num_logprobs, scored_here)
            if metadata is not None:
                tensors = _pad_rows(tensors, num_draft_tokens, result.output_token_ids.shape[1])
        sampled = _emitted(result)  # launched before the host indexes
        if self.session is not None and self.session.is_drafter_alive:
            self.session.update_index()  # before anything waits for the device; `draft` reads the outcome
        elif not self._runner.use_async_scheduling:
            self.finish_counting()
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=tensors)

    def _book(self, batch: _Batch, result: VerifyResult, num_draft_tokens: list[int]) -> None:
        """Copy what became of the drafts to the host."""
        wanted, has_targets = [result.num_accepted, result.num_broken_rows], self.wants_rejected_targets
        if has_targets:
            wanted.append(result.target_token_ids)
        if result.features is not None:
            wanted.append(self._from_first_rank(result.features))  # ranks round sums differently
        discarded = self._runner.discard_request_mask.np  # prefill chunks: nothing is sampled after them
        is_counted = ~discarded[: len(batch.req_ids)]
        self._outcome = _Uncounted(batch.req_ids, is_counted, num_draft_tokens, HostCopy(wanted), has_targets)

    def _logprobs(
        self,
        result: VerifyResult,
        raw: torch.Tensor,
        verified: torch.Tensor,
        layout: Layout,
        num_logprobs: int,
        scored_here: bool,
    ) -> LogprobsTensors:
        """The log-probabilities that requests ask for, of N rows.

        Args:
            raw, verified: float [N, V], the model's logits and those that the verifier got.
            scored_here: Whether the verifier has computed them.
        """
        mode = self._runner.sampler.logprobs_mode
        is_raw = mode.startswith("raw_")
        if scored_here:
            tokens, logprobs = scored_tokens(result, verified, None if is_raw else layout.temperature, num_logprobs)
            return LogprobsTensors(tokens.int(), logprobs, result.ranks)
        scores = raw.float() if is_raw else scaled(verified, layout.temperature)
        matrix = scores.log_softmax(-1) if mode.endswith("_logprobs") else scores
        return self._runner.sampler.gather_logprobs(matrix, num_logprobs, result.target_token_ids.clamp(min=0))

    def _process(self, logits: torch.Tensor, metadata: Any, batch: _Batch, layout: Layout) -> torch.Tensor:
        """vLLM's own processing of a copy of the logits, float32 [N, V].

        Penalties, masks and biases; where a request is sampled also temperature, min-p, top-k and top-p.
        """
        runner, sampling = self._runner, batch.sampling
        runner.input_batch.update_async_output_token_ids()
        processed = logits.to(torch.float32, copy=True)
        if batch.biases:  # first: vLLM, which does so without speculation only, does it before penalties
            lengths = np.array([0] * len(batch.req_ids) if metadata is None else metadata.num_draft_tokens)
            ends = np.cumsum(lengths + 1)
            for row, (tokens, biases) in batch.biases.items():
                processed[ends[row] - lengths[row] - 1 : ends[row], tokens] += biases
        if metadata is None:
            processed = runner.sampler.apply_logits_processors(processed, sampling, False)
        else:
            # Pretend that every request has one more draft token, so that its bonus row is processed like the others:
            # by itself vLLM masks stop tokens in bonus rows until a step begins after min_tokens.
            drafts = sampling.spec_token_ids
            one_more = replace(sampling, spec_token_ids=[[*tokens, 0] for tokens in drafts] if drafts else drafts)
            counts = SimpleNamespace(num_draft_tokens=[count + 1 for count in metadata.num_draft_tokens])
            processed = runner.rejection_sampler.apply_logits_processors(processed, one_more, counts)
        if not sampling.all_greedy:
            temperature, min_p = batch.rows.temperature, batch.min_p
            processed = truncate(
                processed, temperature, layout.places()[0], top_k=sampling.top_k, top_p=sampling.top_p, min_p=min_p
            )
        return keep_broken(processed, logits)

    def finish_counting(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None, Features] | None:
        """Count the last verification, unless that has been done: None.

        Returns:
            By row of the batch, how many draft tokens were verified and how many accepted, int64 [B]; the targets,
            int64 [N], if the drafter wants those after the first difference; features [N, FEATURE_WORDS], or of length
            0.

        Raises:
            FloatingPointError: a row had no sample because the model's logits are NaN or +inf.
        """
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return None
        accepted, broken, *seen = outcome.copy.read()
        raise_if_broken(broken, outcome.req_ids)
        verified = np.array(outcome.num_draft_tokens, np.int64)
        self.stats.record(verified[outcome.is_counted], accepted[outcome.is_counted])
        targets = seen.pop(0) if outcome.has_targets else None
        features = seen[0].reshape(-1, FEATURE_WORDS) if seen else NO_FEATURES
        return verified, accepted, targets, features

    def _lay_out(self, metadata: Any, rows: SamplingBatch) -> Layout:
        runner, size = self._runner, rows.temperature.shape[0]
        if metadata is None:
            num_draft_tokens, device = 0, runner.device
            drafted = torch.empty(0, dtype=torch.int32, device=device)
            cu_num_draft_tokens = torch.zeros(size, dtype=torch.int32, device=device)
        else:
            num_draft_tokens = metadata.num_draft_tokens
            drafted, cu_num_draft_tokens = metadata.draft_token_ids, metadata.cu_num_draft_tokens
        first_inputs = runner.query_start_loc.np[1 : size + 1] - 1 - num_draft_tokens
        rows = replace(rows, positions=runner.positions.index_select(0, upload(first_inputs, runner.device)))
        return lay_out(cu_num_draft_tokens, drafted, rows)

    def _describe_batch(self, sampling: Any) -> _Batch:
        req_ids, batch = self._runner.input_batch.req_ids, self._batch
        if batch is not None and batch.sampling is sampling and batch.req_ids == req_ids:
            return batch
        requests = [self._runner.requests[req_id] for req_id in req_ids]
        params = [request.sampling_params for request in requests]
        for req_id, asked in zip(req_ids, params, strict=True):
            require_seed(asked, f"request {req_id}")

        def on_device(values: Any, dtype: type) -> torch.Tensor:
            return upload(np.array(list(values), dtype), self._runner.device)

        is_greedy = sampling.temperature is None
        rows = SamplingBatch(
            temperature=torch.zeros(len(params), device=self._runner.device) if is_greedy else sampling.temperature,
            seeds=on_device([asked.seed for asked in params], np.int64),
            positions=None,
        )
        min_p = [asked.min_p for asked in params]
        biases = {
            row: (on_device(asked.logit_bias, np.int64), on_device(asked.logit_bias.values(), np.float32))
            for row, asked in enumerate(params)
            if self._adds_biases and asked.logit_bias
        }
        self._batch = _Batch(
            list(req_ids), sampling, rows, on_device(min_p, np.float32) if any(min_p) else None,
            any(map(needs_processing, params)), [r for r in requests if r.sampling_params.min_tokens], biases,
        )  # fmt: skip
        return self._batch

    # -- drafting ----------------------------------------------------------------------------------------------------

    def draft(self, is_sampled: NDArray[np.bool_]) -> list[list[int]]:
        """Draft for the next step. vLLM has recorded what this one has sampled.

        Args:
            is_sampled: bool [B], False for chunks of prompts.

        Returns:
            Per row, at most num_speculative_tokens drafted tokens.

        Raises:
            FloatingPointError: the step's logits hold NaN or +inf.
        """
        session, size = self.session, is_sampled.size
        assert session is not None
        verification = self.finish_counting()
        if not session.is_drafter_alive:  # it may have raised since this step was verified
            return [[] for _ in range(size)]
        assert verification is not None
        num_verified, num_accepted, targets, features = verification
        batch = self._runner.input_batch
        batch_rows = np.flatnonzero(is_sampled)
        rows = session.rows_of([batch.req_ids[row] for row in batch_rows.tolist()])
        batch_rows, rows = batch_rows[rows >= 0], rows[rows >= 0]
        sampled = Sampled(
            rows,
            batch_rows,
            token_ids=batch.token_ids_cpu,
            first=np.zeros(batch.num_tokens_no_spec.size, np.int64),
            lengths=batch.num_tokens_no_spec,
            num_verified=num_verified,
            num_accepted=num_accepted,
            starts=np.append(0, (num_verified + 1).cumsum()),
            features=features,
        )
        num_step_tokens = int(self._runner.query_start_loc.np[size])
        drafts = session.draft(sampled, num_step_tokens=num_step_tokens, targets=targets)
        proposed: list[list[int]] = [[] for _ in range(size)]
        of_rows = zip(batch_rows.tolist(), drafts.token_ids.tolist(), drafts.lengths.tolist(), strict=True)
        for row, tokens, length in of_rows:
            proposed[row] = tokens[:length]
        return proposed


def _emitted(result: VerifyResult) -> torch.Tensor:
    """int32 [B, K + 1], what vLLM records. A row without a sample emits token 0, as in vLLM."""
    sampled, num_accepted = result.output_token_ids, result.num_accepted
    is_last = torch.arange(sampled.shape[1], device=sampled.device) == num_accepted[:, None]
    return torch.where(is_last, sampled.clamp(min=0), sampled)


def _pad_rows(tensors: Any, num_draft_tokens: list[int], width: int) -> Any:
    """Spread N rows over B * width rows: vLLM expects request b's row j at b * width + j."""
    num_rows, num_requests = tensors.logprobs.shape[0], len(num_draft_tokens)
    if num_rows == num_requests * width:  # all drafts are as long as they can be
        return tensors
    has_row = np.arange(width) <= np.array(num_draft_tokens)[:, None]
    at = upload(np.flatnonzero(has_row), tensors.logprobs.device)

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_zeros((num_requests * width, *tensor.shape[1:])).index_copy_(0, at, tensor)

    return LogprobsTensors(*(spread(tensor) for tensor in tensors[:3]))


class RolloutSpecProposer:
    """vLLM's `custom_class` proposer, which `speculative_config` names by path.

    Attributes:
        engine: Drafts. Set by itself.
    """

    engine: EngineV1 | None = None

    def __init__(self, vllm_config: Any) -> None:
        """There is nothing to load: `EngineV1` has the drafter."""

    def load_model(self, model: Any) -> None:
        """Check that the plugin has given this its engine.

        Raises:
            RuntimeError: the plugin is not loaded in this process.
        """
        if self.engine is None:
            raise RuntimeError(
                "the rollout_spec plugin is not loaded in this process, so drafts cannot be verified: check that the "
                "VLLM_PLUGINS environment variable, if set, contains rollout_spec"
            )

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Draft, list by row.

        Args:
            sampled_token_ids: Per row, the tokens sampled in this step; empty for rows that are not drafted for.
        """
        assert self.engine is not None
        return self.engine.draft(np.array([bool(tokens) for tokens in sampled_token_ids], np.bool_))
