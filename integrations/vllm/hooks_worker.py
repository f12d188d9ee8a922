"""Hooks of vLLM's workers: warm-up, weights, shutdown, and the command `rollout_spec`.

Each hook is called as `(original, self, ...)` in place of the method. CPUWorker inherits from Worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollout_spec.integrations.vllm import log
from rollout_spec.integrations.vllm.configuration import is_recurrent

if TYPE_CHECKING:
    from rollout_spec.integrations.vllm.runner import RunnerAdapter

NOT_LOADING = (
    "init_", "prepare_", "fetch_", "compute_", "get_", "check_", "supports_", "save_", "export_", "offload_", "dump_",
    "destroy_", "close_", "release_", "free_", "has_", "is_", "verify_", "log_",
)  # fmt: skip
"""Beginnings of the names of workers' methods that do something else with weights."""


def loads_weights(method: str) -> bool:
    """Whether a worker's method loads weights. Frameworks bring their own methods, whose names say what they do."""
    is_loading = "weight" in method or "refit" in method
    is_pause = "sleep" in method or "wake" in method
    return is_loading and not is_pause and not method.startswith(NOT_LOADING)


def _adapter_of(worker: Any) -> Any:
    """The adapter of a worker's model runner; None for engines that do not ask for us."""
    return getattr(getattr(worker, "model_runner", None), "rollout_spec", None)


def _warming_up(worker: Any) -> contextlib.AbstractContextManager[None]:
    adapter: RunnerAdapter | None = _adapter_of(worker)
    return contextlib.nullcontext() if adapter is None else adapter.warm_up()


def load_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Notice from now on that the model loads weights."""
    result = original(self, *args, **kwargs)
    adapter = _adapter_of(self)
    if adapter is not None:
        adapter.weights.watch(self.model_runner.get_model())
    return result


def add_lora(original: Callable[..., Any], self: Any, lora_request: Any) -> Any:
    """Begin a policy version."""
    adapter = _adapter_of(self)
    if adapter is not None:
        adapter.on_adapter(lora_request)
    return original(self, lora_request)


def determine_available_memory(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Ignore made-up requests, as from vLLM 0.33 on V2 samples for them here, and say what recurrent states take."""
    with _warming_up(self):
        result = original(self, *args, **kwargs)
    if _adapter_of(self) is not None and self.rank == 0 and is_recurrent(self.vllm_config):
        remark = log.describe_states(self.model_runner.get_kv_cache_spec().values(), self.vllm_config)
        if remark is not None:
            log.say(remark)
    return result


def compile_or_warm_up_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile and check our kernels before vLLM compiles its own, and take in history after that."""
    adapter = _adapter_of(self)
    if adapter is not None:  # first: jit_monitor_mode="error" forbids compilation once vLLM's own is done
        adapter.compile_kernels()
        adapter.check_kernels()
    with _warming_up(self):
        result = original(self, *args, **kwargs)
    if adapter is not None:
        adapter.load_history()
    return result


def getattr_of_wrapper(original: Callable[..., Any], self: Any, name: str) -> Any:
    """Notice calls that load weights.

    Every method that a front end calls by name is looked up here, those of worker extensions, too.
    """
    if loads_weights(name):
        adapter = _adapter_of(vars(self).get("worker"))
        if adapter is not None:
            adapter.weights.announce()
    return original(self, name)


def shutdown_wrapper(original: Callable[..., None], self: Any) -> None:
    """Write what has ended. A process that was forked by multiprocessing runs no exit handlers."""
    adapter = _adapter_of(vars(self).get("worker"))
    try:
        if adapter is not None:
            adapter.close()
    finally:
        original(self)


def add_command(module: Any) -> None:
    """Give vLLM's workers the method `rollout_spec`, for `llm.collective_rpc`."""

    def rollout_spec(self: Any, command: str, *args: Any) -> Any:
        """Run a command of the runner's adapter: `llm.collective_rpc("rollout_spec", args=("stats",))`."""
        adapter = _adapter_of(self)
        if adapter is None:
            raise RuntimeError(
                "this engine runs without rollout_spec: build it with rollout_spec.engine_kwargs(), and check that "
                "the VLLM_PLUGINS environment variable, if set, contains rollout_spec"
            )
        return adapter.command(command, *args)

    module.WorkerBase.rollout_spec = rollout_spec
