"""The supported versions of vLLM, and one function for each difference between them.

Each function names the versions concerned, and the oldest supported version with which it can be removed. Three more
differences need none: `init_speculator` also gets the runner's request states, and a rejection sampler also
`invalid_drafts`, from 0.32 on, which our signatures take; and `vllm.triton_utils.dispatcher`, the module that
`survive_lazy_modules` changes, exists from 0.31 on. From 0.31 on V2's own noise equals ours; that of 0.26 to 0.30 is
replaced by ours, with and without speculation.

This module imports neither vLLM nor torch: the plugin is loaded in every process of every engine.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollout_spec.imports import INSTALL_VLLM

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


# -- what a user can set ---------------------------------------------------------------------------------------------


def ignored_sampler_option(vllm_config: Any) -> str | None:
    """The first option that is set which vLLM's V2 sampler supports and ours does not.

    `return_sampling_mask` came with 0.28, `enable_trace_replay` with 0.29 and `watermark_config` with 0.30. With 0.30
    as the oldest version, read the attributes without a default.
    """
    for owner, name in (
        (vllm_config.model_config, "use_fp64_gumbel"),
        (vllm_config.model_config, "return_sampling_mask"),
        (vllm_config.model_config, "enable_trace_replay"),
        (vllm_config, "watermark_config"),
    ):
        if getattr(owner, name, None):
            return name
    return None


def mixes_recurrent_states(version_tuple: tuple[Any, ...]) -> bool:
    """Whether a step without a draft, after one that accepted some, reads a recurrent layer's state of another token.

    So it is in both runners up to 0.31. With 0.32 as the oldest version, this can go.
    """
    return (0, 0) < version_tuple[:2] < (0, 32)


def verifies_adaptively(speculative_config: Any) -> bool:
    """Whether V2 cuts drafts by their confidence, as it can from 0.28 on.

    With 0.28 as the oldest version, read the attribute without a default.
    """
    return bool(getattr(speculative_config, "enable_adaptive_verification", False))


def may_verify_adaptively(vllm_config: Any, version_tuple: tuple[Any, ...]) -> bool:
    """Whether vLLM may cut our drafts, before it has a GPU to ask: `check_adaptive_verification` decides.

    With 0.31 as the oldest version, the second test can go.
    """
    return vllm_config.lora_config is None and not (0, 0) < version_tuple[:2] < (0, 31)


def check_adaptive_verification(vllm_config: Any) -> None:
    """Raise ValueError where vLLM's adaptive verification does not fit an engine, as far as its configuration says.

    vLLM has what our speculator needs from 0.31 on. Routed experts it refuses before our hooks are asked. With 0.31 as
    the oldest version, the first test can go.
    """
    from vllm.v1.worker.gpu import attn_utils

    if not hasattr(attn_utils, "get_varlen_cudagraph_unsupported_backend"):
        raise ValueError("it needs vLLM 0.31")
    if vllm_config.aux_output_config.enable_return_routed_experts:
        raise ValueError("routed experts are returned")
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError("context parallelism")
    sizes, speculative = vllm_config.compilation_config.cudagraph_capture_sizes, vllm_config.speculative_config
    most = vllm_config.scheduler_config.max_num_seqs * (speculative.num_speculative_tokens + 1)
    if min(sizes or [most + 1]) > most:
        raise ValueError("there are no CUDA graphs of whole steps whose time it could measure")
    speculative.enable_adaptive_verification = True
    try:
        vllm_config._validate_adaptive_verification()
    finally:
        speculative.enable_adaptive_verification = False


# -- the front end ---------------------------------------------------------------------------------------------------


def cuts_at_stop_strings(output_processor: Any) -> bool:
    """Whether vLLM itself drops the tokens that a step sampled after a stop string, as from 0.32 on.

    With 0.32 as the oldest version, this can go, and `stop_strings.end_outputs_at_stop_strings` with it.
    """
    return hasattr(output_processor, "_trim_surplus_tokens")


# -- V2's model runner -----------------------------------------------------------------------------------------------


def lacks_v2_interfaces(version_tuple: tuple[Any, ...]) -> bool:
    """Whether V2's model runner is one that our V2 modules do not fit, as in 0.24 and 0.25.

    Engines run in V1 there. With 0.26 as the oldest version, this can go.
    """
    return (0, 0) < version_tuple[:2] < (0, 26)


def shards_batch(runner: Any) -> bool:
    """Whether the runner's ranks each sample a part of the batch, as they can from 0.29 on.

    With 0.29 as the oldest version, read the attribute without a default.
    """
    return getattr(runner, "batch_sharder", None) is not None


def replays_any_lengths(runner: Any) -> bool:
    """Whether one CUDA graph can serve decode steps whose requests have any numbers of tokens, up to K + 1 each.

    vLLM needs that for its adaptive verification, from 0.28 on, and asks the attention backends by a function of their
    own from 0.31 on. With 0.31 as the oldest version, import it without asking.
    """
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu import attn_utils

    find_unsupported = getattr(attn_utils, "get_varlen_cudagraph_unsupported_backend", None)
    if find_unsupported is None:
        return False
    if runner.model_state.get_additional_cg_support()[0] != AttentionCGSupport.ALWAYS:
        return False
    return find_unsupported(runner.attn_groups, runner.vllm_config, runner.decode_query_len) is None


def speculator_model() -> Any:
    """The `model` of a speculator without one: an empty module.

    0.26 and 0.27 prepare communication buffers for `speculator.model`. With 0.28 as the oldest version, this can go.
    """
    import torch

    return torch.nn.Module()


def draft_step_argument(speculator: Any, step: int) -> dict[str, int]:
    """How the step as a number is passed to vLLM's `sample_draft`, which takes it from 0.32 on.

    With 0.32 as the oldest version, pass it as `spec_step_idx`.
    """
    return {"spec_step_idx": step} if hasattr(speculator, "compute_draft_logits") else {}


def draft_logits_of(speculator: Any, hidden_states: Any, step: int) -> Any:
    """What a model drafter's logits are, float [B, vocabulary].

    From 0.32 on a speculator has a method for it, as some models have a head for each step. With 0.32 as the oldest
    version, call that.
    """
    if hasattr(speculator, "compute_draft_logits"):
        return speculator.compute_draft_logits(hidden_states, step)
    return speculator.model.compute_logits(hidden_states)


def limit_draft_graphs(speculator: Any, num_model_tokens: int) -> None:
    """Capture as many of a model drafter's steps as it drafts tokens.

    From 0.32 on the graphs of several steps have as many as the engine verifies; before, as many as the speculator has
    steps. With 0.32 as the oldest version, nothing changes here.
    """
    manager = getattr(speculator, "decode_cudagraph_manager", None)
    if manager is not None:
        manager.vllm_config = copy.copy(manager.vllm_config)
        manager.vllm_config.speculative_config = copy.copy(manager.vllm_config.speculative_config)
        manager.vllm_config.speculative_config.num_speculative_tokens = num_model_tokens


# -- V2's sampler ----------------------------------------------------------------------------------------------------


def sampling_params_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The `SamplingParams` among the arguments of `Sampler.add_request` after the request's index.

    Up to 0.30 the prompt's length comes before them. With 0.31 as the oldest version, name them in the signature.
    """
    return kwargs["sampling_params"] if "sampling_params" in kwargs else args[-1]


