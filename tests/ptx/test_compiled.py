"""What only compiled kernels can show: addresses beyond 32 bits, NaN among lanes, bytes read, orders of blocks."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from rollout_spec.types import SamplingBatch
from rollout_spec.verify import kernel
from rollout_spec.verify.reference import lay_out
from tests.ptx import machine
from tests.ptx.machine import Counts, changed_settings
from tests.verify.batches import assert_agrees, kernel_verify

VOCAB = 4096


def far_apart(logits: torch.Tensor) -> torch.Tensor:
    """The same with rows 2 GiB apart: the stride fits 32 bits, offsets do not. Only pages that are used take memory."""
    far = torch.empty_strided(logits.shape, (2**30 + 16, 1), dtype=logits.dtype)
    return far.copy_(logits)


def verify_all_ways(verify, logits):
    """Three requests with a draft each, of which all kernels of verification run."""
    rows = SamplingBatch(temperature=torch.ones(3), seeds=torch.arange(3), positions=torch.arange(3))
    drafts = cu = torch.tensor([1, 2, 3], dtype=torch.int32)
    results = [
        verify(logits, drafts, cu, rows, logprobs_mode="raw_logprobs", hidden=torch.ones(6, 4), max_draft_tokens=1),
        verify(logits, drafts, cu, rows, method="rejection", logprobs_mode="processed_logprobs", max_draft_tokens=1),
    ]
    is_emitted = results[0].target_token_ids >= 0
    results[0] = results[0]._replace(features=results[0].features[is_emitted])
    return [field.nan_to_num().tolist() for result in results for field in result if field is not None]


@pytest.fixture(scope="module")
def near():
    return (torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()


def test_rows_far_apart(near):
    assert verify_all_ways(kernel_verify, far_apart(near)) == verify_all_ways(kernel_verify, near)


@pytest.mark.parametrize("method", ["sample", "rejection"])
def test_broken_logits_among_lanes_and_tiles(method):
    """NaN and infinities anywhere in some rows, at the size of tiles that engines use."""
    rng = np.random.default_rng(0)
    for trial in range(12):
        count, vocab_size = 6, 1100 + 517 * (trial % 2)
        logits = (rng.standard_normal((count, vocab_size)) * 3).astype(np.float32)
        for _ in range(rng.integers(1, 6)):
            values = rng.choice([np.nan, np.inf, -np.inf], p=[0.6, 0.2, 0.2])
            tokens = rng.integers(0, vocab_size, rng.integers(1, 40))
            if rng.random() < 0.5:
                tokens |= 511  # the last of a tile
            logits[rng.integers(count), tokens[tokens < vocab_size]] = values
        rows = SamplingBatch(
            temperature=rng.choice([0.0, 1.0], 3).astype(np.float32),
            seeds=rng.integers(0, 2**62, 3),
            positions=rng.integers(0, 99, 3),
        )
        batch = (logits, rng.integers(0, vocab_size, 3).astype(np.int32), np.array([1, 2, 3], np.int32), rows)
        with changed_settings(seed=trial):
            assert_agrees(kernel_verify, batch, method, "processed_logprobs", torch.bfloat16)


def counted(function) -> dict[str, Counts]:
    """What each kernel did meanwhile."""
    machine.totals.clear()
    function()
    return dict(machine.totals)


class Launches(TorchDispatchMode):
    """Operations of torch that a GPU would be asked to do: all but views and allocations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **kwargs or {})
        is_view = torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "ADInplaceOrView")
        if not is_view and not any(word in operation.name() for word in ("empty", "lift_fresh")):
            self.names.append(operation.name())
        return result


@pytest.mark.parametrize(
    ("dtype", "logprobs", "features", "least", "most"),
    [
        (torch.bfloat16, False, False, 2, 2.3),
        (torch.bfloat16, True, False, 4, 4.4),
        (torch.bfloat16, True, True, 4, 4.6),
        (torch.bfloat16, False, True, 2, 2.5),
        (torch.float32, False, False, 4, 4.5),
    ],
)
def test_bytes_per_logit_and_launches(dtype, logprobs, features, least, most, monkeypatch):
    """The scan reads each logit once, and a tile again where a token may win; ranks take another pass.

    With log-probabilities and features there are five launches, one of which is torch's.
    """
    monkeypatch.setattr(kernel, "TARGET_PROGRAMS", 8)  # 32 rows of 32,768 tokens: as with 128 rows of 151,936
    count, vocab_size = 32, 32_768
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(count, vocab_size, generator=generator) * 4).to(dtype)
    rows = SamplingBatch(torch.ones(8), torch.arange(8), torch.arange(8))
    arguments = torch.zeros(24, dtype=torch.int32), torch.arange(3, 25, 3, dtype=torch.int32), rows
    first = kernel_verify(logits, *arguments, after_difference=True)
    # The drafts are accepted, as drafts of which verification profits are.
    wish = first.target_token_ids.reshape(8, 4)[:, :3].reshape(-1).int()
    layout, mode = lay_out(arguments[1], wish, rows), "processed_logprobs" if logprobs else None
    hidden = torch.randn(count, 64, generator=generator) if features else None
    options = {"logprobs_mode": mode, "hidden": hidden, "max_draft_tokens": 3}
    with Launches() as torchs:
        found = counted(lambda: kernel.verify_rows(logits, layout, **options))
    names = ["_scan_kernel", "_accept_kernel", *(["_rank_kernel"] if logprobs else [])]
    names += ["_features_kernel"] if features else []
    assert {name: counts.launches for name, counts in found.items()} == dict.fromkeys(names, 1)
    assert torchs.names == (["aten::mm"] if features else [])
    read = 32 * sum(counts.sectors_read for counts in found.values()) / logits.numel()
    written = 32 * sum(counts.sectors_written for counts in found.values()) / logits.numel()
    assert least <= read <= most, f"{read:.2f} bytes"
    assert written < 0.05, f"{written:.2f} bytes"  # each tile's maximum is counted as a sector of 32 bytes
