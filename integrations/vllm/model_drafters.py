"""Drafters of vLLM's own that have a model (draft models, EAGLE heads, MTP layers): what the plugin asks of them.

Such a drafter is configured as in vLLM, by `speculative_config`. It drafts beside history, and a step verifies for each
request the draft of which more is expected to be accepted; `model_v1.py` and `model_v2.py` say how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_spec.config import RolloutSpecConfig


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
    num_model = config.num_model_draft_tokens
    uses_modules = getattr(speculative, "use_multi_module_mtp", None)
    if num_model != config.max_draft_tokens and uses_modules is not None and uses_modules():
        raise ValueError(
            f"a model with several MTP modules drafts as many tokens as the engine verifies: num_speculative_tokens="
            f"{config.max_draft_tokens} and {num_model} of the model must be equal"
        )
