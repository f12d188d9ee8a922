"""`rollout-spec doctor REPORT`: what it advises; `doctor A B`: how it compares."""

from __future__ import annotations

import json

import pytest

from rollout_spec import cli
from rollout_spec.report.advice import advice, compare
from rollout_spec.report.reading import BY_BATCH
from rollout_spec.report.stats import Progress, SpeculationStats
from tests.report.test_doctor import a_report

RULES = {
    "error": "Look for the drafter's exception",
    "off": "This engine does not speculate",
    "few": "Generate more",
    "noise": "Run it again on a quiet machine",
    "epoch": "Wait an epoch",
    "group": "Group requests",
    "folder": "Set history_dir",
    "switch off": "Switch speculation off",
    "device": 'Try drafter="device"',
    "lower": "Lower num_speculative_tokens",
    "raise": "Raise num_speculative_tokens",
    "nothing": "Nothing: leave it as it is",
}


def many_steps(**changed):
    """Counters of enough steps: ten times as many as in the report, of one request each, at the same pace."""
    stats = {**a_report()["stats"], **changed}
    for name in BY_BATCH:
        stats[name][0] *= 10
    return stats


def rules(report):
    """Which rules apply, and their lines."""
    title, *lines = advice(report).splitlines()
    assert title == "What to do"
    found = {name: line for name, start in RULES.items() for line in lines if line.startswith(f"  - {start}")}
    assert len(found) == len(lines)
    return found


def long_drafts(accepted, **changed):
    """So many of 200 drafts of 4 tokens were right up to each position."""
    report = a_report(stats=many_steps(drafted_per_position=[200] * 4, accepted_per_position=accepted))
    return {**report, **changed}


def test_a_run_with_nothing_to_change():
    assert list(rules(long_drafts([150, 120, 90, 80]))) == ["nothing"]


def test_of_too_few_steps_nothing_is_said():
    assert list(rules(a_report())) == ["few"]
    assert "110 steps are too few" in rules(a_report())["few"]
    device = SpeculationStats(forward_seconds=1.0)
    device.record([4], [4])
    assert list(rules(a_report(stats=device.to_dict(), budget=None))) == ["few"]


def test_a_machine_that_was_busy_is_not_blamed_on_drafts():
    """1,000 steps of one request take 9 ms each, and drafting 1; drafts gain a factor of 1.6, or lose."""
    for seconds, costs, expected in (
        (100, 0.009, "noise"),
        (17, 0.009, "noise"),  # which hides a factor of 1.6
        (14, 0.009, "nothing"),  # as on any machine
        (100, 0.018, "noise"),
        (26, 0.018, "switch off"),
    ):
        stats = many_steps()
        stats["seconds_by_batch"][0] = seconds
        report = a_report(stats=stats)
        report["budget"]["drafted"] = [[5], [costs]]
        assert list(rules(report)) == [expected], "times say nothing where there is noise"
        assert "noise" not in rules(a_report(stats=stats, budget=None))
        if (seconds, costs) == (100, 0.009):
            line = "1,000 steps of 1.0 requests took 100.0 s, and 10.0 s at the pace of fast ones"
            assert line in rules(report)["noise"]
    few = a_report()
    few["stats"]["seconds_by_batch"][0] = 10.2
    assert list(rules(few)) == ["few", "noise"]


def test_prompts_that_come_for_the_first_time():
    history = {"requests": 300, "requests_with_history": 12, "folder": {}}
    found = rules(long_drafts([150, 120, 90, 80], history=history))
    assert list(found) == ["epoch", "group", "folder"]
    assert "only 12 of 300 requests" in found["epoch"]
    assert "folder" not in rules(long_drafts([150, 120, 90, 80], history={**history, "folder": {"shards": 1}}))
    known = {"requests": 300, "requests_with_history": 290, "folder": {}}
    assert list(rules(long_drafts([150, 120, 90, 80], history=known))) == ["nothing"]
    engines = long_drafts([150, 120, 90, 80], history=known, global_step=3, num_processes=4)
    assert list(rules(engines)) == ["folder"]


def test_drafts_that_do_not_pay():
    stats = many_steps()
    stats["seconds_by_batch"][0] = 17  # where the same tokens take 16 s without drafts
    new = {"requests": 300, "requests_with_history": 12, "folder": {}}
    for history in ({}, new):
        report = a_report(stats=stats, **({"history": history} if history else {}))
        report["budget"]["drafted"] = [[5], [0.016]]
        found = rules(report)
        if history:
            assert "switch off" not in found, "wait first"
        else:
            assert "0.94 times as fast" in found["switch off"]


def test_drafting_that_takes_long_goes_to_the_gpu():
    stats = many_steps()
    stats["draft_seconds_by_batch"][0] = 3
    assert "29.6 % of the time" in rules(a_report(stats=stats, device="NVIDIA H200"))["device"]
    assert "device" not in rules(a_report(stats=stats)), "there is none"
    assert "device" not in rules(a_report(stats=many_steps(), device="NVIDIA H200"))


