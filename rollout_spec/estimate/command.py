"""`rollout-spec estimate`: what drafts would gain in a run, by its rollouts and by what steps take on its GPUs.

The rollouts are decoded once more in the order in which they were sampled, with as many requests at a time as an engine
has, and each step takes what it would take there. Without step costs it says how many tokens per step drafts give.
"""

from __future__ import annotations

import json
import os
import re
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from heapq import heapreplace
from importlib.util import find_spec
from multiprocessing import Pool
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget import Budget
from rollout_spec.checks import integer
from rollout_spec.config import MAX_SPECULATIVE_TOKENS
from rollout_spec.drafters import build_drafter
from rollout_spec.estimate import costs
from rollout_spec.estimate.phases import Engine, RecordedRollout, add_rollout, by_problem, read_rollouts, simulate
from rollout_spec.history.command import load_tokenizer
from rollout_spec.installation import install
from rollout_spec.num_passes import NumPasses
from rollout_spec.schedule import CHEAP_TOKENS, CHEAP_TOKENS_A100, MOST_CUT_REQUESTS, Schedule, affordable_ranges

WORTH_IT = 1.1
"""A phase that is less than so many times as fast is not worth an installation."""
ENOUGH_PROMPTS, RESAMPLED = 10, 1000
"""Fewer prompts say too little for an interval, and for a verdict."""
OLDEST, FIRST_CUT, CUTTING_GPUS = (0, 24), (0, 31), ("h100", "h200")
"""The oldest release of vLLM, and from which one on, and where, its adaptive verification cuts the device's drafts."""


def run(args: Namespace) -> int:
    """Print a table and a verdict. Returns the exit code; 2, with a line on stderr, for bad input."""
    try:
        if find_spec("pyarrow") is None:
            raise ImportError(f"recordings are read with pyarrow: {install('estimate')}")
        integer("-k", args.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        integer("--requests", min(args.requests), 1)
        rollouts = read_rollouts(args.paths, None if args.tokenizer is None else load_tokenizer(args.tokenizer))
        if all(rollout.token_ids.size < 2 for rollout in rollouts):
            raise ValueError("all rollouts have one token: there is nothing to draft")
        context = float(np.mean([rollout.mean_context for rollout in rollouts]))
        name, _, _ = engine_of(args, context)  # says what is wrong before anything is simulated
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"rollout-spec estimate: {error}", file=sys.stderr)
        return 2
    num_versions = len({rollout.policy_version for rollout in rollouts})
    print(
        f"{len(rollouts):,} rollouts of {len(by_problem(rollouts)):,} prompts, {num_versions:,} policy version"
        f"{'s' * (num_versions > 1)}; {context:,.0f} tokens of context on average"
    )
    has_costs = args.gpu is not None
    print("requests  epoch  tokens/step  verified/step" + "  times as fast (90 %)  tail" * has_costs)
    rows: list[dict[str, Any]] = []
    with Pool(min(len(args.requests), os.cpu_count() or 1)) as pool:
        for found in pool.imap(partial(_rows, args, rollouts, context), args.requests):
            rows += found
            print(*(_line(row, has_costs) for row in found), sep="\n", flush=True)
    if has_costs:
        if args.step_times is None:
            print('Step times are estimates: "times as fast" was 0.91 to 1.33 times an H100\'s with one pass per step.')
        recording = args.paths[0] + f" and {len(args.paths) - 1:,} more" * (len(args.paths) > 1)
        for batch in args.requests:
            said = verdict([row for row in rows if row["requests"] == batch])
            print(f"{batch} requests in {name}: {said}, by {recording}.")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


