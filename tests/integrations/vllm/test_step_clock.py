"""Seconds by a GPU's events, which count in milliseconds and pass later."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from rollout_spec.integrations.vllm.engine import STEPS_PER_TIMED, StepClock
from rollout_spec.stats import SpeculationStats


class Event:
    """The n-th event is n * 500 ms after the first, and passes when `now` is past it."""

    made = now = 0

    def __init__(self, enable_timing):
        Event.made += 1
        self.at = 500.0 * Event.made

    def record(self):
        """At once."""

    def query(self):
        return self.at <= Event.now

    def elapsed_time(self, later):
        return later.at - self.at


def test_events_of_one_step_in_sixteen_are_read_once_they_have_passed(monkeypatch):
    """Each forward pass of a step counts; a step after which the engine was idle does not."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    stats = SpeculationStats()
    clock = StepClock(torch.device("cuda"), stats)

    def steps(count, *, is_busy=True, num_passes=1):
        for _ in range(count):
            clock.start(is_busy=is_busy, num_passes=num_passes)
            clock.stop()

    steps(STEPS_PER_TIMED + 1)
    assert (Event.made, stats.timed_steps) == (2, 0), "not passed yet"
    Event.now = 1e9
    clock.read()
    assert (stats.timed_steps, stats.device_seconds) == (1, 0.5)
    assert stats.step_seconds > 0
    steps(STEPS_PER_TIMED - 1)
    steps(1, is_busy=False)
    assert stats.timed_steps == 1, "the engine was idle after it"
    steps(STEPS_PER_TIMED - 2)
    steps(1, num_passes=3)
    steps(1)
    assert stats.timed_steps == 1 + 3
