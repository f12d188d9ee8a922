"""The environment variable ROLLOUT_SPEC, for frameworks that pass nothing through to the engines that they build.

ROLLOUT_SPEC='{"num_speculative_tokens": 8, "models": ["Qwen/*"]}' makes every engine of the process that generates ask
for rollout_spec. Where the framework has set `speculative_config` itself, history drafts beside a drafter that has
a model, and an engine with another drafter is left alone. Only the front end's process reads the variable.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rollout_spec.checks import did_you_mean, shown
from rollout_spec.config import CONFIG_KEY, RolloutSpecConfig, drafts_with_model

VARIABLE = "ROLLOUT_SPEC"
MODELS = "models"


class Request(NamedTuple):
    """What the variable asks for."""

    config: RolloutSpecConfig
    models: list[str]
    """Shell patterns, of which one must match an engine's `model`; none: every model."""
    options: dict[str, Any]
    """What `config` was made from."""

    def beside(self, theirs: Any) -> tuple[RolloutSpecConfig, dict[str, Any]] | None:
        """How to join an engine whose framework has set `speculative_config`; None if it is to be left alone.

        Returns:
            (the settings, keyword arguments for the engine). Where the framework leaves it to the checkpoint how many
            tokens are drafted, so do we.
        """
        if theirs is None:
            return self.config, self.config.engine_kwargs()
        method = theirs.get("method") if isinstance(theirs, Mapping) else None
        if not drafts_with_model(method) or not self.config.speculation or self.config.speculative_config is not None:
            return None
        if type(theirs.get("num_speculative_tokens")) is not int:
            options = {name: value for name, value in self.options.items() if name != "num_speculative_tokens"}
            return self.config, {"additional_config": {CONFIG_KEY: options}, "speculative_config": theirs}
        try:
            config = RolloutSpecConfig.from_dict({**self.options, "speculative_config": dict(theirs)})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{VARIABLE}, beside the engine's speculative_config: {error}") from error
        return config, config.engine_kwargs()


def read(environment: Mapping[str, str] = os.environ) -> Request | None:
    """What the variable asks for; None where it is not set, or empty.

    Raises:
        ValueError: it is no JSON object of options, or an option is unknown or out of range. The message names the
            variable.
    """
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return None
    example = f"""an example is {VARIABLE}='{{"num_speculative_tokens": 8, "{MODELS}": ["Qwen/*"]}}'"""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{VARIABLE}={text:.200} is no JSON ({error}): {example}") from error
    if not isinstance(options, dict):
        raise ValueError(f"{VARIABLE}={text:.200} must be a JSON object: {example}")
    for key in options:
        if key != MODELS and (hint := did_you_mean(key, (MODELS,))):
            raise ValueError(f"{VARIABLE}: unknown key {key!r}{hint}")
    models = options.pop(MODELS, [])
    if not isinstance(models, list) or not all(isinstance(pattern, str) for pattern in models):
        raise ValueError(f"{MODELS} in {VARIABLE} must be a list of patterns, got {shown(models)}: {example}")
    try:
        return Request(RolloutSpecConfig.from_dict(options), models, options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE}: {error}") from error


def ask_for_speculation(engine_args: Any, log: Callable[[str], None]) -> bool:
    """Change vLLM's `EngineArgs` as the variable asks, and say in one line what was done. Returns whether it was.

    Args:
        engine_args: `EngineArgs` or `AsyncEngineArgs` from which an engine's configuration is about to be made.
        log: Called with the line.

    Raises:
        ValueError: the variable cannot be read, or the engine's `additional_config` is no dict.
    """
    request = read()
    if request is None:
        return False
    additional = engine_args.additional_config or {}
    if isinstance(additional, dict) and CONFIG_KEY in additional:  # it asks by itself, or was asked here already
        return False
    engine = f"the engine of {engine_args.model}"
    theirs = engine_args.speculative_config
    if request.models and not any(fnmatch.fnmatchcase(engine_args.model, pattern) for pattern in request.models):
        log(f"{VARIABLE} leaves {engine} alone: its name matches none of {request.models}")
    elif engine_args.create_model_config().runner_type != "generate":
        log(f"{VARIABLE} leaves {engine} alone: it does not generate")
    elif not isinstance(additional, dict):
        raise ValueError(f"{VARIABLE} needs a dict in additional_config to add to, got {additional!r}")
    elif (joined := request.beside(theirs)) is None:
        log(f"{VARIABLE} leaves {engine} alone: it has a speculative_config of its own")
    else:
        config, ours = joined
        engine_args.additional_config = {**additional, **ours["additional_config"]}
        engine_args.speculative_config = ours.get("speculative_config")
        if config.speculation:
            k = config.num_speculative_tokens
            how = "drafts" if k is None else f"at most {k} draft tokens"
            if theirs is not None:
                how = f"a drafter from history beside its {theirs['method']!r}"
        else:
            how = "our noise and no drafts"
        log(f"{VARIABLE} gives {engine} {how}")
        return True
    return False
