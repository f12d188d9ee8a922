"""The lines of docs/frameworks.md switch rollout_spec on, in the frameworks' own code where it is installed.

`make test-frameworks` makes an environment with the frameworks; elsewhere their tests are skipped.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.plugins import load_general_plugins

from rollout_spec import RolloutSpecConfig
from rollout_spec.integrations.vllm.config import config_of
from tests.conftest import environment_for_a_process

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/frameworks.md").read_text()
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
def test_documented_variables(framework):
    values = json.loads(VARIABLES[framework]())
    assert all(isinstance(pattern, str) for pattern in values.pop("models", []))
    assert RolloutSpecConfig.from_dict(values) == WANTED


@pytest.mark.parametrize("framework", VARIABLES)
def test_engines_ask_by_the_documented_variables(framework, tiny_model, monkeypatch):
    values = json.loads(VARIABLES[framework]())
    if "models" in values:  # theirs are no paths
        values["models"] = [str(tiny_model.parent / "*")]
    monkeypatch.setenv("ROLLOUT_SPEC", json.dumps(values))
    assert asks(AsyncEngineArgs(model=str(tiny_model), dtype="float32")) == WANTED


def generate(framework, model, out, *lines, **variables):
    """What a framework's actor generates in a process of its own."""
    command = [sys.executable, "tests/integrations/framework_engines.py", framework, model, out, *lines]
    environment = environment_for_a_process(PYTHONPATH=str(ROOT), **variables)
    result = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert out.exists(), result.stdout[-3000:] + result.stderr[-3000:]
    return json.loads(out.read_text())


def assert_same_rollouts_and_drafts(on, off):
    assert len(on["rollouts"]) == len(off["rollouts"])
    same = [a[0] == b[0] for a, b in zip(on["rollouts"], off["rollouts"], strict=True)]
    assert all(same)
    for (_, scores), (_, other_scores) in zip(on["rollouts"], off["rollouts"], strict=True):
        assert scores == pytest.approx(other_scores, abs=1e-4)
    assert on["stats"]["accepted_tokens"] > 100
    assert off["stats"]["draft_tokens"] == 0
    print(sum(same), "of", len(same), "rollouts identical;", on["stats"]["mean_acceptance_length"])


class TestVerl:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("verl")

    def test_arguments(self, tiny_model):
        from tests.integrations.framework_engines import verl_engine_args

        assert asks(verl_engine_args(tiny_model, overrides("verl"))) == WANTED

    def test_variable_reaches_ray(self):
        from tests.integrations.framework_engines import verl_runtime_env

        (line,) = overrides("verl", 1)
        variables = verl_runtime_env(line)
        assert variables["ROLLOUT_SPEC"] == verl_variable()
        assert "VLLM_DISABLE_COMPILE_CACHE" in variables, "verl's own variables are still there"

    @pytest.mark.engine
    def test_rollouts_with_new_weights(self, tiny_model, tmp_path):
        prefix = "+actor_rollout_ref.rollout.engine_kwargs.vllm."
        without_budget = f"{prefix}additional_config.rollout_spec.budget=false"  # else a busy machine drafts less
        on = generate("verl", tiny_model, tmp_path / "on.json", *overrides("verl"), without_budget)
        without = f"{prefix}additional_config.rollout_spec.speculation=false"
        off = generate("verl", tiny_model, tmp_path / "off.json", without)
        assert_same_rollouts_and_drafts(on, off)


def test_skyrl_arguments(tiny_model):
    pytest.importorskip("skyrl")
    from tests.integrations.framework_engines import skyrl_engine_args

    assert asks(skyrl_engine_args(tiny_model, overrides("SkyRL"))) == WANTED_WITH_SALTS


class TestOpenRLHF:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("openrlhf")

    def test_its_arguments_leave_speculation_alone(self, tiny_model):
        from tests.integrations.framework_engines import openrlhf_engine_args

        arguments = openrlhf_engine_args(tiny_model)
        assert arguments.speculative_config is None
        assert not arguments.additional_config

    def test_arguments(self, tiny_model, monkeypatch):
        from tests.integrations.framework_engines import openrlhf_engine_args

        monkeypatch.setenv("ROLLOUT_SPEC", variable(block("OpenRLHF")))
        assert asks(openrlhf_engine_args(tiny_model)) == WANTED

    @pytest.mark.engine
    def test_rollouts(self, tiny_model, tmp_path):
        asked = with_options(variable(block("OpenRLHF")), budget=False)  # else a busy machine drafts less
        on = generate("openrlhf", tiny_model, tmp_path / "on.json", ROLLOUT_SPEC=asked)
        off = generate("openrlhf", tiny_model, tmp_path / "off.json", ROLLOUT_SPEC='{"speculation": false}')
        assert_same_rollouts_and_drafts(on, off)
