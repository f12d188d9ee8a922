"""What a user can set."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rollout_spec.drafters.registry import check_keeps_history, runs_on_device
from rollout_spec.history.storage import open_storage

MAX_SPECULATIVE_TOKENS = 128
"""vLLM's own limit on draft tokens per request and step (`MAX_SPEC_LEN` of its rejection sampler)."""

CONFIG_KEY = "rollout_spec"
"""Our key in vLLM's `additional_config`."""
PLUGINS_VARIABLE = "VLLM_PLUGINS"
"""vLLM's environment variable with the names of the plugins that it loads; all of them where it is unset."""
ASYNC_METHOD = "ngram_gpu"
"""vLLM's speculative method that an engine with the device drafter asks for, because it has no model and leaves
scheduling asynchronous. The plugin puts the device drafter in its place."""
PROPOSER_PATH = "rollout_spec.integrations.vllm_v1.RolloutSpecProposer"
"""What vLLM's `speculative_config` names as its custom proposer."""
MODEL_METHODS = ("draft_model", "eagle", "eagle3", "mtp")
"""vLLM's speculative methods that draft with a model and can draft beside history."""
AUTO, NO_HISTORY = "auto", "none"
"""Values of `RolloutSpecConfig.drafter` that name no drafter."""

VerifyMethod = Literal["sample", "rejection"]


def drafts_with_model(method: object) -> bool:
    """Whether a speculative method is one of MODEL_METHODS, or a name that vLLM has for a model's own MTP layers."""
    return method in MODEL_METHODS or str(method).endswith("_mtp")


