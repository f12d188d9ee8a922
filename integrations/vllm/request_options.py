"""The options that a caller can set per request.

In Python: `SamplingParams(extra_args={"rollout_spec": {"problem_id": 7}})`. Over HTTP, where vLLM takes flat values
only: `"vllm_xargs": {"rollout_spec_problem_id": 7}`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rollout_spec.checks import did_you_mean, integer, shown
from rollout_spec.config import CONFIG_KEY

MAX_PROBLEM_ID = 2**64 - 1
KEEP_IN_HISTORY = f"{CONFIG_KEY}_keep_in_history"
"""The flat key of `RequestOptions.keep_in_history`."""
_EXAMPLES = {"problem_id": 7, "keep_in_history": False, "own_only": True}


class RequestOptions(NamedTuple):
    """What a caller asks for."""

    problem_id: int | None = None
    """Requests with the same number share history. None: the first prompt of the conversation decides."""
    keep_in_history: bool = True
    """Whether the rollout stays in the history once it has ended. It is drafted for in either case."""
    own_only: bool = False
    """Whether it is drafted from its own text alone, and no other request from that. The front end sets it for
    requests with a `cache_salt`, as workers do not get the salt."""


def request_options(extra_args: Mapping[str, Any] | None) -> RequestOptions:
    """The options of a request.

    Args:
        extra_args: The request's `SamplingParams.extra_args`.

    Raises:
        ValueError: an option is unknown, misspelt, given twice or of a wrong value.
    """
    if extra_args is None:
        return RequestOptions()
    if not isinstance(extra_args, Mapping):
        raise ValueError(f"extra_args must be a dict, got {shown(extra_args)}")
    flat = {f"{CONFIG_KEY}_{name}": name for name in RequestOptions._fields}
    known = (CONFIG_KEY, *flat, *RequestOptions._fields)
    for key in map(str, extra_args):
        if key == CONFIG_KEY or key in flat:
            continue
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if near or key.startswith(CONFIG_KEY):
            name = near[0].removeprefix(f"{CONFIG_KEY}_") if near and near[0] != CONFIG_KEY else "problem_id"
            example = _EXAMPLES[name]
            raise ValueError(
                f"unknown key {key!r} in extra_args: use {{{CONFIG_KEY!r}: {{{name!r}: {example}}}}}, or over HTTP "
                f"{{'{CONFIG_KEY}_{name}': {example}}}"
            )
    options = extra_args.get(CONFIG_KEY)
    if options is None:
        options = {}
    if not isinstance(options, Mapping):
        raise ValueError(
            f'extra_args["{CONFIG_KEY}"] must be a dict such as {_EXAMPLES}, got {shown(options)}; over HTTP use flat '
            f"keys such as {CONFIG_KEY}_problem_id"
        )
    if unknown := sorted(str(key) for key in options if key not in RequestOptions._fields):
        names = ", ".join(map(repr, RequestOptions._fields))
        hint = did_you_mean(unknown[0], RequestOptions._fields)
        raise ValueError(f'unknown key {unknown[0]!r} in extra_args["{CONFIG_KEY}"]: there are {names}{hint}')
    given = {}
    for key, name in flat.items():
        values = [value for value in (options.get(name), extra_args.get(key)) if value is not None]
        if len(values) > 1:
            raise ValueError(f'{key} and extra_args["{CONFIG_KEY}"]["{name}"] are both set: remove one')
        if values:
            given[name] = values[0]
    if "problem_id" in given:
        try:
            given["problem_id"] = integer("problem_id", given["problem_id"], 0, MAX_PROBLEM_ID)
        except (TypeError, ValueError) as error:
            message = f"problem_id must be an integer from 0 to 2^64 - 1, got {shown(given['problem_id'])}"
            raise ValueError(message) from error
    for name in given.keys() - {"problem_id"}:
        value = given[name]
        if not isinstance(value, bool | np.bool_ | int | float) or value not in (True, False):  # 1 and 0 over HTTP
            raise ValueError(f"{name} must be true or false, got {shown(value)}")
        given[name] = bool(value)
    if given.get("own_only"):
        given["keep_in_history"] = False
    return RequestOptions(**given)


def with_plain_options(extra_args: Mapping[str, Any], options: RequestOptions) -> dict[str, Any]:
    """`extra_args` with `options` in place of what they were read from: NumPy's scalars cannot be sent to a worker."""
    flat = {f"{CONFIG_KEY}_{name}" for name in RequestOptions._fields}
    others = {key: value for key, value in extra_args.items() if key not in flat}
    return {**others, CONFIG_KEY: {name: value for name, value in options._asdict().items() if value is not None}}


def without_history(extra_args: Mapping[str, Any] | None) -> Any:
    """`extra_args` with `keep_in_history` false, unless the caller has set it."""
    if extra_args is not None and not isinstance(extra_args, Mapping):
        return extra_args  # the engine refuses it
    args = dict(extra_args or {})
    ours = args.get(CONFIG_KEY) or {}
    if KEEP_IN_HISTORY not in args and isinstance(ours, Mapping):  # otherwise the engine refuses the request
        args[CONFIG_KEY] = {"keep_in_history": False, **ours}
    return args
