"""An engine in vLLM's V2 model runner: `EngineV2` owns its steps; vLLM's sampler and speculator are faces of it.

One step: vLLM prepares the inputs, the drafts among them, and runs the target over every scheduled token. It hands the
logits to its sampler, so to `EngineV2.sample`, which verifies the drafts with Triton kernels; records the sampled
tokens; and calls its speculator, so `EngineV2.draft`, which drafts for the next step. Nothing waits for the device, and
what the host launches is as little as without speculation.

vLLM keeps asynchronous scheduling for one of its own drafters without a model, `ngram_gpu`. An engine with the device
drafter asks for that one (`hooks.complete_config`), and gets `SpeculatorFace` in its place. A model drafter beside
history has a face of its own, in `hybrid.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.async_utils import stream
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters.device.kernels import EngineSlots
from rollout_spec.integrations.vllm import compat
from rollout_spec.integrations.vllm.config import say
from rollout_spec.integrations.vllm.device import WRITTEN, DeviceSession, DraftTable
from rollout_spec.integrations.vllm.engine import Engine
from rollout_spec.integrations.vllm.further_passes import Repetition, why_not
from rollout_spec.integrations.vllm.outputs import PassBuffer, StepBuffer, StepBuffers
from rollout_spec.integrations.vllm.sampling import Asked, AskedOfSlots, keep_broken, require_seed, scored_tokens
from rollout_spec.integrations.vllm.sub_steps import first_pass, num_passes
from rollout_spec.num_passes import AUTO_SUB_STEPS
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, VerifyResult
from rollout_spec.verify import kernel
from rollout_spec.verify.reference import Layout, scaled


class EngineV2(Engine):
    """Samples and drafts in the steps of one V2 model runner.

    Attributes: those of `Engine`, and
        session: A `DeviceSession`; None without speculation.
        scheduled: That of the step's first pass, where it has several (`further_passes.py`).
        confidences: float32 [R, K], the estimated probability that each drafted token is accepted once it is reached,
            by slot: vLLM's own table where it cuts drafts by them.
        asked: What its requests ask of sampling.
    """

    def __init__(self, runner: Any, config: RolloutSpecConfig) -> None:
        session = None if runner.speculator is None else DeviceSession(config, runner)
        super().__init__(runner, config, session)
        self.session: DeviceSession | None = session
        scheduler, k = runner.vllm_config.scheduler_config, config.max_draft_tokens if config.speculation else 0
        num_ahead = runner.vllm_config.max_concurrent_batches
        most_passes = (config.sub_steps or AUTO_SUB_STEPS) if k else 1
        self._outputs = StepBuffers(scheduler.max_num_seqs, k + 1, most_passes, runner.device, num_ahead, self.stats)
        self._num_passes, self._pass = 1, 0  # of the step, and which one it is at
        self._num_next_drafts = 0  # K of the drafts for the next step
        self._repetition: Repetition | None = None  # of a step with further passes
        self._of_step: tuple[StepBuffer, Asked] | None = None  # where these write, and what they sample
        self._memory = kernel.Memory()
        self._hidden: Tensor | None = None  # of the step's tokens
        self._features: Tensor | None = None  # of the step's rows, until drafts are made
        self._is_asynchronous = scheduler.async_scheduling
        self._is_warm = False
        self._index_dtype = torch.int32  # of vLLM's slot numbers
        if session is not None:
            self.confidences = torch.zeros(scheduler.max_num_seqs, k, dtype=torch.float32, device=runner.device)
            runner.speculator.attach(self)

    # -- the step ----------------------------------------------------------------------------------------------------

    def sample(self, logits: Tensor, batch: Any, invalid_drafts: Tensor | None = None) -> SamplerOutput:
        """Verify the scheduled drafts and sample what follows; a request without drafts has one row.

        Args:
            logits: float [N, vocabulary].
            batch: vLLM's `InputBatch`.
            invalid_drafts: bool [N], from vLLM 0.32 on: rows whose input is a draft that breaks the request's grammar.
        """
        asked, is_serving = self.asked.of(batch.idx_mapping_np), self.is_serving(batch.req_ids)
        buffer = self._outputs.next() if is_serving else self._outputs.made_up
        width = 1 + self.config.max_draft_tokens if batch.num_draft_tokens > 0 else 1
        buffer.begin(batch.req_ids, width, self._num_passes if is_serving else 1)
        output: Any = self._sample_in(buffer.passes[0], asked, logits, batch, invalid_drafts, is_serving=is_serving)
        if is_serving:
            output.when_read = functools.partial(self._outputs.read, buffer)
            self.asked.sampled(asked, batch)
            self._of_step = buffer, asked
        return output  # type: ignore[no-any-return]

    @torch.inference_mode()
    def end_step(self, output: Any) -> None:
        """Run the step's further passes, and copy what all have sampled.

        Args:
            output: vLLM's `AsyncOutput` of the first one.
        """
        repetition, self._repetition = self._repetition, None
        if repetition is None or self._of_step is None:
            return
        runner, batch, (buffer, asked) = self._runner, repetition.batch, self._of_step
        for number in range(1, self._num_passes):
            self._pass = number
            self._run_further_pass(repetition, buffer.passes[number], asked)
        if self.is_cutting:
            runner.adaptive_verification.record_confidences(self.confidences, batch)
        main, copies = runner.main_stream, runner.output_copy_stream
        with stream(copies, main):
            copies.wait_stream(main)
            buffer.copy(is_complete=True)
            output.copy_event.record(copies)

    def _run_further_pass(self, repetition: Repetition, of_pass: PassBuffer, asked: Asked) -> None:
        """Only launches kernels."""
        runner, batch = self._runner, repetition.batch
        if self._is_last_pass():
            self.scheduled.num_spec_tokens_to_schedule = self._num_next_drafts
        if self.is_cutting:
            runner.adaptive_verification.cut_again(batch)
        hidden = repetition.forward()
        self._hidden = hidden if self.wants_features else None
        logits = runner.model.compute_logits(hidden[batch.logits_indices])
        seen = self._sample_in(of_pass, asked, logits, batch)
        of_pass.scores, of_pass.scores_on_host = seen.logprobs_tensors, None
        counts = seen.num_sampled, seen.num_rejected
        runner.postprocess_sampled(batch.idx_mapping, seen.sampled_token_ids, *counts, batch.query_start_loc)
        self.draft(batch, seen.num_sampled)

    def _sample_in(
        self,
        of_pass: PassBuffer,
        asked: Asked,
        logits: Tensor,
        batch: Any,
        invalid_drafts: Tensor | None = None,
        *,
        is_serving: bool = True,
    ) -> SamplerOutput:
        """Sample in one forward pass. logits, batch, invalid_drafts: As of `sample`."""
        slots = batch.idx_mapping.int()  # from vLLM 0.32 on they are int64, for which kernels would be compiled again
        layout, processed = self._rows(batch, slots, invalid_drafts), logits
        if asked.is_processed:
            layout = layout.of(logits.shape[0])
            processed = self._process(logits, batch, layout)
            layout = layout.with_temperature_applied()
        seen = kernel.verify_rows(
            processed,
            layout,
            method=self.config.verify,
            logprobs_mode=self._sampler.logprobs_mode if asked.scored_here else None,
            hidden=self._hidden_of_rows(batch) if is_serving else None,
            max_draft_tokens=of_pass.step.width - 1,
            step=of_pass.output(batch.seq_lens, slots, self._runner.req_states.prefill_len.gpu),
            memory=self._memory,
        )
        self._features = None if seen.features is None else seen.features[: logits.shape[0]]
        logprobs = self._logprobs(asked, seen, logits, processed, batch, layout, of_pass)
        tokens, num_sampled = of_pass.sampled(batch.num_reqs)
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=logprobs,
            num_nans=get_num_nans(logits) if self._sampler.compute_nans else None,
            num_sampled=num_sampled,
            num_rejected=of_pass.num_rejected(batch.num_reqs),
        )

    def draft(self, batch: Any, num_sampled: Tensor) -> tuple[Tensor, Tensor] | None:
        """Show the drafter what was sampled, which vLLM has recorded, and let it draft for the next step.

        Args:
            batch: vLLM's `InputBatch`.
            num_sampled: int32 [B], tokens of this step.

        Returns:
            `_tables`, or drafts and rates, int64 and float32 [B, K]; None where nothing is drafted now.
        """
        session, (features, self._features) = self.session, (self._features, None)
        assert session is not None
        if self._pass == 0:
            session.reserve(batch.idx_mapping_np, self._num_passes)
        if features is not None:
            features = self._from_first_rank(features)  # ranks round sums differently
        step = batch.idx_mapping, num_sampled, self.slots(), features, batch.cu_num_logits[: batch.num_reqs]
        if session.enabled and self.is_drafting():
            return session.drafter.propose(*step, tables=self._tables())
        session.drafter.extend(*step)
        return None

    def is_drafting(self) -> bool:
        """Whether the next step verifies drafts, as the scheduler has said."""
        scheduled = self.scheduled  # None before the first step
        return scheduled is None or not self._is_asynchronous or scheduled.num_spec_tokens_to_schedule > 0

    def _is_last_pass(self) -> bool:
        return self._pass == self._num_passes - 1

    # -- what vLLM makes up ------------------------------------------------------------------------------------------

    def is_serving(self, req_ids: Sequence[str]) -> bool:
        """Whether a batch is of the step that was scheduled, and no made-up one."""
        scheduled = self.scheduled
        return not self.warming_up and scheduled is not None and req_ids[0] in scheduled.num_scheduled_tokens

    def propose_made_up(self, batch: Any, *, num_given_tokens: int = 0) -> tuple[Tensor, Tensor]:
        """Compile the drafter's kernels, and later let vLLM measure what they cost.

        Args:
            num_given_tokens: How many tokens of a model's drafts are continued.

        Returns:
            No drafts: int64 and float32 [B, K].
        """
        session, slots = self.session, batch.idx_mapping
        assert session is not None
        if not self._is_warm:
            self._is_warm, self._index_dtype = True, slots.dtype
            session.drafter.warm_up(slots.dtype, self.slots(), num_given_tokens, tables=self._tables())
        elif self.is_cutting:
            nothing = torch.zeros_like(slots, dtype=torch.int32)
            session.drafter.propose(slots, nothing, self.slots(), tables=self._tables())
        return self.no_drafts(batch.num_reqs)

    def no_drafts(self, num_requests: int) -> tuple[Tensor, Tensor]:
        """Draft tokens 0 with rate 0, int64 and float32 [B, K]. New tensors each time: vLLM may write into them."""
        rates = torch.zeros_like(self.confidences[:num_requests])
        return rates.long(), rates

    def compile_kernels(self, **buffers: Any) -> None:
        zeros = torch.zeros(1, dtype=torch.int32, device=self._runner.device)
        step = self._outputs.made_up.passes[0].output(zeros, zeros, self._runner.req_states.prefill_len.gpu)
        super().compile_kernels(step=step, memory=self._memory)
        if self.is_cutting:
            self._runner.adaptive_verification.compile(self._index_dtype)

    def on_error(self) -> None:
        """A step has raised: its inputs are those of no later one."""
        if self.is_cutting:
            from rollout_spec.integrations.vllm import cutting

            cutting.forget_step()

    def on_kv_cache(self) -> None:
        """Called when vLLM has decided whether drafts are cut on the device: lets `Cutting` do it.

        Decides how many forward passes a step may have.
        """
        runner, most = self._runner, self.config.sub_steps or AUTO_SUB_STEPS
        reason = why_not(runner) if most > 1 else None
        self.most_passes = 1 if reason else most
        if reason and self.config.sub_steps and runner.vllm_config.parallel_config.rank == 0:
            say(f"rollout_spec: sub_steps={most} has no effect, as steps have one forward pass with {reason}")
        self.is_cutting = compat.adaptive_verification(runner) is not None
        if not self.is_cutting:
            return
        from rollout_spec.integrations.vllm import cutting  # imports what vLLM has from 0.28 on

        manager = cutting.Cutting(runner.adaptive_verification, self.is_drafting, self._is_last_pass)
        runner.adaptive_verification, self.confidences = manager, manager.confidences

    # -- requests ----------------------------------------------------------------------------------------------------

    def on_load(self) -> None:
        """Puts faces of this engine where the runner's samplers are, which exist by now."""
        runner = self._runner
        self._sampler = runner.sampler
        self.asked = AskedOfSlots(runner.sampler)
        compat.mend_bad_words(runner.sampler)
        runner.sampler = SamplerFace(runner.sampler, self)
        if runner.rejection_sampler is not None:
            runner.rejection_sampler = runner.sampler
        if self.session is not None:
            compat.count_memory(runner, self.session.memory_bytes())
            map_adapters = runner.lora_state.make_lora_inputs
            runner.lora_state.make_lora_inputs = lambda req_ids, *args: self._with_adapters_of_rows(
                req_ids, *map_adapters(req_ids, *args)
            )

    def add_request(self, slot: int, params: Any) -> None:
        """A request begins in a slot.

        Raises:
            RuntimeError: it has no seed.
        """
        if not self.warming_up:
            require_seed(params, "a request")
        self.asked.add(slot, params)

    def _with_adapters_of_rows(self, req_ids: Sequence[str], adapters: Any, *more: Any) -> tuple[Any, ...]:
        """vLLM's V2 runner names an adapter per request for the LM head, which has a row per drafted token as well."""
        drafts = self.scheduled.scheduled_spec_decode_tokens
        counts = [1 + len(drafts.get(req_id, ())) for req_id in req_ids]
        return tuple(np.repeat(adapters, counts).tolist()), *more

    def begin_step(self, scheduled: Any) -> Any:
        first = first_pass(scheduled)
        super().begin_step(scheduled)
        self.scheduled, self._num_passes, self._pass = first, num_passes(scheduled), 0
        self._repetition = None  # of a step that has raised
        self._num_next_drafts = scheduled.num_spec_tokens_to_schedule
        return first

    def on_forward(self) -> None:
        """Keeps the step's hidden states, and what its further passes repeat."""
        super().on_forward()
        state = self._runner.execute_model_state
        keeps = self.wants_features and not self.warming_up and state is not None
        self._hidden = state.hidden_states if keeps else None
        if self._num_passes > 1:
            width = next(iter(self.scheduled.num_scheduled_tokens.values()))
            self._repetition = Repetition(self._runner, state, width, self._num_passes)

    # -- parts of the step -------------------------------------------------------------------------------------------

    def slots(self) -> EngineSlots:
        """What vLLM knows of its requests."""
        states, sampling = self._runner.req_states, self._sampler.sampling_states
        return EngineSlots(states.all_token_ids.gpu, states.total_len.gpu, sampling.seeds.gpu, sampling.temperature.gpu)

    def _tables(self) -> tuple[Tensor, Tensor] | None:
        """vLLM's drafts and their rates by slot; None beside a model drafter, which chooses between drafts first."""
        table = self._runner.req_states.draft_tokens
        return (table.plain, self.confidences) if isinstance(table, DraftTable) else None

    def _hidden_of_rows(self, batch: Any) -> Tensor | None:
        """The states that the step's logits were computed from, [N, hidden size]; None if features are not wanted."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            return None
        num_rows = batch.logits_indices.shape[0]
        if num_rows == batch.num_tokens:  # every token has logits; what follows pads the batch
            return hidden[:num_rows]
        return hidden[batch.logits_indices]

    def _rows(self, batch: Any, slots: Tensor, invalid_drafts: Tensor | None) -> Layout:
        """Where each row of logits belongs. Tensors may be longer than there are rows."""
        layout = kernel.gather_layout(
            batch.input_ids,
            batch.positions,
            batch.logits_indices,
            batch.cu_num_logits,
            slots,
            self._runner.req_states.prefill_len.gpu,
            self._sampler.sampling_states.temperature.gpu,
            self._sampler.sampling_states.seeds.gpu,
            self._memory,
        )
        if invalid_drafts is not None:
            num_rows = batch.logits_indices.shape[0]
            layout.draft[: num_rows - 1].masked_fill_(invalid_drafts[1:num_rows], PLACEHOLDER_TOKEN_ID)
        return layout

    def _process(self, logits: Tensor, batch: Any, layout: Layout) -> Tensor:
        """vLLM's own processing of a copy of the logits, float32 [N, V]: penalties, masks, temperature, truncation."""
        return keep_broken(compat.apply_sampling_params(self._sampler, logits, batch, layout.position), logits)

    def _logprobs(
        self,
        asked: Asked,
        seen: VerifyResult,
        logits: Tensor,
        processed: Tensor,
        batch: Any,
        layout: Layout,
        of_pass: PassBuffer,
    ) -> LogprobsTensors | None:
        """The log-probabilities that requests ask for.

        Args:
            logits, processed: float [N, V], the model's and those that the verifier got.
        """
        num_rows, mode, starts = logits.shape[0], self._sampler.logprobs_mode, None
        if asked.num_logprobs < 0 and not asked.num_custom_ids:
            return None
        if asked.scored_here and asked.num_logprobs == 0:
            return of_pass.logprobs(batch.num_reqs, num_rows)
        parts = seen.target_token_ids, seen.logprobs, seen.ranks
        targets, logprobs, ranks = (None if part is None else part[:num_rows] for part in parts)
        seen, layout = seen._replace(target_token_ids=targets, logprobs=logprobs, ranks=ranks), layout.of(num_rows)
        if num_rows != batch.num_reqs:
            if self._runner.sampler.enable_adaptive_verification:  # only the device knows where drafts end
                starts = batch.cu_num_logits.clone()  # the next step writes there
            else:
                starts = batch.cu_num_logits_np.tolist()
        if asked.scored_here:
            field = "cu_num_generated_tokens" + ("_tensor" if isinstance(starts, Tensor) else "")
            temperature = None if mode.startswith("raw_") else layout.temperature
            tokens, logprobs = scored_tokens(seen, processed, temperature, asked.num_logprobs)
            return LogprobsTensors(tokens, logprobs, seen.ranks, **{field: starts})
        tensors: LogprobsTensors = compat.compute_topk_scores(
            logits if mode.startswith("raw_") else scaled(processed, layout.temperature),
            max(asked.num_logprobs, 0),
            seen.target_token_ids,
            starts,
            logprob_token_ids_state=self._sampler.logprob_token_ids_state,
            expanded_idx_mapping=batch.expanded_idx_mapping,
            max_per_req_token_ids=asked.num_custom_ids,
            logits_mode=mode.endswith("_logits"),
        )
        return tensors

    def finish_counting(self) -> None:
        self._outputs.finish_counting()


