"""The demo with a policy that was hardly trained, and what it says; `make demo` runs it in earnest."""

import contextlib
import io
import json
import socket
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.__main__ import main
from examples.demo.policy import build_tokenizer, warm_start
from tests.conftest import ROOT, environment_for_a_process


def test_a_piped_warm_start_says_how_far_it_is_and_writes_the_same_policy_again(tmp_path, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))  # shows only what was flushed, as a pipe
    for name in "ab":
        warm_start(tmp_path / name, seed=5, steps=10, batch_size=4)
    lines = written.getvalue().decode().splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"  step {step} of 10" for step in range(1, 11)] * 2
    assert float(lines[9].split()[-1]) < float(lines[0].split()[-1])
    saved, repeated = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "ab")
    for weight, twin in zip(saved.parameters(), repeated.parameters(), strict=True):
        assert weight.equal(twin)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.padding_side == "left"
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "1"], "--steps must be at least 2"),
        (["--seed", "-1"], "--seed fit in 32 bits"),
        (["--out", "/dev/null/demo"], "--out: "),
        ([], "pip install 'rollout-spec[demo]', and vLLM: "),
    ],
)
def test_what_would_fail_late_is_refused_at_once(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("examples.demo.__main__.ENVIRONMENT", {})
    monkeypatch.setitem(sys.modules, "trl", None)  # as if it were not installed
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path), *options])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.engine
@pytest.mark.exhaustive
def test_it_runs_beside_another_training(tmp_path):
    """Which holds torch's port at one of the machine's addresses. TRL looks at another, the engine takes all."""
    pytest.importorskip("vllm")
    pytest.importorskip("trl")
    pytest.importorskip("matplotlib")
    warm_start(tmp_path / "policy-v1-seed0", seed=0, steps=1, batch_size=4)
    command = [sys.executable, "-m", "examples.demo", "--steps", "2", "--out", tmp_path]
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # another training has the port
            other.bind(("127.0.0.2", 29500))
            other.listen()
        environment = environment_for_a_process()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["rollouts_identical"] == report["rollouts_total"] == 32
