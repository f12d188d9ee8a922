"""The benchmark of history runs, and its gate holds."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from experiments.history import bench_history


def test_import_of_token_ids_is_measured(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    bench_history.main(["--only", "import", "--tokens", "20000", "--repetitions", "1", "--out", str(out)])
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["benchmark"], row["measurement"], row["tokens"]) == ("history", "import", 20_000)
    assert row["bytes_per_token"] > 0
    assert json.loads(capsys.readouterr().out).items() <= row.items()


def test_starting_is_measured(tmp_path):
    out = tmp_path / "rows.jsonl"
    bench_history.main(["--only", "start", "--tokens", "5000", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    # How close to these depends on Python's standard library, whose files are the texts.
    sizes = {(min((5, 50), key=lambda size: abs(row["tokens"] / 1000 - size)), row["features"]) for row in rows}
    assert sizes == {(5, False), (5, True), (50, False), (50, True)}
    assert all(min(abs(row["tokens"] - size) for size in (5000, 50000)) < 1100 for row in rows)
    assert {row["drafter"] for row in rows} == {"history", "suffix", "ngram", "device"}
    assert all(row["disk_bytes_per_token"] > (30 if row["features"] else 0) for row in rows)
