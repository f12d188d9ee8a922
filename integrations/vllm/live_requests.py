"""What a session keeps of a live request beside its row, and where the scheduler ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout_spec.history.problems import Conversation

if TYPE_CHECKING:
    from rollout_spec.integrations.vllm.stop_strings import StopStringSearch


@dataclass(slots=True)
class LiveRequest:
    """A request that the drafter serves.

    Attributes:
        row: Its row in the drafter's table.
        conversation: What its prompt continues.
        request: vLLM's.
        stop_search: Looks for its stop strings; None before the first output, and for requests without stop strings.
    """

    row: int
    conversation: Conversation
    request: Any
    stop_search: StopStringSearch | None = None


def end_of(params: Any) -> dict[str, Any]:
    """Where the scheduler ends a request, for `RequestTable.limit`."""
    stops = list(params.stop_token_ids or ())
    if params.eos_token_id is not None:
        stops.append(params.eos_token_id)
    return {"max_tokens": params.max_tokens, "min_tokens": params.min_tokens, "stop_token_ids": stops}


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
