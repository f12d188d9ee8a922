"""What an engine asks for: `config_of` reads it from vLLM's configuration, and the checks refuse what cannot work."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any

from rollout_spec.config import (
    AUTO,
    CONFIG_KEY,
    DEFAULT_RECURRENT_TOKENS,
    DEFAULT_TOKENS,
    MODEL_METHODS,
    PROPOSER_PATH,
    RolloutSpecConfig,
)
from rollout_spec.drafters import check_options, runs_on_device
from rollout_spec.drafters.registry import MAX_RESIDENT_TOKENS, has_options
from rollout_spec.features.format import FEATURE_WORDS
from rollout_spec.integrations.vllm import compat
from rollout_spec.integrations.vllm.environment import VARIABLE
from rollout_spec.integrations.vllm.model_drafters import check_model_drafter

MARK = "_rollout_spec"
"""Attribute set on our engines' `speculative_config`, for checks that get only that."""

MAX_DEVICE_BYTES, MAX_DEVICE_SHARE = 2 << 30, 0.025
"""The most memory for texts with which `"auto"` drafts on the device, and the most of the device's."""

missing: list[str] = []
"""What the hooks did not find in this vLLM, a sentence for each."""


def need_all_hooks() -> None:
    """Raise RuntimeError if a hook did not fit."""
    if missing:
        raise RuntimeError(
            f"rollout_spec cannot work with this version of vLLM: {'; '.join(missing)}. "
            f"Install vLLM {compat.version_name(compat.OLDEST_VERSION)} to "
            f"{compat.version_name(compat.NEWEST_VERSION)}, or build the engine without rollout_spec's "
            f"options and unset {VARIABLE}."
        )


def config_of(vllm_config: Any) -> RolloutSpecConfig | None:
    """The settings that an engine asks for, or None when it does not ask for us.

    The drafter is never `"auto"`, and K is a number where there are drafts.

    What they are where the user leaves them open is decided once (`settle`), as vLLM's processes do not all see the
    same: those of data-parallel engines believe to be alone.

    Raises:
        ValueError, TypeError: an unknown or misspelt key or a bad value, or the settings disagree with the engine's
            `speculative_config`.
        RuntimeError: it asks for us, and this vLLM lacks something that we hook into.
    """
    config = read_config(vllm_config)
    if config is not None:
        need_all_hooks()
    if config is not None and config.drafter == AUTO:
        return dataclasses.replace(config, drafter=_best_drafter(vllm_config, config))
    return config


def settle(vllm_config: Any, config: RolloutSpecConfig) -> None:
    """Write into vLLM's configuration which drafter and which K an engine has; all its processes get that."""
    if config.speculation:
        vllm_config.speculative_config.num_speculative_tokens = config.num_speculative_tokens
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):  # vLLM takes objects, too
        return
    ours = additional.get(CONFIG_KEY) or config.to_dict()
    settled = {"drafter": config.drafter, "num_speculative_tokens": config.num_speculative_tokens}
    vllm_config.additional_config = {**additional, CONFIG_KEY: {**ours, **settled}}


def _best_drafter(vllm_config: Any, config: RolloutSpecConfig) -> str:
    """The drafter that `"auto"` stands for."""
    if not vllm_config.use_v2_model_runner:
        return "history"
    if has_model_drafter(vllm_config):
        return "device"
    pays = has_gpu() and config.budget and has_options("device", config.drafter_options)
    return "device" if pays and _follows_batch_size(vllm_config) and _fits_on_device(vllm_config, config) else "history"


def has_gpu() -> bool:
    """Whether vLLM's engines run on CUDA devices here. Our kernels have not been compiled for others."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def is_a100() -> bool:
    """Whether the first device is an NVIDIA A100, or one that computes alike."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return capability is not None and (capability.major, capability.minor) == (8, 0)


def device_bytes() -> int:
    """Memory of the first GPU."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def _follows_batch_size(vllm_config: Any) -> bool:
    """Whether vLLM lets K follow the number of requests: in V2 with asynchronous scheduling, of a single engine."""
    from vllm.v1.executor.abstract import Executor

    is_asynchronous = (
        vllm_config.scheduler_config.async_scheduling is not False
        and Executor.get_class(vllm_config).supports_async_scheduling()
    )
    return is_asynchronous and vllm_config.parallel_config.data_parallel_size == 1


def _fits_on_device(vllm_config: Any, config: RolloutSpecConfig) -> bool:
    """Whether the texts of all requests and of their history would take little of the device's memory."""
    options = config.drafter_options
    tokens = vllm_config.scheduler_config.max_num_seqs * vllm_config.model_config.max_model_len
    tokens += options.get("max_resident_tokens", MAX_RESIDENT_TOKENS)
    num_bytes = tokens * (4 + 8 * FEATURE_WORDS * bool(options.get("features", True)))
    return bool(num_bytes <= min(MAX_DEVICE_BYTES, MAX_DEVICE_SHARE * device_bytes()))


