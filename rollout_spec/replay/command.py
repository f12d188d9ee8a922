"""`rollout-spec replay`: replays recorded rollouts through a drafter; prints a table and writes JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.checks import shown
from rollout_spec.config import MAX_SPECULATIVE_TOKENS
from rollout_spec.drafters import DRAFTERS, build_drafter
from rollout_spec.drafters.base import Drafter
from rollout_spec.drafters.registry import current_name
from rollout_spec.files import check_writable, write_whole
from rollout_spec.noise.host import derive_seed
from rollout_spec.replay.cost import EngineCost, read_cost
from rollout_spec.replay.engine import compare
from rollout_spec.replay.simulate import REGIMES, Regime, Request, replay
from rollout_spec.replay.synthetic import SyntheticPolicy
from rollout_spec.replay.traces import Problem, Rollout, read_traces

THRESHOLDS = (0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Values of min_survival that `--frontier` replays with."""
SYNTHETIC_TOKENS = 512
"""Longest synthetic rollout."""


def run(args: argparse.Namespace) -> int:
    """Replay as told. Returns the exit code; 2, with one line on stderr, for bad input."""
    try:
        _check_numbers(args)
        args.drafter = current_name(args.drafter)
        if args.engine_cost is not None:
            for name, default in (("drafter", "history"), ("option", []), ("regime", "all"), ("policy", "recorded")):
                if getattr(args, name) != default or args.frontier:
                    raise ValueError("--engine-cost compares budgets with a drafter of its own: leave out the options")
        options = dict(map(_parse_option, args.option))
        if args.frontier and args.drafter not in DRAFTERS:
            raise ValueError("--frontier varies min_survival, which only the built-in drafters have")
        if args.drafter in DRAFTERS:
            options = {"max_draft_tokens": args.num_speculative_tokens, **options}
        build_drafter(args.drafter, **options)
        if args.json is not None:
            check_writable(args.json)
        cost = read_cost(args.engine_cost) if args.engine_cost else None
        files = [(path, read_traces(path, max_prompts=args.prompts)) for path in args.paths]
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"rollout-spec replay: {error}", file=sys.stderr)
        return 2
    rows = _measure_all(files, options, args) if cost is None else _compare_budgets(files, cost, args)
    if args.json is not None:
        about = {"argv": sys.argv, "k": args.num_speculative_tokens, "batch": args.batch}
        if cost is None:
            versions = {name: version(name) for name in ("rollout-spec", "numpy", "numba")}
            about = {"drafter": args.drafter, "options": options, **about, "versions": versions}
        try:
            write_whole(args.json, json.dumps([{**row, **about} for row in rows], indent=1))
        except OSError as error:
            print(f"rollout-spec replay: {error}", file=sys.stderr)
            return 2
    return 0


