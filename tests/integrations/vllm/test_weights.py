"""Weights that arrive while an engine lives, in the ways of the frameworks that send them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM

from rollout_spec import RolloutSpecConfig, engine_kwargs
from rollout_spec.integrations.vllm.runner import RunnerAdapter
from rollout_spec.integrations.vllm.weights import WeightWatch
from tests.integrations.engines import build, generate, mixed_params, runner_of, stats_of, verify_all


def test_many_calls_between_two_steps_are_one_version():
    watch = WeightWatch()
    assert watch.begin_step() is None
    for _ in range(3):
        watch.announce()
    assert [watch.begin_step(), watch.begin_step()] == [1, None]
    watch.announce()
    assert watch.begin_step() == watch.version == 2


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
        lambda: llm.collective_rpc("rollout_spec", args=("begin_policy_version",)),
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
        assert runner.rollout_spec.session.drafter._version == len(ways)


def test_an_adapter_from_another_path_is_a_new_policy_also_under_an_old_number():
    adapter = RunnerAdapter(SimpleNamespace(device=torch.device("cpu")), RolloutSpecConfig(), None)

    def version(number, path):
        request = SimpleNamespace(lora_request=SimpleNamespace(lora_int_id=number, lora_path=path))
        adapter.begin_step(SimpleNamespace(scheduled_new_reqs=[request]))
        return adapter.weights.version

    assert [version(*loaded) for loaded in ((1, "a"), (1, "a"), (2, "b"), (1, "c"), (1, "c"))] == [1, 1, 2, 3, 3]


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
