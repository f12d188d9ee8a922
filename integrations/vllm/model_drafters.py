"""Drafters of vLLM's own that have a model (draft models, EAGLE heads, MTP layers): what the plugin asks of them.

Such a drafter is configured as in vLLM, by `speculative_config`. It drafts beside history, and a step verifies for each
request the draft of which more is expected to be accepted; `vllm_model_v1` and `vllm_model_v2` say how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_spec.config import NO_HISTORY, RolloutSpecConfig
from rollout_spec.integrations.vllm.draft_watch import DraftWatch
from rollout_spec.report.stats import SpeculationStats


def prepare_model_drafter(vllm_config: Any, log: Callable[[str], None]) -> None:
    """Let vLLM allocate nothing for drafts that come with probabilities, of which our verifier has no use.

    Called for every configuration that is made with a model drafter, before vLLM completes it.

    Args:
        log: Called with a line if a setting of the user's is changed.
    """
    speculative = vllm_config.speculative_config
    if speculative.draft_sample_method != "greedy":
        log(f"draft_sample_method={speculative.draft_sample_method!r} has no effect with rollout_spec")
        speculative.draft_sample_method = "greedy"


def check_model_drafter(vllm_config: Any, config: RolloutSpecConfig) -> None:
    """Raise ValueError if an engine's model drafter cannot draft beside history.

    Args:
        vllm_config: vLLM's, of an engine with a model drafter.
        config: What `config_of` read from it.
    """
    speculative = vllm_config.speculative_config
    is_v2 = vllm_config.use_v2_model_runner
    for name, remedy in (
        ("parallel_drafting", "its drafts cannot be drawn with the target's noise"),
        ("use_heterogeneous_vocab", "the noise belongs to tokens of the target's vocabulary"),
        ("disable_padded_drafter_batch", "it drafts too late to be joined with history"),
    ):
        if getattr(speculative, name, False):
            raise ValueError(f"speculative_config sets {name}, which rollout_spec does not support: {remedy}")
    method = getattr(speculative, "rejection_sample_method", "standard")
    if method != "standard":
        raise ValueError(
            f"speculative_config sets rejection_sample_method={method!r}, but rollout_spec verifies in its own way: "
            "remove it, and see the option verify"
        )
    if config.num_speculative_tokens_per_batch_size is not None:
        raise ValueError("give num_speculative_tokens_per_batch_size in speculative_config, beside the model's method")
    if config.drafter == NO_HISTORY and getattr(speculative, "enable_adaptive_verification", False):
        raise ValueError(
            f"enable_adaptive_verification needs confidences, which drafter={NO_HISTORY!r} does not give: remove one"
        )
    if config.drafts_on_host and is_v2:
        raise ValueError(
            f"drafter={config.drafter!r} is on the host, and in vLLM's V2 model runner a model drafts beside a drafter "
            "on the device only: leave drafter out, or unset VLLM_USE_V2_MODEL_RUNNER"
        )
    if getattr(speculative, "num_speculative_tokens_per_batch_size", None) is not None and config.drafts_on_host:
        raise ValueError(
            f"drafter={config.drafter!r} is on the host and gives each request its own K: leave "
            "num_speculative_tokens_per_batch_size out of speculative_config"
        )
    num_model = num_model_tokens(config)
    if num_model != config.num_speculative_tokens and config.drafter == NO_HISTORY:
        raise ValueError(
            f"a model that drafts {num_model} tokens leaves the others of num_speculative_tokens="
            f"{config.num_speculative_tokens} empty with drafter={NO_HISTORY!r}: make them equal"
        )
    uses_modules = getattr(speculative, "use_multi_module_mtp", None)
    if num_model != config.num_speculative_tokens and uses_modules is not None and uses_modules():
        raise ValueError(
            f"a model with several MTP modules drafts as many tokens as the engine verifies: num_speculative_tokens="
            f"{config.num_speculative_tokens} and {num_model} of the model must be equal"
        )


def num_model_tokens(config: RolloutSpecConfig) -> int:
    """How many tokens an engine's model drafts for each request."""
    return config.num_model_draft_tokens or config.num_speculative_tokens


class ModelAlone:
    """What the engine's commands know of speculation where a model drafts without history.

    Attributes:
        enabled: Whether drafts are worth anything. Otherwise they are token 0, as vLLM may have scheduled them already,
            and the model runs on, so that its KV cache has no gaps.
        budget: Always None: it takes a drafter on the host.
        num_speculative_tokens: K.
        stats: The engine's counters.
        wants_features: Always False.
        engine_history: Always None.
    """

    budget = None
    engine_history = None
    wants_features = False

    def __init__(self, num_speculative_tokens: int, stats: SpeculationStats) -> None:
        self.enabled = True
        self.num_speculative_tokens = num_speculative_tokens
        self.stats = stats
        self._draft_watch: DraftWatch | None = DraftWatch()

    def set_enabled(self, enabled: bool) -> None:
        """Draft from now on, or no longer."""
        self.enabled = bool(enabled)
        if not enabled:
            self._draft_watch = None  # the counters will hold other drafts than the model's

    def begin_policy_version(self, version: int) -> None:
        """Notice whether the model has lost touch with the policy."""
        if self._draft_watch is not None:
            drafted, accepted = self.stats.drafted_per_position, self.stats.accepted_per_position
            self._draft_watch.observe(version, drafted[0] if drafted else 0, accepted[0] if accepted else 0)

    def num_live_requests(self) -> int:
        """0: requests are not followed."""
        return 0

    def memory_bytes(self) -> int:
        """0: nothing is held besides the model."""
        return 0

    def source_counts(self) -> dict[str, list[int]]:
        """Empty: there is one source."""
        return {}

    def history_summary(self) -> dict[str, int]:
        """Empty: there is no history."""
        return {}

    def exchange_history(self) -> None:
        """There is no history."""

    def close(self) -> None:
        """There is no history."""
