"""vLLM's drafters with a model beside history in the V2 model runner, all kernels emulated."""

from __future__ import annotations

import pytest
import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from rollout_spec import engine_kwargs
from rollout_spec.integrations.vllm.device import DeviceSpeculator
from rollout_spec.integrations.vllm.hybrid import ModelSpeculation
from tests.integrations.draft_models import METHODS as ALL_METHODS
from tests.integrations.draft_models import model_drafters
from tests.integrations.engines import (
    PLAIN,
    assert_same,
    build,
    count_preemptions,
    generate,
    mixed_params,
    prompts_of,
    runner_of,
    stats_of,
)

pytestmark = pytest.mark.engine

K, MODEL_TOKENS = 4, 2
METHODS = [method for method in ALL_METHODS if method != "draft_model" or vllm.__version_tuple__[:2] >= (0, 31)]
"""Those that V2 has in this release."""
HISTORY = {"num_speculative_tokens": K, "drafter_options": {"max_resident_tokens": 4096}}


@pytest.fixture(scope="module")
def drafters(tiny_model, tmp_path_factory):
    return model_drafters(tiny_model, tmp_path_factory.mktemp("drafters"))


def build_beside(drafters, method, *, engine=None, **options):
    target, speculative = drafters[method]
    arguments = engine_kwargs(speculative_config={**speculative, "num_speculative_tokens": MODEL_TOKENS}, **options)
    return build(target, **{"max_num_seqs": 6, **arguments, **(engine or {})})


def drafts_of_the_model(llm, params, prompts):
    """Outputs, and what the model drafted: {(seed, position that the draft begins at): tokens}."""
    runner, drafts = runner_of(llm), {}
    original = type(runner.speculator).__mro__[2].propose

    def propose(self, input_batch, *args, dummy_run=False, **kwargs):
        tokens = original(self, input_batch, *args, dummy_run=dummy_run, **kwargs)
        num_sampled = args[4]
        for i, req_id in enumerate(input_batch.req_ids):
            if not dummy_run and num_sampled[i] > 0:
                length = int(runner.req_states.total_len.gpu[input_batch.idx_mapping[i]])
                request = runner.rollout_spec.requests[req_id]
                drafts[request.sampling_params.seed, length] = tuple(tokens[i, :MODEL_TOKENS].tolist())
        return tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(runner.speculator).__mro__[2], "propose", propose)
        return generate(llm, params, prompts), drafts


@pytest.mark.parametrize("method", METHODS)
def test_same_rollouts_with_the_model_with_history_and_with_both(drafters, stock, reference_model, method):
    """And the model drafts the same alone and beside history, whoever's drafts were verified: its KV cache is right."""
    alone = build_beside(drafters, method, drafter_options=HISTORY["drafter_options"])
    runner_of(alone).speculator._choose = lambda *arguments: arguments[-1]  # the model's drafts
    both = build_beside(drafters, method, **HISTORY)
    assert isinstance(both.llm_engine.engine_core.engine_core.scheduler, AsyncScheduler)
    speculator = runner_of(both).speculator
    assert isinstance(speculator, ModelSpeculation)
    assert isinstance(speculator, DraftModelSpeculator)
    assert isinstance(speculator.session, DeviceSpeculator)
    for seed in (1, 2):
        params = mixed_params(6, seed, max_tokens=10, logprobs=0, **PLAIN)
        prompts = prompts_of(params)
        expected = generate(stock, params, prompts)
        drafts = []
        for llm in (alone, both):
            ours, drafted = drafts_of_the_model(llm, params, prompts)
            assert_same(ours, expected, prompts, params, reference_model)
            drafts.append(drafted)
        shared = drafts[0].keys() & drafts[1].keys()
        assert len(shared) > 10
        assert [drafts[0][key] for key in shared] == [drafts[1][key] for key in shared]
    stats = stats_of(both)
    assert stats["accepted_tokens"] > 10
    assert stats["rejected_tokens"] > 10
    (report,) = both.collective_rpc("rollout_spec", args=("report",))
    reached, right = report["sources"]["model"]
    assert 0 < right < reached
    speculator.session.drafter.check_integrity()


