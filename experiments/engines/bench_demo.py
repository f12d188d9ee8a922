"""The demo several times over: how much its figures vary from run to run.

    python -m experiments.engines.bench_demo [--runs 3] [--keep]

Runs `python -m examples.demo --own-off` with one seed and one warm-started policy: rollouts are the same, while times,
and with them how much is drafted, differ. A row per run is appended to `experiments/results/bench_demo.jsonl`. `--keep`
makes the median run's report and picture those of the docs.

Gate: all rollouts are identical with speculation on and off.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.engines.build import ROOT
from experiments.rows import RESULTS, append, origin

KEPT = {"report.json": RESULTS / "demo_cpu.json", "report.png": RESULTS / "demo_cpu.png"}
FIGURES = (
    "generation_speedup", "generation_speedup_per_token", "generation_speedup_own_off", "generation_seconds",
    "generation_tokens", "mean_acceptance_length", "max_logprob_error", "rollouts_identical", "rollouts_total",
)  # fmt: skip


def main() -> None:
    """Run, append rows, and print the median and the range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="the median run's report and picture, for the docs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "demo")
        found: list[tuple[float, Path]] = []
        for run in range(args.runs):
            command = [sys.executable, "-m", "examples.demo", "--own-off", "--out", str(out)]
            subprocess.run(command, check=True, cwd=ROOT)
            kept = Path(shutil.copytree(out, Path(temporary, f"run{run}")))
            report: dict[str, Any] = json.loads((kept / "report.json").read_text())
            if report["rollouts_identical"] != report["rollouts_total"]:
                raise SystemExit(f"gate: {report['rollouts_identical']} of {report['rollouts_total']} are identical")
            row = {"benchmark": "demo", "run": run, **{name: report[name] for name in FIGURES}, **origin()}
            append(RESULTS / "bench_demo.jsonl", row)
            found.append((report["generation_speedup"], kept))
        found.sort()
        median, folder = found[len(found) // 2]
        print(f"stock / on: median {median:.2f}, {found[0][0]:.2f} to {found[-1][0]:.2f} in {len(found)} runs")
        if args.keep:
            for name, place in KEPT.items():
                shutil.copy(folder / name, place)


if __name__ == "__main__":
    main()
