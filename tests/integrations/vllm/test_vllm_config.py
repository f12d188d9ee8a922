"""What engines ask for, what they are refused, and what the log says."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import MambaSpec

from rollout_spec import RolloutSpecConfig, __version__, engine_kwargs
from rollout_spec.config import PROPOSER_PATH
from rollout_spec.integrations.vllm import config as engine_config
from rollout_spec.integrations.vllm import hooks
from rollout_spec.integrations.vllm.config import (
    VARIABLE,
    check_engine,
    config_of,
    describe_engine,
    describe_states,
    read_environment,
)
from tests.recurrent.models import MODELS

MTP = {"method": "mtp", "num_speculative_tokens": 3}

# -- ROLLOUT_SPEC ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "config", "models"),
    [
        ("{}", {}, []),
        (' {"num_speculative_tokens": 4} ', {"num_speculative_tokens": 4}, []),
        ('{"models": ["Qwen/*", "*llama*"], "drafter": "suffix"}', {"drafter": "suffix"}, ["Qwen/*", "*llama*"]),
    ],
)
def test_what_it_asks_for(text, config, models):
    assert read_environment({VARIABLE: text})[:2] == (RolloutSpecConfig(**config), models)


@pytest.mark.parametrize("environment", [{}, {VARIABLE: ""}, {VARIABLE: " "}])
def test_where_it_asks_for_nothing(environment):
    assert read_environment(environment) is None


# -- ROLLOUT_SPEC in vLLM's engines ----------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch):
    """What the plugin says in vLLM's log."""
    lines = []
    monkeypatch.setattr(hooks, "say", lines.append)
    monkeypatch.setattr(engine_config, "say", lines.append)
    return lines


def configuration(model, **kwargs):
    """Of an engine, as every framework makes it."""
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
    request = read_environment({VARIABLE: '{"num_speculative_tokens": 6, "drafter": "suffix"}'})
    _, arguments = request.beside({"method": "mtp"})
    assert arguments == {
        "additional_config": {"rollout_spec": {"drafter": "suffix"}},
        "speculative_config": {"method": "mtp"},
    }
    assert request.beside({"method": "ngram", "num_speculative_tokens": 2}) is None
    with pytest.raises(ValueError, match="ROLLOUT_SPEC, beside the engine's speculative_config: .* be at least 1"):
        request.beside({"method": "mtp", "num_speculative_tokens": 0})


@pytest.mark.engine
def test_an_engine_that_cannot_speculate_says_how_to_leave_it_out(tiny_model, monkeypatch, said):
    monkeypatch.setenv(VARIABLE, '{"speculation": true}')
    with pytest.raises(ValueError, match=f'{VARIABLE} asks for speculation in this engine: its "models" can leave'):
        configuration(tiny_model, additional_config={"rolout_spec": {}})


@pytest.mark.engine
def test_an_engine_with_settings_of_its_own_keeps_them(tiny_model, monkeypatch, said):
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


# -- models with recurrent layers; their rollouts are in `tests/recurrent` -------------------------------------------


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    path = tmp_path_factory.mktemp("recurrent") / "mamba2"
    MODELS["mamba2"](path)
    return path


def make(model, **arguments):
    arguments = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, **arguments}
    return EngineArgs(model=str(model), **arguments).create_engine_config()


@pytest.mark.parametrize("version", [(0, 24, 0), (0, 31, 0), (0, 32, 0), (0, 33, 1), (0, 0)])
def test_refused_where_vllm_mixes_up_their_states(recurrent, tiny_model, monkeypatch, version):
    monkeypatch.setattr(vllm, "__version_tuple__", version)
    monkeypatch.setattr(vllm, "__version__", ".".join(map(str, version)))
    vllm_config = make(recurrent, **engine_kwargs())
    if (0, 0) < version < (0, 32):
        with pytest.raises(ValueError, match=r"wrongly where it speculates.* install vLLM 0\.32 .*speculation=False"):
            check_engine(vllm_config, config_of(vllm_config))
    else:
        check_engine(vllm_config, config_of(vllm_config))
    for model, options in ((recurrent, {"speculation": False}), (tiny_model, {})):
        vllm_config = make(model, **engine_kwargs(**options))
        check_engine(vllm_config, config_of(vllm_config))


