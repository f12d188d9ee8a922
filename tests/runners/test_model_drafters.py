"""vLLM's drafters with a model beside history: their KV cache is right, and their tokens have the target's noise.

`test_every_parameter` and `test_every_request` show that the drafts of an engine with both change no rollout.
"""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("vllm")

from rollout_spec import engine_kwargs
from tests.integrations.draft_models import METHODS, model_drafters
from tests.integrations.engines import (
    IS_V2,
    PLAIN,
    RESIDENT,
    assert_same,
    build,
    generate,
    mixed_params,
    needs_model_drafters,
    prompts_of,
    runner_of,
    stats_of,
)

pytestmark = [pytest.mark.engine, needs_model_drafters]

MODEL_TOKENS = 2
SILENT = "tests.adversaries.Silent"
"""A drafter from history that proposes nothing: only the model drafts. In V2 history is on the device."""
HISTORY = RESIDENT if IS_V2 else {"budget": False}
only_v1 = pytest.mark.skipif(IS_V2, reason="in V2 history is on the device")


@pytest.fixture(scope="module")
def drafters(tiny_model, tmp_path_factory):
    return model_drafters(tiny_model, tmp_path_factory.mktemp("drafters"))


def build_beside(drafters, method, **options):
    target, speculative = drafters[method]
    speculative = {**speculative, "num_speculative_tokens": MODEL_TOKENS}
    return build(target, max_num_seqs=8, **engine_kwargs(**{**HISTORY, "speculative_config": speculative, **options}))


def build_alone(drafters, method):
    if not IS_V2:
        return build_beside(drafters, method, drafter=SILENT)

    def choose(slots, num_sampled, temperature, history, model):
        return torch.nn.functional.pad(model, (0, history.shape[1] - model.shape[1]))

    llm = build_beside(drafters, method)
    runner_of(llm).speculator._choose = choose
    return llm


def drafts_of_the_model(llm, params, prompts):
    """Outputs, and what the model drafted: {(seed, position that the draft begins at): tokens}."""
    runner, drafts = runner_of(llm), {}

    def note(seed, position, tokens):
        drafts[seed, position] = tuple(tokens[:MODEL_TOKENS].tolist())

    def propose_v1(*args, **kwargs):
        tokens = original(*args, **kwargs)
        for i, req_id in enumerate(runner.input_batch.req_ids):
            if not runner.discard_request_mask.np[i]:
                seed = runner.requests[req_id].sampling_params.seed
                note(seed, int(drafter._noise[2][i]), tokens[i])
        return tokens

    def propose_v2(self, input_batch, *args, dummy_run=False, **kwargs):
        tokens = original(self, input_batch, *args, dummy_run=dummy_run, **kwargs)
        for i in range(input_batch.num_reqs):
            if not dummy_run and args[4][i] > 0:  # sampled
                request, sampling = input_batch.idx_mapping[i], runner.sampler.sampling_states
                note(int(sampling.seeds.gpu[request]), int(runner.req_states.total_len.gpu[request]), tokens[i])
        return tokens

    drafter = type(runner.speculator).__mro__[2] if IS_V2 else runner.rollout_spec.model_drafter
    name, propose = ("propose", propose_v2) if IS_V2 else ("_propose", propose_v1)
    original = getattr(drafter, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, name, propose)
        return generate(llm, params, prompts), drafts


def assert_same_drafts(ours, theirs):
    """Where both drafted for the same position. Rounding decides some in V1, whose batches have other sizes."""
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 10
    assert sum(ours[key] != theirs[key] for key in shared) <= 0.01 * len(shared)


@pytest.mark.parametrize("method", METHODS)
def test_the_model_drafts_the_same_alone_and_beside_history(drafters, off, reference_model, method):
    """Whoever's drafts were verified, so its KV cache is right."""
    engines = build_alone(drafters, method), build_beside(drafters, method, num_speculative_tokens=4)
    for seed in (1, 2):
        params = mixed_params(8, seed, max_tokens=24)
        prompts = prompts_of(params)
        expected, drafts = generate(off, params, prompts), []
        for llm in engines:
            ours, drafted = drafts_of_the_model(llm, params, prompts)
            assert_same(ours, expected, prompts, params, reference_model)
            drafts.append(drafted)
        assert_same_drafts(*drafts)
    stats = stats_of(engines[1])
    assert min(stats["accepted_tokens"], stats["rejected_tokens"]) > 10
    assert stats["drafter_errors"] == 0
    (report,) = engines[1].collective_rpc("rollout_spec", args=("report",))
    reached, right = report["sources"]["model"]
    assert 0 < right < reached


@pytest.mark.skipif(not IS_V2, reason="V1 chooses on the host: tests/drafters/model")
def test_each_is_chosen_where_it_promises_more(drafters):
    llm = build_beside(drafters, "eagle")
    choice, is_model = runner_of(llm).speculator._choice, []
    choose = choice.choose

    def note(*arguments):
        chosen = choose(*arguments)
        is_model.extend(chosen[2].tolist())
        return chosen

    choice.choose = note
    params = mixed_params(8, max_tokens=24, ignore_eos=True)
    for _ in range(2):
        generate(llm, params, prompts_of(params))
    assert 0.1 < sum(is_model) / len(is_model) < 0.9


@pytest.mark.parametrize(("verify", "least", "most"), [("sample", 0.97, 1.0), ("rejection", 0.02, 0.6)])
def test_drafts_are_drawn_with_the_targets_noise(drafters, verify, least, most):
    """A draft model that is the target itself is always right, at any temperature, in whichever row a request is."""
    target, _ = drafters["draft_model"]
    speculative = {"method": "draft_model", "model": str(target), "num_speculative_tokens": MODEL_TOKENS}
    llm = build_beside({"itself": (target, speculative)}, "itself", verify=verify)
    params = mixed_params(12, 4, temperature=1.3, ignore_eos=True, **PLAIN)
    generate(llm, params, [[1, *range(4, 4 + i % 5), 9] for i in range(len(params))])
    (report,) = llm.collective_rpc("rollout_spec", args=("report",))
    reached, right = report["sources"]["model"]
    assert reached > 20
    assert least <= right / reached <= most


@only_v1
def test_the_models_cache_has_no_gaps_where_its_passes_are_left_out(drafters, off, reference_model, monkeypatch):
    """It drafts in every third step only, and then what it drafts in an engine that always asks it."""
    drafts = []
    for period in (1, 3):
        llm = build_beside(drafters, "eagle", num_speculative_tokens=5)
        count = itertools.count()
        drafter = runner_of(llm).rollout_spec.model_drafter
        monkeypatch.setattr(drafter, "wants_model", lambda n=count, p=period: next(n) % p == 0)
        params = mixed_params(12, 5, max_tokens=40)
        prompts = prompts_of(params)
        ours, drafted = drafts_of_the_model(llm, params, prompts)
        assert_same(ours, generate(off, params, prompts), prompts, params, reference_model)
        drafts.append({key: tokens for key, tokens in drafted.items() if tokens})
    assert_same_drafts(*drafts)


def test_a_configuration_as_users_have_it(drafters):
    """K comes from their `speculative_config`; drafts with probabilities are of no use and not made."""
    target, speculative = drafters["eagle"]
    speculative = {**speculative, "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
    llm = build(target, speculative_config=speculative, additional_config={"rollout_spec": {}})
    (config,) = llm.collective_rpc("rollout_spec", args=("config",))
    assert (config["num_speculative_tokens"], config["drafter"]) == (2, "device" if IS_V2 else "history")
    assert len(generate(llm, mixed_params(4, 15))) == 4
