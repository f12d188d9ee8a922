"""Where rows of logits belong."""

from __future__ import annotations

import numpy as np
import torch

from rollout_spec.types import SamplingBatch
from rollout_spec.verify.layout import lay_out, lay_out_inputs


def rows_of(first_positions):
    return SamplingBatch(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([7, 8, 9]), first_positions)


def test_each_row_has_its_request_position_and_draft():
    drafts = torch.tensor([3, 2**40, 5], dtype=torch.int64)
    layout = lay_out(torch.tensor([2, 2, 3]), drafts, rows_of(torch.tensor([10, 20, 30])))
    assert layout.starts.tolist() == [0, 3, 4, 6]
    assert layout.request.tolist() == [0, 0, 0, 1, 2, 2]
    assert layout.temperature.tolist() == [1, 1, 1, 0, 0.5, 0.5]
    assert layout.seed.tolist() == [7, 7, 7, 8, 9, 9]
    assert layout.position.tolist() == [10, 11, 12, 20, 30, 31]
    assert layout.draft.tolist() == [3, -1, -1, -1, 5, -1], "a token that does not fit is none"


def test_positions_of_a_steps_inputs_are_those_of_each_requests_last():
    """The second request reads four tokens of its prompt."""
    cu, drafts = torch.tensor([2, 2, 3], dtype=torch.int32), torch.tensor([3, 4, 5], dtype=torch.int32)
    positions = torch.tensor([10, 11, 12, 17, 18, 19, 20, 30, 31])
    layout = lay_out_inputs(cu, drafts, rows_of(None), positions, np.array([3, 7, 9], np.int32))
    wish = lay_out(cu, drafts, rows_of(torch.tensor([10, 20, 30])))
    assert all(torch.equal(*fields) for fields in zip(layout, wish, strict=True))
    greedy = SamplingBatch(torch.zeros(3), None, None)
    assert lay_out_inputs(cu, drafts, greedy, positions, np.array([3, 7, 9], np.int32)).seed is None
