"""The logic of `bench_device`, which measures on a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import bench_device

from rollout_spec.drafters import device_kernels


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(device_kernels, "TARGET_PROGRAMS", 1)
    monkeypatch.setattr(bench_device, "PROMPT", 4)


def test_the_gate_passes_and_sees_a_wrong_draft(monkeypatch):
    bench_device.gate(torch.device("cpu"), trials=1, k=3)
    original = bench_device.DeviceDrafter.propose

    def propose(self, *args):
        drafts, rates = original(self, *args)
        return drafts + 1, rates

    monkeypatch.setattr(bench_device.DeviceDrafter, "propose", propose)
    with pytest.raises(AssertionError, match="trial 0"):
        bench_device.gate(torch.device("cpu"), trials=1, k=3)


def test_the_history_is_what_is_reported():
    """18 requests of two problems with one and a half thousand resident tokens, drafting from them."""
    batch = bench_device.Batch(torch.device("cpu"), 18, 1500, 4, length=30, vocab=50)
    assert batch.resident == 18 * 30 + 2 * 16 * 30
    problems = batch.drafter._problems.values()
    assert [len(problem.pieces) for problem in problems] == [16, 16]
    batch.drafter.check_integrity()
    drafts, rates = batch.step()
    assert drafts.shape == (18, 4)
    assert float((rates > 0).float().mean()) > 0.5
