"""Hooks of vLLM's two model runners, which hand each event to the engine's adapter (`runner_v1`, `runner_v2`).

Each hook is called as `(original, self, ...)` in place of the method. Adapters are imported only for engines that ask
for us. A runner of any other engine has `rollout_spec = None`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters import runs_on_device
from rollout_spec.integrations.vllm import compat, log, step_sizes
from rollout_spec.integrations.vllm.configuration import check_environment, config_of, has_model_drafter
from rollout_spec.integrations.vllm.ranks import end_if_unheard

# -- both runners ----------------------------------------------------------------------------------------------------


def init_v1(original: Callable[..., None], self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Give a V1 runner its adapter."""
    _init(_adapter_v1, original, self, vllm_config, *args, **kwargs)


def init_v2(original: Callable[..., None], self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Give a V2 runner its adapter."""
    _init(_adapter_v2, original, self, vllm_config, *args, **kwargs)


def _adapter_v1(runner: Any, config: RolloutSpecConfig) -> Any:
    from rollout_spec.integrations.vllm.runner_v1 import RunnerAdapterV1

    return RunnerAdapterV1(runner, config)


def _adapter_v2(runner: Any, config: RolloutSpecConfig) -> Any:
    from rollout_spec.integrations.vllm.runner_v2 import RunnerAdapterV2

    return RunnerAdapterV2(runner, config)


def _init(
    make_adapter: Callable[..., Any],
    original: Callable[..., None],
    self: Any,
    vllm_config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    self.rollout_spec = None
    config = config_of(vllm_config)
    original(self, vllm_config, *args, **kwargs)
    if config is not None:
        check_environment(config)
        _warm_up(config, self.device, has_model=has_model_drafter(vllm_config))
        self.rollout_spec = make_adapter(self, config)


def _warm_up(config: RolloutSpecConfig, device: Any, *, has_model: bool) -> None:
    """Compile what the engine will call on the host while it is built; the first generation would wait for it."""
    from rollout_spec.jit.warm_up import warm_up

    warm_up(config, device=device, has_model=has_model, log=log.say)


def execute_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell the adapter before a step and once the model has run."""
    if self.rollout_spec is None:
        return original(self, *args, **kwargs)
    try:
        scheduled = args[0] if args else kwargs["scheduler_output"]
        self.rollout_spec.begin_step()
        self.rollout_spec.on_scheduled(scheduled)
        result = original(self, *args, **kwargs)
        self.rollout_spec.on_forward()
    except Exception as error:
        end_if_unheard(self.vllm_config, error)
        raise
    return result


def sample_tokens(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """End the engine where an error of one rank would be heard by nobody."""
    try:
        return original(self, *args, **kwargs)
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
    if self.rollout_spec is None or self.rollout_spec.model_drafter is not None:
        return bool(original(self, common_attn_metadata))
    return common_attn_metadata is not None


def bookkeeping_sync_v1(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Choose between the drafts of a model and of history, once vLLM has recorded a step's tokens."""
    result = original(self, *args, **kwargs)
    if self.rollout_spec is not None:
        self.rollout_spec.join_drafts()
    return result


# -- V2 --------------------------------------------------------------------------------------------------------------


_prepared: ContextVar[Any] = ContextVar("_prepared", default=None)
"""The runner that gets its KV cache, attention backends and CUDA graphs."""


def initialize_kv_cache_v2(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let `init_graphs_v2` know whose graphs they are."""
    before = _prepared.set(self)
    try:
        return original(self, *args, **kwargs)
    finally:
        _prepared.reset(before)


def init_graphs_v2(original: Callable[..., None], self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Capture whole decode steps in which requests have drafts of different lengths, or none.

    vLLM captures those in which each has K draft tokens. A drafter on the host gives each request as many as are worth
    verifying, and the kernels of all other steps' attention would be launched one by one.
    """
    runner, config = _prepared.get(), config_of(vllm_config)
    if runner is None or config is None or not config.speculation:
        original(self, vllm_config, *args, **kwargs)
    elif config.drafts_on_host and compat.replays_any_lengths(runner):
        original(self, vllm_config, *args, **{**kwargs, "varlen_decode": True})
    else:
        captured = step_sizes.with_undrafted_steps(vllm_config) if config.drafts_on_host else vllm_config
        original(self, captured, *args, **kwargs)
        self.vllm_config = vllm_config
        step_sizes.find_nearest_graphs(self)


def init_speculator_v2(original: Callable[..., Any], vllm_config: Any, device: Any, *args: Any) -> Any:
    """Make our speculator in place of vLLM's. A function of vLLM's module, and no method."""
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


def load_model_v2(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the runner's samplers, once they exist."""
    result = original(self, *args, **kwargs)
    if self.rollout_spec is not None:
        self.rollout_spec.take_over_sampling()
    return result


def take_draft_token_ids_v2(original: Callable[..., Any], self: Any) -> Any:
    """Cut the scheduler's drafts to their own lengths."""
    drafts = original(self)
    return drafts if self.rollout_spec is None else self.rollout_spec.cut_drafts(drafts)
