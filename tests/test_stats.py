"""Counters of speculation."""

import pytest

from rollout_spec.stats import SpeculationStats


def test_rates_of_steps_without_requests_and_without_drafts():
    for num_requests in (0, 2):
        stats = SpeculationStats()
        stats.record([0] * num_requests, [0] * num_requests)
        assert (stats.steps, stats.request_steps, stats.num_drafts, stats.draft_tokens) == (1, num_requests, 0, 0)
        assert (stats.acceptance_rate, stats.mean_acceptance_length) == (0.0, 1.0)
        assert (stats.tokens_per_step, stats.accepted_per_position) == (min(num_requests, 1), [])


def test_positions_count_the_drafts_that_got_that_far():
    stats = SpeculationStats()
    stats.record([4, 4, 4, 0], [4, 0, 2, 0])
    stats.record([1], [1])
    assert stats.accepted_per_position == [3, 2, 1, 1]
    assert stats.drafted_per_position == [4, 3, 3, 3]
    assert sum(stats.drafted_per_position) == stats.draft_tokens
    assert sum(stats.accepted_per_position) == stats.accepted_tokens == 7
    assert stats.to_dict()["rejected_tokens"] == 13 - 7
    assert stats.mean_acceptance_length == pytest.approx(1 + 7 / 4)
    assert stats.emitted_tokens == 7 + 5


def test_intervals_add_up():
    """Also where the later one has longer drafts or larger batches."""
    whole = SpeculationStats()
    for size in (1, 2, 5):
        before, part = whole.to_dict(), SpeculationStats()
        for stats in (whole, part):
            stats.record([size] * size, [size - 1] * size)
            stats.draft_seconds += 0.5
        assert SpeculationStats.between(before, whole.to_dict()) == part
