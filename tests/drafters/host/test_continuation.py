"""History goes on where a model's draft ends."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.model.choice import ModelDrafts
from rollout_spec.drafting import Drafting
from tests.drafters.recorder import sampled

K = 6
ROLLOUT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture
def drafting():
    """One rollout of the problem is known, and a request that has said 20 21."""
    drafter = build_drafter("suffix", max_draft_tokens=K)
    for req_id, tokens in (("old", ROLLOUT), ("new", [20, 21])):
        drafter.start_request(req_id, [1, 2], problem_id=5, seed=7)
        drafter.extend(req_id, tokens)
        if req_id == "old":
            drafter.stop_request("old")
    assert drafter.propose(["new"], np.array([K]))[0].token_ids.size == 0, "history alone is silent"
    return Drafting(drafter, K, max_model_len=100, vocab_size=100, has_model=True)


def rows(drafting, *req_ids):
    return np.array([drafting.drafter.row_of(req_id) for req_id in req_ids])


def continued(drafting, *given, survival=0.5, limit=K, req_ids=("new",)):
    """(tokens, confidence) of the last request's draft, which begins with the given tokens."""
    size = len(req_ids)
    some = rows(drafting, *req_ids)
    table = drafting.drafter.table.arrays
    table.model_tokens[some, : len(given)], table.confidence[some, : len(given)] = given, survival
    table.num_offered[some] = len(given)
    drafting.drafter.continue_rows(some, np.full(size, limit))
    drafts, row = table.continued, some[-1]
    length = drafts.lengths[row]
    return drafts.tokens[row, :length].tolist(), drafts.confidence[row, :length].tolist()


def test_what_followed_the_models_tokens_follows_them(drafting):
    tokens, confidence = continued(drafting, 5, 6)
    assert tokens == [5, 6, 7, 8, 9, 10]
    assert 0 < confidence[-1] <= confidence[2] <= 0.5
    assert continued(drafting, 5, 6, limit=3)[0] == [5, 6, 7]
    assert continued(drafting, 5, 6, limit=2)[0] == [5, 6]
    assert continued(drafting, 5, 6, survival=0.001)[0] == [5, 6, 7], "its first token is graded however unlikely"
    assert continued(drafting, 30, 31)[0] == [30, 31], "nothing is known that follows"


def test_a_draft_of_its_own_goes_on_as_it_would_have(drafting):
    """Given the beginning of history's draft, its continuation is the rest of it, with and without noise."""
    for seed in (3, None):
        drafting.drafter.start_request("again", [1, 2], problem_id=5, seed=seed)
        drafting.drafter.extend("again", ROLLOUT[:2])
        (draft,) = drafting.drafter.propose(["again"], np.array([K]))
        own = draft.token_ids.tolist()
        assert len(own) == K
        for n in (1, 2, 4):
            assert continued(drafting, *own[:n], survival=1.0, req_ids=("again",))[0] == own
        drafting.drafter.stop_request("again", keep=False)


@pytest.mark.parametrize(
    ("said", "reached_and_right"),
    [
        ([5, 6, 7, 30], (2, 1)),  # the model's two tokens and one of history's four were right
        ([5, 6, 7, 8, 9, 10, 30], (4, 4)),
        ([5, 6], (0, 0)),  # where the rest was cut off
        ([5, 9, 7, 8], (0, 0)),  # the model was wrong
        ([30], (0, 0)),
    ],
)
def test_only_what_history_added_is_graded_and_only_where_the_model_was_right(drafting, said, reached_and_right):
    drafter, nothing = drafting.drafter, dict.fromkeys(drafting.drafter.source_counts(), (0, 0))
    learned = drafting.learn(sampled(drafter.table, rows(drafting, "new"), [[22]]))
    model = ModelDrafts(np.array([[5, 6]], np.int32), np.full((1, 2), 0.9, np.float32))
    drafts = drafting.draft(rows(drafting, "new"), learned.room, num_tokens=1, model=model)
    assert drafts.token_ids[0, : drafts.lengths[0]].tolist() == [5, 6, 7, 8, 9, 10]
    assert drafter.source_counts() == nothing
    drafting.learn(sampled(drafter.table, rows(drafting, "new"), [said], num_verified=[K]))
    for _ in range(2):  # an outcome is counted once
        assert drafter.source_counts() == {**nothing, "problem": reached_and_right}
        reached = min(len(said), 2) if said[0] == 5 else 1
        assert drafting.choice.model_counts() == (reached, sum(a == b for a, b in zip(said, [5, 6], strict=False)))
        drafting.learn(sampled(drafter.table, rows(drafting, "new"), [[7, 8]]))


def test_a_drafter_that_drafts_fewer_tokens_than_the_engine_verifies():
    """As one of a user's own may. Nor is more of the model's draft verified."""
    drafter = build_drafter("suffix", max_draft_tokens=2)
    drafting = Drafting(drafter, K, max_model_len=100, vocab_size=100, has_model=True)
    drafter.start_request("r", [1, 2])
    model = ModelDrafts(np.full((1, 4), 5, np.int32), np.full((1, 4), 0.9, np.float32))
    learned = drafting.learn(sampled(drafter.table, rows(drafting, "r"), [[3]]))
    drafts = drafting.draft(rows(drafting, "r"), learned.room, num_tokens=1, model=model)
    assert drafts.lengths.tolist() == [2]
    assert drafts.token_ids[0, :2].tolist() == [5, 5]


def test_a_continuation_does_not_outlive_its_step(drafting):
    """A step may bring nothing to a request. Its next draft, too short to be continued, must not end like the last."""
    some, model = rows(drafting, "new"), ModelDrafts(np.array([[5, 6]], np.int32), np.full((1, 2), 0.9, np.float32))
    learned = drafting.learn(sampled(drafting.drafter.table, some, [[22]]))
    assert drafting.draft(some, learned.room, num_tokens=1, model=model).lengths.tolist() == [K]
    drafting.drafter.table.limit(int(some[0]), max_tokens=3 + 2, min_tokens=0, stop_token_ids=[])
    learned = drafting.learn(sampled(drafting.drafter.table, some, [[]], [0]))
    assert learned.room.tolist() == [1]
    drafts = drafting.draft(some, learned.room, num_tokens=1, model=model)
    assert drafts.token_ids[0, : drafts.lengths[0]].tolist() == [5]


def test_a_request_does_not_inherit_the_continuation_of_one_that_was_aborted(drafting):
    drafter, nothing = drafting.drafter, dict.fromkeys(drafting.drafter.source_counts(), (0, 0))
    some, model = rows(drafting, "new"), ModelDrafts(np.array([[5, 6]], np.int32), np.full((1, 2), 0.9, np.float32))
    learned = drafting.learn(sampled(drafter.table, some, [[22]]))
    assert drafting.draft(some, learned.room, num_tokens=1, model=model).lengths.tolist() == [K]
    drafter.stop_request("new", keep=False)
    drafter.start_request("next", [1, 2], problem_id=5, seed=7)
    assert rows(drafting, "next").tolist() == some.tolist()
    drafting.learn(sampled(drafter.table, some, [[5, 6, 7, 8]]))
    assert drafter.source_counts() == nothing
    assert drafting.choice.model_counts() == (0, 0)
