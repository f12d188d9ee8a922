"""Runs pytest twice at the same time, as vLLM's V2 model runner needs processes of its own (tests/runners).

    python tests/both_runners.py [options of pytest]

What files and slow tests took is written to `.timings/v1.txt` and `.timings/v2.txt`. On two cores, three processes
run tests: some tests wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(".timings")
IN_ORDER = ("--dist", "loadfile", "--no-loadscope-reorder")  # that of `timings.longest_first`


def start(name: str, num_processes: int, *options: str, **arguments) -> subprocess.Popen:
    timings = FOLDER / f"{name}.txt"
    timings.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-n", str(num_processes), *IN_ORDER, "--timings", str(timings), *options]
    return subprocess.Popen(command, **arguments)


def main(*options: str) -> int:
    """The number of runs that failed. What V2 prints is shown at the end, and only if it has failed."""
    FOLDER.mkdir(exist_ok=True)
    log, environment = FOLDER / "v2.log", {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    with log.open("w") as output:
        v1 = start("v1", 2, *options)
        v2 = start("v2", 1, *options, "tests/runners", env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            failed = [run for run in (v1, v2) if run.wait()]
        except KeyboardInterrupt:  # which both have got, too
            failed = [run for run in (v1, v2) if run.wait()]
    if v2 in failed:
        print(f"\n{log}:\n\n{log.read_text()}")
    for name in ("v1", "v2"):
        timings = FOLDER / f"{name}.txt"
        print(f"{name}: {timings.read_text().splitlines()[0] if timings.exists() else 'pytest itself failed'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
