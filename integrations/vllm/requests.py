"""Requests: the options that a caller can set for each, and what the front end checks and adds.

In Python: `SamplingParams(extra_args={"rollout_spec": {"problem_id": 7}})`. Over HTTP, where vLLM takes flat values
only: `"vllm_xargs": {"rollout_spec_problem_id": 7}`.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rollout_spec import checks
from rollout_spec.checks import shown
from rollout_spec.config import CONFIG_KEY, RolloutSpecConfig
from rollout_spec.integrations.vllm import compat

logger = logging.getLogger(__name__)

MAX_PROBLEM_ID = 2**64 - 1
_EXAMPLE = {"problem_id": 7, "keep_in_history": False, "own_only": True}
_FLAT = {f"{CONFIG_KEY}_{name}": name for name in _EXAMPLE}
"""The options by their flat keys."""


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
        ValueError, TypeError: an option is unknown, misspelt, given twice or of a wrong value.
    """
    if extra_args is None:
        return RequestOptions()
    if not isinstance(extra_args, Mapping):
        raise ValueError(f"extra_args must be a dict, got {shown(extra_args)}")
    nested = extra_args.get(CONFIG_KEY)
    nested = {} if nested is None else nested
    flat_example = {key: _EXAMPLE[name] for key, name in _FLAT.items()}
    how = f"set options as {{{CONFIG_KEY!r}: {_EXAMPLE}}} or, over HTTP, as {flat_example}"
    if not isinstance(nested, Mapping):
        raise ValueError(f'extra_args["{CONFIG_KEY}"] must be a dict, got {shown(nested)}: {how}')
    known = (CONFIG_KEY, *_FLAT, *_EXAMPLE)
    unknown = [key for key in map(str, nested) if key not in _EXAMPLE]
    for key in map(str, extra_args):
        is_like_ours = key.startswith(CONFIG_KEY) or difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if is_like_ours and key != CONFIG_KEY and key not in _FLAT:
            unknown.append(key)
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r} in extra_args: {how}{checks.did_you_mean(unknown[0], known)}")
    given = {}
    for key, name in _FLAT.items():
        values = [value for value in (nested.get(name), extra_args.get(key)) if value is not None]
        if len(values) > 1:
            raise ValueError(f'{key} and extra_args["{CONFIG_KEY}"]["{name}"] are both set: remove one')
        if values:
            given[name] = _checked(name, values[0])
    if given.get("own_only"):
        given["keep_in_history"] = False
    return RequestOptions(**given)


def _checked(name: str, value: Any) -> Any:
    """An option's value as Python's. Raises ValueError or TypeError if it is wrong."""
    if name == "problem_id":
        return checks.integer(name, value, 0, MAX_PROBLEM_ID)
    if isinstance(value, bool | np.bool_ | int | float) and value in (True, False):  # 1 and 0 over HTTP
        return bool(value)
    raise ValueError(f"{name} must be true or false, got {shown(value)}")


def without_history(extra_args: Mapping[str, Any] | None) -> Any:
    """`extra_args` with `keep_in_history` false, unless the caller has set it."""
    if extra_args is not None and not isinstance(extra_args, Mapping):
        return extra_args  # the engine refuses it
    args = dict(extra_args or {})
    ours = args.get(CONFIG_KEY) or {}
    if f"{CONFIG_KEY}_keep_in_history" not in args and isinstance(ours, Mapping):  # otherwise the engine refuses it
        args[CONFIG_KEY] = {"keep_in_history": False, **ours}
    return args


