"""Recorded rollouts, said again by an engine with made-up weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("pyarrow")

from experiments.engines import bench_phase, build
from rollout_spec.replay.traces import Problem, Rollout

ROLLOUTS = Path(__file__).parents[2] / "experiments/results/real_policy/samples-step0040-t1.parquet"


def rollout(*tokens):
    return Rollout(0, 0, np.array([1], np.int32), np.array(tokens, np.int32), (len(tokens),))


def test_the_end_token_ends_rollouts_and_occurs_nowhere_else():
    assert bench_phase.end_token([rollout(5, 6, 2), rollout(7, 2), rollout(2)]) == 2
    assert bench_phase.end_token([rollout(5, 2, 6), rollout(6, 2)]) == -1
    assert bench_phase.end_token([rollout(5, 2, 6), rollout(6, 2), rollout(9, 7)]) == 7


def test_the_phases_of_a_batch_size_have_the_same_problems_and_different_rollouts():
    problems = [Problem(str(p), [rollout(p, s) for s in range(20)]) for p in range(4)]
    first, second = (bench_phase.Phase(problems, 12, number) for number in range(2))
    assert first.problems == second.problems
    assert [r.tokens.tolist() for r in first.rollouts] == [[p, s] for p in (0, 1) for s in range(8)][:12]
    assert [r.tokens.tolist() for r in second.rollouts] == [[p, s] for p in (0, 1) for s in range(8, 16)][:12]
    assert not set(first.problems) & set(bench_phase.Phase(problems, 4, 0).problems)
    many = bench_phase.Phase(problems, 40, 1)  # ten of each
    assert many.rollouts[0].tokens.tolist() == [0, 10]
    with pytest.raises(ValueError, match="24 rollouts of each"):
        bench_phase.Phase(problems, 48, 1)


def test_partings():
    assert bench_phase.partings([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 9]]) == (1, 1.0)
    assert bench_phase.partings([[1]], [[1]]) == (0, None)


@pytest.mark.exhaustive
@pytest.mark.engine
@pytest.mark.slow
def test_modes_run_and_say_what_was_recorded(tmp_path, monkeypatch, capsys):
    """The gate is in the script: an engine that says anything else fails."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out, modes = tmp_path / "rows.jsonl", ["none", "all", "eagle-stock", "eagle-history"]
    bench_phase.main(
        ["--shape", "tiny", "--rollouts", str(ROLLOUTS), "--batch", "1", "6", "--max-seqs", "4", "--dtype", "float32",
         "--eager", "--again", "--modes", *modes, "--logs", str(tmp_path / "logs"), "--out", str(out)]
    )  # fmt: skip
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["mode"], row["batch"], row["phase"]) for row in rows] == [
        (mode, batch, phase) for mode in modes for batch in (1, 6) for phase in ("first", "history")
    ]
    for row in rows:
        assert row["seconds"] > row["tail_seconds"] >= 0
        assert row["times_as_fast"] == 1 or row["mode"] != "none"
        assert row["steps_without_graph"] == 1
    assert rows[0]["tokens_per_step"] == rows[3]["tokens_per_step"] == 1
    first, history = rows[6:8]
    assert history["tokens_per_step"] > 2 * first["tokens_per_step"] > 2  # the same rollouts again
    assert history["host_us"] > 0
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {f"phase_tiny_{mode}.log" for mode in modes}
    assert "history  all" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.engine
@pytest.mark.slow
def test_free_rollouts_are_those_without_drafts(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out = tmp_path / "rows.jsonl"
    arguments = ["--shape", "tiny", "--rollouts", str(ROLLOUTS), "--batch", "6", "--dtype", "float32", "--eager"]
    bench_phase.main([*arguments, "--free", "--modes", "off", "budget", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.get("parted") for row in rows] == [None, None, 0, 0]
    assert rows[3]["report"]["budget"]["undrafted"][0]
    assert all(len(row["step_ms"]) == 3 for row in rows)
    with pytest.raises(SystemExit):
        bench_phase.main([*arguments, "--free", "--modes", "none"])


def test_a_run_that_fails_leaves_its_log_and_the_others_run(tmp_path, capsys):
    runs = build.Runs("no.such.module", ["--seed", "0"], tmp_path / "logs")
    assert runs.run("first") is None
    assert runs.run("second") is None
    assert "does not run (1)" in capsys.readouterr().out
    assert "No module named" in (tmp_path / "logs" / "first.log").read_text()
    with pytest.raises(SystemExit, match="failed: first, second"):
        runs.finish()


def test_what_a_run_wrote_before_it_failed_is_kept(tmp_path, monkeypatch, capsys):
    (tmp_path / "ends_early.py").write_text(
        "import pathlib, sys\nfrom experiments.engines.build import write_result\n"
        "write_result(pathlib.Path(sys.argv[-1]), ['a row'])\nraise SystemExit('out of memory')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    runs = build.Runs("ends_early", [], None)
    assert runs.run("a mode") == ["a row"]
    assert "stopped early (1): ['out of memory']" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="failed: a mode"):
        runs.finish()


@pytest.mark.parametrize(
    ("mode", "base", "of_drafter"),
    [
        ("budget", "budget", {"max_history_versions": 1}),
        ("budget-words", "budget", {"features": False, "max_history_versions": 1}),
        ("device", "device", {}),
        ("device-words", "device", {"features": False}),
    ],
)
def test_engines_have_features_except_in_modes_of_words_alone(mode, base, of_drafter, monkeypatch):
    monkeypatch.setattr(bench_phase, "build_engine", lambda model, mode, k, **arguments: (mode, arguments["options"]))
    args = argparse.Namespace(model="folder", k=8, dtype="float32", eager=True)
    assert bench_phase.build(args, mode, False) == (base, {"verify": "rejection", "drafter_options": of_drafter})
    assert mode in bench_phase.SEEDED


def test_the_recording_in_the_repository_has_two_policies_rollouts_of_every_problem():
    recorded = bench_phase.read_recorded(str(bench_phase.ROLLOUTS))
    assert [size for size in (1, 8, 64, 256) if bench_phase.fits(recorded, size)] == [1, 8, 64, 256]
    epochs = [{r.epoch for r in bench_phase.Phase(recorded, 256, number).rollouts} for number in range(2)]
    assert epochs == [{0}, {1}]
    rollouts = [rollout for problem in recorded for rollout in problem.rollouts]
    assert max(int(rollout.tokens.max()) for rollout in rollouts) < build.SHAPES["1.5b"][-1]
    assert bench_phase.end_token(rollouts) == 128_002


def test_batch_sizes_for_which_there_are_too_few_rollouts_are_left_out(capsys):
    recorded = bench_phase.read_recorded(str(ROLLOUTS))
    assert [size for size in (1, 8, 64, 256, 512) if bench_phase.fits(recorded, size)] == [1, 8, 64, 256]
    assert "batch 512: left out" in capsys.readouterr().out


def test_nothing_is_started_that_could_not_end_in_time(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    runs = build.Runs("no.such.module", [], None, seconds=100)

    def start(name, arguments, environment, left):
        assert (name, arguments, left) == ("first", ("--only", "none"), 100)
        now[0] = 60.0
        return {}, True

    monkeypatch.setattr(runs, "_start", start)
    assert runs.run("first", "--only", "none") == {}
    assert runs.run("second") is None
    runs.finish()
    assert capsys.readouterr().out == ("second: not run, only 40 s are left\nnot run for want of time: second\n")
