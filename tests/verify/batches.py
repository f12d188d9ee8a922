"""Random batches for verifiers, and what it means to agree with the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from rollout_spec.types import PLACEHOLDER_TOKEN_ID, SamplingBatch
from rollout_spec.verify import reference
from rollout_spec.verify.api import verify_rows
from rollout_spec.verify.reference import lay_out

LOGPROBS_MODES = (None, "raw_logprobs", "processed_logprobs")
METHODS = ("sample", "rejection")


def as_torch(rows: SamplingBatch) -> SamplingBatch:
    return of_fields(rows, torch.from_numpy)


def of_fields(rows: SamplingBatch, change: Callable[[Any], Any]) -> SamplingBatch:
    """Each field changed."""
    return SamplingBatch(*map(change, (rows.temperature, rows.seeds, rows.positions)))


def oracle(logits, drafts, cu, rows, **options):
    """The reference's result for NumPy arrays."""
    return reference.verify(*map(torch.from_numpy, (logits, drafts, cu)), as_torch(rows), **options)


def right_drafts(logits, cu, rows):
    """int32 [D]: what the target samples at the drafted positions."""
    targets = oracle(
        logits, np.zeros(len(logits) - len(cu), np.int32), cu, rows, after_difference=True
    ).target_token_ids
    return np.delete(targets.numpy(), cu + np.arange(len(cu))).astype(np.int32)


def truncated(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Logits [V] over the temperature, -inf where tokens are cut off: min-p, then top-k, then top-p, as in vLLM."""
    logits = logits / temperature
    order = logits.sort(descending=True, stable=True).indices
    if min_p > 0:
        logits[logits < logits.max() + np.log(min_p)] = -torch.inf
    if top_k > 0:
        logits[order[top_k:]] = -torch.inf
    if top_p < 1:
        probs = logits.softmax(0)[order]
        logits[order[probs.cumsum(0) - probs >= top_p]] = -torch.inf
    return logits


def probabilities(logits, **parameters):
    """float64 [V] of one row, float32 [V]; parameters as of `truncated`."""
    return truncated(torch.from_numpy(logits), **parameters).double().softmax(0).numpy()


def on_batches(verify_rows):
    """A `verify_rows` with the arguments of `reference.verify`."""

    def verify(logits, drafts, cu, rows, **options):
        if "max_draft_tokens" not in options:
            options["max_draft_tokens"] = int(torch.diff(cu, prepend=cu.new_zeros(1)).max())
        return verify_rows(logits, lay_out(cu, drafts, rows), **options)

    return verify


def kernel_verify(*args, **options):
    """The kernels, with the arguments of `reference.verify`, also on the CPU."""
    pytest.importorskip("triton")
    from rollout_spec.verify import kernel

    return on_batches(kernel.verify_rows)(*args, **options)


verify_on_host = on_batches(verify_rows)
verifiers = pytest.mark.parametrize("verify", [verify_on_host, kernel_verify], ids=["cpu", "kernel"])


@st.composite
def batches(draw):
    """(logits [N, V], drafts [D], cumulative draft lengths [B], rows)."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    vocab_size = draw(st.integers(1, 40))
    num_requests, num_drafts = len(lengths), sum(lengths)
    logits = (rng.standard_normal((num_drafts + num_requests, vocab_size)) * 3).astype(np.float32)
    if draw(st.booleans()):  # ties and removed tokens
        logits = np.round(logits)
        logits[rng.random(logits.shape) < rng.choice([0.2, 0.9], (len(logits), 1))] = -np.inf
        logits[:, 0] = 0.0

    rows = SamplingBatch(
        temperature=rng.choice([0.0, 1e-6, 0.5, 1.0, 1.7], num_requests).astype(np.float32),
        seeds=rng.integers(-(2**63), 2**63 - 1, num_requests),
        positions=rng.integers(0, 10_000, num_requests),
    )
    cu = np.cumsum(lengths).astype(np.int32)
    drafts = rng.integers(0, vocab_size, num_drafts).astype(np.int32)
    is_right = rng.random(num_drafts) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    drafts = np.where(is_right, right_drafts(logits, cu, rows), drafts)
    if draw(st.booleans()):  # rows without a distribution
        for _ in range(draw(st.integers(1, 3))):
            logits[rng.integers(len(logits)), rng.integers(vocab_size)] = rng.choice([np.nan, np.inf])
        logits[rng.integers(len(logits))] = -np.inf
    if num_drafts and draw(st.booleans()):  # padding, and ids of another tokenizer
        drafts[rng.integers(num_drafts)] = draw(st.sampled_from([PLACEHOLDER_TOKEN_ID, vocab_size]))
    return logits, drafts, cu, rows


def assert_agrees(
    run, batch, method: str, mode: str | None, dtype: torch.dtype = torch.float32, *, after_difference: bool = False
) -> None:
    """`run`, a verifier with the arguments of `reference.verify`, gives the reference's result."""
    logits, drafts, cu, rows = batch
    options = {"method": method, "logprobs_mode": mode, "after_difference": after_difference}
    given = torch.from_numpy(logits).to(dtype, copy=True)
    seen = given.float().numpy().copy()
    expected = oracle(seen, drafts, cu, rows, **options)
    got = run(given, torch.from_numpy(drafts), torch.from_numpy(cu), as_torch(rows), **options)
    np.testing.assert_array_equal(given.float().numpy(), seen, "logits were changed")
    for name in ("output_token_ids", "num_accepted", "target_token_ids", "num_broken_rows"):
        np.testing.assert_array_equal(getattr(got, name).numpy(), getattr(expected, name).numpy(), name)
    if mode is None:
        assert got.logprobs is None
        assert got.ranks is None
        return
    layout = lay_out(torch.from_numpy(cu), torch.from_numpy(drafts), as_torch(rows))
    emitted = reference.is_emitted(layout, expected.num_accepted) & (expected.target_token_ids >= 0)
    np.testing.assert_allclose(got.logprobs[emitted].numpy(), expected.logprobs[emitted].numpy(), atol=2e-5)
    np.testing.assert_array_equal(got.ranks[emitted].numpy(), expected.ranks[emitted].numpy())
