"""The lookahead pool: what the target said after a rejected draft."""

import numpy as np
import pytest

from rollout_spec.drafters.host import voting
from tests.drafters.recorder import Recorder, reject


def rejected_draft():
    """A request whose draft, from another problem, was rejected: the target said 61 after (3, 4, 50)."""
    recorder = Recorder(shared=True, lookahead=True)
    recorder.start("h", [1, 2, 3, 4], [50, 51, 52], problem_id=8)
    recorder.start("r", [1, 2, 3, 4], problem_id=7)
    assert recorder.draft("r") == [50, 51, 52]
    reject(recorder.drafter, ["r"], [[60, 61, 62, 63]])
    recorder.extend("r", [60])
    return recorder


def test_what_the_target_said_after_a_rejected_draft_is_drafted():
    recorder = rejected_draft()
    assert recorder.draft("r") == []
    recorder.extend("r", [3, 4, 50])
    (draft,) = recorder.propose("r", limit=3)
    assert draft.token_ids.tolist() == [61]
    assert 0 < draft.confidence[0] < 1
    recorder.extend("r", [61, 9])
    assert recorder.drafter._outcomes.sum(0).tolist() == [2, 1]


def test_siblings_share_the_pool_and_other_problems_do_not():
    """Nor does one that takes the place of another."""
    recorder = rejected_draft()
    recorder.start("s", [9, 3, 4, 50], problem_id=7)
    assert recorder.draft("s", 1) == [61]
    for problem_id in (9, 10):
        recorder.start("t", [9, 3, 4, 50], problem_id=problem_id)
        assert recorder.draft("t", 1) == [51]
        for req_id in ("r", "s", "t") if problem_id == 9 else ("t",):
            recorder.stop(req_id, keep=False)


def test_the_pool_takes_its_share_and_leaves_a_distribution():
    found, mass = np.array([5, 6, 0], np.int32), np.array([0.5, 0.3, 0.0])
    assert voting.blend_in(6, 0.4, 2, found, mass) == 2
    assert mass == pytest.approx([0.3, 0.58, 0.0])
    assert voting.blend_in(9, 0.4, 2, found, mass) == 3
    assert found.tolist() == [5, 6, 9]
    assert mass == pytest.approx([0.18, 0.348, 0.4])
    assert voting.blend_in(4, 0.4, 0, found, mass) == 1
    assert (found[0], mass[0]) == (4, 0.4)
