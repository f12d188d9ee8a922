"""Checks and conversions that our samplers in vLLM's two model runners share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_spec.config import RolloutSpecConfig
from rollout_spec.warm_up import warm_up_kernels


def compile_kernels(config: RolloutSpecConfig, runner: Any) -> None:
    """Compile the verifier's kernels for the engine of a vLLM model runner, before it serves."""
    model_config = runner.vllm_config.model_config
    warm_up_kernels(
        config,
        vocab_size=int(model_config.get_vocab_size()),
        dtype=getattr(model_config, "head_dtype", model_config.dtype),
        device=runner.device,
        logprobs_mode=str(model_config.logprobs_mode),
    )


def needs_processing(params: Any) -> bool:
    """Whether a request's logits go through vLLM's own processors before they reach our verifier."""
    return bool(
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
        or params.bad_words
        or params.allowed_token_ids
        or params.logit_bias
        or params.min_tokens > 0
        or params.thinking_token_budget is not None
    )


def refuse_own_processors(processors: Iterable[Any]) -> None:
    """Raise ValueError if a logits processor is not vLLM's own: on drafted positions vLLM applies none of them."""
    for processor in processors:
        if not type(processor).__module__.startswith("vllm."):
            raise ValueError(
                f"the logits processor {type(processor).__name__} would be ignored by rollout_spec's sampler in the V1 "
                "model runner: remove it"
            )


def require_seed(params: Any, request: str) -> None:
    """Raise RuntimeError if a request, which `request` names, has no seed."""
    if params.seed is None:
        raise RuntimeError(
            f"{request} has no seed: it did not pass through vLLM's input processor with the rollout_spec plugin "
            "loaded. Give it one in SamplingParams(seed=...)"
        )


def verifier_scores(mode: str, num_logprobs: int | None, is_processed: bool) -> bool:
    """Whether the verifier computes the log-probabilities that a batch asks for; otherwise vLLM's code does.

    Args:
        mode: The engine's `logprobs_mode`.
        num_logprobs: Tokens per position besides the sampled one; None, or negative: nothing is scored.
        is_processed: Whether the verifier gets logits that vLLM has processed, and so not the raw ones.
    """
    return num_logprobs == 0 and mode.endswith("_logprobs") and not (is_processed and mode == "raw_logprobs")


def raise_if_broken(num_broken_rows: NDArray[Any], req_ids: Sequence[str]) -> None:
    """Raise FloatingPointError if the model's logits are broken.

    Rows that masks have left empty (a grammar at its end, allowed tokens that min_tokens forbids) do not count: vLLM
    emits token 0 there.

    Args:
        num_broken_rows: Integer [B], each request's rows without a sample because a logit is NaN or +inf.
    """
    if not num_broken_rows.any():
        return
    first = req_ids[int(np.flatnonzero(num_broken_rows)[0])]
    raise FloatingPointError(
        f"{int(num_broken_rows.sum())} rows of logits hold NaN or +inf (first in request {first}), and nothing can be "
        "sampled from them: check the weights that were last loaded into the engine"
    )
