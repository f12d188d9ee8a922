"""GRPO with TRL and speculation: one callback.

On a GPU:  python examples/grpo_trl.py --model Qwen/Qwen2.5-1.5B-Instruct
On a CPU:  python examples/grpo_trl.py --model PATH_OF_A_SMALL_MODEL --steps 2 --max-completion-length 32
           If its cores have other work, set OMP_NUM_THREADS=1 and VLLM_CPU_OMP_THREADS_BIND=nobind: vLLM's threads
           wait for each other.

The policy learns to add two numbers. Problems are made here, so nothing but the model is downloaded.
"""

from __future__ import annotations

import argparse
import random
import re

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rollout_spec import RolloutSpecGenerator

PROMPT = "Add the numbers, step by step, and end with 'Answer: ' and the sum.\n{a} + {b} =\n"


def make_problems(count: int, seed: int) -> Dataset:
    """Prompts and the sums that are asked for."""
    rng = random.Random(seed)
    pairs = [(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(count)]
    return Dataset.from_dict(
        {"prompt": [PROMPT.format(a=a, b=b) for a, b in pairs], "total": [a + b for a, b in pairs]}
    )


def reward(completions: list[str], total: list[int], **_: object) -> list[float]:
    """1 for the right sum, 0.1 for any answer in the form that was asked for."""
    rewards = []
    for completion, expected in zip(completions, total, strict=True):
        found = re.search(r"Answer: *(\d+)", completion)
        rewards.append(0.0 if found is None else 1.0 if int(found.group(1)) == expected else 0.1)
    return rewards


def main() -> None:
    """Train, and print how many drafts were accepted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--max-completion-length", type=int, default=512)
    parser.add_argument("--output-dir", default="grpo-output")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    # The engine must compute in the trainer's precision: otherwise its log-probabilities differ from the trainer's.
    dtype = "bfloat16" if on_gpu else "float32"
    config = GRPOConfig(
        output_dir=args.output_dir,
        max_steps=args.steps,
        per_device_train_batch_size=2 * args.num_generations,
        num_generations=args.num_generations,
        max_completion_length=args.max_completion_length,
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        model_init_kwargs={"dtype": dtype},
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=args.max_completion_length + 64,
    )
    engine = {"dtype": dtype, "enforce_eager": not on_gpu}  # compiling the model takes minutes on a CPU
    generator = RolloutSpecGenerator(num_speculative_tokens=8, llm_kwargs=engine)
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=reward,
        args=config,
        train_dataset=make_problems(256, seed=0),
        callbacks=[generator],
    )
    trainer.train()

    stats = generator.stats()
    print(
        f"{stats['tokens_per_step']:.2f} tokens per request and step, {stats['acceptance_rate']:.0%} of drafts accepted"
    )
    print(f"rollout-spec doctor {args.output_dir}/rollout_spec.json tells more")


if __name__ == "__main__":
    main()
