"""vLLM's drafters with a model beside history: their KV cache is right, and their tokens have the target's noise.

`test_every_parameter` and `test_every_request` show that the drafts of an engine with both change no rollout.
"""

import pytest
import torch

from rollout_spec import engine_kwargs
from tests.integrations.draft_models import METHODS, model_drafters
from tests.integrations.engines import PLAIN, RESIDENT, assert_same, build, generate, mixed_params, runner_of, stats_of

MODEL_TOKENS = 2


@pytest.fixture(scope="module")
def drafters(tiny_model, tmp_path_factory):
    return model_drafters(tiny_model, tmp_path_factory.mktemp("drafters"))


def build_beside(drafters, method, **options):
    target, speculative = drafters[method]
    speculative = {**speculative, "num_speculative_tokens": MODEL_TOKENS}
    return build(target, max_num_seqs=8, **engine_kwargs(**{**RESIDENT, "speculative_config": speculative, **options}))


def build_alone(drafters, method):
    """An engine in which the model's drafts are verified whatever history has."""

    def choose(slots, num_sampled, history, model):
        return torch.nn.functional.pad(model, (0, history[0].shape[1] - model.shape[1])), history[1]

    llm = build_beside(drafters, method)
    runner_of(llm).speculator._choose = choose
    return llm


def drafts_of_the_model(llm, params):
    """Outputs, and what the model drafted: {(seed, position that the draft begins at): tokens}."""
    runner, drafts = runner_of(llm), {}

    def note(seed, position, tokens):
        drafts[seed, position] = tuple(tokens[:MODEL_TOKENS].tolist())

    def propose(self, input_batch, *args, dummy_run=False, **kwargs):
        tokens = original(self, input_batch, *args, dummy_run=dummy_run, **kwargs)
        for i in range(input_batch.num_reqs):
            if not dummy_run and args[4][i] > 0:  # sampled
                request, sampling = input_batch.idx_mapping[i], runner.sampler.sampling_states
                note(int(sampling.seeds.gpu[request]), int(runner.req_states.total_len.gpu[request]), tokens[i])
        return tokens

    drafter = type(runner.speculator).__mro__[2]
    original = drafter.propose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "propose", propose)
        return generate(llm, params), drafts


def assert_same_drafts(ours, theirs):
    """Where both drafted for the same position. Rounding may decide some."""
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 10
    assert sum(ours[key] != theirs[key] for key in shared) <= 0.01 * len(shared)


@pytest.mark.parametrize("method", METHODS)
def test_the_model_drafts_the_same_alone_and_beside_history(drafters, off, reference_model, method):
    """Whoever's drafts were verified, so its KV cache is right."""
    engines = build_alone(drafters, method), build_beside(drafters, method, num_speculative_tokens=4)
    for seed in (1, 2):
        params = mixed_params(8, seed, max_tokens=24)
        expected, drafts = generate(off, params), []
        for llm in engines:
            ours, drafted = drafts_of_the_model(llm, params)
            assert_same(ours, expected, params, reference_model)
            drafts.append(drafted)
        assert_same_drafts(*drafts)
    stats = stats_of(engines[1])
    assert min(stats["accepted_tokens"], stats["rejected_tokens"]) > 10
    assert stats["drafter_errors"] == 0
    (report,) = engines[1].collective_rpc("rollout_spec", args=("report",))
    reached, right = report["model_drafter"]
    assert 0 < right < reached


@pytest.mark.parametrize(("verify", "least", "most"), [("sample", 0.97, 1.0), ("rejection", 0.02, 0.6)])
def test_drafts_are_drawn_with_the_targets_noise(drafters, verify, least, most):
    """A draft model that is the target itself is always right, at any temperature, in whichever row a request is."""
    target, _ = drafters["draft_model"]
    speculative = {"method": "draft_model", "model": str(target), "num_speculative_tokens": MODEL_TOKENS}
    llm = build_beside({"itself": (target, speculative)}, "itself", verify=verify)
    params = mixed_params(12, 4, temperature=1.3, ignore_eos=True, **PLAIN)
    generate(llm, params, [[1, *range(4, 4 + i % 5), 9] for i in range(len(params))])
    (report,) = llm.collective_rpc("rollout_spec", args=("report",))
    reached, right = report["model_drafter"]
    assert reached > 20
    assert least <= right / reached <= most


def test_ranks_draft_and_cut_as_the_first_one(drafters, monkeypatch):
    """Another rank rounds otherwise: what it verifies, and of how much, comes from the first rank."""
    llm = build_beside(drafters, "eagle")
    speculator = runner_of(llm).speculator

    def of_first_rank(tensor):
        return torch.full_like(tensor, 7 if tensor.dtype == torch.int64 else 0.25)

    def propose(self, input_batch, *args, dummy_run=False, **kwargs):
        drafts = original(self, input_batch, *args, dummy_run=dummy_run, **kwargs)
        if not dummy_run:
            assert torch.all(drafts == 7)
            assert torch.all(self.draft_token_confidence_probs[: input_batch.num_reqs] == 0.25)
            steps.append(input_batch.num_reqs)
        return drafts

    steps, original = [], type(speculator).propose
    monkeypatch.setattr(type(speculator), "propose", propose)
    monkeypatch.setattr(speculator, "_from_first_rank", of_first_rank)
    generate(llm, mixed_params(4, 6))
    assert len(steps) > 3


def test_a_configuration_as_users_have_it(drafters):
    """K comes from their `speculative_config`; drafts with probabilities are of no use and not made."""
    target, speculative = drafters["eagle"]
    speculative = {**speculative, "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
    llm = build(target, speculative_config=speculative, additional_config={"rollout_spec": {}})
    (config,) = llm.collective_rpc("rollout_spec", args=("config",))
    assert (config["num_speculative_tokens"], config["drafter"]) == (2, "device")
    assert len(generate(llm, mixed_params(4, 15))) == 4
