"""The script that checks the kernels on a GPU, run here through the interpreter on small vocabularies."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("triton")

from experiments import check_gpu
from rollout_spec.types import SamplingBatch
from rollout_spec.verify import kernel, reference


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
    assert {"git", "argv", "versions", "device"} <= row.keys()
    assert "9 batches agree" in capsys.readouterr().out


def test_a_wrong_token_and_a_wrong_logprob_are_reported():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 9)).astype(np.float32) * 3
    cu = np.array([2], np.int32)
    rows = SamplingBatch(np.ones(1, np.float32), np.array([5]), np.array([7]))
    drafts = reference.verify(logits, np.zeros(2, np.int32), cu, rows).target_token_ids[:2].astype(np.int32)
    expected = reference.verify(logits, drafts, cu, rows, logprobs_mode="raw_logprobs")
    wrong_token = expected.output_token_ids.copy()
    wrong_token[0, 1] = (wrong_token[0, 1] + 1) % 9
    wrong_logprob = expected.logprobs + np.float32(0.01)

    def compared(**changes):
        import torch

        got = expected._replace(**changes)
        tensors = (None if field is None else torch.from_numpy(np.asarray(field)) for field in got)
        return check_gpu.compare(type(got)(*tensors), expected, logits, cu, rows, "sample", "raw_logprobs")

    assert compared() == (0, 0.0)
    with pytest.raises(AssertionError, match="differs by"):
        compared(output_token_ids=wrong_token)
    with pytest.raises(AssertionError, match="log-probability"):
        compared(logprobs=wrong_logprob)
