"""`experiments/gpu.sh` and what it falls back on, as far as they run without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from experiments.costs import bench_forward
from rollout_spec.replay.cost import read_cost

ROOT = Path(__file__).parents[2]


def run_stages(out, *stages):
    return subprocess.run(
        ["bash", "experiments/gpu.sh", str(out), *stages],
        cwd=ROOT, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="every stage would pass")
def test_a_failing_stage_stops_no_other_and_everything_is_kept(tmp_path):
    out = tmp_path / "results of a day"
    finished = run_stages(out, "device", "forward-tiny")
    assert finished.returncode == 1
    summary = (out / "summary.txt").read_text()
    assert [line.split()[:2] for line in summary.splitlines()] == [["device", "1"], ["forward-tiny", "ok"]]
    assert finished.stdout.endswith(f"== summary\n{summary}")
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {row["benchmark"] for row in rows} == {"forward"}
    with tarfile.open(out / "logs.tar.gz") as logs:
        assert b"needs a GPU" in logs.extractfile("logs/device.stderr").read()
    kept = ["cost-tiny.json", "logs.tar.gz", "results.jsonl", "summary.txt"]
    assert sorted(path.name for path in out.iterdir()) == kept


def test_unknown_stages_are_refused_before_any_runs(tmp_path):
    finished = run_stages(tmp_path / "out", "check", "phrase-7b")
    assert finished.returncode == 2
    assert "unknown stage phrase-7b" in finished.stderr
    assert not (tmp_path / "out/results.jsonl").exists()


def test_the_cost_of_steps_without_an_engine(tmp_path, capsys):
    cost, out = tmp_path / "cost.json", tmp_path / "rows.jsonl"
    bench_forward.main(
        ["--shape", "tiny", "--batch", "2", "--context", "8", "-k", "3", "--dtype", "float32", "--repeats", "2",
         "--cost", str(cost), "--out", str(out)]
    )  # fmt: skip
    curve = read_cost(cost)
    assert curve.tokens.tolist() == [2, 4, 6, 8]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [2, 4, 6, 8]
    assert all(row["step_ms"] > 0 and row["forward_ms"] > 0 for row in rows)
