"""What logs have twice counts once, and what was said twice in truth stays."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.history.logs import Copies


def find(*steps):
    """Of each step the problems whose groups are copies. Texts are numbers."""
    copies = Copies()
    arrays = [{p: [np.array([text], np.int32) for text in group] for p, group in step.items()} for step in steps]
    found = [copies.find(step) for step in arrays]
    assert copies.num_dropped == sum(len(step[p]) for step, some in zip(steps, found, strict=True) for p in some)
    return found[1:]


STEP = {1: [10, 11, 12, 11], 2: [20, 20, 20, 20], 3: [30, 31, 32, 33]}
NEXT = {4: [40, 41], 1: [10, 11, 13, 11]}


@pytest.mark.parametrize(
    ("later", "copied"),
    [
        ([STEP], [{1, 2, 3}]),
        ([{p: group[::-1] for p, group in reversed(STEP.items())}], [{1, 2, 3}]),
        ([STEP, STEP], [{1, 2, 3}] * 2),
        ([NEXT, STEP, NEXT], [set(), {1, 2, 3}, {1, 4}]),
        ([{1: STEP[1], 2: STEP[2], 5: [50]}, {5: [50]}], [{1, 2}, {5}]),  # logs that overlap
        ([{3: STEP[3]}], [{3}]),
        ([{1: STEP[1][2:], 2: STEP[2], 3: STEP[3]}], [{1, 2, 3}]),  # a log that begins within a group
        ([{1: STEP[1], 2: STEP[2], 3: [30, 31, 32, 34]}], [set()]),  # a prompt that both have says something else
        ([{2: STEP[2], 5: [50]}], [set()]),  # one prompt of several: it may always be answered so
        ([{1: [10, 11, 12, 11, 11], 2: STEP[2], 3: STEP[3]}], [set()]),  # more than the earlier step has
    ],
)
def test_a_group_is_a_copy_where_all_that_two_steps_share_is_equal(later, copied):
    assert find(STEP, *later) == copied


def test_a_policy_that_often_says_the_same_loses_nothing():
    rng = np.random.default_rng(0)
    steps = [
        {int(p): rng.choice(2, 4, p=[0.9, 0.1]).tolist() for p in rng.permutation(40)[:8]}  # shuffled epochs
        for _ in range(40)
    ]
    assert not any(find({}, *steps))
