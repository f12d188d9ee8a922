"""What a user can set."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rollout_spec import checks
from rollout_spec.drafters.registry import (
    REGISTRY,
    check_keeps_history,
    check_name,
    check_options,
    current_name,
    has_options,
    runs_on_device,
)
from rollout_spec.history.folder import open_folder
from rollout_spec.imports import install

MAX_SPECULATIVE_TOKENS = 128
"""vLLM's own limit on draft tokens per request and step (`MAX_SPEC_LEN` of its rejection sampler)."""

CONFIG_KEY = "rollout_spec"
"""Our key in vLLM's `additional_config`."""
PLUGINS_VARIABLE = "VLLM_PLUGINS"
"""vLLM's environment variable with the names of the plugins that it loads; all of them where it is unset."""
PROPOSER_PATH = "rollout_spec.RolloutSpecProposer"
"""What vLLM's `speculative_config` names as its custom proposer."""
MODEL_METHODS = ("draft_model", "eagle", "eagle3", "mtp")
"""vLLM's speculative methods that draft with a model and can draft beside history."""
DEFAULT_TOKENS, DEFAULT_RECURRENT_TOKENS = 8, 3
"""K where none is given: of most models, and of those with recurrent layers, whose requests hold K + 1 states each."""
AUTO = "auto"
"""The value of `RolloutSpecConfig.drafter` that names no drafter."""

VerifyMethod = Literal["sample", "rejection"]


def drafts_with_model(method: object) -> bool:
    """Whether a speculative method is one of MODEL_METHODS, or a name that vLLM has for a model's own MTP layers."""
    return isinstance(method, str) and (method in MODEL_METHODS or method.endswith("_mtp"))


