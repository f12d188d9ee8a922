"""What a session knows of its live requests, as arrays: one compiled pass per step brings all of them forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.features.format import Features
from rollout_spec.history.roots import Conversation
from rollout_spec.jit.compiler import njit
from rollout_spec.types import Drafts, Float32Array, Int32Array

if TYPE_CHECKING:
    from rollout_spec.integrations.vllm.stop_strings import StopStringSearch

NO_TOKEN = -1
"""Fills `stop_token_ids` of requests that have fewer than others."""


@dataclass(slots=True)
class LiveRequest:
    """A request that the drafter serves.

    Attributes:
        row: Its number in the drafter's calls and in `LiveArrays`.
        conversation: What its prompt continues.
        request: vLLM's.
        stop_search: Looks for its stop strings; None before the first output, and for requests without stop strings.
    """

    row: int
    conversation: Conversation
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
    features: Features | None = None
    """What the target saw at each of `target_token_ids`; None where the drafter does not want to know."""


class LiveArrays(NamedTuple):
    """What is known of the live requests, by row, [R] each. S is the most stop tokens of a request."""

    num_prompt_tokens: NDArray[np.int64]
    num_seen: NDArray[np.int64]  # tokens that the drafter has seen, the prompt's included
    max_tokens: NDArray[np.int64]  # output tokens after which the request ends
    min_tokens: NDArray[np.int64]  # output tokens before which no stop token ends it
    stop_token_ids: Int32Array  # [R, S], the end-of-sequence token among them, then NO_TOKEN
    is_complete: NDArray[np.bool_]  # whether the last token has been sampled; the engine notices a step later
    draft: NDArray[np.int64]  # index of the request's draft among those of the step that is running, -1: none


def new_arrays(num_rows: int = 16, num_stops: int = 2) -> LiveArrays:
    """Room for `num_rows` requests of `num_stops` stop tokens."""
    return LiveArrays(
        num_prompt_tokens=np.zeros(num_rows, np.int64),
        num_seen=np.zeros(num_rows, np.int64),
        max_tokens=np.zeros(num_rows, np.int64),
        min_tokens=np.zeros(num_rows, np.int64),
        stop_token_ids=np.full((num_rows, num_stops), NO_TOKEN, np.int32),
        is_complete=np.zeros(num_rows, np.bool_),
        draft=np.full(num_rows, -1, np.int64),
    )


def start(live: LiveArrays, row: int, request: Any) -> LiveArrays:
    """Note a new request in its row. Returns the arrays, which are new ones where it needs more room."""
    params = request.sampling_params
    stops = list(params.stop_token_ids or ())
    if params.eos_token_id is not None:
        stops.append(params.eos_token_id)
    rows, width = live.stop_token_ids.shape
    if row >= rows or len(stops) > width:
        grown = new_arrays(max(rows, 2 * row), max(width, len(stops)))
        before: list[NDArray[Any]] = [*live]
        after: list[NDArray[Any]] = [*grown]
        for old, new in zip(before, after, strict=True):
            new[tuple(slice(size) for size in old.shape)] = old
        live = grown
    live.num_prompt_tokens[row] = live.num_seen[row] = len(request.prompt_token_ids)
    live.max_tokens[row], live.min_tokens[row] = (min(n, 2**31) for n in (params.max_tokens, params.min_tokens))
    live.stop_token_ids[row] = NO_TOKEN
    live.stop_token_ids[row, : len(stops)] = stops
    live.is_complete[row], live.draft[row] = False, -1
    return live


@njit(allocates=False)
def read_new_tokens(
    token_ids: Int32Array,
    num_tokens: NDArray[np.int32],
    batch_rows: NDArray[np.int64],
    num_seen: NDArray[np.int64],
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    tokens: Int32Array,
) -> int:
    """Copy the tokens after those seen out of an engine's buffer.

    Args:
        token_ids: int32 [rows of the batch, length].
        num_tokens: int32 [rows of the batch].
        batch_rows, rows: int64 [B], each request's row of the batch and of `num_seen`.
        num_seen: `LiveArrays.num_seen`.
        starts: int64 [B + 1], filled: request i's new tokens are in starts[i] : starts[i + 1].
        tokens: int32, filled if it is large enough.

    Returns:
        The number of new tokens.
    """
    starts[0] = 0
    for i in range(rows.size):
        starts[i + 1] = starts[i] + max(num_tokens[batch_rows[i]] - num_seen[rows[i]], 0)
    if starts[rows.size] <= tokens.size:
        for i in range(rows.size):
            for j in range(starts[i + 1] - starts[i]):
                tokens[starts[i] + j] = token_ids[batch_rows[i], num_seen[rows[i]] + j]
    return starts[rows.size]


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


@njit(allocates=False)
def find_rows(
    starts: NDArray[np.int64],
    kept_starts: NDArray[np.int64],
    target_starts: NDArray[np.int64],
    num_accepted: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    """Find the logits row that each kept token was sampled from.

    Args:
        starts: int64 [B + 1], of the new tokens, the last of which are those that this step sampled.
        kept_starts: int64 [B + 1], of the first ones of these, which are kept.
        rows: int64 [kept_starts[B]], filled; -1 for tokens of earlier steps.
    """
    for i in range(num_accepted.size):
        earlier = starts[i + 1] - starts[i] - (num_accepted[i] + 1)
        for j in range(kept_starts[i + 1] - kept_starts[i]):
            rows[kept_starts[i] + j] = target_starts[i] + j - earlier if j >= earlier else -1


@njit(allocates=False)
def choose(
    live: LiveArrays,
    rows: NDArray[np.int64],
    to_come: NDArray[np.int64],
    num_speculative_tokens: int,
    max_model_len: int,
    chosen: NDArray[np.int64],
    room: NDArray[np.int64],
) -> tuple[int, int]:
    """Which requests to draft for: a last token needs no draft, as the step samples one in any case.

    Args:
        to_come: int64 [B], of `advance`.
        chosen: int64 [B], filled: index of each request to draft for.
        room: int64 [B], filled: how many tokens to draft for it.

    Returns:
        (how many are chosen, requests that are not complete).
    """
    num_chosen = num_live = 0
    for i in range(rows.size):
        row = rows[i]
        if to_come[i] > 0:
            num_live += 1
        if to_come[i] > 1:
            in_model = max_model_len - live.num_seen[row] - 1
            chosen[num_chosen] = i
            room[num_chosen] = min(num_speculative_tokens, to_come[i] - 1, in_model)
            num_chosen += 1
    return num_chosen, num_live


TOO_LONG, BAD_TOKEN, BAD_CONFIDENCE = range(1, 4)


@njit(allocates=False)
def flatten_drafts(
    drafts: Drafts, room: NDArray[np.int64], vocab_size: int, confidence: Float32Array, starts: NDArray[np.int64]
) -> int:
    """Lay the drafts' confidences one behind the other, and look whether the drafts can be verified.

    Args:
        room: int64 [B], the most tokens of each draft.
        confidence: float32 [B * K], filled up to starts[B].
        starts: int64 [B + 1], filled.

    Returns:
        0, or what is wrong with a draft: TOO_LONG, BAD_TOKEN, BAD_CONFIDENCE.
    """
    at = 0
    for i in range(room.size):
        starts[i] = at
        if not 0 <= drafts.lengths[i] <= min(max(room[i], 0), drafts.token_ids.shape[1]):
            return TOO_LONG
        for j in range(drafts.lengths[i]):
            if not 0 <= drafts.token_ids[i, j] < vocab_size:
                return BAD_TOKEN
            if not 0.0 <= drafts.confidence[i, j] <= 1.0:  # NaN fails, too
                return BAD_CONFIDENCE
            confidence[at] = drafts.confidence[i, j]
            at += 1
    starts[room.size] = at
    return 0


@njit(allocates=False)
def match_outcomes(
    draft: NDArray[np.int64],
    draft_starts: NDArray[np.int64],
    rows: NDArray[np.int64],
    target_starts: NDArray[np.int64],
    num_verified: NDArray[np.int64],
    num_accepted: NDArray[np.int64],
    told: NDArray[np.int64],
    by_draft: NDArray[np.int64],
) -> int:
    """Match a step's outcomes with the drafts that it verified.

    Args:
        draft: `LiveArrays.draft`.
        draft_starts: int64 [drafts + 1], as filled by `flatten_drafts`.
        told: int64 [B], filled with the requests that had a draft and of which the target has sampled something.
        by_draft: int64 [2, drafts] of zeros, filled with the verified and accepted tokens of each draft.

    Returns:
        How many entries of `told` are filled.
    """
    num_told = 0
    for i in range(rows.size):
        index = draft[rows[i]]
        if 0 <= index < by_draft.shape[1] and target_starts[i + 1] > target_starts[i]:
            told[num_told] = i
            num_told += 1
            length = draft_starts[index + 1] - draft_starts[index]  # no more was drafted, whatever was verified
            by_draft[0, index], by_draft[1, index] = min(num_verified[i], length), min(num_accepted[i], length)
    return num_told


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
    """(values, starts) of some of the pieces values[starts[i] : starts[i + 1]]; `chosen` rises."""
    if chosen.size == starts.size - 1:
        return values, starts
    return pieces(values, starts[chosen], np.diff(starts)[chosen])


def _is_stop_token(token_id: int, num_output_tokens: int, params: Any) -> bool:
    """Whether this token, with which a request has `num_output_tokens`, ends it."""
    stops = token_id == params.eos_token_id or token_id in (params.stop_token_ids or ())
    return stops and num_output_tokens >= params.min_tokens


def ends_with_stop_token(token_ids: Sequence[int], params: Any, num_before: int = 0) -> bool:
    """Whether output tokens, after `num_before` others, end with a stop token that ends the request."""
    return bool(token_ids) and _is_stop_token(token_ids[-1], num_before + len(token_ids), params)


def _is_last(token_id: int, num_output_tokens: int, params: Any) -> bool:
    """Whether the scheduler ends a request at this token. Stop strings are not its business, but the front end's."""
    return num_output_tokens >= params.max_tokens or _is_stop_token(token_id, num_output_tokens, params)


def trim_at_end(token_ids: Sequence[int], num_before: int, params: Any) -> list[int]:
    """Cut newly sampled tokens where the scheduler will: a step can sample past the end of a request.

    Args:
        token_ids: New output tokens.
        num_before: Output tokens before them.
    """
    for i, token in enumerate(token_ids):
        if _is_last(token, num_before + i + 1, params):
            return list(token_ids[: i + 1])
    return list(token_ids)
