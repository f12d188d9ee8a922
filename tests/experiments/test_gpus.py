"""What the cost curves of a GPU say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.costs import gpus
from experiments.costs.gpus import CORES, VLLM_REQUEST, VLLM_STEP, step_cost
from rollout_spec.integrations.vllm import step_sizes

RESULTS = Path(__file__).parents[2] / "experiments/results"


def test_few_tokens_cost_the_weights_and_many_their_operations():
    cost = step_cost("8b", "none", cores=0.0)
    kernels = 32 * 10 * 1.5e-6
    context = 512 * 131_072 / (0.8 * 3.35e12)
    row = 0.5e-3 / 4608
    weights = 2 * 8.03e9 / (0.8 * 3.35e12)
    assert cost.whole_step(1, 0) == pytest.approx(weights + kernels + context + 50e-6 + row, rel=1e-6)
    operations = 4096 * 2 * 8.03e9 / (0.7 * 989e12)
    assert cost.whole_step(1, 4095) == pytest.approx(operations + kernels + context + 50e-6 + 4096 * row, rel=1e-3)


def test_the_estimates_from_reading_come_out():
    """8B, 256 requests: 12 ms without drafts, 55 to 60 with eight."""
    assert 11e-3 < step_cost("8b", "none").whole_step(256, 0) < 15e-3
    assert 54e-3 < step_cost("8b", "device").whole_step(256, 256 * 8) < 62e-3


@pytest.mark.parametrize("name", list(gpus.SHAPES))
def test_the_host_hides_behind_the_device_or_is_added(name):
    free = step_cost(name, "host", cores=0.0)
    cost = step_cost(name, "host")
    for size in (1, 512):
        host = CORES * (VLLM_STEP + VLLM_REQUEST * size)
        assert cost.whole_step(size, size) == pytest.approx(free.whole_step(size, size) + host)
    hidden, alone = step_cost(name, "none"), step_cost(name, "none", cores=0.0)
    assert hidden.whole_step(1, 0) == alone.whole_step(1, 0)
    slow = step_cost(name, "none", cores=100.0)
    assert slow.whole_step(8, 0) == pytest.approx(100 * (VLLM_STEP + VLLM_REQUEST * 8) + 30 * 7e-6)


def test_launches_count_where_nothing_else_takes_as_long(monkeypatch):
    monkeypatch.setattr(gpus, "LAUNCH", 1.0)
    large, small = 4095, 7
    assert step_cost("8b", "none", cores=0.0).step(large + 1) == pytest.approx(320, rel=1e-3)
    assert step_cost("8b", "none", cores=0.0).step(small) < 1
    assert step_cost("8b", "host", cores=0.0).step(small) == pytest.approx(96, rel=1e-3)


def test_the_default_schedules_are_never_slower_than_no_drafts_in_the_rows_that_the_docs_quote():
    rows = [json.loads(line) for line in (RESULTS / "modes_simulated.jsonl").read_text().splitlines()]
    for cheap, speedup in ((step_sizes.CHEAP_TOKENS, "speedup"), (step_sizes.CHEAP_TOKENS_A100, "speedup_a100")):
        found = [row[speedup] for row in rows if row.get("policy") == f"{cheap} tokens"]
        assert len(found) == 144
        assert min(found) >= 1.0
