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
as few as now, and as many passes as `NumPasses` chooses; each after the first takes the host so many milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Literal

import numpy as np

from experiments.drafting.regimes import split
from experiments.rows import append, make_parser, origin
from experiments.traces import read_traces
from rollout_spec.budget import Budget
from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.base import Drafter
from rollout_spec.estimate import costs, phases
from rollout_spec.measured_schedule import MeasuredSchedule
from rollout_spec.num_passes import NumPasses

K = 8
BATCHES = (1, 16, 64, 512)
SAMPLES = HISTORY = 16
SETS = ("tot_text_gpt4", "r1v_grpo_log", "rg_llama_math", "samples-step0040-t0.6")
ENGINES = ("h100", "1.5b"), ("h100", "7b"), ("h100", "30b-a3b"), ("a100", "7b")
POLICIES = ("schedule", "adaptive", "host", "constant")
Mode = Literal["none", "device", "host"]
PIECEWISE_LAUNCHES = 3
"""Launches per layer where requests have different numbers of draft tokens, and vLLM has no graph of whole steps: the
graph of what lies between two attentions, the cache's update and attention. Read in vLLM's code."""
HOST_VERIFYING = 1.2e-3
"""What our sampler takes a GPU server's host more than vLLM's, of a step of 64 requests (results/README.md)."""
HOST_DRAFT_CALL, HOST_DRAFT_REQUEST = 160e-6, 10.5e-6
"""The drafter on the host in V2, K = 8, on quiet cores: 170 us for one request, 10 for each of 64, 6.8 of 256 (measured
at 5505d49). Without what is indexed while the device computes."""


def cost_of(model: str, mode: Mode, gpu: str, further_pass: float | None) -> costs.EngineCost:
    """A model's steps in a mode, features on. further_pass: As of `step_cost`."""
    shape, further_pass = costs.SHAPES[model], None if mode == "host" else further_pass
    cost = costs.step_cost(shape, gpu, drafts=mode != "none", further_pass=further_pass)
    if mode != "host":
        return cost
    launching = shape.layers * costs.LAUNCH * PIECEWISE_LAUNCHES + costs.sampling_seconds(drafts=True)
    return cost._replace(
        seconds=np.maximum(cost.seconds, launching) + costs.HOST_STEP + HOST_VERIFYING,
        request_seconds=cost.request_seconds + costs.HOST_REQUEST,
        draft_seconds=(HOST_DRAFT_CALL, HOST_DRAFT_REQUEST),
        host_seconds=(0.0, 0.0),
        drafting_host_seconds=(0.0, 0.0),
    )


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
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES[:-1]))
    parser.add_argument("--further-ms", type=float)
    args = parser.parse_args()
    further_pass = None if args.further_ms is None else args.further_ms / 1e3
    name, asked = "modes/sub_steps" if further_pass else "modes/simulated", (args.policies, further_pass)
    about, rows = origin("simulated GPUs, estimates"), []
    paths = [next(f / f"{name}.parquet" for f in args.traces if (f / f"{name}.parquet").exists()) for name in args.sets]
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
    rows, seconds, run = [], {}, partial(phases.simulate, num_speculative_tokens=K, batch=batch)
    for (gpu, model), name in itertools.product(ENGINES, ("none", *policies)):
        if name == "adaptive" and gpu == "a100":
            continue
        mode: Mode = name if name in ("none", "host") else "device"  # type: ignore[assignment]
        cost, policy = cost_of(model, mode, gpu, further_pass), policy_of(name, model, gpu, batch, further_pass)
        passes: NumPasses | int | None = None
        if further_pass is not None and mode != "host":  # with the drafter on the host nothing is scheduled ahead
            passes = NumPasses() if mode == "device" else 1
        drafter = filled(earlier) if isinstance(policy, Budget) else filled(earlier, min_survival=0.0)
        if name != "none":
            list(run(others, drafter, policy, cost, passes=passes))
        steps = list(run(phase, drafter, policy, cost, passes=passes))
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


def policy_of(name: str, model: str, gpu: str, batch: int, further_pass: float | None) -> phases.Policy:
    """By its name in POLICIES, or "none"."""
    if name == "host":
        return Budget()
    if name == "adaptive":
        return phases.Adaptive(costs.measured_by_vllm(costs.SHAPES[model], gpu, further_pass), K, BATCHES[-1])
    if name == "none":
        return lambda num_requests: 0
    most = phases.k_by_requests(gpu, K, costs.SHAPES[model].used_experts, BATCHES[-1])
    if name == "constant":
        return lambda num_requests: max(1, most[max(batch // 2, 1)])
    return MeasuredSchedule(most)


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