def engine_of(args: Namespace, context: float) -> tuple[str, costs.Cost, Engine]:
    """The name of the engine that the arguments ask for, what stock vLLM's steps take, and the engine.

    Raises:
        ValueError, OSError: they are wrong.
    """
    release = tuple(map(int, re.findall(r"\d+", args.vllm)[:2]))
    if release < OLDEST:
        raise ValueError(f"--vllm must be a release from 0.24 on, such as 0.31, got {args.vllm!r}")
    name = f"V2 of vLLM {'0.31 or newer' if release >= FIRST_CUT else '0.24 to 0.30'}, drafts on the device"
    k, used_experts = args.num_speculative_tokens, 1.0
    plain: costs.Cost
    ours: costs.Cost
    if args.step_times is not None:
        times = costs.read_step_times(args.step_times, args.model, context)
        if args.gpu is None:
            raise ValueError("--step-times needs --gpu, too: how drafts are cut depends on it")
        if args.drafter == "host":
            raise ValueError("--step-times are for drafts on the device, not for --drafter host")
        if k > max(times):
            raise ValueError(f"{args.step_times} has steps of at most {max(times)} draft tokens: give -k {max(times)}")
        plain = ours = costs.MeasuredCost(times)
        known = ours.by_tokens
    elif args.gpu is None:
        return name, costs.UNIT_COST, Engine(costs.UNIT_COST, k)
    elif args.model is None:
        raise ValueError(f"--gpu needs --model: one of {', '.join(costs.SHAPES)} or a path of a config.json")
    else:
        shape = costs.shape_of(args.model)
        used_experts, known = shape.used_experts, costs.measured_by_vllm(shape, args.gpu)
        plain, ours = (costs.step_cost(shape, args.gpu, place, context=context) for place in (None, args.drafter))
    if args.drafter == "host":
        return "vLLM, drafts on the host", plain, Engine(ours, k, budget=Budget())
    if args.gpu in CUTTING_GPUS and release >= FIRST_CUT:
        ranges = [(1, MOST_CUT_REQUESTS, k), (MOST_CUT_REQUESTS + 1, MOST_CUT_REQUESTS + 1, 0)]
        return name, plain, Engine(ours, k, ranges, known, passes=NumPasses())
    ranges = affordable_ranges(k, CHEAP_TOKENS_A100 if args.gpu == "a100" else CHEAP_TOKENS, used_experts)
    return name, plain, Engine(ours, k, ranges, schedule=Schedule(k), passes=NumPasses())


def _rows(args: Namespace, rollouts: Sequence[RecordedRollout], context: float, batch: int) -> list[dict[str, Any]]:
    _, plain, engine = engine_of(args, context)
    return simulate_run(rollouts, plain, engine, batch)


class Epoch:
    """What phases took whose prompts were new, or which had mostly been sampled before.

    Attributes:
        num_tokens: Those that took a step: all but the first of each rollout.
        request_steps: The requests of each step with drafts, summed.
        seconds: By problem_id, float64 [2]: what its rollouts took without and with drafts. A step's time is divided
            equally among its requests, so the sums over prompts are the phases' times.
        tail_seconds: Of the time without drafts, in steps with fewer than half as many requests as at most.
    """

    def __init__(self) -> None:
        self.num_tokens = self.request_steps = self.verified = 0
        self.seconds: defaultdict[int, costs.Floats] = defaultdict(lambda: np.zeros(2))
        self.tail_seconds = 0.0

    def add(
        self, phase: Sequence[RecordedRollout], drafter: Any, plain: costs.Cost, engine: Engine, batch: int
    ) -> None:
        """Simulate a phase."""
        for step in simulate(phase, drafter, engine, batch=batch):
            self.request_steps += step.num_requests
            self.verified += step.num_draft_tokens
            for rollout, took in step.ended:
                self.seconds[rollout.problem_id][1] += took
        sizes = np.array([max(rollout.token_ids.size - 1, 0) for rollout in phase])
        if not sizes.any():
            return
        starts, live = without_drafts(sizes, batch)
        seconds = np.array([plain.whole_step(n, 0) for n in range(1, live.max() + 1)])[live - 1]
        clock = np.append(0.0, np.cumsum(seconds / live))
        for rollout, took in zip(phase, clock[starts + sizes] - clock[starts], strict=True):
            self.seconds[rollout.problem_id][0] += took
        self.num_tokens += int(sizes.sum())
        self.tail_seconds += float(seconds[2 * live < live.max()].sum())

    def figures(self) -> dict[str, Any]:
        """Tokens per step, and how many times as fast phases are, with 5 and 95 % of the same for resampled prompts."""
        seconds = np.array([took for took in self.seconds.values() if took.any()])  # not those of one token
        (plain, ours), size, interval = seconds.sum(0), len(seconds), None
        if size >= ENOUGH_PROMPTS:
            rng = np.random.default_rng(0)
            sums = [np.bincount(rng.integers(size, size=size), minlength=size) @ seconds for _ in range(RESAMPLED)]
            interval = np.percentile([a / b for a, b in sums], [5, 95]).tolist()
        return {
            "prompts": size,
            "tokens_per_step": self.num_tokens / self.request_steps,
            "verified_per_step": self.verified / self.request_steps,
            "speedup": plain / ours,
            "interval": interval,
            "tail": self.tail_seconds / plain,
        }