class SamplerFace:
    """What vLLM calls its `Sampler` and its `RejectionSampler`. Other attributes and methods are the former's.

    Args:
        inner: vLLM's `Sampler`, which holds the requests' sampling parameters.
    """

    def __init__(self, inner: Any, engine: EngineV2) -> None:
        self.inner, self._engine = inner, engine
        speculator = engine._runner.speculator
        self.enable_adaptive_verification = getattr(speculator, "enable_adaptive_verification", False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def add_request(self, req_idx: int, *args: Any) -> Any:
        """As vLLM's `Sampler`; raises like `EngineV2.add_request`."""
        self._engine.add_request(req_idx, args[-1])
        return self.inner.add_request(req_idx, *args)

    def __call__(
        self, logits: Tensor, input_batch: Any, draft_logits: Any = None, invalid_drafts: Tensor | None = None
    ) -> SamplerOutput:
        """draft_logits: not used, as our drafts are point masses."""
        return self._engine.sample(logits, input_batch, invalid_drafts)


class SpeculatorFace(BaseSpeculator):
    """What vLLM calls its speculator."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: Any) -> None:
        self.model = torch.nn.Module()
        self.enable_adaptive_verification = compat.verifies_adaptively(vllm_config.speculative_config)

    def attach(self, engine: EngineV2) -> None:
        """Called when the engine is made, which is after this."""
        self._engine, states = engine, engine._runner.req_states
        states.draft_tokens = DraftTable.around(
            states.draft_tokens, lambda: engine.scheduled is None or engine.scheduled.has_structured_output_requests
        )

    @property
    def draft_token_confidence_probs(self) -> Tensor:
        """float32 [R, K], by slot."""
        return self._engine.confidences

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing to do."""

    def capture(self, *args: Any) -> None:
        """Nothing to do: our kernel launches need no graph."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """int64 [B, K], or `WRITTEN`."""
        if dummy_run or self._engine.warming_up:
            return self._engine.propose_made_up(input_batch)[0]
        self._engine.draft(input_batch, num_sampled)
        return WRITTEN
