"""The time on the host of a budget's decision and of all that it learns in a step.

    python experiments/bench_decision.py [--batch 1 8 64 256 512] [--out FILE]

Every request has a draft of K tokens of random confidence; lengths of 100 problems are known. Timed: asking whether to
draft, expected lengths, the decision, and learning from outcomes and from the step's time. Gate: where verifying costs
nothing, all draft tokens are verified.
"""

from __future__ import annotations

import argparse
import timeit
from pathlib import Path

import numpy as np

from rollout_spec.budget.decide import Budget
from rows import append, origin, quantiles

K = 8
NUM_PROBLEMS = 100
CALLS, REPEATS = 300, 9


def learned(batch: int) -> Budget:
    """A budget that knows what steps of so many requests cost, and how long rollouts get."""
    rng = np.random.default_rng(0)
    budget = Budget()
    for _ in range(5):
        budget.observe_step(batch, 1.0, drafted=False)
        for k in range(1, K + 1):
            budget.observe_step(batch * (1 + k), 1.0, drafted=True)
    for i in range(20 * NUM_PROBLEMS):
        budget.lengths.observe(i % NUM_PROBLEMS, int(rng.integers(1, 1000)))
    return budget


def main() -> None:
    """Measure each batch size and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64, 256, 512])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about = origin()
    print("batch   us per step (p20 p50 p80)   per request (p50)")
    for batch in args.batch:
        rng, budget = np.random.default_rng(1), learned(batch)
        confidence = np.sort(rng.uniform(0.05, 1, (batch, K)).astype(np.float32), axis=1)[:, ::-1].ravel().copy()
        starts = np.arange(0, K * batch + 1, K)
        problems = [i % NUM_PROBLEMS for i in range(batch)]
        so_far, at_most = np.full(batch, 30), np.full(batch, 900)

        def step(batch=batch, budget=budget, confidence=confidence, starts=starts, problems=problems,
                 so_far=so_far, at_most=at_most) -> int:  # fmt: skip
            taken = np.zeros(batch, np.int64)
            if budget.wants_drafts(batch):
                remaining = budget.lengths.predict(problems, so_far, at_most)
                taken = budget.decide(confidence, starts, remaining, num_tokens=batch)
                budget.survival.observe(confidence, starts, taken, taken)
            total = int(taken.sum())
            budget.observe_step(batch + total, 1.0, drafted=total > 0, num_asked=batch, draft_seconds=1e-4)
            return total

        if max(step() for _ in range(20)) != K * batch:
            raise SystemExit("gate: verifying costs nothing, and not all draft tokens are verified")
        times = np.array(timeit.repeat(step, number=CALLS, repeat=REPEATS)) / CALLS * 1e6
        row = {"batch": batch, "k": K, "us_per_step": quantiles(times), "us_per_request": quantiles(times / batch)}
        append(args.out, {"benchmark": "budget/decision", **row, **about})
        print(f"{batch:5d}   {row['us_per_step']}   {row['us_per_request'][1]}", flush=True)


if __name__ == "__main__":
    main()
