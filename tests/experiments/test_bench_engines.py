"""The benchmark of whole engines: its rows, its gate, and that epochs have the same prompts with other noise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from examples.demo.policy import build_model, build_tokenizer
from experiments.engines.bench_engines import GROUP_SIZE, interval, one_turn
from tests.conftest import environment_for_a_process

ROOT = Path(__file__).parents[2]


def test_an_interval_holds_the_median_of_ratios():
    median, low, high = interval(np.array([2.0, 2.2, 1.9, 2.1, 2.0, 9.0]))
    assert low <= median <= high
    assert 1.9 <= median <= 2.2


class Engine:
    """Keeps what it is asked, and says one token."""

    def __init__(self):
        self.asked = []

    def generate(self, prompts, params, use_tqdm):
        self.asked += [(prompt, param.seed) for prompt, param in zip(prompts, params, strict=True)]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1])]) for _ in prompts]


def test_epochs_have_the_same_prompts_with_other_noise():
    engine = Engine()
    for epoch in (0, 1):
        one_turn(engine, lambda rng, count: [rng.random() for _ in range(count)], 32, 1, (7, 700 + epoch))
    first, second = engine.asked[:32], engine.asked[32:]
    assert [prompt for prompt, _ in first] == [prompt for prompt, _ in second]
    assert len({prompt for prompt, _ in first}) == 32 // GROUP_SIZE
    assert len({seed for _, seed in engine.asked}) == 64


@pytest.mark.engine
@pytest.mark.exhaustive
def test_a_short_run_has_a_row_for_each_engine_and_epoch(tmp_path):
    policy, out = tmp_path / "policy", tmp_path / "rows.jsonl"
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(policy)
    build_model(tokenizer, seed=0).save_pretrained(policy)
    engines = ["stock", "off", "ours", "wrong"]
    command = [sys.executable, "-m", "experiments.engines.bench_engines", str(policy), "--batch", "4", "--epochs", "2"]
    command += ["--pairs", "2", "--requests", "4", "--engines", *engines, "--out", str(out)]
    environment = environment_for_a_process(PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    subprocess.run(command, env=environment, check=True, cwd=ROOT)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["epoch"], row["engine"]) for row in rows] == [(epoch, name) for epoch in (0, 1) for name in engines]
    ours = [row for row in rows if row["engine"] != "stock"]
    assert all(row["identical"] == row["rollouts"] == 8 for row in ours)
    assert all(row["speedup"] > 0 for row in rows)
    assert {row["tokens_per_step"] for row in ours if row["engine"] == "off"} == {1.0}
    assert all(row["drafted_per_step"] > 0 for row in ours if row["engine"] == "wrong" and row["epoch"] == 0)
