"""The plugin that vLLM loads in every process: a table of hooks, which act only on engines that ask for rollout_spec.

An engine asks by `additional_config={"rollout_spec": {...}}` or by naming our proposer in its `speculative_config`
(`rollout_spec.engine_kwargs()` gives both); the environment variable ROLLOUT_SPEC does so for all engines of a process.
`config.py` reads and checks what they ask for. None of this imports vLLM or torch before vLLM does.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import wrapt

from rollout_spec.integrations.vllm import compat, config, hooks


class Hook(NamedTuple):
    """What is called in place of a method or function of vLLM's."""

    module: str
    owner: str | None
    """The class; None: the module."""
    name: str
    function: Callable[..., Any]
    """Takes the original, and then the original's arguments."""
    since: tuple[int, int] = compat.OLDEST_VERSION
    """The oldest vLLM in which it is needed."""
    until: tuple[int, int] | None = None
    """The first one in which it no longer is."""

    def apply(self, module: Any) -> None:
        """Replace the original. Raises AttributeError if there is none, and TypeError if it cannot be replaced."""
        if compat.is_before(*self.since) or (self.until is not None and not compat.is_before(*self.until)):
            return
        owner = module if self.owner is None else getattr(module, self.owner)
        setattr(owner, self.name, _wrapped(getattr(owner, self.name), self.function))


def _wrapped(original: Any, function: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return wrapper


_config = "vllm.config.vllm", "VllmConfig"
_inputs = "vllm.v1.engine.input_processor", "InputProcessor"
_scheduler = "vllm.v1.core.sched.scheduler", "Scheduler"
_async_scheduler = "vllm.v1.core.sched.async_scheduler", "AsyncScheduler"
_runner_v1 = "vllm.v1.worker.gpu_model_runner", "GPUModelRunner"
_runner_v2 = "vllm.v1.worker.gpu.model_runner", "GPUModelRunner"
_worker = "vllm.v1.worker.gpu_worker", "Worker"
_cpu_worker = "vllm.v1.worker.cpu_worker", "CPUWorker"
_wrapper = "vllm.v1.worker.worker_base", "WorkerWrapperBase"
_init_offline = functools.partial(hooks.init_front_end, is_offline=True)
_init_async = functools.partial(hooks.init_front_end, is_offline=False)

HOOKS = (
    Hook("vllm.engine.arg_utils", "EngineArgs", "create_engine_config", hooks.create_engine_config),
    Hook(*_config, "__post_init__", hooks.complete_config),
    Hook(*_config, "_set_cudagraph_sizes", hooks.set_cudagraph_sizes),
    Hook(*_config, "_get_v2_model_runner_unsupported_features", hooks.v2_unsupported_features),
    Hook(*_config, "_maybe_override_dynamic_sd_cudagraph_mode", hooks.override_cudagraph_mode, until=(0, 25)),
    Hook("vllm.sampling_params", "SamplingParams", "_validate_spec_decode", hooks.validate_sampling_params),
    Hook(*_inputs, "__init__", hooks.init_input_processor),
    Hook(*_inputs, "process_inputs", hooks.process_inputs),
    Hook("vllm.v1.engine.llm_engine", "LLMEngine", "__init__", _init_offline),
    Hook("vllm.v1.engine.async_llm", "AsyncLLM", "__init__", _init_async),
    Hook("vllm.v1.engine.core", "EngineCore", "_initialize_kv_caches", hooks.initialize_kv_caches),
    Hook("vllm.v1.engine.core", "EngineCore", "collective_rpc", hooks.collective_rpc),
    Hook(*_scheduler, "__init__", hooks.init_scheduler),
    Hook(*_scheduler, "update_from_output", hooks.update_from_output),
    Hook(*_scheduler, "make_spec_decoding_stats", hooks.make_spec_decoding_stats),
    Hook(*_async_scheduler, "_update_after_schedule", hooks.update_after_schedule),
    Hook(*_runner_v1, "__init__", hooks.init_runner),
    Hook(*_runner_v1, "execute_model", hooks.execute_model),
    Hook(*_runner_v1, "sample_tokens", hooks.sample_tokens),
    Hook(*_runner_v1, "_sample", hooks.sample_v1),
    Hook(*_runner_v1, "_input_fits_in_drafter", hooks.input_fits_in_drafter_v1),
    Hook(*_runner_v2, "__init__", hooks.init_runner),
    Hook(*_runner_v2, "execute_model", hooks.execute_model),
    Hook(*_runner_v2, "sample_tokens", hooks.sample_tokens),
    Hook("vllm.v1.worker.gpu.model_runner", None, "init_speculator", hooks.init_speculator_v2),
    Hook(*_runner_v2, "initialize_kv_cache", hooks.initialize_kv_cache_v2),
    Hook("vllm.v1.worker.gpu.model_runner", None, "async_tensor_h2d", hooks.upload_input_v2, (0, 31)),
    Hook("vllm.v1.worker.gpu.model_runner", None, "expand_idx_mapping", hooks.rows_v2, (0, 31)),
    Hook("vllm.v1.worker.gpu.async_utils", None, "async_copy_to_np", hooks.copy_to_host_v2),
    Hook("vllm.v1.worker.gpu.async_utils", "AsyncOutput", "get_output", hooks.get_output_v2),
    Hook(*_worker, "load_model", hooks.load_model),
    Hook(*_worker, "determine_available_memory", hooks.determine_available_memory),
    Hook(*_worker, "compile_or_warm_up_model", hooks.compile_or_warm_up_model),
    Hook(*_cpu_worker, "determine_available_memory", hooks.determine_available_memory),
    Hook(*_cpu_worker, "compile_or_warm_up_model", hooks.compile_or_warm_up_model),
    Hook(*_wrapper, "shutdown", hooks.shutdown_wrapper),
)


def register() -> None:
    """Install each hook when vLLM's module is imported. Idempotent; vLLM calls it in each of its processes."""
    global _registered
    if _registered:
        return
    _registered = True
    _after_import("vllm.triton_utils.dispatcher", compat.survive_lazy_modules)
    _after_import("vllm.v1.worker.worker_base", hooks.add_command)
    for hook in HOOKS:
        _after_import(hook.module, hook.apply)


_registered = False


def _after_import(name: str, change: Callable[[Any], None]) -> None:
    wrapt.register_post_import_hook(functools.partial(install_or_note, change), name)


def install_or_note(change: Callable[[Any], None], module: Any) -> None:
    """Change a module of vLLM's. Where vLLM is no longer as it was, only engines that ask for rollout_spec fail.

    Args:
        change: Takes the module.
        module: vLLM's.

    Raises:
        RuntimeError: the change does not fit, and the environment variable asks for all engines.
    """
    try:
        change(module)
    except (AttributeError, ImportError, TypeError) as error:  # a name or module is missing, or cannot be replaced
        what = f"in {module.__name__}, {error}"
        if what not in config.missing:  # a class that is missing lacks all its methods
            config.missing.append(what)
        if os.environ.get(config.VARIABLE):  # the hook may be the one that would have read it
            config.need_all_hooks()
