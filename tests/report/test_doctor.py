"""`rollout-spec doctor`: what it says of an installation and of a run."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_spec import cli
from rollout_spec.budget.decide import Budget
from rollout_spec.budget.estimates import MIN_OBSERVATIONS, Survival
from rollout_spec.drafters import build_drafter
from rollout_spec.integrations.vllm import commands
from rollout_spec.jit import cache
from rollout_spec.jit.cache import Folder
from rollout_spec.replay.cost import EngineCost, read_cost
from rollout_spec.replay.engine import Learned, run_phase
from rollout_spec.report.explain import explain, summary
from rollout_spec.report.installation import _check_compiler, check_installation
from rollout_spec.report.measures import engine_cost, size_groups
from rollout_spec.report.reading import BY_BATCH, STATS_NUMBERS, read_report
from rollout_spec.report.stats import Progress, SpeculationStats
from rollout_spec.types import CONFIDENCE_LIMITS
from tests.replay.test_simulated_engine import phase_requests


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
    )
    for _ in range(10):
        stats.record([0] * 64, [0] * 64)
        stats.record_time(0.02, num_requests=64, draft_tokens=0, tokens=64, draft_seconds=0.002, reads_prompts=False)
        budget.observe_step(64, 0.020, drafted=False, num_asked=64, draft_seconds=0.002)
    for _ in range(100):
        stats.record([4], [1])
        stats.record_time(0.01, num_requests=1, draft_tokens=4, tokens=2, draft_seconds=0.001, reads_prompts=False)
        budget.observe_step(5, 0.010, drafted=True, num_asked=1, draft_seconds=0.001)
        budget.survival.observe(np.full(4, 0.5, np.float32), np.array([0, 4]), np.array([4]), np.array([1]))
    for _ in range(MIN_OBSERVATIONS):
        budget.observe_step(1, 0.008, drafted=False)
    stats.record_time(1.0, num_requests=9, draft_tokens=0, tokens=9, draft_seconds=0.0, reads_prompts=True)
    stats.forward_seconds, stats.verify_seconds, stats.draft_seconds = 1.2, 0.1, 0.22
    return {**json.loads(json.dumps(commands.report(session, stats))), **changed}


def test_size_groups_compare_each_size_of_step_with_the_same_tokens_without_drafts():
    many, one = size_groups(a_report())
    assert (many.requests, many.steps, many.tokens, many.draft_tokens, many.asked) == (64, 10, 640, 0, 10)
    assert many.without == pytest.approx(10 * 0.018)
    assert (one.requests, one.steps, one.tokens, one.draft_tokens, one.asked) == (1, 100, 200, 400, 100)
    assert one.without == pytest.approx(200 * 0.008)
    assert one.draft_seconds == pytest.approx(0.1)


def test_what_is_known_of_a_part_is_said_of_that_part():
    report = a_report()
    report["budget"]["undrafted_of_sizes"][-1] = None  # of 64 requests
    text = " ".join(explain(report).split())
    assert "Where it is known, 45.5 % of the time, speculation saved about 0.60 s: 1.60 times as fast" in text
    assert "64.0 10 0.00 1.00 0.20 ? ?" in text
    assert "nothing to verify" not in text


def test_the_report_is_explained():
    text = " ".join(explain(a_report(global_step=7, num_processes=4)).split())
    # Steps that read prompts are part of the time, and not of the size groups.
    for line in (
        "Up to step 7, the first of 4 processes: ",
        "target's forward pass     1.20  54.5 %",
        "verification     0.10   4.5 %",
        "drafting     0.22  10.0 %",
        "scheduling and other     0.68  30.9 %",
        "problem     200  35.0 %",
        "1     100  100.0 %",
        "2     100    0.0 %",
        "0.56       400        50.0 %    25.0 %",
        "off by 25.0 points on average",
        "     1            8.00",
        "     5                         9.00",
        "64.0     10      0.00     1.00     0.20     0.20     0.18     0.90",
        "1.0    100      4.00     2.00     1.00     1.00     1.60     1.60",
        "Where it is known, 54.5 % of the time, speculation saved about 0.58 s: 1.48 times as fast",
        "What limits these steps, 54.5 % of the time, at most",
        "drafting took no time: 0.12 s less, 1.11 times as fast",
        "cost nothing to verify: 0.10 s less, 1.09 times as fast",
        # Of 5 tokens a step, by the curve: 200 at 10 ms for one request, 640 at 61 ms for 64, instead of 1.2 s.
        "all drafts were right, up to 4 tokens: 0.68 s less, 2.30 times as fast",
        # 640 tokens in steps of 64 at 20 ms: 0.31 ms each.
        "ended together: 0.94 s less, 4.57 times as fast  <- the most",
    ):
        assert " ".join(line.split()) in text, line
    assert "shared" not in text


def test_outcomes_by_age_in_reports_of_older_versions_are_left_out(tmp_path, capsys):
    path = tmp_path / "report.json"
    said = []
    for more in ({}, {"ages": {"0": [120, 60], "3-4": [80, 10]}}):
        path.write_text(json.dumps(a_report(**more)))
        assert cli.main(["doctor", str(path)]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_steps_in_which_nothing_was_emitted_are_left_out():
    """Of requests that were complete already. They may be all the steps of a size, or of the run."""
    report = a_report()
    for name, value in zip(BY_BATCH, (2, 8, 0, 0, 0.1, 0, 0.0), strict=True):
        assert report["stats"][name][2] == 0
        report["stats"][name][2] = value
    report["budget"]["undrafted_of_sizes"][2] = 0.01
    assert size_groups(report) == size_groups(a_report())
    assert explain(report) == explain(a_report())
    report["stats"]["tokens_by_batch"] = [0] * len(report["stats"]["tokens_by_batch"])
    assert "what speculation saved is not known" in explain(report)
    assert summary(report).endswith("what that saved is not measured here")


def test_the_report_in_one_line():
    assert summary(a_report()) == (
        "1.14 tokens per request and step, 25.0 % of 400 drafted tokens accepted; by estimate, for 54.5 % of the time, "
        "it saved about 0.58 s: 1.48 times as fast as steps of this engine without drafts"
    )
    unknown = summary(a_report(budget=None))
    assert unknown.endswith("25.0 % of 400 drafted tokens accepted; what that saved is not measured here")
    off = SpeculationStats()
    off.record([0], [0])
    line = summary(a_report(stats=off.to_dict(), budget=None, sources={}))
    assert line == "1.00 tokens per request and step, no draft verified"


def test_a_trainers_folder_stands_for_the_report_in_it(tmp_path, capsys):
    assert cli.main(["doctor", str(tmp_path)]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    (tmp_path / "rollout_spec.json").write_text(json.dumps(a_report()))
    assert cli.main(["doctor", str(tmp_path)]) == 0
    assert "tokens in 110 engine steps" in capsys.readouterr().out


def test_a_busy_machine_is_not_blamed_on_drafts():
    """Steps without drafts cannot have been slowed by any, and what took longer by chance is no cost of drafts."""
    report = a_report()
    report["stats"]["seconds_by_batch"] = [seconds * 20 for seconds in report["stats"]["seconds_by_batch"]]
    many, one = size_groups(report)
    assert (many.speedup, one.speedup) == (pytest.approx(0.9), pytest.approx(1.6))
    assert not many.is_noisy, "nothing was verified"
    assert one.is_noisy
    assert "it saved" not in summary(report)
    assert "what that saved is too noisy to say: steps took 20.0 times as long as fast ones" in summary(report)
    text = " ".join(explain(report).split())
    assert "64.0 10 0.00 1.00 4.00 0.20 0.18 0.90" in text
    assert "1.0 100 4.00 2.00 20.00 1.00 1.60 noise" in text
    assert "of the time, is too noisy to say: steps took 20.0 times as long as fast ones" in text


def test_a_quiet_machine_is_not_called_noisy():
    """Steps never take equally long: their mean is a tenth or two above their lower decile."""
    report = a_report()
    report["stats"]["seconds_by_batch"] = [seconds * 1.3 for seconds in report["stats"]["seconds_by_batch"]]
    assert not any(group.is_noisy for group in size_groups(report))
    assert "it saved about" in summary(report)


def test_what_is_not_known_is_not_made_up():
    text = explain(a_report(budget=None))
    assert "?" in text
    for claim in ("Calibration", "speculation saved", "nothing to verify", "all drafts were right"):
        assert claim not in text
    assert "no step without drafts is taken" in text
    assert explain(a_report(stats=SpeculationStats().to_dict())) == "Nothing has been generated yet."
    off = SpeculationStats(forward_seconds=3.0, verify_seconds=1.0)
    off.record([0], [0])
    for k in (0, 8):
        text = explain(a_report(stats=off.to_dict(), budget=None, sources={}, num_speculative_tokens=k))
        assert "75.0 %" in text
        assert "scheduling and other is not" in text
        assert ("lives on the device" in text) == (k > 0)
    prompts = SpeculationStats(step_seconds=5.0, forward_seconds=3.0)
    prompts.record([0], [0])
    text = explain(a_report(stats=prompts.to_dict(), budget=None, sources={}))
    assert "No step without prompts was seen" in text


def test_the_measured_curve_can_be_replayed(tmp_path, capsys):
    path, curve = tmp_path / "report.json", tmp_path / "cost.json"
    path.write_text(json.dumps(a_report()))
    assert cli.main(["doctor", str(path), "--engine-cost", str(curve)]) == 0
    assert "Where the time of a step goes" in capsys.readouterr().out
    cost = read_cost(curve)
    assert cost.tokens.tolist() == [1, 64]
    assert cost.seconds == pytest.approx([0.008, 0.018])
    # 5 tokens took 9 ms without the drafter's work, where 5 tokens of requests would take 8.6.
    assert cost.drafted_seconds == pytest.approx(0.009 - (0.008 + 0.010 * 4 / 63))
    # 1 ms for one request and 2 ms for 64.
    assert cost.draft_seconds == pytest.approx(0.001 / 63)
    assert cost.draft_call_seconds == pytest.approx(0.001 - 0.001 / 63)


class Recorded(Learned):
    """Keeps the counters that an engine would keep, and what steps without drafts would have taken."""

    def __init__(self, cost):
        super().__init__()
        self.stats, self.cost, self.hits, self.without = SpeculationStats(), cost, 0, 0.0
        self.num_speculative_tokens = 8

    def source_counts(self):
        return {}

    def history_summary(self):
        return {}

    def observe(self, step, verified, accepted):
        super().observe(step, verified, accepted)
        self.hits = int(accepted.sum())

    def on_step(self, num_requests, num_draft_tokens, seconds, draft_seconds):
        super().on_step(num_requests, num_draft_tokens, seconds, draft_seconds)
        tokens, self.hits = num_requests + self.hits, 0
        self.stats.record([0] * num_requests, [0] * num_requests)
        self.stats.record_time(
            seconds, num_requests=num_requests, draft_tokens=num_draft_tokens, tokens=tokens,
            draft_seconds=draft_seconds, reads_prompts=False,
        )  # fmt: skip
        self.without += tokens / num_requests * self.cost.step(num_requests)


@pytest.mark.parametrize("name", ["linear", "roofline"])
def test_of_a_simulated_engine_the_truth_is_found(name):
    sizes = np.array([1, 4, 16, 64, 256, 1024.0])
    seconds = {"linear": 1e-3 + 1e-4 * sizes, "roofline": 1.5e-3 + np.maximum(3e-3, 3e-5 * sizes)}[name]
    cost = EngineCost(name, sizes, seconds, 5e-4, 2e-5, 1e-4)
    policy = Recorded(cost)
    drafter = partial(build_drafter, "suffix", max_draft_tokens=8)
    phase = run_phase(phase_requests(12, 16, 200), drafter, policy, cost, num_speculative_tokens=8, batch=64)
    report = commands.report(policy, policy.stats)
    found = size_groups(report)
    assert sum(p.seconds for p in found) == pytest.approx(phase.seconds)
    assert sum(p.without for p in found) == pytest.approx(policy.without, rel=0.1)
    measured = engine_cost(report)
    for n in (4, 32, 64, 128):
        assert measured.step(n) == pytest.approx(cost.step(n), rel=0.15)
    assert measured.drafted_seconds == pytest.approx(5e-4, abs=3e-4)
    # Of small sizes nothing was measured. Roughly: a size's requests are counted over its steps without drafting, too.
    for n in (32, 64):
        expected = cost.draft_call_seconds + cost.draft_seconds * n
        assert measured.draft_call_seconds + measured.draft_seconds * n == pytest.approx(expected, rel=0.2)


def test_the_answer_of_a_server_is_read_as_it_came(tmp_path):
    """As `curl` saves it, with one report per rank."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"results": [a_report(), a_report()]}))
    assert read_report(path) == a_report()


