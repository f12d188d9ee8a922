"""The logic of `bench_device`, which measures on a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from experiments.costs import bench_device
from rollout_spec.drafters.device import kernels


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(kernels, "TARGET_PROGRAMS", 1)
    monkeypatch.setattr(bench_device, "GROUP", 4)
    monkeypatch.setattr(bench_device, "PROMPT", 4)
    monkeypatch.setattr(bench_device, "STEPS", 10)


def test_the_gate_passes_and_sees_a_wrong_draft(monkeypatch):
    original, proposed = bench_device.DeviceDrafter.propose, []

    def record(self, *args):
        proposed.append(original(self, *args))
        return proposed[-1]

    monkeypatch.setattr(bench_device.DeviceDrafter, "propose", record)
    bench_device.gate(torch.device("cpu"), trials=1, k=3)
    again = iter(proposed)

    def wrong(self, *args):
        drafts, rates = next(again)
        return drafts + 1, rates

    monkeypatch.setattr(bench_device.DeviceDrafter, "propose", wrong)
    with pytest.raises(AssertionError, match="drafts differ"):
        bench_device.gate(torch.device("cpu"), trials=1, k=3)


def test_the_history_is_what_is_reported():
    """6 requests of two problems with some hundred resident tokens, drafting from them."""
    batch = bench_device.Batch(torch.device("cpu"), 6, 350, 4, length=24, vocab=50)
    problems = batch.drafter._problems.values()
    earlier = {len(problem.pieces) for problem in problems}
    assert len(earlier) == 1
    assert earlier.pop() > 1
    lengths = (batch.total_len - bench_device.PROMPT).tolist()
    pool = batch.drafter._pool
    held = sum(problem.num_resident for problem in problems)
    prompts = bench_device.PROMPT * sum(len(problem.pieces) for problem in problems)
    assert batch.resident == sum(lengths) + held - prompts
    assert len(set(lengths)) > 3
    assert pool.num_free > 0
    batch.drafter.check_integrity()
    drafts, rates = batch.step()
    assert drafts.shape == (6, 4)
    assert float((rates[:, 0] > 0).float().mean()) > 0.5
