"""vLLM's requests: their problem, and where they end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rollout_spec.drafters.base import problem_of_prompt
from rollout_spec.integrations.request_options import request_options
from rollout_spec.noise import derive_seed


def problem_id_of(request: Any) -> int | None:
    """The problem id of a request: the one that the caller names, or a hash of prompt, LoRA adapter and images.

    The adapter's versions share history, as those of a policy do.

    None if there are none of these: such a request shares no history.

    Raises:
        ValueError: the request's own options are wrong.
    """
    given = request_options(request.sampling_params.extra_args).problem_id
    if given is not None:
        return given
    of_prompt = problem_of_prompt(request.prompt_token_ids)
    if request.lora_request is None and not request.mm_features:
        return of_prompt if len(request.prompt_token_ids) else None
    # TRL's AsyncGRPO publishes each version of its adapter under a name of its own, which ends in -v and a number.
    adapter = re.sub(r"-v\d+$", "", request.lora_request.lora_name) if request.lora_request is not None else ""
    return derive_seed(str(of_prompt), adapter, *(str(feature.identifier) for feature in request.mm_features or ()))


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