def has_own_processors(sampler: Any) -> bool:
    """Whether the sampler applies logits processors of the user's own, as it can from 0.31 on.

    With 0.31 as the oldest version, read the attribute without a default.
    """
    processors = getattr(sampler, "logits_processors", ())
    return any(not type(processor).__module__.startswith("vllm.") for processor in processors)


def apply_sampling_params(sampler: Any, logits: Any, input_batch: Any, position: Any) -> Any:
    """V2's own processing of logits, float32 [N, V]. `logits` stay as they are.

    0.26 works in place, so it gets a copy; so does 0.27, which has the same signature. 0.28 added the argument
    `idx_mapping`, 0.31 `seq_lens_upper_bound_np`. With 0.31 as the oldest version, call the sampler with all of them.

    Args:
        sampler: vLLM's `Sampler`.
        logits: float [N, V].
        input_batch: vLLM's `InputBatch`.
        position: int64 [N], the input position of each row.
    """
    accepted = inspect.signature(sampler.apply_sampling_params).parameters
    if "idx_mapping" not in accepted:
        import torch

        logits = logits.to(torch.float32, copy=True)
    values = {
        "logits": logits,
        "expanded_idx_mapping": input_batch.expanded_idx_mapping,
        "idx_mapping": input_batch.idx_mapping,
        "idx_mapping_np": input_batch.idx_mapping_np,
        "pos": position,
        "input_ids": input_batch.input_ids[input_batch.logits_indices],
        "expanded_local_pos": input_batch.expanded_local_pos,
        "seq_lens_upper_bound_np": input_batch.seq_lens_cpu_upper_bound.numpy(),
    }
    return sampler.apply_sampling_params(**{name: value for name, value in values.items() if name in accepted})


def first_rows(input_batch: Any, *, on_device: bool) -> Any:
    """Each request's first row of logits, as `LogprobsTensors` take them: a list, or int32 [B + 1] on the device.

    Where drafts are cut on the device (`on_device`), only the device knows them, and vLLM takes them from there from
    0.29 on. 0.28 uses the host's upper bounds. With 0.29 as the oldest version, `on_device` alone decides.
    """
    from vllm.v1.outputs import LogprobsTensors

    if on_device and "cu_num_generated_tokens_tensor" in LogprobsTensors._fields:
        return input_batch.cu_num_logits.clone()
    return input_batch.cu_num_logits_np.tolist()


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
