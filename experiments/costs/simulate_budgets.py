"""Budget policies in a simulated engine, on recorded rollouts and cost curves. **Simulated**: no model runs.

    python -m experiments.costs.simulate_budgets TRACES_DIR [--sets ...] [--batch 8 64 192] [--out FILE]

Curves: three of published shape, seconds = floor + max(bytes of weights / bandwidth, 2 x parameters x tokens / FLOP/s),
with the H200's 4.8 TB/s and half of its 990 TFLOP/s (bf16): 1.5B and 7B parameters on one GPU (memory-bound up to about
a hundred tokens), and `flops`, whose steps cost in proportion to their tokens from the first on (compute-bound). `cpu`
is the demo's policy on two busy CPU cores, where one was measured (--curve).

Reported per cell: time without drafts over a policy's time, for the whole phase and for its tail. The tail begins when
nine rollouts in ten have ended (`tail`), or when nine tokens in ten are generated (`token_tail`): a policy that speeds
up the other rollouts but not the longest has a longer tail by the first definition. `ours, new` knows nothing when the
phase begins; `ours` has run through one phase of the same size on other prompts, as in any step of a run but the first.
The drafter's history is empty when a phase begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.rows import append, make_parser, origin
from rollout_spec.budget.decide import Budget
from rollout_spec.drafters import build_drafter
from rollout_spec.estimate import EngineCost, Phase, read_cost, simulate, sum_up
from rollout_spec.history.traces import read_traces
from rollout_spec.replay import Rollout, by_problem

K = 16
SIZES = np.array([1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192], np.float64)


def roofline(name: str, parameters: float, floor: float) -> EngineCost:
    """A curve of published shape, see above; drafts cost 20 us per request and step."""
    seconds = floor + np.maximum(2 * parameters / 4.8e12, 2 * parameters * SIZES / 495e12)
    return EngineCost(name, SIZES, seconds, 0.0, 20e-6)


CURVES = {
    "1.5b": roofline("1.5b", 1.5e9, 1.5e-3),
    "7b": roofline("7b", 7.6e9, 1.5e-3),
    "flops": EngineCost("flops", SIZES, 1e-4 + 1e-3 * SIZES, 0.0, 20e-6),
}
FIXED = {"none": 0, **{f"K={k}": k for k in (1, 2, 4, 8, 16)}}
POLICIES = (*FIXED, "all drafts", "ours, new", "ours")


def compare(
    phases: Sequence[Sequence[Rollout]], cost: EngineCost, batch: int, policies: Sequence[str]
) -> dict[str, Phase]:
    """The last phase under these policies. The drafter's history is empty at the beginning of every phase."""

    def run(rollouts: Sequence[Rollout], policy: Any, **options: Any) -> Phase:
        drafter = build_drafter("suffix", max_draft_tokens=K, **options)
        return sum_up(list(simulate(rollouts, drafter, policy, cost, num_speculative_tokens=K, batch=batch)))

    results = {}
    for label in policies:
        if label == "ours":
            budget = Budget()
            results[label] = [run(rollouts, budget) for rollouts in phases][-1]
        elif label == "ours, new":
            results[label] = run(phases[-1], Budget())
        elif label == "all drafts":
            results[label] = run(phases[-1], lambda num_requests: K)
        else:
            results[label] = run(phases[-1], lambda num_requests, k=FIXED[label]: k, min_survival=0.0)
    return results


def main() -> None:
    """Simulate every cell and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--sets", nargs="+", default=["rg_llama_math", "codet_codegen16b", "r1v_grpo_log"])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 64, 192])
    parser.add_argument("--curves", nargs="+", default=list(CURVES))
    parser.add_argument("--curve", type=Path, nargs="*", default=[], help="measured curves")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="besides none")
    args = parser.parse_args()
    about = origin()
    curves = [CURVES[name] for name in args.curves] + [read_cost(path) for path in args.curve]
    for name in args.sets:
        problems = by_problem(read_traces(args.traces / f"{name}.parquet"))[: 2 * args.prompts]
        phases = [[rollout for p in problems[half::2] for rollout in p[: args.samples]] for half in range(2)]
        for cost in curves:
            for batch in args.batch:
                times = compare(phases, cost, batch, ["none", *args.policies])
                none, cells = times["none"], []
                for label, phase in times.items():
                    row = {
                        "set": name, "curve": cost.name, "batch": batch, "policy": label, **phase._asdict(),
                        "speedup": round(none.seconds / phase.seconds, 4),
                        "tail_speedup": round(none.tail_seconds / max(phase.tail_seconds, 1e-12), 4),
                        "token_tail_speedup": round(none.token_tail_seconds / phase.token_tail_seconds, 4),
                    }  # fmt: skip
                    append(args.out, {"benchmark": "budget/simulated", **row, **about})
                    cells.append(f"{label} {row['speedup']:.2f} ({row['tail_speedup']:.2f})")
                print(f"{name} {cost.name} batch {batch}: " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
