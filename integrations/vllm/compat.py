"""The supported versions of vLLM, and one function for each difference between them.

Each function names the versions that differ. Once those are no longer supported, inline its branch for newer ones.
Other differences need no function, as our signatures take all of them: from 0.32 on `init_speculator` also gets the
runner's request states, and a rejection sampler `invalid_drafts`; up to 0.30 `Sampler.add_request` gets the prompt's
length; up to 0.27 a speculator has a `model`, and up to 0.25 its `capture` an argument. `vllm.triton_utils.dispatcher`,
the module that `survive_lazy_modules` changes, exists from 0.31 on. V2's own noise equals ours from 0.31 on; before,
ours replaces it, with and without speculation.

This module imports neither vLLM nor torch: the plugin is loaded in every process of every engine.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollout_spec.installation import INSTALL_VLLM

OLDEST_VERSION, NEWEST_VERSION = (0, 24), (0, 33)
"""The range of tested vLLM versions: newer ones warn, older ones raise."""


def version_name(version: tuple[int, int]) -> str:
    """ "0.26" for (0, 26)."""
    return ".".join(map(str, version))


def check_version(version_tuple: tuple[Any, ...], version: str) -> None:
    """Warn about untested versions of vLLM.

    Raises:
        RuntimeError: the version is too old.
    """
    release = version_tuple[:2]
    if release == (0, 0):  # an editable install without a version
        return
    if release < OLDEST_VERSION:
        raise RuntimeError(
            f"rollout_spec needs vLLM {version_name(OLDEST_VERSION)} or newer and found {version}: {INSTALL_VLLM}"
        )
    if release > NEWEST_VERSION:
        warnings.warn(
            f"rollout_spec was tested with vLLM up to {version_name(NEWEST_VERSION)} and found {version}; "
            "run its tests (make test-vllm) before relying on it",
            stacklevel=2,
        )


def is_before(*release: int) -> bool:
    """Whether this is an older vLLM. An editable install without a version is taken for the newest."""
    import vllm

    return (0, 0) < tuple(vllm.__version_tuple__[:2]) < release


# -- what a user can set ---------------------------------------------------------------------------------------------


def experts_per_token(model_config: Any) -> Any:
    """How many experts of a mixture a token uses, or something else where that is not known; from 0.28 on a method."""
    if hasattr(model_config, "get_num_experts_per_tok"):
        return model_config.get_num_experts_per_tok()
    return getattr(model_config.hf_text_config, "num_experts_per_tok", None)


def mixes_recurrent_states() -> bool:
    """Whether a step without a draft, after one that accepted some, reads a recurrent layer's state of another token.

    Up to 0.31 it does, in both runners.
    """
    return is_before(0, 32)


# -- the front end ---------------------------------------------------------------------------------------------------


def end_outputs_at_stop_strings(output_processor: Any) -> None:
    """Wrap a vLLM `OutputProcessor` so that it gets each request's output only up to the end of a stop string.

    vLLM looks for stop strings in the front end, in the text of all tokens that a step sampled. A step with accepted
    drafts samples several, and up to 0.31 it keeps those past the stop string.
    """
    if hasattr(output_processor, "_trim_surplus_tokens"):
        return
    process_outputs = output_processor.process_outputs

    @functools.wraps(process_outputs)
    def process_cut_outputs(engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            if len(output.new_token_ids) < 2:
                continue
            state = output_processor.request_states.get(output.request_id)  # None: aborted meanwhile
            # A streaming session continues after a stop string.
            if state is not None and not state.streaming_input and getattr(state.detokenizer, "stop", None):
                end_at_stop_string(state.detokenizer, output)
        return process_outputs(engine_core_outputs, *args, **kwargs)

    output_processor.process_outputs = process_cut_outputs


def end_at_stop_string(detokenizer: Any, output: Any) -> None:
    """Cut one request's output of one step after the token that completes a stop string.

    Updates the detokenizer, and makes its next `update` return what was found: vLLM must call it next for this output.

    Args:
        detokenizer: vLLM's `IncrementalDetokenizer` of the request.
        output: vLLM's `EngineCoreOutput`; its tokens, log-probabilities and routed experts are cut.
    """
    from vllm.v1.engine import FinishReason

    stop_terminated, num_tokens = output.finish_reason == FinishReason.STOP, len(output.new_token_ids)
    stop_string, num_kept = None, 0
    while stop_string is None and num_kept < num_tokens:
        token, num_kept = output.new_token_ids[num_kept], num_kept + 1
        stop_string = detokenizer.update([token], stop_terminated and num_kept == num_tokens)

    def update(new_token_ids: list[int], stop_terminated: bool) -> str | None:
        del detokenizer.update  # uncovers the method
        return stop_string

    detokenizer.update = update
    if num_kept == num_tokens:
        return
    output.new_token_ids = output.new_token_ids[:num_kept]
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(0, num_kept)
    if output.routed_experts is not None:
        output.routed_experts = output.routed_experts[: num_kept - num_tokens]


# -- V2's model runner -----------------------------------------------------------------------------------------------


def is_v2_old() -> bool:
    """Whether V2 lacks three things that it has from 0.31 on.

    It cuts no drafts of ours, as no attention kernel says whether it allows that. `hybrid.py` is written for 0.31's
    speculators. And a streaming session ends an engine with drafts, whose scheduler asserts that there is a token to
    schedule.
    """
    return is_before(0, 31)


def captures_one_k() -> bool:
    """Whether V2 captures CUDA graphs for one K alone, and not for each of a schedule, as in 0.24.

    It also refuses a schedule, and turns off graphs of whole steps where there is one: `hooks.override_cudagraph_mode`.
    """
    return is_before(0, 25)


def choose_captured(manager: Any) -> None:
    """Let V2's manager of CUDA graphs choose anew what to capture: the steps of each K of its configuration's schedule.

    Only the first two lines are needed from 0.25 on.
    """
    manager._candidates, manager._capture_descs = {}, {}
    manager._init_candidates()
    ranges = manager.vllm_config.speculative_config.num_speculative_tokens_per_batch_size
    mode, sizes = manager.cudagraph_mode.decode_mode(), manager.compilation_config.cudagraph_capture_sizes
    if not (captures_one_k() and ranges and sizes and manager.cudagraph_mode.separate_routine()):
        return
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    chosen = set()
    for width, size, num_loras in itertools.product({k + 1 for _, _, k in ranges}, sizes, manager.lora_capture_cases):
        num_requests = min(-(-size // width), manager.max_num_reqs)
        if num_requests * width <= max(sizes):
            chosen.add(BatchExecutionDescriptor(mode, num_requests * width, num_requests, width, num_loras))
    manager._capture_descs[mode] = sorted(chosen, key=lambda desc: desc.num_tokens, reverse=True)


def drop_stale_output(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> None:
    """Drop what was on its way when `reset_prefix_cache` preempted its request, and nothing after it.

    Up to 0.26 vLLM notes how many tokens were on their way, drafts included, and drops the output of as many steps:
    rollouts lose what K steps sampled. 0.24 also takes a rejected draft of the dropped step from what the request that
    begins anew has computed. One step is on its way at most, with asynchronous scheduling and without pipeline
    parallelism.
    """
    if not is_before(0, 27):
        return
    for req_id in scheduler_output.num_scheduled_tokens:
        request = scheduler.requests.get(req_id)
        if request is not None and request.async_tokens_to_discard:
            request.async_tokens_to_discard = 0
            if model_runner_output.sampled_token_ids:
                model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[req_id]] = []


def keep_windows(scheduler: Any) -> None:
    """Let a scheduler keep the blocks of a sliding window that tokens may read whose drafts are rejected.

    Up to 0.25 vLLM takes drafts on their way for accepted, and gives away blocks that lie before the window then.
    """
    if not is_before(0, 26):
        return
    coordinator = scheduler.kv_cache_manager.coordinator
    remove = coordinator.remove_skipped_blocks

    def remove_skipped_blocks(req_id: str, num_computed_tokens: int, *args: Any) -> None:
        on_their_way = scheduler.requests[req_id].num_output_placeholders
        remove(req_id, max(0, num_computed_tokens - on_their_way), *args)

    coordinator.remove_skipped_blocks = remove_skipped_blocks


def verifies_adaptively(speculative_config: Any) -> bool:
    """Whether drafts are cut on the device: an attribute from 0.28 on."""
    return getattr(speculative_config, "enable_adaptive_verification", False)


def adaptive_verification(runner: Any) -> Any:
    """What cuts a V2 runner's drafts on the device, or None: an attribute from 0.28 on."""
    return getattr(runner, "adaptive_verification", None)


