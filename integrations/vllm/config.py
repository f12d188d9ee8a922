"""What an engine asks for: read from vLLM's configuration or from ROLLOUT_SPEC, checked, and told in vLLM's log.

The environment variable is for frameworks that pass nothing through to the engines that they build:
ROLLOUT_SPEC='{"num_speculative_tokens": 8, "models": ["Qwen/*"]}' makes every engine of the process that generates ask
for rollout_spec. Where the framework has set `speculative_config` itself, history drafts beside a drafter that has
a model, and an engine with another drafter is left alone. Only the front end's process reads the variable.

This module imports neither vLLM nor torch: the plugin is loaded in every process of every engine.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rollout_spec import __version__
from rollout_spec.checks import shown
from rollout_spec.config import (
    AUTO,
    CONFIG_KEY,
    DEFAULT_RECURRENT_TOKENS,
    DEFAULT_TOKENS,
    MODEL_METHODS,
    PROPOSER_PATH,
    RolloutSpecConfig,
    drafts_with_model,
)
from rollout_spec.drafters import check_options
from rollout_spec.drafters.registry import has_history, has_options
from rollout_spec.integrations.vllm import compat

VARIABLE = "ROLLOUT_SPEC"
MODELS = "models"
"""The variable's key for shell patterns, of which one must match an engine's `model`."""
PASSES = "_rollout_spec_passes"
"""Set on a `speculative_config` in the engine's core: (most forward passes of a step in the workers, `sub_steps`)."""
RUNNER_REASON = "_rollout_spec_runner"
"""Marks our engines' `speculative_config`: why vLLM chose the model runner, and so where drafts are made."""
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
OF_VLLMS_SAMPLER = (
    "use_fp64_gumbel", "return_sampling_mask", "enable_trace_replay", "watermark_config",
    "enable_batch_sharded_sampling",
)  # fmt: skip
"""Options of V2's own sampler, some of which came with 0.28 to 0.30."""

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


# -- what an engine asks for -----------------------------------------------------------------------------------------


def config_of(vllm_config: Any) -> RolloutSpecConfig | None:
    """The settings that an engine asks for, or None when it does not ask for us.

    The drafter is never `"auto"`, which stands for the one of the model runner, and K is a number where there are
    drafts. What the user leaves open is decided once (`decide_options`): later the process of a data-parallel
    engine may see a `data_parallel_size` of 1.

    Raises:
        ValueError, TypeError: an unknown or misspelt key or a bad value, or the settings disagree with the engine's
            `speculative_config`.
        RuntimeError: it asks for us, and this vLLM lacks something that we hook into.
    """
    config = read_config(vllm_config)
    if config is not None:
        need_all_hooks()
        if config.drafter == AUTO:
            return dataclasses.replace(config, drafter="device" if vllm_config.use_v2_model_runner else "history")
    return config


