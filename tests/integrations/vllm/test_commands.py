"""The front end's commands on a worker, without an engine."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rollout_spec.budget import Budget
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.integrations.vllm.commands import EngineParts, run_command
from rollout_spec.integrations.vllm.weights import WeightWatch
from rollout_spec.stats import SpeculationStats


def a_speculation(calls, budget=None):
    return SimpleNamespace(
        num_speculative_tokens=4,
        enabled=True,
        budget=budget,
        set_enabled=lambda enabled: calls.append(("set_enabled", enabled)),
        memory_bytes=lambda: 123,
        num_live_requests=lambda: 2,
        check_model=lambda: None,
        source_counts=lambda: {"own": [3, 1]},
        history_summary=lambda: {"requests": 7},
        engine_history=None,
    )


def run(speculation, name, *args, stats=None, weights=None):
    config = RolloutSpecConfig(num_speculative_tokens=3)
    engine = EngineParts(config, speculation, stats or SpeculationStats(), weights or WeightWatch())
    return run_command(engine, name, *args)


def test_stats_are_the_counters_and_the_drafter_s_memory():
    stats, weights = SpeculationStats(), WeightWatch()
    stats.record([3], [2])
    weights.announce()
    weights.begin_step()
    found = run(a_speculation([]), "stats", stats=stats, weights=weights)
    assert (found["draft_tokens"], found["accepted_tokens"], found["drafter_bytes"]) == (3, 2, 123)
    assert (found["live_requests"], found["policy_version"]) == (2, 1)
    assert run(None, "stats", stats=stats, weights=weights) == {**found, "drafter_bytes": 0, "live_requests": 0}


@pytest.mark.parametrize("budget", [None, Budget()])
def test_a_report_is_plain_data(budget):
    report = run(a_speculation([], budget), "report")
    assert json.loads(json.dumps(report)) == report
    assert (report["num_speculative_tokens"], report["sources"]) == (4, {"own": [3, 1]})
    assert report["history"] == {"requests": 7, "bytes": 123, "folder": {}}
    assert (report["budget"] is None) == (budget is None)


def test_a_report_of_an_engine_without_speculation():
    report = run(None, "report")
    assert (report["num_speculative_tokens"], report["sources"], report["budget"]) == (0, {}, None)
    assert report["history"] == {}


def test_the_config_can_be_read_back():
    config = run(None, "config")
    assert RolloutSpecConfig.from_dict(json.loads(json.dumps(config))) == RolloutSpecConfig(num_speculative_tokens=3)


def test_switching_reaches_the_speculation():
    calls = []
    run(a_speculation(calls), "set_enabled", False)
    assert calls == [("set_enabled", False)]
    with pytest.raises(ValueError, match="set_enabled: this engine was built with speculation=False"):
        run(None, "set_enabled", False)


def test_new_weights_that_are_announced_begin_a_version_with_the_next_step():
    weights = WeightWatch()
    for speculation in (None, a_speculation([])):
        run(speculation, "begin_policy_version", weights=weights)
    assert [weights.begin_step(), weights.begin_step()] == [1, None]
    run(None, "begin_policy_version", 2, weights=weights)
    assert weights.begin_step() == 3


@pytest.mark.parametrize("name", ["memory_bytes", "enabled", "sats"])
def test_other_names_are_no_commands(name):
    with pytest.raises(ValueError, match=f"the rollout_spec command must be one of .*, got '{name}'"):
        run(a_speculation([]), name)
