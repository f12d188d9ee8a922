"""Checks that the engine's log-probabilities equal those of the trainer's forward pass over the same rollouts."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rollout_spec import checks
from rollout_spec.integrations.vllm.sampling import needs_processing
from rollout_spec.types import SamplingBatch
from rollout_spec.verify.vectorised import process

logger = logging.getLogger(__name__)

FP32_TOLERANCE = 1e-4
"""Largest mean |difference| between the engine's and the trainer's log-probabilities where both compute in float32."""
HALF_PRECISION_TOLERANCE = 5e-2
"""The same for other dtypes, in which kernels differ from the second decimal on."""
NUM_CHECKED_ROLLOUTS = 8
"""Rollouts that are checked, and where the trainer has several ranks also the number of its forward passes on each."""
NUM_CHECKED_TOKENS = 256
"""Tokens checked of each rollout: the trainer's logits of long ones would take gigabytes beside the engine's cache."""
ROWS_PER_CHUNK = 64
"""Rows of logits that are scored at once."""


class LogprobCheck:
    """Compares log-probabilities at the first generation of a run.

    Attributes:
        error: (mean, max) absolute difference; NaN if nothing could be compared; None before the first comparison.

    Args:
        tolerance: Largest mean absolute difference. None: 1e-4 where engine and trainer compute in float32, 5e-2
            otherwise. `math.inf` switches the check off.

    Raises:
        ValueError, TypeError: `tolerance` is no number, or negative.
    """

    def __init__(self, tolerance: float | None = None) -> None:
        self.error: tuple[float, float] | None = None
        if tolerance is not None:
            tolerance = checks.number("logprob_tolerance", tolerance, lambda value: value >= 0, "at least 0")
        self._tolerance = tolerance

    def ask_for_logprobs(self, params: Sequence[Any]) -> list[int]:
        """Ask the engine for log-probabilities of the rollouts that are checked.

        Trainers such as RLOO and OnlineDPO do not ask for any.

        Args:
            params: The requests' `SamplingParams`; `logprobs` is set where it was None.

        Returns:
            Indices of the requests that were changed.
        """
        unscored = [i for i, p in enumerate(params[:NUM_CHECKED_ROLLOUTS]) if p.logprobs is None]
        for i in unscored:
            params[i].logprobs = 0
        return unscored

    def compare(
        self,
        model: Any,
        engine_config: Any,
        prompts: Sequence[Any],
        outputs: Sequence[Any],
        params: Sequence[Any],
        *,
        autocast_dtype: str | None = None,
    ) -> None:
        """Compare a few rollouts.

        Where the trainer has several ranks, each must call this once and at the same point of the run, a rank without
        rollouts with empty sequences: under FSDP and ZeRO-3 all must run the model equally often. `EngineController`
        calls it after an engine's first generation, with or without prompts, and never for a server. In TRL's trainers
        all ranks generate together: where chance decides whether they do, the first rank draws for all.

        Args:
            model: The trainer's, a causal language model of transformers. None: nothing is compared, as a warning says.
            engine_config: vLLM's `ModelConfig`.
            prompts: What the engine was given, as `vllm.LLM.generate` or `chat` take it.
            outputs: vLLM's `RequestOutput`s.
            params: Their `SamplingParams`.
            autocast_dtype: What the trainer's forward pass computes in, e.g. "bfloat16"; None: the model's dtype.

        Raises:
            RuntimeError: log-probabilities differ by more than the tolerance, or are missing or not finite.
        """
        dtype, mode = str(engine_config.dtype).removeprefix("torch."), str(engine_config.logprobs_mode)
        trainer_dtype = autocast_dtype or str(getattr(model, "dtype", "")).removeprefix("torch.")
        tolerance = self._tolerance
        if tolerance is None:
            tolerance = FP32_TOLERANCE if dtype == trainer_dtype == "float32" else HALF_PRECISION_TOLERANCE
        if math.isinf(tolerance):
            self.error = (math.nan, math.nan)
            return
        checked, reasons = [], []
        for prompt, output, p in zip(prompts, outputs[:NUM_CHECKED_ROLLOUTS], params, strict=False):
            reason = _why_not_comparable(model, prompt, output, p, mode)
            if reason is None:
                checked.append((output, p))
            else:
                reasons.append(reason)
        if reasons:
            logger.warning(
                "log-probabilities of %d of the first %d rollouts were not compared with the trainer's: %s",
                len(reasons),
                len(reasons) + len(checked),
                "; ".join(sorted(set(reasons))),
            )
        errors = [logprob_errors(model, output, p, mode) for output, p in checked]
        if model is not None and _num_ranks() > 1:
            # Under FSDP and ZeRO-3 a forward pass is a collective, and how many rollouts can be compared is known to
            # this rank alone. The number is fixed, as ranks could only agree on one where all of them generate.
            for _ in range(NUM_CHECKED_ROLLOUTS - len(errors)):
                _last_logits(model, [0], 1)
        if not errors:
            self.error = (math.nan, math.nan)
            return
        error = torch.cat(errors)
        self.error = (float(error.mean()), float(error.max()))
        if not self.error[0] <= tolerance:  # NaN fails, too
            remedy = (
                f"The engine computes in {dtype} and the trainer in {trainer_dtype}: make them equal, e.g. by "
                f'llm_kwargs={{"dtype": "{trainer_dtype}"}}'
                if dtype != trainer_dtype
                else f"Both compute in {dtype}, so look for other weights (a synchronisation that left some out, "
                "quantisation) or another model implementation in the engine"
            )
            raise RuntimeError(
                f"the engine's log-probabilities differ from the trainer's by {self.error[0]:.2g} on average "
                f"(at most {self.error[1]:.2g}; tolerance {tolerance:.2g}), so importance ratios would be "
                f"wrong. {remedy}; or set logprob_tolerance"
            )


def _num_ranks() -> int:
    """How many processes train together."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _why_not_comparable(model: Any, prompt: Any, output: Any, params: Any, mode: str) -> str | None:
    """Why a rollout's log-probabilities cannot be compared with the trainer's forward pass; None: they can."""
    if model is None:
        return "the trainer's model is not known"
    if mode not in ("raw_logprobs", "processed_logprobs"):
        return f"logprobs_mode={mode!r} gives none"
    if mode == "processed_logprobs" and (needs_processing(params) or params.structured_outputs):
        return "penalties, masks or grammars change them in the engine"
    if _has_media(prompt):
        return "the forward pass would need the prompt's images"
    if not output.outputs[0].token_ids:
        return "they are empty"
    return None


