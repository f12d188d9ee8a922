"""Rollout phases on GPUs with the drafter on the device, on the host and with none. **Simulated, estimates.**

    python -m experiments.costs.simulate_modes TRACES_DIR [TRACES_DIR ...] [--batch 1 ... 512] [--out FILE]
    python -m experiments.costs.simulate_modes --table FILE

Steps take what `gpus.py` says of each mode, recorded rollouts decide what is accepted. Policies, all compared with vLLM
without speculation and with asynchronous scheduling:

- `schedule`: the device drafts equally many tokens for all requests of a step, K by their number, and fewer where they
  do not pay by what was measured.
- `adaptive`: the device drafts K = 8, and vLLM cuts them by confidence and by what it has measured. Not on an A100,
  whose attention kernels cannot take that.
- `host`: the host drafts with our budget.

Drafter and budget know the engine from half a phase of other prompts. A phase has twice as many rollouts as are
decoded at a time, 32 to 512, with 16 samples per prompt. With history, the drafter knows an earlier epoch's, at most 16
per prompt; where one epoch was recorded, the first half of a prompt's samples is the earlier one. Drafts are those of
"suffix" without features. A table has the geometric means of the sets' speedups, and the lowest of all.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from experiments.costs.gpus import Mode, cost_of
from experiments.drafting.regimes import split
from experiments.rows import append, make_parser, origin
from experiments.traces import read_traces
from rollout_spec.budget import Budget
from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.base import Drafter
from rollout_spec.estimate.costs import SHAPES, measured_by_vllm
from rollout_spec.estimate.phases import Adaptive, Policy, k_by_requests, simulate, sum_up
from rollout_spec.estimate.recorded import Rollout, add_rollout, by_problem
from rollout_spec.integrations.vllm.measured_schedule import MeasuredSchedule

BENCHMARK = "modes/simulated"
K = 8
BATCHES = (1, 16, 64, 512)
SAMPLES = HISTORY = 16
SETS = ("tot_text_gpt4", "r1v_grpo_log", "rg_llama_math")
ENGINES = [
    *itertools.product(["h100"], ["1.5b", "7b", "30b-a3b"], [1024]), ("a100", "7b", 1024), ("a100", "7b", 8192),
]  # fmt: skip
"""GPU, model and tokens of context."""
POLICIES = ("schedule", "adaptive", "host")


def filled(earlier: Sequence[Rollout], **options: Any) -> Drafter:
    """A new drafter that knows the earlier rollouts."""
    drafter = build_drafter("suffix", max_draft_tokens=K, **options)
    for rollout in earlier:
        add_rollout(drafter, rollout)
    if earlier:
        drafter.begin_policy_version(1)
    return drafter


def main() -> None:
    """Simulate every cell and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("traces", type=Path, nargs="*", help="folders in which the sets are")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--table", type=Path, help="sum up this file's rows instead")
    args = parser.parse_args()
    if args.table:
        rows = [json.loads(line) for line in args.table.read_text().splitlines()]
        print_table([row for row in rows if row["benchmark"] == BENCHMARK])
        return
    about = origin("simulated GPUs, estimates")
    paths = [next(f / f"{name}.parquet" for f in args.traces if (f / f"{name}.parquet").exists()) for name in args.sets]
    with Pool() as pool:
        for rows in pool.imap(
            cell, list(itertools.product(paths, args.batch, (False, True), [args.policies])), chunksize=1
        ):
            for row in rows:
                append(args.out, {"benchmark": BENCHMARK, **row, **about})
            if rows:
                print(*list(rows[0].values())[:3], flush=True)


def cell(place: tuple[Path, int, bool, Sequence[str]]) -> list[dict[str, Any]]:
    """A row for each engine and policy. `place` is a set, how many requests run, whether there is history, policies."""
    path, batch, has_history, policies = place
    parts = [split(problem, "epoch") for problem in by_problem(read_traces(path))[:256]]
    requests = [rollout for _, live in parts for rollout in live[:SAMPLES]]
    if len(requests) < batch:
        return []
    phase = requests[: min(max(32, 2 * batch), 512)]
    others = (requests[len(phase) :] + phase)[: len(phase) // 2]
    known = {rollout.problem_id for rollout in [*phase, *others]} if has_history else set()
    earlier = [old for part, _ in parts for old in part[:HISTORY] if old.problem_id in known]
    rows, seconds, run = [], {}, partial(simulate, num_speculative_tokens=K, batch=batch)
    for (gpu, model, context), name in itertools.product(ENGINES, ("none", *policies)):
        if name == "adaptive" and gpu == "a100":
            continue
        mode: Mode = name if name in ("none", "host") else "device"  # type: ignore[assignment]
        cost, policy = cost_of(model, mode, gpu, context), policy_of(name, model, gpu)
        drafter = filled(earlier) if isinstance(policy, Budget) else filled(earlier, min_survival=0.0)
        if name != "none":
            list(run(others, drafter, policy, cost))
        result = sum_up(list(run(phase, drafter, policy, cost)))
        seconds[gpu, model, context, name] = result.seconds
        speedup = seconds[gpu, model, context, "none"] / result.seconds
        rows.append(
            {
                "set": path.stem, "batch": batch, "history": has_history, "gpu": gpu, "model": model,
                "context": context, "policy": name, "seconds": round(result.seconds, 4), "speedup": round(speedup, 4),
                "tokens_per_step": round(1 + result.accepted / max(result.tokens - result.accepted, 1), 3),
                "verified": result.drafted, "accepted": result.accepted,
            }
        )  # fmt: skip
    return rows


def policy_of(name: str, model: str, gpu: str) -> Policy:
    """By its name in POLICIES, or "none"."""
    if name == "host":
        return Budget()
    if name == "adaptive":
        return Adaptive(measured_by_vllm(SHAPES[model], gpu), K, BATCHES[-1])
    if name == "none":
        return lambda num_requests: 0
    most = k_by_requests(gpu, K, SHAPES[model].used_experts)
    return MeasuredSchedule([most(n) for n in range(BATCHES[-1] + 1)])


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Geometric means of the speedups by engine, history, policy and batch, and the lowest of a policy's cells."""
    for engine, has_history, policy in itertools.product(ENGINES, (False, True), POLICIES):
        asked = (*engine, has_history, policy)
        found = [r for r in rows if (r["gpu"], r["model"], r["context"], r["history"], r["policy"]) == asked]
        means = []
        for batch in sorted({row["batch"] for row in found}):
            means.append(f"{batch}: {geometric_mean(row['speedup'] for row in found if row['batch'] == batch):.2f}")
        print(*asked, *means, min((row["speedup"] for row in found), default=None))


if __name__ == "__main__":
    main()
