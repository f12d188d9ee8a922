"""A step takes the host as few calls towards the GPU as it took when they were counted last."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import vllm

from tests.integrations.vllm.test_h100 import ROOT

pytestmark = pytest.mark.engine

CALLS = {
    "stock": {"ops": 11, "views": 59, "triton": 9, "uploads": 2, "copies": 5, "events": 5},
    "adaptive": {"ops": 5, "views": 45, "triton": 14, "copies": 2, "events": 8},
}
"""By kind of engine, of a decode step of any number of requests. Who needs one more takes one away, or says why not."""


@pytest.mark.skipif(not vllm.__version__.startswith("0.31"), reason="other releases have other counts")
@pytest.mark.parametrize("kind", CALLS)
def test_a_step_takes_few_calls(kind):
    command = [sys.executable, "-m", "tests.runners.calls", kind, "4", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"4": CALLS[kind], "16": CALLS[kind]}
