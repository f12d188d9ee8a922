"""The plugin that vLLM loads in every process: hooks that act only on engines that ask for rollout_spec.

An engine asks by `additional_config={"rollout_spec": {...}}` or by naming our proposer in its `speculative_config`
(`rollout_spec.engine_kwargs()` gives both); the environment variable ROLLOUT_SPEC does so for all engines of a process
(`environment.py`). For such engines the hooks

- check configuration, versions, each request's options and a server's commands in the front end;
- give every request without a seed one of its own, which stays with it through preemption and on all ranks;
- tell the workers by a hash which requests have the same `cache_salt`;
- end the front end's output at stop strings (`stop_strings.py`), and warn of rollouts that are copies (`copies.py`);
- allow sampling parameters that work with our verifier and not with vLLM's: min-p, logit bias;
- say in the log what speculation they have, and keep warnings out of it that are untrue for them (`vllm_log.py`);
- add metrics to those of a server (`metrics.py`);
- let vLLM choose the model runner that it would use without speculation, V2 where it can;
- let a drafter of vLLM's own that has a model draft beside history, with the target's noise (`model_drafters.py`);
- ask for synchronous scheduling where the drafter is on the host, and for CUDA graphs of steps in which every request
  has a draft (`step_sizes.py`);
- in the worker, compile what the engine will call, and give the model runner the `RunnerAdapter` of `vllm_v1` or
  `vllm_v2`; under V1 also keep vLLM from making a torch generator for every request;
- notice when the worker gets new weights (`weights.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import wrapt

from rollout_spec import checks
from rollout_spec.config import (
    ASYNC_METHOD,
    AUTO,
    CONFIG_KEY,
    MODEL_METHODS,
    NO_HISTORY,
    PROPOSER_PATH,
    RolloutSpecConfig,
)
from rollout_spec.drafters import check_options, runs_on_device
from rollout_spec.integrations.vllm import compat, step_sizes
from rollout_spec.integrations.vllm.copies import warn_of_copies
from rollout_spec.integrations.vllm.environment import MODELS, VARIABLE, ask_for_speculation
from rollout_spec.integrations.vllm.log import describe_engine, say, without_untrue_warnings
from rollout_spec.integrations.vllm.model_drafters import check_model_drafter, prepare_model_drafter
from rollout_spec.integrations.vllm.ranks import end_if_unheard
from rollout_spec.integrations.vllm.request_options import request_options, with_plain_options, with_tenant
from rollout_spec.integrations.vllm.weights import loads_weights

logger = logging.getLogger(__name__)

MARK = "_rollout_spec"
"""Attribute set on our engines' `speculative_config`, for checks that get only that."""


def register() -> None:
    """Install each hook when vLLM's module is imported. Idempotent; vLLM calls it in each of its processes."""
    global _registered
    if _registered:
        return
    _registered = True
    for module, hook in (
        ("vllm.triton_utils.dispatcher", _hook_dispatcher),
        ("vllm.engine.arg_utils", _hook_engine_args),
        ("vllm.config.speculative", _hook_speculative_config),
        ("vllm.config.vllm", _hook_config),
        ("vllm.sampling_params", _hook_sampling_params),
        ("vllm.v1.engine.input_processor", _hook_input_processor),
        ("vllm.v1.engine.llm_engine", functools.partial(_hook_engine, name="LLMEngine")),
        ("vllm.v1.engine.async_llm", functools.partial(_hook_engine, name="AsyncLLM")),
        ("vllm.v1.worker.gpu_model_runner", _hook_runner_v1),
        ("vllm.v1.worker.gpu.model_runner", _hook_runner_v2),
        ("vllm.v1.worker.gpu_worker", functools.partial(_hook_device_worker, name="Worker")),
        ("vllm.v1.worker.cpu_worker", functools.partial(_hook_device_worker, name="CPUWorker")),
        ("vllm.v1.worker.worker_base", _hook_worker),
    ):
        wrapt.register_post_import_hook(functools.partial(_install, hook), module)
    for hook in (_hook_server_metrics, _hook_server_commands):
        optional = functools.partial(_install, hook, is_needed=False)
        wrapt.register_post_import_hook(optional, "vllm.v1.engine.async_llm")


