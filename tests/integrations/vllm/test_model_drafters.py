"""vLLM's drafters with a model beside history in the V1 model runner."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("vllm")

from rollout_spec import engine_kwargs
from rollout_spec.integrations.vllm.hybrid import ModelDrafter
from rollout_spec.integrations.vllm.runner_v1 import RolloutSpecProposer
from tests.conftest import VOCAB_SIZE
from tests.integrations.draft_models import METHODS, model_drafters
from tests.integrations.engines import (
    assert_same,
    build,
    check_features,
    count_preemptions,
    generate,
    history_of,
    mixed_params,
    prompts_of,
    runner_of,
    session_of,
    stats_of,
)

pytestmark = pytest.mark.engine

MODEL_TOKENS = 3
SILENT = "tests.adversaries.Silent"
"""A drafter from history that proposes nothing: only the model drafts."""


@pytest.fixture(scope="module")
def drafters(tiny_model, tmp_path_factory):
    return model_drafters(tiny_model, tmp_path_factory.mktemp("drafters"))


def build_beside(drafters, method, *, engine=None, **options):
    target, speculative = drafters[method]
    speculative = {**speculative, "num_speculative_tokens": MODEL_TOKENS}
    arguments = engine_kwargs(**{"budget": False, "speculative_config": speculative, **options})
    return build(target, **arguments, **(engine or {}))


def drafts_of_the_model(llm, params, prompts):
    """Outputs, and what the model drafted: {(seed, position that the draft begins at): tokens}."""
    runner = runner_of(llm)
    drafter, drafts = runner.rollout_spec.model_drafter, {}
    original = drafter._propose

    def propose(*args, **kwargs):
        tokens = original(*args, **kwargs)
        discarded = runner.discard_request_mask.np
        for i, req_id in enumerate(runner.input_batch.req_ids):
            if not discarded[i]:
                key = runner.requests[req_id].sampling_params.seed, int(drafter._noise.positions[i])
                drafts[key] = tuple(tokens[i].tolist())
        return tokens

    drafter._propose = propose
    try:
        return generate(llm, params, prompts), drafts
    finally:
        drafter._propose = original


@pytest.mark.parametrize("method", METHODS)
def test_same_rollouts_with_the_model_with_history_and_with_both(drafters, off, reference_model, method):
    """And the model drafts the same alone and beside history, whoever's drafts were verified: its KV cache is right."""
    alone = build_beside(drafters, method, drafter=SILENT)
    both = build_beside(drafters, method, num_speculative_tokens=5)
    assert isinstance(runner_of(both).rollout_spec.model_drafter, ModelDrafter)
    assert not isinstance(runner_of(both).drafter, RolloutSpecProposer)
    for seed in (1, 2):
        params = mixed_params(16, seed)
        prompts = prompts_of(params)
        expected = generate(off, params, prompts)
        drafts = []
        for llm in (alone, both):
            ours, drafted = drafts_of_the_model(llm, params, prompts)
            assert_same(ours, expected, prompts, params, reference_model)
            drafts.append(drafted)
        shared = drafts[0].keys() & drafts[1].keys()
        assert len(shared) > 50
        assert sum(drafts[0][key] != drafts[1][key] for key in shared) <= 0.01 * len(shared)
    stats, stats_alone = stats_of(both), stats_of(alone)
    assert stats["request_steps"] < stats_alone["request_steps"]
    assert min(stats["accepted_tokens"], stats["rejected_tokens"]) > 50
    (report,) = both.collective_rpc("rollout_spec", args=("report",))
    reached, right = report["sources"]["model"]
    assert 0 < right < reached
    assert stats["drafter_errors"] == 0


def test_drafts_are_drawn_with_the_targets_noise(drafters):
    """A draft model that is the target itself is always right, at any temperature."""
    target, _ = drafters["draft_model"]
    speculative = {"method": "draft_model", "model": str(target), "num_speculative_tokens": MODEL_TOKENS}
    for verify, least, most in (("sample", 0.97, 1.0), ("rejection", 0.02, 0.6)):
        llm = build(
            target, **engine_kwargs(drafter=SILENT, verify=verify, budget=False, speculative_config=speculative)
        )
        generate(llm, mixed_params(12, 4, temperature=1.3, top_k=0, top_p=1.0, min_p=0.0, max_tokens=41))
        stats = stats_of(llm)
        first = stats["accepted_per_position"][0] / stats["drafted_per_position"][0]
        assert least <= first <= most, verify


@pytest.fixture
def drawing_wrong_tokens(monkeypatch):
    """The models of engines that are built in this test have lost touch with the target."""

    def draw_another(self, hidden_states, sampling_metadata):
        tokens, _ = original(self, hidden_states, sampling_metadata)
        return (tokens + 1 + torch.arange(tokens.shape[0]) % 2) % VOCAB_SIZE, None

    original = ModelDrafter._draw
    monkeypatch.setattr(ModelDrafter, "_draw", draw_another)


def test_wrong_drafts_of_both(drafters, off, reference_model, drawing_wrong_tokens):
    llm = build_beside(drafters, "eagle", drafter="tests.adversaries.Adversary", num_speculative_tokens=4)
    params = mixed_params(16, 6)
    prompts = prompts_of(params)
    assert_same(generate(llm, params, prompts), generate(off, params, prompts), prompts, params, reference_model)
    assert stats_of(llm)["rejected_tokens"] > 200


