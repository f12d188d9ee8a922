"""Budget policies in a simulated engine, on recorded rollouts and cost curves. **Simulated**: no model runs.

    python -m experiments.costs.simulate_budgets TRACES_DIR [--sets ...] [--batch 8 64 192] [--out FILE] [--plot FILE]

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

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from experiments.rows import append, origin
from rollout_spec.replay.cost import EngineCost, read_cost
from rollout_spec.replay.engine import compare
from rollout_spec.replay.simulate import Request
from rollout_spec.replay.traces import read_traces

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
TITLES = {"1.5b": "1.5B on an H200", "7b": "7B on an H200", "flops": "every token costs the same"}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Speedups of each cell, of the phase and of its last tenth, a column for each cost curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = list(dict.fromkeys(row["curve"] for row in rows))
    cells = list(dict.fromkeys((row["set"], row["batch"]) for row in rows))
    figure, axes = plt.subplots(2, len(curves), figsize=(4.2 * len(curves), 6.5), sharex=True, layout="constrained")
    for column, curve in enumerate(curves):
        for line, (key, label) in enumerate((("speedup", "phase"), ("token_tail_speedup", "last tenth of tokens"))):
            found = {(r["set"], r["batch"], r["policy"]): r[key] for r in rows if r["curve"] == curve}
            fixed = [
                max(v for (s, b, p), v in found.items() if (s, b) == cell and p.startswith("K=")) for cell in cells
            ]
            for policy, style in (("ours", "o-"), ("ours, new", "s:"), ("oracle", "k--")):
                axes[line, column].plot([found[(*cell, policy)] for cell in cells], style, label=policy)
            axes[line, column].plot(fixed, "x-", label="best fixed K of 1 to 16, in hindsight")
            axes[line, column].axhline(1, color="gray", lw=0.8)
            axes[line, column].grid(alpha=0.3)
            axes[line, column].set(ylim=(0, None))
            axes[line, 0].set(ylabel=f"speedup, {label}")
        axes[0, column].set(title=f"{TITLES.get(curve, curve)} (simulated)")
        axes[1, column].set_xticks(range(len(cells)), [f"{name}, {batch}" for name, batch in cells], rotation=90)
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Simulate every cell and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--sets", nargs="+", default=["rg_llama_math", "codet_codegen16b", "r1v_grpo_log"])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 64, 192])
    parser.add_argument("--curves", nargs="+", default=list(CURVES))
    parser.add_argument("--curve", type=Path, nargs="*", default=[], help="measured curves")
    parser.add_argument("--policies", nargs="+", help="besides none; default: all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    about = origin()
    curves = [CURVES[name] for name in args.curves] + [read_cost(path) for path in args.curve]
    rows = []
    for name in args.sets:
        problems = read_traces(args.traces / f"{name}.parquet", max_prompts=2 * args.prompts)
        phases = [[Request(p, r) for p in problems[half::2] for r in p.rollouts[: args.samples]] for half in range(2)]
        for cost in curves:
            for batch in args.batch:
                policies = ["none", *args.policies] if args.policies else None
                times = compare(phases, cost, num_speculative_tokens=K, batch=batch, policies=policies)
                none, cells = times["none"], []
                for label, phase in times.items():
                    row = {
                        "set": name, "curve": cost.name, "batch": batch, "policy": label, **phase._asdict(),
                        "speedup": round(none.seconds / phase.seconds, 4),
                        "tail_speedup": round(none.tail_seconds / max(phase.tail_seconds, 1e-12), 4),
                        "token_tail_speedup": round(none.token_tail_seconds / phase.token_tail_seconds, 4),
                    }  # fmt: skip
                    rows.append(row)
                    append(args.out, {"benchmark": "budget/simulated", **row, **about})
                    cells.append(f"{label} {row['speedup']:.2f} ({row['tail_speedup']:.2f})")
                print(f"{name} {cost.name} batch {batch}: " + ", ".join(cells), flush=True)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
