"""The phases of `bench_phase`, simulated. Takes no GPU.

    python -m experiments.costs.beside_phases [experiments/results/bench_phase.jsonl] [--out FILE]
    python -m experiments.costs.beside_phases --further-ms 0.4 1.2 1.7 [--batch 16 64 256] [--out FILE]

The first prints what was measured on a GPU beside what is simulated, for the modes `none` and `device`, with vLLM's
adaptive verification: seconds, steps, tokens per request and step.

The second has n forward passes for each step of the scheduler of an H100: some n, and the one that is chosen.
Modes are `none`, vLLM without speculation, and `device`, with as few calls as today; a further pass takes the host so
many milliseconds and 17 us per request. By epoch: seconds, times as fast as `none` with n = 1, the mean n of steps, and
the share of requests in passes that had ended. With `--max-seqs` the other rollouts wait for a place. `--noise`: the
standard deviation of the logarithm of what it hears of a step's time.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.engines.bench_phase import PHASES, ROLLOUTS, Phase, read_recorded
from experiments.rows import RESULTS, append, make_parser, origin
from rollout_spec.drafters import build_drafter
from rollout_spec.estimate.costs import PEAKS, SHAPES, UNIT_COST, EngineCost, measured_by_vllm, step_cost
from rollout_spec.estimate.phases import Engine, RecordedRollout, Step, simulate
from rollout_spec.num_passes import NumPasses
from rollout_spec.schedule import LARGEST_CUT

MEASURED = "none", "device"
K, GPU, PASSES = 8, "h100", (1, 2, 4, "auto")


class WithHost(EngineCost):
    """What older engines knew: drafts are free in most of the host's time."""

    def steps(self, num_tokens: Any) -> np.ndarray:
        """As of `EngineCost`, of a step with 0, 1, ... draft tokens."""
        device, host = super().steps(num_tokens), 0.9 * self.host(int(num_tokens[0]))
        return np.where(num_tokens > LARGEST_CUT, device + host, np.maximum(device, host))


class NoisyPasses(NumPasses):
    """Hears of times with noise."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise, self.rng = noise, np.random.default_rng(0)

    def observe(self, num_requests: int, has_drafts: bool, num_passes: int, seconds: float) -> None:
        """As of `NumPasses`."""
        super().observe(num_requests, has_drafts, num_passes, seconds * np.exp(self.rng.normal(0, self.noise)))


@cache
def phases_of(source: str, batch: int) -> list[list[RecordedRollout]]:
    """The rollouts of each phase; of the first alone where there are not enough."""
    recorded = read_recorded(source)
    phases = [Phase(recorded, batch, n) for n in range(1 + (2 * batch <= sum(map(len, recorded))))]
    return [[r._replace(problem_id=p) for r, p in zip(o.rollouts, o.problems, strict=True)] for o in phases]


@cache
def simulated(
    shape: str, gpu: str, mode: str, batch: int, k: int, further_ms: float | None = None, *, slots: int = 0,
    passes: int | str | None = None, noise: float = 0.0, source: str = str(ROLLOUTS),
) -> list[list[Step]]:  # fmt: skip
    """The passes of each phase, of which the second one has the first one's history. See `step_cost`."""
    further, slots, is_device = None if further_ms is None else further_ms / 1e3, slots or batch, mode == "device"
    drafter = build_drafter("history" if is_device else "ngram", max_draft_tokens=k, min_survival=0.0)
    engine = Engine(UNIT_COST, k, [(1, 1, k * is_device)], passes=NoisyPasses(noise) if passes == "auto" else passes)
    if is_device:
        engine.known = measured_by_vllm(SHAPES[shape], gpu)
        if further is None:
            host = step_cost(SHAPES[shape], gpu, "device", further_pass=None).host_seconds
            engine.known = WithHost(*engine.known._replace(host_seconds=host))
    found = []
    for rollouts in phases_of(source, batch):
        context = float(np.mean([rollout.mean_context for rollout in rollouts]))
        place = "device" if is_device else None
        engine.cost = step_cost(SHAPES[shape], gpu, place, context=context, further_pass=further)
        found.append(list(simulate(rollouts, drafter, engine, batch=slots)))
    return found