def test_preemption_chunks_and_the_models_length(drafters, off, reference_model):
    small = build_beside(
        drafters,
        "draft_model",
        num_speculative_tokens=5,
        engine={
            "block_size": 32, "num_gpu_blocks_override": 9, "enable_prefix_caching": False,
            "max_num_batched_tokens": 40, "enable_chunked_prefill": True, "max_num_seqs": 6,
        },
    )  # fmt: skip
    preempted = count_preemptions(small)
    params = mixed_params(8, 9, max_tokens=200, ignore_eos=True)
    prompts = [[1, 4 + i % 3, 9] * (5 + 2 * i) for i in range(8)]
    expected = generate(off, params, prompts)
    assert {len(p) + len(o.token_ids) for p, o in zip(prompts, expected, strict=True)} == {128}
    assert_same(generate(small, params, prompts), expected, prompts, params, reference_model)
    assert preempted


def test_the_models_cache_has_no_gaps_where_its_passes_are_left_out(drafters, off, reference_model, monkeypatch):
    """It drafts in every third step only, and then what it drafts in an engine that always asks it."""
    drafts = []
    for period in (1, 3):
        llm = build_beside(drafters, "eagle", num_speculative_tokens=5)
        count = itertools.count()
        drafter = runner_of(llm).rollout_spec.model_drafter
        monkeypatch.setattr(drafter, "wants_model", lambda size, n=count, p=period: next(n) % p == 0)
        params = mixed_params(12, 5, max_tokens=40)
        prompts = prompts_of(params)
        ours, drafted = drafts_of_the_model(llm, params, prompts)
        assert_same(ours, generate(off, params, prompts), prompts, params, reference_model)
        drafts.append({key: tokens for key, tokens in drafted.items() if tokens})
    shared = drafts[0].keys() & drafts[1].keys()
    assert len(shared) > 10
    assert sum(drafts[0][key] != drafts[1][key] for key in shared) <= 0.01 * len(shared)


def test_what_vllm_processes_is_verified_with_the_same_noise(drafters, off):
    params = mixed_params(6, 13, logprobs=0)
    params[0].repetition_penalty = 1.3
    params[1].presence_penalty = 0.7
    params[2].frequency_penalty = 0.5
    params[3].min_tokens = 30
    params[4].allowed_token_ids = [5, 6, 7, 8, 9, 10]
    params[5]._bad_words_token_ids = [[6], [7, 8]]
    params[5].bad_words = ["w2", "w3 w4"]
    plain = generate(off, params)
    for options in ({"num_speculative_tokens": 5}, {"drafter": SILENT}):
        llm = build_beside(drafters, "eagle", **options)
        assert [list(o.token_ids) for o in generate(llm, params)] == [list(o.token_ids) for o in plain]


def test_history_is_told_what_the_target_saw(drafters, reference_model):
    llm = build_beside(drafters, "eagle", num_speculative_tokens=5)
    generate(llm, mixed_params(12, 3, temperature=0.7, top_k=0, top_p=1.0, min_p=0.0))
    generate(llm, mixed_params(1, temperature=0.7, max_tokens=2))  # a request's end is noticed with the next step
    drafter = session_of(llm).drafter
    num_checked, num_unknown = check_features(history_of(drafter), reference_model, 0.7)
    assert num_checked > 100
    assert num_unknown == 0


def test_switching_off_and_a_drafter_that_raises(drafters, off, reference_model):
    """Where history is lost, the model drafts on."""
    params = mixed_params(8, 5)
    prompts = prompts_of(params)
    expected = generate(off, params, prompts)
    llm = build_beside(drafters, "eagle", drafter="tests.adversaries.RaisesAfterSomeSteps")
    assert_same(generate(llm, params, prompts), expected, prompts, params, reference_model)
    before = stats_of(llm)
    assert_same(generate(llm, params, prompts), expected, prompts, params, reference_model)
    after = stats_of(llm)
    assert after["accepted_tokens"] > before["accepted_tokens"]
    assert after["drafter_errors"] == 1
    llm = build_beside(drafters, "eagle")
    llm.collective_rpc("rollout_spec", args=("set_enabled", False))
    assert_same(generate(llm, params, prompts), expected, prompts, params, reference_model)
    assert stats_of(llm)["draft_tokens"] == 0
    llm.collective_rpc("rollout_spec", args=("set_enabled", True))
    assert_same(generate(llm, params, prompts), expected, prompts, params, reference_model)
    assert stats_of(llm)["accepted_tokens"] > 0


def test_a_configuration_as_users_have_it(drafters, off, reference_model):
    """K comes from their `speculative_config`; drafts with probabilities are of no use and not made."""
    target, speculative = drafters["eagle"]
    speculative = {**speculative, "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
    llm = build(target, speculative_config=speculative, additional_config={"rollout_spec": {}})
    (config,) = llm.collective_rpc("rollout_spec", args=("config",))
    assert (config["num_speculative_tokens"], config["drafter"]) == (2, "history")
    params = mixed_params(8, 15)
    prompts = prompts_of(params)
    assert_same(generate(llm, params, prompts), generate(off, params, prompts), prompts, params, reference_model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_config": {"parallel_drafting": True}}, "parallel_drafting"),
        ({"speculative_config": {"disable_padded_drafter_batch": True}}, "disable_padded_drafter_batch"),
        ({"drafter": "device"}, "V2 model runner"),
        ({"speculative_config": {"rejection_sample_method": "block"}}, "rejection_sample_method"),
    ],
)
def test_what_cannot_be_combined_is_refused(drafters, settings, message):
    target, speculative = drafters["draft_model"]
    speculative = {**speculative, "num_speculative_tokens": 3, **settings.get("speculative_config", {})}
    arguments = engine_kwargs(**{**settings, "speculative_config": speculative})
    with pytest.raises(ValueError, match=message):
        build(target, **arguments)