@pytest.mark.skipif("draft_model" not in METHODS, reason="this release of V2 has no draft models")
def test_drafts_are_drawn_with_the_targets_noise(drafters):
    """A draft model that is the target itself is always right, at any temperature."""
    target, _ = drafters["draft_model"]
    speculative = {"method": "draft_model", "model": str(target), "num_speculative_tokens": MODEL_TOKENS}
    llm = build(
        target,
        max_num_seqs=6,
        **engine_kwargs(speculative_config=speculative, drafter_options=HISTORY["drafter_options"]),
    )
    generate(llm, mixed_params(4, 4, **{**PLAIN, "temperature": 1.3, "max_tokens": 10, "ignore_eos": True}))
    (report,) = llm.collective_rpc("rollout_spec", args=("report",))
    reached, right = report["sources"]["model"]
    assert right > 0.95 * reached > 20


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        (METHODS[0], {"block_size": 32, "num_gpu_blocks_override": 7, "enable_prefix_caching": False}),
        ("eagle", {"max_num_batched_tokens": 16, "max_num_seqs": 3, "enable_chunked_prefill": True}),
        ("mtp", {"max_model_len": 24}),
    ],
    ids=["preemption", "chunks", "max_model_len"],
)
def test_what_interrupts_requests(drafters, stock, reference_model, method, engine):
    llm = build_beside(drafters, method, engine=engine, **HISTORY)
    preempted = count_preemptions(llm)
    is_preempting = "block_size" in engine
    params = mixed_params(4, 9, temperature=1.0, max_tokens=30 if is_preempting else 9, ignore_eos=True, **PLAIN)
    prompts = [[1, 4 + i % 2, 9] * 5 for i in range(4)]
    assert_same(generate(llm, params, prompts), generate(stock, params, prompts), prompts, params, reference_model)
    assert bool(preempted) == is_preempting


def test_a_drafter_on_the_host_is_refused(drafters):
    with pytest.raises(ValueError, match="on the host"):
        build_beside(drafters, "eagle", drafter="history")


def test_what_vllm_processes_and_slots_by_batch_size(drafters, stock):
    """Penalties and masks beside a model; no slots for four requests or more, K for fewer."""
    ranges = [[1, 3, MODEL_TOKENS], [4, 6, 0]]
    target, speculative = drafters["eagle"]
    speculative = {**speculative, "num_speculative_tokens": MODEL_TOKENS}
    llm = build(
        target,
        max_num_seqs=6,
        **engine_kwargs(
            drafter_options=HISTORY["drafter_options"],
            speculative_config={**speculative, "num_speculative_tokens_per_batch_size": ranges},
        ),
    )
    params = mixed_params(4, 3, max_tokens=8, logprobs=0, **PLAIN)
    params[0].repetition_penalty = 1.3
    params[1].min_tokens = 6
    params[2].logit_bias = {7: 3.0, 8: -100.0}
    params[3].presence_penalty = 0.7
    for number in (4, 3):
        ours, plain = generate(llm, params[:number]), generate(stock, params[:number])
        assert [list(o.token_ids) for o in ours] == [list(o.token_ids) for o in plain]


def test_switched_off(drafters, stock, reference_model):
    llm = build_beside(drafters, "eagle", **HISTORY)
    params = mixed_params(3, 7, temperature=1.0, max_tokens=6, ignore_eos=True, **PLAIN)
    prompts = prompts_of(params)
    expected = generate(stock, params, prompts)
    for enabled in (False, True):
        llm.collective_rpc("rollout_spec", args=("set_enabled", enabled))
        assert_same(generate(llm, params, prompts), expected, prompts, params, reference_model)
    llm.collective_rpc("rollout_spec", args=("begin_policy_version", 1))
    assert_same(generate(llm, params, prompts), expected, prompts, params, reference_model)