def test_drafts_that_are_too_long_or_too_short():
    lower = rules(long_drafts([150, 40, 10, 2], budget=None))["lower"]
    assert "from 4 to 2: 50.0 % of the verified tokens" in lower
    assert "from 4 to 1" in rules(long_drafts([0, 0, 0, 0], budget=None))["lower"]
    assert "lower" not in rules(long_drafts([150, 40, 10, 2])), "the budget verifies only what pays"
    for budget in ({}, {"budget": None}):
        assert not {"lower", "raise"} & rules(long_drafts([150, 120, 90, 80], **budget)).keys()
        longer = rules(long_drafts([180, 170, 160, 150], **budget))["raise"]
        assert "from 4 to 8: of 200 drafts of that length 75.0 % were right to the end" in longer


def test_what_keeps_speculation_from_helping_at_all():
    assert list(rules(a_report(stats={**a_report()["stats"], "drafter_errors": 1}))) == ["error"]
    assert list(rules(a_report(num_speculative_tokens=0))) == ["off"]


def test_a_report_ends_with_what_to_do(tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(a_report()))
    assert cli.main(["doctor", str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{advice(a_report())}\n")


def without_speculation(**changed):
    """The same tokens, one at a time, in steps that nobody saw end."""
    stats = SpeculationStats(forward_seconds=2.4, verify_seconds=0.2)
    for _ in range(100):
        stats.record([0] * 9, [0] * 9)
    return a_report(stats=stats.to_dict(), budget=None, num_speculative_tokens=0, **changed)


def test_two_runs_are_compared(tmp_path, capsys):
    paths = [tmp_path / "with.json", tmp_path / "without.json"]
    for path, report in zip(paths, (a_report(), without_speculation()), strict=True):
        path.write_text(json.dumps(report))
    assert cli.main(["doctor", *map(str, paths)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for line in (
        f"A: {paths[0]}, up to 4 tokens per draft B: {paths[1]}, without speculation",
        "tokens 840 900",
        "tokens per request and step 1.14 1.00",
        "drafted tokens verified 400 0",
        "of these accepted 25.0 % 0.0 %",
        # 1.3 s of 840 tokens, 2.6 s of 900.
        "ms per token: forward passes and verification alone 1.548 2.889",
        "Per token A is 1.87 times as fast as B, but: - A: 110 steps are too few to judge by. - B: 100 steps are too",
    ):
        assert line in text, line
    assert "differ in" not in text
    assert "requests A B" not in text, "of B the steps are not known by their size"


def test_the_most_complete_time_is_compared():
    slower = a_report()["stats"]
    slower["step_seconds"] *= 2
    slower["seconds_by_batch"][0] *= 3
    text = " ".join(compare((a_report(stats=slower), a_report()), ("x", "y")).split())
    assert "ms per token: whole steps 5.238 2.619" in text
    assert "64.0 / 64.0 0.312 0.312 1.00 1.0 / 1.0 15.000 5.000 0.33" in text
    assert "Per token B is 2.00 times as fast as A, but: - A: Run it again on a quiet machine" in text
    series = []
    for seconds in (3.0, 6.0):
        progress = Progress()
        progress.add(1, SpeculationStats(request_steps=100, emitted_tokens=1500), seconds)
        series.append(progress.to_dict())
    text = compare((a_report(progress=series[0]), without_speculation(progress=series[1])), ("x", "y"))
    assert "ms per token: the trainer's waiting 2.000 4.000" in " ".join(text.split())
    assert "Per token A is 2.00 times as fast as B, but:" in text


def test_sizes_at_which_a_run_emitted_nothing_are_not_compared():
    idle = a_report()
    idle["stats"]["tokens_by_batch"][0] = 0
    text = compare((a_report(), idle), ("x", "y"))
    assert "64.0 / 64.0" in text
    assert "1.0 / 1.0" not in text


def test_a_machine_that_was_slower_is_not_blamed_on_drafts():
    """Steps without drafts are the same in both runs, whatever was drafted."""
    enough = {**a_report()["stats"], "steps": 1000}
    slow = a_report(stats=enough)
    slow["budget"]["undrafted_of_sizes"] = [2 * seconds for seconds in slow["budget"]["undrafted_of_sizes"]]
    text = compare((a_report(stats=enough), slow), ("x", "y"))
    assert text.endswith("but:\n  - Steps without drafts took 2.00 times as long in B: the machine was not the same.")
    alike = compare((a_report(stats=enough), a_report(stats=enough)), ("x", "y"))
    assert alike.endswith("Per token A is 1.00 times as fast as B.")


def test_runs_that_cannot_be_compared(tmp_path, capsys):
    text = compare((a_report(), a_report(device="NVIDIA H200", versions={"vllm": "0.30.0"})), ("x", "y"))
    assert "differ in device" in text
    assert "differ in versions" in text
    path = tmp_path / "none.json"
    path.write_text(json.dumps(a_report(stats=SpeculationStats().to_dict(), budget=None)))
    for arguments, message in (
        ([path, path], f"{path}: nothing has been generated yet"),
        ([path, path, path], "at most two reports"),
        ([path, path, "--url", "http://127.0.0.1:9"], "at most two reports"),
        ([path, path, "--plot", tmp_path / "a.png"], "--plot needs a report, and only one"),
    ):
        assert cli.main(["doctor", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_hardly_begun(steps):
    stats = SpeculationStats()
    for _ in range(steps):
        stats.record([0], [0])
    assert list(rules(a_report(stats=stats.to_dict(), budget=None, history={}))) == ["few"]
