"""The front end's commands on a worker, without an engine."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rollout_spec.budget import Budget
from rollout_spec.integrations.commands import run_command
from rollout_spec.stats import SpeculationStats


def a_speculation(calls, budget=None):
    return SimpleNamespace(
        num_speculative_tokens=4,
        enabled=True,
        budget=budget,
        set_enabled=lambda enabled: calls.append(("set_enabled", enabled)),
        begin_policy_version=lambda version: calls.append(("begin_policy_version", version)),
        memory_bytes=lambda: 123,
        source_counts=lambda: {"own": [3, 1]},
    )


def test_stats_are_the_counters_and_the_drafter_s_memory():
    stats = SpeculationStats()
    stats.record([3], [2])
    found = run_command(a_speculation([]), stats, "stats")
    assert (found["draft_tokens"], found["accepted_tokens"], found["drafter_bytes"]) == (3, 2, 123)
    assert run_command(None, stats, "stats") == {**found, "drafter_bytes": 0}


@pytest.mark.parametrize("budget", [None, Budget()])
def test_a_report_is_plain_data(budget):
    report = run_command(a_speculation([], budget), SpeculationStats(), "report")
    assert json.loads(json.dumps(report)) == report
    assert (report["num_speculative_tokens"], report["sources"]) == (4, {"own": [3, 1]})
    assert (report["budget"] is None) == (budget is None)


def test_a_report_of_an_engine_without_speculation():
    report = run_command(None, SpeculationStats(), "report")
    assert (report["num_speculative_tokens"], report["sources"], report["budget"]) == (0, {}, None)


@pytest.mark.parametrize(("name", "value"), [("set_enabled", False), ("begin_policy_version", 7)])
def test_what_changes_the_engine_reaches_its_speculation(name, value):
    calls = []
    run_command(a_speculation(calls), SpeculationStats(), name, value)
    assert calls == [(name, value)]
    with pytest.raises(ValueError, match=f"{name}: this engine was built with speculation=False"):
        run_command(None, SpeculationStats(), name, value)


@pytest.mark.parametrize("name", ["memory_bytes", "enabled", "sats"])
def test_other_names_are_no_commands(name):
    with pytest.raises(ValueError, match=f"unknown rollout_spec command '{name}'"):
        run_command(a_speculation([]), SpeculationStats(), name)