def served(status, body):
    """A server that answers everything so."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b"", "it runs without VLLM_SERVER_DEV_MODE=1"),
        (500, b"this engine runs without rollout_spec", "runs without rollout_spec, or cannot answer"),
        (200, b"<html>", "is no vLLM server: '<html>'"),
        (200, b"{}", "is no vLLM server: '{}'"),
        (200, b'{"results": []}', "is no vLLM server"),
        (200, b'{"results": ["None"]}', "is no report"),
    ],
)
def test_other_servers_are_refused(capsys, status, body, message):
    pytest.importorskip("requests")
    with served(status, body) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        assert cli.main(["doctor", "--url", url]) == 2
        server.shutdown()
    said = capsys.readouterr().err
    assert message in said
    assert url in said
    assert said.count("\n") == 1


def test_what_is_no_url_is_refused(capsys, tmp_path):
    assert cli.main(["doctor", "--url", "localhost:8000"]) == 2
    assert "--url: base_url must be a URL such as http://localhost:8000" in capsys.readouterr().err
    assert cli.main(["doctor", "--url", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capsys.readouterr().err


def test_what_asks_a_server_may_be_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "requests", None)
    assert cli.main(["doctor", "--url", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.endswith(": pip install requests\n")


@pytest.mark.parametrize("content", ["{", "[]", '{"stats": {}}', '{"format": 0}'])
def test_other_files_are_refused(tmp_path, capsys, content):
    path = tmp_path / "report.json"
    path.write_text(content)
    assert cli.main(["doctor", str(path)]) == 2
    assert ("another version" if "format" in content else "is no report") in capsys.readouterr().err


def _without(report, *path):
    *owners, last = path
    for name in owners:
        report = report[name]
    del report[last]


def _fields(report):
    """Paths to what a report needs; reports of older versions lack `history`."""
    of_stats = [*STATS_NUMBERS, *BY_BATCH, "drafted_per_position", "accepted_per_position"]
    return [
        *((name,) for name in report if name not in ("format", "history")),
        *(("stats", name) for name in of_stats),
        *(("budget", name) for name in report["budget"]),
    ]


def test_of_a_damaged_report_the_missing_field_is_named(tmp_path, capsys):
    path = tmp_path / "report.json"
    for field in _fields(a_report()):
        report = a_report()
        _without(report, *field)
        path.write_text(json.dumps(report))
        assert cli.main(["doctor", str(path)]) == 2, field
        error = capsys.readouterr().err
        assert f"{path} is damaged: {'.'.join(field)} is missing" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (None, "stats", []),
        (None, "device", None),
        (None, "num_speculative_tokens", "4"),
        (None, "budget", []),
        ("sources", "own", [1]),
        ("sources", "own", [1, 2, 3]),
        (None, "sources", []),
        (None, "history", None),
        ("history", "requests", "40"),
        ("stats", "steps", None),
        ("stats", "seconds_by_batch", [1.0]),
        ("stats", "accepted_per_position", ["x"]),
        ("budget", "undrafted", [[1.0], []]),
        ("budget", "drafted", None),
        ("budget", "undrafted_of_sizes", [None]),
        ("budget", "reliability", [[0, 0, 0]]),
    ],
)
def test_of_a_damaged_report_the_wrong_field_is_named(tmp_path, capsys, owner, name, value):
    path, report = tmp_path / "report.json", a_report()
    (report if owner is None else report[owner])[name] = value
    path.write_text(json.dumps(report))
    assert cli.main(["doctor", str(path)]) == 2
    assert f"is damaged: {owner + '.' if owner else ''}{name} must be " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ([], "progress must be an object"),
        ({"global_step": None}, "progress.global_step must be a list of numbers"),
        ({"emitted_tokens": ["1"]}, "progress.emitted_tokens must be a list of numbers"),
        ({"request_steps": [1]}, "progress.request_steps must be 0 numbers"),
        ({"num_logs": ...}, "progress.num_logs is missing"),
    ],
)
def test_of_a_damaged_series_the_wrong_column_is_named(tmp_path, capsys, changed, message):
    progress = changed
    if changed:
        progress = {k: v for k, v in {**Progress().to_dict(), **changed}.items() if v is not ...}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(a_report(progress=progress)))
    assert cli.main(["doctor", str(path)]) == 2
    assert f"{path} is damaged: {message}" in capsys.readouterr().err


def test_a_report_with_every_field_is_read(tmp_path):
    path = tmp_path / "report.json"
    unknown = {**a_report()["budget"], "undrafted_of_sizes": [None] * 7}
    progress = Progress().to_dict()
    old = a_report()
    del old["history"]
    for report in (
        old, a_report(), a_report(budget=None), a_report(budget=unknown, sources={}), a_report(progress=progress),
    ):  # fmt: skip
        path.write_text(json.dumps(report))
        assert read_report(path) == report


def test_a_curve_that_cannot_be_written_is_refused_before_anything_is_explained(tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(a_report()))
    assert cli.main(["doctor", str(path), "--engine-cost", str(tmp_path / "none" / "cost.json")]) == 2
    output = capsys.readouterr()
    assert "none/cost.json" in output.err
    assert output.out == ""


@pytest.mark.parametrize("chosen", [None, "/dev/null/cache"])
@pytest.mark.parametrize(
    ("folder", "sound", "said"),
    [
        (Folder(Path("/home/me/.cache/rollout_spec/1"), False), True, "kept in /home/me/.cache/rollout_spec/1"),
        (
            Folder(Path("/tmp/rollout_spec-0/1"), True),
            True,
            "may be gone after a restart: set the environment",
        ),
        (None, False, "each process compiles the drafters anew: set the environment variable NUMBA_CACHE_DIR"),
    ],
)
def test_the_place_of_compiled_code_is_shown_and_the_remedy(monkeypatch, folder, sound, said, chosen):
    monkeypatch.setattr(cache, "find_folder", lambda: folder)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    if chosen:
        monkeypatch.setenv("NUMBA_CACHE_DIR", chosen)
    lines = dict(map(reversed, _check_compiler()))
    (line,) = (line for line in lines if said in line)
    assert lines[line] == ("ok" if sound else "problem")
    assert lines.get("NUMBA_CACHE_DIR=/dev/null/cache cannot be written") == ("problem" if chosen else None)


def test_a_curve_needs_a_report(tmp_path, capsys):
    assert cli.main(["doctor", "--engine-cost", str(tmp_path / "cost.json")]) == 2
    assert "needs a report" in capsys.readouterr().err


def test_too_few_sizes_are_no_curve(tmp_path, capsys):
    path = tmp_path / "report.json"
    one_size = {**a_report()["budget"], "undrafted": [[1.0], [0.1]]}
    apart = {**a_report()["budget"], "drafted": [[100.0], [0.1]]}
    for budget, message in (
        (None, "had no budget"), (one_size, "fewer than two sizes"), (apart, "with and without drafts"),
    ):  # fmt: skip
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
    return [line for verdict, line in check_installation() if verdict == "problem"]


def test_a_sound_installation(capsys):
    pytest.importorskip("vllm")
    assert faults() == []
    assert cli.main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "problem" not in output
    assert output.endswith("All is well.\n")


def pretend(monkeypatch, is_installed, *names):
    """Packages are there, or are not, for who only asks."""
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: (is_installed or None) if name in names else original(name)
    )


def test_what_is_not_installed_is_no_fault_and_the_way_to_it_is_named(monkeypatch, capsys):
    pretend(monkeypatch, False, "vllm", "torch", "pyarrow")
    original = importlib.metadata.version

    def version(name):
        if name == "trl":
            raise importlib.metadata.PackageNotFoundError(name)
        return original(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert cli.main(["doctor"]) == 0
    output = capsys.readouterr().out
    for line in (
        "absent   vLLM; only engines need it: pip install 'rollout-spec[vllm]', on a CPU `make install-cpu`",
        "absent   torch; ",
        "absent   TRL; only trainers need it: pip install 'rollout-spec[trl]'",
        "absent   pyarrow; `rollout-spec replay` reads recordings with it: pip install 'rollout-spec[replay]'",
    ):
        assert line in output
    assert output.endswith("All is well with what is installed.\n")


def test_faults_of_an_installation_are_found(monkeypatch, capsys):
    pretend(monkeypatch, True, "vllm", "torch", "transformers")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert any("add rollout_spec to it, or unset it" in line for line in faults())
    monkeypatch.setenv("VLLM_PLUGINS", "other,rollout_spec")
    assert not any("VLLM_PLUGINS" in line for line in faults())
    monkeypatch.setenv("ROLLOUT_SPEC", "{")
    assert any(line.startswith("ROLLOUT_SPEC={ is no JSON") for line in faults())
    monkeypatch.setenv("ROLLOUT_SPEC", "{}")
    assert not any("ROLLOUT_SPEC" in line for line in faults())
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
    assert any("pip uninstall torchvision" in line for line in found)
    assert any("entry point is missing" in line for line in found)
    assert not any("vLLM cannot be imported" in line for line in found), "which imports transformers: one fault"
    pretend(monkeypatch, False, "transformers")
    assert any("vLLM cannot be imported (ImportError: no such file): pip install" in line for line in faults())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.15rc1")
    assert "TRL 1.15rc1: 1.16 or newer is needed, 1.12 for PPOTrainer" in faults()
    assert cli.main(["doctor"]) == 1
    assert "problem" in capsys.readouterr().out
