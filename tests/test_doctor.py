"""`rollout-spec doctor`: what it says of an installation and of a run."""

from __future__ import annotations

import importlib
import importlib.metadata
import json

import numpy as np
import pytest

from rollout_spec import cli, doctor
from rollout_spec.budget import Budget
from rollout_spec.estimates import CONFIDENCE_LIMITS, MIN_OBSERVATIONS, Survival
from rollout_spec.replay.engine import read_cost
from rollout_spec.stats import SpeculationStats


def a_report(**changed):
    """A run of 10 steps of 64 requests that gained nothing, and of 100 steps of one that gained half."""
    stats, budget = SpeculationStats(), Budget()
    for _ in range(10):
        stats.record([0] * 64, [0] * 64)
        stats.record_time(0.02, num_requests=64, draft_tokens=0, tokens=64, reads_prompts=False)
        budget.observe_step(64, 0.018, drafted=False)
    for _ in range(100):
        stats.record([4], [1])
        stats.record_time(0.01, num_requests=1, draft_tokens=4, tokens=2, reads_prompts=False)
        budget.observe_step(5, 0.011, drafted=True, num_asked=1, draft_seconds=0.001)
        budget.survival.observe(np.full(4, 0.5, np.float32), np.array([0, 4]), np.array([4]), np.array([1]))
    for _ in range(MIN_OBSERVATIONS):
        budget.observe_step(1, 0.008, drafted=False)
    stats.record_time(1.0, num_requests=9, draft_tokens=0, tokens=9, reads_prompts=True)
    stats.forward_seconds, stats.verify_seconds, stats.draft_seconds = 1.2, 0.1, 0.22
    sources = {"own": [100, 30], "problem": [200, 70], "shared": [0, 0]}
    report = {"versions": {"vllm": "0.31.0"}, "device": "a GPU", "stats": stats.to_dict(), "sources": sources}
    return {**report, "budget": budget.to_dict(), **changed}


def test_phases_compare_each_size_of_step_with_the_same_tokens_without_drafts():
    many, one = doctor.phases(a_report())
    assert (many.requests, many.steps, many.tokens, many.slots) == (64, 10, 640, 0)
    assert many.without == pytest.approx(10 * 0.018)
    assert many.all_accepted == pytest.approx(many.seconds) == pytest.approx(0.2)
    assert (one.requests, one.steps, one.tokens, one.slots) == (1, 100, 200, 400)
    assert one.without == pytest.approx(200 * 0.008)
    assert one.all_accepted == pytest.approx(1.0 * 200 / 500)


def test_the_report_is_explained():
    text = doctor.explain(json.loads(json.dumps(a_report())))
    # Steps that read prompts are part of the time, and not of the phases.
    for line in (
        "target's forward pass     1.20  54.5 %",
        "scheduling and other     0.68  30.9 %",
        "problem     200  35.0 %",
        "1: 100.0 %",
        "off by 25.0 % on average",
        "Speculation saved 0.58 s: these steps were 1.48 times as fast as without it.",
        "all drafts accepted: 0.60 s less, 2.00 times as fast  <- the most",
        "83.3 % of the time fewer than 1 in 8",
    ):
        assert line in text, text
    assert "shared" not in text


def test_what_is_not_known_is_not_made_up():
    text = doctor.explain(a_report(budget=None))
    assert "?" in text
    assert "Calibration" not in text
    assert "Speculation saved" not in text
    assert "budget=False switches them off" in text
    empty = {**a_report(), "stats": SpeculationStats().to_dict()}
    assert doctor.explain(empty) == "Nothing has been generated yet."
    off = SpeculationStats(forward_seconds=3.0, verify_seconds=1.0)
    off.record([0], [0])
    assert "75.0 %" in doctor.explain({**a_report(), "stats": off.to_dict(), "budget": None, "sources": {}})


def test_the_measured_curve_can_be_replayed(tmp_path, capsys):
    path, curve = tmp_path / "report.json", tmp_path / "cost.json"
    path.write_text(json.dumps(a_report()))
    assert cli.main(["doctor", str(path), "--engine-cost", str(curve)]) == 0
    assert "Where the time of a step goes" in capsys.readouterr().out
    cost = read_cost(curve)
    assert cost.tokens.tolist() == [1, 64]
    assert cost.seconds == pytest.approx([0.008, 0.018])
    # 5 tokens took 10 ms without the drafter's work, where 5 tokens of requests would take 8.6.
    assert cost.drafted_seconds == pytest.approx(0.010 - (0.008 + 0.010 * 4 / 63))
    assert cost.draft_seconds == pytest.approx(0.22 / 740)


@pytest.mark.parametrize("content", ["{", "[]", '{"stats": {}}'])
def test_other_files_are_refused(tmp_path, capsys, content):
    path = tmp_path / "report.json"
    path.write_text(content)
    assert cli.main(["doctor", str(path)]) == 2
    assert "is no report" in capsys.readouterr().err


def test_too_few_sizes_are_no_curve(tmp_path, capsys):
    path = tmp_path / "report.json"
    for budget, message in ((None, "measures no costs"), (Budget().to_dict(), "fewer than two sizes")):
        path.write_text(json.dumps(a_report(budget=budget)))
        assert cli.main(["doctor", str(path), "--engine-cost", str(tmp_path / "cost.json")]) == 2
        assert message in capsys.readouterr().err


def test_bins_end_where_their_limits_say():
    for limit in CONFIDENCE_LIMITS[:-1]:
        survival = Survival()
        confidence = np.array([limit - 1e-4, limit + 1e-4], np.float32)
        survival.observe(confidence, np.array([0, 1, 2]), np.ones(2, int), np.ones(2, int))
        counted = np.flatnonzero(survival.reliability()[:, 0])
        assert next(CONFIDENCE_LIMITS[i] for i in counted) == limit
        assert counted.size == 2


def faults():
    return [line for sound, line in doctor.check_installation() if not sound]


def test_a_sound_installation(capsys):
    pytest.importorskip("vllm")
    assert faults() == []
    assert cli.main(["doctor"]) == 0
    assert "problem" not in capsys.readouterr().out


def test_faults_of_an_installation_are_found(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert any("must contain rollout_spec" in line for line in faults())
    monkeypatch.setenv("VLLM_PLUGINS", "other,rollout_spec")
    assert not any("VLLM_PLUGINS" in line for line in faults())
    original = importlib.import_module

    def broken(name, *args):
        if name == "vllm":
            raise ImportError("no such file")
        if name.startswith("transformers"):
            raise RuntimeError("operator torchvision::nms does not exist")
        return original(name, *args)

    monkeypatch.setattr(importlib, "import_module", broken)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    found = faults()
    assert any("vLLM cannot be imported" in line for line in found)
    assert any("pip uninstall torchvision" in line for line in found)
    assert any("entry point is missing" in line for line in found)
    assert cli.main(["doctor"]) == 1
    assert "problem" in capsys.readouterr().out
