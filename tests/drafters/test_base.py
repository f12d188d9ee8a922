"""A step's calls for a batch say the same as one call per request."""

import contextlib
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.base import as_batch_drafter
from rollout_spec.drafters.host import suffix
from rollout_spec.drafters.host.drafter import HistoryDrafter
from rollout_spec.drafting import Drafting
from rollout_spec.types import Draft
from tests.adversaries import Silent
from tests.drafters.recorder import sampled

K = 4
METHODS = ("start_request", "extend", "propose", "stop_request")


def one_by_one(drafter):
    """A drafter without the calls for batches."""
    return SimpleNamespace(**{name: getattr(drafter, name) for name in METHODS})


def drafting_with(drafter, **options):
    return Drafting(drafter, K, max_model_len=1000, vocab_size=10_000, **options)


def rows_of(drafting, req_ids):
    return np.array([drafting.drafter.row_of(req_id) for req_id in req_ids])


def drive(drafter, seed):
    """Random steps of requests that come, say little from a small alphabet, and end. Returns all drafts."""
    rng, live, made, said = np.random.default_rng(seed), [], 0, []
    drafting = drafting_with(drafter)
    drafter, table = drafting.drafter, drafting.drafter.table
    drafted = {}
    for _ in range(60):
        while len(live) < 6:
            prompt = rng.integers(0, 3, rng.integers(0, 4)).tolist()
            drafter.start_request(f"r{made}", prompt, seed=made if made % 2 else None)
            live.append(f"r{made}")
            made += 1
        chosen = [req_id for req_id in live if rng.random() < 0.8] or live[:1]
        rng.shuffle(chosen)
        rows, drafts = rows_of(drafting, chosen), [drafted.get(req_id, []) for req_id in chosen]
        verified = [rng.integers(0, len(draft) + 1) for draft in drafts]  # the scheduler may cut them further
        accepted = [rng.integers(0, n + 1) for n in verified]
        tokens = [[*draft[:n], rng.integers(0, 3)] for draft, n in zip(drafts, accepted, strict=True)]
        targets = None
        if getattr(drafter, "wants_rejected_targets", False):
            targets = rng.integers(0, 3, sum(verified) + rows.size)
            targets[rng.random(targets.size) < 0.1] = -1
        learned = drafting.learn(sampled(table, rows, tokens, accepted, num_verified=verified), targets)
        proposed = drafting.draft(rows, learned.limits, num_tokens=rows.size)
        drafted = {
            req_id: draft[:n].tolist()
            for req_id, draft, n in zip(chosen, proposed.token_ids, proposed.lengths, strict=True)
        }
        for row, draft in zip(rows, drafted.values(), strict=True):
            said.append((draft, table.arrays.confidence[row, : len(draft)].tolist()))
        if rng.random() < 0.3:
            drafter.stop_request(live.pop(0), keep=bool(rng.random() < 0.8))
    table.check_integrity([drafter.row_of(req_id) for req_id in live])
    return said


@pytest.mark.parametrize("name", ["history", "suffix", "ngram"])
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_is_as_one_by_one(name, seed):
    batched = build_drafter(name, max_draft_tokens=K)
    assert as_batch_drafter(batched, K) is batched
    drafts = drive(batched, seed)
    assert drafts == drive(one_by_one(build_drafter(name, max_draft_tokens=K)), seed)
    assert any(tokens for tokens, _ in drafts)
    batched.check_integrity()


@pytest.mark.parametrize("method", ["propose", "extend"])
def test_what_a_derived_class_overrides_is_called(method):
    """A user's may change either method of the simple form."""
    called = []

    def override(self, *args):
        called.append(args)
        return getattr(HistoryDrafter, method)(self, *args)

    derived = type("Derived", (HistoryDrafter,), {method: override})
    drive(derived("suffix", max_draft_tokens=K), seed=0)
    assert called


@pytest.mark.parametrize("index", ["suffix", "ngram"])
def test_late_tokens_are_context_at_once_and_candidates_once_they_are_indexed(index):
    drafter = HistoryDrafter(index, max_draft_tokens=K, min_survival=0.0)
    drafting = drafting_with(drafter, index_late=True)
    for req_id in "ab":
        drafter.start_request(req_id, [1, 2], problem_id=0)

    def say(req_id, *tokens):
        """Returns the draft for what follows."""
        rows = rows_of(drafting, [req_id])
        drafts = drafting.draft(rows, drafting.learn(sampled(drafter.table, rows, [tokens])).limits, num_tokens=1)
        return drafts.token_ids[0, : drafts.lengths[0]].tolist()

    say("a", 1, 2, 3, 4, 5, 6)
    assert say("b", 1, 2, 3) == [4, 5, 6], "what the one has said is indexed before the other's tokens"
    assert say("b", 7, 8, 9, 7, 8) == []
    drafter.update_index()
    assert say("b") == [9, 7, 8, 9]
    assert say("a", 3, 4) == [5, 6, 3, 4], "the newest token is context"
    drafter.check_integrity()


