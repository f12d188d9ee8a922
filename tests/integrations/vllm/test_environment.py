"""ROLLOUT_SPEC, which speculates in engines whose framework passes nothing through."""

from __future__ import annotations

import json

import pytest

from rollout_spec import RolloutSpecConfig
from rollout_spec.integrations.vllm.environment import VARIABLE, read


@pytest.mark.parametrize(
    ("text", "config", "models"),
    [
        ("{}", {}, []),
        (' {"num_speculative_tokens": 4} ', {"num_speculative_tokens": 4}, []),
        ('{"models": ["Qwen/*", "*llama*"], "drafter": "suffix"}', {"drafter": "suffix"}, ["Qwen/*", "*llama*"]),
    ],
)
def test_what_it_asks_for(text, config, models):
    assert read({VARIABLE: text})[:2] == (RolloutSpecConfig(**config), models)


@pytest.mark.parametrize("environment", [{}, {VARIABLE: ""}, {VARIABLE: " "}])
def test_where_it_asks_for_nothing(environment):
    assert read(environment) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yes", "ROLLOUT_SPEC=yes is no JSON"),
        ("8", "must be a JSON object"),
        ('{"num_speculative_token": 8}', "ROLLOUT_SPEC: unknown rollout_spec config key.*did you mean"),
        ('{"num_speculative_tokens": "8"}', "ROLLOUT_SPEC: num_speculative_tokens must be an int"),
        ('{"models": "Qwen/*"}', "models in ROLLOUT_SPEC must be a list"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        read({VARIABLE: text})


# -- vLLM's engines --------------------------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch):
    """What the plugin says in vLLM's log."""
    pytest.importorskip("vllm")
    from rollout_spec.integrations.vllm import log

    lines = []
    monkeypatch.setattr(log, "say", lines.append)
    return lines


def configuration(model, **kwargs):
    """Of an engine, as every framework makes it."""
    from vllm import EngineArgs

    return EngineArgs(model=str(model), dtype="float32", enforce_eager=True, **kwargs).create_engine_config()


@pytest.mark.engine
def test_an_engine_asks_for_us_and_speculates(tiny_model, monkeypatch, said):
    from tests.integrations.engines import build, generate, mixed_params, stats_of

    monkeypatch.setenv(VARIABLE, json.dumps({"num_speculative_tokens": 3, "models": [f"{tiny_model}*"]}))
    llm = build(tiny_model, additional_config={"theirs": 1})
    assert llm.llm_engine.vllm_config.additional_config["theirs"] == 1
    generate(llm, mixed_params(8, 1, max_tokens=30))
    assert stats_of(llm)["draft_tokens"] > 0
    first = next(line for line in said if line.startswith(VARIABLE))
    assert first == f"{VARIABLE} gives the engine of {tiny_model} at most 3 draft tokens"
    assert sum(line.startswith(VARIABLE) for line in said) == 1
    assert sum("is on: up to 3 draft tokens" in line for line in said) == 1


@pytest.mark.engine
@pytest.mark.parametrize(
    ("options", "engine", "line"),
    [
        (
            {},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            "alone: it has a speculative_config of its own",
        ),
        ({"models": ["Qwen/*"]}, {}, "alone: its name matches none of ['Qwen/*']"),
        ({}, {"runner": "pooling"}, "alone: it does not generate"),
    ],
)
def test_engines_that_are_left_alone(tiny_model, monkeypatch, said, options, engine, line):
    monkeypatch.setenv(VARIABLE, json.dumps(options))
    config = configuration(tiny_model, **engine)
    assert said[0] == f"{VARIABLE} leaves the engine of {tiny_model} {line}"
    assert "rollout_spec" not in config.additional_config
    assert getattr(config.speculative_config, "method", None) == engine.get("speculative_config", {}).get("method")


@pytest.mark.engine
def test_history_joins_a_frameworks_own_drafter_with_a_model(tiny_model, monkeypatch, said):
    monkeypatch.setenv(VARIABLE, '{"num_speculative_tokens": 6}')
    theirs = {"method": "draft_model", "model": str(tiny_model), "num_speculative_tokens": 2}
    config = configuration(tiny_model, speculative_config=theirs)
    assert said[0].endswith("a drafter from history beside its 'draft_model'")
    assert config.speculative_config.num_speculative_tokens == 6
    assert config.additional_config["rollout_spec"]["speculative_config"]["num_speculative_tokens"] == 2


def test_a_framework_may_leave_it_to_the_checkpoint_how_much_is_drafted():
    request = read({VARIABLE: '{"num_speculative_tokens": 6, "drafter": "suffix"}'})
    _, arguments = request.beside({"method": "mtp"})
    assert arguments == {
        "additional_config": {"rollout_spec": {"drafter": "suffix"}},
        "speculative_config": {"method": "mtp"},
    }
    assert request.beside({"method": "ngram", "num_speculative_tokens": 2}) is None
    with pytest.raises(ValueError, match="ROLLOUT_SPEC, beside the engine's speculative_config: .* be at least 1"):
        request.beside({"method": "mtp", "num_speculative_tokens": 0})


@pytest.mark.engine
def test_a_model_that_is_not_meant_is_left_alone(tiny_model, monkeypatch, said):
    monkeypatch.setenv(VARIABLE, '{"num_speculative_tokens": 6, "models": ["Qwen/*"]}')
    theirs = {"method": "draft_model", "model": str(tiny_model), "num_speculative_tokens": 2}
    assert configuration(tiny_model, speculative_config=theirs).additional_config == {}
    assert said[0].endswith("alone: its name matches none of ['Qwen/*']")


@pytest.mark.engine
def test_an_engine_that_cannot_speculate_says_how_to_leave_it_out(tiny_model, monkeypatch, said):
    monkeypatch.setenv(VARIABLE, '{"speculation": true}')
    with pytest.raises(ValueError, match=f'{VARIABLE} asks for speculation in this engine: its "models" can leave'):
        configuration(tiny_model, additional_config={"rolout_spec": {}})


@pytest.mark.engine
def test_an_engine_with_settings_of_its_own_keeps_them(tiny_model, monkeypatch, said):
    from rollout_spec import engine_kwargs

    monkeypatch.setenv(VARIABLE, '{"num_speculative_tokens": 3}')
    config = configuration(tiny_model, **engine_kwargs(num_speculative_tokens=5))
    assert config.speculative_config.num_speculative_tokens == 5
    assert not [line for line in said if line.startswith(VARIABLE)]


@pytest.mark.engine
def test_without_drafts_engines_sample_with_our_noise(tiny_model, monkeypatch, said):
    monkeypatch.setenv(VARIABLE, '{"speculation": false}')
    config = configuration(tiny_model)
    assert config.speculative_config is None
    assert config.additional_config["rollout_spec"]["speculation"] is False
    assert said[0].endswith("our noise and no drafts")


@pytest.mark.engine
def test_a_mistake_ends_the_engine_before_it_starts(tiny_model, monkeypatch, said):
    monkeypatch.setenv(VARIABLE, '{"k": 3}')
    with pytest.raises(ValueError, match="ROLLOUT_SPEC: unknown rollout_spec config key 'k'"):
        configuration(tiny_model)


@pytest.mark.engine
def test_engines_of_a_process_without_it_are_not_changed(tiny_model, monkeypatch, said):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert configuration(tiny_model).speculative_config is None
    assert not said
