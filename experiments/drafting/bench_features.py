"""What drafts gain from what the target saw (`rollout_spec.features`), by replays of recorded rollouts.

    python -m experiments.drafting.bench_features experiments/results/real_policy/samples-*.parquet
    python -m experiments.drafting.bench_features .../samples-step0040-t1.parquet --history 0 1 16
    python -m experiments.drafting.bench_features --epochs .../rollouts.parquet

The rollouts are recorded with their noise (columns: real_policy/recording.py). The last TESTS rollouts of each prompt
are drafted for, with its first `--history` ones as history (with 0 each request drafts from its own text alone). Of a
training run (`--epochs`) every epoch is drafted for, with all earlier ones as history. Compared, in tokens per step,
K = 8, without a budget or a limit on survival:

- words: from the text alone;
- features: with what the target saw, too, as by default.

The gate: both emit the same number of tokens. Gains have 95 % bootstrap intervals over prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.drafting.regimes import Regime, replay
from experiments.rows import append, make_parser, origin
from experiments.traces import read_traces
from rollout_spec.drafters import build_drafter
from rollout_spec.estimate.phases import RecordedRollout, by_problem

K, TESTS = 8, 8
VARIANTS: dict[str, dict[str, Any]] = {"words": {"features": False}, "features": {}}

Problem = list[RecordedRollout]
"""The rollouts of a problem: history is version 0, what is drafted for version 1."""


def recorded_problems(path: Path, num_history: int) -> list[Problem]:
    """The first `num_history` rollouts of each prompt as history, the last TESTS to be drafted for.

    Raises:
        ValueError: the recording has no noise, or too few rollouts of a prompt.
    """
    problems = by_problem(read_traces(path))
    for number, problem in enumerate(problems, 1):
        if any(rollout.seed is None for rollout in problem):
            raise ValueError(f"{path} was recorded without noise: it has no column of seeds")
        if len(problem) < num_history + TESTS:
            raise ValueError(f"{path} has {len(problem)} rollouts of problem {number}: too few for --history")
    return [
        [
            *(rollout._replace(policy_version=0) for rollout in problem[:num_history]),
            *(rollout._replace(policy_version=1) for rollout in problem[-TESTS:]),
        ]
        for problem in problems
    ]


def by_epoch(problems: Sequence[Problem]) -> Iterator[tuple[int, list[Problem]]]:
    """(epoch, the problems that have it and earlier ones) from the second epoch on."""
    for epoch in sorted({rollout.policy_version for problem in problems for rollout in problem})[1:]:
        parts = [
            [r._replace(policy_version=int(r.policy_version == epoch)) for r in problem if r.policy_version <= epoch]
            for problem in problems
        ]
        yield epoch, [part for part in parts if {r.policy_version for r in part} == {0, 1}]


def measure(problems: Sequence[Problem], regime: Regime, options: dict[str, Any]) -> np.ndarray:
    """Replay problems with one drafter, whose counters carry on from problem to problem.

    Returns:
        int64 [problems, 2]: emitted tokens, steps of requests.
    """
    drafter = build_drafter("history", max_draft_tokens=K, min_survival=0.0, shared=False, **options)
    results = [replay([p], drafter, regime, num_speculative_tokens=K, knows_noise=True) for p in problems]
    return np.array([[result.emitted_tokens, result.request_steps] for result in results])


def ratio_with_interval(new: np.ndarray, old: np.ndarray) -> tuple[float, float, float]:
    """Ratio of tokens per step, and its 95 % bootstrap interval over prompts. Columns: tokens, steps."""
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(new), (2000, len(new)))

    def ratio(rows: np.ndarray) -> np.ndarray:
        a, b = new[rows].sum(-2), old[rows].sum(-2)
        return (a[..., 0] / a[..., 1]) / (b[..., 0] / b[..., 1])

    low, high = np.percentile(ratio(picks), [2.5, 97.5])
    return float(ratio(np.arange(len(new)))), float(low), float(high)


def sources(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], list[Problem]]]:
    """(which rollouts, their problems) of everything that the arguments name."""
    for path in args.recorded:
        for num_history in args.history:
            yield {"target": path.stem, "history": num_history}, recorded_problems(path, num_history)
    for path in args.epochs:
        for epoch, problems in by_epoch(by_problem(read_traces(path))):
            yield {"target": path.stem, "epoch": epoch}, problems


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all rollouts and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("recorded", type=Path, nargs="*", help="Parquet files of rollouts with noise and features")
    parser.add_argument("--epochs", type=Path, nargs="*", default=[], help="the same, of a training run")
    parser.add_argument("--history", type=int, nargs="*", default=[16])
    args = parser.parse_args(argv)
    about = origin()
    print("| target | " + " | ".join(VARIANTS) + " | features / words |")
    print("|---" * (2 + len(VARIANTS)) + "|")
    for target, problems in sources(args):
        regime: Regime = "own" if target.get("history") == 0 else "epoch"
        found = {name: measure(problems, regime, options) for name, options in VARIANTS.items()}
        totals = {int(counts[:, 0].sum()) for counts in found.values()}
        if len(totals) > 1:
            raise SystemExit(f"gate: different numbers of tokens were emitted: {totals}")
        rates = {name: float(counts[:, 0].sum() / counts[:, 1].sum()) for name, counts in found.items()}
        gain = ratio_with_interval(found["features"], found["words"])
        row = {
            "benchmark": "features", **target, "drafter": "history", "k": K, "prompts": len(problems),
            "tokens_per_step": rates, "gains": {"features / words": gain},
        }  # fmt: skip
        append(args.out, {**row, **about})
        where = ", ".join(map(str, target.values()))
        print(f"| {where} |", *(f"{rate:.2f} |" for rate in rates.values()), "{:.3f} ({:.3f}–{:.3f}) |".format(*gain))


if __name__ == "__main__":
    main()
