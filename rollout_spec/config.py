"""What a user can set."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from rollout_spec import checks
from rollout_spec.drafters import registry
from rollout_spec.history.folder import open_folder
from rollout_spec.installation import install
from rollout_spec.num_passes import MAX_SUB_STEPS
from rollout_spec.types import VerifyMethod

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


def drafts_with_model(method: object) -> bool:
    """Whether a speculative method is one of MODEL_METHODS, or a name that vLLM has for a model's own MTP layers."""
    return isinstance(method, str) and (method in MODEL_METHODS or method.endswith("_mtp"))


@dataclass(frozen=True)
class RolloutSpecConfig:
    """Settings of the drafter and the verifier of one engine; docs/configuration.md says when to change which.

    Attributes:
        num_speculative_tokens: K, the most tokens drafted per request and step. None: what `speculative_config` says,
            without one 8, and 3 for a model with recurrent layers.
        drafter: A name in `rollout_spec.drafters.registry.REGISTRY`, the dotted path of a class that implements
            `rollout_spec.drafters.base.Drafter`, or `"auto"`.
        drafter_options: `features`, and of drafters on the host `max_history_tokens`, of `"device"`
            `max_resident_tokens`. A class named by its path takes what its constructor takes.
        verify: `"sample"` compares drafts with the target's own sample under the request's noise, so that output does
            not depend on drafts. `"rejection"` is the ratio test with residual sampling: the same distribution, but
            other tokens than without drafts.
        speculation: False gives an engine that drafts nothing but samples with the same noise, to compare with.
        budget: Whether only what pays is verified, by what steps cost (see `rollout_spec.budget`) or, with
            `drafter="device"`, by how many requests run.
        speculative_config: vLLM's own, of a drafter with a model (`MODEL_METHODS`), which then drafts beside history.
            None: no model, or the engine is given its `speculative_config` by the caller.
        history_dir: A folder, or a URL that fsspec knows, that keeps history: of earlier runs, and of other engines.
        max_history_dir_bytes: Bound on the files in `history_dir`, or a size such as "4GB", which becomes one. The
            oldest files go first.
        ignore_cache_salt: Whether requests with a `cache_salt` share history as others do.
        sub_steps: How many forward passes a step of vLLM's scheduler has where nothing but decoding happens, up to 8,
            with drafts on the device; 1 switches that off. None: up to 4, as many as pay.

    Raises:
        ValueError, TypeError: a value is out of range or of the wrong type.
    """

    num_speculative_tokens: int | None = None
    drafter: str = AUTO
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    verify: VerifyMethod = "sample"
    speculation: bool = True
    budget: bool = True
    speculative_config: Mapping[str, Any] | None = None
    history_dir: str | None = None
    max_history_dir_bytes: int | str = 4 << 30
    ignore_cache_salt: bool = False
    sub_steps: int | None = None

    def __post_init__(self) -> None:
        if (k := self.num_speculative_tokens) is not None:
            self._set(num_speculative_tokens=checks.integer("num_speculative_tokens", k, 1, MAX_SPECULATIVE_TOKENS))
        if self.sub_steps is not None:
            self._set(sub_steps=checks.integer("sub_steps", self.sub_steps, 1, MAX_SUB_STEPS))
        if not isinstance(self.drafter, str):
            raise TypeError(f"drafter must be a name or a dotted path, got {checks.shown(self.drafter)}")
        if self.drafter != AUTO:
            registry.check_name(self.drafter)
        self._set(
            drafter=str(self.drafter),
            drafter_options=checks.plain("drafter_options", self.drafter_options),
            verify=checks.choice("verify", self.verify, get_args(VerifyMethod)),
            speculation=checks.switch("speculation", self.speculation),
            budget=checks.switch("budget", self.budget),
            ignore_cache_salt=checks.switch("ignore_cache_salt", self.ignore_cache_salt),
            max_history_dir_bytes=checks.num_bytes("max_history_dir_bytes", self.max_history_dir_bytes),
        )
        if self.speculative_config is not None:
            self._check_model(self.speculative_config)
        if self.history_dir is not None:
            self._check_history(self.history_dir)

    def _set(self, **values: Any) -> None:
        """Replace values by what their check has made of them."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_history(self, history_dir: Any) -> None:
        path = os.fspath(history_dir) if isinstance(history_dir, str | os.PathLike) else None
        if not isinstance(path, str) or not path or "\0" in path:
            raise TypeError(f"history_dir must be a path or a URL, got {checks.shown(history_dir)}")
        path = path if "://" in path else os.path.expanduser(path)
        self._set(history_dir=path)
        if not self.speculation:
            raise ValueError("history_dir is set, but the engine keeps no history: it has speculation=False")
        if None in map(importlib.util.find_spec, ("pyarrow", "fsspec")):
            raise ValueError(f"history_dir needs pyarrow and fsspec: {install('history')}")
        if self.drafter != AUTO and not registry.has_history(self.drafter):
            raise ValueError(f"history_dir is set, but drafter {self.drafter!r} has no history")
        open_folder(path)

    def _check_model(self, model: Any) -> None:
        model = checks.plain("speculative_config", model)
        self._set(speculative_config=model)
        if not self.speculation:
            raise ValueError("speculation=False, but there is a speculative_config: remove one of them")
        method = model.get("method")
        if method is not None and not drafts_with_model(method):
            hint = checks.did_you_mean(method, MODEL_METHODS)
            raise ValueError(
                f"speculative_config uses {checks.shown(method)}, which cannot draft beside history: use one of "
                f"{', '.join(MODEL_METHODS)}, or leave speculative_config out{hint}"
            )
        if "num_speculative_tokens" not in model:
            raise ValueError("speculative_config needs num_speculative_tokens: how many tokens the model drafts")
        k = checks.integer("num_speculative_tokens in speculative_config", model["num_speculative_tokens"], 1)
        if self.num_speculative_tokens is None:
            self._set(num_speculative_tokens=k)

    @property
    def max_draft_tokens(self) -> int:
        """K. An engine's configuration settles what None means for its model."""
        return self.num_speculative_tokens or DEFAULT_TOKENS

    @property
    def num_model_draft_tokens(self) -> int:
        """How many tokens a model drafts, if there is one, at most K."""
        model = self.speculative_config or {}
        return min(model.get("num_speculative_tokens", MAX_SPECULATIVE_TOKENS), self.max_draft_tokens)

    @property
    def drafts_on_host(self) -> bool:
        """Whether drafts are made on the host, which needs each step's tokens there."""
        return self.speculation and not registry.runs_on_device(self.drafter)

    @property
    def drafts_on_device(self) -> bool:
        """Whether drafts are made on the device."""
        return self.speculation and registry.runs_on_device(self.drafter)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, also_known: Sequence[str] = ()) -> RolloutSpecConfig:
        """Build from plain data, as found in `additional_config["rollout_spec"]`. An unknown key is a ValueError.

        Args:
            also_known: Keys that the caller has taken out of `values`, which the error names, too.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                "the rollout_spec config must be a dict, such as rollout_spec.engine_kwargs() makes, got "
                f"{checks.shown(values)}"
            )
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                hint, names = checks.did_you_mean(key, [*known, *also_known]), ", ".join([*known, *also_known])
                raise ValueError(f"unknown rollout_spec config key {key!r}{hint}. Known keys: {names}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back and JSON can hold."""
        return dataclasses.asdict(self)

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
        kwargs: dict[str, Any] = {"additional_config": {CONFIG_KEY: self.to_dict()}}
        if not self.speculation:
            return kwargs
        drafter, options = self.drafter, self.drafter_options
        if drafter == AUTO:  # the one that has these options
            drafter = next((name for name in ("history", "device") if registry.has_options(name, options)), "history")
        registry.check_options(drafter, options)
        method = self.speculative_config or {"method": "custom_class", "model": PROPOSER_PATH}
        return {**kwargs, "speculative_config": {**method, "num_speculative_tokens": self.max_draft_tokens}}


def plugin_fault() -> str | None:
    """Why vLLM would not load the plugin, and what to do; None: it would."""
    plugins = os.environ.get(PLUGINS_VARIABLE)
    if plugins is None or CONFIG_KEY in plugins.split(","):
        return None
    has_spaces = CONFIG_KEY in map(str.strip, plugins.split(","))
    remedy = "remove the spaces, which vLLM takes for parts of names" if has_spaces else "add rollout_spec to it"
    return f"{PLUGINS_VARIABLE}={plugins!r} keeps vLLM from loading the rollout_spec plugin: {remedy}, or unset it"


def engine_kwargs(**options: Any) -> dict[str, Any]:
    """What brings speculation into an engine, `LLM(model, **engine_kwargs())`, from fields of `RolloutSpecConfig`."""
    return RolloutSpecConfig.from_dict(options).engine_kwargs()
