"""`rollout-spec doctor`: what it says of a run and of an installation."""

import importlib.metadata
import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from rollout_spec import RolloutSpecConfig, cli, doctor
from rollout_spec.doctor import look_around
from rollout_spec.integrations.trainers.comparison import Measured
from rollout_spec.integrations.vllm import commands
from rollout_spec.report import advice, explain, summary
from rollout_spec.stats import SpeculationStats


def a_report(**changed):
    """A run of 10 steps of 64 requests without drafts, and of 100 steps of one with them."""
    stats = SpeculationStats()
    session = SimpleNamespace(
        budget=object(),
        choice=SimpleNamespace(model_counts=lambda: (200, 70)),
        history_summary=lambda: {"requests": 40, "requests_with_history": 30},
        memory_bytes=lambda: 1000,
        engine_history=None,
    )
    for _ in range(10):
        stats.record([0] * 64, [0] * 64)
    for _ in range(100):
        stats.record([4], [1])
    config = RolloutSpecConfig(num_speculative_tokens=4)
    engine = SimpleNamespace(config=config, session=session, stats=stats, is_cutting=False, most_passes=1)
    return {**json.loads(json.dumps(commands.report(engine))), **changed}


def page(report):
    return " ".join(explain(report).split())


def test_a_run_is_explained_on_one_page():
    text = page(a_report(global_step=7, num_processes=4))
    for line in (
        "up to step 7, process 1 of 4 840 tokens in 110 steps: 1.14 tokens per request and step, ",
        "25.0% of 400 drafted tokens accepted Model drafter: 35.0% of the tokens that the target reached were right",
        "position tokens accepted 1 100 100.0% 2 100 0.0%",
    ):
        assert line in text
    assert text.endswith("What to do - Generate more: 110 steps are too few to judge by, 200 are the least.")


def test_what_is_not_known_is_not_made_up():
    assert summary(a_report(stats=SpeculationStats(drafter_errors=1).to_dict())).endswith("is off, no draft verified")
    assert explain(a_report(stats=SpeculationStats().to_dict())) == "Nothing has been generated yet."
    undrafted = SpeculationStats()
    undrafted.record([0], [0])
    text = page(a_report(stats=undrafted.to_dict(), model_drafter=None))
    assert "no draft verified What to do" in text, "there are no tables"
    for interval, said in (((None, None), ""), ((1.2, 1.9), " (1.20 to 1.90)")):
        assert summary(a_report(measured=measured(1.5, *interval))).startswith(f"1.50 times as fast{said} with drafts")


# -- what to do --------------------------------------------------------------------------------------------------------


def long_run(accepted=(150, 120, 90, 80), **changed):
    """1,000 steps, and so many of 200 drafts of 4 tokens that were right up to each position."""
    report = a_report(**changed)
    report["stats"] |= {"steps": 1000, "drafted_per_position": [200] * 4, "accepted_per_position": list(accepted)}
    return report


def measured(speedup, low, high):
    return Measured(speedup, low, high, generations=20)._asdict()


def without_drafts():
    """A long run in which nothing was verified."""
    report = long_run()
    report["stats"] |= {"draft_tokens": 0, "drafted_per_position": [], "accepted_per_position": []}
    return report


NEW = {"requests": 300, "requests_with_history": 12, "folder": {}}
KNOWN = {"requests": 300, "requests_with_history": 290, "folder": {}}


