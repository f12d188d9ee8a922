"""What is wrong is said before anything is generated, by its name; what a drafter does wrong ends only its drafts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")


from rollout_spec import engine_kwargs
from rollout_spec.config import PROPOSER_PATH, RolloutSpecConfig
from rollout_spec.drafters import build_drafter
from rollout_spec.integrations.vllm.config import check_engine
from tests.integrations.engines import build, generate, mixed_params, runner_of, stats_of, verify_all

pytestmark = pytest.mark.engine

OPTIONS = engine_kwargs(num_speculative_tokens=4)
PROPOSER = OPTIONS["speculative_config"]


def unchecked(**options):
    """Arguments as those write them who do not call `engine_kwargs`, which would refuse these options."""
    return {
        "speculative_config": {**PROPOSER, "num_speculative_tokens": 8},
        "additional_config": {"rollout_spec": options},
    }


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (unchecked(drafter_options={"min_survival": 0.1}), ValueError, "'history' does not take 'min_survival'"),
        (unchecked(drafter_options={"max_history_tokens": 0}), ValueError, "max_history_tokens must be at least 1"),
        (unchecked(drafter="tests.adversaries.SameToken", drafter_options={"size": 2}), ValueError, "'size'"),
        (
            unchecked(drafter="tests.adversaries.NoDrafter"),
            ValueError,
            "lacks extend, propose, begin_policy_version: it",
        ),
        (engine_kwargs(drafter="tests.adversaries.RaisesWhenBuilt"), TypeError, "has no len"),
        ({**OPTIONS, "additional_config": {"rollout_spec": True}}, TypeError, "must be a dict"),
        ({"additional_config": {"rolout_spec": {}}}, ValueError, "did you mean 'rollout_spec'"),
        (
            {**OPTIONS, "speculative_config": {**PROPOSER, "model": PROPOSER_PATH + "s"}},
            ValueError,
            f"did you mean '{PROPOSER_PATH}'",
        ),
        ({**OPTIONS, "runner": "pooling"}, ValueError, "this one pools"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else getattr(value, "__name__", value),
)
def test_errors_name_their_cause(tiny_model, kwargs, error, message):
    with pytest.raises(error, match=message):
        build(tiny_model, **kwargs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"drafter_options": {"max_history_token": 9}},
            "does not take 'max_history_token': .* mean 'max_history_tokens'",
        ),
        ({"drafter_options": {"max_resident_token": 1}, "drafter": "device"}, "mean 'max_resident_tokens'"),
        ({"drafter_options": {"features": 1}}, "features must be a bool, got 1"),
        ({"drafter": "tests.adversaries.Nowhere"}, "cannot be imported"),
    ],
)
def test_what_is_known_before_an_engine_is_built_is_said_then(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        engine_kwargs(**options)
    engine_kwargs(drafter_options={"max_resident_tokens": 4096})  # of the one that "auto" takes on a GPU


def test_five_methods_are_enough_for_a_drafter(tiny_model, off):
    llm = build(tiny_model, **verify_all(num_speculative_tokens=4, drafter="tests.adversaries.FiveMethods"))
    params = mixed_params(6, 5, max_tokens=20)
    assert [o.token_ids for o in generate(llm, params)] == [o.token_ids for o in generate(off, params)]
    stats = stats_of(llm)
    assert (stats["drafter_errors"], stats["drafter_bytes"]) == (0, 0)
    assert stats["draft_tokens"] > 0


@pytest.mark.parametrize(("field", "named"), [("pipeline", "pipeline"), ("prefill_context", "prefill context")])
def test_parallelism_that_is_not_supported(field, named):
    """Nor can it be tried on a CPU."""
    parallel = SimpleNamespace(**{"pipeline_parallel_size": 1, f"{field}_parallel_size": 2})
    config = SimpleNamespace(
        model_config=SimpleNamespace(runner_type="generate"), use_v2_model_runner=False, parallel_config=parallel
    )
    with pytest.raises(ValueError, match=f"does not support {named} parallelism.* set {field}_parallel_size=1"):
        check_engine(config, RolloutSpecConfig(drafter="history"))


def test_vllm_that_will_not_load_the_plugin(monkeypatch):
    """The engine would run without speculation, or with drafts that are not verified, without a word."""
    for value, remedy in (("other", "add rollout_spec to it"), ("other, rollout_spec", "remove the spaces")):
        monkeypatch.setenv("VLLM_PLUGINS", value)
        with pytest.raises(ValueError, match=f"VLLM_PLUGINS='{value}' keeps vLLM from loading .*: {remedy}"):
            engine_kwargs()
    monkeypatch.setenv("VLLM_PLUGINS", "other,rollout_spec")
    assert engine_kwargs(num_speculative_tokens=4)["additional_config"] == OPTIONS["additional_config"]


def test_a_worker_without_the_plugin():
    """vLLM loads the model before anything is generated."""
    from rollout_spec.integrations.vllm.runner_v1 import RolloutSpecProposer

    config = SimpleNamespace(
        additional_config={},
        speculative_config=SimpleNamespace(model=PROPOSER_PATH, num_speculative_tokens=4),
        use_v2_model_runner=False,
    )
    with pytest.raises(RuntimeError, match="VLLM_PLUGINS"):
        RolloutSpecProposer(config).load_model(None)


@pytest.mark.parametrize("command", [("stats",), ("report",), ("begin_policy_version", 1)])
def test_a_drafter_that_raises_when_it_is_asked(tiny_model, command):
    """Drafts end, the run goes on, and switching on again says why it cannot be done."""
    llm = build(tiny_model, **verify_all(num_speculative_tokens=4, drafter="tests.adversaries.RaisesOutsideSteps"))
    generate(llm, mixed_params(4, 1, max_tokens=8))
    assert runner_of(llm).rollout_spec.stats.drafter_errors == 0
    llm.collective_rpc("rollout_spec", args=command)
    generate(llm, mixed_params(1, 3, max_tokens=1))  # a policy version begins with a step
    stats = stats_of(llm)
    assert stats["drafter_errors"] == 1
    assert stats["drafter_bytes"] == 0
    assert len(generate(llm, mixed_params(4, 2, max_tokens=8))) == 4
    assert stats_of(llm)["draft_tokens"] == stats["draft_tokens"]
    llm.collective_rpc("rollout_spec", args=("begin_policy_version", 1))
    llm.collective_rpc("rollout_spec", args=("set_enabled", False))
    with pytest.raises(RuntimeError, match="its drafter has raised"):
        llm.collective_rpc("rollout_spec", args=("set_enabled", True))


def test_everything_is_compiled_while_the_engine_is_built(tiny_model, monkeypatch):
    """The first generation would wait for it, without a word."""
    from numba.core import event

    from rollout_spec.jit import warm_up

    calls, compiled = [], []
    original = warm_up.warm_up

    def spy(config, *, device, has_model, log):
        calls.append((config.num_speculative_tokens, str(device)))
        log("compiling")
        original(config, device=device, has_model=has_model, log=log)

    monkeypatch.setattr(warm_up, "warm_up", spy)
    llm = build(tiny_model, **engine_kwargs(num_speculative_tokens=7, drafter="ngram"))
    assert calls == [(7, "cpu")]

    class Listener(event.Listener):
        def on_start(self, event):
            compiled.append(event.data["dispatcher"])

        def on_end(self, event):
            pass

    with event.install_listener("numba:compile", Listener()):
        generate(llm, mixed_params(8, 1, max_tokens=40))
    assert compiled == []
    build(tiny_model)
    assert len(calls) == 1, "other engines compile nothing of ours"


def test_a_mistake_in_a_constructor_is_no_wrong_option():
    with pytest.raises(TypeError, match="has no len"):
        build_drafter("tests.adversaries.RaisesWhenBuilt")


@pytest.mark.parametrize(
    ("variable", "value", "options"),
    [
        ("VLLM_USE_RUST_FRONTEND", "1", OPTIONS),
        ("VLLM_USE_RUST_FRONTEND", "1", engine_kwargs(speculation=False)),
        ("VLLM_GPU_SYNC_CHECK", "error", OPTIONS),
    ],
)
def test_environments_in_which_the_engine_could_not_work(tiny_model, monkeypatch, variable, value, options):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable}.*: unset it"):
        build(tiny_model, **options)


def test_an_engine_without_a_drafter_on_the_host_may_check_for_waits(tiny_model, monkeypatch):
    monkeypatch.setenv("VLLM_GPU_SYNC_CHECK", "error")
    build(tiny_model, **engine_kwargs(speculation=False))


def test_asynchronous_scheduling_with_a_drafter_on_the_host(tiny_model):
    """vLLM itself refuses it in some versions and runners, by the drafter's method and without a remedy."""
    with pytest.raises(ValueError, match='leave async_scheduling .* out, or use drafter="device"'):
        build(tiny_model, **OPTIONS, async_scheduling=True)