_registered = False
_lacking: list[str] = []
"""What the hooks did not find in this vLLM, a sentence for each."""
_left_out: list[str] = []
"""The same of hooks without which engines that ask for us work, too."""


def _install(hook: Callable[[Any], None], module: Any, *, is_needed: bool = True) -> None:
    """Run a hook. Where this vLLM has changed, only engines that ask for rollout_spec fail: see `config_of`.

    Args:
        hook: Takes the module.
        module: vLLM's.
        is_needed: Whether such engines fail. Otherwise they only say what they go without.

    Raises:
        RuntimeError: the hook does not fit, and the environment variable asks for all engines.
    """
    try:
        hook(module)
    except (AttributeError, ImportError, TypeError) as error:  # a name or module is missing, or cannot be replaced
        (_lacking if is_needed else _left_out).append(f"in {module.__name__}, {error}")
        if os.environ.get(VARIABLE):  # the hook may be the one that would have read it
            _need_all_hooks()


def _need_all_hooks() -> None:
    """Raise RuntimeError if a hook did not fit."""
    if _lacking:
        raise RuntimeError(
            f"rollout_spec cannot work with this version of vLLM: {'; '.join(_lacking)}. "
            f"Install vLLM {compat.version_name(compat.OLDEST_VERSION)} to "
            f"{compat.version_name(compat.NEWEST_VERSION)}, or build the engine without rollout_spec's "
            f"options and unset {VARIABLE}."
        )


def config_of(vllm_config: Any) -> RolloutSpecConfig | None:
    """The settings that an engine asks for, or None when it does not ask for us. The drafter is never `"auto"`.

    Raises:
        ValueError, TypeError: an unknown or misspelt key or a bad value, or the settings disagree with the engine's
            `speculative_config`.
        RuntimeError: it asks for us, and this vLLM lacks something that we hook into.
    """
    config = _read_config(vllm_config)
    if config is not None:
        _need_all_hooks()
    if config is not None and config.drafter == AUTO:
        drafter = "device" if has_model_drafter(vllm_config) and vllm_config.use_v2_model_runner else "history"
        return dataclasses.replace(config, drafter=drafter)
    return config


