"""The device drafter in vLLM's V2 model runner, scheduled asynchronously, all kernels emulated."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from rollout_spec import engine_kwargs
from rollout_spec.config import PROPOSER_PATH
from rollout_spec.integrations.vllm.device import DeviceSpeculator
from tests.integrations.engines import (
    PLAIN,
    assert_same,
    build,
    check_features,
    count_preemptions,
    generate,
    mixed_params,
    prompts_of,
    runner_of,
    stats_of,
    switching_off_and_on,
)

pytestmark = pytest.mark.engine

K = 3


def build_on_device(model, *, engine=None, options=None, **settings):
    arguments = engine_kwargs(
        num_speculative_tokens=K,
        drafter="device",
        drafter_options={"max_resident_tokens": 4096, **(options or {})},
        **settings,
    )
    return build(model, **{"max_num_seqs": 6, **arguments, **(engine or {})})


@pytest.fixture(scope="module")
def device(tiny_model):
    return build_on_device(tiny_model)


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def drafter_of(llm):
    return runner_of(llm).speculator.drafter


def texts_of(drafter):
    """What the drafter has kept of each ended rollout, without the prompt."""
    return sorted(
        tuple(tokens[prompt:].tolist()) for a in drafter._archive.order for tokens, _, prompt, _ in [a.read()]
    )


def rollouts_of(drafter):
    """(prompt, tokens, their features) of each ended rollout."""
    texts = (a.read() for a in drafter._archive.order)
    return [(tokens[:prompt], tokens[prompt:], features[prompt:]) for tokens, features, prompt, _ in texts]


def test_same_rollouts_as_stock_vllm(stock, device, reference_model):
    """Tokens, log-probabilities and ranks, with more requests than slots, and twice, so that history comes back."""
    assert isinstance(runner_of(device).speculator, DeviceSpeculator)
    assert runner_of(stock).speculator is None
    assert isinstance(scheduler_of(device), AsyncScheduler)
    assert isinstance(scheduler_of(stock), AsyncScheduler)
    rollouts = []
    for seed in (1, 2):
        params = mixed_params(8, seed, max_tokens=10, logprobs=0, **PLAIN)
        prompts = prompts_of(params)
        expected = generate(stock, params, prompts)
        ours = generate(device, params, prompts)
        assert_same(ours, expected, prompts, params, reference_model)
        rollouts += [tuple(output.token_ids) for output in ours]
    stats = stats_of(device)
    assert stats["accepted_tokens"] > 0
    assert stats["rejected_tokens"] > 0
    generate(device, mixed_params(1, 12, max_tokens=2, ignore_eos=True, **PLAIN))
    drafter_of(device).check_integrity()
    assert set(rollouts) <= set(texts_of(drafter_of(device)))
    counts = drafter_of(device).source_counts()
    assert counts["problem"][0] > 0
    assert counts["own"][0] > 0


def test_the_drafter_is_told_what_the_target_saw(tiny_model, reference_model):
    llm = build_on_device(tiny_model)
    generate(llm, mixed_params(8, 3, temperature=0.7, max_tokens=16, **PLAIN))
    generate(llm, mixed_params(1, temperature=0.7, max_tokens=2, **PLAIN))  # the others' end is noticed with this
    assert stats_of(llm)["accepted_tokens"] > 5
    checked, unknown = check_features(rollouts_of(drafter_of(llm)), reference_model, 0.7)
    assert checked > 50
    assert unknown == 0
    params = mixed_params(3, 8, temperature=0.7, max_tokens=20, ignore_eos=True, **PLAIN)
    switching_off_and_on(llm, params, prompts_of(params), [range(4, 7)])
    generate(llm, mixed_params(1, temperature=0.7, max_tokens=2, **PLAIN))
    now = check_features(rollouts_of(drafter_of(llm)), reference_model, 0.7)
    assert now[0] > checked + 20
    assert now[1] > 3


def test_what_vllm_processes_is_verified_with_the_same_noise(stock, device):
    params = mixed_params(3, 3, max_tokens=8, logprobs=0, **PLAIN)
    params[0].repetition_penalty = 1.3
    params[1].min_tokens = 6
    params[2].logit_bias = {7: 3.0, 8: -100.0}
    assert [list(o.token_ids) for o in generate(device, params)] == [list(o.token_ids) for o in generate(stock, params)]


def test_a_pool_that_is_too_small_changes_no_token(tiny_model, stock, reference_model):
    """Rollouts are pushed out, uploaded and evicted while others decode."""
    llm = build_on_device(tiny_model, options={"max_resident_tokens": 64})
    for seed in (4, 5):
        params = mixed_params(7, seed, temperature=1.0, max_tokens=2 + seed, ignore_eos=True, **PLAIN)
        prompts = prompts_of(params)
        assert_same(generate(llm, params, prompts), generate(stock, params, prompts), prompts, params, reference_model)
        drafter_of(llm).check_integrity()
    assert drafter_of(llm).dropped_tokens > 0
    assert texts_of(drafter_of(llm))


def test_preempted_requests_keep_their_noise_and_their_history(tiny_model, stock, reference_model):
    small = build_on_device(
        tiny_model, engine={"block_size": 32, "num_gpu_blocks_override": 5, "enable_prefix_caching": False}
    )
    preempted = count_preemptions(small)
    params = mixed_params(4, 9, temperature=1.0, max_tokens=30, ignore_eos=True, **PLAIN)
    prompts = [[1, 4 + i % 2, 9] * 5 for i in range(4)]
    ours = generate(small, params, prompts)
    assert preempted
    assert_same(ours, generate(stock, params, prompts), prompts, params, reference_model)
    generate(small, mixed_params(1, 12, max_tokens=2, ignore_eos=True, **PLAIN))
    drafter_of(small).check_integrity()
    assert set(texts_of(drafter_of(small))) >= {tuple(output.token_ids) for output in ours}


def test_switched_off_it_goes_on_listening(device, stock):
    params = mixed_params(3, 7, temperature=1.0, max_tokens=6, ignore_eos=True, **PLAIN)
    device.collective_rpc("rollout_spec", args=("set_enabled", False))
    ours = [tuple(output.token_ids) for output in generate(device, params)]
    device.collective_rpc("rollout_spec", args=("set_enabled", True))
    assert ours == [tuple(output.token_ids) for output in generate(stock, params)]
    device.collective_rpc("rollout_spec", args=("begin_policy_version", 1))
    (report,) = device.collective_rpc("rollout_spec", args=("report",))
    assert (report["num_speculative_tokens"], report["budget"]) == (K, None)
    generate(device, mixed_params(1, 12, max_tokens=2, ignore_eos=True, **PLAIN))
    assert set(texts_of(drafter_of(device))) >= set(ours)


def test_slots_follow_the_batch_size(tiny_model, stock, reference_model):
    """No slots for four or more requests, K for fewer: vLLM's schedule, which it has in every version."""
    ranges = {"num_speculative_tokens_per_batch_size": [(1, 3, K), (4, 6, 0)]}
    proposer = {"model": PROPOSER_PATH, "num_speculative_tokens": K, **ranges}
    llm = build_on_device(tiny_model, engine={"speculative_config": proposer})
    lengths = {}
    sampler = runner_of(llm).sampler
    original = sampler._book

    def book(input_batch, layout, result):
        drafted = input_batch.cu_num_logits_np[1:] - input_batch.cu_num_logits_np[:-1] - 1
        lengths.setdefault(len(drafted), set()).update(drafted.tolist())
        return original(input_batch, layout, result)

    sampler._book = book
    drafter, looked_up = drafter_of(llm), []
    look_up = drafter.look_up
    drafter.look_up = lambda slots, *args: looked_up.append(slots.numel()) or look_up(slots, *args)
    params = mixed_params(5, 6, temperature=1.0, ignore_eos=True, **{**PLAIN, "max_tokens": 10})
    for i, p in enumerate(params):
        p.max_tokens = 6 + 3 * i
    prompts = prompts_of(params)
    assert_same(generate(llm, params, prompts), generate(stock, params, prompts), prompts, params, reference_model)
    assert lengths[5] == {0}
    assert K in lengths[1]
    assert looked_up, "few requests draft"
    assert max(looked_up) <= 3, "where nothing will be verified, nothing is drafted"
    found = rollouts_of(drafter)
    assert len(found) >= 4, "the last one's end is seen later"
    num_checked, num_unknown = check_features(found, reference_model, 1.0)
    assert num_checked > 0.9 * (num_checked + num_unknown), "but it is kept what the target saw"


