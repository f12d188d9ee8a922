"""The lines of docs/frameworks.md switch rollout_spec on, in the frameworks' own code where it is installed.

`make test-frameworks` makes an environment with the frameworks; elsewhere their tests are skipped. `test_ray` has
their rollouts.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.plugins import load_general_plugins

from rollout_spec import RolloutSpecConfig
from rollout_spec.integrations.vllm.config import config_of

pytestmark = pytest.mark.slow

DOCUMENT = (Path(__file__).parents[2] / "docs/frameworks.md").read_text()
WANTED = RolloutSpecConfig(num_speculative_tokens=8)
WANTED_WITH_SALTS = RolloutSpecConfig(num_speculative_tokens=8, ignore_cache_salt=True)
"""Of frameworks that put the policy version into `cache_salt`."""

load_general_plugins()


def block(framework, number=0):
    """The text of a code block in a framework's section."""
    section = re.search(rf"^## {re.escape(framework)}\n(.*?)(?=^## |\Z)", DOCUMENT, re.DOTALL | re.MULTILINE).group(1)
    return re.findall(r"^```\w+\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[number]


def overrides(framework, number=0):
    """The `key=value` arguments of a command."""
    return [word for word in shlex.split(block(framework, number)) if "=" in word]


def variable(text):
    """The value of ROLLOUT_SPEC in an `export` line."""
    (value,) = (word for word in shlex.split(text) if word.startswith("ROLLOUT_SPEC="))
    return value.removeprefix("ROLLOUT_SPEC=")


def with_options(variable, **options):
    """The value of ROLLOUT_SPEC with more options."""
    return json.dumps({**json.loads(variable), **options})


def nested(lines, prefix):
    """Plain dictionaries of the overrides below a prefix."""
    result = {}
    for line in lines:
        path, value = line.lstrip("+").split("=", 1)
        assert path.startswith(prefix), path
        *parents, name = path.removeprefix(prefix).split(".")
        place = result
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = int(value) if value.isdigit() else {"true": True}.get(value, value)
    return result


def prime_rl():
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads(block("prime-rl"))["inference"]["vllm"]


def skyrl():
    settings = nested(overrides("SkyRL"), "generator.inference_engine.")
    return {**settings.pop("engine_init_kwargs"), **settings}


ARGUMENTS = {
    "verl": lambda: nested(overrides("verl"), "actor_rollout_ref.rollout.engine_kwargs.vllm."),
    "SkyRL": skyrl,
    "prime-rl": prime_rl,
    "NeMo-RL": lambda: nested(overrides("NeMo-RL", 1), "policy.generation.vllm_kwargs."),
}


def verl_variable():
    (line,) = overrides("verl", 1)
    name, value = line.split("=", 1)
    assert name == "+ray_kwargs.ray_init.runtime_env.env_vars.ROLLOUT_SPEC"
    return value.strip("'")


def openrlhf_variable_of_a_job():
    (word,) = (word for word in shlex.split(block("OpenRLHF", 1)) if word.startswith("--runtime-env-json="))
    return json.loads(word.split("=", 1)[1])["env_vars"]["ROLLOUT_SPEC"]


VARIABLES = {
    "verl": verl_variable,
    "OpenRLHF": lambda: variable(block("OpenRLHF")),
    "OpenRLHF, as a job": openrlhf_variable_of_a_job,
    "open-instruct": lambda: variable(block("open-instruct")),
    "NeMo-RL": lambda: variable(block("NeMo-RL")),
}


def asks(engine_args):
    """What an engine with these arguments asks us for; that vLLM lets it draft is checked, too."""
    vllm_config = engine_args.create_engine_config()
    assert not vllm_config.scheduler_config.async_scheduling
    config = config_of(vllm_config)
    assert config.drafter == "history"  # on a CPU
    return dataclasses.replace(config, drafter="auto")


@pytest.mark.parametrize("framework", ARGUMENTS)
def test_documented_arguments(framework, tiny_model):
    arguments = ARGUMENTS[framework]()
    assert sorted(arguments) == ["additional_config", "speculative_config"]
    assert arguments["speculative_config"] == WANTED.engine_kwargs()["speculative_config"]
    wanted = WANTED_WITH_SALTS if framework in ("SkyRL", "prime-rl") else WANTED
    assert asks(AsyncEngineArgs(model=str(tiny_model), dtype="float32", **arguments)) == wanted


@pytest.mark.parametrize("framework", VARIABLES)
def test_engines_ask_by_the_documented_variables(framework, tiny_model, monkeypatch):
    values = json.loads(VARIABLES[framework]())
    if "models" in values:  # theirs are no paths
        values["models"] = [str(tiny_model.parent / "*")]
    monkeypatch.setenv("ROLLOUT_SPEC", json.dumps(values))
    assert asks(AsyncEngineArgs(model=str(tiny_model), dtype="float32")) == WANTED


def test_verl(tiny_model):
    pytest.importorskip("verl")
    from tests.integrations.framework_engines import verl_engine_args, verl_runtime_env

    assert asks(verl_engine_args(tiny_model, overrides("verl"))) == WANTED
    (line,) = overrides("verl", 1)
    variables = verl_runtime_env(line)
    assert variables["ROLLOUT_SPEC"] == verl_variable()
    assert "VLLM_DISABLE_COMPILE_CACHE" in variables, "verl's own variables are still there"


def test_skyrl(tiny_model):
    pytest.importorskip("skyrl")
    from tests.integrations.framework_engines import skyrl_engine_args

    assert asks(skyrl_engine_args(tiny_model, overrides("SkyRL"))) == WANTED_WITH_SALTS