def test_a_rollout_can_end_before_its_last_tokens_are_indexed():
    drafter = HistoryDrafter(max_draft_tokens=K, max_history_tokens=64)
    drafting = drafting_with(drafter, index_late=True)
    for i in range(20):
        drafter.start_request(str(i), [1, 2], problem_id=0)
        drafting.learn(sampled(drafter.table, rows_of(drafting, [str(i)]), [range(40)]))
        drafter.stop_request(str(i))
        assert drafter._num_unindexed >= 40
        assert drafter._store.num_used_pages <= 2 + 2 + 1, "what is bounded, what is live and the prompt"
        drafting.learn(sampled(drafter.table, [], []))
        assert drafter._num_unindexed == 0
    drafter.check_integrity()


@pytest.mark.parametrize("is_late", [False, True])
def test_what_could_not_be_indexed_is_indexed_later(monkeypatch, is_late):
    drafter, reserve = HistoryDrafter(max_draft_tokens=K), suffix.reserve
    drafting = drafting_with(drafter, index_late=is_late)
    drafter.start_request("a", [1, 2])
    drafter.update_index()
    step_of_a = sampled(drafter.table, rows_of(drafting, "a"), [range(200)])
    monkeypatch.setattr(suffix, "reserve", Mock(side_effect=MemoryError))
    if is_late:
        drafting.learn(step_of_a)
    with pytest.raises(MemoryError):
        drafter.update_index() if is_late else drafting.learn(step_of_a)
    monkeypatch.setattr(suffix, "reserve", reserve)
    drafting.learn(step_of_a)  # of which nothing is new if it was learned
    drafter.check_integrity()
    assert drafter.output_of("a").tolist() == list(range(200))


@pytest.mark.parametrize(
    ("drafts", "message"),
    [([Draft(np.array([1], np.int32), np.array([], np.float32))], "a confidence for each"), ([], "shorter")],
)
def test_drafts_of_the_wrong_kind_are_refused(drafts, message):
    inner = Silent()
    inner.propose = lambda req_ids, limits: drafts
    drafter = as_batch_drafter(inner, 8)
    drafter.start_request("a", [])
    with pytest.raises(ValueError, match=message):
        drafter.propose_rows(np.zeros(1, np.int64), np.array([2]))


class Wild(HistoryDrafter):
    """Drafts 1 to 3 tokens where one is asked for, the first one with any confidence."""

    def __init__(self, token, confidence, length):
        super().__init__(max_draft_tokens=K)
        self.wild = token, confidence, length

    def propose_rows(self, rows, limits):
        drafts = self.table.arrays.history
        drafts.tokens[rows], drafts.confidence[rows], drafts.lengths[rows] = self.wild


@pytest.mark.parametrize(
    ("token", "confidence", "length", "message"),
    [
        (0, 0.0, 1, None),
        (9_999, 1.0, 1, None),
        (-1, 0.5, 1, "-1.* in a vocabulary of 10000"),
        (10_000, 0.5, 1, "10000.* in a vocabulary of 10000"),
        (1, np.nan, 1, "nan.* as their probabilities"),
        (1, -0.1, 1, "-0.1.* as their probabilities"),
        (1, 1.5, 1, "1.5.* as their probabilities"),
        (1, 0.5, 2, r"\[2\] tokens where \[1\] were asked for"),
        (1, 0.5, -1, r"\[-1\] tokens where \[1\] were asked for"),
    ],
)
def test_drafts_that_cannot_be_verified_are_refused(token, confidence, length, message):
    drafting = drafting_with(Wild(token, confidence, length))
    drafting.drafter.start_request("a", [])
    rows, table = rows_of(drafting, "a"), drafting.drafter.table
    table.limit(0, max_tokens=3, min_tokens=0, stop_token_ids=[])
    learned = drafting.learn(sampled(table, rows, [[1]]))
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        drafts = drafting.draft(rows, learned.limits, num_tokens=1)
        assert drafts.token_ids[0, : drafts.lengths[0]].tolist() == [token]