def figures(steps: list[Step], num_rollouts: int) -> dict[str, Any]:
    """As `bench_phase` counts them."""
    tokens = (steps[-1].tokens - num_rollouts) / sum(step.num_requests for step in steps)
    seconds = round(sum(step.seconds for step in steps), 2)
    return {"seconds": seconds, "steps": len(steps), "tokens_per_step": round(tokens, 3)}


def several_passes(phases: list[list[Step]], stock: list[list[Step]]) -> dict[str, list[float]]:
    """By phase: seconds, times as fast as stock, mean number of passes, and the share of requests that had ended."""
    seconds = [[sum(step.seconds for step in steps) for steps in of_mode] for of_mode in (phases, stock)]
    wasted = [sum(step.num_wasted for step in steps) for steps in phases]
    live = [sum(step.num_requests for step in steps) for steps in phases]
    return {
        "seconds": [round(s, 3) for s in seconds[0]],
        "times": [round(other / s, 3) for s, other in zip(*seconds, strict=True)],
        "mean_passes": [round(len(steps) / sum(1 / step.num_passes for step in steps), 2) for steps in phases],
        "wasted": [round(w / (w + n), 4) for w, n in zip(wasted, live, strict=True)],
    }


def main() -> None:
    """Print a line for each row."""
    parser = make_parser(__doc__)
    parser.add_argument("rows", nargs="?", type=Path, default=RESULTS / "bench_phase.jsonl")
    parser.add_argument("--further-ms", nargs="+", type=float)
    parser.add_argument("--shapes", nargs="+", default=["0.5b", "1.5b", "7b", "30b-a3b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--max-seqs", type=int, default=256)
    parser.add_argument("--modes", nargs="+", default=MEASURED)
    parser.add_argument("--noise", nargs="+", type=float, default=[0.0])
    parser.add_argument("--rollouts", default=str(ROLLOUTS))
    args = parser.parse_args()
    about: dict[str, Any] = {"benchmark": "phases/sub_steps", "gpu": GPU, "k": K, "rollouts": Path(args.rollouts).name}
    for shape, batch, mode in product(args.shapes, args.batch, args.modes) if args.further_ms else ():
        sizes = {"slots": min(batch, args.max_seqs), "source": args.rollouts}
        stock = simulated(shape, GPU, "none", batch, K, 0.0, passes=1, **sizes)
        for ms, n, noise in dict.fromkeys(
            (ms if n != 1 else 0.0, n, noise if n == "auto" else 0.0)
            for ms, n, noise in product(args.further_ms, PASSES, args.noise)
        ):
            steps = simulated(shape, GPU, mode, batch, K, ms, passes=n, noise=noise, **sizes)
            cell = {"shape": shape, "requests": batch, "max_seqs": sizes["slots"], "mode": mode, "further_ms": ms,
                    "passes": n, "noise": noise, **several_passes(steps, stock)}  # fmt: skip
            print(*cell.values(), flush=True)
            append(args.out, {**about, **cell, **origin("simulated GPU, estimates")})
    for row in map(json.loads, args.rows.read_text().splitlines() if not args.further_ms else ()):
        if (row["benchmark"], row.get("rollouts")) != ("phase", ROLLOUTS.name):
            continue
        gpu = next((name for name in PEAKS if name in row["device"].lower()), None)
        if row["mode"] not in MEASURED or gpu is None:
            continue
        n = ("auto" if row["mode"] == "device" else 1) if "passes_per_step" in row else None  # else an older engine
        phases = simulated(row["shape"], gpu, row["mode"], row["batch"], row["k"], n and 1.7, passes=n)
        steps = phases[PHASES.index(row["phase"])]
        said, cell = figures(steps, row["batch"]), {name: row[name] for name in ("shape", "batch", "phase", "mode")}
        measured = {name: row[name] for name in said}
        print(cell, "measured", measured, "simulated", said, flush=True)
        append(args.out, {"benchmark": "modes/phases", "gpu": gpu, **cell, "measured": measured, "simulated": said,
                          **origin("simulated GPU, estimates")})  # fmt: skip


if __name__ == "__main__":
    main()
