"""The demo's output: rows while it runs, then a summary and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from examples.demo.paired import WAYS, PairedGenerator

SUMMARY = """
Rollouts without and with speculation: {rollouts_identical} of {rollouts_total} identical, {unique_seeds} seeds
Generation is {generation_speedup:.2f} times as fast as stock vLLM without speculation \
({generation_speedup_per_token:.2f} per token){own_off}
Drafts: {mean_acceptance_length:.2f} tokens per drafted step, {tokens_accepted} accepted, {tokens_rejected} rejected
Log-probabilities differ from the trainer's by at most {max_logprob_error:.1e}
Reward: {reward[first_quarter]:.3f} in the first quarter of the steps, {reward[last_quarter]:.3f} in the last"""
SCATTERED = 1.8  # slowest step's time per token over a fast one's; quiet machines had 1.3 to 1.5
LOOKS = {"stock": ("stock vLLM", "--"), "off": ("speculation off", ":"), "on": ("speculation on", "-")}


def print_row(record: dict[str, Any], ways: Sequence[str]) -> None:
    """One line of the table, with the times of some of `WAYS`, and before the first one its heading."""
    if record["step"] == 0:
        heading = "".join(f"{way + ' s':>8}" for way in ways)
        print(f"step {heading}  tokens  identical  accept. length  drafted  accepted  reward")
    seconds = "".join(f"{record['seconds'][way]:8.2f}" for way in ways)
    print(
        f"{record['step']:4d} {seconds} {record['tokens']['on']:7d} {record['identical']:5d}/{record['rollouts']:<4d} "
        f"{record['mean_acceptance_length']:14.2f} {record['draft_tokens']:8d} {record['accepted_tokens']:9d} "
        f"{record['reward']:7.3f}",
        flush=True,
    )
    for d in record["divergences"]:
        where = f"rollout {d['rollout']} differs with speculation from token {d['position']} on"
        print(f"  {where}; the two best perturbed logits there are {d['gap']:.1e} apart")


def make_report(generator: PairedGenerator, seconds: float) -> dict[str, Any]:
    """Sum up a run that took `seconds`. Times of generation leave out the first step, in which caches fill."""
    steps, stats = generator.records, generator.stats()
    time, tokens = ({way: sum(step[name][way] for step in steps[1:]) for way in WAYS} for name in ("seconds", "tokens"))
    names = ("rollouts", "identical", "draft_tokens", "accepted_tokens")
    rollouts, identical, drafted, accepted = (sum(step[name] for step in steps) for name in names)
    rewards = [step["reward"] for step in steps]
    quarter = max(1, len(rewards) // 4)
    per_token = {way: sorted(step["seconds"][way] / step["tokens"][way] for step in steps[1:]) for way in WAYS}
    return {
        "rollouts_total": rollouts, "rollouts_identical": identical, "unique_seeds": len(generator.seeds),
        "generation_seconds": time, "generation_tokens": tokens, "generation_speedup": time["stock"] / time["on"],
        "generation_speedup_per_token": (time["stock"] / tokens["stock"]) / (time["on"] / tokens["on"]),
        "generation_speedup_own_off": time["off"] / time["on"],
        "slowest_over_fast_step": {way: each[-1] / each[len(each) // 4] for way, each in per_token.items()},
        "tokens_drafted": drafted, "tokens_accepted": accepted, "tokens_rejected": drafted - accepted,
        **{name: stats[name] for name in ("mean_acceptance_length", "draft_seconds", "drafter_bytes")},
        "max_logprob_error": max(step["max_logprob_error"] for step in steps),
        "reward": {"first_quarter": fmean(rewards[:quarter]), "last_quarter": fmean(rewards[-quarter:])},
        "demo_seconds": seconds, "steps": steps,
    }  # fmt: skip


def print_summary(report: dict[str, Any], ways: Sequence[str]) -> None:
    """The run in a few lines."""
    own_off = f", {report['generation_speedup_own_off']:.2f} times as fast as our engine with speculation off"
    print(SUMMARY.format(**report, own_off=own_off if "off" in ways else ""))
    scatter = max(report["slowest_over_fast_step"][way] for way in ways)
    if scatter > SCATTERED:
        print(
            f"WARNING: the times scatter: one step took {scatter:.1f} times as long per token as others. If other "
            "programs ran meanwhile, repeat this when the machine is quiet."
        )


def plot_report(report: dict[str, Any], ways: Sequence[str], path: Path) -> None:
    """Plot generation time, acceptance length and reward per step."""
    steps = report["steps"]
    x = [step["step"] for step in steps]
    figure = Figure(figsize=(7, 6.5), layout="constrained")
    figure.suptitle("GRPO rollouts, same weights and seeds")
    seconds, length, reward = panels = figure.subplots(3, 1, sharex=True)
    for way in ways:
        milliseconds = [1e3 * step["seconds"][way] / step["tokens"][way] for step in steps]
        seconds.plot(x, milliseconds, LOOKS[way][1], label=LOOKS[way][0])
    seconds.set(ylabel="ms per\ngenerated token", ylim=(0, None))
    seconds.legend(ncols=len(ways), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    length.plot(x, [step["mean_acceptance_length"] for step in steps], color="tab:green")
    length.set(ylabel="mean acceptance\nlength", ylim=(1, None))
    reward.plot(x, [step["reward"] for step in steps], color="tab:red")
    reward.set(ylabel="mean reward", xlabel="GRPO step", ylim=(0, None))
    for axes in panels:
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