def has_model_drafter(vllm_config: Any) -> bool:
    """Whether vLLM drafts with a model of its own that can draft beside history."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method in MODEL_METHODS


def _read_config(vllm_config: Any) -> RolloutSpecConfig | None:
    """`config_of` for callers that must not ask which runner the engine has."""
    additional = vllm_config.additional_config if isinstance(vllm_config.additional_config, dict) else {}
    for key in additional:
        if key != CONFIG_KEY and difflib.get_close_matches(str(key), (CONFIG_KEY,), cutoff=0.85):
            raise ValueError(f"unknown key {key!r} in additional_config: did you mean {CONFIG_KEY!r}?")
    values = additional.get(CONFIG_KEY)
    speculative = vllm_config.speculative_config
    proposes = _is_ours(speculative)
    named = str(getattr(speculative, "model", ""))
    if not proposes and named.startswith("rollout_spec."):
        raise ValueError(f"speculative_config names the proposer {named!r}: did you mean {PROPOSER_PATH!r}?")
    if values is None:
        if not proposes:
            return None
        return RolloutSpecConfig(num_speculative_tokens=speculative.num_speculative_tokens)
    has_model = has_model_drafter(vllm_config)
    if has_model and isinstance(values, Mapping) and values.get("speculation", True):
        values = {"num_speculative_tokens": speculative.num_speculative_tokens, "drafter": AUTO, **values}
    config = RolloutSpecConfig.from_dict(values)
    if runs_on_device(config.drafter):
        proposes = speculative is not None and speculative.method == ASYNC_METHOD
    proposes |= has_model
    if not config.speculation:
        if speculative is not None:
            raise ValueError("speculation=False, but the engine has a speculative_config: remove one of them")
        return config
    if speculative is None:
        raise ValueError(
            f"additional_config[{CONFIG_KEY!r}] asks for speculation, but speculative_config is missing: "
            "pass both, as rollout_spec.engine_kwargs() does"
        )
    if not proposes:
        raise ValueError(
            f"speculative_config uses {speculative.method!r} and additional_config asks for {CONFIG_KEY}: of vLLM's "
            f"own drafters only {', '.join(MODEL_METHODS)} can draft beside history, remove one of the two"
        )
    if config.num_model_draft_tokens is not None and not has_model:
        raise ValueError("num_model_draft_tokens is set, but the engine has no model drafter: remove it")
    if config.drafter == NO_HISTORY and not has_model:
        raise ValueError(f"drafter={NO_HISTORY!r} leaves nothing to draft with in an engine without a model drafter")
    if speculative.num_speculative_tokens != config.num_speculative_tokens:
        raise ValueError(
            f"num_speculative_tokens is {speculative.num_speculative_tokens} in speculative_config and "
            f"{config.num_speculative_tokens} in additional_config[{CONFIG_KEY!r}]: make them equal"
        )
    return config


def _is_ours(speculative_config: Any) -> bool:
    """Whether a `speculative_config` names our proposer or is marked as ours."""
    if speculative_config is None:
        return False
    return speculative_config.model == PROPOSER_PATH or hasattr(speculative_config, MARK)


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by make(original). Raises AttributeError if there is none."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _hook_dispatcher(module: Any) -> None:
    from rollout_spec.integrations.vllm.cpu_fixes import survive_lazy_modules

    survive_lazy_modules(module)


def _hook_engine_args(module: Any) -> None:
    def make(original: Any) -> Any:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            asked = ask_for_speculation(self, say)
            try:
                return original(self, *args, **kwargs)
            except ValueError as error:
                if not asked:
                    raise
                remedy = f'{VARIABLE} asks for speculation in this engine: its "{MODELS}" can leave it out'
                raise ValueError(f"{error}\n{remedy}") from error

        return create_engine_config

    _wrap(module.EngineArgs, "create_engine_config", make)


def _hook_speculative_config(module: Any) -> None:
    def make(original: Any) -> Any:
        def post_init(self: Any) -> None:
            with without_untrue_warnings(_is_ours(self)):
                original(self)

        return post_init

    _wrap(module.SpeculativeConfig, "__post_init__", make)


def _hook_config(module: Any) -> None:
    def make_post_init(original: Any) -> Any:
        def post_init(self: Any) -> None:
            config = config_of(self)
            if config is not None and has_model_drafter(self):
                prepare_model_drafter(self, say)
            if config is not None and config.drafts_on_host:
                if self.scheduler_config.async_scheduling:
                    raise ValueError(
                        f"drafter={config.drafter!r} lives on the host and needs each step's tokens there: leave "
                        'async_scheduling (--async-scheduling) out, or use drafter="device"'
                    )
                # vLLM decides by the runner and the method, and from 0.33 on leaves it on in V2, where every request
                # would then be scheduled with K draft tokens, whatever the drafter says.
                self.scheduler_config.async_scheduling = False
            with without_untrue_warnings(config is not None and not has_model_drafter(self)):
                original(self)

        return post_init

    def make_set_cudagraph_sizes(original: Any) -> Any:
        def set_cudagraph_sizes(self: Any) -> None:
            config = config_of(self)
            if config is None or not config.speculation:
                original(self)
                return
            width = config.num_speculative_tokens + 1
            remark = step_sizes.add_graphs(self, width, functools.partial(original, self))
            if remark is not None:
                say(remark)

        return set_cudagraph_sizes

    def make_unsupported(original: Any) -> Any:
        def unsupported(self: Any) -> list[str]:
            import vllm

            features: list[str] = original(self)
            config = _read_config(self)
            if config is not None and compat.lacks_v2_interfaces(vllm.__version_tuple__):
                return [*features, "rollout_spec before vLLM 0.26"]
            if config is not None and has_model_drafter(self):
                if config.drafts_on_host and config.drafter != AUTO:
                    features.append(f"drafter={config.drafter!r}, which is on the host, beside a model drafter")
                return features
            # V2 knows no custom_class, and no ngram_gpu before vLLM 0.32, but we bring our own speculator.
            if config is not None and config.speculation:
                method = self.speculative_config.method
                features = [f for f in features if not ("specul" in f and method in f)]
            return features

        return unsupported

    _wrap(module.VllmConfig, "__post_init__", make_post_init)
    _wrap(module.VllmConfig, "_set_cudagraph_sizes", make_set_cudagraph_sizes)
    _wrap(module.VllmConfig, "_get_v2_model_runner_unsupported_features", make_unsupported)


def _hook_sampling_params(module: Any) -> None:
    def make(original: Any) -> Any:
        def validate(self: Any, speculative_config: Any) -> None:
            # vLLM refuses min-p, which our verifier handles, and logit bias, which our V1 adapter or vLLM's V2 applies.
            if not _is_ours(speculative_config):
                original(self, speculative_config)

        return validate

    _wrap(module.SamplingParams, "_validate_spec_decode", make)


def _hook_input_processor(module: Any) -> None:
    def make_init(original: Any) -> Any:
        def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            config = config_of(vllm_config)
            self._rollout_spec_seeds = None
            self._rollout_spec_is_v1 = config is not None and not vllm_config.use_v2_model_runner
            self._rollout_spec_salts = _SaltWatch(ignores_salts=config is not None and config.ignore_cache_salt)
            if config is not None:
                _check_engine(vllm_config, config)
                if config.speculation:
                    object.__setattr__(vllm_config.speculative_config, MARK, True)
                self._rollout_spec_seeds = _SeedSource(vllm_config)
            original(self, vllm_config, *args, **kwargs)

        return init

    def make_process(original: Any) -> Any:
        def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
            request = original(self, *args, **kwargs)
            params = request.sampling_params
            if self._rollout_spec_seeds is None or params is None:
                return request
            try:  # an error raised here fails this request alone
                _check_request(params, self._rollout_spec_is_v1)
                # A new dict: that of vLLM's copy of the parameters may be the caller's.
                params.extra_args = with_tenant(params.extra_args, self._rollout_spec_salts.salt_of(request))
            except (TypeError, ValueError) as error:
                raise _request_error()(str(error)) from error
            if params.seed is None:
                params.seed = self._rollout_spec_seeds.next()
            return request

        return process_inputs

    _wrap(module.InputProcessor, "__init__", make_init)
    _wrap(module.InputProcessor, "process_inputs", make_process)


class _SaltWatch:
    """Says which salt keeps a request's history apart, and once that there are several.

    Some trainers take policy versions for salts, and no history would outlive a version.
    """

    def __init__(self, *, ignores_salts: bool) -> None:
        self._ignores_salts = ignores_salts
        self._first: str | None = None
        self._has_warned = False

    def salt_of(self, request: Any) -> str | None:
        """The salt of an `EngineCoreRequest`; None: it has none, or they are ignored."""
        salt = None if self._ignores_salts else request.cache_salt or None
        self._first = self._first or salt
        if salt is not None and salt != self._first and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "requests have different cache_salt, so they share no history: if these are no tenants but, say, "
                "policy versions, set ignore_cache_salt=True"
            )
        return salt


def _check_request(params: Any, is_v1: bool) -> None:
    """Raise ValueError or TypeError if our samplers do not support a request's options, or ours are wrong."""
    if is_v1 and params.logprob_token_ids:
        raise ValueError("rollout_spec cannot score logprob_token_ids in the V1 model runner: remove them")
    if params.seed is not None:
        params.seed = checks.integer("seed", params.seed)
        checks.integer("seed + n - 1", params.seed + (params.n or 1) - 1)  # vLLM gives sample i the seed + i
    options = request_options(params.extra_args)
    if any(str(key).startswith(CONFIG_KEY) for key in params.extra_args or ()):
        params.extra_args = with_plain_options(params.extra_args, options)


