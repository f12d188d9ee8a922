"""A step's compiled passes over the live requests, against plain Python."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.integrations.vllm import live_requests
from rollout_spec.integrations.vllm.live_requests import trim_at_end
from rollout_spec.types import Drafts


def a_request(num_prompt_tokens=2, **params):
    neutral = {"max_tokens": 6, "min_tokens": 0, "eos_token_id": None, "stop_token_ids": [], "stop": []}
    return SimpleNamespace(
        prompt_token_ids=[0] * num_prompt_tokens, sampling_params=SimpleNamespace(**neutral | params)
    )


REQUESTS = st.builds(
    a_request,
    st.integers(0, 4),
    max_tokens=st.integers(1, 7),
    min_tokens=st.integers(0, 4),
    eos_token_id=st.sampled_from([None, 1]),
    stop_token_ids=st.lists(st.integers(0, 2), max_size=3),
)


def flat(lists, dtype=np.int32):
    return np.array([value for values in lists for value in values], dtype), np.cumsum([0, *map(len, lists)])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(REQUESTS, min_size=1, max_size=20), st.data())
def test_requests_advance_to_where_the_scheduler_ends_them(requests, data):
    """In several steps of any tokens, in which some requests have no part."""
    live = live_requests.new_arrays(2, 1)
    for row, request in enumerate(requests):
        live = live_requests.start(live, row, request)
    said = [[] for _ in requests]
    for _ in range(3):
        rows = np.array(data.draw(st.lists(st.sampled_from(range(len(requests))), unique=True)), np.int64)
        new = [data.draw(st.lists(st.integers(0, 3), max_size=4)) for _ in rows]
        tokens, starts = flat(new)
        kept, kept_starts, to_come = np.empty_like(tokens), np.empty_like(starts), np.empty_like(rows)
        live_requests.advance(live, rows, tokens, starts, kept, kept_starts, to_come)
        for i, row in enumerate(rows):
            params = requests[row].sampling_params
            expected = trim_at_end([*said[row], *new[i]], 0, params)
            assert kept[kept_starts[i] : kept_starts[i + 1]].tolist() == expected[len(said[row]) :]
            said[row] = expected
            # A request that has not ended goes on with any token but those that end it.
            goes_on = trim_at_end([*expected, 9, 9], 0, params) != expected
            assert bool(live.is_complete[row]) == (not goes_on)
            assert to_come[i] == (params.max_tokens - len(expected) if goes_on else 0)
            assert live.num_seen[row] == len(requests[row].prompt_token_ids) + len(expected)
        chosen, room = np.empty_like(rows), np.empty_like(rows)
        count, num_live = live_requests.choose(live, rows, to_come, 3, 8, chosen, room)
        assert num_live == (to_come > 0).sum()
        assert chosen[:count].tolist() == np.flatnonzero(to_come > 1).tolist()
        for at, most in zip(chosen[:count], room[:count].tolist(), strict=True):
            assert most == min(3, to_come[at] - 1, 8 - live.num_seen[rows[at]] - 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 3), st.integers(0, 7)), max_size=8),
)
def test_kept_tokens_find_the_rows_that_they_were_sampled_from(requests):
    """Of each request: tokens of earlier steps, accepted ones, rejected ones, and how many tokens are kept."""
    new, kept, targets, expected, accepted = [], [], [], [], []
    row = 0
    for num_earlier, num_accepted, num_rejected, limit in requests:
        rows = [-1] * num_earlier + list(range(row, row + num_accepted + 1))
        new.append(rows)
        kept.append(rows[:limit])
        expected += rows[:limit]
        targets.append(range(row, row + num_accepted + 1 + num_rejected))
        row += num_accepted + 1 + num_rejected
        accepted.append(num_accepted)
    found = np.full(len(expected), 99)
    starts, kept_starts, target_starts = (flat(lists)[1] for lists in (new, kept, targets))
    live_requests.find_rows(starts, kept_starts, target_starts, np.array(accepted, np.int64), found)
    assert found.tolist() == expected


def test_new_tokens_are_read_out_of_the_engines_buffer():
    buffer = np.arange(40, dtype=np.int32).reshape(4, 10)
    num_tokens, num_seen = np.array([6, 3, 9, 5], np.int32), np.array([5, 0, 7, 4])
    rows, batch_rows, starts = np.array([2, 0, 3]), np.array([2, 0, 1]), np.empty(4, np.int64)
    args = buffer, num_tokens, batch_rows, num_seen, rows, starts
    small = np.full(2, -1, np.int32)
    assert live_requests.read_new_tokens(*args, small) == 3
    assert small.tolist() == [-1, -1]
    tokens = np.empty(3, np.int32)
    live_requests.read_new_tokens(*args, tokens)
    assert tokens.tolist() == [27, 28, 5]
    assert starts.tolist() == [0, 2, 3, 3], "of the last request more was seen than there is"


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, 0),
        ({"lengths": [2, -1]}, live_requests.TOO_LONG),
        ({"lengths": [3, 0]}, live_requests.TOO_LONG),
        ({"lengths": [0, 1]}, live_requests.TOO_LONG),
        ({"token_ids": [[1, 10], [0, 0]]}, live_requests.BAD_TOKEN),
        ({"token_ids": [[1, -1], [0, 0]]}, live_requests.BAD_TOKEN),
        ({"confidence": [[0.5, 1.5], [0, 0]]}, live_requests.BAD_CONFIDENCE),
        ({"confidence": [[0.5, np.nan], [0, 0]]}, live_requests.BAD_CONFIDENCE),
        ({"token_ids": [[1, 2], [99, 99]], "confidence": [[0.5, 0.1], [np.nan, 9]]}, 0),
    ],
)
def test_what_cannot_be_verified_is_found(change, wrong):
    """The second request may have no draft; the first one's limit is above the drafter's own, 2."""
    values = {"token_ids": [[1, 2], [0, 0]], "lengths": [2, 0], "confidence": [[0.5, 0.25], [0, 0]], **change}
    drafts = Drafts(
        np.array(values["token_ids"], np.int32), np.array(values["lengths"]), np.array(values["confidence"], np.float32)
    )
    confidence, starts = np.empty(4, np.float32), np.empty(3, np.int64)
    assert live_requests.flatten_drafts(drafts, np.array([5, 0]), 10, confidence, starts) == wrong
    if not wrong:
        assert starts.tolist() == [0, 2, 2]
        assert confidence[:2].tolist() == np.array(values["confidence"][0], np.float32).tolist()


def test_outcomes_are_matched_with_drafts():
    """Row 0 had no draft, of row 3 nothing was sampled, and row 1's draft of one token was padded to four."""
    draft = np.array([-1, 1, 0, 2])
    told, by_draft = np.empty(4, np.int64), np.zeros((2, 3), np.int64)
    rows, target_starts = np.array([0, 1, 2, 3]), np.array([0, 1, 6, 8, 8])
    count = live_requests.match_outcomes(
        draft,
        np.array([0, 3, 4, 6]),
        rows,
        target_starts,
        np.array([0, 4, 1, 0]),
        np.array([0, 2, 1, 0]),
        told,
        by_draft,
    )
    assert told[:count].tolist() == [1, 2]
    assert by_draft.tolist() == [[1, 1, 0], [1, 1, 0]]


def test_some_of_the_pieces():
    values, starts = flat([[1, 2], [], [3], [4, 5, 6]])
    chosen, of_chosen = live_requests.select(values, starts, np.array([0, 1, 3]))
    assert (chosen.tolist(), of_chosen.tolist()) == ([1, 2, 4, 5, 6], [0, 2, 2, 5])
    assert live_requests.select(values, starts, np.arange(4))[0] is values
