"""How a step's requests are divided where their logits are processed some at a time."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from rollout_spec.integrations.vllm.portions import portions


@pytest.mark.parametrize(
    ("starts", "max_rows", "expected"),
    [
        ([0, 3, 5, 9, 10], 5, [(0, 2), (2, 4)]),
        ([0, 3, 5, 9, 10], 100, [(0, 4)]),
        ([0, 3, 5, 9, 10], 1, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([0, 3], 0, [(0, 1)]),
    ],
)
def test_portions_have_whole_requests_and_no_more_rows_than_they_may(starts, max_rows, expected):
    assert list(portions(starts, max_rows)) == expected
