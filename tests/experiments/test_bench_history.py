"""The benchmark of history runs, and its gate holds."""

from __future__ import annotations

import json

import bench_history


def test_import_of_token_ids_is_measured(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    bench_history.main(["--only", "import", "--tokens", "20000", "--repetitions", "1", "--out", str(out)])
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["benchmark"], row["measurement"], row["tokens"]) == ("history", "import", 20_000)
    assert row["bytes_per_token"] > 0
    assert json.loads(capsys.readouterr().out).items() <= row.items()
