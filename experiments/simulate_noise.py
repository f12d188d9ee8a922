"""What budgets lose when other work on the machine makes steps longer. **Simulated**: no model runs.

    python experiments/simulate_noise.py TRACES_DIR [--sets ...] [--recorded FILE.npz] [--out FILE]

As `simulate_budgets.py`, but the times that the budget is told are longer, by factors that are

    jitter      drawn for each step, half-normal, 12 % on average
    one core    1.3 to 1.8 for bursts of 20 to 400 steps, a third to a half of all steps, on top of the jitter
    every core  1.8 to 3, likewise
    recorded .. from a file that `record_noise.py` wrote, starting at a random place

Speedups count the steps as they would have been without the noise, so that only decisions matter. Reported per cell:
the share of the gain without noise that is lost, mean over seeds; where there is no gain, the lowest speedup.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from simulate_budgets import CURVES, K

from rollout_spec.drafters import build_drafter
from rollout_spec.replay.engine import MIN_SURVIVAL, EngineCost, Learned, NoDrafts, run_phase
from rollout_spec.replay.simulate import Request
from rollout_spec.replay.traces import read_traces
from rows import append, origin

BURSTS = {"one core": (1.3, 1.8), "every core": (1.8, 3.0)}
CPU = EngineCost("cpu", np.array([1.0, 1024.0]), np.array([2.5e-3, 12.5e-3]), 0.0, 20e-6)
"""A small model on a CPU: eight times as many tokens as 32 take 1.8 times as long."""
COLD = CPU._replace(name="cpu, cold sizes", cold_seconds=9e-3)
"""The same where the first step of each number of tokens takes 9 ms longer: measured with the engine of
`bench_first_phase.py` on a CPU."""


def injected(name: str, rng: np.random.Generator) -> Iterator[float]:
    """A factor for each step."""
    low, high = BURSTS.get(name, (1.0, 1.0))
    while True:
        for level, longest in ((1.0, 600), (rng.uniform(low, high), 400)):
            steps = int(np.exp(rng.uniform(np.log(20), np.log(longest))))
            yield from level * np.exp(np.abs(rng.normal(0, 0.15, steps)))


def recorded(percent: np.ndarray, rng: np.random.Generator) -> Iterator[float]:
    """A factor for each step, over what the fastest ones took."""
    factors = percent / np.percentile(percent, 5)
    start = int(rng.integers(factors.size))
    return itertools.cycle(np.roll(factors, -start).tolist())


def main() -> None:
    """Simulate every cell and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--sets", nargs="+", default=["rg_llama_math", "codet_codegen16b"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recorded", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about = origin()
    noises = {name: partial(injected, name) for name in ("jitter", *BURSTS)}
    if args.recorded is not None:
        with np.load(args.recorded) as file:
            noises |= {f"recorded {name}": partial(recorded, file[name]) for name in file.files}
    drafter = partial(build_drafter, "suffix", max_draft_tokens=K, min_survival=MIN_SURVIVAL)
    for name in args.sets:
        problems = read_traces(args.traces / f"{name}.parquet", max_prompts=2 * args.prompts)
        phases = [[Request(p, r) for p in problems[half::2] for r in p.rollouts[: args.samples]] for half in range(2)]
        for cost, batch in itertools.product((CPU, COLD, CURVES["7b"], CURVES["flops"]), args.batch):
            run = partial(run_phase, make_drafter=drafter, cost=cost, num_speculative_tokens=K, batch=batch)
            plain = sum(run(phase, policy=NoDrafts()).seconds for phase in phases)

            def speedup(slowdowns: Iterator[float] | None, run=run, phases=phases, plain=plain) -> float:  # type: ignore[no-untyped-def]
                policy = Learned()
                return float(plain / sum(run(phase, policy=policy, slowdowns=slowdowns).seconds for phase in phases))

            quiet, cells = speedup(None), []
            for noise, make in noises.items():
                found = np.array([speedup(make(np.random.default_rng(seed))) for seed in range(args.seeds)])
                gains = quiet > 1.05
                lost = 1 - (found - 1) / (quiet - 1) if gains else np.full(found.size, np.nan)
                row = {
                    "set": name, "curve": cost.name, "batch": batch, "noise": noise, "quiet_speedup": round(quiet, 4),
                    "speedups": found.round(4).tolist(), "lost": round(float(lost.mean()), 4) if gains else None,
                }  # fmt: skip
                append(args.out, {"benchmark": "budget/noise", **row, **about})
                cells.append(f"{noise} {100 * lost.mean():.1f} %" if gains else f"{noise} {found.min():.3f}")
            print(f"{name} {cost.name} batch {batch}: quiet {quiet:.3f}; " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