def read_config(vllm_config: Any) -> RolloutSpecConfig | None:
    """`config_of` but for `"auto"`, which depends on the runner: vLLM's choice of the runner calls this."""
    additional = vllm_config.additional_config if isinstance(vllm_config.additional_config, dict) else {}
    for key in additional:
        if key != CONFIG_KEY and difflib.get_close_matches(str(key), (CONFIG_KEY,), cutoff=0.85):
            raise ValueError(f"unknown key {key!r} in additional_config: did you mean {CONFIG_KEY!r}?")
    values, speculative = additional.get(CONFIG_KEY), vllm_config.speculative_config
    proposes, has_model = is_ours(speculative), has_model_drafter(vllm_config)
    named = str(getattr(speculative, "model", ""))
    if not proposes and named.startswith("rollout_spec."):
        raise ValueError(f"speculative_config names the proposer {named!r}: did you mean {PROPOSER_PATH!r}?")
    if values is None:
        return RolloutSpecConfig(num_speculative_tokens=speculative.num_speculative_tokens) if proposes else None
    if speculative is not None and isinstance(values, Mapping) and values.get("speculation", True):
        values = {"num_speculative_tokens": speculative.num_speculative_tokens, **values}
    config = RolloutSpecConfig.from_dict(values)
    if not config.speculation:
        if speculative is not None:
            raise ValueError("speculation=False, but the engine has a speculative_config: remove one of them")
        return config
    if speculative is None:
        raise ValueError(
            f"additional_config[{CONFIG_KEY!r}] asks for speculation, but speculative_config is missing: "
            "pass both, as rollout_spec.engine_kwargs() does"
        )
    if not has_model and (config.speculative_config is not None or not proposes):
        raise ValueError(
            f"speculative_config uses {speculative.method!r} and additional_config asks for {CONFIG_KEY}: of vLLM's "
            f"own drafters only {', '.join(MODEL_METHODS)} can draft beside history. Remove one of the two, or pass "
            "both as rollout_spec.engine_kwargs() does"
        )
    k = speculative.num_speculative_tokens
    if config.num_speculative_tokens is None:
        if k == DEFAULT_TOKENS and is_recurrent(vllm_config):  # as `RolloutSpecConfig.engine_kwargs` has put it there
            k = DEFAULT_RECURRENT_TOKENS
        return dataclasses.replace(config, num_speculative_tokens=k)
    if k != config.num_speculative_tokens:
        raise ValueError(
            f"num_speculative_tokens is {k} in speculative_config and {config.num_speculative_tokens} in "
            f"additional_config[{CONFIG_KEY!r}]: make them equal"
        )
    return config


def decide_options(vllm_config: Any, config: RolloutSpecConfig) -> None:
    """Write into vLLM's configuration what an engine has, drafter and K decided; all its processes get that."""
    if config.speculation:
        vllm_config.speculative_config.num_speculative_tokens = config.num_speculative_tokens
    if not isinstance(vllm_config.additional_config, dict):  # vLLM takes objects, too
        raise ValueError(f"additional_config must be a dict, to which {CONFIG_KEY!r} is added")
    vllm_config.additional_config = {**vllm_config.additional_config, CONFIG_KEY: config.to_dict()}


def is_ours(speculative_config: Any) -> bool:
    """Whether a `speculative_config` names our proposer or is marked as ours."""
    if speculative_config is None:
        return False
    return speculative_config.model == PROPOSER_PATH or hasattr(speculative_config, RUNNER_REASON)


def has_model_drafter(vllm_config: Any) -> bool:
    """Whether vLLM drafts with a model of its own that can draft beside history."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method in MODEL_METHODS


def chooses_k(vllm_config: Any) -> bool:
    """Whether we decide how many of the device's draft tokens are verified. Settled by `hooks.complete_config`."""
    config = config_of(vllm_config)
    return config is not None and config.drafts_on_device and config.budget


def is_recurrent(vllm_config: Any) -> bool:
    """Whether some of the model's layers keep a state that each token changes, such as Mamba's and gated DeltaNet's."""
    model = vllm_config.model_config
    return bool(model.is_hybrid or model.is_attention_free)


def share_of_experts(vllm_config: Any) -> float:
    """How many of its experts a token of the model uses, of all; 1 for a dense model, or where it is not known."""
    model = vllm_config.model_config
    if not model.is_moe:
        return 1.0
    used = compat.experts_per_token(model)
    return min(used / model.get_num_experts(), 1.0) if isinstance(used, int) and used else 1.0


# -- the model runner: V1 has its drafter on the host, V2 on the device ----------------------------------------------


def reasons_for_v1(vllm_config: Any, config: RolloutSpecConfig) -> list[str]:
    """What V2 cannot do of what an engine with drafts asks for, or what an engine lacks that drafts there need.

    Args:
        config: As `read_config` gives it. Where it names a drafter, that one decides.
    """
    if config.drafter != AUTO:
        return [f"drafter={config.drafter!r}, which is on the host"] if config.drafts_on_host else []
    if has_model_drafter(vllm_config):
        return []
    from vllm.v1.executor.abstract import Executor

    reasons = []
    if not has_options("device", config.drafter_options):
        reasons.append(f"drafter_options={dict(config.drafter_options)}, which drafters on the host have")
    if not has_gpu():
        reasons.append("drafts without an NVIDIA GPU")
    is_allowed = vllm_config.scheduler_config.async_scheduling is not False
    if not (is_allowed and Executor.get_class(vllm_config).supports_async_scheduling()):
        reasons.append("drafts with synchronous scheduling")
    return reasons


