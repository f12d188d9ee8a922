"""Generates each step's rollouts three ways from the same weights, and compares them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rollout_spec.integrations.trainers.logprob_check import logprob_errors
from rollout_spec.integrations.trainers.trl import RolloutSpecGenerator
from rollout_spec.integrations.vllm.cpu_fixes import plain_weights
from rollout_spec.noise.torch import gumbel
from rollout_spec.stats import SpeculationStats

WAYS = ("stock", "off", "on")
"""Stock vLLM without speculation; our engine with it switched off; our engine with it."""
GPU_MEMORY_UTILIZATION = 0.15
"""Of each engine; on a CPU a share of the machine's memory."""


@dataclass(frozen=True)
class Divergence:
    """The first token in which a rollout with speculation differs from the one without."""

    step: int
    rollout: int
    position: int
    gap: float
    """Difference between the two largest sums of logit and noise there."""


@dataclass
class StepRecord:
    """One step's generation, three ways.

    Attributes:
        seconds, tokens: By the names in `WAYS`.
        identical: Rollouts that are the same with speculation on and off.
        tokens_per_step: Per request, with speculation on, steps without drafts included.
    """

    step: int
    seconds: dict[str, float]
    tokens: dict[str, int]
    rollouts: int
    identical: int
    mean_acceptance_length: float
    tokens_per_step: float
    draft_tokens: int
    accepted_tokens: int
    max_logprob_error: float
    reward: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position in which two rollouts differ; None where they are equal."""
    if a == b:
        return None
    differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, min(len(a), len(b)))


def build_stock_engine(model_dir: Path, max_model_len: int, max_num_seqs: int, **options: Any) -> Any:
    """A vLLM engine without speculation, with the other arguments that TRL gives its colocated engine.

    Args:
        **options: More of `vllm.LLM`'s arguments.
    """
    from vllm import LLM

    with plain_weights():
        return LLM(
            model=str(model_dir),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=4096,
            gpu_memory_utilization=GPU_MEMORY_UTILIZATION,
            logprobs_mode="processed_logprobs",
            **options,
        )


class PairedGenerator(RolloutSpecGenerator):
    """Generates with stock vLLM, with speculation off and with it on; the last set trains the policy.

    Args:
        build_stock: Makes the stock engine, once TRL's has been built.
        on_record: Called with each `StepRecord`.
        **options: See `RolloutSpecGenerator`.
    """

    def __init__(self, build_stock: Callable[[], Any], on_record: Callable[[StepRecord], None], **options: Any) -> None:
        super().__init__(**options)
        self.records: list[StepRecord] = []
        self.divergences: list[Divergence] = []
        self.seeds: list[int] = []
        self._build_stock = build_stock
        self._on_record = on_record
        self._stock: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Build the stock engine, before any step's clock runs."""
        super().on_train_begin(*args, **kwargs)
        self._stock = self._build_stock()

    def generate(self, prompts: Any, sampling_params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Run all three ways, in an order that changes with the step."""
        model = self._stock.llm_engine.model_executor.driver_worker.model_runner.model
        model.load_weights(self.model.named_parameters())
        self._stock.reset_prefix_cache()
        self.seeds += [params.seed for params in sampling_params]

        step = self._step
        outputs, seconds = {}, {}
        for turn in range(len(WAYS)):
            way = WAYS[(step + turn) % len(WAYS)]
            before = self.stats()
            started = time.perf_counter()
            outputs[way] = self._generate_one_way(way, prompts, sampling_params, *args, **kwargs)
            seconds[way] = time.perf_counter() - started
            if way == "on":
                stats = SpeculationStats.between(before, self.stats())

        found = [
            self._first_difference(step, i, params.seed, off, on)
            for i, (params, off, on) in enumerate(zip(sampling_params, outputs["off"], outputs["on"], strict=True))
        ]
        self.divergences += [divergence for divergence in found if divergence is not None]
        record = StepRecord(
            step=step,
            seconds=seconds,
            tokens={way: sum(len(o.outputs[0].token_ids) for o in outputs[way]) for way in WAYS},
            rollouts=len(prompts),
            identical=found.count(None),
            mean_acceptance_length=stats.mean_acceptance_length,
            tokens_per_step=stats.tokens_per_step,
            draft_tokens=stats.draft_tokens,
            accepted_tokens=stats.accepted_tokens,
            max_logprob_error=self.examine(outputs["on"], sampling_params),
        )
        self.records.append(record)
        return outputs["on"]

    def examine(self, outputs: Sequence[Any], sampling_params: Sequence[Any]) -> float:
        """Look at the rollouts that train the policy, while the trainer has the weights that they were sampled with.

        Returns:
            Largest |engine - trainer| of their log-probabilities. A subclass may do more.
        """
        errors = [logprob_errors(self.model, o, p) for o, p in zip(outputs, sampling_params, strict=True)]
        return float(torch.cat(errors).max())

    def _generate_one_way(
        self, way: str, prompts: Any, sampling_params: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        if way == "stock":
            unseeded = [params.clone() for params in sampling_params]
            for params in unseeded:
                params.seed = None  # as TRL sends them; per-request seeds are slow in stock vLLM
            return self._stock.generate(prompts, unseeded, *args, **kwargs)
        self.enabled = way == "on"
        return super().generate(prompts, sampling_params, *args, **kwargs)

    def _first_difference(self, step: int, rollout: int, seed: int, off: Any, on: Any) -> Divergence | None:
        tokens = list(on.outputs[0].token_ids)
        position = first_difference(list(off.outputs[0].token_ids), tokens)
        if position is None:
            return None
        context = [*on.prompt_token_ids, *tokens[:position]]
        with torch.no_grad():
            # Not self.model(...), which computes in bfloat16 where the trainer uses mixed precision.
            hidden = self.model.model(torch.tensor([context])).last_hidden_state[0, -1]
            logits = self.model.lm_head(hidden).float()
        noise = gumbel(torch.tensor([seed]), torch.tensor([len(context) - 1]), logits.shape[0])[0]
        best = (logits + noise).topk(2).values
        return Divergence(step, rollout, position, float(best[0] - best[1]))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Complete the step's record with its reward."""
        record = self.records[-1] if self.records else None
        if record is not None and record.reward is None and logs and "reward" in logs:
            record.reward = float(logs["reward"])
            self._on_record(record)