def count_memory(runner: Any, num_bytes: int) -> None:
    """Let vLLM subtract memory that was allocated before the model was loaded from what the KV cache gets.

    Up to 0.26 it adds up what loading and profiling take.
    """
    if is_before(0, 27):
        runner.model_memory_usage += num_bytes


def draft_step_argument(speculator: Any, step: int) -> dict[str, int]:
    """How the step as a number is passed to vLLM's `sample_draft`, which takes it from 0.32 on."""
    return {"spec_step_idx": step} if hasattr(speculator, "compute_draft_logits") else {}


def draft_logits_of(speculator: Any, hidden_states: Any, step: int) -> Any:
    """What a model drafter's logits are, float [B, vocabulary].

    From 0.32 on a speculator has a method for it, as some models have a head for each step.
    """
    if hasattr(speculator, "compute_draft_logits"):
        return speculator.compute_draft_logits(hidden_states, step)
    return speculator.model.compute_logits(hidden_states)


def counts_on_host(manager: Any) -> tuple[None, ...]:
    """What `reallocate_drafts` of vLLM's adaptive verification returns as its fourth value, from 0.33 on.

    It is for batch-sharded sampling, which we refuse.
    """
    return (None,) if hasattr(manager, "_copy_admitted_drafts_to_host") else ()