def test_refused_beside_a_model_drafter_too(recurrent, monkeypatch):
    """Its last step, before `max_tokens`, has no draft."""
    monkeypatch.setattr(vllm, "__version_tuple__", (0, 31, 0))
    beside = {"method": "draft_model", "model": str(recurrent), "num_speculative_tokens": 3}
    vllm_config = make(recurrent, **engine_kwargs(speculative_config=beside))
    with pytest.raises(ValueError, match="recurrent layers wrongly"):
        check_engine(vllm_config, config_of(vllm_config))


def test_they_have_few_draft_tokens_unless_told_otherwise(recurrent, tiny_model):
    """Each is a state more of each request."""
    proposer = {"method": "custom_class", "model": PROPOSER_PATH, "num_speculative_tokens": 6}
    draft_model = {"method": "draft_model", "model": str(recurrent)}
    additional = {"additional_config": engine_kwargs()["additional_config"]}
    for model, arguments, k in (
        (recurrent, engine_kwargs(), 3),
        (tiny_model, engine_kwargs(), 8),
        (recurrent, engine_kwargs(num_speculative_tokens=8), 8),
        (recurrent, {"speculative_config": proposer, "additional_config": {"rollout_spec": {}}}, 6),
        (recurrent, {"speculative_config": proposer}, 6),
        (recurrent, {"speculative_config": proposer, **additional}, 6),
        (
            recurrent,
            RolloutSpecConfig(speculative_config={**draft_model, "num_speculative_tokens": 2}).engine_kwargs(),
            2,
        ),
    ):
        vllm_config = make(model, **arguments)
        assert config_of(vllm_config).num_speculative_tokens == k
        assert vllm_config.speculative_config.num_speculative_tokens == k
        vllm_config.__post_init__()
        assert config_of(vllm_config).num_speculative_tokens == k


def test_what_their_states_take_is_said():
    spec = MambaSpec(
        block_size=16,
        shapes=((256, 1024),),
        dtypes=(torch.float32,),
        page_size_padded=3 << 20,
        num_speculative_blocks=3,
    )
    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none"))
    said = describe_states([spec, SimpleNamespace(), spec], vllm_config)
    assert "holds 3 more states of its recurrent layers" in said
    assert "24.0 MiB on each rank instead of 6.0" in said, "with what vLLM adds to align them"
    assert describe_states([SimpleNamespace()], vllm_config) is None
    assert describe_states([dataclasses.replace(spec, num_speculative_blocks=0)], vllm_config) is None


# -- the log ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "is_v2", "line"),
    [
        (
            {"num_speculative_tokens": 4, "drafter": "history"},
            False,
            "up to 4 draft tokens per request and step, drafted by 'history'; a budget decides how many are verified; "
            "history ends with the engine; synchronous scheduling in the V1 model runner. Not here: asynchronous "
            "scheduling, logprob_token_ids and logits processors of your own",
        ),
        (
            {"drafter": "device"},
            True,
            "up to 7 draft tokens per request and step, 2 from 33 requests on, 0 from 97 requests on, drafted by "
            "'device'; all are verified; history ends with the engine; asynchronous scheduling in the V2 model runner. "
            "Not here: a budget",
        ),
        (
            {"drafter": "device", "speculative_config": MTP},
            True,
            "up to 3 draft tokens per request and step, drafted by 'device' and the model of 'mtp'; all are verified; "
            "history ends with the engine; asynchronous scheduling in the V2 model runner. Not here: a budget",
        ),
        (
            {"drafter": "history", "history_dir": "/history", "budget": False, "verify": "rejection"},
            True,
            "up to 8 draft tokens per request and step, drafted by 'history'; all are verified; history in /history; "
            "synchronous scheduling in the V2 model runner. Not here: asynchronous scheduling, rollouts that do not "
            "depend on drafts",
        ),
        ({"speculation": False}, True, "no drafts (speculation=False); asynchronous scheduling in the V2 model runner"),
    ],
)
def test_an_engine_says_what_it_has(options, is_v2, line):
    config = RolloutSpecConfig.from_dict(options)
    ranges = [(1, 32, 7), (33, 96, 2), (97, 97, 0)] if "from 33 requests on" in line else None
    method = "custom_class" if config.speculative_config is None else "mtp"
    vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=not config.drafts_on_host),
        speculative_config=SimpleNamespace(method=method, num_speculative_tokens_per_batch_size=ranges),
        use_v2_model_runner=is_v2,
    )
    assert describe_engine(vllm_config, config) == f"rollout_spec {__version__} is on: {line}"
