"""What a session knows of its live requests, as arrays: one compiled pass per step brings all of them forward."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.jit import njit
from rollout_spec.types import Int32Array

NO_TOKEN = -1
"""Fills `stop_token_ids` of requests that have fewer than others."""


class LiveRequests(NamedTuple):
    """The live requests by the drafter's row, [R] each. S is the most stop tokens of a request."""

    num_prompt_tokens: NDArray[np.int64]
    num_seen: NDArray[np.int64]  # tokens that the drafter has seen, the prompt's included
    max_tokens: NDArray[np.int64]  # output tokens after which the request ends
    min_tokens: NDArray[np.int64]  # output tokens before which no stop token ends it
    stop_token_ids: Int32Array  # [R, S], the end-of-sequence token among them, then NO_TOKEN
    is_complete: NDArray[np.bool_]  # whether the last token has been sampled; the engine notices a step later
    draft: NDArray[np.int64]  # index of the request's draft among those of the step that is running, -1: none
    length_row: NDArray[np.int64]  # the problem's, in `RemainingLength`


def new_live_requests(num_rows: int = 16, num_stops: int = 2) -> LiveRequests:
    """Room for `num_rows` requests of `num_stops` stop tokens."""
    return LiveRequests(
        num_prompt_tokens=np.zeros(num_rows, np.int64),
        num_seen=np.zeros(num_rows, np.int64),
        max_tokens=np.zeros(num_rows, np.int64),
        min_tokens=np.zeros(num_rows, np.int64),
        stop_token_ids=np.full((num_rows, num_stops), NO_TOKEN, np.int32),
        is_complete=np.zeros(num_rows, np.bool_),
        draft=np.full(num_rows, -1, np.int64),
        length_row=np.zeros(num_rows, np.int64),
    )


def start(live: LiveRequests, row: int, request: Any, length_row: int) -> LiveRequests:
    """Note a new request in its row. Returns the arrays, which are new ones where it needs more room."""
    params = request.sampling_params
    stops = list(params.stop_token_ids or ())
    if params.eos_token_id is not None:
        stops.append(params.eos_token_id)
    rows, width = live.stop_token_ids.shape
    if row >= rows or len(stops) > width:
        grown = new_live_requests(max(rows, 2 * row), max(width, len(stops)))
        for old, new in zip(live, grown, strict=True):
            new[tuple(slice(size) for size in old.shape)] = old
        live = grown
    live.num_prompt_tokens[row] = live.num_seen[row] = len(request.prompt_token_ids)
    live.max_tokens[row], live.min_tokens[row] = params.max_tokens, params.min_tokens
    live.stop_token_ids[row] = NO_TOKEN
    live.stop_token_ids[row, : len(stops)] = stops
    live.is_complete[row], live.draft[row], live.length_row[row] = False, -1, length_row
    return live


@njit(allocates=False)
def read_tokens(
    token_ids: Int32Array,
    batch_rows: NDArray[np.int64],
    first: NDArray[np.int64],
    starts: NDArray[np.int64],
    tokens: Int32Array,
) -> None:
    """Copy token_ids[batch_rows[i], first[i] :] to tokens[starts[i] : starts[i + 1]] for each i."""
    for i in range(batch_rows.size):
        for j in range(starts[i + 1] - starts[i]):
            tokens[starts[i] + j] = token_ids[batch_rows[i], first[i] + j]


@njit(allocates=False)
def advance(
    live: LiveRequests,
    rows: NDArray[np.int64],
    token_ids: Int32Array,
    starts: NDArray[np.int64],
    kept: Int32Array,
    kept_starts: NDArray[np.int64],
    to_come: NDArray[np.int64],
) -> None:
    """Add new tokens to requests up to where the scheduler will end them: a step can sample past a request's end.

    Args:
        rows: int64 [B].
        token_ids: int32 [T], of request i those in starts[i] : starts[i + 1] (int64 [B + 1]).
        kept: int32 [T], filled with the tokens that count, of request i in kept_starts[i] : kept_starts[i + 1].
        to_come: int64 [B], filled with how many more tokens may come, 0 for requests that are complete.
    """
    at = 0
    for i in range(rows.size):
        row = rows[i]
        kept_starts[i] = at
        num_output = live.num_seen[row] - live.num_prompt_tokens[row]
        j = starts[i]
        while j < starts[i + 1] and not live.is_complete[row]:
            kept[at] = token_ids[j]
            num_output += 1
            if num_output >= live.max_tokens[row]:
                live.is_complete[row] = True
            elif num_output >= live.min_tokens[row]:
                for stop in range(live.stop_token_ids.shape[1]):
                    if live.stop_token_ids[row, stop] == token_ids[j]:
                        live.is_complete[row] = True
            at += 1
            j += 1
        live.num_seen[row] = live.num_prompt_tokens[row] + num_output
        to_come[i] = 0 if live.is_complete[row] else live.max_tokens[row] - num_output
    kept_starts[rows.size] = at


def select(
    values: NDArray[Any], starts: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """(values, starts) of the chosen pieces values[starts[i] : starts[i + 1]] alone, in the order of `chosen`."""
    sizes = np.diff(starts)[chosen]
    ends = np.zeros(chosen.size + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    at = np.arange(ends[-1]) + np.repeat(starts[chosen] - ends[:-1], sizes)
    return values[at], ends
