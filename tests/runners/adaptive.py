"""Engines that cut drafts on the device by vLLM's adaptive verification, without the CUDA graphs that it asks for."""

from contextlib import contextmanager

import pytest

from rollout_spec.integrations.vllm import adaptive


@contextmanager
def as_on_a_gpu():
    """Build engines inside. How drafts are cut is vLLM's own code, and when it can cut them is not asked."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive, "check_adaptive_verification", lambda vllm_config: None)
        patch.setattr(model_runner, "resolve_adaptive_cudagraph_mode", lambda mode, **options: mode)
        for name in ("get_varlen_cudagraph_unsupported_backend", "get_query_lens_mismatch_unsupported_backend"):
            patch.setattr(adaptive_verification, name, lambda *args, **options: None)
        yield


def schedule_of(llm):
    """What chooses between whole drafts and none; None where nothing does."""
    steps = llm.llm_engine.engine_core.engine_core.scheduler.rollout_spec
    return None if steps is None else steps._schedule


def always_draft(llm):
    """Also with one pass per step, though drafts do not pay where kernels are emulated."""
    schedule = schedule_of(llm)
    if schedule is not None:
        schedule.choose = lambda num_requests, most: most


def set_costs(runner, milliseconds):
    """Let steps cost what a function says of their number of tokens. vLLM measures it with its graphs."""
    manager = runner.adaptive_verification
    states = manager.req_states
    curve = [(size, milliseconds(size)) for size in range(1, states.max_num_batched_tokens + 1)]
    manager.set_cost_curves([(1, 0.1), (states.max_num_reqs, 0.1)], curve)


def rising(num_tokens):
    """Milliseconds."""
    return 10.0 + num_tokens
