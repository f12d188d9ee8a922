"""The script that checks the kernels on a GPU, run here through the interpreter on small vocabularies."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

from experiments import check_gpu
from rollout_spec.drafters.device.drafter import DeviceDrafter
from rollout_spec.verify import kernel


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(kernel, "ROWS", 8)
    monkeypatch.setattr(kernel, "BLOCK", 32)


@pytest.mark.exhaustive
def test_it_passes_and_writes_a_row(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    check_gpu.main(["--device", "cpu", "--trials", "9", "--vocab", "40", "--out", str(out)])
    row = json.loads(out.read_text())
    assert row["tokens"] > row["accepted"] > 0
    assert row["features"] > 0
    assert {"git", "argv", "versions", "device"} <= row.keys()
    assert "9 batches agree" in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["_upload", "_retire"])
def test_a_rollout_that_does_not_move_is_found(lost, monkeypatch):
    """From the host back to the pool, or from a request's row to the pool."""
    monkeypatch.setattr(DeviceDrafter, lost, lambda self, moved: None)
    with pytest.raises(AssertionError, match="turn 2"):
        check_gpu.check_moving_history(torch.device("cpu"))
