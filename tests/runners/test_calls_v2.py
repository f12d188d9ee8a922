"""A step takes the host as few calls towards the GPU as it took when they were counted last."""

import json
import math
import subprocess
import sys

import pytest
import vllm

from tests.conftest import ROOT

CALLS = {
    "stock": {"ops": 11, "views": 59, "triton": 9, "uploads": 2, "copies": 5, "events": 5},
    "adaptive": {"ops": 5, "views": 45, "triton": 14, "copies": 2, "events": 7},
    "further": {"ops": 3, "views": 17, "triton": 13},
}
"""By kind of engine, of a decode step of any number of requests. Who needs one more takes one away, or says why not."""
ONCE_PER_STEP = {"_gather_block_tables_kernel"}
"""What a further forward pass needs no more: the blocks are those of the first."""


def calls(kind, number):
    """(calls by kind, launches by kernel) of a step, rounded up: a step in which all drafts stay does not cut them."""
    command = [sys.executable, "-m", "tests.runners.calls", kind, number]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {name: math.ceil(count) for name, count in json.loads(done.stdout.splitlines()[-1])[number].items()}
    kernels = {name: found.pop(name) for name in list(found) if name.endswith("_kernel")}
    return found, kernels


@pytest.mark.skipif(not vllm.__version__.startswith("0.31"), reason="other releases have other counts")
@pytest.mark.parametrize("kind", ["stock", "adaptive"])
def test_a_step_takes_few_calls(kind):
    assert [calls(kind, number)[0] for number in ("4", "16")] == [CALLS[kind]] * 2


@pytest.mark.skipif(not vllm.__version__.startswith("0.31"), reason="other releases have other counts")
def test_a_further_pass_launches_what_a_step_launches():
    """Which vLLM's runner does, and we repeat: a kernel that a new release adds must not be missing."""
    (_, of_step), (found, of_pass) = calls("adaptive", "4"), calls("further", "4")
    assert of_pass == {name: count for name, count in of_step.items() if name not in ONCE_PER_STEP}
    assert found == CALLS["further"]
