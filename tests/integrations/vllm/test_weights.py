"""Weights that arrive while an engine lives, in the ways of the frameworks that send them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM

from rollout_spec import RolloutSpecConfig, engine_kwargs
from rollout_spec.integrations.trainers.controller import EngineController
from rollout_spec.integrations.vllm.hooks_worker import loads_weights
from rollout_spec.integrations.vllm.weights import WeightWatch, checksum
from tests.integrations.engines import (
    build,
    every_draft,
    generate,
    mixed_params,
    prompts_of,
    runner_of,
    stats_of,
    verify_all,
)

LOADING = [
    "load_weights", "reload_weights", "update_weights", "start_weight_update", "finish_weight_update",
    "update_weights_from_ipc", "update_weights_from_path", "update_weight", "update_weights_from_collective",
    "update_weights_via_ipc_zmq", "skyrl_start_weight_update", "nccl_reshard_refit",
]  # fmt: skip
OTHERS = [
    "supports_draft_weight_updates",
    "init_weight_transfer_engine", "init_weight_update_group", "compute_weight_checksums", "get_weights_by_name",
    "check_weights", "fetch_weights", "prepare_refit_info", "skyrl_sleep_for_weight_sync",
    "execute_model", "sample_tokens", "sleep", "wake_up", "add_lora", "remove_lora", "rollout_spec",
]  # fmt: skip


def test_methods_that_load_weights_are_known_by_their_names():
    assert [name for name in LOADING + OTHERS if loads_weights(name)] == LOADING


def test_many_calls_between_two_steps_are_one_version():
    watch = WeightWatch()
    assert watch.begin_step() is None
    for _ in range(3):
        watch.mark()
    assert [watch.begin_step(), watch.begin_step()] == [1, None]
    watch.mark()
    assert watch.begin_step() == watch.version == 2
    watch.announce(2)
    watch.announce()
    watch.mark()
    assert [watch.begin_step(), watch.begin_step()] == [4, None]


class Model(nn.Module):
    """Tensors of many kinds."""

    def __init__(self):
        super().__init__()
        self.padded = nn.Parameter(torch.randn(6, 10)[:, 1:8])
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.shifted = nn.Parameter(torch.randn(11).bfloat16()[1:])
        self.short = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0))
        self.bytes = nn.Parameter(torch.randn(3, 5).to(torch.float8_e4m3fn))
        self.quantised = nn.Parameter(TwoTensor(torch.randn(3), torch.randn(3)))
        self.tied = self.transposed
        self.meta = nn.Parameter(torch.empty(2, device="meta"))
        self.register_buffer("bias", torch.tensor([1, 2, 3], dtype=torch.int16))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def load_weights(self, weights):
        for name, value in weights:
            self.get_parameter(name).data.copy_(value)


@pytest.mark.parametrize("name", ["padded", "transposed", "shifted", "short", "bytes", "quantised", "bias"])
def test_any_bit_changes_the_checksum(name):
    model = Model()
    before = checksum(model)
    assert torch.equal(checksum(model), before)
    tensor = getattr(model, name).detach()
    if name == "quantised":
        tensor = tensor.b
    for at in {0, tensor.numel() // 2, tensor.numel() - 1}:
        place = tuple(int(i) for i in np.unravel_index(at, tensor.shape))
        value = tensor[place].clone()
        # Not by arithmetic, in which a small change of a large value could be lost.
        words = value.reshape(1).view(torch.uint8).clone()
        words[0] ^= 1
        tensor[place] = words.view(value.dtype)[0]
        assert (checksum(model) != before).sum() == 1
        tensor[place] = value
        assert torch.equal(checksum(model), before)


def test_what_is_computed_from_the_parameters_does_not_count():
    model = Model()
    before = checksum(model)
    model.scratch += 1
    assert torch.equal(checksum(model), before)
    assert checksum(nn.Module()).numel() == 0


def test_the_same_weights_again_begin_no_version():
    watch, model = WeightWatch(), Model()
    watch.watch(model)
    for factor, version in ((1, None), (2, 1), (1, None), (0.5, 2)):
        model.load_weights([("padded", model.padded.detach() * factor)])
        assert [watch.begin_step(), watch.begin_step()] == [version, None]
    model.transposed.data += 1
    assert watch.begin_step() is None, "nobody has said so"
    watch.mark()
    assert watch.begin_step() == 3


def test_announced_versions_begin_in_any_case():
    watch, model = WeightWatch(), Model()
    watch.watch(model)
    watch.announce(2)
    assert watch.begin_step() == 2
    model.padded.data += 1
    watch.announce()
    assert watch.begin_step() == 3
    watch.mark()
    assert watch.begin_step() is None, "the version that was announced has these parameters"


@pytest.mark.parametrize("changed", [(False, False), (False, True), (True, False)])
def test_ranks_agree(changed):
    """A version begins on both if one has other parameters than before."""
    asked = []

    def on_any_rank(is_true):
        asked.append(is_true)
        return any(changed)

    for has_changed in changed:
        watch, model = WeightWatch(on_any_rank), Model()
        watch.watch(model)
        model.load_weights([("padded", model.padded.detach() + has_changed)])
        assert watch.begin_step() == (1 if any(changed) else None)
        assert watch.begin_step() is None
    assert tuple(asked) == changed


def test_a_model_that_cannot_load_is_left_alone():
    model = nn.Linear(2, 2)
    WeightWatch().watch(model)
    assert not hasattr(model, "load_weights")


class Extension:
    """A framework's methods on the worker."""

    def update_weights_from_ipc(self, factor):
        """As verl, SkyRL, NeMo-RL and OpenRLHF: the worker gets the tensors and hands them to the model."""
        parameters = AutoModelForCausalLM.from_pretrained(self.model_config.model).state_dict()
        for name, value in parameters.items():  # one bucket each
            self.model_runner.model.load_weights([(name, value.float() * factor)])

    def nccl_reshard_refit(self, factor):
        """As those that write into the parameters themselves."""
        for parameter in self.model_runner.model.parameters():
            parameter.data *= factor

    def lose_and_load(self):
        """As sleep level 2, which a CPU does not have: parameters are lost, and loaded again."""
        held = [parameter.data.clone() for parameter in self.model_runner.model.parameters()]
        for parameter in self.model_runner.model.parameters():
            parameter.data.fill_(float("nan"))
        self.model_runner.model.load_weights([])
        for parameter, value in zip(self.model_runner.model.parameters(), held, strict=True):
            parameter.data.copy_(value)

    def update_weights_of_an_adapter(self):
        """As verl, whose worker loads an adapter in the method that loads weights. Here none is loaded."""
        self.model_runner.add_lora = lambda request: True
        self.add_lora(SimpleNamespace(lora_int_id=1, lora_path="x"))


