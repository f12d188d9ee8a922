"""A step's calls for a batch say the same as one call per request."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.batch import as_batch_drafter
from rollout_spec.drafters.mixture import HistoryDrafter
from rollout_spec.types import Draft

K = 4
METHODS = ("start_request", "extend", "propose", "observe", "stop_request", "begin_policy_version", "source_counts")


class OneByOne:
    """A drafter without the calls for batches."""

    def __init__(self, drafter):
        for name in METHODS:
            setattr(self, name, getattr(drafter, name))


def flat(lists, dtype):
    return np.array([value for values in lists for value in values], dtype), np.cumsum([0, *map(len, lists)])


def drive(drafter, seed):
    """Random steps of requests that come, say little from a small alphabet, and end. Returns all drafts."""
    rng, live, made, drafts = np.random.default_rng(seed), [], 0, []
    lengths: dict[str, int] = {}
    for step in range(60):
        while len(live) < 6:
            prompt = rng.integers(0, 3, rng.integers(0, 4)).tolist()
            drafter.start_request(f"r{made}", prompt, seed=made if made % 2 else None)
            live.append(f"r{made}")
            made += 1
        chosen = [req_id for req_id in live if rng.random() < 0.8] or live[:1]
        rng.shuffle(chosen)
        rows = np.array([drafter.row_of(req_id) for req_id in chosen])
        drafter.extend_batch(rows, *flat([rng.integers(0, 3, rng.integers(0, 3)) for _ in chosen], np.int32))
        proposed = drafter.propose_batch(rows, rng.integers(0, K + 1, len(chosen)))
        drafts += [
            (tokens[:n].tolist(), confidence[:n].tolist()) for tokens, n, confidence in zip(*proposed, strict=True)
        ]
        lengths = dict(zip(chosen, proposed.lengths.tolist(), strict=True))
        accepted = np.array([rng.integers(0, lengths[req_id] + 1) for req_id in chosen])
        targets = [rng.integers(0, 3, lengths[req_id] + 1) for req_id in chosen]
        for i, target in enumerate(targets):
            target[accepted[i] :][rng.random(target.size - accepted[i]) < 0.1] = -1
        drafter.observe_batch(rows, *flat(targets, np.int64), accepted)
        if rng.random() < 0.3:
            drafter.stop_request(live.pop(0), keep=bool(rng.random() < 0.8))
        if step % 20 == 19:
            drafter.begin_policy_version(step)
    return drafts, drafter.source_counts()


@pytest.mark.parametrize("name", ["mixture", "ngram", "lookahead"])
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_is_as_one_by_one(name, seed):
    batched = build_drafter(name, max_draft_tokens=K)
    assert as_batch_drafter(batched, K) is batched
    wrapped = as_batch_drafter(OneByOne(build_drafter(name, max_draft_tokens=K)), K)
    drafts, counts = drive(batched, seed)
    assert (drafts, counts) == drive(wrapped, seed)
    assert any(tokens for tokens, _ in drafts)
    batched.check_integrity()


def test_what_a_subclass_overrides_is_called():
    class Quiet(HistoryDrafter):
        def propose(self, req_ids, max_tokens):
            return [Draft(np.zeros(0, np.int32), np.zeros(0, np.float32)) for _ in req_ids]

    drafter = as_batch_drafter(Quiet(), K)
    drafter.start_request("a", [1, 2, 1, 2, 1])
    assert drafter.propose_batch(np.array([drafter.row_of("a")]), np.array([K])).lengths.tolist() == [0]


class Told:
    """Keeps what it observes."""

    def __init__(self):
        self.observed = []

    def start_request(self, req_id, prompt_token_ids, *, problem_id=None, seed=None):
        pass

    def observe(self, req_ids, target_token_ids, num_accepted):
        self.observed += zip(req_ids, target_token_ids, num_accepted.tolist(), strict=True)

    def stop_request(self, req_id, *, keep=True):
        pass


@pytest.mark.parametrize(
    ("targets", "accepted", "seen"),
    [
        ([5, 6, 7], 1, [5, 6, 7]),
        ([5, -1, 7], 1, [5, 0, 7]),
        ([5, 6, -1, 8], 0, [5, 6]),
        ([-1, -1], 0, [0]),
    ],
)
def test_what_is_observed_ends_where_nothing_was_sampled(targets, accepted, seen):
    """But for the token after the accepted ones: the engine has emitted it, as token 0."""
    told = Told()
    drafter = as_batch_drafter(told, 8)
    drafter.start_request("a", [])
    drafter.observe_batch(np.array([drafter.row_of("a")]), *flat([targets], np.int64), np.array([accepted]))
    assert told.observed == [("a", seen, accepted)]


def test_rows_are_used_again():
    drafter = as_batch_drafter(Told(), 8)
    for req_id in "abc":
        drafter.start_request(req_id, [])
    assert sorted(map(drafter.row_of, "abc")) == [0, 1, 2]
    row = drafter.row_of("b")
    drafter.stop_request("b")
    with pytest.raises(ValueError, match="'b' is not live"):
        drafter.row_of("b")
    drafter.start_request("d", [])
    assert drafter.row_of("d") == row


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft(np.array([1], np.int32), np.array([], np.float32)), "a confidence for each"),
        (Draft([1], np.array([0.5], np.float32)), "int32 tokens"),
        (Draft(np.array([1.0]), np.array([0.5], np.float32)), "int32 tokens"),
        (Draft(np.array([1] * 3, np.int32), np.full(3, 0.5, np.float32)), "drafted 3 tokens where 2"),
    ],
)
def test_drafts_of_the_wrong_kind_are_refused(draft, message):
    inner = Told()
    inner.propose = lambda req_ids, limits: [draft]
    drafter = as_batch_drafter(inner, 8)
    drafter.start_request("a", [])
    with pytest.raises(ValueError, match=message):
        drafter.propose_batch(np.zeros(1, np.int64), np.array([2]))
    inner.propose = lambda req_ids, limits: []
    with pytest.raises(ValueError, match="for 0 requests where 1"):
        drafter.propose_batch(np.zeros(1, np.int64), np.array([2]))
