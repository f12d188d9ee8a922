"""History goes on where a model's draft ends."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.drafters import build_drafter

K = 6
ROLLOUT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture
def drafter():
    """One rollout of the problem is known, and a request that has said 20 21."""
    drafter = build_drafter("suffix", max_draft_tokens=K)
    for req_id, tokens in (("old", ROLLOUT), ("new", [20, 21])):
        drafter.start_request(req_id, [1, 2], problem_id=5, seed=7)
        drafter.extend(req_id, tokens)
        if req_id == "old":
            drafter.stop_request("old")
    assert drafter.propose(["new"], np.array([K]))[0].token_ids.size == 0, "history alone is silent"
    return drafter


def rows(drafter, *req_ids):
    return np.array([drafter.row_of(req_id) for req_id in req_ids])


def continued(drafter, given, survival=0.5, limit=K):
    return drafter.continue_batch(
        rows(drafter, "new"), np.array([given], np.int32), np.array([survival]), np.array([limit])
    )


def test_what_followed_the_models_tokens_follows_them(drafter):
    drafts = continued(drafter, [5, 6])
    assert drafts.token_ids[0, : drafts.lengths[0]].tolist() == [5, 6, 7, 8, 9, 10]
    confidence = drafts.confidence[0].tolist()
    assert confidence[:2] == [0.5, 0.5]
    assert 0 < confidence[-1] <= confidence[2] <= 0.5
    assert continued(drafter, [5, 6], limit=3).lengths.tolist() == [3]
    assert continued(drafter, [5, 6], limit=2).lengths.tolist() == [2]
    assert continued(drafter, [30, 31]).lengths.tolist() == [2], "nothing is known that follows"


def test_a_draft_of_its_own_goes_on_as_it_would_have(drafter):
    """Given the beginning of history's draft, its continuation is the rest of it, with and without noise."""
    drafter.start_request("again", [1, 2], problem_id=5, seed=3)
    drafter.extend("again", ROLLOUT[:2])
    (draft,) = drafter.propose(["again"], np.array([K]))
    own = draft.token_ids.tolist()
    assert len(own) == K
    for n in (1, 2, 4):
        drafts = drafter.continue_batch(
            rows(drafter, "again"), np.array([own[:n]], np.int32), np.array([1.0]), np.array([K])
        )
        assert drafts.token_ids[0].tolist() == own


def other_counts(drafter):
    return {name: counts for name, counts in drafter.source_counts().items() if name != "problem"}


def test_only_what_history_added_is_counted(drafter):
    """Before: nothing. The model's two tokens and one of history's four were right."""
    continued(drafter, [5, 6])
    before, others = drafter.source_counts()["problem"], other_counts(drafter)
    drafter.observe_continued(rows(drafter, "new"), np.array([5, 6, 7, 30]), np.array([0, 4]), np.array([3]))
    reached, right = (b - a for a, b in zip(before, drafter.source_counts()["problem"], strict=True))
    assert (reached, right) == (2, 1)
    drafter.observe_continued(rows(drafter, "new"), np.array([5, 6, 7, 30]), np.array([0, 4]), np.array([3]))
    assert drafter.source_counts()["problem"] == (before[0] + 2, before[1] + 1), "an outcome is counted once"
    continued(drafter, [5, 6])
    drafter.observe_continued(rows(drafter, "new"), np.array([5, 9]), np.array([0, 2]), np.array([1]))
    assert drafter.source_counts()["problem"] == (before[0] + 2, before[1] + 1), "the model was wrong first"
    assert other_counts(drafter) == others, "the model's tokens are nobody's"


def test_more_requests_than_there_was_room_for(drafter):
    continued(drafter, [5, 6])
    for i in range(20):
        drafter.start_request(str(i), [1, 2], problem_id=5, seed=i)
    drafter.propose([str(i) for i in range(20)], np.full(20, K))
    many = rows(drafter, *map(str, range(20)))
    drafts = drafter.continue_batch(many, np.tile([[5, 6]], (20, 1)).astype(np.int32), np.ones(20), np.full(20, K))
    assert (drafts.token_ids[:, 2] == 7).all()
    drafter.check_integrity()
