"""`experiments/gpu.sh` and what it falls back on, as far as they run without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from experiments.costs import bench_forward
from rollout_spec.replay.cost import read_cost
from tests.conftest import environment_for_a_process

ROOT = Path(__file__).parents[2]
ROLLOUTS = ROOT / "experiments/results/real_policy/samples-step0040-t1.parquet"  # tokens that the tiny model has
STAND_IN = {
    "PYTHONPATH": str(ROOT / "tests/gpu_stand_in"), "VLLM_USE_V2_MODEL_RUNNER": "1", "SHAPE": "tiny",
    "ROLLOUTS": str(ROLLOUTS),
}  # fmt: skip
DEVICE, HOST = ("device", "device-words"), ("budget", "budget-words")
OF_SECOND = ("none", "device", "budget", "device-words", "budget-words")


def run_stages(out, *stages, **variables):
    return subprocess.run(
        ["bash", "experiments/gpu.sh", str(out), *stages],
        cwd=ROOT, env=environment_for_a_process(**{"PYTHON": sys.executable, **variables}), capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def summary_of(out):
    """(stage, verdict) of each line."""
    return [tuple(line.split()[:2]) for line in (out / "summary.txt").read_text().splitlines()]


def rows_of(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.mark.exhaustive
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run there, in sizes that say nothing")
def test_all_that_a_gpu_is_asked_runs_where_kernels_are_emulated(tmp_path):
    """Both groups of stages with a tiny model: arguments, every engine's configuration, and every row."""
    pytest.importorskip("vllm")
    pytest.importorskip("pyarrow")
    out = tmp_path / "out"
    finished = run_stages(out, "first", "second", LIMIT="3000", **STAND_IN)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    second = f"phase-tiny:{','.join(OF_SECOND)}"
    stages = ["check", "doctor", "start-tiny", "device", "device-words", "verify", second]
    assert summary_of(out) == [(stage, "ok") for stage in stages]
    assert "ok       the device drafter" in finished.stdout
    rows = rows_of(out)
    assert [row["benchmark"] for row in rows] == [
        "check_gpu",
        *["phase"] * 6,
        *["device"] * 2,
        *["verify"] * 2,
        *["phase"] * 10,
    ]
    phases = [row for row in rows if row["benchmark"] == "phase"]
    modes = ["device", "budget", "none", *OF_SECOND]
    assert [(row["mode"], row["phase"]) for row in phases] == [(m, p) for m in modes for p in ("first", "history")]
    for row in phases:
        assert row["runner"] == "vllm.v1.worker.cpu.model_runner"  # V2's
        assert row["async_scheduling"] == (row["mode"] not in HOST)
        assert (row.get("acceptance_rate") is not None) == (row["mode"] in (*HOST, *DEVICE))
        assert (row.get("host_us") is not None) == (row["mode"] in HOST)
    for row in phases[6:]:
        assert row["times_as_fast"] > 0


def pretend_python(tmp_path, script):
    """An interpreter for whole stages: a shell script, whose arguments are those of Python."""
    path = tmp_path / "python"
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_a_slow_stage_takes_no_other_stages_time(tmp_path):
    python = pretend_python(tmp_path, 'echo "$*"; [[ $2 != experiments.check_gpu ]] || sleep 100')
    out = tmp_path / "out"
    finished = run_stages(out, "check", "verify", LIMIT="12", PYTHON=python)
    assert finished.returncode == 1
    assert summary_of(out) == [("check", "time"), ("verify", "ok")]
    first, second = map(int, re.findall(r"^== \w+, at most (\d+) s$", finished.stdout, re.MULTILINE))
    assert first <= 12 * 130 // 210  # less where a second or more has passed before the first stage
    assert first + second <= 12


def test_what_is_not_reached_in_time_is_said(tmp_path):
    out = tmp_path / "out"
    finished = run_stages(out, "second", "verify", LIMIT="4", PYTHON=pretend_python(tmp_path, "exit 0"))
    assert finished.returncode == 1
    assert [verdict for _, verdict in summary_of(out)] == ["-", "-"]
    assert finished.stdout.count("not run: the time is over") == 2


@pytest.mark.parametrize(
    ("group", "modes", "batches"),
    [
        ("first", "device budget none", "1 64"),
        ("second", " ".join(OF_SECOND), "64 256"),
    ],
)
def test_what_a_group_asks_of_engines(tmp_path, group, modes, batches):
    python = pretend_python(tmp_path, 'echo "$VLLM_GPU_SYNC_CHECK $*"')
    finished = run_stages(tmp_path / "out", group, PYTHON=python)
    assert finished.returncode == 0, finished.stderr
    (phase,) = [line for line in finished.stdout.splitlines() if "-m experiments.engines.bench_phase" in line][:1]
    more = " --max-seqs 256" if group == "first" else ""
    assert f"--shape 1.5b{more} --modes {modes} --batch {batches} --out" in phase
    assert "--rollouts" not in phase  # those in the repository
    assert phase.startswith("warn " if group == "first" else " ")
    limits = [int(limit) for limit in re.findall(r", at most (\d+) s$", finished.stdout, re.MULTILINE)]
    assert f"--seconds {limits[2 if group == 'first' else 0] - 5} " in phase
    assert max(limits) <= 560


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="every stage would pass")
def test_a_failing_stage_stops_no_other_and_everything_is_kept(tmp_path):
    out = tmp_path / "results of a day"
    finished = run_stages(out, "device", "forward-tiny")
    assert finished.returncode == 1
    assert summary_of(out) == [("device", "1"), ("forward-tiny", "ok")]
    summary = (out / "summary.txt").read_text()
    assert "needs a GPU" in summary
    assert finished.stdout.endswith(f"== summary\n{summary}")
    assert {row["benchmark"] for row in rows_of(out)} == {"forward"}
    with tarfile.open(out / "logs.tar.gz") as logs:
        assert b"needs a GPU" in logs.extractfile("logs/device.stderr").read()
    kept = ["cost-tiny.json", "logs.tar.gz", "results.jsonl", "summary.txt"]
    assert sorted(path.name for path in out.iterdir()) == kept


def test_unknown_stages_are_refused_before_any_runs(tmp_path):
    for stages, error in (
        (("check", "phrase-7b"), "unknown stage phrase-7b"),
        (("check:none",), "unknown"),
        ((), "usage"),
    ):
        finished = run_stages(tmp_path / "out", *stages)
        assert finished.returncode == 2
        assert error in finished.stderr
        assert not (tmp_path / "out/results.jsonl").exists()


def test_the_cost_of_steps_without_an_engine(tmp_path, capsys):
    cost, out = tmp_path / "cost.json", tmp_path / "results.jsonl"
    bench_forward.main(
        ["--shape", "tiny", "--batch", "2", "--context", "8", "-k", "3", "--dtype", "float32", "--repeats", "2",
         "--cost", str(cost), "--out", str(out)]
    )  # fmt: skip
    curve = read_cost(cost)
    assert curve.tokens.tolist() == [2, 4, 6, 8]
    rows = rows_of(tmp_path)
    assert [row["tokens"] for row in rows] == [2, 4, 6, 8]
    assert all(row["step_ms"] > 0 and row["forward_ms"] > 0 for row in rows)
