"""What a session knows of its live requests, as arrays: one compiled pass per step brings all of them forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.jit import njit
from rollout_spec.types import Int32Array

if TYPE_CHECKING:
    from rollout_spec.integrations.stop_strings import StopStringSearch

NO_TOKEN = -1
"""Fills `stop_token_ids` of requests that have fewer than others."""


@dataclass(slots=True)
class LiveRequest:
    """A request that the drafter serves.

    Attributes:
        row: Its number in the drafter's calls and in `LiveArrays`.
        problem: The problem's id, by which expected lengths are looked up; 0: no problem.
        request: vLLM's.
        stop_search: Looks for its stop strings; None before the first output, and for requests without stop strings.
    """

    row: int
    problem: int
    request: Any
    stop_search: StopStringSearch | None = None


class Sampled(NamedTuple):
    """What a step brought the requests that are drafted for, B of them."""

    rows: NDArray[np.int64]
    """int64 [B], as `DraftingSession.follow` gave them."""
    token_ids: Int32Array
    """int32 [T]: of request i the tokens after those seen are in starts[i] : starts[i + 1]."""
    starts: NDArray[np.int64]
    """int64 [B + 1]."""
    target_token_ids: NDArray[np.int64]
    """int64 [N]: of request i, in target_starts[i] : target_starts[i + 1], what the target sampled at the verified
    positions and after them; see `BatchDrafter.observe_batch`."""
    target_starts: NDArray[np.int64]
    """int64 [B + 1]."""
    num_verified: NDArray[np.int64]
    """int64 [B]. The scheduler may cut a draft further than was asked for."""
    num_accepted: NDArray[np.int64]
    """int64 [B]."""
    num_tokens: int
    """Tokens that the step computed, those of prompts among them."""
    started: float
    """When it began, by `time.perf_counter`."""


class LiveArrays(NamedTuple):
    """What is known of the live requests, by row, [R] each. S is the most stop tokens of a request."""

    num_prompt_tokens: NDArray[np.int64]
    num_seen: NDArray[np.int64]  # tokens that the drafter has seen, the prompt's included
    max_tokens: NDArray[np.int64]  # output tokens after which the request ends
    min_tokens: NDArray[np.int64]  # output tokens before which no stop token ends it
    stop_token_ids: Int32Array  # [R, S], the end-of-sequence token among them, then NO_TOKEN
    has_stop_strings: NDArray[np.bool_]
    is_complete: NDArray[np.bool_]  # whether the last token has been sampled; the engine notices a step later
    draft: NDArray[np.int64]  # index of the request's draft among those of the step that is running, -1: none
    length_row: NDArray[np.int64]  # the problem's, in `RemainingLength`


def new_arrays(num_rows: int = 16, num_stops: int = 2) -> LiveArrays:
    """Room for `num_rows` requests of `num_stops` stop tokens."""
    return LiveArrays(
        num_prompt_tokens=np.zeros(num_rows, np.int64),
        num_seen=np.zeros(num_rows, np.int64),
        max_tokens=np.zeros(num_rows, np.int64),
        min_tokens=np.zeros(num_rows, np.int64),
        stop_token_ids=np.full((num_rows, num_stops), NO_TOKEN, np.int32),
        has_stop_strings=np.zeros(num_rows, np.bool_),
        is_complete=np.zeros(num_rows, np.bool_),
        draft=np.full(num_rows, -1, np.int64),
        length_row=np.zeros(num_rows, np.int64),
    )


def start(live: LiveArrays, row: int, request: Any, length_row: int) -> LiveArrays:
    """Note a new request in its row. Returns the arrays, which are new ones where it needs more room."""
    params = request.sampling_params
    stops = list(params.stop_token_ids or ())
    if params.eos_token_id is not None:
        stops.append(params.eos_token_id)
    rows, width = live.stop_token_ids.shape
    if row >= rows or len(stops) > width:
        grown = new_arrays(max(rows, 2 * row), max(width, len(stops)))
        for old, new in zip(live, grown, strict=True):
            new[tuple(slice(size) for size in old.shape)] = old
        live = grown
    live.num_prompt_tokens[row] = live.num_seen[row] = len(request.prompt_token_ids)
    live.max_tokens[row], live.min_tokens[row] = params.max_tokens, params.min_tokens
    live.stop_token_ids[row] = NO_TOKEN
    live.stop_token_ids[row, : len(stops)] = stops
    live.has_stop_strings[row] = bool(params.stop)
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
    live: LiveArrays,
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


def pieces(
    values: NDArray[Any], first: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """(all values[first[i] : first[i] + sizes[i]], one behind the other; where each begins and the last ends)."""
    starts = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return values[np.arange(starts[-1]) + np.repeat(first - starts[:-1], sizes)], starts


def select(
    values: NDArray[Any], starts: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """(values, starts) of some of the pieces values[starts[i] : starts[i + 1]], in the order of `chosen`."""
    if chosen.size == starts.size - 1 and (chosen == np.arange(chosen.size)).all():
        return values, starts
    return pieces(values, starts[chosen], np.diff(starts)[chosen])
