"""Metrics of a server, with answers in place of an engine's."""

from __future__ import annotations

import asyncio

import pytest

from rollout_spec.integrations.vllm.metrics import COUNTERS, GAUGES, ServerMetrics

prometheus = pytest.importorskip("prometheus_client")
NAMES = {name: f"{name}_total" for name in COUNTERS} | {name: f"history_{name}" for name in GAUGES}


def shown(model):
    values = {name: prometheus.REGISTRY.get_sample_value(f"rollout_spec:{NAMES[name]}", {"model_name": model})
              for name in NAMES}  # fmt: skip
    return {name: value for name, value in values.items() if value}


def asked(metrics, *answers):
    """Refresh once per answer, each after the one before has come."""

    async def ask_all():
        for answer in answers:

            async def ask(method, args, answer=answer):
                assert method == "rollout_spec"
                if isinstance(answer, Exception):
                    raise answer
                return [answer[args[0]]]

            metrics.refresh(ask)
            await metrics._task

    asyncio.run(ask_all())


def test_counters_grow_and_gauges_follow():
    first = {"stats": {"emitted_tokens": 10, "request_steps": 5, "steps": 9}, "history": {"rollouts": 3, "requests": 4}}
    later = {"stats": {"emitted_tokens": 16, "request_steps": 7, "steps": 9}, "history": {"rollouts": 1, "requests": 4}}
    metrics = ServerMetrics("grow")
    asked(metrics, first)
    assert shown("grow") == {"emitted_tokens": 10, "request_steps": 5, "rollouts": 3, "requests": 4}
    asked(metrics, later)
    assert shown("grow") == {"emitted_tokens": 16, "request_steps": 7, "rollouts": 1, "requests": 4}
    asked(ServerMetrics("other"), later)
    assert shown("grow")["emitted_tokens"] == 16


def test_an_engine_without_speculation_has_no_history():
    asked(ServerMetrics("off"), {"stats": {"emitted_tokens": 3}, "history": {}})
    assert shown("off") == {"emitted_tokens": 3}


def test_while_an_answer_is_awaited_nothing_more_is_asked():
    calls = []

    async def hang(*args, **kwargs):
        calls.append(args)
        await asyncio.Event().wait()

    async def ask_thrice():
        metrics = ServerMetrics("hang")
        for _ in range(3):
            metrics.refresh(hang)
            await asyncio.sleep(0)

    asyncio.run(ask_thrice())
    assert len(calls) == 1


def test_an_engine_that_does_not_answer_costs_one_warning(caplog):
    metrics = ServerMetrics("gone")
    asked(metrics, {"stats": {"emitted_tokens": 3}, "history": {}}, RuntimeError("dead"), RuntimeError("dead"))
    assert [record.getMessage() for record in caplog.records] == [
        "the engine does not answer, so rollout_spec's metrics stay as they are: dead"
    ]
    assert shown("gone") == {"emitted_tokens": 3}
    asked(metrics, {"stats": {"emitted_tokens": 5}, "history": {}}, RuntimeError("again"), RuntimeError("again"))
    assert [record.getMessage()[-5:] for record in caplog.records] == [" dead", "again"], "it had answered in between"
