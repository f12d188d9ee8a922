"""Runs pytest twice at the same time, as vLLM's V2 model runner needs processes of its own (tests/runners).

    python tests/both_runners.py [options of pytest]

On two cores, four processes run tests: some tests wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LOG = Path(".v2.log")
IN_ORDER = ("--dist", "loadfile", "--no-loadscope-reorder")  # that of `tests/conftest.py`


def start(num_processes: int, *options: str, **arguments) -> subprocess.Popen:
    command = [sys.executable, "-m", "pytest", "-n", str(num_processes), *IN_ORDER, "--durations=20", *options]
    return subprocess.Popen(command, **arguments)


def main(*options: str) -> int:
    """The number of runs that failed. What V2 prints is shown at the end, and only if it has failed."""
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    with LOG.open("w") as output:
        v1 = start(2, *options)
        v2 = start(2, *options, "tests/runners", env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            failed = [run for run in (v1, v2) if run.wait()]
        except KeyboardInterrupt:  # which both have got, too
            failed = [run for run in (v1, v2) if run.wait()]
    said = LOG.read_text()
    print(f"\nV2:\n\n{said}" if v2 in failed else f"V2: {said.strip().rpartition(chr(10))[2]}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
