"""What the weight of older rollouts is worth: recorded training runs, replayed with several values of `recency`.

Steps of a training follow each other, and each begins a policy version, as in a run, or several, as if epochs were
longer. The rollouts of a step advance in lock step and are drafted for from all earlier steps, from each other and from
their own text, every draft verified. Where a file has no steps, a step is PROMPTS prompts of an epoch, in the recorded
order. Counted are the steps in which there is history: those of later epochs, and with --shared, which drafts from
other problems, all but the first.

In `counters` weights follow from the outcomes by age instead: at each version every bin of ages gets its odds of being
right, over the best bin's. Gains over --baseline have a 95 % bootstrap interval over training steps. `by_age` holds,
for the baseline, drafted tokens from the problem's other rollouts that the target reached, and those that were right.

R=experiments/results/real_policy/rollouts.parquet
python experiments/bench_recency.py $R
python experiments/bench_recency.py $R --versions-per-step 25
python experiments/bench_recency.py TRACES/r1v_grpo_log.parquet --prompts 1 --max-prompts 300 --shared
python experiments/bench_recency.py TRACES/rg_llama_math.parquet --prompts 1 --max-prompts 6 --versions-per-step 67
python experiments/bench_recency.py TRACES/rg_qwen3b.parquet --max-prompts 48 --versions-per-step 25
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import parquet

from bench_coupled import ratio_with_interval
from real_policy.analysis import generate_again, new_drafter
from real_policy.report import training_steps
from rollout_spec.drafters.host import vote
from rollout_spec.replay.simulate import Request
from rollout_spec.replay.traces import read_traces
from rows import append, origin

VALUES = (1.0, 0.999, 0.998, 0.995, 0.98, 0.95, 0.9, 0.8, 0.5)
K = 8
PRIOR = 32
"""Trials by which an age's rate is drawn to that of all ages."""


def read_steps(path: Path, num_prompts: int, max_prompts: int | None) -> list[list[Request]]:
    """The requests of each training step, in the order of the training."""
    problems = read_traces(path, max_prompts=max_prompts)
    if "step" in parquet.read_schema(path).names:
        rows = parquet.read_table(path, columns=["prompt_id", "epoch", "step"]).to_pylist()
    else:
        rows = [
            {"prompt_id": p.prompt_id, "epoch": r.epoch, "step": (r.epoch << 32) + number // num_prompts}
            for number, p in enumerate(problems)
            for r in p.rollouts
        ]
    return list(training_steps(problems, rows).values())


def weights_by_outcomes(counts: dict[str, tuple[int, int]]) -> np.ndarray:
    """The weight of each age, float32 [256], from the outcomes by age."""
    reached, right = np.array(list(counts.values()), np.float64).T
    mean = (right.sum() + 1) / (reached.sum() + 2)
    rate = (right + PRIOR * mean) / (reached + PRIOR)
    odds = rate / (1 - rate)
    age_bins = np.searchsorted(vote.AGE_EDGES, np.arange(256))
    return (odds / odds.max())[age_bins].astype(np.float32)


def measure(
    steps: Sequence[Sequence[Request]],
    recency: float | None,
    *,
    versions_per_step: int,
    noise: bool,
    options: dict[str, Any],
) -> tuple[np.ndarray, dict[str, tuple[int, int]]]:
    """Replay a training. recency: None takes the weights from the counters.

    Returns:
        (emitted tokens and steps of requests, int64 [training steps with history, 2]; outcomes by age).
    """
    drafter: Any = new_drafter(K, min_survival=0.0, recency=recency or 1.0, **options)
    counts = []
    for number, requests in enumerate(steps):
        drafter.begin_policy_version(number * versions_per_step)
        if recency is None:
            drafter._settings = drafter._settings._replace(decay=weights_by_outcomes(drafter.age_counts()))
        found = list(generate_again(drafter, requests, noise=noise, k=K, keep=True))
        emitted = sum(min(step.num_accepted + 1, step.rollout.tokens.size - step.at) for step in found)
        has_history = number > 0 if options["shared"] else requests[0].rollout.epoch > 0
        if has_history:
            counts.append((emitted, len(found)))
    return np.array(counts), drafter.age_counts()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every cell and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", type=Path, nargs="+", help="Parquet files of rollouts; see replay/traces.py")
    parser.add_argument("--values", type=float, nargs="*", default=VALUES)
    parser.add_argument("--baseline", type=float, default=0.98)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step, where none is recorded")
    parser.add_argument("--max-prompts", type=int, help="only the first so many of a file")
    parser.add_argument("--versions-per-step", type=int, default=1)
    parser.add_argument("--shared", action="store_true", help="also draft from other problems")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    args = parser.parse_args(argv)
    variants: dict[str, float | None] = {**{f"{value:g}": value for value in args.values}, "counters": None}
    print("| rollouts | drafts |", " | ".join(variants), "|")
    print("|---" * (2 + len(variants)) + "|")
    for path in args.recorded:
        steps = read_steps(path, args.prompts, args.max_prompts)
        rollout = steps[0][0].rollout
        for features in (False, True) if rollout.features is not None else (False,):
            for noise in (False, True) if rollout.seed is not None else (False,):
                how: dict[str, Any] = {
                    "versions_per_step": args.versions_per_step,
                    "noise": noise,
                    "options": {"shared": args.shared, "signatures": features, "distributions": features},
                }
                baseline, by_age = measure(steps, args.baseline, **how)
                counts = {name: measure(steps, recency, **how)[0] for name, recency in variants.items()}
                gains = {name: ratio_with_interval(found, baseline) for name, found in counts.items()}
                tokens_per_step = {name: float(np.divide(*found.sum(0))) for name, found in counts.items()}
                what = f"{'states and words' if features else 'words'}, {'coupled' if noise else 'point'}"
                cells = [f"{tokens_per_step[name]:.3f} ({gains[name][0]:.3f})" for name in variants]
                print("|", " | ".join([path.stem, what, *cells]), "|", flush=True)
                row = {
                    "benchmark": "recency",
                    "simulated": True,
                    "file": path.name,
                    "features": features,
                    "coupled": noise,
                    "k": K,
                    "shared": args.shared,
                    "training_steps": len(steps),
                    "versions_per_step": args.versions_per_step,
                    "baseline": args.baseline,
                    "tokens_per_step": {name: round(value, 4) for name, value in tokens_per_step.items()},
                    "over_baseline": {name: [round(x, 4) for x in gain] for name, gain in gains.items()},
                    "by_age": {age: list(pair) for age, pair in by_age.items() if pair[0]},
                }
                append(args.out, {**row, **origin()})


if __name__ == "__main__":
    main()
