"""What a user can set."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rollout_spec.drafters.registry import runs_on_device

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

VerifyMethod = Literal["sample", "rejection"]


@dataclass(frozen=True)
class RolloutSpecConfig:
    """Settings of the drafter and the verifier of one engine.

    Attributes:
        num_speculative_tokens: K, the most tokens drafted per request and step.
        drafter: `"mixture"`, `"suffix"`, `"ngram"`, `"device"`, or the dotted path of a class that implements
            `rollout_spec.drafters.base.Drafter`.
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
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back and JSON can hold."""
        return {**dataclasses.asdict(self), "drafter_options": dict(self.drafter_options)}

    def engine_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `vllm.LLM` or `AsyncEngineArgs`.

        `vllm serve` takes the same as JSON: `--additional-config` and `--speculative-config`.

        Raises:
            ValueError: the VLLM_PLUGINS environment variable keeps vLLM from loading the plugin.
        """
        plugins = os.environ.get(PLUGINS_VARIABLE)
        if plugins is not None and CONFIG_KEY not in plugins.split(","):
            raise ValueError(
                f"{PLUGINS_VARIABLE}={plugins} keeps vLLM from loading the rollout_spec plugin: add rollout_spec to "
                "it, or unset it"
            )
        kwargs: dict[str, Any] = {"additional_config": {CONFIG_KEY: self.to_dict()}}
        if self.speculation:
            method = {"method": "custom_class", "model": PROPOSER_PATH}
            if runs_on_device(self.drafter):
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
