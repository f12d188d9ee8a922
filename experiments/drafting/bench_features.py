"""What a draft gains from the request's noise, and from what the target saw (`rollout_spec.features`).

    python -m experiments.drafting.bench_features experiments/results/real_policy/samples-*.parquet
    python -m experiments.drafting.bench_features --epochs experiments/results/real_policy/rollouts.parquet

Rollouts with their noise: recordings (see real_policy/recording.py for the columns), of which H rollouts of each prompt
are history and the last `--tests` are drafted for; `--epochs`, those of a training run, of which every epoch is drafted
for from all before it, and the last one also from one earlier epoch alone. Compared, in tokens per step, at equal K,
with no limit on survival:

- most probable: from words, each drafted token the most probable one;
- words: chosen with the request's noise;
- features: with what the target saw, too: the default.

The gate: all variants emit the same number of tokens. Gains have 95 % bootstrap intervals over prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.drafting.regimes import replay
from experiments.engines.build import WORDS_ALONE
from experiments.rows import append, make_parser, origin
from experiments.traces import read_traces
from rollout_spec.drafters import build_drafter
from rollout_spec.estimate.recorded import Rollout, by_problem

DRAFTERS = ("history", "suffix", "ngram")


class Variant(NamedTuple):
    """A way to draft."""

    options: dict[str, Any]
    knows_noise: bool


VARIANTS = {
    "most probable": Variant(WORDS_ALONE, False),
    "words": Variant(WORDS_ALONE, True),
    "features": Variant({}, True),
}
GAINS = (("words", "most probable"), ("features", "words"))
"""(new, old)."""


# -- rollouts: history is version 0, what is drafted for version 1 ----------------------------------------------------

Problem = list[Rollout]
"""The rollouts of a problem."""


def recorded_problems(path: Path, num_prompts: int, num_history: int, num_tests: int) -> list[Problem]:
    """The first `num_history` rollouts of each prompt as history, the last `num_tests` to be drafted for.

    Raises:
        ValueError: the recording has no noise, or too few rollouts of a prompt.
    """
    problems = by_problem(read_traces(path))[:num_prompts]
    for number, problem in enumerate(problems, 1):
        if any(rollout.seed is None for rollout in problem):
            raise ValueError(f"{path} was recorded without noise: it has no column of seeds")
        if len(problem) < num_history + num_tests:
            raise ValueError(
                f"{path} has {len(problem)} rollouts of problem {number}: too few for --history {num_history} and "
                f"--tests {num_tests}"
            )
    return [
        [
            *(rollout._replace(policy_version=0) for rollout in problem[:num_history]),
            *(rollout._replace(policy_version=1) for rollout in problem[-num_tests:]),
        ]
        for problem in problems
    ]


def by_epoch(problems: Sequence[Problem]) -> Iterator[tuple[dict[str, int], list[Problem]]]:
    """(which rollouts, the problems that have them and history)."""

    def select(tests: int, history: set[int]) -> list[Problem]:
        epochs = dict.fromkeys(history, 0) | {tests: 1}
        chosen = [
            [r._replace(policy_version=epochs[r.policy_version]) for r in p if r.policy_version in epochs]
            for p in problems
        ]
        return [p for p in chosen if {r.policy_version for r in p} == {0, 1}]

    epochs = sorted({r.policy_version for p in problems for r in p})
    for epoch in epochs[1:]:
        yield {"epoch": epoch}, select(epoch, {e for e in epochs if e < epoch})
    for epoch in reversed(epochs[:-1]):
        yield {"epoch": epochs[-1], "age": epochs[-1] - epoch}, select(epochs[-1], {epoch})


# -- measuring -------------------------------------------------------------------------------------------------------


def measure(problems: Sequence[Problem], name: str, k: int, variant: Variant) -> tuple[np.ndarray, float]:
    """Replay problems with one drafter, whose counters carry on from problem to problem.

    Returns:
        int64 [problems, 2]: emitted tokens, steps of requests; and the mean |confidence - acceptance| over drafted
        tokens, by bins of confidence.
    """
    drafter = build_drafter(name, **{"max_draft_tokens": k, "min_survival": 0.0, "shared": False, **variant.options})
    results = [
        replay([p], drafter, "epoch", num_speculative_tokens=k, knows_noise=variant.knows_noise) for p in problems
    ]
    table = sum(result.reliability for result in results)
    counts = np.array([[r.emitted_tokens, r.request_steps] for r in results])
    return counts, float(np.abs(table[:, 1] - table[:, 2]).sum() / max(table[:, 0].sum(), 1))


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
        for h in args.history:
            yield {"target": path.stem, "history": h}, recorded_problems(path, args.prompts, h, args.tests)
    for path in args.epochs:
        for which, problems in by_epoch(by_problem(read_traces(path))[: args.prompts]):
            yield {"target": path.stem, **which}, problems


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every cell and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("recorded", type=Path, nargs="*", help="Parquet files of rollouts with noise and features")
    parser.add_argument("--epochs", type=Path, nargs="*", default=[], help="the same, of a training run")
    parser.add_argument("--history", type=int, nargs="*", default=[4, 16])
    parser.add_argument("-k", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--tests", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=1000, help="at most")
    parser.add_argument("--drafters", nargs="*", choices=DRAFTERS, default=["history"])
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args(argv)
    about = {**origin(), "tests": args.tests}
    print("| target | drafter | K | " + " | ".join([*args.variants, *(f"{a} / {b}" for a, b in GAINS)]) + " |")
    print("|---" * (3 + len(args.variants) + len(GAINS)) + "|")
    for target, problems in sources(args):
        for k in args.k:
            for name in args.drafters:
                found: dict[str, np.ndarray] = {}
                errors = {}
                for label in args.variants:
                    found[label], errors[label] = measure(problems, name, k, VARIANTS[label])
                totals = {int(counts[:, 0].sum()) for counts in found.values()}
                if len(totals) > 1:
                    raise SystemExit(f"gate: different numbers of tokens were emitted: {totals}")
                rates = {label: float(counts[:, 0].sum() / counts[:, 1].sum()) for label, counts in found.items()}
                gains = {
                    f"{new} / {old}": ratio_with_interval(found[new], found[old])
                    for new, old in GAINS
                    if {new, old} <= found.keys()
                }
                row = {
                    "benchmark": "features", **target, "drafter": name, "k": k, "prompts": len(problems),
                    "tokens_per_step": rates, "calibration_error": errors, "gains": gains, **about,
                }  # fmt: skip
                append(args.out, row)
                cells = [f"{rates[label]:.2f}" if label in rates else "" for label in args.variants]
                for new, old in GAINS:
                    gain = gains.get(f"{new} / {old}")
                    cells.append("" if gain is None else f"{gain[0]:.3f} ({gain[1]:.3f}–{gain[2]:.3f})")
                where = ", ".join(f"{key} {value}" for key, value in target.items() if key != "target")
                print("|", " | ".join([f"{target['target']}, {where}", name, str(k), *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