def note_runner(vllm_config: Any) -> None:
    """Keep why an engine has its model runner, while its configuration is still what the user asked for."""
    from vllm.triton_utils import HAS_TRITON

    speculative = vllm_config.speculative_config
    reason = f"vLLM's choice; {RUNNER_VARIABLE}=1 drafts on the device" if HAS_TRITON else "V2 needs Triton"
    if os.environ.get(RUNNER_VARIABLE):
        reason = f"{RUNNER_VARIABLE}={os.environ[RUNNER_VARIABLE]}"
    elif vllm_config.use_v2_model_runner:
        reason = "vLLM can run the model in it"
    elif lacks := vllm_config._get_v2_model_runner_unsupported_features():
        reason = f"V2 does not have {', '.join(lacks)}"
    object.__setattr__(speculative, RUNNER_REASON, reason)


def has_gpu() -> bool:
    """Whether vLLM's engines run on CUDA devices here. Our kernels have not been compiled for others."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def is_a100() -> bool:
    """Whether the first device is an NVIDIA A100, or one that computes alike."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return capability is not None and (capability.major, capability.minor) == (8, 0)


def refuse_host_drafter(vllm_config: Any, config: RolloutSpecConfig) -> None:
    """Raise ValueError if a drafter on the host cannot draft in an engine, as vLLM alone would not say why."""
    drafter, reason = config.drafter, getattr(vllm_config.speculative_config, RUNNER_REASON)
    if vllm_config.use_v2_model_runner:
        raise ValueError(
            f"drafter={drafter!r} is on the host and needs vLLM's V1 model runner, and this engine has V2 ({reason}): "
            f"unset {RUNNER_VARIABLE}, or leave drafter out, which gives V2's drafter on the device"
        )
    if vllm_config.scheduler_config.async_scheduling:
        raise ValueError(
            f"drafter={drafter!r} lives on the host and needs each step's tokens there: leave async_scheduling "
            '(--async-scheduling) out, or use drafter="device", which needs the V2 runner'
        )


def refuse_model_drafter(vllm_config: Any) -> None:
    """Raise ValueError if no model can draft beside history in an engine."""
    import vllm

    found = f"this is {vllm.__version__}"
    if not compat.is_v2_old():
        if vllm_config.use_v2_model_runner:
            return
        found = f"this engine has V1 ({getattr(vllm_config.speculative_config, RUNNER_REASON)})"
    raise ValueError(
        f"a model drafts beside history in the V2 model runner of vLLM 0.31 or newer, and {found}: leave out "
        "speculative_config, and history drafts alone, or rollout_spec, and the model does"
    )


# -- what is not supported -------------------------------------------------------------------------------------------


def check_engine(vllm_config: Any, config: RolloutSpecConfig) -> None:
    """Raise RuntimeError, ValueError or TypeError if an engine's configuration is not supported."""
    import vllm

    compat.check_version(vllm.__version_tuple__, vllm.__version__)
    if vllm_config.model_config.runner_type != "generate":
        raise ValueError("rollout_spec is for engines that generate, and this one pools: leave engine_kwargs() out")
    if config.drafts_on_device and not vllm_config.use_v2_model_runner:
        raise ValueError(
            f"drafter={config.drafter!r} needs vLLM's V2 model runner, which this engine does not use: choose another "
            f"drafter, or set {RUNNER_VARIABLE}=1, with which vLLM says what keeps it from V2"
        )
    if config.speculation:
        check_options(config.drafter, config.drafter_options)
    if vllm_config.use_v2_model_runner:
        owners = vllm_config, vllm_config.model_config, vllm_config.parallel_config
        for name in OF_VLLMS_SAMPLER:
            if any(getattr(owner, name, None) for owner in owners):
                raise ValueError(f"{name} does not work with rollout_spec's sampler: remove it")
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size"):
        if getattr(vllm_config.parallel_config, name) > 1:
            raise ValueError(f"rollout_spec supports neither pipeline nor prefill context parallelism: set {name}=1")
    if config.speculation and is_recurrent(vllm_config) and compat.mixes_recurrent_states():
        raise ValueError(
            f"vLLM {vllm.__version__} samples models with recurrent layers wrongly where it speculates, whatever "
            "drafts, and says nothing (vllm-project/vllm#39273): install vLLM 0.32 or newer, or set speculation=False"
        )
    if has_model_drafter(vllm_config):
        _check_model_drafter(vllm_config, config)