def _has_media(prompt: Any) -> bool:
    """Whether a prompt, or a conversation, holds more than text."""
    if isinstance(prompt, Mapping):
        return bool(prompt.get("multi_modal_data")) or prompt.get("prompt_embeds") is not None
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    contents = [message.get("content") for message in prompt if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type", "text") != "text" for part in parts)


@torch.no_grad()
def _last_logits(model: Any, token_ids: list[int], count: int) -> torch.Tensor:
    """The logits after each of the last `count` tokens, float [count, V], by one forward pass without dropout."""
    was_training = model.training
    model.eval()
    input_ids = torch.tensor([token_ids], device=model.device)
    forward = (model.get_base_model() if hasattr(model, "get_base_model") else model).forward  # of a PEFT model
    keeps = {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(forward).parameters else {}
    logits: torch.Tensor = model(input_ids, **keeps).logits[0, -count:]
    model.train(was_training)
    return logits


def logprob_errors(model: Any, output: Any, params: Any, mode: str = "processed_logprobs") -> torch.Tensor:
    """|engine - trainer| for the first NUM_CHECKED_TOKENS tokens of one rollout, float32 [T]; NaN where one is missing.

    Runs the model exactly once.

    Args:
        model: The trainer's, a causal language model of transformers.
        output: vLLM's `RequestOutput`.
        params: Its `SamplingParams`.
        mode: The engine's `logprobs_mode`: "processed_logprobs" or "raw_logprobs".
    """
    completion = output.outputs[0]
    count = min(len(completion.token_ids), NUM_CHECKED_TOKENS)
    tokens = list(completion.token_ids[:count])
    logits = _last_logits(model, [*output.prompt_token_ids, *tokens[:-1]], count)
    if completion.logprobs is None:
        return torch.full((count,), math.nan)
    expected = [
        _score(logits[start : start + ROWS_PER_CHUNK].float(), tokens[start : start + ROWS_PER_CHUNK], params, mode)
        for start in range(0, count, ROWS_PER_CHUNK)
    ]
    scored = zip(completion.logprobs[:count], tokens, strict=True)
    return (torch.tensor([entry[token].logprob for entry, token in scored]) - torch.cat(expected)).abs()


def _score(logits: torch.Tensor, tokens: list[int], params: Any, mode: str) -> torch.Tensor:
    """Log-probabilities of one token per row of logits, float32 [T], on the CPU."""
    count = len(tokens)

    def repeated(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=logits.device)

    if mode == "processed_logprobs":
        rows = SamplingBatch(
            temperature=repeated(params.temperature, torch.float32),
            seeds=repeated(0, torch.int64),
            positions=repeated(0, torch.int64),
            top_k=repeated(params.top_k, torch.int64) if params.top_k > 0 else None,
            top_p=repeated(params.top_p, torch.float32) if params.top_p < 1 else None,
            min_p=repeated(params.min_p, torch.float32) if params.min_p > 0 else None,
        )
        logits = process(logits.float(), rows, torch.arange(count, device=logits.device))
    chosen = torch.tensor(tokens, device=logits.device)
    return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].cpu()