def simulate_run(
    rollouts: Sequence[RecordedRollout], plain: costs.Cost, engine: Engine, batch: int
) -> list[dict[str, Any]]:
    """The figures of a run's first and later epochs, with at most `batch` requests at a time.

    A phase is what one policy version has sampled. Rollouts of a single version are phases of twice as many as run at a
    time; later epochs are then simulated with the second half of each prompt's samples, of which the first half is
    known.
    """
    versions: defaultdict[int, list[RecordedRollout]] = defaultdict(list)
    for rollout in rollouts:
        versions[rollout.policy_version].append(rollout)
    runs: list[tuple[list[RecordedRollout], list[list[RecordedRollout]]]] = [
        ([], [versions[v] for v in sorted(versions)])
    ]
    if len(versions) == 1:
        problems = by_problem(rollouts)
        earlier = [rollout for problem in problems for rollout in problem[: len(problem) // 2]]
        later = [problem[len(problem) // 2 :] for problem in problems if len(problem) > 1]
        runs = [([], _phases(problems, batch)), (earlier, _phases(later, batch))]
    epochs = {"first": Epoch(), "later": Epoch()}
    for earlier, phases in runs:
        # The host's drafter stands for the device's, which drafts much the same.
        options = {"min_survival": 0.0} if engine.budget is None else {}
        drafter = build_drafter("history", max_draft_tokens=engine.k, **options)
        for rollout in earlier:
            add_rollout(drafter, rollout)
        sampled = {rollout.problem_id for rollout in earlier}
        for phase in phases:
            prompts = {rollout.problem_id for rollout in phase}
            epoch = epochs["later" if 2 * len(prompts & sampled) > len(prompts) else "first"]
            epoch.add(phase, drafter, plain, engine, batch)
            sampled |= prompts
    return [{"requests": batch, "epoch": n, **epoch.figures()} for n, epoch in epochs.items() if epoch.request_steps]


def _phases(problems: Sequence[Sequence[RecordedRollout]], batch: int) -> list[list[RecordedRollout]]:
    """Of whole problems."""
    parts: list[list[RecordedRollout]] = []
    for problem in problems:
        if not parts or len(parts[-1]) >= max(2 * batch, 32):
            parts.append([])
        parts[-1] += problem
    return parts


def without_drafts(sizes: NDArray[np.int64], batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """In which step each rollout of a phase begins, and how many requests each step has, int64.

    Args:
        sizes: int64, in how many steps each rollout is decoded, in the order in which they start. Not all 0.
        batch: Most at a time.
    """
    free_from, starts = [0] * batch, []  # the step from which each place is free, as a heap
    for size in sizes.tolist():
        starts.append(free_from[0])
        heapreplace(free_from, free_from[0] + size)
    ends = np.array(starts) + sizes
    changes = np.bincount(starts, minlength=ends.max() + 1) - np.bincount(ends)
    return np.array(starts), np.cumsum(changes)[:-1]


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """In a few words."""
    least = {row["epoch"]: row["interval"][0] for row in rows if row["interval"] is not None}
    if not least:
        most = max(row["prompts"] for row in rows)
        return f"{most} prompts are too few for an interval and a verdict, which take {ENOUGH_PROMPTS}"
    if least.get("first", 0.0) >= WORTH_IT:
        return "worth it"
    return "worth it from the second epoch on" if least.get("later", 0.0) >= WORTH_IT else "not worth it"


def _line(row: dict[str, Any], has_costs: bool) -> str:
    line = f"{row['requests']:8}  {row['epoch']}  {row['tokens_per_step']:11.2f}  {row['verified_per_step']:13.2f}"
    if not has_costs:
        return line
    interval = "({:.2f} to {:.2f})".format(*row["interval"]) if row["interval"] else f"{'':14}"
    return f"{line}  {row['speedup']:6.2f} {interval}  {row['tail']:4.0%}"