@dataclass(frozen=True)
class RolloutSpecConfig:
    """Settings of the drafter and the verifier of one engine.

    Attributes:
        num_speculative_tokens: K, the most tokens drafted per request and step. None: what `speculative_config` or
            `num_speculative_tokens_per_batch_size` say, without them 8, and 3 for a model with recurrent layers.
        drafter: `"history"`, `"suffix"`, `"ngram"`, `"lookahead"`, `"device"`, or the dotted path of a class that
            implements `rollout_spec.drafters.base.Drafter`. `"auto"`: `"device"` in vLLM's V2 runner on an NVIDIA GPU
            with asynchronous scheduling, unless the engine is data-parallel, `budget` is False, `drafter_options` are
            those of the host's drafters, or texts would take much of the GPU's memory; `"history"` elsewhere. Beside a
            model, `"device"` in any V2 runner.
        drafter_options: Keyword arguments of the drafter; for the built-in ones see
            `rollout_spec.drafters.host.history.HistoryDrafter`, for `"device"` those of
            `rollout_spec.drafters.device.drafter.DeviceDrafter` from `recency` on.
        budget: Whether to learn what steps cost and to verify only what pays (see `rollout_spec.budget`). False: every
            drafted token is verified. `drafter="device"` learns no costs; False lets it draft K tokens for any number
            of requests.
        num_speculative_tokens_per_batch_size: With `drafter="device"`, which drafts equally many tokens for every
            request of a step: ranges (first, last, K) by the number of requests in the step, the first range from 1;
            K = 0 drafts nothing there, and the last range has no upper end. None: as many as a GPU verifies at little
            cost (`rollout_spec.integrations.vllm.step_sizes.affordable_ranges`); beside a model
            num_speculative_tokens at any size. Under data parallelism, and up to 0.31 without asynchronous scheduling,
            vLLM drafts num_speculative_tokens at any size.
        verify: `"sample"` compares drafts with the target's own sample under the request's noise, so that output does
            not depend on drafts. `"rejection"` is the ratio test with residual sampling: the same distribution, but
            other tokens than without drafts.
        speculation: False gives an engine that drafts nothing but samples with the same noise, to compare with.
        speculative_config: vLLM's own, of a drafter with a model (`MODEL_METHODS`), which then drafts beside history.
            Its `num_speculative_tokens` is how many tokens the model drafts. None: no model, or the engine is given
            its `speculative_config` by the caller.
        num_model_draft_tokens: How many tokens the model drafts, at most K. None: what `speculative_config` says, and
            without one K.
        history_dir: A folder, or a URL that fsspec knows, that keeps history: of earlier runs, and of other engines
            that use it at the same time (see docs/history.md). None: history ends with the engine, which has it alone.
        max_history_dir_bytes: Bound on the files in `history_dir`. The oldest policy versions go first.
        ignore_cache_salt: Whether requests share history whatever their `cache_salt` is. False: requests with different
            salts, or with and without one, are kept apart (see docs/guarantees.md).

    Raises:
        ValueError, TypeError: a value is out of range or of the wrong type.
    """

    num_speculative_tokens: int | None = None
    drafter: str = AUTO
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    verify: VerifyMethod = "sample"
    speculation: bool = True
    budget: bool = True
    num_speculative_tokens_per_batch_size: Sequence[tuple[int, int, int]] | None = None
    speculative_config: Mapping[str, Any] | None = None
    num_model_draft_tokens: int | None = None
    history_dir: str | None = None
    max_history_dir_bytes: int = 4 << 30
    ignore_cache_salt: bool = False

    def __post_init__(self) -> None:
        if type(self.num_speculative_tokens) is int and self.num_speculative_tokens == 0:
            raise ValueError(
                f"num_speculative_tokens must be from 1 to {MAX_SPECULATIVE_TOKENS}, got 0; to switch speculation off "
                "use speculation=False"
            )
        if self.num_speculative_tokens is not None:
            name, k = "num_speculative_tokens", self.num_speculative_tokens
            self._set(num_speculative_tokens=checks.integer(name, k, 1, MAX_SPECULATIVE_TOKENS))
        self._set(
            drafter=self._checked_drafter(),
            drafter_options=checks.plain("drafter_options", self.drafter_options),
            verify=checks.choice("verify", self.verify, get_args(VerifyMethod)),
            speculation=checks.switch("speculation", self.speculation),
            budget=checks.switch("budget", self.budget),
            ignore_cache_salt=checks.switch("ignore_cache_salt", self.ignore_cache_salt),
            max_history_dir_bytes=checks.integer("max_history_dir_bytes", self.max_history_dir_bytes, 1),
        )
        if "max_draft_tokens" in self.drafter_options and self.drafter in (AUTO, *REGISTRY):
            raise ValueError("drafter_options must not set max_draft_tokens: set num_speculative_tokens")
        if self.num_speculative_tokens_per_batch_size is not None:
            self._check_ranges(self.num_speculative_tokens_per_batch_size)
        if self.speculative_config is not None:
            self._check_model(self.speculative_config)
        if self.num_model_draft_tokens is not None:
            name, k = "num_model_draft_tokens", self.num_model_draft_tokens
            self._set(num_model_draft_tokens=checks.integer(name, k, 1, self.max_draft_tokens))
        if self.history_dir is not None:
            self._check_history(self.history_dir)

    def _set(self, **values: Any) -> None:
        """Replace values by what their check has made of them."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _checked_drafter(self) -> str:
        if not isinstance(self.drafter, str):
            raise TypeError(f"drafter must be a name or a dotted path, got {checks.shown(self.drafter)}")
        drafter = current_name(self.drafter)
        if drafter == "none":
            raise ValueError(
                "drafter='none' is gone: a model drafter without history is vLLM's own speculative_config "
                "without rollout_spec; or leave drafter out, and history drafts beside the model"
            )
        if drafter != AUTO:
            check_name(drafter)
        return str(drafter)

    def _check_history(self, history_dir: Any) -> None:
        path = os.fspath(history_dir) if isinstance(history_dir, str | os.PathLike) else None
        if not isinstance(path, str) or not path:
            raise TypeError(f"history_dir must be a path or a URL, got {checks.shown(history_dir)}")
        if "\0" in path:
            raise ValueError(f"history_dir must be a path or a URL, and has a null character: {checks.shown(path)}")
        path = path if "://" in path else os.path.expanduser(path)
        self._set(history_dir=path)
        if not self.speculation:
            raise ValueError("history_dir is set, but the engine keeps no history: it has speculation=False")
        if None in map(importlib.util.find_spec, ("pyarrow", "fsspec")):
            raise ValueError(f"history_dir needs pyarrow and fsspec: {install('history')}")
        if self.drafter != AUTO:
            check_keeps_history(self.drafter)
        open_folder(path)

    def _check_model(self, model: Any) -> None:
        if not isinstance(model, Mapping):
            raise TypeError(f"speculative_config must be a dict, as vLLM takes it, got {checks.shown(model)}")
        self._set(speculative_config=checks.plain("speculative_config", model))
        if not self.speculation:
            raise ValueError("speculation=False, but there is a speculative_config: remove one of them")
        method = model.get("method")
        if method is not None and not drafts_with_model(method):
            hint = checks.did_you_mean(method, MODEL_METHODS)
            raise ValueError(
                f"speculative_config uses {checks.shown(method)}, which cannot draft beside history: use one of "
                f"{', '.join(MODEL_METHODS)}, or leave speculative_config out{hint}"
            )
        if model.get("num_speculative_tokens") is None:
            raise ValueError(f"speculative_config must say num_speculative_tokens, an int, got {checks.shown(model)}")
        num_model = checks.integer("speculative_config['num_speculative_tokens']", model["num_speculative_tokens"], 1)
        if self.num_speculative_tokens_per_batch_size is not None:
            raise ValueError("give num_speculative_tokens_per_batch_size in speculative_config, and not beside it")
        if self.num_speculative_tokens is None:
            self._set(num_speculative_tokens=num_model)
        if self.num_model_draft_tokens is None:
            self._set(num_model_draft_tokens=min(num_model, self.max_draft_tokens))

    @property
    def max_draft_tokens(self) -> int:
        """K. An engine's configuration settles what None means for its model."""
        return self.num_speculative_tokens or DEFAULT_TOKENS

    @property
    def drafts_on_host(self) -> bool:
        """Whether drafts are made on the host, which needs each step's tokens there."""
        return self.speculation and not runs_on_device(self.drafter)

    @property
    def drafts_on_device(self) -> bool:
        """Whether drafts are made on the device."""
        return self.speculation and runs_on_device(self.drafter)

    def _check_ranges(self, ranges: Any) -> None:
        name = "num_speculative_tokens_per_batch_size"
        if not runs_on_device(self.drafter):
            raise ValueError(
                f"{name} is for drafter='device', and the drafter is {self.drafter!r}: one on the host gives each "
                "request its own K"
            )
        if not isinstance(ranges, Sequence) or not ranges:
            raise TypeError(f"{name} must be a list of (first, last, K), got {checks.shown(ranges)}")
        previous, checked = 0, []
        for entry in ranges:
            if not isinstance(entry, Sequence) or len(entry) != 3:
                raise TypeError(f"{name} must be a list of (first, last, K), got {checks.shown(entry)}")
            first, last, k = (checks.integer(f"each number in {name}", n) for n in entry)
            if (
                not previous < first <= last
                or not 0 <= k <= (self.num_speculative_tokens or MAX_SPECULATIVE_TOKENS)
                or (not previous and first > 1)
            ):
                raise ValueError(
                    f"{name} must be rising ranges from 1 on, with K up to num_speculative_tokens, got "
                    f"{checks.shown(ranges)}"
                )
            checked.append((first, last, k))
            previous = last
        k = self.num_speculative_tokens or max(k for _, _, k in checked)
        self._set(num_speculative_tokens_per_batch_size=tuple(checked), num_speculative_tokens=k)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RolloutSpecConfig:
        """Build from plain data, as found in `additional_config["rollout_spec"]`.

        Raises:
            ValueError: a key is unknown (the message names the nearest known one), or a value is out of range.
            TypeError: a value has the wrong type.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                "the rollout_spec config must be a dict, such as rollout_spec.engine_kwargs() makes, got "
                f"{checks.shown(values)}"
            )
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                hint = checks.did_you_mean(key, known)
                raise ValueError(f"unknown rollout_spec config key {key!r}{hint or '.'} Known keys: {', '.join(known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back and JSON can hold."""
        model = None if self.speculative_config is None else dict(self.speculative_config)
        return {
            **dataclasses.asdict(self),
            "drafter_options": dict(self.drafter_options),
            "speculative_config": model,
        }

    def _check_drafter_options(self) -> None:
        """Check the drafter's options; with `"auto"` those of a GPU's drafter where they are not of the host's."""
        drafter, options = self.drafter, self.drafter_options
        has_kernels = importlib.util.find_spec("triton") is not None  # otherwise engines with a GPU start elsewhere
        if drafter == AUTO:
            is_device = not has_options("history", options) and (not has_kernels or has_options("device", options))
            drafter = "device" if is_device else "history"
        if has_kernels or not runs_on_device(drafter):
            check_options(drafter, options)

    def engine_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `vllm.LLM` or `AsyncEngineArgs`.

        `vllm serve` takes the same as JSON: `--additional-config` and `--speculative-config`.

        Raises:
            ValueError: the VLLM_PLUGINS environment variable keeps vLLM from loading the plugin, or as
                `rollout_spec.drafters.registry.check_options`.
        """
        fault = plugin_fault()
        if fault is not None:
            raise ValueError(fault)
        if self.speculation and (self.drafter_options or self.drafter not in (AUTO, *REGISTRY)):
            self._check_drafter_options()
        kwargs: dict[str, Any] = {"additional_config": {CONFIG_KEY: self.to_dict()}}
        if self.speculation:
            method: dict[str, Any] = {"method": "custom_class", "model": PROPOSER_PATH}
            if self.speculative_config is not None:
                method = dict(self.speculative_config)
            kwargs["speculative_config"] = {**method, "num_speculative_tokens": self.max_draft_tokens}
        return kwargs


def plugin_fault() -> str | None:
    """Why vLLM would not load the plugin, and what to do; None: it would."""
    plugins = os.environ.get(PLUGINS_VARIABLE)
    if plugins is None or CONFIG_KEY in plugins.split(","):
        return None
    has_spaces = CONFIG_KEY in map(str.strip, plugins.split(","))
    remedy = "remove the spaces, which vLLM takes for parts of names" if has_spaces else "add rollout_spec to it"
    return f"{PLUGINS_VARIABLE}={plugins!r} keeps vLLM from loading the rollout_spec plugin: {remedy}, or unset it"


def engine_kwargs(**options: Any) -> dict[str, Any]:
    """Keyword arguments that bring speculation into a vLLM engine: `LLM(model, **engine_kwargs())`.

    Args:
        **options: Fields of `RolloutSpecConfig`.

    Raises:
        ValueError, TypeError: as `RolloutSpecConfig.from_dict` and `RolloutSpecConfig.engine_kwargs`.
    """
    return RolloutSpecConfig.from_dict(options).engine_kwargs()
