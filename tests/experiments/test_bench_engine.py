"""The engine benchmark on a tiny model: every row it writes is complete, and speculation changes no rollout."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")

from experiments.engines import bench_engine


def test_partings():
    assert bench_engine.partings([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 9]]) == (1, 1.0)
    assert bench_engine.partings([[1]], [[1]]) == (0, None)


@pytest.mark.engine
@pytest.mark.slow
def test_modes_run_and_agree(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out = tmp_path / "rows.jsonl"
    modes = ["none", "off", "budget", "all-replay", "eagle-stock", "eagle-history"]
    bench_engine.main(
        ["--shape", "tiny", "--batch", "3", "--tokens", "12", "--dtype", "float32", "--eager", "--modes", *modes,
         "--out", str(out)]
    )  # fmt: skip
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["mode"] for row in rows] == modes
    assert all(len(row["step_ms"]) == 3 and row["tokens_per_second"] > 0 for row in rows)
    assert rows[0]["step_over_none"] == 1
    assert rows[2]["parted"] == rows[3]["parted"] == 0
    assert rows[2]["report"]["budget"]["undrafted"][0]
    assert rows[3]["stats"]["acceptance_rate"] > 0.9
    assert rows[3]["steps"] < rows[1]["steps"]
    assert rows[5]["parted"] == 0
    assert rows[5]["stats"]["draft_tokens"] > 0
