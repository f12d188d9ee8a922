"""What engines of ten models' shapes get on an H100: `h100.txt`, line by line."""

import subprocess
import sys
from difflib import unified_diff
from pathlib import Path

import pytest

vllm = pytest.importorskip("vllm")
ROOT = Path(__file__).parents[3]
COMMAND = "python -m tests.integrations.vllm.h100 > tests/integrations/vllm/h100.txt"


@pytest.mark.exhaustive
def test_what_engines_get_on_an_h100():
    recorded = Path(__file__).with_name("h100.txt").read_text().splitlines()
    if not recorded[0].startswith(f"vLLM {vllm.__version__},"):
        pytest.skip(f"recorded with another release: {recorded[0]}")
    now = subprocess.run([sys.executable, *COMMAND.split()[1:3]], capture_output=True, text=True, cwd=ROOT)
    assert now.returncode == 0, now.stderr
    changes = list(unified_diff(recorded, now.stdout.splitlines(), "recorded", "now", lineterm=""))
    assert not changes, "\n".join([*changes, f"To accept this: {COMMAND}"])