@pytest.mark.engine
@pytest.mark.parametrize("options", [verify_all(num_speculative_tokens=4), engine_kwargs(speculation=False)])
def test_each_update_begins_a_version(tiny_model, monkeypatch, options):
    """However the weights come, and also where nothing is drafted. The rollouts are those of the new weights."""
    monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)  # packed weights cannot be loaded on a CPU
    llm = build(tiny_model, worker_extension_cls="tests.integrations.vllm.test_weights.Extension", **options)
    runner, params = runner_of(llm), mixed_params(6, 1, max_tokens=12)
    head = AutoModelForCausalLM.from_pretrained(tiny_model).lm_head.weight.float()

    def version():
        said = [list(output.token_ids) for output in generate(llm, params)]
        return stats_of(llm)["policy_version"], said

    assert version()[0] == 0
    before = version()
    ways = [
        lambda: runner.model.load_weights([("lm_head.weight", head * 0.25)]),  # TRL's colocated
        lambda: llm.collective_rpc("update_weights_from_ipc", args=(1.0,)),
        lambda: llm.collective_rpc("nccl_reshard_refit", args=(0.5,)),
        lambda: llm.collective_rpc("reload_weights"),
        lambda: llm.collective_rpc("update_weights_of_an_adapter"),
        lambda: llm.collective_rpc("rollout_spec", args=("begin_policy_version", 1)),
    ]
    seen = []
    for number, load in enumerate(ways, 1):
        load()
        llm.collective_rpc("rollout_spec", args=("begin_policy_version",))  # makes no second one
        seen.append(version())
        assert seen[-1][0] == number
        assert version() == seen[-1]
    assert seen[0][1] != before[1]
    assert seen[2][1] != before[1]
    assert seen[3][1] == before[1], "loaded again from its files, the model is the first one"
    if llm.llm_engine.vllm_config.speculative_config is not None:
        assert runner.drafter.session.drafter._version == len(ways)