@dataclass(frozen=True)
class RolloutSpecConfig:
    """Settings of the drafter and the verifier of one engine.

    Attributes:
        num_speculative_tokens: K, the most tokens drafted per request and step. `from_dict` takes it from
            `speculative_config` where that is given and this is not.
        drafter: `"mixture"`, `"suffix"`, `"ngram"`, `"device"`, or the dotted path of a class that implements
            `rollout_spec.drafters.base.Drafter`. `"auto"`, which `from_dict` takes beside a model: `"device"` in vLLM's
            V2 runner, `"mixture"` in V1. `"none"`: no history, only the model drafter.
        drafter_options: Keyword arguments of the drafter; for the built-in ones see
            `rollout_spec.drafters.mixture.HistoryDrafter`, for `"device"` those of
            `rollout_spec.drafters.device.DeviceDrafter` from `recency` on.
        budget: Whether to learn what steps cost and to verify only what pays (see `rollout_spec.budget`). False: every
            drafted token is verified, as always with `drafter="device"`.
        num_speculative_tokens_per_batch_size: With `drafter="device"`, which drafts equally many tokens for every
            request of a step: ranges (first, last, K) by the number of requests in the step, the first range from 1;
            K = 0 drafts nothing there, and the last range has no upper end. None: num_speculative_tokens at any size.
            vLLM ignores it under data parallelism.
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

    Raises:
        ValueError, TypeError: a value is out of range or of the wrong type.
    """

    num_speculative_tokens: int = 8
    drafter: str = "mixture"
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    verify: VerifyMethod = "sample"
    speculation: bool = True
    budget: bool = True
    num_speculative_tokens_per_batch_size: Sequence[tuple[int, int, int]] | None = None
    speculative_config: Mapping[str, Any] | None = None
    num_model_draft_tokens: int | None = None
    history_dir: str | None = None
    max_history_dir_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        k = self.num_speculative_tokens
        if not isinstance(k, int) or isinstance(k, bool):
            raise TypeError(f"num_speculative_tokens must be an int, got {k!r}")
        if not 1 <= k <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(
                f"num_speculative_tokens must be between 1 and {MAX_SPECULATIVE_TOKENS} (vLLM's limit), got {k}; "
                "to switch speculation off use speculation=False"
            )
        if not isinstance(self.drafter, str):
            raise TypeError(f"drafter must be a name or a dotted path, got {self.drafter!r}")
        if not isinstance(self.drafter_options, Mapping):
            raise TypeError(f"drafter_options must be a mapping, got {self.drafter_options!r}")
        if self.verify not in get_args(VerifyMethod):
            raise ValueError(f"verify must be one of {get_args(VerifyMethod)}, got {self.verify!r}")
        for name in ("speculation", "budget"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if self.num_speculative_tokens_per_batch_size is not None:
            self._check_ranges(self.num_speculative_tokens_per_batch_size)
        if self.speculative_config is not None:
            self._check_model(self.speculative_config)
            if self.num_model_draft_tokens is None:
                num_model = min(self.speculative_config["num_speculative_tokens"], k)
                object.__setattr__(self, "num_model_draft_tokens", num_model)
        num_model = self.num_model_draft_tokens
        if num_model is not None and (type(num_model) is not int or not 1 <= num_model <= k):
            raise ValueError(f"num_model_draft_tokens must be between 1 and num_speculative_tokens, got {num_model!r}")

        if self.history_dir is not None:
            self._check_history(self.history_dir)
        if type(self.max_history_dir_bytes) is not int or self.max_history_dir_bytes < 1:
            raise ValueError(f"max_history_dir_bytes must be a positive int, got {self.max_history_dir_bytes!r}")

    def _check_history(self, history_dir: Any) -> None:
        if not isinstance(history_dir, (str, os.PathLike)) or not os.fspath(history_dir):
            raise TypeError(f"history_dir must be a path or a URL, got {history_dir!r}")
        object.__setattr__(self, "history_dir", os.fspath(history_dir))
        if not self.speculation or self.drafter == NO_HISTORY:
            raise ValueError(
                "history_dir is set, but the engine keeps no history: it has speculation=False, or no "
                "drafter that drafts from it"
            )
        if importlib.util.find_spec("pyarrow") is None:
            raise ValueError("history_dir needs pyarrow: pip install 'rollout-spec[history]'")
        if self.drafter != AUTO:
            check_keeps_history(self.drafter)
        open_storage(history_dir)

    def _check_model(self, model: Any) -> None:
        if not isinstance(model, Mapping):
            raise TypeError(f"speculative_config must be a dict, as vLLM takes it, got {model!r}")
        if not self.speculation:
            raise ValueError("speculation=False, but there is a speculative_config: remove one of them")
        method = model.get("method")
        if method is not None and not drafts_with_model(method):
            raise ValueError(
                f"speculative_config uses {method!r}, which cannot draft beside history: use one of "
                f"{', '.join(MODEL_METHODS)}, or leave speculative_config out"
            )
        if type(model.get("num_speculative_tokens")) is not int:
            raise ValueError(f"speculative_config must say num_speculative_tokens, an int, got {dict(model)!r}")
        if self.num_speculative_tokens_per_batch_size is not None:
            raise ValueError("give num_speculative_tokens_per_batch_size in speculative_config, and not beside it")

    @property
    def drafts_on_host(self) -> bool:
        """Whether drafts are made on the host, which needs each step's tokens there."""
        return self.speculation and self.drafter != NO_HISTORY and not runs_on_device(self.drafter)

    def _check_ranges(self, ranges: Any) -> None:
        name = "num_speculative_tokens_per_batch_size"
        if not runs_on_device(self.drafter):
            raise ValueError(
                f"{name} is for drafter='device': {self.drafter!r} runs on the host and gives each request its own K"
            )
        if not isinstance(ranges, Sequence) or not ranges:
            raise TypeError(f"{name} must be a list of (first, last, K), got {ranges!r}")
        previous = 0
        for entry in ranges:
            if not isinstance(entry, Sequence) or len(entry) != 3 or not all(isinstance(n, int) for n in entry):
                raise TypeError(f"{name} must be a list of (first, last, K), got {entry!r}")
            first, last, k = entry
            if (
                not previous < first <= last
                or not 0 <= k <= self.num_speculative_tokens
                or (not previous and first > 1)
            ):
                raise ValueError(
                    f"{name} must be rising ranges from 1 on, with K up to num_speculative_tokens, got {ranges!r}"
                )
            previous = last

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RolloutSpecConfig:
        """Build from plain data, as found in `additional_config["rollout_spec"]`.

        Raises:
            ValueError: a key is unknown (the message names the nearest known one), or a value is out of range.
            TypeError: a value has the wrong type.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f"the rollout_spec config must be a dict, such as rollout_spec.engine_kwargs() makes, got {values!r}"
            )
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {near[0]!r}" if near else ""
                raise ValueError(f"unknown rollout_spec config key {key!r}{hint}. Known keys: {', '.join(known)}")
        model = values.get("speculative_config")
        if isinstance(model, Mapping) and type(model.get("num_speculative_tokens")) is int:
            values = {"num_speculative_tokens": model["num_speculative_tokens"], "drafter": AUTO, **values}
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back and JSON can hold."""
        model = None if self.speculative_config is None else dict(self.speculative_config)
        return {
            **dataclasses.asdict(self),
            "drafter_options": dict(self.drafter_options),
            "speculative_config": model,
        }

    def engine_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `vllm.LLM` or `AsyncEngineArgs`.

        `vllm serve` takes the same as JSON: `--additional-config` and `--speculative-config`.

        Raises:
            ValueError: the VLLM_PLUGINS environment variable keeps vLLM from loading the plugin, or `drafter` is
                `"none"` and there is no `speculative_config`.
        """
        plugins = os.environ.get(PLUGINS_VARIABLE)
        if plugins is not None and CONFIG_KEY not in plugins.split(","):
            raise ValueError(
                f"{PLUGINS_VARIABLE}={plugins} keeps vLLM from loading the rollout_spec plugin: add rollout_spec to "
                "it, or unset it"
            )
        kwargs: dict[str, Any] = {"additional_config": {CONFIG_KEY: self.to_dict()}}
        if self.speculation:
            method: dict[str, Any] = {"method": "custom_class", "model": PROPOSER_PATH}
            if self.speculative_config is not None:
                method = dict(self.speculative_config)
            elif self.drafter == NO_HISTORY:
                raise ValueError(
                    f"drafter={NO_HISTORY!r} leaves nothing to draft with: give the speculative_config of a model "
                    "drafter, or use speculation=False"
                )
            elif runs_on_device(self.drafter):
                method = {"method": ASYNC_METHOD}
            kwargs["speculative_config"] = {**method, "num_speculative_tokens": self.num_speculative_tokens}
            if self.num_speculative_tokens_per_batch_size is not None:
                ranges = [list(entry) for entry in self.num_speculative_tokens_per_batch_size]
                kwargs["speculative_config"]["num_speculative_tokens_per_batch_size"] = ranges
        return kwargs


def engine_kwargs(**options: Any) -> dict[str, Any]:
    """Keyword arguments that bring speculation into a vLLM engine: `LLM(model, **engine_kwargs())`.

    Args:
        **options: Fields of `RolloutSpecConfig`.

    Raises:
        ValueError, TypeError: as `RolloutSpecConfig.from_dict` and `RolloutSpecConfig.engine_kwargs`.
    """
    return RolloutSpecConfig.from_dict(options).engine_kwargs()
