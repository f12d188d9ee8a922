"""`rollout-spec estimate`: what drafts would gain in a run, by its rollouts and by what steps take on its GPUs.

The rollouts are decoded once more in the order in which they were sampled, with as many requests at a time as an engine
has, and each step takes what it would take there. Without step costs it says how many tokens per step drafts give.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from heapq import heapreplace
from importlib.util import find_spec
from multiprocessing import Pool
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.config import MAX_SPECULATIVE_TOKENS
from rollout_spec.drafters import build_drafter
from rollout_spec.estimate import costs, phases
from rollout_spec.estimate.phases import RecordedRollout
from rollout_spec.history.command import load_tokenizer
from rollout_spec.installation import install
from rollout_spec.measured_schedule import MeasuredSchedule

Ints = NDArray[np.int64]
WORTH_IT = 1.1
"""A phase that is less than so many times as fast is not worth an installation."""
ENGINE = "V2 of vLLM 0.31 or newer, drafts on the device"
"""Whose steps are simulated."""
SECONDS_BETWEEN_LINES = 10
"""Of progress."""
ENOUGH_PROMPTS = 10
"""Fewer say too little for an interval, and for a verdict."""
RESAMPLED = 1000
ADAPTIVE_GPUS = ("h100", "h200")
"""On these vLLM's adaptive verification cuts the device's drafts."""


class Gain(NamedTuple):
    """What drafts gained in a simulated phase."""

    is_later: bool
    """Whether most of its prompts had been sampled before."""
    num_tokens: int
    """Those that took a step: all but the first of each rollout."""
    request_steps: int
    """The requests of each step with drafts, summed."""
    verified: int
    """Draft tokens."""
    seconds: dict[int, costs.Floats]
    """By problem_id, float64 [2]: what its rollouts took without and with drafts. A step's time is divided equally
    among its requests, so the sums over prompts are the phase's times."""
    tail_seconds: float
    """Of the time without drafts, in steps with fewer than half as many requests as at most."""


class Engine(NamedTuple):
    """What phases are simulated with."""

    plain: costs.Cost
    ours: costs.Cost
    policy: phases.Policy
    k: int


def run(args: Namespace) -> int:
    """Print a table and a verdict. Returns the exit code; 2, with a line on stderr, for bad input."""
    try:
        rollouts = _read(args)
        context = float(np.mean([rollout.mean_context for rollout in rollouts]))
        engine_of(args, context, max(args.requests))  # says what is wrong before anything is simulated
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"rollout-spec estimate: {error}", file=sys.stderr)
        return 2
    versions = len({rollout.policy_version for rollout in rollouts})
    print(
        f"{len(rollouts):,} rollouts of {len(phases.by_problem(rollouts)):,} prompts, {versions:,} policy version"
        f"{'s' * (versions > 1)}; {context:,.0f} tokens of context on average"
    )
    has_costs = args.gpu is not None or args.step_times is not None
    print("requests  epoch  tokens/step  verified/step" + "  times as fast (90 %)  tail" * has_costs)
    rows: list[dict[str, Any]] = []
    with Pool(min(len(args.requests), os.cpu_count() or 1)) as pool:
        runs = pool.imap(partial(_run_with, args, rollouts, context), args.requests)
        for batch, gains in zip(args.requests, runs, strict=True):
            for is_later in (False, True):
                some = [gain for gain in gains if gain.is_later == is_later]
                if some:
                    rows.append({"requests": batch, "epoch": "later" if is_later else "first", **figures_of(some)})
                    print(_line(rows[-1], has_costs), flush=True)
    if has_costs:
        if args.step_times is None:
            print('Step times are estimates: "times as fast" was 0.91 to 1.33 times what an H100 gave.')
        recording = args.paths[0] + f" and {len(args.paths) - 1:,} more" * (len(args.paths) > 1)
        for batch in args.requests:
            said = verdict([row for row in rows if row["requests"] == batch])
            print(f"{batch} requests in {ENGINE}: {said}, by {recording}.")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


