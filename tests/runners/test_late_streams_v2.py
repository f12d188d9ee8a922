"""Engines with the device drafter whose streams run late: the same rollouts, and what streams share is ordered."""

from __future__ import annotations

import contextlib

import pytest
import vllm.v1.worker.cpu.shm  # noqa: F401  puts its own in the place of torch's streams

from rollout_spec import engine_kwargs
from tests.integrations.engines import (
    build,
    count_preemptions,
    generate,
    mixed_params,
    prompts_of,
    rollouts_of,
    runner_of,
    stats_of,
)
from tests.ptx.streams import late_streams
from tests.runners.adaptive import IS_SUPPORTED, as_on_a_gpu, rising, set_costs

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

SMALL = {"max_num_seqs": 6, "block_size": 32, "num_gpu_blocks_override": 7, "enable_prefix_caching": False}


def life(model, folder, *, is_adaptive):
    """Rollouts, with preemptions, stop strings, a weight update and a folder of history; what is kept and drafted."""
    options = {"drafter": "device", "drafter_options": {"max_resident_tokens": 600}, "history_dir": str(folder)}
    with as_on_a_gpu() if is_adaptive else contextlib.nullcontext():
        llm = build(model, **SMALL, **engine_kwargs(num_speculative_tokens=3, budget=is_adaptive, **options))
    if is_adaptive:
        set_costs(runner_of(llm), rising)
    preempted = count_preemptions(llm)
    params = [
        *mixed_params(8, 1, max_tokens=40, ignore_eos=True),
        *mixed_params(3, 2, max_tokens=30, stop=["w7", "w3"], logprobs=None),
    ]
    said = []
    for _ in range(2):
        outputs = generate(llm, params, prompts_of(params))
        said += [list(output.token_ids) for output in outputs]
        llm.collective_rpc("rollout_spec", args=("begin_policy_version",))
    assert preempted
    kept = [[part.tolist() for part in rollout] for rollout in rollouts_of(llm)]
    stats = stats_of(llm)
    return said, kept, None if is_adaptive else (stats["draft_tokens"], stats["accepted_tokens"])


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_rollouts_do_not_depend_on_when_the_device_works(tiny_model, tmp_path, is_adaptive):
    if is_adaptive and not IS_SUPPORTED:
        pytest.skip("vLLM 0.31 is the first that cuts drafts with what we need")
    expected = life(tiny_model, tmp_path / "plain", is_adaptive=is_adaptive)
    with late_streams(seed=1) as machine:
        found = life(tiny_model, tmp_path / "late", is_adaptive=is_adaptive)
    assert found == expected
    assert machine.num_copies > 100
    assert machine.num_borrowed > 100
