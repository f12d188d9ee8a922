"""The sentences of measurements in the docs that are made from rows."""

from __future__ import annotations

from experiments.figures.tables import BENCHMARKS, read


def sentences() -> list[tuple[str, str]]:
    """(page, sentences that it must have, however its lines are broken)."""
    demos = sorted(read("bench_demo"), key=lambda row: row["generation_speedup"])
    median = demos[len(demos) // 2]
    speedups = [f"{row['generation_speedup']:.2f}" for row in (demos[0], demos[-1])]
    run = read("real_policy/run_features", benchmark="real_policy/run")[-1]
    soak = read("soak")
    rollouts, steps = (sum(row[name] for row in soak) for name in ("rollouts_compared", "steps"))
    assert not any(row["wrong"] for row in soak)
    of_v2 = sum(row["steps"] for row in soak if row["kind"] in ("device", "v2"))
    slopes = next(row["slopes_per_round"] for row in soak if row["kind"] == "colocated")
    grown = [
        f"{slopes[whose][life][0] / 1e3:.0f} ± {slopes[whose][life][1] / 1e3:.0f}"
        for life in (1, 2)
        for whose in ("memory", "reference_memory")
    ]
    return [
        (
            BENCHMARKS,
            f"{median['rollouts_identical']} of {median['rollouts_total']} rollouts are identical with speculation on "
            f"and off. Generation is {median['generation_speedup']:.2f} times as fast as stock vLLM, {speedups[0]} to "
            f"{speedups[1]} in {len(demos)} runs, and {median['generation_speedup_own_off']:.2f} times as our engine "
            f"without drafts, with {median['mean_acceptance_length']:.2f} tokens per drafted step. Log-probabilities "
            f"differ from the trainer's by at most {median['max_logprob_error']:.1e}.",
        ),
        (
            BENCHMARKS,
            f"{run['identical']} of {run['rollouts']} rollouts are identical; log-probabilities differ from a float32 "
            f"pass of the trainer's weights by at most {run['max_logprob_error']:.1e}. Generation was "
            f"{run['stock_over_on_per_token']:.2f} times as fast per token as with stock vLLM, and "
            f"{run['off_over_on']:.2f} times as with our engine without drafts.",
        ),
        (
            "docs/guarantees.md",
            f"In {sum(row['minutes'] for row in soak):.0f} minutes with V1, V2, the device drafter, model drafters, a "
            f"server and two ranks, none of {rollouts:,} rollouts ({steps:,} steps) differed from an engine with "
            f"`speculation=False`. V2's engines, whose kernels were emulated, took {of_v2:,} of these steps. In over "
            f"200 rounds each an engine in V1 grew by {grown[0]} kB per round with a folder and by {grown[2]} without, "
            f"the engine without speculation beside it by {grown[1]} and {grown[3]}.",
        ),
    ]
