"""Runs the tests of the V2 model runner, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.engine


def test_the_v2_runners_tests_pass(capfd):
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/v2"],
        cwd=root,
        env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    with capfd.disabled():
        print("\ntests/v2:", result.stdout.strip().splitlines()[-1])