@functools.cache
def _request_error() -> type[ValueError]:
    """The exception for a bad request: a ValueError that vLLM's servers answer with status 400."""
    from vllm.exceptions import VLLMValidationError

    class RequestError(VLLMValidationError, ValueError):
        """A request that rollout_spec refuses."""

    return RequestError


def _hook_engine(module: Any, name: str) -> None:
    """Engines that ask for rollout_spec say so, warn of copies, and if they speculate end outputs at stop strings.

    Those of servers also get metrics.
    """

    def make_init(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            config = config_of(self.vllm_config)
            if config is None:
                return
            say(describe_engine(self.vllm_config, config, has_model=has_model_drafter(self.vllm_config)))
            warn_of_copies(self.output_processor)
            # Of several front ends of one engine the first one counts, as the others' counters are added to its own.
            if name == "AsyncLLM" and not kwargs.get("client_index"):
                from rollout_spec.integrations.vllm.metrics import ServerMetrics

                self._rollout_spec_metrics = ServerMetrics(self.vllm_config.model_config.served_model_name)
            if name == "AsyncLLM" and _left_out:
                say(f"rollout_spec: metrics or checks of commands are off with this vLLM: {'; '.join(_left_out)}")
            if config.speculation:
                from rollout_spec.integrations.vllm.stop_strings import end_outputs_at_stop_strings

                end_outputs_at_stop_strings(self.output_processor)

        return init

    _wrap(getattr(module, name), "__init__", make_init)


def _hook_server_metrics(module: Any) -> None:
    """Bring our metrics up to date whenever vLLM logs its own."""

    def make_do_log_stats(original: Any) -> Any:
        async def do_log_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = await original(self, *args, **kwargs)
            metrics = getattr(self, "_rollout_spec_metrics", None)
            if metrics is not None:
                metrics.refresh(self.collective_rpc)
            return result

        return do_log_stats

    _wrap(module.AsyncLLM, "do_log_stats", make_do_log_stats)


def _hook_server_commands(module: Any) -> None:
    """Check commands in the front end, too: an error of the worker reaches an HTTP client as an internal one."""

    def make_collective_rpc(original: Any) -> Any:
        signature = inspect.signature(original)

        async def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
            vllm_config = getattr(self, "vllm_config", None) if method == CONFIG_KEY else None
            config = config_of(vllm_config) if vllm_config is not None else None
            if config is not None:
                given = signature.bind(self, method, *args, **kwargs).arguments
                if not given.get("kwargs"):
                    _check_command(given.get("args", ()), config)
            return await original(self, method, *args, **kwargs)

        return collective_rpc

    _wrap(module.AsyncLLM, "collective_rpc", make_collective_rpc)


def _check_command(command: Any, config: RolloutSpecConfig) -> None:
    """Raise the exception for a bad request if a command is wrong."""
    from rollout_spec.integrations.vllm.commands import check_command

    try:
        check_command(*command, speculates=config.speculation)
    except (TypeError, ValueError) as error:
        raise _request_error()(str(error)) from error


def _check_engine(vllm_config: Any, config: RolloutSpecConfig) -> None:
    """Raise RuntimeError, ValueError or TypeError if an engine's configuration is not supported."""
    import vllm

    compat.check_version(vllm.__version_tuple__, vllm.__version__)
    if vllm_config.model_config.runner_type != "generate":
        raise ValueError("rollout_spec is for engines that generate, and this one pools: leave engine_kwargs() out")
    on_device = config.speculation and runs_on_device(config.drafter)
    if on_device and not vllm_config.use_v2_model_runner:
        raise ValueError(
            f"drafter={config.drafter!r} needs vLLM's V2 model runner, which this engine does not use: choose another "
            "drafter, or set VLLM_USE_V2_MODEL_RUNNER=1, with which vLLM says what keeps it from V2"
        )
    if config.speculation and config.drafter != NO_HISTORY:
        check_options(config.drafter, config.drafter_options)
    if vllm_config.use_v2_model_runner:
        ignored = compat.ignored_sampler_option(vllm_config)
        if ignored is not None:
            raise ValueError(f"{ignored} would be ignored by rollout_spec's sampler: remove it")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("rollout_spec does not support pipeline parallelism: set pipeline_parallel_size=1")
    if has_model_drafter(vllm_config):
        check_model_drafter(vllm_config, config)


class _SeedSource:
    """Seeds for requests that come without one.

    Each engine has a random key, so that engines and restarts differ. Under the external launcher every
    tensor-parallel rank has a front end of its own, and all must draw the same seeds: there the key is the engine's
    seed and its data-parallel rank.
    """

    def __init__(self, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        if parallel.distributed_executor_backend == "external_launcher":
            self._key = f"{vllm_config.model_config.seed}/{parallel.data_parallel_rank}"
        else:
            self._key = os.urandom(16).hex()
        self._numbers = itertools.count(1)  # a server processes requests in several threads

    def next(self) -> int:
        from rollout_spec.noise.host import derive_seed  # imports numba, which other engines do not need

        return derive_seed(self._key, next(self._numbers))


def _hook_runner(module: Any, adapters: str) -> None:
    """Give model runners the `RunnerAdapter` of our module `adapters`, imported only for engines that ask for us."""

    def make_init(original: Any) -> Any:
        def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            self.rollout_spec = None
            config = config_of(vllm_config)
            with without_untrue_warnings(config is not None):
                original(self, vllm_config, *args, **kwargs)
            if config is not None:
                _check_environment(config)
                _warm_up(config, self.device, has_model=has_model_drafter(vllm_config))
                self.rollout_spec = importlib.import_module(adapters).RunnerAdapter(self, config)

        return init

    def make_execute(original: Any) -> Any:
        def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.rollout_spec is None:
                return original(self, *args, **kwargs)
            try:
                self.rollout_spec.begin_step()
                result = original(self, *args, **kwargs)
                self.rollout_spec.on_forward()
            except Exception as error:
                end_if_unheard(self.vllm_config, error)
                raise
            return result

        return execute_model

    def make_sample_tokens(original: Any) -> Any:
        def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, *args, **kwargs)
            except Exception as error:
                if self.rollout_spec is not None:
                    end_if_unheard(self.vllm_config, error)
                raise

        return sample_tokens

    _wrap(module.GPUModelRunner, "__init__", make_init)
    _wrap(module.GPUModelRunner, "execute_model", make_execute)
    _wrap(module.GPUModelRunner, "sample_tokens", make_sample_tokens)


def _check_environment(config: RolloutSpecConfig) -> None:
    """Raise ValueError if vLLM's environment variables are such that the engine could not work.

    Called in the worker: one of them replaces the front end, where the other checks are.
    """
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0":
        raise ValueError(
            "VLLM_USE_RUST_FRONTEND replaces vLLM's Python front end, in which rollout_spec gives requests their seeds "
            "and checks them: unset it"
        )
    if config.drafts_on_host and os.environ.get("VLLM_GPU_SYNC_CHECK", "").lower() == "error":
        raise ValueError(
            f"VLLM_GPU_SYNC_CHECK=error forbids to wait for the device, and drafter={config.drafter!r} waits for each "
            'step\'s tokens: unset it, or use drafter="device"'
        )


def _warm_up(config: RolloutSpecConfig, device: Any, *, has_model: bool) -> None:
    """Compile what the engine will call on the host while it is built; the first generation would wait for it."""
    from rollout_spec.jit.warm_up import warm_up

    warm_up(config, device=device, has_model=has_model, log=say)


def _hook_runner_v1(module: Any) -> None:
    def make_sample(original: Any) -> Any:
        def sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
            if self.rollout_spec is None:
                return original(self, logits, spec_decode_metadata)
            return self.rollout_spec.sample(logits, spec_decode_metadata)

        return sample

    def make_update_states(original: Any) -> Any:
        def update_states(self: Any, scheduler_output: Any) -> Any:
            if self.rollout_spec is not None:
                for request in scheduler_output.scheduled_new_reqs:
                    _need_no_generator(request.sampling_params)
                if scheduler_output.scheduled_new_reqs or scheduler_output.finished_req_ids:
                    self.rollout_spec.on_requests_changed()
            return original(self, scheduler_output)

        return update_states

    def make_fits(original: Any) -> Any:
        def fits(self: Any, common_attn_metadata: Any) -> bool:
            # Near max_model_len vLLM skips the proposer and verifies K zeros for every request instead.
            # Ours cuts its drafts there itself.
            if self.rollout_spec is None or self.rollout_spec.model_drafter is not None:
                return bool(original(self, common_attn_metadata))
            return common_attn_metadata is not None

        return fits

    def make_bookkeeping(original: Any) -> Any:
        def bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if self.rollout_spec is not None:
                self.rollout_spec.join_drafts()
            return result

        return bookkeeping_sync

    _hook_runner(module, "rollout_spec.integrations.vllm.runner_v1")
    _wrap(module.GPUModelRunner, "_sample", make_sample)
    _wrap(module.GPUModelRunner, "_update_states", make_update_states)
    _wrap(module.GPUModelRunner, "_input_fits_in_drafter", make_fits)
    _wrap(module.GPUModelRunner, "_bookkeeping_sync", make_bookkeeping)


def _need_no_generator(params: Any) -> None:
    """Keep vLLM from making a torch generator for a request because it has a seed: our sampler uses none.

    It would be made for every request, and on CPUs vLLM then fails where a prompt is read in several chunks.
    """
    from vllm.sampling_params import SamplingType

    if params is not None and params.sampling_type == SamplingType.RANDOM_SEED:
        params.__dict__["sampling_type"] = SamplingType.RANDOM  # the cached value of a property


def _hook_runner_v2(module: Any) -> None:
    def make_init_speculator(original: Any) -> Any:
        def init_speculator(vllm_config: Any, device: Any, *args: Any) -> Any:
            config = config_of(vllm_config)
            if config is None:
                return original(vllm_config, device, *args)
            if has_model_drafter(vllm_config):
                from rollout_spec.integrations.vllm.model_v2 import make_model_speculator

                return make_model_speculator(original(vllm_config, device, *args), vllm_config, device)
            if runs_on_device(config.drafter):
                from rollout_spec.integrations.vllm.device import DeviceSpeculator

                return DeviceSpeculator(vllm_config, device)
            from rollout_spec.integrations.vllm.runner_v2 import HistorySpeculator

            return HistorySpeculator(vllm_config, device)

        return init_speculator

    def make_load_model(original: Any) -> Any:
        def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if self.rollout_spec is not None:
                self.rollout_spec.take_over_sampling()
            return result

        return load_model

    def make_add_requests(original: Any) -> Any:
        def add_requests(self: Any, scheduler_output: Any) -> None:
            if self.rollout_spec is not None:
                self.rollout_spec.on_add_requests(scheduler_output)
            original(self, scheduler_output)
            if self.rollout_spec is not None:
                self.rollout_spec.on_requests_added(scheduler_output)

        return add_requests

    def make_finish_requests(original: Any) -> Any:
        def finish_requests(self: Any, scheduler_output: Any) -> None:
            if self.rollout_spec is not None:
                self.rollout_spec.on_finish_requests(scheduler_output)
            original(self, scheduler_output)

        return finish_requests

    def make_take_draft_token_ids(original: Any) -> Any:
        def take_draft_token_ids(self: Any) -> Any:
            drafts = original(self)
            return drafts if self.rollout_spec is None else self.rollout_spec.cut_drafts(drafts)

        return take_draft_token_ids

    _hook_runner(module, "rollout_spec.integrations.vllm.runner_v2")
    _wrap(module, "init_speculator", make_init_speculator)
    for name, make in (
        ("load_model", make_load_model),
        ("add_requests", make_add_requests),
        ("finish_requests", make_finish_requests),
        ("take_draft_token_ids", make_take_draft_token_ids),
    ):
        _wrap(module.GPUModelRunner, name, make)


def _hook_device_worker(module: Any, name: str) -> None:
    def make_load_model(original: Any) -> Any:
        def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            adapter = getattr(self.model_runner, "rollout_spec", None)
            if adapter is not None:
                adapter.weights.follow(self.model_runner.get_model())
            return result

        return load_model

    def make_add_lora(original: Any) -> Any:
        def add_lora(self: Any, *args: Any, **kwargs: Any) -> Any:
            adapter = getattr(self.model_runner, "rollout_spec", None)
            if adapter is not None:
                adapter.weights.announce()  # what it loads is not among the model's parameters
            return original(self, *args, **kwargs)

        return add_lora

    def make_profile(original: Any) -> Any:
        def determine_available_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _warming_up(self.model_runner):  # from vLLM 0.33 on, V2 samples for made-up requests here
                return original(self, *args, **kwargs)

        return determine_available_memory

    def make_warm_up(original: Any) -> Any:
        def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            adapter = getattr(self.model_runner, "rollout_spec", None)
            if adapter is not None:  # first: jit_monitor_mode="error" forbids compilation once vLLM's own is done
                adapter.compile_kernels()
            with _warming_up(self.model_runner):
                result = original(self, *args, **kwargs)
            if adapter is not None:
                adapter.load_history()
            return result

        return compile_or_warm_up_model

    worker = getattr(module, name)
    if name == "Worker":  # CPUWorker inherits it
        _wrap(worker, "load_model", make_load_model)
        _wrap(worker, "add_lora", make_add_lora)
    _wrap(worker, "determine_available_memory", make_profile)
    _wrap(worker, "compile_or_warm_up_model", make_warm_up)


def _warming_up(runner: Any) -> contextlib.AbstractContextManager[None]:
    """`RunnerAdapter.warm_up` of a V2 runner. In V1 vLLM's made-up requests do not reach our sampler."""
    context: contextlib.AbstractContextManager[None] = getattr(
        getattr(runner, "rollout_spec", None), "warm_up", contextlib.nullcontext
    )()
    return context


def _hook_worker(module: Any) -> None:
    def rollout_spec(self: Any, command: str, *args: Any) -> Any:
        """Run a command of `RunnerAdapter` on this worker: `llm.collective_rpc("rollout_spec", args=("stats",))`."""
        adapter = getattr(self.model_runner, "rollout_spec", None)
        if adapter is None:
            raise RuntimeError(
                "this engine runs without rollout_spec: build it with rollout_spec.engine_kwargs(), and check that "
                "the VLLM_PLUGINS environment variable, if set, contains rollout_spec"
            )
        return adapter.command(command, *args)

    def make_getattr(original: Any) -> Any:
        def getattr_(self: Any, name: str) -> Any:
            # Here every method is looked up that a front end calls by name, those of worker extensions, too.
            if loads_weights(name):
                worker = vars(self).get("worker")
                adapter = getattr(getattr(worker, "model_runner", None), "rollout_spec", None)
                if adapter is not None:
                    adapter.weights.mark()
            return original(self, name)

        return getattr_

    def make_shutdown(original: Any) -> Any:
        def shutdown(self: Any) -> None:
            # Not at the process's exit alone: one that was forked by multiprocessing runs no exit handlers.
            worker = vars(self).get("worker")
            adapter = getattr(getattr(worker, "model_runner", None), "rollout_spec", None)
            try:
                if adapter is not None:
                    adapter.close()
            finally:
                original(self)

        return shutdown

    module.WorkerBase.rollout_spec = rollout_spec
    _wrap(module.WorkerWrapperBase, "shutdown", make_shutdown)
    _wrap(module.WorkerWrapperBase, "__getattr__", make_getattr)
