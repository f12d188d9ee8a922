"""`rollout-spec doctor`: what it says of a run and of an installation."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
from types import SimpleNamespace

import pytest

from rollout_spec import cli
from rollout_spec.budget import MIN_OBSERVATIONS, Budget
from rollout_spec.doctor import advice, explain, look_around, summary
from rollout_spec.integrations.vllm import commands
from rollout_spec.jit import cache
from rollout_spec.stats import SpeculationStats


def a_report(**changed):
    """A run of 10 steps of 64 requests that gained nothing, and of 100 steps of one that gained half."""
    stats, budget = SpeculationStats(), Budget()
    session = SimpleNamespace(
        budget=budget,
        num_speculative_tokens=4,
        source_counts=lambda: {"own": [100, 30], "problem": [200, 70], "shared": [0, 0]},
        history_summary=lambda: {"requests": 40, "requests_with_history": 30},
        memory_bytes=lambda: 1000,
        engine_history=None,
        enable_adaptive_verification=False,
    )
    for _ in range(10):
        stats.record([0] * 64, [0] * 64)
        stats.record_time(0.02, requests=64, draft_tokens=0, tokens=64, draft_seconds=0.002, has_prompts=False)
        budget.observe_step(64, 0.020, drafted=False, num_asked=64, draft_seconds=0.002)
    for _ in range(100):
        stats.record([4], [1])
        stats.record_time(0.01, requests=1, draft_tokens=4, tokens=2, draft_seconds=0.001, has_prompts=False)
        budget.observe_step(5, 0.010, drafted=True, num_asked=1, draft_seconds=0.001)
    for _ in range(MIN_OBSERVATIONS):
        budget.observe_step(1, 0.008, drafted=False)
    stats.record_time(1.0, requests=9, draft_tokens=0, tokens=9, draft_seconds=0.0, has_prompts=True)
    stats.forward_seconds, stats.verify_seconds, stats.draft_seconds = 1.2, 0.1, 0.22
    return {**json.loads(json.dumps(commands.report(commands.EngineParts(None, session, stats, None)))), **changed}


def page(report):
    return " ".join(explain(report).split())


def test_a_run_is_explained_on_one_page():
    text = page(a_report(global_step=7, num_processes=4))
    # Steps that read prompts are part of the time, and not of the groups by size.
    for line in (
        "up to step 7, process 1 of 4 840 tokens in 110 steps: 1.14 tokens per request and step, ",
        "25.0% of 400 drafted tokens accepted; by estimate 1.48 times as fast as this engine's steps without drafts, ",
        "in the steps whose cost is known (54.5% of the time) Where the time of a step goes: 2.619 ms per token",
        "target's forward pass     1.20  54.5%",
        "verification     0.10   4.5%",
        "drafting     0.22  10.0%",
        "scheduling and other     0.68  30.9%",
        "problem     200  35.0%",
        "1     100  100.0%",
        "2     100    0.0%",
        "requests  steps  verified  emitted  seconds  quiet  without  speedup",
        "64.0     10      0.00     1.00     0.20     0.20     0.18     0.90",
        "1.0    100      4.00     2.00     1.00     1.00     1.60     1.60",
    ):
        assert " ".join(line.split()) in text, line
    assert "shared" not in text
    assert text.endswith("What to do - Generate more: 110 steps are too few to judge by, 200 are the least.")


def test_the_slowest_of_several_engines_is_named():
    text = page(a_report(engines=[[0, 600, 2.0], [1, 100, 1.0], [2, 0, 0.0], [3, 900, 3.0]]))
    assert "Sums of 4 engines; " in text
    assert "Tokens per second: 100 to 300, least in engine 2 " in text


def test_what_is_not_known_is_not_made_up():
    report = a_report()
    report["budget"]["undrafted_of_sizes"][-1] = None  # of 64 requests
    assert "by estimate 1.60 times as fast as this engine's steps without drafts" in page(report)
    assert "in the steps whose cost is known (45.5% of the time)" in page(report)
    assert "64.0 10 0.00 1.00 0.20 ? ? ?" in page(report)
    assert "what that saved is not known" in summary(a_report(budget=None))
    assert summary(a_report(stats=SpeculationStats().to_dict())).endswith("step, no draft verified")
    broken = SpeculationStats(drafter_errors=1).to_dict()
    assert summary(a_report(stats=broken)).endswith("step, the drafter has raised and is off, no draft verified")
    assert explain(a_report(stats=SpeculationStats().to_dict())) == "Nothing has been generated yet."
    device = SpeculationStats(forward_seconds=3.0, verify_seconds=1.0)
    device.record([0], [0])
    text = page(a_report(stats=device.to_dict(), budget=None, sources={}))
    assert "Where the time of a step goes, as far as it was seen: 4000.000 ms per token" in text
    assert "verification 1.00 25.0% What to do" in text, "there are no other tables"


def test_steps_in_which_nothing_was_emitted_are_left_out():
    """Of requests that were complete already. They may be all the steps of a size, or of the run."""
    report = a_report()
    for name, value in (("steps", 2), ("requests", 8), ("seconds", 0.1)):
        report["stats"][f"{name}_by_batch"][2] = value
    report["budget"]["undrafted_of_sizes"][2] = 0.01
    assert explain(report) == explain(a_report())
    report["stats"]["tokens_by_batch"] = [0] * len(report["stats"]["tokens_by_batch"])
    assert "what that saved is not known" in explain(report)


# -- what to do --------------------------------------------------------------------------------------------------------


def long_run(accepted=(150, 120, 90, 80), seconds=10.0, draft_seconds=1.0, **changed):
    """1,000 steps of one request, and so many of 200 drafts of 4 tokens that were right up to each position."""
    report = a_report(**changed)
    report["stats"] |= {"drafted_per_position": [200] * 4, "accepted_per_position": list(accepted)}
    for name in ("steps", "requests", "tokens", "draft_tokens"):
        report["stats"][f"{name}_by_batch"][0] *= 10
    report["stats"]["seconds_by_batch"][0], report["stats"]["draft_seconds_by_batch"][0] = seconds, draft_seconds
    return report


def without_drafts():
    """A long run in which nothing was verified."""
    report = long_run()
    report["stats"] |= {"draft_tokens": 0, "drafted_per_position": [], "accepted_per_position": []}
    report["stats"]["draft_tokens_by_batch"] = [0] * len(report["stats"]["draft_tokens_by_batch"])
    return report


def costing(cost, **changed):
    """A long run whose steps with drafts cost so many seconds by the budget, without the drafter's 1 ms."""
    report = long_run(**changed)
    report["budget"]["drafted"] = [[5], [cost]]
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
        # Steps that other work held up by more than drafts gained say nothing of drafts.
        (costing(0.009, seconds=100), "Run", "steps took 100.2 s, and 10.2 s at the pace"),
        (costing(0.009, seconds=17), "Run", ""),  # which hides a factor of 1.6
        (costing(0.009, seconds=14), "", ""),  # as on any machine
        (costing(0.018, seconds=26), "Try", "it made steps 0.84 times as fast"),
        (costing(0.018, seconds=26, history=NEW), "Wait Group Set", "only 12 of 300 requests"),
        (long_run(history=NEW), "Wait Group Set", ""),
        (long_run(history={**NEW, "folder": {"shards": 1}}), "Wait Group", ""),
        (long_run(history=KNOWN, global_step=3, num_processes=4), "Set", ""),
        (long_run(draft_seconds=3.0, device="NVIDIA H200"), "Try", 'drafter="device", in the V2 runner'),
        (long_run((150, 40, 10, 2), budget=None), "Lower", "to 2: 50.0% of the verified tokens"),
        (long_run((150, 40, 10, 2)), "", ""),  # the budget verifies only what pays
        (long_run((180, 170, 160, 150)), "Raise", "to 8: 75.0% of 200 drafts of 4"),
    ],
)
def test_advice(report, words, said):
    lines = list(advice(report))
    assert [line.split()[0] for line in lines] == words.split()
    assert said in "".join(lines)
    if not lines:
        assert explain(report).endswith("\n\nWhat to do\n  - Nothing: leave it as it is.")


