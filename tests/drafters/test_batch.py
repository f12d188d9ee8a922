"""A step's calls for a batch say the same as one call per request."""

from __future__ import annotations

import itertools
import os
import signal
import time
from unittest.mock import Mock

import numpy as np
import pytest

from rollout_spec.drafters import build_drafter
from rollout_spec.drafters.batch import as_batch_drafter
from rollout_spec.drafters.host import propose, suffix, threads
from rollout_spec.drafters.host.history import HistoryDrafter
from rollout_spec.features.format import FEATURE_WORDS
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
        drafter.update_index()
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


@pytest.mark.parametrize("name", ["history", "ngram", "lookahead"])
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_is_as_one_by_one(name, seed):
    batched = build_drafter(name, max_draft_tokens=K)
    assert as_batch_drafter(batched, K) is batched
    wrapped = as_batch_drafter(OneByOne(build_drafter(name, max_draft_tokens=K)), K)
    drafts, counts = drive(batched, seed)
    assert (drafts, counts) == drive(wrapped, seed)
    assert any(tokens for tokens, _ in drafts)
    batched.check_integrity()


@pytest.mark.parametrize("index", ["suffix", "ngram"])
def test_new_tokens_are_context_at_once_and_candidates_once_they_are_indexed(index):
    drafter = HistoryDrafter(index, max_draft_tokens=K, min_survival=0.0)
    for req_id in "ab":
        drafter.start_request(req_id, [1, 2], problem_id=0)
    a, b = np.array([drafter.row_of("a")]), np.array([drafter.row_of("b")])

    def draft(row):
        drafts = drafter.propose_batch(row, np.array([K]))
        return drafts.token_ids[0, : drafts.lengths[0]].tolist()

    def say(row, *tokens):
        drafter.extend_batch(row, np.array(tokens, np.int32), np.array([0, len(tokens)]))

    say(a, 1, 2, 3, 4, 5, 6)
    say(b, 1, 2, 3)  # indexes what a has said before
    assert draft(b) == [4, 5, 6]
    say(b, 7, 8, 9, 7, 8)
    assert draft(b) == []
    drafter.update_index()
    assert draft(b) == [9, 7, 8, 9]
    say(a, 1, 2, 3)
    assert draft(a) == [4, 5, 6, 1], "the newest token is context"
    drafter.check_integrity()


def test_a_rollout_can_end_before_its_last_tokens_are_indexed():
    drafter = HistoryDrafter(max_draft_tokens=K, max_history_tokens=64)
    for i in range(20):
        drafter.start_request(str(i), [1, 2], problem_id=0)
        drafter.extend_batch(np.array([drafter.row_of(str(i))]), np.arange(40, dtype=np.int32), np.array([0, 40]))
        drafter.stop_request(str(i))
        assert drafter._num_unindexed >= 40
        drafter.extend_batch(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(1, np.int64))
        assert drafter._num_unindexed == 0
        drafter.check_integrity()


def test_what_could_not_be_indexed_is_indexed_later(monkeypatch):
    drafter, reserve = HistoryDrafter(max_draft_tokens=K), suffix.reserve
    drafter.start_request("a", [1, 2])
    row = np.array([drafter.row_of("a")])
    drafter.extend_batch(row, np.arange(200, dtype=np.int32), np.array([0, 200]))
    monkeypatch.setattr(suffix, "reserve", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        drafter.update_index()
    monkeypatch.setattr(suffix, "reserve", reserve)
    drafter.extend_batch(row, np.arange(200, dtype=np.int32), np.array([0, 200]))
    drafter.check_integrity()


def test_drafts_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(threads, "LEAST_REQUESTS", 2)
    expected = drive(build_drafter("history", max_draft_tokens=K, num_threads=1), 0)
    for num_threads in (2, 3, threads.MAX_THREADS):
        assert drive(build_drafter("history", max_draft_tokens=K, num_threads=num_threads), 0) == expected
    with pytest.raises(ValueError, match="num_threads must be from 1 to"):
        HistoryDrafter(num_threads=0)


def test_threads_have_buffers_of_their_own(monkeypatch):
    """With shared ones drafts would depend on which thread is faster, and so differ between ranks."""
    monkeypatch.setattr(threads, "LEAST_REQUESTS", 1)
    drafter, used, compiled = HistoryDrafter(num_threads=3), [], propose.propose

    def call(*args):
        used.extend(argument for argument in args if isinstance(argument, propose.Scratch))
        compiled(*args)

    monkeypatch.setattr(propose, "propose", call)
    for i in range(3):
        drafter.start_request(str(i), [1])
    drafter.propose(["0", "1", "2"], np.full(3, K))
    assert len(used) == 3
    for one, other in itertools.combinations([(*scratch._replace(path=0), *scratch.path) for scratch in used], 2):
        assert not any(np.shares_memory(a, b) for a, b in zip(one, other, strict=True) if not np.isscalar(a))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_in_a_thread_is_raised_once_all_have_ended(failing):
    ended = []

    def call(part, start, end):
        if part == failing:
            raise MemoryError(f"part {part}")
        time.sleep(0.05)
        ended.append((start, end))

    with pytest.raises(MemoryError, match=f"part {failing}"):
        threads.share_out(call, 3 * threads.LEAST_REQUESTS, 3)
    assert len(ended) == 2


def test_a_fork_has_threads_of_its_own():
    def run():
        parts = []
        threads.share_out(lambda *part: parts.append(part), 2 * threads.LEAST_REQUESTS, 2)
        return len(parts)

    assert run() == 2
    child = os.fork()
    if child == 0:
        parts = 0
        try:
            parts = run()
        finally:
            os._exit(parts)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended[0] == child, "the child waits for threads that it does not have"
    assert os.waitstatus_to_exitcode(ended[1]) == 2


def test_what_a_subclass_overrides_is_called():
    class Quiet(HistoryDrafter):
        def propose(self, req_ids, max_tokens):
            return [Draft(np.zeros(0, np.int32), np.zeros(0, np.float32)) for _ in req_ids]

    drafter = as_batch_drafter(Quiet(), K)
    drafter.start_request("a", [1, 2, 1, 2, 1])
    assert drafter.propose_batch(np.array([drafter.row_of("a")]), np.array([K])).lengths.tolist() == [0]


def test_a_drafter_that_is_called_one_by_one_gets_features_if_it_wants_them():
    given = []

    class Wants(Told):
        wants_features = True

        def extend(self, req_id, new_token_ids, features=None):
            given.append((req_id, list(new_token_ids), None if features is None else features[:, 0].tolist()))

    drafter = as_batch_drafter(Wants(), K)
    assert drafter.wants_features
    assert not getattr(as_batch_drafter(Told(), K), "wants_features", False)
    for req_id in "ab":
        drafter.start_request(req_id, [])
    rows = np.array([drafter.row_of("b"), drafter.row_of("a")])
    features = np.arange(3 * FEATURE_WORDS).reshape(3, FEATURE_WORDS)
    drafter.extend_batch(rows, *flat([[5], [6, 7]], np.int32), features)
    drafter.extend_batch(rows[:1], *flat([[8]], np.int32))
    assert given == [("b", [5], [0]), ("a", [6, 7], [4, 8]), ("b", [8], None)]


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
