"""The lines of docs/frameworks.md switch rollout_spec on, in the frameworks' own code where it is installed.

`make test-frameworks` makes an environment with the frameworks; elsewhere their tests are skipped.
"""

import dataclasses
import functools
import json
import re
import shlex
import subprocess
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
SHARED = RolloutSpecConfig(num_speculative_tokens=16, history_dir="/shared/history")

load_general_plugins()


def block(framework):
    """The text of the last code block in a framework's section."""
    section = re.search(rf"^## {re.escape(framework)}\n(.*?)(?=^## |\Z)", DOCUMENT, re.DOTALL | re.MULTILINE).group(1)
    return re.findall(r"^```\w+\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[-1]


def variable(framework):
    """The value of ROLLOUT_SPEC in an `export` line."""
    (value,) = (word for word in shlex.split(block(framework)) if word.startswith("ROLLOUT_SPEC="))
    return value.removeprefix("ROLLOUT_SPEC=")


def verl_arguments():
    """The arguments with which verl's script is run, after bash has read them."""
    instead = 'bash() { shift 1; printf "%s\\n" "$@"; }\n'
    return subprocess.check_output(["bash", "-c", instead + block("verl")], text=True).splitlines()


def verl_variable():
    return verl_arguments()[0].removeprefix("+ray_kwargs.ray_init.runtime_env.env_vars.ROLLOUT_SPEC=").strip("'")


def openrlhf_variable_of_a_job():
    (word,) = (word for word in shlex.split(block("OpenRLHF")) if word.startswith("--runtime-env-json="))
    return json.loads(word.split("=", 1)[1])["env_vars"]["ROLLOUT_SPEC"]


def prime_rl_variable():
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads(block("prime-rl"))["inference"]["env_vars"]["ROLLOUT_SPEC"]


VARIABLES = {
    "verl": verl_variable,
    "OpenRLHF, as a job": openrlhf_variable_of_a_job,
    "prime-rl": prime_rl_variable,
    **{name: functools.partial(variable, name) for name in ("OpenRLHF", "SkyRL", "NeMo-RL")},
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
    wanted = SHARED if framework in ("verl", "SkyRL") else WANTED
    wanted = dataclasses.replace(wanted, ignore_cache_salt=framework in ("SkyRL", "prime-rl"))  # policy versions
    assert asks(AsyncEngineArgs(model=str(tiny_model), dtype="float32")) == wanted


def test_verl(tiny_model, tmp_path, monkeypatch):
    pytest.importorskip("verl")
    from tests.integrations import framework_engines as engines

    monkeypatch.delenv("VLLM_LOGGING_LEVEL")  # the tests' own
    lines = [line.replace("/shared/history", str(tmp_path)) for line in verl_arguments()]
    assert "VLLM_DISABLE_COMPILE_CACHE" in engines.verl_runtime_env(lines), "verl's own variables are still there"
    with engines.verl_server(tiny_model, lines) as server:
        drafted = engines.verl_rollouts(server)
        assert engines.report_of(server)["stats"]["accepted_tokens"] > 0
        logs = [path.read_text() for path in Path("/tmp/ray/session_latest/logs").glob("worker-*.out")]
    assert any("is on: up to 16 draft tokens per request and step, drafted by 'history'" in log for log in logs)
    off = lines[0].partition("=")[0] + """='{"speculation": false}'"""
    with engines.verl_server(tiny_model, [off, *lines[1:]]) as server:
        assert drafted == engines.verl_rollouts(server)


def test_skyrl(tiny_model, monkeypatch):
    pytest.importorskip("skyrl")
    from tests.integrations.framework_engines import skyrl_engine_args

    monkeypatch.setenv("ROLLOUT_SPEC", VARIABLES["SkyRL"]())
    subprocess.run(["bash", "-n", "-c", block("SkyRL")], check=True)
    arguments = skyrl_engine_args(tiny_model)
    assert asks(arguments) == dataclasses.replace(SHARED, ignore_cache_salt=True)
