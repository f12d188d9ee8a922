"""The benchmark of what drafts gain, on a recording; the gate is in the script."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from experiments.drafting import bench_features
from rollout_spec.replay.traces import Problem, Rollout

RECORDED = Path(__file__).parents[2] / "experiments/results/real_policy/samples-step0040-t1.parquet"


def test_variants_are_measured(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    sizes = ["--history", "16", "--prompts", "4", "--tests", "4", "-k", "8"]
    bench_features.main([str(RECORDED), *sizes, "--drafters", "history", "device", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["drafter"] for row in rows] == ["history", "device"]
    for row in rows:
        rates = row["tokens_per_step"]
        assert rates["features"] > rates["words"] > 1
        ratio, low, high = row["gains"]["features / words"]
        assert low <= ratio <= high
        assert ratio == pytest.approx(rates["features"] / rates["words"])
    assert rows[0]["tokens_per_step"]["tree"] == rows[1]["tokens_per_step"]["tree"]
    assert capsys.readouterr().out.count("\n") == 4


def test_a_recording_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="too few for --history 70 and --tests 8"):
        bench_features.recorded_problems(RECORDED, 1, 70, 8)


def test_the_tree_takes_the_branch_that_is_right():
    prompt = np.array([9], np.int32)

    def rollout(epoch, *tokens):
        return Rollout(0, epoch, prompt, np.array(tokens, np.int32), (len(tokens),), 0)

    history = [rollout(0, 1, 2, 3, 4), rollout(0, 1, 2, 3, 4), rollout(0, 1, 5, 6, 7)]
    problem = Problem("a", [*history, rollout(1, 1, 5, 6, 7)])
    # After 1 come 2 (twice) and 5: the nodes are 2, 3, 4, 5, 6, 7, and the target's own token follows those accepted.
    assert [bench_features.tree_counts(problem, k) for k in (3, 4, 5)] == [(3, 2), (3, 2), (3, 1)]
