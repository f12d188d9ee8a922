"""Drafts that fill the time for which the device would wait for the host."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from rollout_spec.integrations.vllm import host_time
from rollout_spec.integrations.vllm.host_time import STEPS, HostTime
from rollout_spec.step_sizes import HOST_SHARE, known_costs

GRAPHS = 32
"""Tokens of the largest CUDA graph."""


class Timing:
    """As vLLM's `StepTimingCollector`."""

    def __init__(self):
        self.launched = 0

    def forward_start(self):
        self.launched += 1


class Manager:
    """Decides as vLLM's `AdaptiveVerificationManager` does, whose drafts are each accepted with a chance of a half."""

    def __init__(self):
        self.cost_tables = np.full(9, 1.0), 1.0 + np.arange(65.0)
        self.tables = self.cost_tables
        self._cudagraph_limit = GRAPHS
        self._copy_events = [SimpleNamespace(query=lambda: False), SimpleNamespace(query=lambda: True)]
        self._stale_idx = 0
        self.recorded = []

    def record_confidences(self, confidences, input_batch):
        self.recorded.append(confidences)

    def get_num_tokens(self, num_tokens_per_req, draft_tokens):
        drafting, verifying = self.cost_tables
        requests = len(num_tokens_per_req)
        drafts = sum(map(len, draft_tokens.values()))
        gains = requests + 0.5 * np.arange(drafts + 1)
        return requests + int(np.argmax(gains / (drafting[requests] + verifying[requests : requests + drafts + 1])))


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(host_time.time, "perf_counter", lambda: now.seconds)
    return now


def build(share=None, is_drafting=lambda: True):
    manager, timing = Manager(), Timing()
    HostTime(manager, timing, share, is_drafting)  # of another capture of graphs
    return manager, HostTime(manager, timing, share, is_drafting), timing


def decide(manager, requests=2, k=10):
    ids = [str(i) for i in range(requests)]
    return manager.get_num_tokens(dict.fromkeys(ids, 1 + k), {name: [0] * k for name in ids})


def run(manager, timing, clock, milliseconds, *, waits, steps=STEPS):
    manager._stale_idx = 0 if waits else 1  # the event of the last step is the other one
    for _ in range(steps):
        manager.record_confidences(None, None)
        clock.seconds += milliseconds / 1e3
        timing.forward_start()


def test_made_up_steps_say_nothing(clock):
    """Those that vLLM measures at its start, and with which data-parallel ranks wait for others."""
    manager, host, timing = build()
    for _ in range(3 * STEPS):
        clock.seconds += 0.5
        timing.forward_start()
    decide(manager)
    assert host.milliseconds == 0.0
    run(manager, timing, clock, 20.0, waits=True, steps=2)
    decide(manager)
    assert host.milliseconds == pytest.approx(20.0)


def test_steps_without_drafts_say_nothing_and_leave_confidences_as_they_are(clock):
    drafting = [True]
    manager, host, timing = build(is_drafting=lambda: drafting[0])
    run(manager, timing, clock, 20.0, waits=True)
    assert len(manager.recorded) == STEPS
    drafting[0] = False
    run(manager, timing, clock, 3.0, waits=True)
    for _ in range(STEPS):
        drafting[0] = True
        run(manager, timing, clock, 90.0, waits=True, steps=1)  # the device's last event is of a step before the pause
        drafting[0] = False
        run(manager, timing, clock, 3.0, waits=True, steps=1)
    decide(manager)
    assert host.milliseconds == pytest.approx(20.0)
    assert len(manager.recorded) == 2 * STEPS


def test_the_host_may_have_waited_if_the_device_was_busy_at_the_launch_before(clock):
    manager, host, timing = build()
    run(manager, timing, clock, 20.0, waits=True)
    for _ in range(STEPS):
        run(manager, timing, clock, 30.0, waits=False, steps=1)
        run(manager, timing, clock, 30.0, waits=True, steps=1)
    decide(manager)
    assert host.milliseconds == pytest.approx(20.0)


def test_drafts_fill_the_host_s_time(clock):
    manager, host, timing = build()
    assert decide(manager) == 2, "each costs a millisecond, for half a token"
    run(manager, timing, clock, 20.0, waits=True, steps=STEPS + 1)
    assert timing.launched == STEPS + 1
    num_tokens = decide(manager)
    assert host.milliseconds == pytest.approx(20.0)
    assert num_tokens + 2.0 == HOST_SHARE * 20.0, "as many as the device verifies while the host takes its time"
    assert manager.cost_tables is manager.tables


def test_one_long_step_says_nothing(clock):
    manager, host, timing = build()
    run(manager, timing, clock, 4.0, waits=True)
    run(manager, timing, clock, 60_000.0, waits=True, steps=1)
    decide(manager)
    assert host.milliseconds == pytest.approx(4.0)


def test_a_device_that_does_not_wait_says_how_long_the_host_takes_at_most(clock):
    manager, host, timing = build()
    run(manager, timing, clock, 9.0, waits=False)
    decide(manager)
    assert host.milliseconds == 0.0
    run(manager, timing, clock, 20.0, waits=True)
    run(manager, timing, clock, 30.0, waits=False, steps=1)
    decide(manager)
    assert host.milliseconds == pytest.approx(20.0)
    run(manager, timing, clock, 10.0, waits=False, steps=1)
    decide(manager)
    assert host.milliseconds == pytest.approx(10.0)
    run(manager, timing, clock, 20.0, waits=True, steps=STEPS + 1)
    decide(manager)
    assert host.milliseconds == pytest.approx(20.0), "what was before that is forgotten"


def test_steps_beyond_the_graphs_take_the_host_s_time_as_well(clock):
    manager, host, timing = build()
    run(manager, timing, clock, 100.0, waits=True)
    decide(manager)
    on_device = np.arange(65.0)
    costs = known_costs(on_device, host.milliseconds, np.arange(65), GRAPHS)
    assert costs[: GRAPHS + 1] == pytest.approx(HOST_SHARE * 100.0)
    assert costs[GRAPHS + 1 :] == pytest.approx(on_device[GRAPHS + 1 :] + HOST_SHARE * 100.0)


def test_ranks_follow_the_first_one_which_is_asked_seldom(clock):
    asked = []
    manager, host, timing = build(share=lambda value: asked.append(value) or 8.0)
    run(manager, timing, clock, 20.0, waits=True)
    for _ in range(STEPS + 1):
        decide(manager)
        assert host.milliseconds == 8.0
    assert asked == pytest.approx([20.0, 20.0])
