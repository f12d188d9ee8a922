"""Rollout phases on an H100 with the drafter on the device, on the host and with none. **Simulated, estimates.**

    python -m experiments.costs.simulate_modes TRACES_DIR [TRACES_DIR ...] [--batch 1 ... 512] [--out FILE]
    python -m experiments.costs.simulate_modes --table FILE

Steps take what `gpus.py` says of each mode, recorded rollouts decide what is accepted. The device drafts equally many
tokens for all requests of a step, K by their number; these schedules are compared. The host drafts with our budget,
which knows the engine from half a phase of other prompts. Both are compared with vLLM without speculation and with
asynchronous scheduling. A phase has twice as many rollouts as are decoded at a time, 32 to 512, with 16 samples per
prompt. With history, the drafter knows an earlier epoch's rollouts, at most 16 per prompt; where one epoch was
recorded, the first half of a prompt's samples is the earlier one. Drafts are those of "suffix" without features.

`speedup`: time without drafts over a policy's time, on an H100. `speedup_no_host`: the same if the host took no time;
`speedup_h200`, `speedup_a100`: on these. A table has the geometric means of an H100's cells, and the lowest of all.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from experiments.costs.estimate import EngineCost, Step, by_ranges, simulate, sum_up
from experiments.costs.gpus import CORES, SHAPES, step_cost
from experiments.rows import append, make_parser, origin
from experiments.traces import read_traces
from rollout_spec.budget import Budget
from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.base import Drafter
from rollout_spec.integrations.vllm.step_sizes import affordable_ranges
from rollout_spec.replay import Rollout, add_rollout, by_problem, split

BENCHMARK = "modes/simulated"
K = 8
BATCHES = (1, 8, 32, 64, 96, 128, 256, 512)
SAMPLES = HISTORY = 16
SETS = ("tot_text_gpt4", "r1v_grpo_log", "codet_codegen16b", "samples-step0040-t0.6", "rg_llama_math")
SCHEDULES = {
    "none": [(1, 1, 0)],
    "K=8": [(1, 1, K)],
    **{f"{tokens} tokens": affordable_ranges(K, tokens) for tokens in (144, 192, 256, 288)},
}
"""Ranges as vLLM takes them. The last one's K holds for more requests, too."""
VARIANTS = (
    ("speedup", "h100", CORES), ("speedup_no_host", "h100", 0.0), ("speedup_h200", "h200", CORES),
    ("speedup_a100", "a100", CORES),
)  # fmt: skip


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
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--table", type=Path, help="sum up this file's rows instead")
    args = parser.parse_args()
    if args.table:
        rows = [json.loads(line) for line in args.table.read_text().splitlines()]
        print_table([row for row in rows if row["benchmark"] == BENCHMARK])
        return
    about = origin("simulated H100, estimates")
    for name in args.sets:
        path = next(folder / f"{name}.parquet" for folder in args.traces if (folder / f"{name}.parquet").exists())
        parts = [split(problem, "epoch") for problem in by_problem(read_traces(path))[:256]]
        requests = [rollout for _, live in parts for rollout in live[:SAMPLES]]
        for batch in args.batch:
            if len(requests) < batch:
                print(f"{name}: fewer than {batch} rollouts", flush=True)
                continue
            phase = requests[: min(max(32, 2 * batch), 512)]
            others = (requests[len(phase) :] + phase)[: len(phase) // 2]
            for history in (False, True):
                known = {rollout.problem_id for rollout in [*phase, *others]} if history else set()
                earlier = [old for part, _ in parts for old in part[:HISTORY] if old.problem_id in known]
                about_cell = {"benchmark": BENCHMARK, "set": name, "history": history, "batch": batch}
                for row in cell(phase, others, earlier, batch, args.schedules):
                    append(args.out, {**about_cell, **row, **about})
                print(*about_cell.values(), flush=True)


def cell(
    phase: Sequence[Rollout],
    others: Sequence[Rollout],
    earlier: Sequence[Rollout],
    batch: int,
    schedules: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """A row for each model and policy."""
    run = partial(simulate, num_speculative_tokens=K, batch=batch)
    taken: dict[tuple[int, ...], list[Step]] = {}  # by K for each number of requests: many are alike
    undrafted, no_drafts = (0,) * batch, by_ranges(SCHEDULES["none"])
    for label in dict.fromkeys(["none", *schedules]):
        policy = by_ranges(SCHEDULES[label])
        key = tuple(policy(n) for n in range(1, batch + 1))
        if key not in taken:
            taken[key] = list(run(phase, filled(earlier, min_survival=0.0), policy, step_cost("8b", "device")))
        for model in SHAPES:
            times = {}
            for name, gpu, cores in VARIANTS:
                none = device_seconds(taken[undrafted], no_drafts, step_cost(model, "none", gpu, cores))
                ours = device_seconds(taken[key], policy, step_cost(model, "device", gpu, cores))
                times[name] = none, none if label == "none" else ours
            yield summary(model, label, taken[key], times)
    for model in SHAPES:
        cost, budget = step_cost(model, "host"), Budget()
        list(run(others, filled(earlier), budget, cost))
        steps = list(run(phase, filled(earlier), budget, cost))
        none = device_seconds(taken[undrafted], no_drafts, step_cost(model, "none"))
        yield summary(model, "host", steps, {"speedup": (none, sum_up(steps).seconds)})


def device_seconds(steps: Sequence[Step], policy: Callable[[int], int], cost: EngineCost) -> float:
    """What steps take if every request has K draft tokens: the device's drafts are not cut.

    As K does not depend on what steps cost, one simulation tells the time on any curve.
    """
    total = 0.0
    for size, num_steps in Counter(step.num_requests for step in steps).items():
        k = policy(size)
        total += num_steps * (cost.whole_step(size, size * k) + cost.drafting(size) * (k > 0))
    return total


def summary(model: str, policy: str, steps: Sequence[Step], times: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """What a row says of a policy. `times` are (without drafts, with the policy) by VARIANTS."""
    result = sum_up(steps)
    return {
        "model": model, "policy": policy, "seconds": round(times["speedup"][1], 4),
        "tokens_per_step": round(1 + result.accepted / max(result.tokens - result.accepted, 1), 3),
        **{name: round(none / seconds, 4) for name, (none, seconds) in times.items()},
    }  # fmt: skip


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Geometric means of the speedups by policy, model and batch, and the lowest of a policy's cells on each GPU."""
    for policy, model in itertools.product(dict.fromkeys(row["policy"] for row in rows), SHAPES):
        found = [row for row in rows if (row["policy"], row["model"]) == (policy, model)]
        means = []
        for batch in sorted({row["batch"] for row in found}):
            speedups = [row["speedup"] for row in found if row["batch"] == batch]
            means.append(f"{batch}: {geometric_mean(speedups):.2f}")
        overall = geometric_mean(row["speedup"] for row in found)
        lowest = {name: min((row[name] for row in found if name in row), default=None) for name, *_ in VARIANTS}
        print(f"{policy:22} {model:5} {overall:.3f}", *means, lowest)


if __name__ == "__main__":
    main()
