"""What a step takes the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from rollout_spec.integrations.vllm import host_time
from rollout_spec.integrations.vllm.host_time import STEPS, HostTime


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(host_time.time, "perf_counter", lambda: now.seconds)
    return now


class Host(HostTime):
    """On a device that waits where `waits` says so."""

    def __init__(self, share=None):
        self.waits = True
        super().__init__(lambda: self.waits, share)

    def run(self, clock, milliseconds, *, waits, steps=STEPS, is_drafting=True):
        self.waits = waits
        for _ in range(steps):
            self.is_step = is_drafting
            clock.seconds += milliseconds / 1e3
            self.launch()

    def known(self):
        """Once it is asked again."""
        return [self.for_next_step() for _ in range(STEPS)][-1]


def test_made_up_steps_say_nothing(clock):
    """Those that vLLM measures at its start, and with which data-parallel ranks wait for others."""
    host = Host()
    for _ in range(3 * STEPS):
        clock.seconds += 0.5
        host.launch()
    assert host.known() == 0.0
    host.run(clock, 20.0, waits=True, steps=2)
    assert host.known() == pytest.approx(20.0)


def test_steps_without_drafts_say_nothing(clock):
    host = Host()
    host.run(clock, 20.0, waits=True)
    host.run(clock, 3.0, waits=True, is_drafting=False)
    for _ in range(STEPS):
        host.run(clock, 90.0, waits=True, steps=1)  # the device's last event is of a step before the pause
        host.run(clock, 3.0, waits=True, steps=1, is_drafting=False)
    assert host.known() == pytest.approx(20.0)


def test_the_host_may_have_waited_if_the_device_was_busy_at_the_launch_before(clock):
    host = Host()
    host.run(clock, 20.0, waits=True)
    for _ in range(STEPS):
        host.run(clock, 30.0, waits=False, steps=1)
        host.run(clock, 30.0, waits=True, steps=1)
    assert host.known() == pytest.approx(20.0)


def test_one_long_step_says_nothing(clock):
    host = Host()
    host.run(clock, 4.0, waits=True)
    host.run(clock, 60_000.0, waits=True, steps=1)
    assert host.known() == pytest.approx(4.0)


def test_a_device_that_does_not_wait_says_how_long_the_host_takes_at_most(clock):
    host = Host()
    host.run(clock, 9.0, waits=False)
    assert host.known() == 0.0
    host.run(clock, 20.0, waits=True)
    host.run(clock, 30.0, waits=False, steps=1)
    assert host.known() == pytest.approx(20.0)
    host.run(clock, 10.0, waits=False, steps=1)
    assert host.known() == pytest.approx(10.0)
    host.run(clock, 20.0, waits=True, steps=STEPS + 1)
    assert host.known() == pytest.approx(20.0), "what was before that is forgotten"


def test_ranks_follow_the_first_one_which_is_asked_seldom(clock):
    asked = []
    host = Host(share=lambda value: asked.append(value) or 8.0)
    host.run(clock, 20.0, waits=True)
    for _ in range(STEPS + 1):
        assert host.for_next_step() == 8.0
    assert asked == pytest.approx([20.0, 20.0])


def test_the_time_of_a_step_is_that_of_its_forward_passes(clock):
    """A launch ends the time of the step before, with that one's passes."""
    host = Host()
    for n in (1, 3) * STEPS:
        host.is_step = True
        clock.seconds += 0.020 * host._num_passes
        host.launch(n)
    assert host._last == pytest.approx([20.0] * STEPS)
