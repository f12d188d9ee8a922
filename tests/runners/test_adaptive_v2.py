"""vLLM's adaptive verification, which cuts the device's drafts by their confidences, with all kernels emulated."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from rollout_spec import engine_kwargs
from rollout_spec.config import PROPOSER_PATH
from rollout_spec.drafters.device import kernels
from rollout_spec.integrations.vllm import adaptive, cutting
from rollout_spec.schedule import affordable_ranges
from rollout_spec.verify import kernel
from tests.conftest import GPU_STAND_IN
from tests.integrations.engines import (
    DEVICE,
    FEW_BLOCKS,
    assert_same,
    build,
    count_preemptions,
    generate,
    runner_of,
    session_of,
    stats_of,
    switching_off_and_on,
)
from tests.integrations.vllm.test_tensor_parallel import two_ranks
from tests.launches import ours, recorded_variants
from tests.runners.adaptive import as_on_a_gpu, rising, schedule_of, set_costs

K = 7
COSTS = {
    "flat": lambda num_tokens: 1.0,
    "rising": rising,
    "steep": lambda num_tokens: float(num_tokens),
    "knee": lambda num_tokens: 10.0 + max(0, num_tokens - 12),
}
"""Milliseconds of a step by its tokens."""
OURS = ours(kernel, kernels, cutting)
ON_DEVICE = {"rollout_spec": {"drafter": "device"}}
"""`additional_config` of an engine that chooses how many draft tokens are verified."""


def options(k=K):
    return {"max_num_seqs": 6, **engine_kwargs(num_speculative_tokens=k, **DEVICE)}


def build_adaptive(model, cost="rising", k=K, **engine):
    with as_on_a_gpu():
        llm = build(model, **{**options(k), **engine})
    set_costs(runner_of(llm), COSTS[cost])
    assert schedule_of(llm) is None, "whole drafts are scheduled"
    return llm


def kept_and_scheduled(llm, monkeypatch):
    """A list that gets, for each step with drafts, (draft tokens that are verified, scheduled ones)."""
    decisions, manager = [], runner_of(llm).adaptive_verification
    decide = manager.get_num_tokens

    def get_num_tokens(num_tokens_per_req, draft_tokens):
        num_tokens = decide(num_tokens_per_req, draft_tokens)
        decisions.append((manager._batch_budget[2], sum(map(len, draft_tokens.values()))))
        return num_tokens

    monkeypatch.setattr(manager, "get_num_tokens", get_num_tokens)
    return decisions


def requests(count):
    """(prompts, params) of requests that ask for many things, some with long prompts."""
    rng = np.random.default_rng(0)
    prompts = [
        [1, *rng.integers(4, 24, int(rng.integers(3, 40))).tolist()] if i % 2 else [1, 4 + i % 3, 9]
        for i in range(count)
    ]
    params = [
        SamplingParams(
            temperature=(0.0, 0.6, 1.0)[i % 3],
            top_k=5 if i % 5 == 2 else 0,
            max_tokens=5 + 3 * i % 31,
            seed=i,
            ignore_eos=i % 4 != 0,
            logprobs=(0, 2, 1)[i % 3],
            min_tokens=(0, 3)[i % 2],
            repetition_penalty=(1.0, 1.2)[i % 2],
            stop_token_ids=[7] if i % 5 == 0 else None,
            prompt_logprobs=1 if i == 3 else None,
        )
        for i in range(count)
    ]
    return prompts, params


def test_drafts_are_cut_where_attention_allows_it(tiny_model, off, reference_model, monkeypatch):
    llm = build_adaptive(tiny_model)
    config = llm.llm_engine.vllm_config.speculative_config
    assert config.enable_adaptive_verification
    decisions, manager = kept_and_scheduled(llm, monkeypatch), runner_of(llm).adaptive_verification
    confidences, record = [], manager.record_confidences
    monkeypatch.setattr(
        manager, "record_confidences", lambda rates, batch: confidences.append(rates.clone()) or record(rates, batch)
    )
    prompts, params = requests(8)
    plain = generate(off, params, prompts)
    for _ in range(2):
        assert_same(generate(llm, params, prompts), plain, params, reference_model, prompts)
    assert any(((rates > 0) & (rates < 1)).any() for rates in confidences), "the drafter's own"
    kept, scheduled = np.sum(decisions, 0)
    assert 0 < kept < 0.7 * scheduled
    stats = stats_of(llm)
    assert stats["accepted_tokens"] > 20
    assert stats["accepted_tokens"] > 0.5 * stats["draft_tokens"], "what is kept is mostly right"
    assert llm.collective_rpc("rollout_spec", args=("report",))[0]["is_adaptive"]
    llm.collective_rpc("rollout_spec", args=("set_enabled", False))
    decisions.clear()
    generate(llm, params, prompts)
    assert not np.any(decisions), "nor are drafts scheduled"
    assert stats_of(llm)["draft_tokens"] == stats["draft_tokens"]


@pytest.mark.parametrize(
    "cost", [pytest.param(name, marks=() if name == "rising" else pytest.mark.exhaustive) for name in COSTS]
)
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({}, id="whole"),
        pytest.param({"k": 1}, id="one"),
        pytest.param({"max_num_seqs": 2}, id="few"),
        pytest.param({"max_num_batched_tokens": 20}, id="chunked"),
        pytest.param(FEW_BLOCKS, id="preempted"),
    ],
)
def test_rollouts_do_not_change(tiny_model, off, reference_model, monkeypatch, cost, engine):
    """Whatever steps cost: prompts in chunks, preemptions, more requests than places, switched off and on."""
    llm = build_adaptive(tiny_model, cost, **engine)
    preempted, decisions = count_preemptions(llm), kept_and_scheduled(llm, monkeypatch)
    prompts, params = requests(14)
    plain = generate(off, params, prompts)
    for _ in range(3):
        assert_same(generate(llm, params, prompts), plain, params, reference_model, prompts)
    switched = switching_off_and_on(llm, params, [range(3, 8), range(15, 20)], prompts)
    assert_same(switched, plain, params, reference_model, prompts)
    session_of(llm).drafter.check_integrity()
    assert bool(preempted) == ("block_size" in engine)
    kept, scheduled = np.sum(decisions, 0)
    assert 0 < kept < scheduled
    assert stats_of(llm)["accepted_tokens"] > 30


def refuse_lora(config):
    raise ValueError("not with LoRA. Do something else")


@pytest.mark.parametrize("refusal", ["LoRA", "Flash"])
def test_k_follows_the_number_of_requests_where_vllm_refuses(tiny_model, refusal):
    """That is asked once, and what vLLM has made of attention with it is made again."""
    said = []
    with as_on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive, "say", said.append)
        if refusal == "LoRA":
            patch.setattr(adaptive, "check_adaptive_verification", refuse_lora)
        else:
            check = "get_varlen_cudagraph_unsupported_backend"
            patch.setattr(adaptive_verification, check, lambda *args, **options: ("Flash", None))
        llm = build(tiny_model, **options())
    runner, config = runner_of(llm), llm.llm_engine.vllm_config.speculative_config
    assert runner.adaptive_verification is None
    assert not runner.sampler.enable_adaptive_verification
    assert not config.enable_adaptive_verification
    assert config.num_speculative_tokens_per_batch_size == affordable_ranges(K)
    assert schedule_of(llm) is not None
    (sentence,) = said
    assert refusal in sentence
    assert "7 from 1 request on, 3 from 25 requests on" in sentence
    assert "Do something else" not in sentence
    prompts, params = requests(4)
    generate(llm, params, prompts)
    assert not llm.collective_rpc("rollout_spec", args=("report",))[0]["is_adaptive"]


def test_a_schedule_of_the_user_s_own_and_no_budget_are_kept(tiny_model):
    with as_on_a_gpu():
        proposer = {"model": PROPOSER_PATH, "num_speculative_tokens": K}
        ranges = {**proposer, "num_speculative_tokens_per_batch_size": [(1, 9, K)]}
        for changed in ({"speculative_config": ranges}, engine_kwargs(**DEVICE, budget=False)):
            llm = build(tiny_model, **{**options(), **changed})
            assert runner_of(llm).adaptive_verification is None
            assert schedule_of(llm) is None


@pytest.mark.parametrize(
    ("max_num_seqs", "room", "scheduled", "expected"),
    [
        (512, 8192, None, [(1, 512, 4), (513, 513, 0)]),
        (513, 8192, None, [(1, 512, 4), (513, 513, 0)]),
        (256, 640, None, [(1, 128, 4), (129, 160, 3), (161, 320, 1), (321, 321, 0)]),
        (256, 8192, 640, [(1, 128, 4), (129, 160, 3), (161, 320, 1), (321, 321, 0)]),
    ],
)
def test_the_scheduler_has_room_for_whole_drafts(max_num_seqs, room, scheduled, expected):
    """Which are cut after it has planned a step. Many requests have none."""
    speculative = SimpleNamespace(
        model=PROPOSER_PATH, method="", num_speculative_tokens=4, num_speculative_tokens_per_batch_size=[(1, 9, 3)]
    )
    scheduler = SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=room)
    scheduler.max_num_scheduled_tokens = scheduled
    config = SimpleNamespace(speculative_config=speculative, scheduler_config=scheduler)
    config.additional_config = {"rollout_spec": {"drafter": "device", "budget": False}}
    adaptive.decide_schedule(config, [{"is_adaptive": True}])
    assert speculative.num_speculative_tokens_per_batch_size == [(1, 9, 3)], "it is not ours"
    config.additional_config = ON_DEVICE
    adaptive.decide_schedule(config, [{"is_adaptive": False}, {"is_adaptive": False}])
    assert speculative.num_speculative_tokens_per_batch_size == [(1, 9, 3)]
    adaptive.decide_schedule(config, [{"is_adaptive": True}])
    assert speculative.num_speculative_tokens_per_batch_size == expected
    assert speculative.enable_adaptive_verification


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"cudagraph_capture_sizes": [256, 512]}, "CUDA graphs"),
        ({"cudagraph_capture_sizes": []}, "CUDA graphs"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"enable_return_routed_experts": True}, "routed experts"),
        ({"validate": "LoRA"}, "LoRA"),
    ],
)
def test_what_keeps_vllm_from_cutting_drafts(monkeypatch, changes, reason):
    said = []
    monkeypatch.setattr(adaptive, "say", said.append)

    def validate():
        assert all(owner.enable_adaptive_verification for owner in owners), "otherwise vLLM checks nothing"
        if "validate" in changes:
            raise ValueError(changes["validate"])

    config = SimpleNamespace(
        model_config=SimpleNamespace(),
        aux_output_config=SimpleNamespace(**{"enable_return_routed_experts": False, **changes}),
        parallel_config=SimpleNamespace(
            **{"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "rank": 0, **changes}
        ),
        compilation_config=SimpleNamespace(**{"cudagraph_capture_sizes": [1, 2, 4, 512], **changes}),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        speculative_config=SimpleNamespace(
            model=PROPOSER_PATH, method="", num_speculative_tokens=7, num_speculative_tokens_per_batch_size=[(1, 9, 7)]
        ),
        additional_config=ON_DEVICE,
        _validate_adaptive_verification=validate,
    )
    runner = SimpleNamespace(
        vllm_config=config, speculator=SimpleNamespace(), sampler=SimpleNamespace(),
        rollout_spec=SimpleNamespace(may_cut=True),
    )  # fmt: skip
    owners = config.speculative_config, runner.speculator, runner.sampler
    assert adaptive.with_adaptive_verification(runner, lambda: "made") == "made"
    assert [owner.enable_adaptive_verification for owner in owners] == [reason is None] * 3
    assert runner.rollout_spec.may_cut == (reason is None)
    assert len(said) == (reason is not None)
    assert all(reason in line for line in said)


def test_vllm_measures_drafting_and_nothing_is_compiled_after_that(tiny_model, monkeypatch):
    """What is measured are tokens that experts would see: no padding, and not all the same."""
    llm = build_adaptive(tiny_model)
    runner, drafter = runner_of(llm), session_of(llm).drafter
    measured, propose = [], runner.speculator.propose

    def propose_and_note(input_batch, *args, **more):
        measured.append((input_batch.is_padding.tolist(), input_batch.input_ids.tolist()))
        return propose(input_batch, *args, **more)

    monkeypatch.setattr(runner.speculator, "propose", propose_and_note)
    drafted, draft = [], drafter.propose
    monkeypatch.setattr(
        drafter, "propose", lambda slots, *args, **into: drafted.append(len(slots)) or draft(slots, *args, **into)
    )
    with recorded_variants() as compiled, runner.rollout_spec.ignoring_requests(), torch.inference_mode():
        runner.rollout_spec.compile_kernels()
        runner._dummy_run(4)  # compiles the drafter's
        for batch in runner.adaptive_verification.batches_to_profile([1, 4, 6]):
            runner._dummy_run(**batch)
        runner._dummy_run(2)
    assert set(drafted[1:]) >= {1, 4, 6}
    assert stats_of(llm)["request_steps"] == 0
    padding, token_ids = zip(*measured, strict=True)
    assert all(padding[0])
    assert all(padding[-1]), "vLLM's own are padding again"
    assert not any(map(any, padding[1:-1]))
    assert any(len(set(ids)) > 2 for ids in token_ids[1:-1])
    with recorded_variants() as launched:
        for count in (8, 1, 2):
            prompts, params = requests(count)
            generate(llm, params, prompts)
    assert not {variant for variant in launched - compiled if variant[0] in OURS}


@pytest.mark.exhaustive
def test_two_ranks_cut_alike_and_their_scheduler_hears_of_it(tiny_model, off, reference_model, monkeypatch):
    """The scheduler is in another process than the workers."""
    monkeypatch.setenv("PYTHONPATH", GPU_STAND_IN)
    extension = {"worker_extension_cls": "tests.runners.adaptive_worker.Extension"}
    with as_on_a_gpu(), two_ranks(tiny_model, **options(), **extension) as llm:
        llm.collective_rpc("let_costs_rise")
        prompts, params = requests(8)
        plain = generate(off, params, prompts)
        for _ in range(3):
            assert_same(generate(llm, params, prompts), plain, params, reference_model, prompts)
        cut = llm.collective_rpc("rollout_spec", args=("stats",))[0]
        first, second = llm.collective_rpc("rollout_spec", args=("report",))
    assert first["is_adaptive"]
    assert second["is_adaptive"]
    assert second["stats"]["steps"] == 0, "vLLM reads the first rank's outputs alone"
    assert 20 < cut["accepted_tokens"] < cut["draft_tokens"] < 0.7 * K * 30 * 8
