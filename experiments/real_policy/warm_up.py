"""Supervised warm-up: teach the model to answer in a few short steps, so that GRPO starts from a non-zero reward."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from real_policy.tasks import TASKS, make_problem
from rollout_spec.demo.warm_start import IGNORED_LABEL, learning_rate_factor

STEPS = 90
SOLUTIONS_PER_TASK = 4
PEAK_LEARNING_RATE = 5e-4
STREAM = 1
"""The seed of the problems that are solved here. GRPO trains on others (see `grpo.STREAM`)."""


def warm_up(
    model_dir: Path,
    out_dir: Path,
    *,
    steps: int = STEPS,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
) -> float:
    """Train the model of `model_dir` on worked solutions of fresh problems and save it to `out_dir`.

    Args:
        steps: Optimizer steps, of SOLUTIONS_PER_TASK solutions of each task.
        seed: Decides the order of the problems.
        progress: Called after each step with the number of steps done and the step's loss.

    Returns:
        Mean loss of the last tenth of the steps, in nats per token of the solutions.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    rng = random.Random(seed)
    losses = []
    for step in range(steps):
        total = 0.0
        for task in TASKS:  # a task's solutions have similar lengths, so little of its batch is padding
            numbers = [rng.randrange(100_000) for _ in range(SOLUTIONS_PER_TASK)]
            input_ids, attention_mask, labels = _batch(tokenizer, task, numbers)
            # In bfloat16, which is faster on CPUs with matrix instructions; the weights stay in float32.
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model.model(
                    input_ids=input_ids, attention_mask=attention_mask, use_cache=False
                ).last_hidden_state
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
        losses.append(total)
        if progress is not None:
            progress(step + 1, losses[-1])
    model.eval().save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    tail = losses[-max(1, steps // 10) :]
    return sum(tail) / len(tail)


def _batch(tokenizer: Any, task: str, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """input_ids, attention_mask and labels, int64 [B, L], of prompts with their solutions, padded on the right."""
    rows = []
    for number in numbers:
        problem = make_problem(task, STREAM, number)
        prompt = prompt_token_ids(tokenizer, problem.question)
        rows.append((prompt, [*tokenizer.encode(problem.solution), tokenizer.eos_token_id]))
    length = max(len(prompt) + len(solution) for prompt, solution in rows)
    input_ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full((len(rows), length), IGNORED_LABEL)
    attention_mask = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, (prompt, solution) in enumerate(rows):
        end = len(prompt) + len(solution)
        input_ids[row, :end] = torch.tensor(prompt + solution)
        labels[row, len(prompt) : end] = torch.tensor(solution)
        attention_mask[row, :end] = 1
    return input_ids, attention_mask, labels


def prompt_token_ids(tokenizer: Any, question: str) -> list[int]:
    """A question in the model's chat template, up to where the answer begins."""
    messages = [{"role": "user", "content": question}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids
