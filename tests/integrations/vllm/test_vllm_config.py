"""What engines ask for, and what they are refused."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from rollout_spec import RolloutSpecConfig, engine_kwargs
from rollout_spec.config import PROPOSER_PATH
from rollout_spec.integrations.vllm import config as engine_config
from rollout_spec.integrations.vllm import hooks
from rollout_spec.integrations.vllm.config import VARIABLE, check_engine, config_of, read_environment
from tests.recurrent.models import MODELS

# -- ROLLOUT_SPEC ----------------------------------------------------------------------------------------------------


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


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("variable", "engine", "is_ours", "k", "line"),
    [
        ("{}", {"speculative_config": NGRAM}, False, 2, "alone: it has a speculative_config of its own"),
        ('{"models": ["Qwen/*"]}', {}, False, None, "alone: its name matches none of ['Qwen/*']"),
        ("{}", {"runner": "pooling"}, False, None, "alone: it does not generate"),
        ('{"speculation": false}', {}, True, None, "our noise and no drafts"),
        ("{}", engine_kwargs(num_speculative_tokens=5), True, 5, None),
        ('{"num_speculative_tokens": 3, "models": ["*"]}', {}, True, 3, "drafts"),
        ("", {}, False, None, None),
    ],
)
def test_what_engines_are_given(tiny_model, monkeypatch, said, variable, engine, is_ours, k, line):
    monkeypatch.setenv(VARIABLE, variable)
    config = configuration(tiny_model, **{"additional_config": {"theirs": 1}, **engine})
    assert config.additional_config.get("theirs", 1) == 1
    assert ("rollout_spec" in config.additional_config) == is_ours
    assert getattr(config.speculative_config, "num_speculative_tokens", None) == k
    assert [text.endswith(str(line)) for text in said if text.startswith(VARIABLE)] == [True] * (line is not None)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("variable", "sub_steps", "usage", "expected"),
    [
        ("", None, UsageContext.OPENAI_API_SERVER, 1),
        ("", None, UsageContext.LLM_CLASS, None),
        ("", 3, UsageContext.OPENAI_API_SERVER, 3),
        ("{}", None, UsageContext.OPENAI_API_SERVER, None),
    ],
)
def test_clients_of_a_server_see_tokens_as_they_come(tiny_model, monkeypatch, variable, sub_steps, usage, expected):
    """But for a trainer's, which sets the variable."""
    monkeypatch.setenv(VARIABLE, variable)
    arguments = {"enforce_eager": True, **({} if variable else engine_kwargs(sub_steps=sub_steps))}
    for again in ({"usage_context": usage}, {}):
        engine = EngineArgs(model=str(tiny_model), dtype="float32", **arguments)
        config = engine.create_engine_config(*([] if again else [usage]), **again)
        assert engine_config.config_of(config).sub_steps == expected


def test_a_framework_may_leave_it_to_the_checkpoint_how_much_is_drafted():
    request = read_environment({VARIABLE: '{"num_speculative_tokens": 6, "drafter": "suffix"}'})
    arguments = request.arguments({"method": "mtp"})
    assert arguments["speculative_config"] == {"method": "mtp"}
    options = arguments["additional_config"]["rollout_spec"]
    assert "num_speculative_tokens" not in options
    assert RolloutSpecConfig(**options) == RolloutSpecConfig(drafter="suffix")
    assert request.arguments({"method": "ngram", "num_speculative_tokens": 2}) is None
    with pytest.raises(ValueError, match="ROLLOUT_SPEC, beside the engine's speculative_config: .* be at least 1"):
        request.arguments({"method": "mtp", "num_speculative_tokens": 0})


@pytest.mark.engine
@pytest.mark.parametrize(
    ("variable", "engine", "message"),
    [
        ('{"speculation": true}', {"additional_config": {"rolout_spec": {}}}, 'in this engine: its "models" can leave'),
        ('{"k": 3}', {}, "ROLLOUT_SPEC: unknown rollout_spec config key 'k'"),
    ],
)
def test_mistakes_end_the_engine_before_it_starts(tiny_model, monkeypatch, said, variable, engine, message):
    monkeypatch.setenv(VARIABLE, variable)
    with pytest.raises(ValueError, match=message):
        configuration(tiny_model, **engine)


@pytest.mark.parametrize("name", engine_config.OF_VLLMS_SAMPLER)
@pytest.mark.parametrize("owner", ["model_config", "parallel_config", None])
def test_options_of_vllms_sampler_alone(name, owner):
    owners = {"model_config": SimpleNamespace(runner_type="generate"), "parallel_config": SimpleNamespace()}
    vllm_config = SimpleNamespace(**owners, use_v2_model_runner=True)
    setattr(owners.get(owner, vllm_config), name, True)
    with pytest.raises(ValueError, match=f"{name} does not work with"):
        check_engine(vllm_config, RolloutSpecConfig(speculation=False))


# -- models with recurrent layers; their rollouts are in `tests/recurrent` -------------------------------------------


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    path = tmp_path_factory.mktemp("recurrent") / "mamba2"
    MODELS["mamba2"](path)
    return path


@pytest.mark.parametrize("version", [(0, 24, 0), (0, 31, 0), (0, 32, 0), (0, 33, 1), (0, 0)])
def test_refused_where_vllm_mixes_up_their_states(recurrent, tiny_model, monkeypatch, version):
    monkeypatch.setattr(vllm, "__version_tuple__", version)
    monkeypatch.setattr(vllm, "__version__", ".".join(map(str, version)))
    vllm_config = configuration(recurrent, **engine_kwargs())
    message = r"layers wrongly where it speculates.* install vLLM 0\.32 .*speculation=False"
    with pytest.raises(ValueError, match=message) if (0, 0) < version < (0, 32) else nullcontext():
        check_engine(vllm_config, config_of(vllm_config))
    for model, options in ((recurrent, {"speculation": False}), (tiny_model, {})):
        vllm_config = configuration(model, **engine_kwargs(**options))
        check_engine(vllm_config, config_of(vllm_config))


def test_they_have_few_draft_tokens_unless_told_otherwise(recurrent, tiny_model):
    """Each is a state more of each request."""
    proposer = {"method": "custom_class", "model": PROPOSER_PATH, "num_speculative_tokens": 6}
    additional = {"additional_config": engine_kwargs()["additional_config"]}
    for model, arguments, k in (
        (recurrent, engine_kwargs(), 3),
        (tiny_model, engine_kwargs(), 8),
        (recurrent, engine_kwargs(num_speculative_tokens=8), 8),
        (recurrent, {"speculative_config": proposer, "additional_config": {"rollout_spec": {}}}, 6),
        (recurrent, {"speculative_config": proposer}, 6),
        (recurrent, {"speculative_config": proposer, **additional}, 6),
    ):
        vllm_config = configuration(model, **arguments)
        assert config_of(vllm_config).num_speculative_tokens == k
        assert vllm_config.speculative_config.num_speculative_tokens == k
        vllm_config.__post_init__()
        assert config_of(vllm_config).num_speculative_tokens == k
