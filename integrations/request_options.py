"""The options that a caller can set per request.

In Python: `SamplingParams(extra_args={"rollout_spec": {"problem_id": 7}})`. Over HTTP, where vLLM takes flat values
only: `"vllm_xargs": {"rollout_spec_problem_id": 7}`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from rollout_spec.config import CONFIG_KEY

PROBLEM_ID = "problem_id"
FLAT_PROBLEM_ID = f"{CONFIG_KEY}_{PROBLEM_ID}"
MAX_PROBLEM_ID = 2**64 - 1


def requested_problem_id(extra_args: Mapping[str, Any] | None) -> int | None:
    """The problem id that a caller gives a request, or None.

    Args:
        extra_args: The request's `SamplingParams.extra_args`.

    Raises:
        ValueError: an option is unknown, misspelt or given twice, or the id is not an integer from 0 to 2^64 - 1.
    """
    if not extra_args:
        return None
    for key in map(str, extra_args):
        if key in (CONFIG_KEY, FLAT_PROBLEM_ID):
            continue
        names = (CONFIG_KEY, FLAT_PROBLEM_ID, PROBLEM_ID)
        if key.startswith(CONFIG_KEY) or difflib.get_close_matches(key, names, cutoff=0.85):
            raise ValueError(
                f'unknown key {key!r} in extra_args: use {{"{CONFIG_KEY}": {{"{PROBLEM_ID}": 7}}}}, or over HTTP '
                f'{{"{FLAT_PROBLEM_ID}": 7}}'
            )
    options = extra_args.get(CONFIG_KEY)
    if options is None:
        options = {}
    if not isinstance(options, Mapping):
        raise ValueError(
            f'extra_args["{CONFIG_KEY}"] must be a dict such as {{"{PROBLEM_ID}": 7}}, got {options!r}; over HTTP use '
            f"{FLAT_PROBLEM_ID}"
        )
    if unknown := sorted(str(key) for key in options if key != PROBLEM_ID):
        raise ValueError(f'unknown key {unknown[0]!r} in extra_args["{CONFIG_KEY}"]: the only one is {PROBLEM_ID!r}')
    given = [value for value in (options.get(PROBLEM_ID), extra_args.get(FLAT_PROBLEM_ID)) if value is not None]
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f'{FLAT_PROBLEM_ID} and extra_args["{CONFIG_KEY}"]["{PROBLEM_ID}"] are both set: remove one')
    problem_id = given[0]
    if not isinstance(problem_id, int) or isinstance(problem_id, bool) or not 0 <= problem_id <= MAX_PROBLEM_ID:
        raise ValueError(f"{PROBLEM_ID} must be an integer from 0 to 2^64 - 1, got {problem_id!r}")
    return problem_id