def _measure_all(
    files: Sequence[tuple[Path, Sequence[Problem]]], options: dict[str, Any], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Replay every file in every regime; print a table. Returns its rows with all figures."""
    rows: list[dict[str, Any]] = []
    for path, problems in files:
        for regime in REGIMES if args.regime == "all" else (args.regime,):
            for changes in [{"min_survival": t} for t in THRESHOLDS] if args.frontier else [{}]:
                make = partial(build_drafter, args.drafter, **{**options, **changes})
                for noise, row in _measure(problems, make, regime, args):
                    rows.append({"file": path.name, "regime": regime, "noise": noise, **changes, **row})
                    _print_row(rows[-1], first=len(rows) == 1)
    return rows


def _check_numbers(args: argparse.Namespace) -> None:
    """Raise ValueError for numbers with which nothing can be replayed."""
    if not 1 <= args.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
        raise ValueError(
            f"-k must be between 1 and {MAX_SPECULATIVE_TOKENS} (vLLM's limit), got {args.num_speculative_tokens}"
        )
    for name in ("batch", "prompts", "samples", "history"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")


def _parse_option(text: str) -> tuple[str, Any]:
    """A drafter's option, NAME=JSON."""
    name, separator, value = text.partition("=")
    try:
        if separator:
            return name, json.loads(value)
    except (ValueError, RecursionError):
        pass
    raise ValueError(f"--option must be NAME=JSON, e.g. min_survival=0.05 or index='\"ngram\"', got {shown(text)}")


def _compare_budgets(
    files: Sequence[tuple[Path, Sequence[Problem]]], cost: EngineCost, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Simulate rollout phases under every budget policy; print a table. Returns its rows with all figures."""
    rows = []
    print(f"Simulated: a step takes what the curve {cost.name!r} says, recorded tokens decide what is accepted.")
    print("Drafts come from the suffix index of each problem's own texts; speedups are those over no drafts.")
    heads = ("seconds", "phase x", "tail x", "steps", "drafted", "accepted")
    print(f"{'file':24} {'policy':19} " + " ".join(f"{head:>8}" for head in heads))
    for path, problems in files:
        requests = [Request(problem, rollout) for problem in problems for rollout in problem.rollouts[: args.samples]]
        phases = compare([requests], cost, num_speculative_tokens=args.num_speculative_tokens, batch=args.batch)
        none = phases["none"]
        for label, phase in phases.items():
            speedup, tail = none.seconds / phase.seconds, none.tail_seconds / max(phase.tail_seconds, 1e-12)
            figures = {"speedup": speedup, "tail_speedup": tail, **phase._asdict()}
            rows.append({"file": path.name, "policy": label, "curve": cost.name, "simulated": True, **figures})
            print(
                f"{path.name[:24]:24} {label:19} {phase.seconds:8.2f} {speedup:8.2f} {tail:8.2f} {phase.steps:8} "
                f"{phase.drafted:8} {phase.accepted:8}",
                flush=True,
            )
    return rows


def _measure(
    problems: Sequence[Problem], make: Callable[[], Drafter], regime: Regime, args: argparse.Namespace
) -> list[tuple[bool, dict[str, Any]]]:
    """[(whether the drafter knew the noise, figures)]: False for text alone, both where the noise is known."""
    limits: dict[str, Any] = {"max_samples": args.samples, "max_history": args.history}
    if args.policy == "synthetic":
        target = SyntheticTarget(problems, args.samples, args.history)
        problems, limits = target.problems, {"next_token": target.next_token}
    is_known = all(rollout.seed is not None for problem in problems for rollout in problem.rollouts)
    sizes = {"num_speculative_tokens": args.num_speculative_tokens, "batch": args.batch}
    measured = []
    for noise in (False, True) if is_known else (False,):
        warm_up = _tiny_problem()  # compiled code is loaded here, not while the clock runs
        replay([warm_up], make, regime, **sizes, noise=noise)
        drafters: list[Drafter] = []

        def remember(drafters: list[Drafter] = drafters) -> Drafter:
            drafters.append(make())
            return drafters[0]

        figures = replay(problems, remember, regime, **sizes, **limits, noise=noise).to_dict()
        if hasattr(drafters[0], "source_counts"):
            figures["by_source"] = {
                name: {"drafted": drafted, "accepted": accepted}
                for name, (drafted, accepted) in drafters[0].source_counts().items()
            }
        measured.append((noise, figures))
    return measured


class SyntheticTarget:
    """Fresh rollouts of each prompt's synthetic policy.

    As many of an earlier epoch as `num_earlier` and as many live ones as `num_samples`, each by default half of what
    was recorded.
    """

    def __init__(self, recorded: Sequence[Problem], num_samples: int | None, num_earlier: int | None) -> None:
        self.problems: list[Problem] = []
        self._policies = {problem.prompt_id: SyntheticPolicy(problem) for problem in recorded}
        for problem in recorded:
            half = max(1, len(problem.rollouts) // 2)
            earlier, live = num_earlier or half, num_samples or half
            seeds = [derive_seed("synthetic", problem.prompt_id, k) for k in range(earlier + live)]
            policy = self._policies[problem.prompt_id]
            rollouts = policy.rollouts(seeds, SYNTHETIC_TOKENS, num_earlier=earlier)
            self.problems.append(Problem(problem.prompt_id, rollouts))

    def next_token(self, problem: Problem, rollout: Rollout, text: Sequence[int]) -> int:
        """The token that the policy samples after a text, with the rollout's noise."""
        assert rollout.seed is not None
        return self._policies[problem.prompt_id].next_token(text, rollout.seed, len(text) - 1)


def _tiny_problem() -> Problem:
    tokens = np.arange(40, dtype=np.int32) % 7
    return Problem("warm-up", [Rollout(k, k % 2, tokens[:5], tokens, (40,), seed=k) for k in range(4)])


def _print_row(row: dict[str, Any], *, first: bool) -> None:
    if first:
        print(
            f"{'file':24} {'regime':9} {'noise':5} {'limit':>6} {'tokens/step':>11} {'drafted':>8} {'accepted':>8} "
            f"{'index µs':>9} {'draft µs':>9} {'bytes/token':>11} {'build s/M':>9}"
        )
    limit = row.get("min_survival", "")
    # In `own` no history is kept; only `epoch` builds any before the replay.
    size = f"{row['bytes_per_history_token']:.1f}" if row["regime"] != "own" else "-"
    build = f"{row['build_seconds_per_million_tokens']:.2f}" if row["history_tokens"] else "-"
    print(
        f"{row['file'][:24]:24} {row['regime']:9} {'known' if row['noise'] else '-':5} {limit:>6} "
        f"{row['tokens_per_step']:11.3f} {row['drafted_per_step']:8.2f} {row['acceptance_rate']:8.1%} "
        f"{row['index_us_per_request_step']:9.1f} {row['draft_us_per_request_step']:9.1f} {size:>11} {build:>9}",
        flush=True,
    )