def counts_of_epochs(tiny_model, between, *, midway=False):
    """Counts of an engine that generates the same twice: what it emits, drafts and accepts the second time.

    Args:
        between: Called with the engine before the second time.
        midway: Call it again while these requests are in flight.
    """
    # Of a version that ends nothing is left, so that drafts of the second time show whether one has begun.
    controller = EngineController(RolloutSpecConfig(budget=False, **every_draft(4, max_history_versions=0)))
    llm = build(
        tiny_model,
        worker_extension_cls="tests.integrations.vllm.test_weights.Extension",
        max_num_seqs=8,
        **controller.engine_kwargs({}),
    )
    controller.attach(llm)
    params = mixed_params(8, 3, max_tokens=24, ignore_eos=True)
    engine, counts = llm.llm_engine, []
    for epoch in range(2):
        if epoch:
            between(llm)
        for i, (prompt, p) in enumerate(zip(prompts_of(params), params, strict=True)):
            engine.add_request(f"{epoch}/{i}", {"prompt_token_ids": prompt}, p.clone())
        for _ in range(2):
            engine.step()
        if epoch and midway:
            between(llm)
        while engine.has_unfinished_requests():
            engine.step()
        stats = stats_of(llm)
        counts.append([stats[name] for name in ("emitted_tokens", "steps", "draft_tokens", "accepted_tokens")])
    return (np.diff(counts, axis=0)[0]).tolist(), stats["policy_version"]


@pytest.mark.engine
def test_the_same_weights_again_leave_the_acceptance_as_it_was(tiny_model, monkeypatch):
    """Trainers that load weights before every generation, unchanged ones too, and say so by `reset_prefix_cache`."""
    monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)  # packed weights cannot be loaded on a CPU
    policy = AutoModelForCausalLM.from_pretrained(tiny_model).float().state_dict()

    def load(llm):
        for name, value in policy.items():
            runner_of(llm).model.load_weights([(name, value)])

    def as_trl(llm):
        load(llm)
        llm.reset_prefix_cache()

    def asleep(llm, level):
        llm.sleep(level)
        llm.wake_up()
        as_trl(llm)

    def copy_in_place(llm):
        for parameter in runner_of(llm).model.parameters():
            parameter.data.copy_(parameter.data.clone())
        llm.reset_prefix_cache()

    undisturbed = counts_of_epochs(tiny_model, lambda llm: None)
    assert undisturbed[1] == 0
    assert undisturbed[0][3] > 100, "the second time it knows what is coming"
    for between, midway in (
        (as_trl, False),
        (load, True),
        (copy_in_place, False),
        (lambda llm: asleep(llm, 1), False),
        (lambda llm: asleep(llm, 2), False),
        (lambda llm: llm.collective_rpc("lose_and_load"), True),
        (lambda llm: llm.collective_rpc("reload_weights"), True),
        (lambda llm: llm.collective_rpc("nccl_reshard_refit", args=(1.0,)), True),
    ):
        assert counts_of_epochs(tiny_model, between, midway=midway) == undisturbed

    def change(llm):
        runner_of(llm).model.load_weights([("lm_head.weight", policy["lm_head.weight"] * 1.0001)])

    counts, version = counts_of_epochs(tiny_model, change)
    assert version == 1
    assert counts[3] < undisturbed[0][3], "a version has begun, and has no history"


@pytest.mark.engine
def test_an_adapter_begins_a_version_when_it_is_loaded(tiny_model, tmp_path):
    """By a request or by a command, and once: it is a new policy."""
    from peft import LoraConfig, get_peft_model
    from vllm.lora.request import LoRARequest

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(r=8, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    llm = build(tiny_model, enable_lora=True, max_lora_rank=8, **verify_all(num_speculative_tokens=4))
    loaded = [LoRARequest(f"policy-v{number}", number, str(tmp_path)) for number in (1, 2, 3)]

    def version(request=None):
        prompts = [{"prompt_token_ids": [1, 4, 9]}]
        for _ in range(2):  # a version begins with the next step
            llm.generate(prompts, mixed_params(1, max_tokens=4), lora_request=request, use_tqdm=False)
        return stats_of(llm)["policy_version"]

    assert [version(request) for request in (None, loaded[0], None, loaded[0], loaded[1])] == [0, 1, 1, 1, 2]
    llm.llm_engine.add_lora(loaded[2])
    assert version(loaded[2]) == 3
