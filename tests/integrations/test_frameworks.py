"""The lines of docs/frameworks.md switch rollout_spec on, in the frameworks' own code where it is installed.

`make test-frameworks` makes an environment with the frameworks; elsewhere their tests are skipped.
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


def block(framework):
    """The text of the code block in a framework's section."""
    section = re.search(rf"^## {re.escape(framework)}\n(.*?)(?=^## |\Z)", DOCUMENT, re.DOTALL | re.MULTILINE).group(1)
    (text,) = re.findall(r"^```\w+\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return text


def variable(text):
    """The value of ROLLOUT_SPEC in an `export` line."""
    (value,) = (word for word in shlex.split(text) if word.startswith("ROLLOUT_SPEC="))
    return value.removeprefix("ROLLOUT_SPEC=")


def verl_override():
    (line,) = (word for word in shlex.split(block("verl")) if "=" in word)
    return line


def verl_variable():
    name, value = verl_override().split("=", 1)
    assert name == "+ray_kwargs.ray_init.runtime_env.env_vars.ROLLOUT_SPEC"
    return value.strip("'")


def openrlhf_variable_of_a_job():
    (word,) = (word for word in shlex.split(block("OpenRLHF")) if word.startswith("--runtime-env-json="))
    return json.loads(word.split("=", 1)[1])["env_vars"]["ROLLOUT_SPEC"]


def prime_rl_variable():
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads(block("prime-rl"))["inference"]["env_vars"]["ROLLOUT_SPEC"]


VARIABLES = {
    "verl": verl_variable,
    "OpenRLHF": lambda: variable(block("OpenRLHF")),
    "OpenRLHF, as a job": openrlhf_variable_of_a_job,
    "SkyRL": lambda: variable(block("SkyRL")),
    "prime-rl": prime_rl_variable,
    "NeMo-RL": lambda: variable(block("NeMo-RL")),
}


def asks(engine_args):
    """What an engine with these arguments asks us for; that vLLM lets it draft is checked, too."""
    vllm_config = engine_args.create_engine_config()
    assert not vllm_config.scheduler_config.async_scheduling
    config = config_of(vllm_config)
    assert config.drafter == "history"  # on a CPU
    return dataclasses.replace(config, drafter="auto")


@pytest.mark.parametrize("framework", VARIABLES)
def test_engines_ask_by_the_documented_variables(framework, tiny_model, monkeypatch):
    values = json.loads(VARIABLES[framework]())
    if "models" in values:  # theirs are no paths
        values["models"] = [str(tiny_model.parent / "*")]
    monkeypatch.setenv("ROLLOUT_SPEC", json.dumps(values))
    wanted = WANTED_WITH_SALTS if framework in ("SkyRL", "prime-rl") else WANTED
    assert asks(AsyncEngineArgs(model=str(tiny_model), dtype="float32")) == wanted


def test_verl(tiny_model, monkeypatch):
    pytest.importorskip("verl")
    from tests.integrations.framework_engines import verl_engine_args, verl_runtime_env

    variables = verl_runtime_env(verl_override())
    assert variables["ROLLOUT_SPEC"] == verl_variable()
    assert "VLLM_DISABLE_COMPILE_CACHE" in variables, "verl's own variables are still there"
    monkeypatch.setenv("ROLLOUT_SPEC", variables["ROLLOUT_SPEC"])
    assert asks(verl_engine_args(tiny_model, [])) == WANTED


def test_skyrl(tiny_model, monkeypatch):
    pytest.importorskip("skyrl")
    from tests.integrations.framework_engines import skyrl_engine_args

    monkeypatch.setenv("ROLLOUT_SPEC", VARIABLES["SkyRL"]())
    assert asks(skyrl_engine_args(tiny_model, [])) == WANTED_WITH_SALTS
