"""Hooks of vLLM's front end: its requests and its engines.

Each hook is called as `(original, self, ...)` in place of the method.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

from rollout_spec import checks
from rollout_spec.config import CONFIG_KEY
from rollout_spec.integrations.vllm import log
from rollout_spec.integrations.vllm.configuration import (
    MARK,
    check_engine,
    config_of,
    has_model_drafter,
    repeats_seeds,
)
from rollout_spec.integrations.vllm.request_options import RequestOptions, request_options, with_plain_options

logger = logging.getLogger(__name__)


# -- requests --------------------------------------------------------------------------------------------------------


def init_input_processor(original: Callable[..., None], self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Check an engine's configuration, and prepare the seeds of its requests."""
    config = config_of(vllm_config)
    self._rollout_spec_seeds = None
    self._rollout_spec_is_v1 = config is not None and not vllm_config.use_v2_model_runner
    self._rollout_spec_speculates = config is not None and config.speculation
    self._rollout_spec_ignores_salts = config is not None and config.ignore_cache_salt
    if config is not None:
        check_engine(vllm_config, config)
        if config.speculation:
            object.__setattr__(vllm_config.speculative_config, MARK, True)
        self._rollout_spec_seeds = _SeedSource(vllm_config)
    original(self, vllm_config, *args, **kwargs)


def process_inputs(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Check a request's options, and give it a seed if it has none."""
    request = original(self, *args, **kwargs)
    params = request.sampling_params
    if self._rollout_spec_seeds is None or params is None:
        return request
    try:  # an error raised here fails this request alone
        options = _check_request(params, is_v1=self._rollout_spec_is_v1, speculates=self._rollout_spec_speculates)
    except (TypeError, ValueError) as error:
        raise _request_error()(str(error)) from error
    if request.cache_salt and not self._rollout_spec_ignores_salts:
        if self._rollout_spec_speculates:
            _tell_of_salts()
        options = options._replace(own_only=True, keep_in_history=False)
    if options.own_only or any(str(key).startswith(CONFIG_KEY) for key in params.extra_args or ()):
        # A new dict: that of vLLM's copy of the parameters may be the caller's.
        params.extra_args = with_plain_options(params.extra_args or {}, options)
    if params.seed is None:
        params.seed = self._rollout_spec_seeds.next()
    return request


@functools.cache
def _tell_of_salts() -> None:
    """Say once that salts cost drafts: some trainers take policy versions for them."""
    logger.warning(
        "requests with a cache_salt are drafted from their own text alone, and leave no history: if these salts keep "
        "nobody apart but are, say, policy versions, set ignore_cache_salt=True"
    )


def _check_request(params: Any, *, is_v1: bool, speculates: bool) -> RequestOptions:
    """Our options of a request. Raises ValueError or TypeError if one is wrong, or our samplers lack one of vLLM's."""
    if is_v1 and speculates and params.thinking_token_budget is not None:
        raise ValueError(
            "where vLLM's V1 model runner speculates, it ends the thinking of other requests than those whose "
            "thinking_token_budget is used up (vllm-project/vllm#39573): remove thinking_token_budget, use the V2 "
            "runner (VLLM_USE_V2_MODEL_RUNNER=1), or set speculation=False"
        )
    if is_v1 and params.logprob_token_ids:
        raise ValueError("rollout_spec cannot score logprob_token_ids in the V1 model runner: remove them")
    if params.seed is not None:
        params.seed = checks.integer("seed", params.seed)
        checks.integer("seed + n - 1", params.seed + (params.n or 1) - 1)  # vLLM gives sample i the seed + i
    return request_options(params.extra_args)


@functools.cache
def _request_error() -> type[ValueError]:
    """The exception for a bad request: a ValueError that vLLM's servers answer with status 400."""
    from vllm.exceptions import VLLMValidationError

    class RequestError(VLLMValidationError, ValueError):
        """A request that rollout_spec refuses."""

    return RequestError


class _SeedSource:
    """Seeds for requests that come without one, by the request's number and a key.

    The key of most engines is random, so that engines and restarts differ. It is the engine's seed where one
    was chosen, and under the external launcher, where every tensor-parallel rank has a front end of its own and all
    must draw the same seeds. vLLM's default is 0, and data-parallel engines share a seed: neither is a choice.
    """

    def __init__(self, vllm_config: Any) -> None:
        parallel, seed = vllm_config.parallel_config, vllm_config.model_config.seed
        if repeats_seeds(vllm_config) or parallel.distributed_executor_backend == "external_launcher":
            self._key = f"{seed}/{parallel.data_parallel_rank}/{parallel._api_process_rank}"
        else:
            self._key = os.urandom(16).hex()
        self._numbers = itertools.count(1)  # a server processes requests in several threads

    def next(self) -> int:
        from rollout_spec.noise.host import derive_seed  # imports numba, which other engines do not need

        return derive_seed(self._key, next(self._numbers))


# -- engines ---------------------------------------------------------------------------------------------------------


def init_engine(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Say what speculation an engine has, and end outputs at stop strings if it speculates."""
    original(self, *args, **kwargs)
    config = config_of(self.vllm_config)
    if config is None:
        return
    log.say(log.describe_engine(self.vllm_config, config, has_model=has_model_drafter(self.vllm_config)))
    if repeats_seeds(self.vllm_config):
        seed = self.vllm_config.model_config.seed
        log.say(
            f"rollout_spec: requests without a seed get theirs from the engine's, {seed}, and their number: another "
            "engine with this seed, or this one after a restart, repeats these rollouts"
        )
    if config.speculation:
        from rollout_spec.integrations.vllm.stop_strings import end_outputs_at_stop_strings

        end_outputs_at_stop_strings(self.output_processor)
