"""The examples run, with a tiny model on a CPU."""

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

from tests.conftest import ROOT, environment_for_a_process, free_port

pytestmark = pytest.mark.engine


def run(name, *arguments):
    command = [sys.executable, f"examples/{name}", *map(str, arguments)]
    environment = environment_for_a_process(MASTER_PORT=str(free_port()))
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.exhaustive
def test_grpo_with_trl(tiny_model, tmp_path):
    said = run(
        "grpo_trl.py", "--model", tiny_model, "--steps", 2, "--num-generations", 4, "--max-completion-length", 24,
        "--output-dir", tmp_path,
    )  # fmt: skip
    assert re.search(r"\d\.\d\d tokens per request and step", said)
    assert json.loads((tmp_path / "rollout_spec.json").read_text())["global_step"] == 2


@pytest.mark.exhaustive
def test_vllm_offline(tiny_model):
    said = run("vllm_offline.py", "--model", tiny_model, "--dtype", "float32", "--group", 4, "--max-tokens", 40)
    same = int(re.search(r"(\d+) of 8 rollouts identical", said).group(1))
    assert same >= 7, "logits vary by about 1e-6 in fp32: a rollout may part, rarely"
