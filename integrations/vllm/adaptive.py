"""How many of the device's draft tokens are verified: those that pay, where vLLM can cut drafts on the device.

V2's model runner times its CUDA graphs at start. In each step it then keeps those draft tokens, of all requests, that
are worth the time of their verification by the drafter's confidence (`cutting.py`). Only the workers know whether the
attention kernels allow that, and the scheduler is made after them, maybe in another process. So
`num_speculative_tokens_per_batch_size` has bounds at first, which the engine's core replaces once its workers report
that they cut drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_spec.integrations.vllm import compat
from rollout_spec.integrations.vllm.config import chooses_k, say, shown_ranges
from rollout_spec.schedule import MOST_CUT_REQUESTS, ranges_of


def with_adaptive_verification(runner: Any, initialize: Callable[[], Any]) -> Any:
    """Let vLLM make a V2 runner's attention metadata, with adaptive verification where it can and we may choose.

    Args:
        runner: vLLM's `GPUModelRunner`, whose samplers have been replaced.
        initialize: vLLM's method.
    """
    vllm_config = runner.vllm_config
    if not (runner.rollout_spec.may_cut and chooses_k(vllm_config)):
        return initialize()
    try:
        if compat.is_v2_old():
            raise ValueError("it needs vLLM 0.31")
        _switch(runner, on=True)
        check_adaptive_verification(vllm_config)
        return initialize()
    except ValueError as error:  # vLLM says so of LoRA, of attention kernels, of engines without graphs of whole steps
        _switch(runner, on=False)
        runner.rollout_spec.may_cut = False  # vLLM may come here once more
        if vllm_config.parallel_config.rank == 0:
            ranges = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
            say(
                f"rollout_spec: all requests of a step have equally many draft tokens, at most {shown_ranges(ranges)}, "
                f"as vLLM cannot cut drafts on the device here: {str(error).partition('. ')[0]}"
            )
        return initialize()


def check_adaptive_verification(vllm_config: Any) -> None:
    """Raise ValueError where adaptive verification, which is on, does not fit an engine, by its configuration.

    vLLM's own checks of routed experts and context parallelism ran while it was off, so they are repeated here.
    """
    if vllm_config.aux_output_config.enable_return_routed_experts:
        raise ValueError("routed experts are returned")
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError("context parallelism")
    sizes, speculative = vllm_config.compilation_config.cudagraph_capture_sizes, vllm_config.speculative_config
    most = vllm_config.scheduler_config.max_num_seqs * (speculative.num_speculative_tokens + 1)
    if min(sizes or [most + 1]) > most:
        raise ValueError("there are no CUDA graphs of whole steps whose time it could measure")
    vllm_config._validate_adaptive_verification()


def _switch(runner: Any, *, on: bool) -> None:
    for owner in (runner.vllm_config.speculative_config, runner.speculator, runner.sampler):
        owner.enable_adaptive_verification = on


def decide_schedule(vllm_config: Any, reports: list[dict[str, Any]]) -> None:
    """Give the scheduler whole drafts if the workers cut them. Called before it is made.

    Args:
        vllm_config: That of the engine's core, which in-process workers share.
        reports: Of each worker. All say the same, as configuration and kind of device decide.
    """
    if not chooses_k(vllm_config) or not reports[0]["is_adaptive"]:
        return
    speculative, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    k = speculative.num_speculative_tokens
    # Before they are cut, the scheduler needs room for all of each.
    max_step_tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    speculative.num_speculative_tokens_per_batch_size = ranges_of(
        [k, *(fewer for fewer in (3, 1) if fewer < k)], max_step_tokens, most_requests=MOST_CUT_REQUESTS
    )
    speculative.enable_adaptive_verification = True
    say(f"rollout_spec: of up to {k} draft tokens of each request as many are verified as pay by vLLM's measured costs")
