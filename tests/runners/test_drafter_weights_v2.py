"""What becomes of a drafter's weights when the target's change. Rollouts are those of the target all the same."""

import copy

import pytest
import torch

from rollout_spec import engine_kwargs
from rollout_spec.report import advice
from tests.conftest import VOCAB_SIZE
from tests.integrations.draft_models import METHODS, model_drafters
from tests.integrations.engines import RESIDENT, assert_same, build, generate, mixed_params, runner_of

SHARED = {"lm_head.weight", "model.embed_tokens.weight"}


class Extension:
    """A framework's method on the worker."""

    def update_weights_in_place(self, factor):
        """As those that write into the parameters themselves."""
        for parameter in self.model_runner.model.parameters():
            parameter.data *= factor


@pytest.fixture(autouse=True)
def unpacked(monkeypatch):
    monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)  # packed weights cannot be loaded on a CPU


@pytest.fixture(scope="module")
def drafters(tiny_model, tmp_path_factory):
    return model_drafters(tiny_model, tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def trained(reference_model):
    """The policy after training: the model in transformers."""
    model, generator = copy.deepcopy(reference_model), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.5 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model


def build_pair(drafters, method):
    """An engine in which the model drafts beside history, and one that drafts nothing."""
    target, spec = drafters[method]
    extension = {"worker_extension_cls": f"{__name__}.Extension", "max_num_seqs": 6}
    spec = {**spec, "num_speculative_tokens": 2}
    drafting = engine_kwargs(num_speculative_tokens=4, speculative_config=spec, **RESIDENT)
    return build(target, **extension, **drafting), build(target, **extension, **engine_kwargs(speculation=False))


def parameters(runner):
    """The drafter's: (its own, those that are the target's too), by their names in the drafter."""
    of_target = {id(parameter) for parameter in runner.model.parameters()}
    of_drafter = dict(runner.get_draft_model().named_parameters(remove_duplicate=False))
    shared = {name: p for name, p in of_drafter.items() if id(p) in of_target}
    return {name: p for name, p in of_drafter.items() if name not in shared}, shared


def copied(parameters):
    return {name: value.detach().clone() for name, value in parameters.items()}


def model_counts(llm):
    return llm.collective_rpc("rollout_spec", args=("report",))[0]["model_drafter"]


def compare(pair, model, seed, **sampling):
    """Generate the same with both; returns of the model's drafted tokens (reached, right)."""
    params = mixed_params(6, seed, max_tokens=16, **sampling)
    generate(pair[0], params[:1])  # a version begins with a step, and discounts older counts
    before = model_counts(pair[0])
    ours, plain = (generate(llm, params) for llm in pair)
    assert_same(ours, plain, params, model)
    return [now - then for now, then in zip(model_counts(pair[0]), before, strict=True)]


@pytest.mark.parametrize("method", METHODS)
def test_updates_of_the_target(drafters, reference_model, trained, method):
    """The drafter keeps its own weights, what it shares is the target's, and rollouts are those of the new weights."""
    pair = build_pair(drafters, method)
    runner = runner_of(pair[0])
    compare(pair, reference_model, 1)
    weights = {name: value.clone() for name, value in trained.state_dict().items()}
    if method == "mtp":  # a policy may come with tensors of its MTP layers, which the target drops
        weights["model.mtp_layers.0.input_proj.weight"] = torch.ones(64, 128)
    scaled = copy.deepcopy(trained)
    for parameter in scaled.parameters():
        parameter.data *= 1.1
    ways = [
        (trained, lambda llm: [runner_of(llm).model.load_weights([item]) for item in weights.items()]),  # in buckets
        (scaled, lambda llm: llm.collective_rpc("update_weights_in_place", args=(1.1,))),
        (reference_model, lambda llm: llm.collective_rpc("reload_weights")),
    ]
    for version, (model, load) in enumerate(ways, 1):
        before = copied(parameters(runner)[0])
        for llm in pair:
            load(llm)
        own, shared = parameters(runner)
        assert all(torch.equal(value, before[name]) for name, value in own.items())
        assert shared.keys() == (set() if method == "draft_model" else SHARED)
        for name, value in shared.items():
            assert torch.equal(value[:VOCAB_SIZE], model.state_dict()[name])
        reached, right = compare(pair, model, version)
        assert reached > right > 0, "drafts of the model were verified, and some were wrong"


def test_a_drafter_that_has_lost_its_weights_is_reported(drafters):
    """As after sleep level 2: each of its tokens costs time, and no rollout shows it."""
    pair = build_pair(drafters, "draft_model")
    params = {"temperature": 0.0, "ignore_eos": True, "logit_bias": {0: -100.0}}  # what a model of zeros says
    for parameter in runner_of(pair[0]).get_draft_model().parameters():
        parameter.data.zero_()
    for seed in range(8, 20):
        ours, plain = (generate(llm, mixed_params(6, seed, max_tokens=16, **params)) for llm in pair)
        assert [list(output.token_ids) for output in ours] == [list(output.token_ids) for output in plain]
    (report,) = pair[0].collective_rpc("rollout_spec", args=("report",))
    assert any(line.startswith("Load the model drafter's weights") for line in advice(report))
