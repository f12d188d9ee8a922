"""Supervised warm-up: teach the model to answer in a few short steps, so that GRPO starts from a non-zero reward."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from examples.demo.policy import IGNORED_LABEL, learning_rate_factor, pad
from experiments.real_policy.tasks import TASKS, Problem, make_problem

STEPS = 90
SOLUTIONS_PER_TASK = 4
PEAK_LEARNING_RATE = 5e-4
STREAM = 1
"""The seed of the problems that are solved here. GRPO trains on others (see `grpo.STREAM`)."""


def warm_up(model_dir: Path, out_dir: Path) -> None:
    """Train the model of `model_dir` on worked solutions of fresh problems and save it to `out_dir`.

    A step takes SOLUTIONS_PER_TASK solutions of each task. Prints each step's loss, in nats per token of the solutions.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, STEPS))
    rng = random.Random(0)
    for step in range(STEPS):
        total = 0.0
        for task in TASKS:  # a task's solutions have similar lengths, so little of its batch is padding
            numbers = [rng.randrange(100_000) for _ in range(SOLUTIONS_PER_TASK)]
            solutions = [_solution(tokenizer, make_problem(task, STREAM, number)) for number in numbers]
            input_ids, labels = pad(solutions, tokenizer.pad_token_id)
            # In bfloat16, which is faster on CPUs with matrix instructions; the weights stay in float32.
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
                # Logits of the solutions only: with those of prompts and padding they would take most of the time.
                counts = labels[:, 1:] != IGNORED_LABEL
                logits = model.lm_head(hidden[:, :-1][counts])
                loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][counts]) / len(TASKS)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        print(f"  {step + 1:3d} {total:.3f}", flush=True)
    model.eval().save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def _solution(tokenizer: Any, problem: Problem) -> tuple[list[int], int]:
    """Token ids of a problem's prompt and solution, and how many of them are the prompt."""
    prompt = prompt_token_ids(tokenizer, problem.question)
    return [*prompt, *tokenizer.encode(problem.solution), tokenizer.eos_token_id], len(prompt)


def prompt_token_ids(tokenizer: Any, question: str) -> list[int]:
    """A question in the model's chat template, up to where the answer begins."""
    messages = [{"role": "user", "content": question}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids
