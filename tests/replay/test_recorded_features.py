"""Recordings of what the target saw."""

from __future__ import annotations

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from rollout_spec.features.format import TOP_TOKENS, unpack
from rollout_spec.replay.simulate import replay
from rollout_spec.replay.traces import read_traces
from tests.adversaries import Adversary

TOPS = 4


def rows(*lengths, **columns):
    """Rollouts of one prompt; entry j of a token's features is 10 * token + j, in thousandths for log-probabilities."""
    tokens = [list(range(1, 1 + length)) for length in lengths]
    ids = [[10 * token + j for token in text for j in range(TOPS)] for text in tokens]
    return {
        "prompt_id": ["p"] * len(lengths),
        "sample_id": list(range(len(lengths))),
        "prompt_tokens": [[1, 2]] * len(lengths),
        "completion_tokens": tokens,
        "top_ids": ids,
        "top_logprobs": [[-i / 1000 for i in text] for text in ids],
        "signatures": [np.array([[10 * t, 10 * t + 1] for t in text], np.uint64).tobytes() for text in tokens],
        **columns,
    }


def read(tmp_path, columns):
    path = tmp_path / "rollouts.parquet"
    parquet.write_table(arrow.table({name: values for name, values in columns.items() if values is not None}), path)
    return read_traces(path)


def test_features_are_read_with_their_tokens(tmp_path):
    (problem,) = read(tmp_path, rows(3, 5, gen_runs=[[3], [2, 1, 2]]))
    for rollout in problem.rollouts:
        signatures, ids, codes = unpack(rollout.features)
        known = np.array([True, True, len(rollout.tokens) == 3, True, True])[: len(rollout.tokens)]
        assert signatures[:, 0].tolist() == (10 * rollout.tokens * known).tolist()
        for rank in range(TOP_TOKENS):
            assert ids[:, rank].tolist() == ((10 * rollout.tokens + rank) * known).tolist()
        assert (codes[known] > 0).all()
        assert not rollout.features[~known].any(), "an environment's tokens have no features"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"top_ids": None}, "belong together, and top_ids is missing"),
        ({"signatures": None}, "belong together, and signatures is missing"),
        ({"signatures": [b"x" * 16]}, "do not fit its 3 tokens"),
        ({"signatures": ["x" * 48]}, "column signatures must hold bytes, got string"),
        ({"top_ids": [[1] * 12 + [2]]}, "do not fit its 3 tokens"),
        ({"top_ids": [[1] * 6], "top_logprobs": [[0.0] * 6]}, "do not fit its 3 tokens"),
        ({"top_ids": [[-1] * 12]}, "must hold tokens in"),
        ({"top_ids": [3]}, "column top_ids must hold lists of integers, got int64"),
        ({"top_logprobs": [[1] * 12]}, "column top_logprobs must hold lists of floating-point numbers"),
        ({"top_logprobs": [[0.0] * 11 + [None]]}, "column top_logprobs holds a null among the values of row 0"),
    ],
)
def test_bad_features_are_refused(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, rows(3, **changed))


@pytest.mark.parametrize("wants", [False, True])
def test_the_drafter_is_shown_them_with_every_token(tmp_path, wants):
    shown = []

    class Listener(Adversary):
        wants_features = wants

        def extend(self, req_id, new_token_ids, *features):
            for (given,) in [features] if features else []:
                shown.append(unpack(given)[0][:, 0].tolist() == [10 * int(t) for t in new_token_ids])
            assert len(features) == wants
            super().extend(req_id, new_token_ids)

    problems = read(tmp_path, rows(9, 12, epoch=[0, 1]))
    replay(problems, Listener, "epoch", num_speculative_tokens=3)
    assert all(shown)
    assert bool(shown) == wants
