"""Checks that the engine's log-probabilities equal those of the trainer's forward pass over the same rollouts."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rollout_spec.integrations.vllm.sampling import needs_processing

logger = logging.getLogger(__name__)

FP32_TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-4, 5e-2  # in others than float32, kernels differ from the second decimal
NUM_CHECKED_ROLLOUTS = 8  # where the trainer has several ranks, also the number of its forward passes on each
NUM_CHECKED_TOKENS = 128  # of each: a trainer's logits of long ones would take gigabytes beside the engine's cache


def ask_for_logprobs(params: Sequence[Any]) -> list[int]:
    """Set `logprobs` of the first requests for which the trainer wants none. Returns the indices of these."""
    unscored = [i for i, p in enumerate(params[:NUM_CHECKED_ROLLOUTS]) if p.logprobs is None]
    for i in unscored:
        params[i].logprobs = 0
    return unscored


def compare(
    model: Any, engine: Any, prompts: Any, outputs: Any, params: Any, autocast: str | None, tolerance: float | None
) -> tuple[float, float]:
    """Compare the first rollouts of a run. Arguments as in `EngineController`; `engine` is vLLM's `ModelConfig`.

    Where the trainer has several ranks, each must call this once and at the same point of the run, a rank without
    rollouts with empty sequences: under FSDP and ZeRO-3 a forward pass is a collective.

    Returns (mean, max) absolute difference; NaN if nothing could be compared. Raises RuntimeError if they differ by
    more than the tolerance, or are missing or not finite.
    """
    dtype, mode = str(engine.dtype).removeprefix("torch."), str(engine.logprobs_mode)
    ours = autocast or str(getattr(model, "dtype", "")).removeprefix("torch.")
    if tolerance == math.inf:
        return math.nan, math.nan
    if tolerance is None:
        tolerance = FP32_TOLERANCE if dtype == ours == "float32" else HALF_PRECISION_TOLERANCE
    errors, reasons = [], set()
    for prompt, output, p in zip(prompts, outputs[:NUM_CHECKED_ROLLOUTS], params, strict=False):
        if reason := _why_not_comparable(model, prompt, output, p, mode):
            reasons.add(reason)
        else:
            errors.append(logprob_errors(model, output, p, mode))
    if reasons:
        logger.warning("log-probabilities were not compared with the trainer's: %s", "; ".join(sorted(reasons)))
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if model is not None and is_distributed and torch.distributed.get_world_size() > 1:
        for _ in range(NUM_CHECKED_ROLLOUTS - len(errors)):
            _last_logits(model, [0], 1)  # other ranks may have more to compare
    if not errors:
        return math.nan, math.nan
    error = torch.cat(errors)
    mean, largest = float(error.mean()), float(error.max())
    if not mean <= tolerance:  # NaN fails, too
        raise RuntimeError(
            f"the engine's log-probabilities differ from the trainer's by {mean:.2g} on average (max {largest:.2g}; "
            f"tolerance: {tolerance:.2g}), so importance ratios would be wrong. The engine computes in {dtype}, the "
            f'trainer in {ours}: if these differ, set llm_kwargs={{"dtype": "{ours}"}}, else look for weights that are '
            "not synchronised, quantisation or another implementation of the model; or set logprob_tolerance"
        )
    return mean, largest


def _why_not_comparable(model: Any, prompt: Any, output: Any, params: Any, mode: str) -> str | None:
    if isinstance(prompt, Mapping):
        is_text = not prompt.get("multi_modal_data") and prompt.get("prompt_embeds") is None
    else:  # a string, token ids or a conversation
        is_text = all(isinstance(part, str | int) or isinstance(part.get("content"), str) for part in prompt)
    if model is None:
        return "the trainer's model is not known"
    if mode not in ("raw_logprobs", "processed_logprobs"):
        return f"logprobs_mode={mode!r} gives none"
    if mode == "processed_logprobs" and (needs_processing(params) or params.min_tokens or params.structured_outputs):
        return "penalties, masks, grammars, top-p, top-k or min-p change them in the engine"
    if not is_text:
        return "prompts have images, or other parts than text"
    return None if output.outputs[0].token_ids else "rollouts are empty"


@torch.no_grad()
def _last_logits(model: Any, token_ids: list[int], count: int) -> torch.Tensor:
    """The logits after each of the last `count` tokens, float [count, V], by one forward pass without dropout."""
    was_training = model.training
    model.eval()
    forward = (model.get_base_model() if hasattr(model, "get_base_model") else model).forward  # of a PEFT model
    keeps = {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(forward).parameters else {}
    logits: torch.Tensor = model(torch.tensor([token_ids], device=model.device), **keeps).logits[0, -count:]
    model.train(was_training)
    return logits


def logprob_errors(model: Any, output: Any, params: Any, mode: str = "processed_logprobs") -> torch.Tensor:
    """|engine - trainer| for the first NUM_CHECKED_TOKENS tokens of one rollout, float32 [T]; NaN where one is missing.

    Runs `model` exactly once. `mode` is the engine's `logprobs_mode`; no processor but the temperature is regarded.
    """
    completion = output.outputs[0]
    tokens = list(completion.token_ids[:NUM_CHECKED_TOKENS])
    logits = _last_logits(model, [*output.prompt_token_ids, *tokens[:-1]], len(tokens)).float()
    if completion.logprobs is None:
        return torch.full((len(tokens),), math.nan)
    if mode == "processed_logprobs" and params.temperature > 0:
        logits = logits / params.temperature
    chosen = torch.tensor(tokens, device=logits.device)
    ours = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].cpu()
    scored = zip(completion.logprobs[: len(tokens)], tokens, strict=True)
    return (torch.tensor([entry[token].logprob for entry, token in scored]) - ours).abs()
