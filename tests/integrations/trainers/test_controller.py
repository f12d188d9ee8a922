"""What any trainer needs of an engine, with a stand-in for the engine. `test_trl_hook` has real ones."""

import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm")

from rollout_spec import RolloutSpecConfig, engine_kwargs
from rollout_spec.integrations.trainers.controller import EngineController
from rollout_spec.stats import SpeculationStats


class Params:
    """Stands for vLLM's `SamplingParams`."""

    def __init__(self, seed=None):
        self.seed, self.logprobs, self.extra_args = seed, None, None

    def clone(self):
        return Params(self.seed)


class Engine:
    """Stands for `vllm.LLM`: every rollout has two tokens, and the second one was drafted.

    Attributes:
        calls: What was asked for, in order.
    """

    def __init__(self):
        self.calls = []
        self._stats = SpeculationStats()
        model_config = SimpleNamespace(dtype="torch.float32", logprobs_mode="raw_logprobs")
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model_config))

    def collective_rpc(self, method, args):
        assert method == "rollout_spec"
        name, *values = args
        if name == "stats":
            return [{**self._stats.to_dict(), "drafter_bytes": 5_000_000}]
        if name == "report":
            return [{"device": "a stand-in", "stats": self._stats.to_dict()}]
        self.calls.append((name, *values))
        return [None]

    def get_default_sampling_params(self):
        return Params()

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        return True

    def generate(self, prompts, sampling_params):
        self.calls.append([params.seed for params in sampling_params])
        self._stats.record([1] * len(sampling_params), [1] * len(sampling_params))
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1, 2], logprobs=[{}, {}], cumulative_logprob=0.0)])
            for _ in sampling_params
        ]

    def chat(self, messages, sampling_params):
        return self.generate(messages, sampling_params)


def a_controller(*, compare_every=None, **options):
    return EngineController(RolloutSpecConfig(**options), logprob_tolerance=math.inf, compare_every=compare_every)


def an_attached_controller(**options):
    controller, llm = a_controller(**options), Engine()
    controller.begin_run(seed=3)
    controller.attach(llm)
    llm.calls.clear()
    return controller, llm


def test_an_engine_is_switched_as_was_asked_for_before_it_was_there():
    controller, llm = a_controller(), Engine()
    controller.enabled = False
    assert not llm.calls
    controller.attach(llm)
    controller.enabled = True
    assert llm.calls == [("set_enabled", False), ("set_enabled", True)]
    assert controller.enabled


def test_scores_that_the_trainer_did_not_ask_for_are_taken_away():
    """They are for the comparison, at the first generation alone."""
    _, llm = an_attached_controller()
    first, second = (llm.generate(["a", "b"]) for _ in range(2))
    assert all(output.outputs[0].logprobs is None for output in first)
    assert all(output.outputs[0].cumulative_logprob is None for output in first)
    assert all(output.outputs[0].logprobs is not None for output in second)


def test_seeds_are_unique_and_repeatable():
    """Over trainings, steps, calls in a step, data-parallel replicas; the same again in a run that is resumed."""

    def seeds(replica, first_step=0):
        controller, llm = a_controller(), Engine()
        controller.begin_run(seed=3, replica=replica)
        controller.attach(llm)
        llm.calls.clear()
        for _ in range(2):
            controller.begin_training()
            for step in range(first_step, 3):
                controller.begin_step(step)
                llm.generate(["same"] * 8, Params())
                llm.chat([[{"role": "user", "content": "same"}]] * 8, Params())
        return [seed for call in llm.calls for seed in call]

    both = seeds(0) + seeds(1)
    assert len(set(both)) == len(both) == 192
    assert all(0 <= seed < 2**63 for seed in both)
    assert seeds(1) == both[96:]
    assert seeds(1, first_step=2) == [*both[96 + 32 : 96 + 48], *both[96 + 80 :]]


@pytest.mark.parametrize("prompt", ["a", {"prompt": "a"}, {"prompt_token_ids": [1, 2]}, [1, 2]], ids=str)
def test_a_seed_that_prompts_share_is_refused(prompt):
    _, llm = an_attached_controller()
    with pytest.raises(ValueError, match=r"SamplingParams.seed is 7 .* copies"):
        llm.generate([prompt] * 2, Params(seed=7))
    llm.generate([prompt, "another"], Params(seed=7))
    llm.generate(prompt, Params(seed=7))
    assert llm.calls == [[7, 7], [7]]