class FrontEnd:
    """Checks the requests of one engine, and gives a seed to those that come without one.

    Such a seed derives from the request's number and a key. The key is random, so that engines and restarts differ,
    unless rollouts are to be repeated (`repeats_engine_seed`), or the external launcher gave every tensor-parallel rank
    a front end of its own: all must draw the same seeds.
    """

    def __init__(self, vllm_config: Any, config: RolloutSpecConfig, *, is_offline: bool) -> None:
        """`is_offline`: for vLLM's `LLM`, not for a server or another asynchronous engine."""
        self._config = config
        self._is_v1 = not vllm_config.use_v2_model_runner
        self._lacks_sessions = compat.is_v2_old() and config.speculation and not self._is_v1
        parallel, seed = vllm_config.parallel_config, vllm_config.model_config.seed
        # vLLM's default is 0, and data-parallel engines share a seed: neither was chosen. Servers' requests come in any
        # order, and frameworks give all their engines one seed, with which siblings on two of them would be copies.
        self.repeats_engine_seed = is_offline and seed != 0 and parallel.data_parallel_size == 1
        if self.repeats_engine_seed or parallel.distributed_executor_backend == "external_launcher":
            self._key = f"{seed}/{parallel.data_parallel_rank}/{parallel._api_process_rank}"
        else:
            self._key = os.urandom(16).hex()
        self._numbers = itertools.count(1)  # a server processes requests in several threads

    def prepare(self, request: Any) -> None:
        """Check a request of vLLM's, and write its seed and its plain options into its own sampling parameters.

        Raises:
            ValueError: one that vLLM's servers answer with status 400; it fails this request alone.
        """
        params = request.sampling_params
        try:
            self._check(request)
            options = request_options(params.extra_args)
        except (TypeError, ValueError) as error:
            raise _request_error()(str(error)) from error
        if request.cache_salt and not self._config.ignore_cache_salt:
            if self._config.speculation:
                _tell_of_salts()
            options = options._replace(own_only=True, keep_in_history=False)
        args = params.extra_args or {}
        if options.own_only or any(str(key).startswith(CONFIG_KEY) for key in args):
            # A new dict, as vLLM's copy of the parameters may hold the caller's. NumPy's scalars do not reach a worker.
            ours = {name: value for name, value in options._asdict().items() if value is not None}
            params.extra_args = {**{key: args[key] for key in args if key not in _FLAT}, CONFIG_KEY: ours}
        if params.seed is None:
            from rollout_spec.noise.host import derive_seed  # imports numba, which other engines do not need

            params.seed = derive_seed(self._key, next(self._numbers))

    def _check(self, request: Any) -> None:
        """Raise ValueError or TypeError if our samplers lack what is asked for, or the seed is no 64-bit integer."""
        params = request.sampling_params
        if self._lacks_sessions and request.resumable:
            raise ValueError(
                "streaming sessions end an engine that speculates in the V2 model runner of vLLM before 0.31: install "
                "vLLM 0.31, take V1 (VLLM_USE_V2_MODEL_RUNNER=0), or set speculation=False"
            )
        if self._is_v1 and self._config.speculation and params.thinking_token_budget is not None:
            raise ValueError(
                "where vLLM's V1 model runner speculates, it ends the thinking of other requests than those whose "
                "thinking_token_budget is used up (vllm-project/vllm#39573): remove thinking_token_budget, use the V2 "
                "runner (VLLM_USE_V2_MODEL_RUNNER=1), or set speculation=False"
            )
        if self._is_v1 and params.logprob_token_ids:
            raise ValueError("rollout_spec cannot score logprob_token_ids in the V1 model runner: remove them")
        if params.seed is not None:
            params.seed = checks.integer("seed", params.seed)
            checks.integer("seed + n - 1", params.seed + (params.n or 1) - 1)  # vLLM gives sample i the seed + i


@functools.cache
def _request_error() -> type[ValueError]:
    """The exception for a bad request: a ValueError that vLLM's servers answer with status 400."""
    from vllm.exceptions import VLLMValidationError

    return type("RequestError", (VLLMValidationError, ValueError), {"__doc__": "A request that rollout_spec refuses."})


@functools.cache
def _tell_of_salts() -> None:
    """Say once that salts cost drafts: some trainers take policy versions for them."""
    logger.warning(
        "requests with a cache_salt are drafted from their own text alone, and leave no history: if these salts keep "
        "nobody apart but are, say, policy versions, set ignore_cache_salt=True"
    )
