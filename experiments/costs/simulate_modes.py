"""Rollout phases on GPUs with the drafter on the device, on the host and with none. **Simulated, estimates.**

    python -m experiments.costs.simulate_modes TRACES_DIR experiments/results/real_policy [--further-ms MS] [--out FILE]

Recorded rollouts decide what is accepted, and a step takes what `cost_of` says of its mode. Without drafts, and with
the drafter on the device, scheduling is asynchronous: a step takes little longer than the device, or than the host if
that takes longer. With the drafter on the host they work one after the other. Policies, all compared with vLLM without
speculation and with asynchronous scheduling:

- `schedule`: the device drafts equally many tokens for all requests of a step, K by their number, and fewer where they
  do not pay by what was measured.
- `constant`: the device drafts the same K in every step, as data-parallel engines do; not among the defaults.
- `adaptive`: the device drafts K = 8, and vLLM cuts them by confidence and by what it has measured. Not on an A100,
  whose attention kernels cannot take that.
- `host`: the host drafts with our budget.

Drafter and budget know the engine from half a phase of other prompts. A phase has twice as many rollouts as are
decoded at a time, 32 to 512, with 16 samples per prompt. With history, the drafter knows an earlier epoch's, at most 16
per prompt; where one epoch was recorded, the first half of a prompt's samples is the earlier one. Drafts are those of
"suffix" without features. A table has the geometric means of the sets' speedups, and the lowest of all.

Steps with drafts on the device have the calls that were measured, and one forward pass. With `--further-ms` they have
as few as now, and as many passes as pay; each after the first takes the host so many milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from multiprocessing import Pool
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from experiments.drafting.regimes import split
from experiments.rows import append, make_parser, origin
from experiments.traces import read_traces
from rollout_spec.budget import Budget
from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.base import Drafter
from rollout_spec.estimate import costs, phases
from rollout_spec.num_passes import NumPasses
from rollout_spec.schedule import CHEAP_TOKENS, CHEAP_TOKENS_A100, Schedule, affordable_ranges, one_k

K = 8
BATCHES = (1, 16, 64, 512)
SAMPLES = HISTORY = 16
SETS = ("tot_text_gpt4", "r1v_grpo_log", "rg_llama_math", "samples-step0040-t0.6")
ENGINES = ("h100", "1.5b"), ("h100", "7b"), ("h100", "30b-a3b"), ("a100", "7b")
POLICIES = ("schedule", "adaptive", "host", "constant")


def filled(earlier: Sequence[phases.RecordedRollout], **options: Any) -> Drafter:
    """A new drafter that knows the earlier rollouts."""
    drafter = build_drafter("suffix", max_draft_tokens=K, **options)
    for rollout in earlier:
        phases.add_rollout(drafter, rollout)
    return drafter


def main() -> None:
    """Simulate every cell and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("traces", type=Path, nargs="+", help="folders in which the sets are")
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES[:-1]))
    parser.add_argument("--further-ms", type=float)
    args = parser.parse_args()
    further_pass = None if args.further_ms is None else args.further_ms / 1e3
    name, asked = "modes/sub_steps" if further_pass else "modes/simulated", (args.policies, further_pass)
    about, rows = origin("simulated GPUs, estimates"), []
    paths = [next(f / f"{name}.parquet" for f in args.traces if (f / f"{name}.parquet").exists()) for name in SETS]
    with Pool() as pool:
        places = itertools.product(paths, args.batch, (False, True), [asked])
        for row in itertools.chain.from_iterable(pool.imap(cell, list(places), chunksize=1)):
            append(args.out, {"benchmark": name, **row, **about})
            rows.append(row)
    print_table(rows)


def cell(place: tuple[Path, int, bool, tuple[Sequence[str], float | None]]) -> list[dict[str, Any]]:
    """A row for each engine and policy. `place`: a set, requests, whether there is history, policies, further pass."""
    path, batch, has_history, (policies, further_pass) = place
    parts = [split(problem, "epoch") for problem in phases.by_problem(read_traces(path))[:256]]
    requests = [rollout for _, live in parts for rollout in live[:SAMPLES]]
    if len(requests) < batch:
        return []
    phase = requests[: min(max(32, 2 * batch), 512)]
    others = (requests[len(phase) :] + phase)[: len(phase) // 2]
    known = {rollout.problem_id for rollout in [*phase, *others]} if has_history else set()
    earlier = [old for part, _ in parts for old in part[:HISTORY] if old.problem_id in known]
    rows, seconds = [], {}
    for (gpu, model), name in itertools.product(ENGINES, ("none", *policies)):
        if name == "adaptive" and gpu == "a100":
            continue
        engine = engine_of(name, model, gpu, batch, further_pass)
        drafter = filled(earlier, **({"min_survival": 0.0} if engine.budget is None else {}))
        if name != "none":
            list(phases.simulate(others, drafter, engine, batch=batch))
        steps = list(phases.simulate(phase, drafter, engine, batch=batch))
        took = seconds[gpu, model, name] = sum(step.seconds for step in steps)
        tokens, accepted = steps[-1].tokens, sum(step.num_accepted for step in steps)
        rows.append(
            {
                "set": path.stem, "batch": batch, "history": has_history, "gpu": gpu, "model": model,
                "policy": name, "further_pass": further_pass, "seconds": round(took, 4),
                "speedup": round(seconds[gpu, model, "none"] / took, 4),
                "tokens_per_step": round(1 + accepted / max(tokens - accepted, 1), 3),
                "verified": sum(step.num_draft_tokens for step in steps), "accepted": accepted,
            }
        )  # fmt: skip
    return rows


def engine_of(name: str, model: str, gpu: str, batch: int, further_pass: float | None) -> phases.Engine:
    """By its name in POLICIES, or "none"."""
    shape = costs.SHAPES[model]
    place: costs.Place | None = None if name == "none" else "host" if name == "host" else "device"
    cost = costs.step_cost(shape, gpu, place, further_pass=further_pass)
    if name == "host":
        return phases.Engine(cost, K, budget=Budget())
    if name == "none":
        return phases.Engine(cost, K, [(1, 1, 0)], passes=None if further_pass is None else 1)
    passes = None if further_pass is None else NumPasses()
    ranges = affordable_ranges(K, CHEAP_TOKENS_A100 if gpu == "a100" else CHEAP_TOKENS, shape.used_experts)
    if name == "constant":
        return phases.Engine(cost, K, [(1, 1, one_k(ranges, batch))], passes=passes)
    if name == "adaptive":
        schedule = Schedule(K) if passes is None else None  # as engines have it
        return phases.Engine(cost, K, known=costs.measured_by_vllm(shape, gpu), schedule=schedule, passes=passes)
    return phases.Engine(cost, K, ranges, schedule=Schedule(K), passes=passes)


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Geometric means of the speedups by engine, history, policy and batch, and the lowest of a policy's cells."""
    for engine, has_history, policy in itertools.product(ENGINES, (False, True), POLICIES):
        asked = (*engine, has_history, policy)
        speedups: dict[int, list[float]] = {}
        for row in rows:
            if (row["gpu"], row["model"], row["history"], row["policy"]) == asked:
                speedups.setdefault(row["batch"], []).append(row["speedup"])
        means = [f"{batch}: {geometric_mean(found):.2f}" for batch, found in sorted(speedups.items())]
        print(*asked, *means, min(itertools.chain.from_iterable(speedups.values()), default=None))


if __name__ == "__main__":
    main()