def test_a_busy_machine_is_not_blamed_on_drafts():
    report = a_report()
    report["stats"]["seconds_by_batch"] = [seconds * 20 for seconds in report["stats"]["seconds_by_batch"]]
    assert "too noisy to say: steps took 20.0 times as long as fast ones of their size, and drafts" in summary(report)
    assert "64.0 10 0.00 1.00 4.00 0.20 0.18 0.90" in page(report), "nothing was verified"
    assert "1.0 100 4.00 2.00 20.00 1.00 1.60 1.60" in page(report)
    assert "What to do - Run it again on a quiet machine" in page(report)


def test_a_few_slow_drafts_are_not_held_against_all_steps():
    """At most 27 of 1,000 steps had drafts, and took ten times as long, as they were the first: that says nothing."""
    report = long_run()
    report["budget"]["drafted"], report["stats"]["draft_tokens_by_batch"][0] = [[2], [0.08]], 27
    assert "too few steps had drafts to say what that saved" in summary(report)
    assert "Try" not in " ".join(advice(report))
    # 27 steps of 80 ms, 973 of 8 ms without drafts, and one second of drafting, would be 10.94 s.
    assert "1.0 1,000 0.03 2.00 10.00 10.00 16.00 1.60" in page(report), "no pace is slower than the steps were"
    report["stats"]["seconds_by_batch"][0] = 20.0
    assert "1.0 1,000 0.03 2.00 20.00 10.94 16.00 1.46" in page(report)


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
        "absent   torch; ",
        "absent   vllm; engines need it: pip install 'rollout-spec[vllm]', on a CPU `make install-cpu`",
        "absent   trl; trainers need it: pip install 'rollout-spec[trl]'",
    ):
        assert line in printed


