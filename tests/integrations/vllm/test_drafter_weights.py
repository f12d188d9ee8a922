"""What becomes of a drafter's weights when the target's change. Rollouts are those of the target all the same."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch

from rollout_spec import engine_kwargs
from rollout_spec.integrations.vllm.session import Session
from tests.conftest import VOCAB_SIZE
from tests.integrations.draft_models import model_drafters
from tests.integrations.engines import (
    PLAIN,
    assert_same,
    build,
    generate,
    mixed_params,
    prompts_of,
    runner_of,
    stats_of,
)

pytestmark = pytest.mark.engine

SHARED = {"lm_head.weight", "model.embed_tokens.weight"}


class Extension:
    """A framework's methods on the worker, which are asked to load these weights. Of all names each process has one."""

    weights: dict[str, torch.Tensor]

    def update_weights_one_by_one(self):
        """As verl, SkyRL, NeMo-RL and OpenRLHF: the worker hands tensors to the model, here one at a time."""
        for name, value in Extension.weights.items():
            self.model_runner.model.load_weights([(name, value)])

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
    drafting = engine_kwargs(num_speculative_tokens=4, budget=False, speculative_config=spec)
    return build(target, **extension, **drafting), build(target, **extension, **engine_kwargs(speculation=False))


def parameters(runner):
    """The drafter's: (its own, those that are the target's too), by their names in the drafter."""
    of_target = {id(parameter) for parameter in runner.model.parameters()}
    of_drafter = dict(runner.get_draft_model().named_parameters(remove_duplicate=False))
    shared = {name: p for name, p in of_drafter.items() if id(p) in of_target}
    return {name: p for name, p in of_drafter.items() if name not in shared}, shared


def changed(before, now):
    assert before.keys() == now.keys()
    return {name for name, value in now.items() if not torch.equal(before[name], value)}


def copied(parameters):
    return {name: value.detach().clone() for name, value in parameters.items()}


def model_counts(llm):
    return llm.collective_rpc("rollout_spec", args=("report",))[0]["sources"]["model"]


def said_by(llm):
    return [list(output.token_ids) for output in generate(llm, mixed_params(6, 1, max_tokens=12))]


def compare(pair, model, seed, **sampling):
    """Generate the same with both; returns of the model's drafted tokens (reached, right)."""
    params = mixed_params(6, seed, max_tokens=16, **sampling)
    generate(pair[0], params[:1])  # a version begins with a step, and discounts older counts
    before = model_counts(pair[0])
    ours, plain = (generate(llm, params) for llm in pair)
    assert_same(ours, plain, prompts_of(params), params, model)
    return [now - then for now, then in zip(model_counts(pair[0]), before, strict=True)]


@pytest.mark.parametrize("method", ["draft_model", "eagle", "mtp"])
def test_updates_of_the_target(drafters, reference_model, trained, method):
    """The drafter keeps its own weights, what it shares is the target's, and rollouts are those of the new weights."""
    pair = build_pair(drafters, method)
    runner = runner_of(pair[0])
    compare(pair, reference_model, 1)
    first = said_by(pair[0])
    own, shared = parameters(runner)
    assert shared.keys() == (set() if method == "draft_model" else SHARED)
    weights = {name: value.clone() for name, value in trained.state_dict().items()}
    if method == "mtp":  # a policy may come with tensors of its MTP layers, which the target drops
        weights["model.mtp_layers.0.input_proj.weight"] = torch.ones(64, 128)
    halved = copy.deepcopy(trained)
    halved.lm_head.weight.data *= 0.5
    Extension.weights = {**weights, "lm_head.weight": halved.lm_head.weight.data}
    scaled = copy.deepcopy(halved)
    for parameter in scaled.parameters():
        parameter.data *= 1.1
    ways = [
        (trained, lambda llm: runner_of(llm).model.load_weights(list(weights.items()))),  # TRL's colocated
        (halved, lambda llm: llm.collective_rpc("update_weights_one_by_one")),
        (scaled, lambda llm: llm.collective_rpc("update_weights_in_place", args=(1.1,))),
        (reference_model, lambda llm: llm.collective_rpc("reload_weights")),
    ]
    for version, (model, load) in enumerate(ways, 1):
        before = copied(own)
        for llm in pair:
            load(llm)
        own, shared = parameters(runner)
        assert changed(before, own) == set()
        assert shared.keys() == (set() if method == "draft_model" else SHARED)
        for name, value in shared.items():
            assert torch.equal(value[:VOCAB_SIZE], model.state_dict()[name]), "shared with the target"
        reached, right = compare(pair, model, version)
        assert reached > right > 0, "drafts of the model were verified, and some were wrong"
        assert stats_of(pair[0])["policy_version"] == version
        if version in (1, len(ways)):
            assert (said_by(pair[0]) == first) == (model is reference_model)


