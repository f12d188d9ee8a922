"""Counters of speculation."""

from __future__ import annotations

import json

import pytest

from rollout_spec.report import stats as stats_module
from rollout_spec.report.stats import Progress, SpeculationStats


def test_rates_of_nothing():
    stats = SpeculationStats()
    stats.record([], [])
    assert (stats.steps, stats.request_steps) == (1, 0)
    assert (stats.acceptance_rate, stats.mean_acceptance_length, stats.tokens_per_step) == (0.0, 1.0, 0.0)


def test_rates_of_steps_without_drafts():
    stats = SpeculationStats()
    stats.record([0, 0], [0, 0])
    assert (stats.num_drafts, stats.draft_tokens, stats.emitted_tokens) == (0, 0, 2)
    assert (stats.acceptance_rate, stats.mean_acceptance_length, stats.tokens_per_step) == (0.0, 1.0, 1.0)
    assert stats.accepted_per_position == []


def test_positions_count_the_drafts_that_got_that_far():
    stats = SpeculationStats()
    stats.record([4, 4, 4, 0], [4, 0, 2, 0])
    stats.record([1], [1])
    assert stats.accepted_per_position == [3, 2, 1, 1]
    assert stats.drafted_per_position == [4, 3, 3, 3]
    assert sum(stats.drafted_per_position) == stats.draft_tokens
    assert sum(stats.accepted_per_position) == stats.accepted_tokens == 7
    assert stats.rejected_tokens == 13 - 7
    assert stats.mean_acceptance_length == pytest.approx(1 + 7 / 4)
    assert stats.emitted_tokens == 7 + 5


def test_dictionaries_are_plain_snapshots():
    stats = SpeculationStats()
    stats.record([2], [2])
    snapshot = stats.to_dict()
    assert json.loads(json.dumps(snapshot)) == snapshot
    stats.record([2], [1])
    assert snapshot["accepted_per_position"] == [1, 1]
    assert stats.accepted_per_position == [2, 1]


def test_what_happened_between():
    stats = SpeculationStats(draft_seconds=1.0)
    start = stats.to_dict()
    stats.record([3, 1], [1, 1])
    stats.drafter_errors += 2
    stats.draft_seconds += 0.5
    middle = stats.to_dict()
    stats.record([3], [3])
    end = stats.to_dict()
    first, second = SpeculationStats.between(start, middle), SpeculationStats.between(middle, end)
    assert (first.drafter_errors, first.draft_seconds, first.accepted_per_position) == (2, 0.5, [2])
    assert second.accepted_per_position == [1, 1, 1]
    assert second.acceptance_rate == 1.0
    assert SpeculationStats.between(end, end) == SpeculationStats(
        drafted_per_position=[0, 0, 0], accepted_per_position=[0, 0, 0]
    )
    for name in ("steps", "request_steps", "draft_tokens", "accepted_tokens", "emitted_tokens"):
        assert getattr(first, name) + getattr(second, name) == getattr(stats, name)


def test_a_step_without_drafting_asked_for_none():
    stats = SpeculationStats()
    for draft_seconds in (0.0, 0.1, 0.0):
        stats.record_time(
            1.0, num_requests=4, draft_tokens=0, tokens=4, draft_seconds=draft_seconds, reads_prompts=False
        )
    assert (stats.steps_by_batch, stats.asked_by_batch) == ([0, 0, 3], [0, 0, 1])


def test_times_by_batch():
    stats = SpeculationStats()
    for requests, prompts in ((1, False), (3, False), (2, False), (64, True)):
        stats.record_time(
            0.5, num_requests=requests, draft_tokens=4, tokens=2 * requests, draft_seconds=0.1, reads_prompts=prompts
        )
    assert stats.step_seconds == 2.0
    assert (stats.steps_by_batch, stats.requests_by_batch) == ([1, 2], [1, 5])
    assert (stats.draft_tokens_by_batch, stats.tokens_by_batch) == ([4, 8], [2, 10])
    assert (stats.seconds_by_batch, stats.draft_seconds_by_batch) == ([0.5, 1.0], [0.1, 0.2])


def some_progress(num_logs, first=1):
    """One log per training step, of which step n emitted n tokens."""
    progress = Progress()
    for step in range(first, first + num_logs):
        progress.add(step, SpeculationStats(request_steps=1, emitted_tokens=step, draft_tokens=2), 0.5)
    return progress


@pytest.mark.parametrize("num_logs", [1, 10, 11, 12, 13, 200, 777])
def test_a_long_series_is_thinned_and_loses_nothing(monkeypatch, num_logs):
    monkeypatch.setattr(stats_module, "MAX_PROGRESS_POINTS", 10)
    points = some_progress(num_logs).points
    assert len(points) == num_logs if num_logs <= 10 else 5 <= len(points) <= 10
    assert sum(point.emitted_tokens for point in points) == num_logs * (num_logs + 1) / 2
    assert sum(point.num_logs for point in points) == num_logs == points[-1].global_step
    assert sum(point.draft_tokens for point in points) == 2 * num_logs
    assert sum(point.generation_seconds for point in points) == num_logs / 2
    *whole, last = points
    assert {point.num_logs for point in whole} <= {points[0].num_logs}, "each point covers as many logs"
    assert last.num_logs <= points[0].num_logs
    end = 0
    for point in points:  # each is the sum of its own logs
        assert point.emitted_tokens == sum(range(end + 1, point.global_step + 1))
        end = point.global_step


def test_a_series_goes_on_where_it_was_interrupted(monkeypatch):
    monkeypatch.setattr(stats_module, "MAX_PROGRESS_POINTS", 10)
    whole, earlier = some_progress(24), some_progress(19)
    resumed = Progress.from_dict(json.loads(json.dumps(earlier.to_dict())))
    for point in some_progress(5, first=20).points:
        resumed.add(point.global_step, SpeculationStats(1, 1, 0, 2, 0, point.emitted_tokens), 0.5)
    assert resumed.points == whole.points
    assert [point.global_step for point in Progress.from_dict(whole.to_dict(), up_to=9).points] == [4, 8]
    assert Progress.from_dict(Progress().to_dict()).points == []


def test_intervals_add_up():
    """Also where the later one has longer drafts or larger batches."""
    whole, parts = SpeculationStats(), []
    for size in (1, 2, 5):
        before = whole.to_dict()
        whole.record([size] * size, [size - 1] * size)
        whole.record_time(0.5, num_requests=size, draft_tokens=size, tokens=2, draft_seconds=0.1, reads_prompts=False)
        parts.append(SpeculationStats.between(before, whole.to_dict()))
    assert sum(parts, SpeculationStats()).to_dict() == whole.to_dict()
