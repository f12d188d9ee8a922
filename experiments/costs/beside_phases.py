"""Phases that `bench_phase` measured on a GPU, beside what the simulation says of them. Takes no GPU.

    python -m experiments.costs.beside_phases [experiments/results/bench_phase.jsonl] [--out FILE]

For the modes `none` and `device`, with vLLM's adaptive verification: seconds, steps, tokens per request and step.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from experiments.engines.bench_phase import PHASES, ROLLOUTS, Phase, read_recorded
from experiments.rows import RESULTS, append, make_parser, origin
from rollout_spec.drafters import build_drafter
from rollout_spec.estimate.costs import PEAKS, SHAPES, measured_by_vllm, step_cost
from rollout_spec.estimate.phases import Adaptive, Policy, simulate


def no_drafts(num_requests: int) -> int:
    """What `none` verifies."""
    return 0


@cache
def simulated(shape: str, gpu: str, mode: str, batch: int, k: int) -> list[dict[str, Any]]:
    """What the simulation says of each phase, of which the second one has the first one's history."""
    recorded = read_recorded(str(ROLLOUTS))
    drafter = build_drafter("history", max_draft_tokens=k, min_survival=0.0)
    policy: Policy = no_drafts
    if mode == "device":
        policy = Adaptive(measured_by_vllm(SHAPES[shape], gpu), k, batch)
        policy.choose = lambda num_requests: k  # type: ignore[method-assign]  # those engines did not pause
    found = []
    for number in range(len(PHASES)):
        phase = Phase(recorded, batch, number)
        rollouts = [r._replace(problem_id=p) for r, p in zip(phase.rollouts, phase.problems, strict=True)]
        context = float(np.mean([rollout.mean_context for rollout in rollouts]))
        cost = step_cost(SHAPES[shape], gpu, drafts=mode == "device", context=context)
        steps = list(simulate(rollouts, drafter, policy, cost, num_speculative_tokens=k, batch=batch))
        seconds, request_steps = sum(step.seconds for step in steps), sum(step.num_requests for step in steps)
        tokens = (steps[-1].tokens - len(rollouts)) / request_steps
        found.append({"seconds": round(seconds, 2), "steps": len(steps), "tokens_per_step": round(tokens, 3)})
    return found


def main() -> None:
    """Print a line for each row."""
    parser = make_parser(__doc__)
    parser.add_argument("rows", nargs="?", type=Path, default=RESULTS / "bench_phase.jsonl")
    args = parser.parse_args()
    for row in map(json.loads, args.rows.read_text().splitlines()):
        gpu = next((name for name in PEAKS if name in row["device"].lower()), None)
        if row["mode"] not in ("none", "device") or gpu is None:
            continue
        said = simulated(row["shape"], gpu, row["mode"], row["batch"], row["k"])[PHASES.index(row["phase"])]
        about = {name: row[name] for name in ("shape", "batch", "phase", "mode")}
        measured = {name: row[name] for name in said}
        print(about, "measured", measured, "simulated", said, flush=True)
        append(args.out, {"benchmark": "modes/phases", "gpu": gpu, **about, "measured": measured, "simulated": said,
                          **origin("simulated GPU, estimates")})  # fmt: skip


if __name__ == "__main__":
    main()