def test_a_draft_model_that_gets_the_policy_is_right_again(drafters, trained):
    """Stale after an update of the target, and as good as can be with the target's own weights."""
    pair = build_pair(drafters, "draft_model")
    weights = list(trained.state_dict().items())
    for llm in pair:
        runner_of(llm).model.load_weights(weights)
    reached, right = compare(pair, trained, 3, **PLAIN)
    assert right < 0.8 * reached
    runner_of(pair[0]).get_draft_model().load_weights(weights)
    reached, right = compare(pair, trained, 4, **PLAIN)
    assert right >= 0.98 * reached > 0, "nothing is left out of the distributions, and the noise is the same"


def test_what_an_mtp_drafter_shares_is_the_target(drafters, reference_model):
    """A checkpoint that is loaded into the drafter changes the target's embedding and head as well."""
    pair = build_pair(drafters, "mtp")
    runner = runner_of(pair[0])
    target = copied(dict(runner.model.named_parameters()))
    own, _ = parameters(runner)
    before, generator = copied(own), torch.Generator().manual_seed(2)
    mtp = {"model.mtp_layers.0.input_proj.weight": torch.randn(64, 128, generator=generator)}
    runner.get_draft_model().load_weights(list(mtp.items()))
    assert len(changed(before, own)) == 1
    assert changed(target, dict(runner.model.named_parameters())) == set()
    compare(pair, reference_model, 5)  # the drafter is bad now

    head = 2 * reference_model.lm_head.weight
    runner.get_draft_model().load_weights([("lm_head.weight", head)])
    assert changed(target, dict(runner.model.named_parameters())) == {"lm_head.weight"}
    runner.model.load_weights([("lm_head.weight", head / 2)])  # the target after the drafter: right again
    compare(pair, reference_model, 6)


def test_counters_that_are_halved_are_no_loss(caplog):
    """What was right long ago counts less, so both counters may fall while the model is right half of the time."""
    session = Session()
    counts = [(0, 0), (4096, 2048), (2048, 1024), (2248, 900), (199, 0), (200, 1)]
    session.choice = SimpleNamespace(model_counts=lambda: counts.pop(0))
    while counts:
        session.check_model()
    assert not caplog.records


def test_a_drafter_that_has_lost_its_weights_is_reported(drafters, caplog):
    """As after sleep level 2: each of its tokens costs time, and no rollout shows it."""
    pair = build_pair(drafters, "draft_model")
    params = {"temperature": 0.0, "ignore_eos": True, "logit_bias": {0: -100.0}}  # what a model of zeros says
    for parameter in runner_of(pair[0]).get_draft_model().parameters():
        parameter.data.zero_()
    for seed in range(8, 20):
        ours, plain = (generate(llm, mixed_params(6, seed, max_tokens=16, **params)) for llm in pair)
        assert [list(output.token_ids) for output in ours] == [list(output.token_ids) for output in plain]
        stats_of(pair[0])
    assert caplog.text.count("so it has lost its weights") == 1