def engine_of(args: Namespace, context: float, batch: int) -> Engine:
    """What the arguments ask for. Raises ValueError or OSError."""
    plain: costs.Cost
    ours: costs.Cost
    k, used_experts = args.num_speculative_tokens, 1.0
    if args.step_times is not None:
        times = costs.read_step_times(args.step_times, args.model, context)
        if args.gpu is None:
            raise ValueError("--step-times needs --gpu, too: how drafts are cut depends on it")
        if k > max(times):
            raise ValueError(f"{args.step_times} has steps of at most {max(times)} draft tokens: give -k {max(times)}")
        plain, ours = (costs.MeasuredCost(times, drafts=drafts) for drafts in (False, True))
        seconds = costs.measured_curve(times)
    elif args.gpu is None:
        return Engine(costs.UNIT_COST, costs.UNIT_COST, lambda num_requests: k, k)
    elif args.model is None:
        raise ValueError(f"--gpu needs --model: one of {', '.join(costs.SHAPES)} or a path of a config.json")
    else:
        shape = costs.shape_of(args.model)
        used_experts, seconds = shape.used_experts, costs.measured_by_vllm(shape, args.gpu)
        plain, ours = (costs.step_cost(shape, args.gpu, drafts=drafts, context=context) for drafts in (False, True))
    if args.gpu in ADAPTIVE_GPUS:
        return Engine(plain, ours, phases.Adaptive(seconds, k, batch), k)
    return Engine(plain, ours, MeasuredSchedule(phases.k_by_requests(args.gpu, k, used_experts, batch)), k)


def _run_with(args: Namespace, rollouts: Sequence[RecordedRollout], context: float, batch: int) -> list[Gain]:
    return simulate_run(rollouts, engine_of(args, context, batch), batch)