def test_vllms_warm_up_leaves_no_trace(device, monkeypatch):
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: None)  # torch's CUDA build looks for a device
    worker = device.llm_engine.model_executor.driver_worker.worker
    runner = runner_of(device)
    before = stats_of(device)["request_steps"], texts_of(drafter_of(device))
    with runner.rollout_spec.warm_up():
        assert run_mixed_prefill_decode_warmup(runner, worker.execute_model, worker.sample_tokens, 8)
    assert (stats_of(device)["request_steps"], texts_of(drafter_of(device))) == before
    drafter_of(device).check_integrity()


def test_drafts_for_rejection_sampling_ignore_the_noise(tiny_model):
    llm = build_on_device(tiny_model, verify="rejection")
    outputs = generate(llm, mixed_params(4, 7, max_tokens=8, ignore_eos=True, **PLAIN))
    assert [len(output.token_ids) for output in outputs] == [8] * 4
    assert int(drafter_of(llm)._counters[2].sum()) == 0


def test_unknown_options_are_refused(tiny_model):
    with pytest.raises(ValueError, match="min_survival"):
        build_on_device(tiny_model, options={"min_survival": 0.1})
    with pytest.raises(ValueError, match="max_resident_tokens"):
        build_on_device(tiny_model, options={"max_resident_tokens": 0})
