"""Hooks that do not fit this vLLM, and the names of workers' methods."""

from types import SimpleNamespace

import pytest

from rollout_spec import engine_kwargs
from rollout_spec.config import PROPOSER_PATH
from rollout_spec.integrations.vllm import config, plugin
from rollout_spec.integrations.vllm.config import PASSES, config_of
from rollout_spec.integrations.vllm.hooks import init_scheduler
from rollout_spec.schedule import Schedule
from tests.integrations.engines import build

NOISE_ONLY = engine_kwargs(speculation=False)["additional_config"]


class Changed:
    """Stands for a module of a vLLM in which a method that we replace has another name."""

    class GPUModelRunner:
        def __init__(self, vllm_config):
            self.device = "cpu"

        def execute_model(self):
            return "executed"


@pytest.mark.parametrize("lacks", ["sample_tokens", "GPUModelRunner"])
def test_a_vllm_that_has_changed_fails_only_engines_that_ask_for_us(monkeypatch, lacks):
    monkeypatch.setattr(config, "missing", [])  # whatever was found before
    hooks = [hook for hook in plugin.HOOKS if hook.module == "vllm.v1.worker.gpu_model_runner"]
    if lacks == "GPUModelRunner":
        module = SimpleNamespace(__name__="vllm.runners")
    else:
        runner = type("GPUModelRunner", (Changed.GPUModelRunner,), {})
        module = SimpleNamespace(__name__="vllm.runners", GPUModelRunner=runner)
    for hook in hooks:
        plugin.install_or_note(hook.apply, module)
    plain, asking = (SimpleNamespace(additional_config=more, speculative_config=None) for more in ({}, NOISE_ONLY))
    assert config_of(plain) is None
    message = rf"cannot work with this version of vLLM: in vllm.runners, .*{lacks}.*\. Install vLLM 0\.\d+ to 0\.\d+,"
    with pytest.raises(RuntimeError, match=message):
        config_of(asking)
    if lacks == "sample_tokens":
        assert runner(plain).execute_model() == "executed"
        with pytest.raises(RuntimeError, match=message):
            runner(asking)
    monkeypatch.setenv("ROLLOUT_SPEC", "{}")
    with pytest.raises(RuntimeError, match="unset ROLLOUT_SPEC"):
        plugin.install_or_note(hooks[0].apply, SimpleNamespace(__name__="vllm.runners"))


@pytest.mark.engine
@pytest.mark.parametrize("options", [{}, engine_kwargs()])
def test_an_engine_may_choose_its_own_length(tiny_model, options):
    """Where the cache is too small for the model's, vLLM tells the workers before it makes the scheduler."""
    llm = build(tiny_model, max_model_len=-1, num_gpu_blocks_override=3, **options)
    assert llm.llm_engine.vllm_config.model_config.max_model_len < 512, "the model's"


@pytest.mark.parametrize(
    ("changed", "is_measured"),
    [
        ({}, True),
        ({"tensor_parallel_size": 2}, True),
        ({"distributed_executor_backend": "external_launcher"}, True),
        ({"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}, False),
        ({"async_scheduling": False}, False),
        ({"budget": False}, False),
        ({"enable_adaptive_verification": True}, False),
    ],
)
def test_where_k_may_follow_from_times(changed, is_measured):
    """Of two schedulers of one model, each with its clock, both must choose alike."""
    options = {"tensor_parallel_size": 1, "distributed_executor_backend": "mp", "async_scheduling": True, **changed}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**options),
        scheduler_config=SimpleNamespace(**options),
        speculative_config=SimpleNamespace(
            **{"model": PROPOSER_PATH, "method": "", "num_speculative_tokens": 7, **changed}
        ),
        additional_config={"rollout_spec": {"drafter": "device", "budget": changed.get("budget", True)}},
    )
    setattr(config.speculative_config, PASSES, (4, None))
    scheduler = SimpleNamespace(vllm_config=config)
    init_scheduler(lambda self: None, scheduler)
    steps = scheduler.rollout_spec
    assert isinstance(steps and steps._schedule, Schedule) == is_measured
