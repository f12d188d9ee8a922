"""How a step's requests are divided where their logits are processed some at a time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from rollout_spec.integrations.vllm import portions as module
from rollout_spec.integrations.vllm.portions import portions, verify_in_portions
from rollout_spec.types import SamplingBatch
from rollout_spec.verify import cpu
from rollout_spec.verify.layout import lay_out


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


@pytest.mark.parametrize("max_rows", [1, 7, 12, 100])
@pytest.mark.parametrize("mode", [None, "raw_logprobs", "processed_logprobs"])
def test_the_result_is_that_of_the_whole_step(mode, max_rows, monkeypatch):
    """Of requests with drafts of different lengths, each with parameters of its own."""
    rng, vocab_size, lengths = np.random.default_rng(0), 50, np.array([4, 0, 2, 4, 1, 0, 3])
    num_rows, size = int(lengths.sum()) + lengths.size, lengths.size
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab_size), np.float32) * 2)
    rows = SamplingBatch(
        torch.from_numpy(rng.choice([0.0, 0.7, 1.3], size).astype(np.float32)),
        torch.from_numpy(rng.integers(0, 2**62, size)),
        torch.arange(size) + 5,
        top_k=torch.from_numpy(rng.choice([0, 5], size).astype(np.int32)),
        top_p=torch.full((size,), 0.9),
    )
    cu = torch.from_numpy(lengths.cumsum())
    nothing = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    options = {"logprobs_mode": mode, "max_draft_tokens": 4}
    wish = cpu.verify_rows(logits, lay_out(cu, nothing, rows), rows, after_difference=True, **options).target_token_ids
    starts = np.concatenate(([0], np.cumsum(lengths + 1)))
    layout = lay_out(cu, torch.from_numpy(np.delete(wish.numpy(), starts[1:] - 1)), rows)
    index = torch.arange(num_rows)
    batch = SimpleNamespace(
        cu_num_logits_np=starts, input_ids=index, logits_indices=index, expanded_idx_mapping=layout.request,
        expanded_local_pos=index - layout.starts[layout.request.long()], idx_mapping=torch.arange(size),
        idx_mapping_np=np.arange(size), seq_lens_cpu_upper_bound=torch.arange(size),
    )  # fmt: skip
    hidden, seen = torch.from_numpy(rng.standard_normal((num_rows, 8), np.float32)), []

    def verify(logits, batch, layout, hidden):
        assert batch.expanded_idx_mapping.tolist() == layout.request.tolist()
        assert batch.idx_mapping.tolist() == batch.idx_mapping_np.tolist() == layout.request.unique().tolist()
        seen.append(len(logits))
        return cpu.verify_rows(logits, layout, rows, hidden=hidden, **options)

    monkeypatch.setattr(module, "MAX_PROCESSED", max_rows * vocab_size)
    found = verify_in_portions(logits, batch, layout, hidden, verify)
    assert sum(seen) == num_rows
    assert max(seen) <= max(max_rows, 5)
    for ours, whole in zip(found, verify(logits, batch, layout, hidden), strict=True):
        assert (ours is None and whole is None) or torch.equal(ours, whole)
    assert int(found.num_accepted.sum()) == lengths.sum()
