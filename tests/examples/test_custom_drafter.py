"""The example of a drafter of a user's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "custom_drafter.py"


def test_it_takes_fewer_steps_than_tokens():
    output = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True).stdout
    tokens_per_step = re.fullmatch(r"(\d\.\d\d) tokens per step\n", output)
    assert tokens_per_step
    assert float(tokens_per_step[1]) > 1.5