def _check_model_drafter(vllm_config: Any, config: RolloutSpecConfig) -> None:
    """Raise ValueError if a drafter with a model (draft model, EAGLE heads, MTP layers) cannot draft beside history."""
    speculative = vllm_config.speculative_config
    for name, allowed, reason in (
        ("parallel_drafting", False, "its drafts cannot be drawn with the target's noise"),
        ("use_heterogeneous_vocab", False, "the noise belongs to tokens of the target's vocabulary"),
        ("disable_padded_drafter_batch", False, "it drafts too late to be joined with history"),
        ("rejection_sample_method", "standard", "it verifies in its own way, see the option verify"),
    ):
        value = getattr(speculative, name, allowed)
        if value != allowed:
            raise ValueError(
                f"speculative_config sets {name}={value!r}, which rollout_spec does not support, as {reason}: remove it"
            )
    num_model = config.num_model_draft_tokens
    uses_modules = getattr(speculative, "use_multi_module_mtp", lambda: False)
    if num_model != config.max_draft_tokens and uses_modules():
        raise ValueError(
            f"a model with several MTP modules drafts as many tokens as the engine verifies: num_speculative_tokens="
            f"{config.max_draft_tokens} and {num_model} of the model must be equal"
        )


def check_environment() -> None:
    """Raise ValueError if vLLM's environment variables are such that the engine could not work.

    Called in the worker: one of them replaces the front end, where the other checks are.
    """
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0":
        raise ValueError(
            "VLLM_USE_RUST_FRONTEND replaces vLLM's Python front end, in which rollout_spec gives requests their seeds "
            "and checks them: unset it"
        )


# -- the environment variable ----------------------------------------------------------------------------------------


class EnvironmentRequest(NamedTuple):
    """What the variable asks for."""

    config: RolloutSpecConfig
    models: list[str]
    """Shell patterns, of which one must match an engine's `model`; none: every model."""

    def arguments(self, theirs: Any) -> dict[str, Any] | None:
        """Keyword arguments for an engine; None if it is to be left alone.

        Args:
            theirs: The `speculative_config` that a framework has set. Where that leaves it to the checkpoint how many
                tokens are drafted, so do we.
        """
        if theirs is None:
            return self.config.engine_kwargs()
        method = theirs.get("method") if isinstance(theirs, Mapping) else None
        if not drafts_with_model(method) or not self.config.speculation or self.config.speculative_config is not None:
            return None
        if type(theirs.get("num_speculative_tokens")) is not int:
            options = self.config.to_dict()
            del options["num_speculative_tokens"]
            return {"additional_config": {CONFIG_KEY: options}, "speculative_config": theirs}
        try:
            return dataclasses.replace(self.config, speculative_config=dict(theirs)).engine_kwargs()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{VARIABLE}, beside the engine's speculative_config: {error}") from error


def read_environment(environment: Mapping[str, str] = os.environ) -> EnvironmentRequest | None:
    """What the variable asks for; None where it is not set, or empty.

    Raises:
        ValueError: it is no JSON object of options, or an option is unknown or out of range.
    """
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        options = json.loads(text)
        if not isinstance(options, dict):
            raise TypeError("it must be a JSON object")
        models = options.pop(MODELS, [])
        if not isinstance(models, list) or not all(isinstance(pattern, str) for pattern in models):
            raise TypeError(f"{MODELS} must be a list of patterns, got {shown(models)}")
        return EnvironmentRequest(RolloutSpecConfig.from_dict(options, also_known=(MODELS,)), models)
    except (TypeError, ValueError, RecursionError) as error:
        example = f"""{VARIABLE}='{{"num_speculative_tokens": 8, "{MODELS}": ["Qwen/*"]}}'"""
        raise ValueError(f"{VARIABLE}: {error}. Got {text:.200}, an example is {example}") from error


