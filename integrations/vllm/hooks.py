"""The hooks of the table in `plugin.py`: what is called in place of vLLM's methods.

Each is called as `(original, self, ...)`, in the order in which an engine lives: its configuration, its requests in the
front end, its worker, and its model runner, which has an `EngineV1` or `EngineV2` of ours. These are
imported only for engines that ask for us. A runner of any other engine has `rollout_spec = None`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from rollout_spec import schedule
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.integrations.vllm import compat, graphs
from rollout_spec.integrations.vllm.config import (
    MODELS,
    PASSES,
    RUNNER_REASON,
    VARIABLE,
    ask_for_speculation,
    check_engine,
    check_environment,
    chooses_k,
    config_of,
    decide_options,
    describe_engine,
    has_model_drafter,
    is_a100,
    is_ours,
    note_runner,
    read_config,
    reasons_for_v1,
    refuse_host_drafter,
    refuse_model_drafter,
    say,
    share_of_experts,
)
from rollout_spec.integrations.vllm.ranks import end_if_unheard
from rollout_spec.integrations.vllm.requests import FrontEnd

ASYNC_METHOD = "ngram_gpu"
"""vLLM's one method without a model that keeps scheduling asynchronous. In V2 our device drafter runs under it."""


# -- configuration ---------------------------------------------------------------------------------------------------


def create_engine_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let an engine ask for us where the environment variable says so."""
    asked = ask_for_speculation(self)
    try:
        vllm_config = original(self, *args, **kwargs)
        usage = kwargs.get("usage_context", args[0] if args else None)
        if getattr(usage, "name", None) == "OPENAI_API_SERVER" and not os.environ.get(VARIABLE):
            config = config_of(vllm_config)
            if config is not None and config.sub_steps is None:  # its clients see tokens as they come
                decide_options(vllm_config, dataclasses.replace(config, sub_steps=1))
        return vllm_config
    except ValueError as error:
        if not asked:
            raise
        remedy = f'{VARIABLE} asks for speculation in this engine: its "{MODELS}" can leave it out'
        raise ValueError(f"{error}\n{remedy}") from error


def complete_config(original: Callable[..., None], self: Any) -> None:
    """Settle what an engine leaves open. With a drafter on the host, schedule synchronously."""
    config, speculative = config_of(self), self.speculative_config
    if config is not None:
        if config.speculation and not hasattr(speculative, RUNNER_REASON):  # vLLM comes here once more for copies
            note_runner(self)
            config = _with_affordable_drafts(self, config)
        decide_options(self, config)
        if has_model_drafter(self):
            refuse_model_drafter(self)
            if speculative.draft_sample_method != "greedy":  # vLLM would keep the drafts' probabilities for us
                say(f"draft_sample_method={speculative.draft_sample_method!r} has no effect with rollout_spec")
                speculative.draft_sample_method = "greedy"
        elif config.drafts_on_device and self.use_v2_model_runner:
            speculative.method = ASYNC_METHOD
        if config.drafts_on_host:
            refuse_host_drafter(self, config)
            self.scheduler_config.async_scheduling = False  # vLLM would do so, and warn
    original(self)


def _with_affordable_drafts(vllm_config: Any, config: RolloutSpecConfig) -> RolloutSpecConfig:
    """The settings of an engine whose device drafts, with as many tokens as pay by the requests that run.

    An engine alone gets bounds of K in vLLM's configuration, unless it is given some. Data-parallel engines may wait
    for each other in every step, so they have one K, and no bounds. Returns `budget=True` only where we choose K.
    """
    speculative, is_alone = vllm_config.speculative_config, vllm_config.parallel_config.data_parallel_size == 1
    if not config.drafts_on_device or not vllm_config.use_v2_model_runner:
        return config
    if has_model_drafter(vllm_config):
        return dataclasses.replace(config, budget=False)
    if not is_alone:
        speculative.num_speculative_tokens_per_batch_size = None
    if not config.budget:
        return config
    cheap = schedule.CHEAP_TOKENS_A100 if is_a100() else schedule.CHEAP_TOKENS
    ranges = schedule.affordable_ranges(config.max_draft_tokens, cheap, share_of_experts(vllm_config))
    if is_alone:
        if speculative.num_speculative_tokens_per_batch_size is not None:
            return dataclasses.replace(config, budget=False)
        speculative.num_speculative_tokens_per_batch_size = ranges
        return config
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    k = schedule.one_k(ranges, max_num_seqs)
    say(
        f"rollout_spec: {k} draft token{'s' * (k > 1)} for every request, as data-parallel engines need one K: what "
        f"pays by simulation with max_num_seqs={max_num_seqs}; budget=False drafts {config.max_draft_tokens}"
    )
    return dataclasses.replace(config, num_speculative_tokens=k, budget=False)


def set_cudagraph_sizes(original: Callable[..., None], self: Any) -> None:
    """Add the sizes of steps in which every request has a draft."""
    config = config_of(self)
    if config is None or not config.speculation:
        original(self)
        return
    remark = graphs.add_graphs(self, functools.partial(original, self))
    if remark is not None:
        say(remark)


def v2_unsupported_features(original: Callable[..., list[str]], self: Any) -> list[str]:
    """Let vLLM choose V2 where it can run the model in it, and V1 where drafts are made on the host."""
    features, config = original(self), read_config(self)
    if config is None or not config.speculation:
        return features
    if not has_model_drafter(self):  # V2 knows no custom_class, and no ngram_gpu before 0.32: we bring our speculator
        method = self.speculative_config.method
        features = [f for f in features if not ("specul" in f and method in f)]
        if compat.captures_one_k():
            features = [f for f in features if f != "dynamic speculative decoding"]
    return [*features, *reasons_for_v1(self, config)]


def override_cudagraph_mode(original: Callable[..., None], self: Any) -> None:
    """Keep graphs of whole steps with a schedule of K in V2: see `compat.captures_one_k`."""
    if config_of(self) is None or not self.use_v2_model_runner:
        original(self)


def validate_sampling_params(original: Callable[..., None], self: Any, speculative_config: Any) -> None:
    """Allow min-p, which our verifier handles, and logit bias, which our V1 engine or vLLM's V2 applies."""
    if not is_ours(speculative_config):
        original(self, speculative_config)


