"""Several forward passes for one step of vLLM's scheduler: the model runner's part.

vLLM's V2 runner takes the first pass as any other step. Requests, blocks and sizes of the further ones are the same,
and all that differs is on the device, so that a `Repetition` only launches kernels for them. It repeats what vLLM's
`GPUModelRunner.execute_model` does in steps that only decode; `sub_steps.py` has the scheduler's part.
"""

from __future__ import annotations

from typing import Any

import vllm.envs as envs
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, prepare_pos_seq_lens
from vllm.v1.worker.gpu.lora_utils import get_num_active_loras_for_dispatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from rollout_spec.integrations.vllm import compat
from rollout_spec.integrations.vllm.config import has_model_drafter


def why_not(runner: Any) -> str | None:
    """What keeps a runner's steps from having several passes; None: nothing.

    Args:
        runner: vLLM's V2 `GPUModelRunner`, which has its KV cache.
    """
    config = runner.vllm_config
    parallel = config.parallel_config
    observability = getattr(config.observability_config, "per_request_spec_decode_metrics", "none")
    several = "data_parallel", "pipeline_parallel", "decode_context_parallel", "prefill_context_parallel"
    parts = "pcp_manager", "ubatch_runner", "batch_sharder", "fast_prefill", "pooling_runner", "pp_handler"
    reasons = {
        "synchronous scheduling": not config.scheduler_config.async_scheduling,
        "parallelism other than by tensors": any(getattr(parallel, f"{kind}_size") > 1 for kind in several),
        "a KV or encoder cache that is transferred": config.kv_transfer_config or config.ec_transfer_config,
        "expert load balancing": parallel.enable_eplb,
        "experts on other ranks, which may fail": getattr(runner, "check_ep_fault", False),
        # Blocks that are allocated once a step has been scheduled would be zeroed with the next one.
        "a cache whose new blocks are zeroed": getattr(runner.kv_cache_config, "needs_kv_cache_zeroing", False),
        "metrics of speculation by request": observability != "none",
        "VLLM_COMPUTE_NANS_IN_LOGITS": envs.VLLM_COMPUTE_NANS_IN_LOGITS,
        "routed experts": getattr(runner, "aux_output_connector", None)
        or getattr(config.model_config, "enable_return_routed_experts", False),  # up to 0.30
        "a model with state besides the KV cache": type(runner.model_state) is not DefaultModelState,
        "a model drafter": has_model_drafter(config),
        "inputs that are embeddings": getattr(runner, "uses_inputs_embeds", runner.supports_mm_inputs),
        "attention of its own kind": getattr(runner.model_config, "rswa_window", None) is not None
        or any(getattr(runner, part, None) is not None for part in parts),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


class Repetition:
    """Repeats the forward pass of a runner's step.

    Args:
        runner: vLLM's `GPUModelRunner`.
        state: Its `ExecuteModelState` after the first pass.
        width: Tokens of each request in a pass before drafts are cut.
        most: Passes of the step. Attention gets one upper bound of the sequences' lengths for all that follow.
    """

    def __init__(self, runner: Any, state: Any, width: int, most: int) -> None:
        batch = state.input_batch
        self._runner, self.batch, self._slots = runner, batch, state.slot_mappings_by_layer
        # A new tensor: what was copied from the old one may still be under way.
        longest = batch.seq_lens_cpu_upper_bound.clone()
        longest[: batch.num_reqs] += (most - 1) * width
        batch.seq_lens_cpu_upper_bound = longest
        self._tables = tuple(table[: batch.num_reqs_after_padding] for table in runner.block_tables.input_block_tables)
        uniform = width if batch.num_tokens == batch.num_reqs * width else None  # drafts may have been cut
        num_loras = 0
        if runner.lora_config:
            num_loras = get_num_active_loras_for_dispatch(runner.lora_config, runner.lora_state, batch.req_ids, False)
        self._graph = runner.cudagraph_manager.dispatch(
            batch.num_reqs, batch.num_tokens, uniform, num_active_loras=num_loras, **compat.longest_query(width)
        )
        assert max(batch.num_tokens, self._graph.num_tokens) == batch.num_tokens_after_padding, "another graph"

    def forward(self) -> Tensor:
        """Launch the next pass: the hidden states of its tokens. Drafts have been cut, and lengths counted."""
        runner, batch = self._runner, self.batch
        states, buffers = runner.req_states, runner.input_buffers
        prepare_pos_seq_lens(
            batch.idx_mapping,
            batch.query_start_loc,
            states.num_computed_tokens.gpu,
            buffers.positions,
            buffers.seq_lens,
        )
        batch.logits_indices = combine_sampled_and_draft_tokens(
            buffers.input_ids,
            batch.idx_mapping,
            states.last_sampled_tokens,
            batch.query_start_loc,
            batch.seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            batch.cu_num_logits,
            batch.logits_indices.shape[0],
        )
        slots = runner.block_tables.compute_slot_mappings(
            batch.idx_mapping, batch.query_start_loc, batch.positions, num_tokens_padded=batch.num_tokens_after_padding
        )
        metadata = runner.model_state.prepare_attn(
            batch, self._graph.cg_mode, self._tables, slots, runner.attn_groups, runner.kv_cache_config
        )
        inputs = {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "inputs_embeds": None,
            "intermediate_tensors": None,
            **runner.model_state.prepare_inputs(batch, states),
        }
        if self._graph.cg_mode == CUDAGraphMode.FULL:
            return runner.cudagraph_manager.run_fullgraph(self._graph)
        descriptor = BatchDescriptor(
            num_tokens=batch.num_tokens_after_padding,
            has_lora=runner.lora_config is not None,
            num_active_loras=self._graph.num_active_loras,
        )
        with set_forward_context(
            metadata,
            runner.vllm_config,
            num_tokens=batch.num_tokens_after_padding,
            cudagraph_runtime_mode=self._graph.cg_mode,
            batch_descriptor=descriptor,
            slot_mapping=self._slots,
            **compat.padding_of(batch),
        ):
            if self._graph.cg_mode == CUDAGraphMode.PIECEWISE:
                return runner.cudagraph_manager.run_pw_graph(runner.model, inputs)
            return runner.model(**inputs)
