"""Rollouts with plain vLLM, without and with speculation: same seeds, same rollouts, less time.

python examples/vllm_offline.py --model Qwen/Qwen2.5-1.5B-Instruct

In bf16 an engine's logits vary with the batch, so some rollouts differ; with --dtype float32 nearly none does.
"""

from __future__ import annotations

import argparse
import time

import torch
from vllm import LLM, SamplingParams

from rollout_spec import engine_kwargs

PROMPTS = [
    "Write a Python function that tells whether a number is prime, with a test.",
    "Explain step by step how to solve 3x + 5 = 20, and check the solution.",
]


def generate(
    model: str, dtype: str, memory: float, group: int, max_tokens: int, rounds: int, **options: object
) -> tuple[list, float]:
    """(rollouts, seconds) of the last round. Earlier rounds fill the history, as earlier epochs do in training."""
    eager = not torch.cuda.is_available()  # compiling the model takes minutes on a CPU
    llm = LLM(
        model, dtype=dtype, max_model_len=max_tokens + 64, gpu_memory_utilization=memory, enforce_eager=eager,
        **engine_kwargs(**options),
    )  # fmt: skip
    prompts = [prompt for prompt in PROMPTS for _ in range(group)]
    for epoch in range(rounds):
        params = [SamplingParams(seed=epoch * len(prompts) + i, max_tokens=max_tokens) for i in range(len(prompts))]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
    stats = llm.collective_rpc("rollout_spec", args=("stats",))[0]
    print(f"{options}: {seconds:.2f} s, {stats['tokens_per_step']:.2f} tokens per request and step")
    return [output.outputs[0].token_ids for output in outputs], seconds


def main() -> None:
    """Compare an engine that drafts with one that only uses the same noise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="on a CPU this is the main memory")
    parser.add_argument("--group", type=int, default=8, help="rollouts per prompt")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    common = (args.model, args.dtype, args.gpu_memory_utilization, args.group, args.max_tokens, args.rounds)

    expected, without = generate(*common, speculation=False)
    rollouts, with_drafts = generate(*common, num_speculative_tokens=8)
    same = sum(a == b for a, b in zip(expected, rollouts, strict=True))
    print(f"{same} of {len(rollouts)} rollouts identical, {without / with_drafts:.2f} times as fast")


if __name__ == "__main__":  # vLLM starts its engine in a process of its own, which imports this file
    main()