def test_arguments_of_the_engine():
    controller = EngineController(RolloutSpecConfig(), llm_kwargs={"dtype": "float32", "additional_config": {"a": 1}})
    found = controller.engine_kwargs({"model": "m", "dtype": "auto", "additional_config": {"b": 2}})
    ours = engine_kwargs()
    assert found == {
        "model": "m",
        "dtype": "float32",
        "speculative_config": ours["speculative_config"],
        "additional_config": {"a": 1, "b": 2, **ours["additional_config"]},
    }


@pytest.mark.parametrize("name", ["speculative_config", "additional_config"])
def test_an_engine_takes_one_drafter(name):
    ours = {name: engine_kwargs()[name]}
    for controller, of_trainer in (
        (EngineController(RolloutSpecConfig(), llm_kwargs=ours), {}),
        (EngineController(RolloutSpecConfig()), ours),
    ):
        with pytest.raises(ValueError, match="is set by the trainer or in llm_kwargs, and by EngineController"):
            controller.engine_kwargs(of_trainer)


def test_an_engine_without_the_plugin():
    """VLLM_PLUGINS may leave us out: the engine would verify nothing."""

    class Bare(Engine):
        def collective_rpc(self, *args, **kwargs):
            raise AttributeError("'CPUWorker' object has no attribute 'rollout_spec'")

    controller = a_controller()
    with pytest.raises(RuntimeError, match="VLLM_PLUGINS"):
        controller.attach(Bare())
    assert controller.llm is None


def switched(llm):
    return [call for call in llm.calls if call[0] == "set_enabled"]


def test_every_third_generation_has_no_drafts_and_evaluations_do_not_count():
    controller, llm = an_attached_controller(compare_every=3)
    for number in range(9):
        controller.begin_step(number)
        controller.evaluating = number == 1
        llm.generate(["a", "b"], Params())
        assert controller.enabled
    off = [index for index, call in enumerate(llm.calls) if call == ("set_enabled", False, False)]
    assert switched(llm) == [("set_enabled", False, False), ("set_enabled", True)] * 2
    assert [sum(isinstance(call, list) for call in llm.calls[:index]) for index in off] == [3, 6]
    metrics = controller.take_metrics()
    assert metrics["rollout_spec/measured_generations"] == 2
    assert controller.report()["compare_every"] == 3
    assert "rollout_spec/measured_speedup" in metrics
    assert "rollout_spec/measured_speedup_low" not in metrics, "two comparisons give no interval"
    for number in range(9, 18):
        controller.begin_step(number)
        llm.generate(["a", "b"], Params())
    metrics = controller.take_metrics()
    assert metrics["rollout_spec/measured_speedup_low"] <= metrics["rollout_spec/measured_speedup_high"]


def test_after_a_generation_that_fails_drafts_are_on_again():
    controller, llm = an_attached_controller(compare_every=3)
    for _ in range(2):
        llm.generate(["a"], Params())
    controller.generate = Mock(side_effect=MemoryError)
    with pytest.raises(MemoryError):
        llm.generate(["a"], Params())
    assert switched(llm) == [("set_enabled", False, False), ("set_enabled", True)]


def test_while_the_user_has_switched_drafts_off_nothing_is_compared():
    controller, llm = an_attached_controller(compare_every=3)
    controller.enabled = False
    for _ in range(5):
        llm.generate(["a"], Params())
    assert switched(llm) == [("set_enabled", False)]
    for enabled in (True, True, True, False, True):  # the third is without drafts, for the comparison
        controller.enabled = enabled
        llm.generate(["a"], Params())
    assert controller.measured() is None


def test_a_drafter_that_raises_meanwhile_ends_the_comparison_and_not_the_run(caplog):
    _, llm = an_attached_controller(compare_every=3)
    answer = llm.collective_rpc

    def collective_rpc(method, args):
        if args == ("set_enabled", True):
            raise RuntimeError("speculation stays off in this engine")
        return answer(method, args)

    llm.collective_rpc = collective_rpc
    for _ in range(4):
        llm.generate(["a"], Params())
    assert "nothing more is compared: speculation stays off" in caplog.text
    assert switched(llm) == [("set_enabled", False, False)]