@pytest.mark.parametrize(
    ("report", "words", "said"),
    [
        (a_report(), "Generate", "110 steps are too few"),
        (a_report(stats={**a_report()["stats"], "drafter_errors": 1}), "Look", "exception in the log"),
        (a_report(num_speculative_tokens=0), "This", "does not speculate"),
        (long_run(), "", ""),
        (without_drafts(), "No", "none was found, none was worth"),
        (long_run(measured=measured(0.8, 0.7, 0.9)), "Set", "speculation=False: generations were 0.80 times as fast"),
        (long_run(measured=measured(0.8, 0.6, 1.1)), "", ""),
        (long_run(history=NEW), "Wait Group Set", "only 12 of 300 requests"),
        (long_run(history=KNOWN, global_step=3, num_processes=4), "Set", ""),
        (long_run((150, 40, 10, 2), has_budget=False), "Lower", "to 2: 50.0% of the verified tokens"),
        (long_run((150, 40, 10, 2)), "", ""),  # the budget verifies only what pays
        (long_run((180, 170, 160, 150)), "Raise", "to 8: 75.0% of 200 drafts of 4"),
        (long_run(model_drafter=(2000, 19)), "Load", "the model drafter's weights"),
        (long_run(model_drafter=(2000, 20)), "", ""),
    ],
)
def test_advice(report, words, said):
    lines = list(advice(report))
    assert [line.split()[0] for line in lines] == words.split()
    assert said in "".join(lines)
    if not lines:
        assert explain(report).endswith("\n\nWhat to do\n  - Nothing: leave it as it is.")


# -- where reports come from -------------------------------------------------------------------------------------------


def asked(capsys, *arguments):
    """(exit code, what was printed, what was said on stderr)"""
    status = cli.main(["doctor", *map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize("content", [a_report(), {"results": [a_report(), a_report()]}, a_report(progress={}, ages={})])
def test_reports_are_read_as_trainers_and_servers_write_them(tmp_path, capsys, content):
    """A trainer's folder stands for the report in it; a server answers with one for each rank."""
    assert asked(capsys, tmp_path)[0] == 2
    (tmp_path / "rollout_spec.json").write_text(json.dumps(content))
    for path in (tmp_path, tmp_path / "rollout_spec.json"):
        assert asked(capsys, path) == (0, f"{explain(a_report())}\n", "")


# -- the installation --------------------------------------------------------------------------------------------------


def test_a_sound_installation(capsys):
    pytest.importorskip("vllm")
    status, printed, _ = asked(capsys)
    assert (status, "problem" in printed) == (0, False)
    assert printed.endswith("All is well.\n")


def test_what_is_not_installed_is_no_fault_and_the_way_to_it_is_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, printed, _ = asked(capsys)
    assert status == 0
    for line in (
        "absent   pyarrow; history_dir and estimates need it: pip install 'rollout-spec[history]'",
        "absent   vllm; engines need it: pip install 'rollout-spec[vllm]', on a CPU `make install-cpu`",
    ):
        assert line in printed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.setenv("VLLM_PLUGINS", "a"), "add rollout_spec to it, or unset it"),
        (lambda m: m.setenv("ROLLOUT_SPEC", "{"), "ROLLOUT_SPEC cannot be used (ValueError: ROLLOUT_SP"),
        (lambda m: m.setattr(importlib.metadata, "entry_points", lambda group: {}), "reinstall rollout"),
        (lambda m: m.setattr(doctor, "find_folder", lambda: None), "anew: set the environment variable"),
        # Those that import what is broken are not blamed, too.
        (lambda m: m.setitem(sys.modules, "transformers.modeling_utils", None), "pip uninstall torchvision torchaudio"),
        (lambda m: m.setattr("vllm.__version_tuple__", (0, 20)), "vllm cannot be used (RuntimeError: rollout_spec n"),
    ],
)
def test_faults_of_an_installation_are_found(monkeypatch, change, said):
    for package in ("vllm", "trl"):
        pytest.importorskip(package)
    change(monkeypatch)
    found = list(look_around())
    assert [line for verdict, line in found if verdict == "problem" and said in line]
    assert [verdict for verdict, _ in found].count("problem") == 1


@pytest.mark.parametrize(
    ("version", "verdict"), [("1.13.0", "absent"), ("1.15rc1", "absent"), ("1.12.0", "ok"), ("1.16.0", "ok")]
)
def test_an_old_trl_is_no_fault(monkeypatch, version, verdict):
    """verl's images bring one, for which our callback is not."""
    pytest.importorskip("trl")
    monkeypatch.setattr(doctor, "installed_versions", lambda packages: {"trl": version})
    assert [said for said, line in look_around() if line.startswith("trl ")] == [verdict]
