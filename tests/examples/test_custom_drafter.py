"""The example of a drafter of a user's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollout_spec import engine_kwargs
from rollout_spec.drafters import build_drafter, check_options

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = "custom_drafter.RepeatDrafter"


@pytest.fixture(autouse=True)
def _on_path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def test_it_takes_fewer_steps_than_tokens():
    script = EXAMPLES / "custom_drafter.py"
    output = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    tokens_per_step = re.fullmatch(r"(\d\.\d\d) tokens per step\n", output)
    assert tokens_per_step
    assert float(tokens_per_step[1]) > 1.5


def test_an_engine_finds_it_by_its_path():
    options = {"context_length": 3}
    config = engine_kwargs(drafter=NAME, drafter_options=options)["additional_config"]["rollout_spec"]
    check_options(config["drafter"], config["drafter_options"])
    drafter = build_drafter(config["drafter"], **config["drafter_options"])
    drafter.start_request("r", [1, 2, 3, 4, 5])
    drafter.extend("r", [9, 2, 3])
    assert drafter.propose(["r"], np.array([8], np.int32))[0].token_ids.tolist() == []
    drafter.extend("r", [4])
    assert drafter.propose(["r"], np.array([3], np.int32))[0].token_ids.tolist() == [5, 9, 2]


def test_confidence_follows_what_was_accepted():
    drafter = build_drafter(NAME)
    drafter.start_request("r", [1, 2, 3, 4, 1, 2])
    limits = np.array([2], np.int32)
    (before,) = drafter.propose(["r"], limits)
    assert before.confidence.tolist() == [0.5, 0.25]
    drafter.extend("r", [3, 4, 1, 2])
    (after,) = drafter.propose(["r"], limits)
    assert after.confidence.tolist() == [0.75, 0.5625]
    drafter.stop_request("r")
    drafter.check_integrity()
    assert drafter.memory_bytes() == 0