def simulate_run(rollouts: Sequence[RecordedRollout], engine: Engine, batch: int) -> list[Gain]:
    """The gains in the phases of a run, with at most `batch` requests at a time.

    A phase is what one policy version has sampled. Rollouts of a single version are phases of twice as many as run at a
    time; later epochs are then simulated with the second half of each prompt's samples, of which the first half is
    known.
    """
    versions: dict[int, list[RecordedRollout]] = {}
    for rollout in rollouts:
        versions.setdefault(rollout.policy_version, []).append(rollout)
    if len(versions) > 1:
        return _simulate([], [versions[version] for version in sorted(versions)], engine, batch)
    problems = phases.by_problem(rollouts)
    halves = [(problem[: len(problem) // 2], problem[len(problem) // 2 :]) for problem in problems if len(problem) > 1]
    earlier = [rollout for half, _ in halves for rollout in half]
    gains = _simulate([], _grouped(problems, batch), engine, batch)
    return gains + (_simulate(earlier, _grouped([half for _, half in halves], batch), engine, batch) if halves else [])


def _grouped(problems: Sequence[Sequence[RecordedRollout]], batch: int) -> list[list[RecordedRollout]]:
    """Phases of whole problems."""
    parts: list[list[RecordedRollout]] = []
    for problem in problems:
        if not parts or len(parts[-1]) >= max(2 * batch, 32):
            parts.append([])
        parts[-1] += problem
    return parts


def _simulate(
    earlier: Sequence[RecordedRollout], parts: Sequence[list[RecordedRollout]], engine: Engine, batch: int
) -> list[Gain]:
    # The host's drafter stands for the device's, which drafts much the same.
    drafter = build_drafter("history", max_draft_tokens=engine.k, min_survival=0.0)
    sampled, gains = {rollout.problem_id for rollout in earlier}, []
    decode = partial(phases.simulate, num_speculative_tokens=engine.k, batch=batch)
    num_ended, num_rollouts, said = 0, sum(map(len, parts)), time.monotonic()
    for rollout in earlier:
        phases.add_rollout(drafter, rollout)
    for phase in parts:
        problems = {rollout.problem_id for rollout in phase}
        steps = []
        for step in decode(phase, drafter, engine.policy, engine.ours):
            steps.append(step)
            num_ended += len(step.ended)
            if time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                print(f"{batch} requests: {num_ended:,} of {num_rollouts:,} rollouts decoded again", file=sys.stderr)
        is_later = 2 * len(problems & sampled) > len(problems)
        sampled |= problems
        if not steps:
            continue
        starts, ends, live = without_drafts([rollout.token_ids.size for rollout in phase], batch)
        seconds = np.array([engine.plain.whole_step(n, 0) for n in range(1, live.max() + 1)])[live - 1]
        clock = np.append(0.0, np.cumsum(seconds / live))
        of_prompt = {problem_id: np.zeros(2) for problem_id in problems}
        for rollout, took in zip(phase, clock[ends] - clock[starts], strict=True):
            of_prompt[rollout.problem_id][0] += took
        for rollout, took in (entry for step in steps for entry in step.ended):
            of_prompt[rollout.problem_id][1] += took
        gains.append(
            Gain(
                is_later=is_later,
                num_tokens=int((ends - starts).sum()),
                request_steps=sum(step.num_requests for step in steps),
                verified=sum(step.num_draft_tokens for step in steps),
                seconds=of_prompt,
                tail_seconds=float(seconds[2 * live < live.max()].sum()),
            )
        )
    return gains


def without_drafts(lengths: Sequence[int], batch: int) -> tuple[Ints, Ints, Ints]:
    """When each rollout of a phase begins and ends, in steps, and how many requests each step has, int64.

    The first token of a rollout comes with its prompt and takes no step.

    Args:
        lengths: Tokens of the rollouts, in the order in which they start. One has two or more.
        batch: Most at a time.
    """
    free_from = [0] * batch  # the step from which each place is free, as a heap
    starts = np.zeros(len(lengths), np.int64)
    steps = np.maximum(np.array(lengths, np.int64) - 1, 0)
    for i, length in enumerate(steps.tolist()):
        if length:
            starts[i] = free_from[0]
            heapreplace(free_from, free_from[0] + length)
    ends = starts + steps
    changes = np.bincount(starts[steps > 0], minlength=ends.max() + 1) - np.bincount(ends[steps > 0])
    return starts, ends, np.cumsum(changes)[:-1]


def figures_of(gains: Sequence[Gain]) -> dict[str, Any]:
    """Tokens per step, and how many times as fast phases are, with 5 % and 95 % of the same for resampled prompts."""
    of_prompt: dict[int, costs.Floats] = {}
    for gain in gains:
        for problem_id, took in gain.seconds.items():
            of_prompt[problem_id] = of_prompt.get(problem_id, 0.0) + took
    seconds = np.array([took for took in of_prompt.values() if took.any()])  # not those with rollouts of one token
    plain, ours = seconds.sum(0)
    steps = sum(gain.request_steps for gain in gains)
    return {
        "prompts": len(seconds),
        "tokens_per_step": sum(gain.num_tokens for gain in gains) / steps,
        "verified_per_step": sum(gain.verified for gain in gains) / steps,
        "speedup": plain / ours,
        "interval": _interval(seconds) if len(seconds) >= ENOUGH_PROMPTS else None,
        "tail": sum(gain.tail_seconds for gain in gains) / plain,
    }


def _interval(seconds: costs.Floats) -> list[float]:
    rng, speedups = np.random.default_rng(0), []
    for _ in range(RESAMPLED):
        plain, ours = np.bincount(rng.integers(len(seconds), size=len(seconds)), minlength=len(seconds)) @ seconds
        speedups.append(plain / ours)
    return [float(bound) for bound in np.percentile(speedups, [5, 95])]


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """In a few words."""
    least = {row["epoch"]: row["interval"][0] for row in rows if row["interval"] is not None}
    if not least:
        most = max(row["prompts"] for row in rows)
        return f"{most} prompts are too few for an interval and a verdict, which take {ENOUGH_PROMPTS}"
    if least.get("first", 0.0) >= WORTH_IT:
        return "worth it"
    return "worth it from the second epoch on" if least.get("later", 0.0) >= WORTH_IT else "not worth it"


def _read(args: Namespace) -> list[RecordedRollout]:
    if find_spec("pyarrow") is None:
        raise ImportError(f"recordings are read with pyarrow: {install('estimate')}")
    if not 1 <= args.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
        raise ValueError(
            f"-k must be between 1 and {MAX_SPECULATIVE_TOKENS} (vLLM's limit), got {args.num_speculative_tokens}"
        )
    if min(args.requests) < 1:
        raise ValueError(f"--requests must be positive, got {min(args.requests)}")
    tokenizer = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
    logs: list[list[RecordedRollout]] = []
    unusable = []
    for path in args.paths:
        try:
            logs.append(phases.read_rollouts(path, tokenizer))
        except FileNotFoundError:  # a misspelt name
            raise
        except (OSError, ValueError) as error:
            unusable.append(str(error))
    if not logs:
        raise ValueError(unusable[0])
    rollouts, num_copies = phases.without_copies(logs)
    if num_copies:
        print(f"{num_copies:,} copies of rollouts are left out; the earliest step of each counts", file=sys.stderr)
    if unusable:
        print(f"{len(unusable):,} of {len(args.paths):,} files are left out, first {unusable[0]}", file=sys.stderr)
    if all(rollout.token_ids.size < 2 for rollout in rollouts):
        raise ValueError("all rollouts have one token: there is nothing to draft")
    return rollouts


def _line(row: dict[str, Any], has_costs: bool) -> str:
    line = f"{row['requests']:8}  {row['epoch']}  {row['tokens_per_step']:11.2f}  {row['verified_per_step']:13.2f}"
    if not has_costs:
        return line
    interval = "({:.2f} to {:.2f})".format(*row["interval"]) if row["interval"] else f"{'':14}"
    return f"{line}  {row['speedup']:6.2f} {interval}  {row['tail']:4.0%}"
