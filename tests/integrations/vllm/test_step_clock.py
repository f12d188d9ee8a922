"""Seconds of a step's parts by a GPU's events, which count in milliseconds and pass later."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from rollout_spec.integrations.vllm.step_clock import StepClock
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


def test_events_are_read_in_seconds_once_they_have_passed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    stats = SpeculationStats()
    clock = StepClock(torch.device("cuda"), stats)
    clock.start(), clock.start(), clock.mark(), clock.stop()
    assert (stats.forward_seconds, stats.verify_seconds) == (0.0, 0.0), "not passed yet"
    Event.now = 1e9
    clock.read()
    assert (stats.forward_seconds, stats.verify_seconds) == (0.5, 0.5)
    clock.start(), clock.stop()
    assert stats.forward_seconds == 0.5, "a step without verification does not count"
