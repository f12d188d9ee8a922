"""The device drafter as a speculator of vLLM's V2 model runner.

vLLM keeps asynchronous scheduling for one of its own drafters without a model, `ngram_gpu`. An engine with the device
drafter asks for that one (`hooks.complete_config`), and gets this speculator in its place. Nothing here waits for the
device. A step is scheduled before the last one's tokens are known, so every request has the same number of draft
tokens, which `measured_schedule.py` chooses. vLLM's adaptive verification cuts them by their confidences where it can
(`adaptive.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from rollout_spec.drafters.device.drafter import DeviceDrafter, EndedRequest, token_bytes
from rollout_spec.history.problems import Problems
from rollout_spec.integrations.vllm.adaptive import prepare_to_measure
from rollout_spec.integrations.vllm.config import config_of
from rollout_spec.integrations.vllm.engine_history import EngineHistory
from rollout_spec.integrations.vllm.ranks import sharing_from_first_rank
from rollout_spec.integrations.vllm.requests import request_options
from rollout_spec.integrations.vllm.session import Session, end_of
from rollout_spec.stats import SpeculationStats

MAX_LIVE_SHARE = 0.005
"""Most of the device's memory that live requests' texts get, with features: some 12 million tokens on an H100, whose KV
cache holds little more than one million of a 7B model."""


class _LiveRequest(NamedTuple):
    """A request that has a place in the runner."""

    req_idx: int
    problem_id: int | None
    params: Any
    """Its `SamplingParams`."""


class DeviceSpeculator(Session, BaseSpeculator):
    """vLLM's speculator around a `DeviceDrafter`.

    There is no budget of ours, as the host does not know the drafts. A request that ends while it is preempted leaves
    no rollout, as the runner has freed its text.

    Attributes: those of `Session`, and
        session: Itself, as other speculators have one.
        num_given_tokens: M, how many tokens of a model's draft it continues; 0: it continues none.
        drafter: A `DeviceDrafter`. Its memory is allocated here, so level-2 sleep does not discard it, and vLLM counts
            it when it measures what is left for the KV cache.
        problems: Knows prompts only: outputs stay on the device.
        keeps_rates: Whether `draft_token_confidence_probs` is filled where vLLM does not cut drafts, too.
        draft_token_confidence_probs: float32 [B, K], for vLLM's adaptive verification and for a choice between drafts.
    """

    supports_mm_inputs = False
    draft_logits = None
    num_given_tokens = 0
    keeps_rates = False

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        config = config_of(vllm_config)
        assert config is not None
        speculative = vllm_config.speculative_config
        self.session = self
        self.stats = SpeculationStats()
        self.num_speculative_tokens = config.max_draft_tokens
        self.enable_adaptive_verification = speculative.enable_adaptive_verification
        share = sharing_from_first_rank(vllm_config)
        memory = current_platform.get_device_total_memory()
        max_live_tokens = int(MAX_LIVE_SHARE * memory) // token_bytes(features=True)
        self.drafter = DeviceDrafter(
            max_requests=vllm_config.scheduler_config.max_num_seqs,
            max_model_len=vllm_config.model_config.max_model_len,
            device=device,
            max_draft_tokens=config.max_draft_tokens,
            use_noise=config.verify == "sample",
            max_live_tokens=share(max_live_tokens) if share else max_live_tokens,
            **config.drafter_options,
        )
        self.problems = Problems(self.drafter.max_history_tokens)
        if config.history_dir is not None:
            self.engine_history = EngineHistory(config, vllm_config, self.drafter, self.problems, share)
        self.draft_token_confidence_probs = torch.zeros(
            vllm_config.scheduler_config.max_num_seqs, config.max_draft_tokens, dtype=torch.float32, device=device
        )
        self._device = device
        self._is_asynchronous = vllm_config.scheduler_config.async_scheduling
        self._is_warm = False
        self._index_dtype = torch.int32  # of vLLM's numbers of requests
        self.live = {}  # values are `_LiveRequest`
        self._runner: Any = None

    def bind(self, runner: Any) -> None:
        """Give the speculator the runner it serves."""
        self._runner = runner

    def close(self) -> None:
        """Waits for the device."""
        if self.engine_history is not None:
            try:
                self.finish_requests(list(self.live), ())  # the last step may have ended some
            finally:  # also after an error of the device
                super().close()

    def num_live_requests(self) -> int:
        """Preempted ones are not counted."""
        return len(self.live)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing to do: our three kernel launches need no graph."""

    def capture(self) -> None:
        """Called before vLLM measures what steps cost. Our three kernel launches need no graph."""
        if self.enable_adaptive_verification:
            prepare_to_measure(self._runner, self._index_dtype, self._is_wanted)

    def start_requests(self, requests: Iterable[Any]) -> None:
        requests = list(requests)
        for request in requests:
            if request.req_id in self.live:  # a streaming session goes on with a longer prompt
                self._preempt(request.req_id)
        for request in requests:
            req_id, params = request.req_id, request.sampling_params
            prompt, problem_id = np.array(request.prompt_token_ids or (), np.int32), None
            if request.prompt_token_ids is not None:  # a prompt of embeddings has no history
                problem_id = self.begin_conversation(request, prompt).problem_id
            req_idx = self._runner.req_states.req_id_to_index[req_id]
            self.live[req_id] = _LiveRequest(req_idx, problem_id, params)
            own_only = request_options(params.extra_args).own_only
            self.drafter.start_request(req_idx, prompt, problem_id=problem_id, own_only=own_only)

    def finish_requests(self, finished: Iterable[str], preempted: Iterable[str]) -> None:
        """Called before the runner frees their slots."""
        ended = []
        for req_id in sorted(finished):  # all ranks in the same order
            live = self.live.pop(req_id, None)
            if live is not None:
                ended.append(self._ended(live))
                self._end_in_history(live)
        for req_id in sorted(preempted):
            if req_id in self.live:
                self._preempt(req_id)
        if ended:
            self.drafter.stop_requests(ended)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft for the next step: int64 [B, K]. See vLLM for the arguments."""
        states, sampling = self._runner.req_states, self._runner.sampler.sampling_states
        req_indices = input_batch.idx_mapping
        all_token_ids, total_len = states.all_token_ids.gpu, states.total_len.gpu
        noise = sampling.seeds.gpu, sampling.temperature.gpu
        if dummy_run or self._runner.rollout_spec.warming_up:
            if not self._is_warm:  # compile the kernels before the engine serves
                self._is_warm, self._index_dtype = True, req_indices.dtype
                self.drafter.warm_up(req_indices.dtype, all_token_ids, total_len, *noise, self.num_given_tokens)
            elif dummy_run and self.enable_adaptive_verification:  # vLLM measures what drafting costs
                nothing = torch.zeros_like(req_indices, dtype=torch.int32)
                self.drafter.propose(req_indices, nothing, all_token_ids, total_len, *noise)
            return self._no_drafts(input_batch.num_reqs)
        slots = input_batch.idx_mapping_np
        self.drafter.reserve(slots, self._most_tokens(slots) + self.num_speculative_tokens + 1)
        seen = self._runner.rollout_spec.take_features(), input_batch.cu_num_logits[: input_batch.num_reqs]
        if not (self.enabled and self._is_wanted()):
            self.drafter.extend(req_indices, all_token_ids, total_len, num_sampled, *seen)
            return self._no_drafts(input_batch.num_reqs)
        drafts, rates = self.drafter.propose(req_indices, num_sampled, all_token_ids, total_len, *noise, *seen)
        if self.keeps_rates or self.enable_adaptive_verification:
            self.draft_token_confidence_probs[: input_batch.num_reqs] = rates
        return drafts

    def _is_wanted(self) -> bool:
        """Whether the next step verifies drafts, as the scheduler has said."""
        scheduled = self._runner.rollout_spec.scheduled  # None before the first step
        return scheduled is None or not self._is_asynchronous or scheduled.num_spec_tokens_to_schedule > 0

    def _no_drafts(self, num_requests: int) -> torch.Tensor:
        """Draft tokens 0 with confidence 0, int64 [B, K]. A new tensor each time: vLLM may write into it."""
        self.draft_token_confidence_probs[:num_requests] = 0
        return torch.zeros(num_requests, self.num_speculative_tokens, dtype=torch.int64, device=self._device)

    def _preempt(self, req_id: str) -> None:
        live = self.live.pop(req_id)
        self.drafter.preempt_request(live.req_idx)
        self._end_in_history(live)

    def _end_in_history(self, live: _LiveRequest) -> None:
        if self.engine_history is not None:
            self.engine_history.end_request(live.problem_id)

    def _most_tokens(self, slots: Any) -> Any:
        """Upper bounds on how many tokens these slots have once the last step's output is counted."""
        states = self._runner.req_states
        # vLLM's count on the host is one step old; all drafts of that step may have been accepted.
        computed = states.num_computed_tokens_np[slots] + self.num_speculative_tokens + 1
        return np.maximum(computed, states.prefill_len.np[slots]) + 1

    def _ended(self, live: _LiveRequest) -> EndedRequest:
        keep = request_options(live.params.extra_args).keep_in_history
        return EndedRequest(live.req_idx, int(self._most_tokens(live.req_idx)), keep=keep, **end_of(live.params))
