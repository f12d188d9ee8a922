"""Triton compiles a kernel for each kind of arguments: while an engine serves, rollouts would wait for that."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from rollout_spec import RolloutSpecConfig
from rollout_spec.integrations.vllm.warm_up import warm_up_kernels
from rollout_spec.types import SamplingBatch
from rollout_spec.verify import kernel
from tests.launches import recorded_variants
from tests.verify.batches import kernel_verify

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the emulator records launches")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Each is emulated, however little it does."""
    monkeypatch.setattr(kernel, "ROWS", 8)
    monkeypatch.setattr(kernel, "BLOCK", 32)  # five splits of a row at most, fewer where there are more rows
    monkeypatch.setattr(kernel, "TARGET_PROGRAMS", 8)


def random_call(rng, config, vocab_size, dtype, hidden_size):
    """A step of an engine: any requests, drafts up to K or none at all, some options."""
    size, k = int(rng.integers(1, 6)), config.num_speculative_tokens
    lengths = rng.integers(0, k + 1, size) * rng.integers(0, 2)
    num_rows = int(lengths.sum()) + size
    if rng.integers(2):
        logits = torch.zeros(num_rows, -(-vocab_size // 64) * 64, dtype=dtype)[:, :vocab_size]
    else:  # processed by vLLM
        logits = torch.zeros(num_rows, vocab_size)
    rows = SamplingBatch(
        torch.from_numpy(rng.choice([0.0, 1.0], size).astype(np.float32)),
        torch.from_numpy(rng.integers(0, 9, size)),
        torch.from_numpy(rng.integers(0, 9, size)),
    )
    kernel_verify(
        logits,
        torch.zeros(int(lengths.sum()), dtype=torch.int32),
        torch.from_numpy(lengths.cumsum().astype(np.int32)),
        rows,
        method=config.verify,
        logprobs_mode=[None, "processed_logprobs"][rng.integers(2)],
        hidden=torch.zeros(num_rows, hidden_size, dtype=dtype) if hidden_size else None,
        after_difference=bool(rng.integers(2)),
        max_draft_tokens=k if lengths.any() else 0,
    )


@pytest.mark.parametrize("method", ["sample", "rejection"])
@pytest.mark.parametrize(("vocab_size", "hidden_size"), [(128, 0), (131, 0), (131, 16)])
def test_the_warm_up_compiles_every_variant_that_an_engine_launches(method, vocab_size, hidden_size):
    """What is missing would be compiled while rollouts wait."""
    config = RolloutSpecConfig(num_speculative_tokens=3, verify=method)
    with recorded_variants() as compiled:
        warm_up_kernels(
            config,
            vocab_size=vocab_size,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            logprobs_mode="processed_logprobs",
            hidden=(hidden_size, torch.bfloat16) if hidden_size else None,
        )
    rng = np.random.default_rng(0)
    with recorded_variants() as launched:
        for _ in range(30):
            random_call(rng, config, vocab_size, torch.bfloat16, hidden_size)
    assert launched <= compiled
    assert len(launched) > 0.8 * len(compiled)
