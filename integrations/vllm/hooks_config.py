"""Hooks of vLLM's configuration. Each is called as `(original, self, ...)` in place of the method."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rollout_spec.config import AUTO, RolloutSpecConfig
from rollout_spec.integrations.vllm import compat, log, step_sizes
from rollout_spec.integrations.vllm.configuration import (
    config_of,
    has_model_drafter,
    is_a100,
    is_ours,
    read_config,
    settle,
)
from rollout_spec.integrations.vllm.environment import MODELS, VARIABLE, ask_for_speculation
from rollout_spec.integrations.vllm.model_drafters import prepare_model_drafter

ASYNC_METHOD = "ngram_gpu"
"""vLLM's drafter without a model beside which it schedules asynchronously. In V2 ours takes its place."""


def create_engine_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let an engine ask for us where the environment variable says so."""
    asked = ask_for_speculation(self, log.say)
    try:
        return original(self, *args, **kwargs)
    except ValueError as error:
        if not asked:
            raise
        remedy = f'{VARIABLE} asks for speculation in this engine: its "{MODELS}" can leave it out'
        raise ValueError(f"{error}\n{remedy}") from error


def complete_config(original: Callable[..., None], self: Any) -> None:
    """Check what an engine asks for, and schedule synchronously where the drafter is on the host only."""
    config = config_of(self)
    if config is not None:
        settle(self, config)
    if config is not None and has_model_drafter(self):
        prepare_model_drafter(self, log.say)
    elif config is not None and config.drafts_on_device and self.use_v2_model_runner:
        _prepare_device_drafter(self, config)
    if config is not None and config.drafts_on_host:
        if self.scheduler_config.async_scheduling:
            raise ValueError(
                f"drafter={config.drafter!r} lives on the host and needs each step's tokens there: leave "
                'async_scheduling (--async-scheduling) out, or use drafter="device", which needs the V2 runner'
            )
        # vLLM decides by the runner and the method, and from 0.33 on leaves it on in V2, where every request
        # would then be scheduled with K draft tokens, whatever the drafter says.
        self.scheduler_config.async_scheduling = False
    original(self)


def _prepare_device_drafter(vllm_config: Any, config: RolloutSpecConfig) -> None:
    """Let vLLM schedule asynchronously, and fewer draft tokens where more requests run."""
    speculative = vllm_config.speculative_config
    speculative.method = ASYNC_METHOD
    is_given = speculative.num_speculative_tokens_per_batch_size is not None
    if config.budget and vllm_config.parallel_config.data_parallel_size == 1 and not is_given:
        cheap = step_sizes.CHEAP_TOKENS_A100 if is_a100() else step_sizes.CHEAP_TOKENS
        ranges = step_sizes.affordable_ranges(config.max_draft_tokens, cheap)
        speculative.num_speculative_tokens_per_batch_size = ranges


def set_cudagraph_sizes(original: Callable[..., None], self: Any) -> None:
    """Add the sizes of steps in which every request has a draft."""
    config = config_of(self)
    if config is None or not config.speculation:
        original(self)
        return
    remark = step_sizes.add_graphs(self, functools.partial(original, self))
    if remark is not None:
        log.say(remark)


def v2_unsupported_features(original: Callable[..., list[str]], self: Any) -> list[str]:
    """Let vLLM choose the model runner that it would use without speculation, V2 where it can."""
    import vllm

    features = original(self)
    config = read_config(self)
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


def validate_sampling_params(original: Callable[..., None], self: Any, speculative_config: Any) -> None:
    """Allow min-p, which our verifier handles, and logit bias, which our V1 adapter or vLLM's V2 applies."""
    if not is_ours(speculative_config):
        original(self, speculative_config)