def ask_for_speculation(engine_args: Any) -> bool:
    """Change vLLM's `EngineArgs` as the variable asks, and say in one line what was done. Returns whether it was.

    Raises:
        ValueError: the variable cannot be read, or the engine's `additional_config` is no dict.
    """
    request = read_environment()
    additional = engine_args.additional_config or {}
    asks_already = isinstance(additional, dict) and CONFIG_KEY in additional  # by itself, or was asked here before
    if request is None or asks_already:
        return False
    theirs, ours, reason = engine_args.speculative_config, None, "it has a speculative_config of its own"
    if request.models and not any(fnmatch.fnmatchcase(engine_args.model, pattern) for pattern in request.models):
        reason = f"its name matches none of {request.models}"
    elif engine_args.create_model_config().runner_type != "generate":
        reason = "it does not generate"
    elif not isinstance(additional, dict):
        raise ValueError(f"{VARIABLE} needs a dict in additional_config to add to, got {additional!r}")
    else:
        ours = request.arguments(theirs)
    if ours is None:
        say(f"{VARIABLE} leaves the engine of {engine_args.model} alone: {reason}")
        return False
    engine_args.additional_config = {**additional, **ours["additional_config"]}
    engine_args.speculative_config = ours.get("speculative_config")
    how = "drafts" if request.config.speculation else "our noise and no drafts"
    if theirs is not None:
        how = f"a drafter from history beside its {theirs['method']!r}"
    say(f"{VARIABLE} gives the engine of {engine_args.model} {how}")
    return True


# -- vLLM's log ------------------------------------------------------------------------------------------------------


def say(message: str) -> None:
    """One line in vLLM's log, which shows only what its own loggers say."""
    logging.getLogger("vllm.plugins.rollout_spec").info("%s", message)


def shown_ranges(ranges: Iterable[tuple[int, int, int]]) -> str:
    """A schedule of K by the number of requests, in words."""
    return ", ".join(f"{k} from {first} request{'s' * (first > 1)} on" for first, _, k in ranges)


def describe_engine(vllm_config: Any, config: RolloutSpecConfig) -> str:
    """What speculation an engine has, in one line. `vllm_config` is complete."""
    runner = "V2 model runner" if vllm_config.use_v2_model_runner else "V1 model runner"
    scheduling = "asynchronous" if vllm_config.scheduler_config.async_scheduling else "synchronous"
    parts = ["no drafts (speculation=False)"]
    if config.speculation:
        speculative = vllm_config.speculative_config
        is_measured = chooses_k(vllm_config)
        ranges = () if is_measured else speculative.num_speculative_tokens_per_batch_size or ()
        most = max((k for _, _, k in ranges), default=config.max_draft_tokens)
        k = f"up to {most} draft tokens per request and step{', ' * bool(ranges)}{shown_ranges(ranges)}"
        place = "host" if config.drafts_on_host else "device"
        model = f" and the model of {speculative.method!r}" if has_model_drafter(vllm_config) else ""
        parts = [f"{k}, drafted by {config.drafter!r}{model} on the {place}"]
        if config.budget and config.drafts_on_host:
            parts.append("a budget decides how many are verified")
        else:
            parts.append("how many are verified follows from measured costs" if is_measured else "all are verified")
        if config.history_dir is not None:
            parts.append(f"history in {config.history_dir}")
        elif has_history(config.drafter):
            parts.append("history ends with the engine")
        runner += f" ({getattr(speculative, RUNNER_REASON)})"
    parts.append(f"{scheduling} scheduling in the {runner}")
    return f"rollout_spec {__version__} is on: {'; '.join(parts)}"
