"""Supervised warm start: teach the policy the form of the search, so that GRPO starts from a non-zero reward."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rollout_spec.demo.policy import build_model, build_tokenizer
from rollout_spec.demo.task import make_problem, prompt_text, trace_text

STEPS = 600
"""Optimizer steps of the demo's warm start."""
IGNORED_LABEL = -100
"""Labels of prompts and padding: cross entropy leaves them out."""


def warm_start(
    out_dir: str | Path,
    *,
    seed: int = 0,
    steps: int = STEPS,
    batch_size: int = 32,
    peak_learning_rate: float = 4e-3,
    progress: Callable[[int, float], None] | None = None,
) -> dict[str, float]:
    """Train a fresh policy on generated traces and save it, with its tokenizer, to `out_dir`.

    The number of steps is fixed, not the time, so the same arguments give the same weights on the same machine.

    Args:
        out_dir: where `save_pretrained` writes; made when missing.
        seed: decides the initial weights and the traces.
        steps: optimizer steps.
        batch_size: traces per step.
        peak_learning_rate: reached after 5 % of the steps, then decays to 0 along a cosine.
        progress: called after each step with the number of steps done and the step's loss.

    Returns:
        `steps`, `tokens` (trained on), `parameters`, `loss` (mean of the last tenth, in nats per completion token)
        and `seconds`.

    Raises:
        ValueError: `steps` or `batch_size` is less than 1.
    """
    if steps < 1 or batch_size < 1:
        raise ValueError(f"steps and batch_size must be at least 1, got {steps} and {batch_size}")
    start = time.perf_counter()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed).train()
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    gains = [weight for weight in model.parameters() if weight.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": gains, "weight_decay": 0.0}],
        lr=peak_learning_rate,
        betas=(0.9, 0.98),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))

    losses: list[float] = []
    tokens = 0
    batches = trace_batches(tokenizer, random.Random(seed), batch_size)
    for step in range(steps):
        input_ids, labels = next(batches)
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.item())
        tokens += int((labels != IGNORED_LABEL).sum())
        if progress is not None:
            progress(step + 1, losses[-1])

    model.eval().save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    tail = losses[-max(1, steps // 10) :]
    return {
        "steps": float(steps),
        "tokens": float(tokens),
        "parameters": float(model.num_parameters()),
        "loss": sum(tail) / len(tail),
        "seconds": time.perf_counter() - start,
    }


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first 5 % of the steps, then a cosine down to 0."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def trace_batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, batch_size: int, batches_per_pool: int = 16
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless batches of fresh traces.

    A pool of traces is sorted by length before it is cut, so that little of a batch is padding, and its batches come
    in random order, so that length and training step stay independent.

    Yields:
        What `pad` returns of batch_size traces.
    """
    while True:
        pool: list[tuple[list[int], int]] = []
        for _ in range(batch_size * batches_per_pool):
            problem = make_problem(rng)
            prompt_ids = tokenizer.encode(prompt_text(problem))
            completion_ids = tokenizer.encode(trace_text(problem, rng))
            pool.append(([*prompt_ids, *completion_ids, tokenizer.eos_token_id], len(prompt_ids)))
        pool.sort(key=lambda sample: len(sample[0]))
        starts = list(range(0, len(pool), batch_size))
        rng.shuffle(starts)
        for first in starts:
            yield pad(pool[first : first + batch_size], tokenizer.pad_token_id)


def pad(samples: Sequence[tuple[list[int], int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """A batch of B texts to learn.

    Padding is on the right and a causal model's real tokens do not see it, so no attention mask is needed.

    Args:
        samples: Each text's token ids, and how many of them are the prompt.

    Returns:
        input_ids int64 [B, L], padded on the right, and labels of the same shape: the token ids after the prompt,
        `IGNORED_LABEL` elsewhere.
    """
    length = max(len(token_ids) for token_ids, _ in samples)
    input_ids = torch.full((len(samples), length), pad_token_id)
    labels = torch.full((len(samples), length), IGNORED_LABEL)
    for row, (token_ids, num_prompt_tokens) in enumerate(samples):
        ids = torch.tensor(token_ids)
        input_ids[row, : len(ids)] = ids
        labels[row, num_prompt_tokens : len(ids)] = ids[num_prompt_tokens:]
    return input_ids, labels
