"""The benchmark of the host's path runs both runners' adapters and says what each step takes."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")

from experiments.costs import bench_host
from experiments.engines.bench_phase import ROLLOUTS
from rollout_spec.integrations.vllm import runner_v1

CONTESTANTS = ["ours", "ours, indexing late", "ours V2", "ours V2, indexing late", "ngram"]


def test_a_short_run_has_a_row_for_each(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_v1, "verify_rows", runner_v1.verify_rows)  # which the benchmark replaces for good
    out = tmp_path / "rows.jsonl"
    bench_host.main([str(ROLLOUTS), "--batch", "4", "--k", "4", "--steps", "10", "--history", "32", "--out", str(out),
                     "--contestants", *CONTESTANTS])  # fmt: skip
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["proposer"] for row in rows] == CONTESTANTS
    ours = [row for row in rows if row["proposer"].startswith("ours")]
    assert len({row["drafted"] for row in ours}) == 1
    assert all(row["accepted"] > 0 and min(row["us_per_request"]) > 0 for row in ours)
