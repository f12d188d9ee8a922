"""Generates each step's rollouts three ways from the same weights, and compares them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from rollout_spec.integrations.trainers.logprob_check import logprob_errors
from rollout_spec.integrations.trainers.trl import RolloutSpecGenerator
from rollout_spec.integrations.vllm.compat import plain_weights
from rollout_spec.integrations.vllm.requests import without_history
from rollout_spec.noise.torch import gumbel
from rollout_spec.stats import SpeculationStats

WAYS = ("stock", "off", "on")  # stock vLLM without speculation, our engine with it switched off, our engine with it
GPU_MEMORY_UTILIZATION = 0.15  # of each engine; on a CPU a share of the machine's memory
COUNTERS = ("mean_acceptance_length", "tokens_per_step", "draft_tokens", "accepted_tokens")


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position in which two rollouts differ; None where they are equal."""
    return next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)


class PairedGenerator(RolloutSpecGenerator):
    """Generates with stock vLLM, with speculation off and with it on; the last set trains the policy.

    `stock` has arguments of the stock `vllm.LLM`, besides those that TRL gives every engine. `on_record` is called with
    each step's record once its reward is known: plain data, in which times and tokens are by WAYS.
    """

    def __init__(self, stock: Mapping[str, Any], on_record: Callable[[dict[str, Any]], None], **options: Any) -> None:
        super().__init__(**options)
        self.records: list[dict[str, Any]] = []
        self.seeds: set[int] = set()
        self._stock_arguments = stock
        self._on_record = on_record

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Build the stock engine, before any step's clock runs."""
        super().on_train_begin(*args, **kwargs)
        from vllm import LLM

        of_trl = {"max_num_batched_tokens": 4096, "logprobs_mode": "processed_logprobs"}
        with plain_weights():
            self._stock = LLM(gpu_memory_utilization=GPU_MEMORY_UTILIZATION, **of_trl, **self._stock_arguments)

    def generate(self, prompts: Any, sampling_params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Run all three ways, in an order that changes with the step."""
        model = self._stock.llm_engine.model_executor.driver_worker.model_runner.model
        model.load_weights(self.model.named_parameters())
        self._stock.reset_prefix_cache()
        self.seeds.update(params.seed for params in sampling_params)
        params_of = {way: [params.clone() for params in sampling_params] for way in WAYS}
        for stock, off in zip(params_of["stock"], params_of["off"], strict=True):
            stock.seed = None  # as TRL sends them; per-request seeds are slow in stock vLLM
            # The same rollouts come again with drafts, and a drafter on a GPU learns also while it is off.
            off.extra_args = without_history(off.extra_args)

        outputs, seconds, stats = {}, {}, {}
        first = self._step % len(WAYS)
        for way in WAYS[first:] + WAYS[:first]:
            self.enabled = way == "on"
            before, started = self.stats(), time.perf_counter()
            generate = self._stock.generate if way == "stock" else super().generate
            outputs[way] = generate(prompts, params_of[way], *args, **kwargs)
            seconds[way] = time.perf_counter() - started
            stats[way] = SpeculationStats.between(before, self.stats())

        tokens = {way: [list(output.outputs[0].token_ids) for output in outputs[way]] for way in WAYS}
        divergences = []
        for i, (off, on, params) in enumerate(zip(tokens["off"], tokens["on"], sampling_params, strict=True)):
            if (position := first_difference(off, on)) is not None:
                gap = self._gap([*outputs["on"][i].prompt_token_ids, *on[:position]], params.seed)
                divergences.append({"rollout": i, "position": position, "gap": gap})
        record = {
            "step": self._step,
            "seconds": seconds,
            "tokens": {way: sum(map(len, tokens[way])) for way in WAYS},
            "rollouts": len(prompts),
            "identical": len(prompts) - len(divergences),  # with speculation on and off
            "divergences": divergences,
            **{name: getattr(stats["on"], name) for name in COUNTERS},
            "max_logprob_error": self.examine(outputs["on"], sampling_params),
        }
        self.records.append(record)
        return outputs["on"]

    def examine(self, outputs: Sequence[Any], sampling_params: Sequence[Any]) -> float:
        """Largest |engine - trainer| of the log-probabilities of the rollouts that train the policy."""
        errors = [logprob_errors(self.model, o, p) for o, p in zip(outputs, sampling_params, strict=True)]
        return float(torch.cat(errors).max())

    @torch.no_grad()
    def _gap(self, context: list[int], seed: int) -> float:
        """Difference between the two largest sums of logit and noise after a text."""
        # Not self.model(...), which computes in bfloat16 where the trainer uses mixed precision.
        logits = self.model.lm_head(self.model.model(torch.tensor([context])).last_hidden_state[0, -1]).float()
        noise = gumbel(torch.tensor([seed]), torch.tensor([len(context) - 1]), logits.shape[0])[0]
        best = (logits + noise).topk(2).values
        return float(best[0] - best[1])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Complete the step's record with its reward."""
        if self.records and "reward" not in self.records[-1] and logs and "reward" in logs:
            self.records[-1]["reward"] = float(logs["reward"])
            self._on_record(self.records[-1])
