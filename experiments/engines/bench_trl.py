"""GRPO with TRL on a GPU: each step's rollouts with drafts off and on, one after the other in the trainer's own engine.

    python -m experiments.engines.bench_trl [--steps 10] [--policy FOLDER] [--out FILE]

As TRL is used there: bfloat16, the engine in the trainer's process, asleep while the policy is trained. The policy is
the demo's with two heads, which GPUs' attention kernels take; its warm start takes three minutes on a CPU, unless
FOLDER has one. The same seeds give the same rollouts with drafts, but for those in which rounding decides. Rollouts
without drafts leave no history.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from examples.demo import policy, task
from examples.demo.paired import first_difference
from experiments.rows import append, make_parser, origin
from rollout_spec import RolloutSpecGenerator
from rollout_spec.integrations.vllm.requests import without_history
from rollout_spec.stats import SpeculationStats

NUM_PROBLEMS, GROUP_SIZE, MAX_MODEL_LEN = 16, 8, 448
BATCHES = {"cuda": 64, "cpu": 16}


class OffAndOn(RolloutSpecGenerator):
    """Generates everything twice. The rollouts with drafts train the policy."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, Any]] = []

    def generate(self, prompts: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        """First without drafts."""
        off = [params.clone() for params in sampling_params]
        for params in off:
            params.extra_args = without_history(params.extra_args)
        rollouts, seconds = {}, {}
        for way, params in (("off", off), ("on", sampling_params)):
            self.enabled = way == "on"
            before, started = self.stats(), time.perf_counter()
            outputs = super().generate(prompts, params, *args, **kwargs)
            seconds[way] = time.perf_counter() - started
            rollouts[way] = [list(output.outputs[0].token_ids) for output in outputs]
        stats = SpeculationStats.between(before, self.stats())
        same = [first_difference(*pair) is None for pair in zip(rollouts["off"], rollouts["on"], strict=True)]
        step = {"seconds": seconds, "rollouts": len(same), "identical": sum(same)}
        tokens = sum(map(len, rollouts["on"]))
        self.steps.append({**step, "tokens": tokens, "tokens_per_step": round(stats.tokens_per_step, 3)})
        print(self.steps[-1], flush=True)
        return outputs


def main() -> None:
    """Train, and print a line per step."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--tokens", type=int, default=384, help="most of a rollout")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.policy or Path(temporary, "policy")
        if not folder.exists():
            policy.warm_start(folder, heads=2)
        rng, problems = random.Random(0), dict[str, None]()
        while len(problems) < NUM_PROBLEMS:
            problems[task.make_prompt(rng)] = None
        generator = OffAndOn()
        config = GRPOConfig(
            output_dir=temporary, max_steps=args.steps, per_device_train_batch_size=BATCHES[device],
            gradient_accumulation_steps=1, num_generations=GROUP_SIZE, max_completion_length=args.tokens,
            temperature=1.0, learning_rate=1e-4, lr_scheduler_type="constant", beta=0.0, bf16=device == "cuda",
            use_cpu=device == "cpu", use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.1,
            vllm_enable_sleep_mode=device == "cuda", vllm_max_model_length=MAX_MODEL_LEN, save_strategy="no",
            report_to="none", disable_tqdm=True,
        )  # fmt: skip
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
            reward_funcs=lambda prompts, completions, **_: list(map(task.reward, prompts, completions)),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": list(problems)}),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
            callbacks=[generator],
        ).train()
    timed = generator.steps[1:]  # the first one warms up
    seconds = {way: round(sum(step["seconds"][way] for step in timed), 3) for way in ("off", "on")}
    row = {
        "benchmark": "trl", "steps": args.steps, "rollouts": sum(step["rollouts"] for step in generator.steps),
        "identical": sum(step["identical"] for step in generator.steps), "seconds": seconds,
        "times_as_fast": round(seconds["off"] / seconds["on"], 3), "tokens": sum(step["tokens"] for step in timed),
        "tokens_per_step": round(sum(step["tokens_per_step"] for step in timed) / len(timed), 3),
    }  # fmt: skip
    append(args.out, {**row, **origin(torch.cuda.get_device_name() if device == "cuda" else None, ("trl",))})
    print(f"{row['identical']} of {row['rollouts']} rollouts are identical; x{row['times_as_fast']} with drafts")


if __name__ == "__main__":
    main()
