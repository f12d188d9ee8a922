"""The demo's output: rows while it runs, then a summary, a JSON report and two plots.

`python -m rollout_spec.demo.report REPORT.json OUT.png` draws the rollouts of a report again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rollout_spec.demo.paired import WAYS, PairedGenerator, StepRecord

COLUMNS = "step  stock s   off s    on s  tokens  identical  accept. length  drafted  accepted  reward"


def table_header() -> str:
    """The heading of the rows of `format_row`."""
    return COLUMNS


def format_row(record: StepRecord) -> str:
    """One line of the table."""
    stock, off, on = (record.seconds[way] for way in WAYS)
    return (
        f"{record.step:4d} {stock:8.2f} {off:7.2f} {on:7.2f} {record.tokens['on']:7d} "
        f"{record.identical:5d}/{record.rollouts:<4d} {record.mean_acceptance_length:14.2f} {record.draft_tokens:8d} "
        f"{record.accepted_tokens:9d} {record.reward or 0.0:7.3f}"
    )


def make_report(generator: PairedGenerator, seconds: float) -> dict[str, Any]:
    """Sum up a run. Times leave out the first step, in which caches fill.

    Args:
        seconds: How long the whole demo took.
    """
    records = generator.records
    timed = records[1:]
    total = {way: sum(record.seconds[way] for record in timed) for way in WAYS}
    tokens = {way: sum(record.tokens[way] for record in timed) for way in WAYS}
    drafted = sum(record.draft_tokens for record in records)
    accepted = sum(record.accepted_tokens for record in records)
    stats = generator.stats()
    rewards = [record.reward for record in records if record.reward is not None]
    quarter = max(1, len(rewards) // 4)
    return {
        "rollouts_total": sum(record.rollouts for record in records),
        "rollouts_identical": sum(record.identical for record in records),
        "divergences": [
            {"step": d.step, "rollout": d.rollout, "position": d.position, "gap": d.gap} for d in generator.divergences
        ],
        "unique_seeds": len(set(generator.seeds)),
        "generation_speedup": total["stock"] / total["on"],
        "generation_speedup_own_off": total["off"] / total["on"],
        "generation_speedup_per_token": (total["stock"] / tokens["stock"]) / (total["on"] / tokens["on"]),
        "generation_seconds": total,
        "generation_tokens": tokens,
        "mean_acceptance_length": stats["mean_acceptance_length"],
        "tokens_drafted": drafted,
        "tokens_accepted": accepted,
        "tokens_rejected": drafted - accepted,
        "draft_seconds": stats["draft_seconds"],
        "drafter_bytes": stats["drafter_bytes"],
        "max_logprob_error": max(record.max_logprob_error for record in records),
        "reward": {
            "first_quarter": sum(rewards[:quarter]) / quarter,
            "last_quarter": sum(rewards[-quarter:]) / quarter,
            "per_step": rewards,
        },
        "demo_seconds": seconds,
        "steps": [record.to_dict() for record in records],
    }


def print_summary(report: dict[str, Any], console: Any) -> None:
    """The run in a few lines."""
    lines = [
        f"Rollouts without and with speculation: {report['rollouts_identical']} of {report['rollouts_total']} "
        f"identical, {report['unique_seeds']} seeds",
        *(
            f"  step {d['step']} rollout {d['rollout']} differs from token {d['position']} on; the two best perturbed "
            f"logits there are {d['gap']:.1e} apart"
            for d in report["divergences"]
        ),
        f"Generation is {report['generation_speedup']:.2f} times as fast as stock vLLM without speculation "
        f"({report['generation_speedup_per_token']:.2f} per token), "
        f"{report['generation_speedup_own_off']:.2f} times as fast as our engine with speculation off",
        f"Drafts: {report['mean_acceptance_length']:.2f} tokens per drafted step, "
        f"{report['tokens_accepted']} accepted, {report['tokens_rejected']} rejected",
        f"Log-probabilities differ from the trainer's by at most {report['max_logprob_error']:.1e}",
        f"Reward: {report['reward']['first_quarter']:.3f} in the first quarter of the steps, "
        f"{report['reward']['last_quarter']:.3f} in the last",
    ]
    console.print("\n".join(lines), highlight=False)


def plot_report(report: dict[str, Any], path: Path) -> None:
    """Plot generation time, acceptance length and reward per step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = report["steps"]
    x = [step["step"] for step in steps]
    figure, (seconds, length, reward) = plt.subplots(3, 1, figsize=(7, 6.5), sharex=True, layout="constrained")
    labels = {"stock": "stock vLLM", "off": "speculation off", "on": "speculation on"}
    for way, style in zip(WAYS, ("--", ":", "-"), strict=True):
        milliseconds = [1e3 * step["seconds"][way] / step["tokens"][way] for step in steps]
        seconds.plot(x, milliseconds, style, label=labels[way])
    seconds.set(ylabel="ms per\ngenerated token", ylim=(0, None))
    figure.suptitle("GRPO rollouts, same weights and seeds")
    seconds.legend(ncols=len(WAYS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    length.plot(x, [step["mean_acceptance_length"] for step in steps], color="tab:green")
    length.set(ylabel="mean acceptance\nlength", ylim=(1, None))
    reward.plot(x, [step["reward"] for step in steps], color="tab:red")
    reward.set(ylabel="mean reward", xlabel="GRPO step", ylim=(0, None))
    for axes in (seconds, length, reward):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_rollouts(report: dict[str, Any], path: Path) -> None:
    """Plot how long each step's rollouts took with stock vLLM and with drafts. Leaves out the first step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps, seconds = report["steps"][1:], report["generation_seconds"]
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    for way, name, color, shift in (
        ("stock", "vLLM", "#b8b8b8", -0.2),
        ("on", "vLLM with rollout_spec", "#2a9d4a", 0.2),
    ):
        x = [step["step"] + shift for step in steps]
        label = f"{name}: {seconds[way]:.1f} s in all"
        axes.bar(x, [step["seconds"][way] for step in steps], width=0.4, color=color, label=label)
    axes.set_title(
        f"{report['generation_speedup']:.1f} times as fast; {report['rollouts_identical']} of "
        f"{report['rollouts_total']} rollouts identical with drafts and without",
        loc="left",
        fontweight="bold",
        fontsize=10,
    )
    axes.set(xlabel="GRPO step", ylabel="seconds to sample\nthe step's rollouts")
    axes.margins(x=0.01)
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])
    axes.legend(loc="upper right", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=200, bbox_inches="tight", pad_inches=0.1)
    plt.close(figure)


if __name__ == "__main__":
    plot_rollouts(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
