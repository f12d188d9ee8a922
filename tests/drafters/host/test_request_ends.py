"""Where requests end, in plain Python and in a step's compiled pass over the requests' table."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.drafters.host import step
from rollout_spec.drafters.host.requests import RequestTable
from rollout_spec.drafters.host.step import Sampled, StepOptions
from rollout_spec.jit.reference import Reference

K, MAX_MODEL_LEN = 3, 8
TERMS = Reference(StepOptions(K, MAX_MODEL_LEN, True, np.zeros((0, 0, 0)), np.zeros((0, 0))))
PARAMS = st.builds(
    lambda **params: SimpleNamespace(**params),
    max_tokens=st.integers(1, 7),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(st.integers(0, 2), max_size=3),
)


def trim_at_end(token_ids, params):
    """Output tokens up to the one at which the scheduler ends the request."""
    for count, token in enumerate(token_ids, 1):
        if count >= params.max_tokens or (token in params.stop_token_ids and count >= params.min_tokens):
            return list(token_ids[:count])
    return list(token_ids)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), PARAMS), min_size=1, max_size=20), st.data())
def test_requests_advance_to_where_the_scheduler_ends_them(requests, data):
    """In several steps of any tokens, in which some requests have no part. The engine's batch is in another order."""
    table = RequestTable(K)
    for num_prompt_tokens, params in requests:
        row = table.start(num_prompt_tokens)
        table.limit(row, **vars(params))
    said = [[] for _ in requests]
    for _ in range(3):
        rows = np.array(data.draw(st.lists(st.sampled_from(range(len(requests))), unique=True)), np.int64)
        new = [data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)) for _ in rows]
        num_accepted = [data.draw(st.integers(0, len(tokens) - 1)) for tokens in new]
        batch_rows = np.array(data.draw(st.permutations(range(rows.size + 1))), np.int64)[: rows.size]
        first = table.arrays.num_tokens[rows] - [
            data.draw(st.integers(0, int(table.arrays.num_tokens[r]))) for r in rows
        ]
        buffer, by_batch = np.full((rows.size + 1, 16), 9, np.int32), np.zeros((3, rows.size + 1), np.int64)
        lengths = table.arrays.num_tokens[rows] + [len(tokens) for tokens in new]
        by_batch[:, batch_rows] = first, lengths, num_accepted
        for row, batch_row, start, tokens in zip(rows, batch_rows, first, new, strict=True):
            at = table.arrays.num_tokens[row] - start
            buffer[batch_row, at : at + len(tokens)] = tokens
        sampled = Sampled(
            rows, batch_rows, buffer, by_batch[0], by_batch[1].astype(np.int32), 0 * by_batch[2], by_batch[2],
            np.arange(rows.size + 2),
        )  # fmt: skip
        before, out = table.arrays.num_tokens[rows], np.empty((2, rows.size), np.int64)
        num_chosen, num_live, *_, num_emitted, num_new, had_room = step.learn(
            table.reference, None, TERMS, sampled, 0, None, out
        )
        assert (had_room, num_new) == (True, sum(map(len, new)))
        live, emitted, rooms = 0, 0, {}
        for i, row in enumerate(rows):
            num_prompt_tokens, params = requests[row]
            expected = trim_at_end([*said[row], *new[i]], params)
            num_kept = len(expected) - len(said[row])
            assert table.arrays.num_tokens[row] - before[i] == num_kept
            emitted += max(num_kept - (len(new[i]) - num_accepted[i] - 1), 0)
            said[row] = expected
            assert table.arrays.num_tokens[row] == num_prompt_tokens + len(expected)
            # A request that has not ended goes on with any token but those that end it.
            goes_on = trim_at_end([*expected, 9, 9], params) != expected
            assert bool(table.arrays.is_complete[row]) == (not goes_on)
            live += goes_on
            left = params.max_tokens - len(expected)
            if goes_on and left > 1:
                rooms[i] = min(K, left - 1, MAX_MODEL_LEN - num_prompt_tokens - len(expected) - 1)
        assert (num_live, num_emitted) == (live, emitted)
        assert dict(zip(*out[:, :num_chosen].tolist(), strict=True)) == rooms
