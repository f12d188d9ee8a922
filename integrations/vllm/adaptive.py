"""How many of the device's draft tokens are verified: those that pay, where vLLM can cut drafts on the device.

V2's model runner times its CUDA graphs at start. In each step it then keeps those draft tokens, of all requests, that
are worth the time of their verification by the drafter's confidence; where the device would wait for the host, it
counts as free (`host_time.py`). Only the workers know whether the attention kernels allow that, and the scheduler is
made after them, maybe in another process. So vLLM's configuration has a schedule of K by the number of requests from
the beginning, and the engine's core replaces it once its workers have said that they cut drafts. `MeasuredSchedule`
then decides whether steps have drafts at all, and how many where they are not cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rollout_spec.integrations.vllm.config import OUR_SCHEDULE, say, shown_ranges
from rollout_spec.integrations.vllm.host_time import HostTime
from rollout_spec.integrations.vllm.ranks import sharing_from_first_rank
from rollout_spec.step_sizes import MEASURED_CONTEXT, MOST_CUT_REQUESTS, ranges_of


def with_adaptive_verification(runner: Any, initialize: Callable[[], Any]) -> Any:
    """Let vLLM make a V2 runner's attention metadata, with adaptive verification where it can and we may choose.

    Args:
        runner: vLLM's `GPUModelRunner`, whose samplers have been replaced.
        initialize: vLLM's method.
    """
    vllm_config = runner.vllm_config
    if not getattr(vllm_config.speculative_config, OUR_SCHEDULE, False):
        return initialize()
    try:
        _switch(runner, on=True)
        check_adaptive_verification(vllm_config)
        return initialize()
    except ValueError as error:  # vLLM says so of LoRA, of attention kernels, of engines without graphs of whole steps
        _switch(runner, on=False)
        object.__setattr__(vllm_config.speculative_config, OUR_SCHEDULE, False)  # vLLM may come here once more
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


def decide_schedule(vllm_config: Any, ask_workers: Callable[[], list[dict[str, Any]]]) -> None:
    """Give the scheduler whole drafts if the workers cut them. Called before it is made.

    Args:
        vllm_config: That of the engine's core, which in-process workers share.
        ask_workers: Gives the report of each.

    Raises:
        RuntimeError: ranks differ.
    """
    speculative = vllm_config.speculative_config
    if not getattr(speculative, OUR_SCHEDULE, False):
        return
    answers = {report["is_adaptive"] for report in ask_workers()}
    if len(answers) > 1:
        raise RuntimeError("rollout_spec: some tensor-parallel ranks cut drafts on the device and others do not")
    if answers == {False}:
        return
    k, scheduler = speculative.num_speculative_tokens, vllm_config.scheduler_config
    # Before they are cut, the scheduler needs room for all of each.
    max_step_tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    speculative.num_speculative_tokens_per_batch_size = ranges_of(
        [k, *(fewer for fewer in (3, 1) if fewer < k)], max_step_tokens, most_requests=MOST_CUT_REQUESTS
    )
    speculative.enable_adaptive_verification = True
    say(f"rollout_spec: of up to {k} draft tokens of each request as many are verified as pay by vLLM's measured costs")


def prepare_to_measure(runner: Any, index_dtype: torch.dtype, is_drafting: Callable[[], bool]) -> None:
    """Prepare vLLM's measurement of what steps cost.

    The host's time is counted beside the device's, tokens are measured as drafts are, and what cuts drafts is compiled,
    which vLLM would do while it serves. PyTorch compiles a variant for one request and one for more, and so for one
    draft token that stays and for more.

    Args:
        index_dtype: Of the numbers by which vLLM names requests: from 0.32 on they are int64.
        is_drafting: Whether a step lets drafts be made for the next one.
    """
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    manager = runner.adaptive_verification
    for num_requests in {1, min(2, runner.max_num_reqs)}:
        requests = torch.arange(num_requests, dtype=index_dtype, device=runner.device)
        capacities = manager._batch_draft_capacity[:num_requests]
        for num_kept in {1, min(2, num_requests * manager.num_speculative_steps)}:
            capacities.fill_(manager.num_speculative_steps)
            adaptive_verification._assign_draft_token_budget_compiled(
                manager._confidence_probs, requests, capacities, num_kept, manager.num_speculative_steps
            )
    HostTime(manager, runner.step_timing, sharing_from_first_rank(runner.vllm_config), is_drafting)
    manager.batches_to_profile = functools.partial(_batches_like_drafts, type(manager).batches_to_profile, manager)


def _batches_like_drafts(
    batches_to_profile: Callable[..., Iterator[dict[str, Any]]], manager: Any, capture_sizes: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """vLLM's steps of made-up requests, so that a token costs what a draft token does.

    vLLM gives each token 8,192 tokens of context, whose KV cache takes longer to read than a draft token's, which is
    that of its request. And its made-up tokens are all the same one, and padding, for which no expert of a
    mixture-of-experts model is read: drafts would seem to be free there.
    """
    from vllm.v1.worker.gpu.input_batch import InputBatch

    original = InputBatch.__dict__["make_dummy"]

    def make_dummy(*args: Any, **kwargs: Any) -> Any:
        return original.__get__(None, InputBatch)(*args, **{**kwargs, "is_padding": False})

    InputBatch.make_dummy = make_dummy
    try:
        for batch in batches_to_profile(manager, capture_sizes):
            yield {**batch, "context_len": MEASURED_CONTEXT, "randomize_inputs": True}
    finally:
        InputBatch.make_dummy = original