# -- front end -------------------------------------------------------------------------------------------------------


def init_input_processor(original: Callable[..., None], self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Check an engine's configuration."""
    config = config_of(vllm_config)
    if config is not None:
        check_engine(vllm_config, config)
    self.rollout_spec = None
    original(self, vllm_config, *args, **kwargs)


def process_inputs(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Check a request's options, and give it a seed if it has none."""
    request = original(self, *args, **kwargs)
    if self.rollout_spec is not None and request.sampling_params is not None:
        self.rollout_spec.prepare(request)
    return request


def init_front_end(original: Callable[..., None], self: Any, *args: Any, is_offline: bool, **kwargs: Any) -> None:
    """Make what checks requests and gives them seeds, say what the engine has, and end outputs at stop strings."""
    original(self, *args, **kwargs)
    vllm_config = self.vllm_config
    config = config_of(vllm_config)
    if config is None:
        return
    front_end = self.input_processor.rollout_spec = FrontEnd(vllm_config, config, is_offline=is_offline)
    say(describe_engine(vllm_config, config))
    if front_end.repeats_engine_seed:
        say(
            f"rollout_spec: requests without a seed get theirs from the engine's, {vllm_config.model_config.seed}, and "
            "their number: another engine with this seed, or this one after a restart, repeats these rollouts"
        )
    if config.speculation:
        compat.end_outputs_at_stop_strings(self.output_processor)


def initialize_kv_caches(original: Callable[..., Any], self: Any, vllm_config: Any) -> Any:
    """Ask the workers, once they are ready, what they can do. The scheduler is made after that."""
    result = original(self, vllm_config)
    config = config_of(vllm_config)
    if config is not None and config.drafts_on_device:
        from rollout_spec.integrations.vllm.adaptive import decide_schedule

        reports = self.model_executor.collective_rpc("rollout_spec", args=("report",))
        most_passes = min(report["most_passes"] for report in reports)
        object.__setattr__(vllm_config.speculative_config, PASSES, (most_passes, config.sub_steps))
        if most_passes > 1:
            most = "up to " * (config.sub_steps is None)
            say(
                f"rollout_spec: {most}{most_passes} forward passes per step of the scheduler where a batch only decodes"
            )
        decide_schedule(vllm_config, reports)
    return result


def init_scheduler(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Let steps have several forward passes, and whole drafts or none where they are not cut.

    With synchronous scheduling vLLM verifies whatever the drafter gives. Under `external_launcher`, as TRL's colocated
    engines have it, each tensor-parallel rank has a scheduler and a clock of its own, so nothing may depend on times.
    """
    original(self, *args, **kwargs)
    self.rollout_spec = None
    speculative = self.vllm_config.speculative_config
    most_passes, sub_steps = getattr(speculative, PASSES, (0, None))
    if not most_passes or not self.vllm_config.scheduler_config.async_scheduling:
        return
    compat.keep_windows(self)
    parallel = self.vllm_config.parallel_config
    has_peers = parallel.tensor_parallel_size > 1 and parallel.distributed_executor_backend == "external_launcher"
    chooses = chooses_k(self.vllm_config) and not has_peers
    if most_passes == 1 and not chooses:
        return
    from rollout_spec.integrations.vllm.sub_steps import Steps

    self.rollout_spec = Steps(self, most_passes, sub_steps, has_clock=not has_peers, chooses_k=chooses)


def collective_rpc(
    original: Callable[..., Any], self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
) -> Any:
    """Pass `set_enabled` on to the scheduler: otherwise each request would have K zeros verified while it is off.

    vLLM calls this for the commands of every engine, also before there is a scheduler.
    """
    results = original(self, method, timeout, args, kwargs)
    steps = getattr(getattr(self, "scheduler", None), "rollout_spec", None)
    if method == "rollout_spec" and list(args[:1]) == ["set_enabled"] and steps is not None:
        steps.set_enabled(*args[1:])  # which the workers have checked
    return results


def update_after_schedule(original: Callable[..., None], self: Any, scheduler_output: Any) -> None:
    """Give a step further forward passes before its tokens are counted."""
    if self.rollout_spec is not None:
        self.rollout_spec.lengthen(scheduler_output)
    original(self, scheduler_output)


def update_from_output(original: Callable[..., Any], self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
    """Drop what a preemption has made void, and learn from a step."""
    if is_ours(self.vllm_config.speculative_config):
        compat.drop_stale_output(self, scheduler_output, model_runner_output)
    if self.rollout_spec is not None:
        self.rollout_spec.observe(scheduler_output, model_runner_output)
    return original(self, scheduler_output, model_runner_output)


def make_spec_decoding_stats(original: Callable[..., Any], self: Any, stats: Any, **of_request: Any) -> Any:
    """Count each forward pass of a step by itself."""
    if self.rollout_spec is None:
        return original(self, stats, **of_request)
    return self.rollout_spec.count_drafts(functools.partial(original, self), stats, **of_request)


# -- workers; CPUWorker inherits from Worker -------------------------------------------------------------------------


def _engine_of(worker: Any) -> Any:
    """Our engine of a worker's model runner; None for engines that do not ask for us."""
    return getattr(getattr(worker, "model_runner", None), "rollout_spec", None)


def _warming_up(worker: Any) -> contextlib.AbstractContextManager[None]:
    engine = _engine_of(worker)
    return engine.ignoring_requests() if engine is not None else contextlib.nullcontext()  # type: ignore[no-any-return]


def load_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace V2's samplers."""
    result = original(self, *args, **kwargs)
    engine = _engine_of(self)
    if engine is not None:
        engine.on_load()
    return result


def determine_available_memory(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Ignore vLLM's made-up requests, for which V2 samples here from 0.33 on."""
    with _warming_up(self):
        return original(self, *args, **kwargs)


def compile_or_warm_up_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile and check our kernels before vLLM compiles its own, and take in history after that."""
    engine = _engine_of(self)
    if engine is not None:  # first: jit_monitor_mode="error" forbids compilation once vLLM's own is done
        engine.compile_kernels()
        engine.check_kernels()
    with _warming_up(self):
        result = original(self, *args, **kwargs)
    if engine is not None:
        engine.load_history()
    return result


def shutdown_wrapper(original: Callable[..., None], self: Any) -> None:
    """Write what has ended. A process that was forked by multiprocessing runs no exit handlers."""
    engine = _engine_of(vars(self).get("worker"))
    try:
        if engine is not None:
            engine.close()
    finally:
        original(self)


def add_command(module: Any) -> None:
    """Give vLLM's workers the method `rollout_spec`, for `llm.collective_rpc`. Takes vLLM's module, and no method."""

    def rollout_spec(self: Any, command: str, *args: Any) -> Any:
        """Run a command of the worker's engine: `llm.collective_rpc("rollout_spec", args=("stats",))`."""
        from rollout_spec.integrations.vllm.commands import run_command  # imports torch

        engine = _engine_of(self)
        if engine is None:
            raise RuntimeError(
                "this engine runs without rollout_spec: build it with rollout_spec.engine_kwargs(), and check that "
                "the VLLM_PLUGINS environment variable, if set, contains rollout_spec"
            )
        return run_command(engine, command, *args)

    module.WorkerBase.rollout_spec = rollout_spec


# -- both model runners ----------------------------------------------------------------------------------------------


def init_runner(original: Callable[..., None], self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Give a model runner our engine, and compile what the engine will call on the host."""
    self.rollout_spec = None
    config = config_of(vllm_config)
    original(self, vllm_config, *args, **kwargs)
    if config is None:
        return
    check_environment()
    from rollout_spec.integrations.vllm.warm_up import warm_up

    warm_up(config, device=self.device, log=say)
    if vllm_config.use_v2_model_runner:
        from rollout_spec.integrations.vllm.engine_v2 import EngineV2

        self.rollout_spec = EngineV2(self, config)
    else:
        from rollout_spec.integrations.vllm.engine_v1 import EngineV1

        self.rollout_spec = EngineV1(self, config)


def execute_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell our engine before a step and once the model has run."""
    if self.rollout_spec is None:
        return original(self, *args, **kwargs)
    try:
        scheduled = args[0] if args else kwargs.pop("scheduler_output")
        scheduled = self.rollout_spec.begin_step(scheduled)
        result = original(self, scheduled, *args[1:], **kwargs)
        self.rollout_spec.on_forward()
    except Exception as error:
        self.rollout_spec.on_error()
        end_if_unheard(self.vllm_config, error)
        raise
    return result


def sample_tokens(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a step's further forward passes. End the engine where an error of one rank would be heard by nobody."""
    try:
        result = original(self, *args, **kwargs)
        if self.rollout_spec is not None:
            self.rollout_spec.end_step(result)
        return result
    except Exception as error:
        if self.rollout_spec is not None:
            end_if_unheard(self.vllm_config, error)
        raise


# -- V1 --------------------------------------------------------------------------------------------------------------


def sample_v1(original: Callable[..., Any], self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
    """Sample in place of vLLM's samplers."""
    if self.rollout_spec is None:
        return original(self, logits, spec_decode_metadata)
    return self.rollout_spec.sample(logits, spec_decode_metadata)


def input_fits_in_drafter_v1(original: Callable[..., Any], self: Any, common_attn_metadata: Any) -> bool:
    """Let our proposer cut its drafts near max_model_len itself.

    There vLLM skips the proposer and verifies K zeros for every request instead.
    """
    if self.rollout_spec is None:
        return bool(original(self, common_attn_metadata))
    return common_attn_metadata is not None


# -- V2 --------------------------------------------------------------------------------------------------------------


def init_speculator_v2(original: Callable[..., Any], vllm_config: Any, device: Any, *args: Any) -> Any:
    """Make our speculator in place of vLLM's. A function of vLLM's module, and no method."""
    config = config_of(vllm_config)
    if config is None:
        return original(vllm_config, device, *args)
    if has_model_drafter(vllm_config):
        from rollout_spec.integrations.vllm.hybrid import make_model_speculator

        return make_model_speculator(original(vllm_config, device, *args))
    from rollout_spec.integrations.vllm.engine_v2 import SpeculatorFace

    return SpeculatorFace(vllm_config)


def initialize_kv_cache_v2(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Choose how drafts are cut, and which steps are captured in CUDA graphs, once vLLM has chosen."""
    config, initialize = config_of(self.vllm_config), functools.partial(original, self, *args, **kwargs)
    if config is None or not config.speculation:
        return initialize()
    from rollout_spec.integrations.vllm.adaptive import with_adaptive_verification

    result = with_adaptive_verification(self, initialize)
    self.rollout_spec.on_kv_cache()
    graphs.choose_graphs(self)
    return result


def upload_input_v2(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Leave out what is written where drafts are cut. A function of vLLM's module, and no method."""
    # Engines that cut drafts have imported it.
    cutting = sys.modules.get("rollout_spec.integrations.vllm.cutting")
    return original(*args, **kwargs) if cutting is None else cutting.upload_input(original, *args, **kwargs)


def rows_v2(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Give what is written where drafts are cut. A function of vLLM's module, and no method."""
    cutting = sys.modules.get("rollout_spec.integrations.vllm.cutting")
    return original(*args, **kwargs) if cutting is None else cutting.rows_of(original, *args, **kwargs)


def copy_to_host_v2(original: Callable[..., Any], tensor: Any) -> Any:
    """Copy all of a step's output where vLLM asks for a part of it. A function of vLLM's module, and no method."""
    buffer, on_host = getattr(tensor, "copy_of_step", (None, None))
    if buffer is None:
        return original(tensor)
    buffer.copy()
    return on_host


def get_output_v2(original: Callable[..., Any], self: Any) -> Any:
    """Count a step once vLLM has read its output."""
    when_read = getattr(self.sampler_output, "when_read", None)
    if when_read is None:
        return original(self)
    try:
        result = original(self)
    except Exception:
        when_read(None)
        raise
    when_read(result)
    return result
