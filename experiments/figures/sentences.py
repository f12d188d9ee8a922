"""The sentences of measurements in the docs that are made from rows."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.figures.tables import BENCHMARKS, Rows, newest, read


@dataclass(frozen=True)
class Said:
    """Sentences that a page must have, however its lines are broken. `rows` as in `Table`."""

    page: str
    text: str
    rows: Rows


def kilobytes(slope: list[float]) -> str:
    """A slope in bytes and its error."""
    digits = 0 if abs(slope[0]) > 2000 else 1
    return f"{slope[0] / 1e3:.{digits}f} ± {slope[1] / 1e3:.{digits}f}"


def sentences() -> list[Said]:
    """All of them."""
    demos = sorted(newest(read("bench_demo")), key=lambda row: row["generation_speedup"])
    median = demos[len(demos) // 2]
    speedups = [f"{row['generation_speedup']:.2f}" for row in (demos[0], demos[-1])]
    same, total = (sum(row[name] for row in demos) for name in ("rollouts_identical", "rollouts_total"))
    error = max(row["max_logprob_error"] for row in demos)
    run = read("real_policy/run_features", benchmark="real_policy/run")[-1]
    soak = read("soak")
    rollouts, steps = (sum(row[name] for row in soak) for name in ("rollouts_compared", "steps"))
    assert not any(row["wrong"] for row in soak)
    of_v2 = sum(row["steps"] for row in soak if row["kind"] in ("device", "v2"))
    slopes = next(row["slopes_per_round"] for row in soak if row["kind"] == "colocated")
    grown = [kilobytes(slopes[whose][life]) for life in (1, 2) for whose in ("memory", "reference_memory")]
    return [
        Said(
            BENCHMARKS,
            f"In {len(demos)} runs {same:,} of {total:,} rollouts are identical with speculation on and off. "
            f"Generation is {median['generation_speedup']:.2f} times as fast as stock vLLM in the median run, "
            f"{speedups[0]} to {speedups[1]} in all, and {median['generation_speedup_own_off']:.2f} times as our "
            f"engine without drafts, with {median['mean_acceptance_length']:.2f} tokens per drafted step; the first "
            f"step is left out. Log-probabilities differ from the trainer's by at most {error:.1e}.",
            demos,
        ),
        Said(
            BENCHMARKS,
            f"{run['identical']} of {run['rollouts']} rollouts are identical; log-probabilities differ from a float32 "
            f"pass of the trainer's weights by at most {run['max_logprob_error']:.1e}. Generation was "
            f"{run['stock_over_on_per_token']:.2f} times as fast per token as with stock vLLM, and "
            f"{run['off_over_on']:.2f} times as with our engine without drafts.",
            [run],
        ),
        Said(
            "docs/guarantees.md",
            f"In {sum(row['minutes'] for row in soak):.0f} minutes with V1, V2, the device drafter, model drafters, a "
            f"server and two ranks, none of {rollouts:,} rollouts ({steps:,} steps) differed from an engine with "
            f"`speculation=False`. V2's engines, whose kernels were emulated, took {of_v2:,} of these steps. Over 200 "
            f"rounds and more, memory of an engine in V1 changed by {grown[0]} kB per round with a folder and by "
            f"{grown[2]} without, that of the engine without speculation beside it by {grown[1]} and {grown[3]}.",
            soak,
        ),
    ]
