"""When a model's drafts count as rarely right."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.integrations.vllm.draft_watch import MIN_TRIALS, DraftWatch


def observe(versions, watch=None):
    """What is said at the end of each version, of which `versions` has (trials, right)."""
    watch = watch or DraftWatch()
    totals = np.cumsum(versions, 0).tolist()
    return [watch.judge(version, *counts) for version, counts in enumerate(totals, 1)]


def test_a_fall_is_said_once_with_figures():
    said = observe([(1000, 300), (1000, 560), (1000, 540), (1000, 210), (1000, 200), (1000, 0)])
    assert [message is not None for message in said] == [False, False, False, True, False, False]
    assert "21.0 % of 1000 in policy version 3, after 56.0 % of 1000 in policy version 1" in said[3]
    assert "Update the drafter's weights too" in said[3]
    assert "sleep level 2" in said[3]


def test_a_model_that_was_never_right_has_no_better_version():
    (message,) = observe([(400, 0)])
    assert "0.0 % of 400 in policy version 0, counting" in message


@pytest.mark.parametrize(
    "versions",
    [
        [(MIN_TRIALS - 1, 0)],
        [(1000, 560), (MIN_TRIALS - 1, 0)],
        [(MIN_TRIALS - 1, MIN_TRIALS - 1), (1, 1), (10_000, 5100)],
        [(1000, 560), (1000, 300)],
        [(10_000, 520)],
        [(400, 19)],
        [(0, 0)] * 5,
    ],
    ids=["few", "few after many", "few before many", "more than half", "more than 5 %", "by chance", "no drafts"],
)
def test_no_cause(versions):
    assert observe(versions) == [None] * len(versions)


def test_small_versions_are_judged_together():
    said = observe([(500, 250)] + [(100, 1)] * 4)
    assert said[:4] == [None] * 4
    assert "1.0 % of 400 in policy versions 1 to 4, after 50.0 % of 500 in policy version 0" in said[4]


def test_versions_without_drafts_are_not_named():
    watch = DraftWatch()
    assert observe([(0, 0)] * 3, watch) == [None] * 3
    assert "policy version 3," in watch.judge(9, 400, 0)


def test_a_version_can_be_judged_before_it_ends():
    watch = DraftWatch()
    assert watch.judge(0, 300, 0) is None
    assert "0.0 % of 500 in policy version 0" in watch.judge(0, 500, 0)


@pytest.mark.parametrize("rate", [0.08, 0.1, 0.3, 0.6, 0.95])
def test_no_alarm_by_chance(rate):
    right = np.random.default_rng(int(100 * rate)).binomial(MIN_TRIALS, rate, 1000)
    assert observe([(MIN_TRIALS, count) for count in right]) == [None] * len(right)


@pytest.mark.parametrize("counts", [(2, 9, 5), (2, 10, 4), (2, 11, 7), (2, -1, -1)])
def test_counts_are_of_the_whole_run(counts):
    watch = DraftWatch()
    watch.judge(1, 10, 5)
    with pytest.raises(ValueError, match="since the start"):
        watch.judge(*counts)


def test_versions_do_not_fall():
    watch = DraftWatch()
    watch.judge(3, 0, 0)
    with pytest.raises(ValueError, match="got 2 after 3"):
        watch.judge(2, 0, 0)