def limit_draft_graphs(speculator: Any, num_model_tokens: int) -> None:
    """Capture as many of a model drafter's steps as it drafts tokens.

    From 0.32 on the graphs of several steps have as many as the engine verifies; before, as many as the speculator has
    steps.
    """
    manager = getattr(speculator, "decode_cudagraph_manager", None)
    if manager is not None:
        manager.vllm_config = copy.copy(manager.vllm_config)
        manager.vllm_config.speculative_config = copy.copy(manager.vllm_config.speculative_config)
        manager.vllm_config.speculative_config.num_speculative_tokens = num_model_tokens


def longest_query(width: int) -> dict[str, int]:
    """The argument of `CudaGraphManager.dispatch` for graphs whose requests have several lengths, from 0.28 on."""
    return {} if is_before(0, 28) else {"max_query_len": width}


def padding_of(batch: Any) -> dict[str, Any]:
    """The argument of `set_forward_context` that says which tokens of a batch are padding, from 0.25 on."""
    return {"is_padding": batch.is_padding} if hasattr(batch, "is_padding") else {}


# -- V2's sampler ----------------------------------------------------------------------------------------------------


def logits_processors_of(sampler: Any) -> Any:
    """V2's logits processors, an attribute from 0.31 on, among which may be a user's own."""
    return getattr(sampler, "logits_processors", ())


def apply_sampling_params(sampler: Any, logits: Any, batch: Any, position: Any) -> Any:
    """V2's own processing of logits, float32 [N, V]. `logits` stay as they are.

    0.26 works in place, so it gets a copy, and so do 0.24, 0.25 and 0.27, which have its signature. 0.28 added the
    argument `idx_mapping`, 0.31 `seq_lens_upper_bound_np`.

    Args:
        sampler: vLLM's `Sampler`.
        logits: float [N, V].
        batch: vLLM's `InputBatch`.
        position: int64 [N], the input position of each row.
    """
    more = {"idx_mapping": batch.idx_mapping, "seq_lens_upper_bound_np": batch.seq_lens_cpu_upper_bound.numpy()}
    if is_before(0, 31):
        del more["seq_lens_upper_bound_np"]
    if is_before(0, 28):
        import torch

        del more["idx_mapping"]
        logits = logits.to(torch.float32, copy=True)
    return sampler.apply_sampling_params(
        logits,
        expanded_idx_mapping=batch.expanded_idx_mapping,
        idx_mapping_np=batch.idx_mapping_np,
        pos=position,
        input_ids=batch.input_ids[batch.logits_indices],
        expanded_local_pos=batch.expanded_local_pos,
        **more,
    )


def mend_bad_words(sampler: Any) -> None:
    """Let V2 forbid words of several tokens at drafted positions as elsewhere.

    Up to 0.27 it compares a word with the tokens one place before.
    """
    if not is_before(0, 28):
        return
    state = sampler.bad_words_state
    apply = state.apply_bad_words

    def apply_bad_words(logits: Any, rows: Any, slots: Any, input_ids: Any, places: Any) -> None:
        apply(logits, rows, slots, input_ids.roll(-1), places)

    state.apply_bad_words = apply_bad_words


def compute_topk_scores(*args: Any, logits_mode: bool, **kwargs: Any) -> Any:
    """vLLM's function of this name, which up to 0.25 has another, and knows log-probabilities alone.

    V2 of these takes no other `logprobs_mode`.
    """
    from vllm.v1.worker.gpu.sample import logprob

    if hasattr(logprob, "compute_topk_scores"):
        return logprob.compute_topk_scores(*args, logits_mode=logits_mode, **kwargs)
    return logprob.compute_topk_logprobs(*args, **kwargs)


# -- CPU engines -----------------------------------------------------------------------------------------------------


def survive_lazy_modules(dispatcher: Any) -> None:
    """Make the kernel registration of `vllm.triton_utils.dispatcher` skip objects whose `__dict__` is no dict.

    It calls `vars()` on every object in every imported module. For llvmlite's library handle, which numba imports, it
    gets something else than a dict, and the engine does not start.
    """

    def instance_dict(value: Any) -> Mapping[str, Any]:
        try:  # without the object's own look-up: that of torch.distributed.reduce_op warns
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return {}
        return attributes if isinstance(attributes, Mapping) else {}

    dispatcher.vars = instance_dict  # shadows the builtin in that module only


@contextmanager
def plain_weights() -> Iterator[None]:
    """Make engines that are built inside keep their linear weights as loaded. Does nothing off the CPU platform.

    On CPUs vLLM repacks linear weights and drops the originals, so `load_weights` fails, and with it every trainer's
    weight synchronisation.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    import torch
    from vllm.model_executor.layers import utils

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    repack = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = keep
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = repack