def importing(name, **module):
    """Makes the import of a package give a module with this version, or fail."""

    def change(monkeypatch):
        pytest.importorskip(name.partition(".")[0])
        original = importlib.import_module

        def import_module(asked, *args):
            if asked != name:
                return original(asked, *args)
            if not module:
                raise ImportError(f"{name} is broken")
            return SimpleNamespace(**module)

        monkeypatch.setattr(importlib, "import_module", import_module)

    return change


@pytest.mark.parametrize(
    ("change", "verdict", "said"),
    [
        (lambda m: m.setenv("VLLM_PLUGINS", "a"), "problem", "add rollout_spec to it, or unset it"),
        (lambda m: m.setenv("ROLLOUT_SPEC", "{"), "problem", "ROLLOUT_SPEC cannot be used (ValueError: ROLLOUT_SP"),
        (lambda m: m.setattr(importlib.metadata, "entry_points", lambda group: {}), "problem", "reinstall rollout"),
        (lambda m: m.setattr(cache, "find_folder", lambda: None), "problem", "anew: set the environment variable"),
        # Those that import what is broken are not blamed, too.
        (importing("transformers.modeling_utils"), "problem", "is broken): pip uninstall torchvision torchaudio"),
        (importing("vllm"), "problem", "vllm cannot be used (ImportError: vllm is broken): pip install"),
        (importing("trl", __version__="1.15rc1"), "problem", "1.15rc1 is not 1.16 or newer, nor 1.12"),
    ],
)
def test_faults_of_an_installation_are_found(monkeypatch, change, verdict, said):
    change(monkeypatch)
    found = list(look_around())
    assert [verdict for verdict, line in found if said in line] == [verdict]
    assert [v for v, _ in found].count("problem") == (verdict == "problem")
