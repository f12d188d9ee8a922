"""Drafts with what the target saw (`rollout_spec.features`) against drafts from words alone.

Rollouts recorded with their noise and features (see real_policy/recording.py for the columns). Of each prompt, H
rollouts are history and `--tests` are drafted for from that history, the prompt and their own text so far. Compared, in
tokens per step, at equal K, with no limit on survival:

- words: features are not used;
- signatures, distributions: one of the two is used;
- both: the default;
- tree: a best-first tree of K nodes on blended counts, of which the longest branch that the target agrees with counts.

All but the tree choose with the target's noise, or, in the rows of `coupled: false`, the most probable token. The gain
of `both` over `words` has a 95 % bootstrap interval over prompts.

With --epochs FILE: rollouts of a training run. Of every epoch after the first one, those of all epochs before are the
history; of the last epoch also those of one earlier epoch alone, by its age.

python -m experiments.drafting.bench_features experiments/results/real_policy/samples-*.parquet
python -m experiments.drafting.bench_features --epochs experiments/results/real_policy/rollouts.parquet
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.drafting.bench_coupled import ratio_with_interval, recorded_cases, tree_tokens_per_step
from experiments.rows import append, origin
from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.base import Drafter
from rollout_spec.drafters.device.reference import ReferenceDrafter
from rollout_spec.drafters.host import vote
from rollout_spec.replay.simulate import replay
from rollout_spec.replay.traces import Problem, read_traces

VARIANTS = {
    "words": {"signatures": False, "distributions": False},
    "signatures": {"distributions": False},
    "distributions": {"signatures": False},
    "both": {},
}
DRAFTERS = ("mixture", "suffix", "ngram", "device")


class Figures(NamedTuple):
    """Of one drafter on some problems."""

    counts: np.ndarray
    """int64 [problems, 2]: emitted tokens, steps of requests."""
    calibration_error: float
    """Mean |confidence - acceptance| over drafted tokens, by bins of confidence."""

    @property
    def tokens_per_step(self) -> float:
        """Of all problems together."""
        tokens, steps = self.counts.sum(0)
        return float(tokens / steps)


def make(name: str, k: int, options: dict[str, Any]) -> Drafter:
    """A drafter. `device` is its reference in NumPy."""
    if name == "device":
        return ReferenceDrafter(max_draft_tokens=k, **options)
    return build_drafter(name, **{"max_draft_tokens": k, "min_survival": 0.0, "shared": False, **options})


def measure(problems: Sequence[Problem], name: str, k: int, coupled: bool, options: dict[str, Any]) -> Figures:
    """Replay problems, of two epochs each, with one drafter, whose counters carry on from problem to problem."""
    drafter = make(name, k, options)
    results = [replay([p], lambda: drafter, "epoch", num_speculative_tokens=k, noise=coupled) for p in problems]
    table = sum(result.reliability for result in results)
    return Figures(
        np.array([[r.stats.emitted_tokens, r.stats.request_steps] for r in results]),
        float(np.abs(table[:, 1] - table[:, 2]).sum() / max(table[:, 0].sum(), 1)),
    )


def by_epoch(problems: Sequence[Problem]) -> Iterator[tuple[dict[str, int], list[Problem]]]:
    """(which rollouts, problems with their history as epoch 0 and what is drafted for as epoch 1)."""

    def select(tests: int, history: set[int]) -> list[Problem]:
        epochs = dict.fromkeys(history, 0) | {tests: 1}
        chosen = [
            p._replace(rollouts=[r._replace(epoch=epochs[r.epoch]) for r in p.rollouts if r.epoch in epochs])
            for p in problems
        ]
        return [p for p in chosen if {r.epoch for r in p.rollouts} == {0, 1}]

    epochs = sorted({r.epoch for p in problems for r in p.rollouts})
    for epoch in epochs[1:]:
        yield {"epoch": epoch}, select(epoch, {e for e in epochs if e < epoch})
    for epoch in reversed(epochs[:-1]):
        yield {"epoch": epochs[-1], "age": epochs[-1] - epoch}, select(epochs[-1], {epoch})


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every cell and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", type=Path, nargs="*", help="Parquet files of rollouts with noise and features")
    parser.add_argument("--epochs", type=Path, nargs="*", default=[], help="the same, of a training run")
    parser.add_argument("--history", type=int, nargs="*", default=[4, 16])
    parser.add_argument("-k", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--tests", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--drafters", nargs="*", choices=DRAFTERS, default=["mixture"])
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--greedy", action="store_true", help="without the target's noise")
    parser.add_argument("--no-tree", action="store_true")
    parser.add_argument("--similarity", type=float, default=vote.SIMILARITY, help="instead of vote.SIMILARITY")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="of the drafter")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    args = parser.parse_args(argv)
    options = {name: json.loads(value) for name, value in (o.split("=", 1) for o in args.option)}
    vote.SIMILARITY = args.similarity  # drafters read it when they are made
    about = {
        **origin(),
        "tests": args.tests,
        "coupled": not args.greedy,
        "similarity": args.similarity,
        "options": options,
    }
    columns = [*args.variants, "both / words", *(() if args.no_tree else ("tree",))]
    print("| target | drafter | history | K |", " | ".join(columns), "|")
    print("|---" * (4 + len(columns)) + "|")

    def report(target: dict[str, Any], problems: Sequence[Problem], tree: Any) -> None:
        for k in args.k:
            of_tree = tree(k) if tree is not None and not args.no_tree else None
            for name in args.drafters:
                found = {
                    variant: measure(problems, name, k, not args.greedy, {**options, **VARIANTS[variant]})
                    for variant in args.variants
                }
                row = {
                    "benchmark": "features",
                    **target,
                    "drafter": name,
                    "k": k,
                    "prompts": len(problems),
                    "tokens_per_step": {variant: figures.tokens_per_step for variant, figures in found.items()},
                    "calibration_error": {variant: figures.calibration_error for variant, figures in found.items()},
                }
                cells = [f"{figures.tokens_per_step:.2f}" for figures in found.values()]
                if {"words", "both"} <= found.keys():
                    gain = row["both_over_words"] = ratio_with_interval(found["both"].counts, found["words"].counts)
                    cells.append(f"{gain[0]:.3f} ({gain[1]:.3f}–{gain[2]:.3f})")
                if of_tree is not None:
                    row["tokens_per_step"]["tree"] = float(of_tree[:, 0].sum() / of_tree[:, 1].sum())
                    cells.append(f"{row['tokens_per_step']['tree']:.2f}")
                where = " ".join(f"{key} {value}" for key, value in target.items() if key != "target")
                print("|", " | ".join([target["target"], name, where, str(k), *cells]), "|", flush=True)
                append(args.out, {**row, **about})

    for path in args.recorded:
        for h in args.history:
            cases = recorded_cases(path, args.prompts, h, args.tests, 0)
            report(
                {"target": path.stem, "history": h},
                [case.problem for case in cases],
                lambda k, cases=cases: np.array([tree_tokens_per_step(case, k) for case in cases]),
            )
    for path in args.epochs:
        for which, problems in by_epoch(read_traces(path, max_prompts=args.prompts)):
            report({"target": path.stem, **which}, problems, None)


if __name__ == "__main__":
    main()
