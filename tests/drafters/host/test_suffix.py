"""The suffix tree against brute force, however it was grown and whatever was taken out of it."""

import pytest

from rollout_spec.drafters.host.constants import ENOUGH_CANDIDATES, MAX_CANDIDATES
from rollout_spec.drafters.host.suffix import MAX_WALK
from tests.drafters.recorder import Recorder


def test_the_newest_of_equal_matches_is_among_the_candidates():
    """More equal matches than a lookup gathers."""
    recorder = Recorder()
    for i in range(2 * MAX_CANDIDATES):
        recorder.start(str(i), [1, 2, 3], [i], problem_id=7)
    recorder.drafter._flush()
    found = recorder.tree_candidates(recorder.problem("0"), [1, 2, 3])
    assert len(found) == MAX_CANDIDATES
    assert found[0] == ((recorder.drafter._live[str(2 * MAX_CANDIDATES - 1)].document, 0), 3)


def counting(num):
    return [token for i in range(1, num) for token in (i, 0)]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(counting(4 * MAX_WALK), id="counting-up"),
        pytest.param(counting(4 * MAX_WALK)[::-1], id="counting-down"),
        pytest.param([0] * 6 * MAX_WALK, id="one-token"),
        pytest.param([0, 1] * 4 * MAX_WALK, id="two-tokens"),
        pytest.param(([0] * 40 + [1]) * 16, id="runs"),
        pytest.param([int(c) for i in range(1, 6 * MAX_WALK) for c in f"{i:b}2"], id="binary-numbers"),
    ],
)
def test_regular_texts_do_not_hide_matches(text):
    """The walk down is bounded: a text that makes the tree a list would hide its older contexts."""
    recorder = Recorder()
    recorder.start("a", [], text, problem_id=7)
    recorder.start("b", [], [0], problem_id=7)  # a second text, so that removal has something to leave
    recorder.drafter._flush()
    problem = recorder.problem("a")
    for end in range(1, len(text), 37):
        recorder.check_tree(problem, text[:end])
    recorder.drafter.check_integrity()
    recorder.stop("a", keep=False)
    recorder.check()


def test_other_problems_are_found_behind_ones_own():
    """The own problem's positions, which its own tree gives, must not use up the shared tree's candidates."""
    recorder = Recorder(shared=True)
    recorder.start("other", [9, 1, 2, 3], [50], problem_id=8)
    for i in range(ENOUGH_CANDIDATES):
        recorder.start(str(i), [8, 1, 2, 3], [i], problem_id=7)
    recorder.drafter._flush()
    found = recorder.tree_candidates(recorder.problem("0"), [1, 2, 3], shared=True)
    assert found[0] == ((recorder.drafter._live["other"].document, 0), 3)