def is_recurrent(vllm_config: Any) -> bool:
    """Whether some of the model's layers keep a state that each token changes, such as Mamba's and gated DeltaNet's."""
    model = vllm_config.model_config
    return bool(model.is_hybrid or model.is_attention_free)


def repeats_seeds(vllm_config: Any) -> bool:
    """Whether the seeds of requests without one follow from the engine's, as somebody has chosen it."""
    return bool(vllm_config.model_config.seed != 0 and vllm_config.parallel_config.data_parallel_size == 1)


def has_model_drafter(vllm_config: Any) -> bool:
    """Whether vLLM drafts with a model of its own that can draft beside history."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method in MODEL_METHODS


def read_config(vllm_config: Any) -> RolloutSpecConfig | None:
    """`config_of` for callers that must not ask which runner the engine has."""
    additional = vllm_config.additional_config if isinstance(vllm_config.additional_config, dict) else {}
    for key in additional:
        if key != CONFIG_KEY and difflib.get_close_matches(str(key), (CONFIG_KEY,), cutoff=0.85):
            raise ValueError(f"unknown key {key!r} in additional_config: did you mean {CONFIG_KEY!r}?")
    values = additional.get(CONFIG_KEY)
    speculative = vllm_config.speculative_config
    proposes = is_ours(speculative)
    named = str(getattr(speculative, "model", ""))
    if not proposes and named.startswith("rollout_spec."):
        raise ValueError(f"speculative_config names the proposer {named!r}: did you mean {PROPOSER_PATH!r}?")
    if values is None:
        if not proposes:
            return None
        return RolloutSpecConfig(num_speculative_tokens=speculative.num_speculative_tokens)
    has_model = has_model_drafter(vllm_config)
    if speculative is not None and isinstance(values, Mapping) and values.get("speculation", True):
        values = {"num_speculative_tokens": speculative.num_speculative_tokens, **values}
    config = RolloutSpecConfig.from_dict(values)
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
    if config.speculative_config is not None and not has_model:
        raise ValueError(
            f"additional_config[{CONFIG_KEY!r}] has the speculative_config of a model, but the engine's is another: "
            "pass both as rollout_spec.engine_kwargs() does"
        )
    if config.num_speculative_tokens is None:
        k = speculative.num_speculative_tokens
        if k == DEFAULT_TOKENS and is_recurrent(vllm_config):  # as `RolloutSpecConfig.engine_kwargs` has put it there
            k = DEFAULT_RECURRENT_TOKENS
        return dataclasses.replace(config, num_speculative_tokens=k)
    if speculative.num_speculative_tokens != config.num_speculative_tokens:
        raise ValueError(
            f"num_speculative_tokens is {speculative.num_speculative_tokens} in speculative_config and "
            f"{config.num_speculative_tokens} in additional_config[{CONFIG_KEY!r}]: make them equal"
        )
    return config


def is_ours(speculative_config: Any) -> bool:
    """Whether a `speculative_config` names our proposer or is marked as ours."""
    if speculative_config is None:
        return False
    return speculative_config.model == PROPOSER_PATH or hasattr(speculative_config, MARK)


def check_engine(vllm_config: Any, config: RolloutSpecConfig) -> None:
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
    if config.speculation:
        check_options(config.drafter, config.drafter_options)
    if vllm_config.use_v2_model_runner:
        ignored = compat.ignored_sampler_option(vllm_config)
        if ignored is not None:
            raise ValueError(f"{ignored} would be ignored by rollout_spec's sampler: remove it")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("rollout_spec does not support pipeline parallelism: set pipeline_parallel_size=1")
    if getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1) > 1:
        raise ValueError(
            "rollout_spec does not support prefill context parallelism, under which a rank has the states of some of a "
            "step's tokens only: set prefill_context_parallel_size=1"
        )
    if config.speculation and is_recurrent(vllm_config) and compat.mixes_recurrent_states(vllm.__version_tuple__):
        raise ValueError(
            f"vLLM {vllm.__version__} samples models with recurrent layers wrongly where it speculates, whatever "
            "drafts, and says nothing (vllm-project/vllm#39273): install vLLM 0.32 or newer, or set speculation=False"
        )
    if has_model_drafter(vllm_config):
        check_model_drafter(vllm_config, config)


def check_environment(config: RolloutSpecConfig) -> None:
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
