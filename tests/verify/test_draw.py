"""Drafts that are drawn with the target's noise."""

from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from rollout_spec.noise import host as noise
from rollout_spec.verify import kernel
from rollout_spec.verify.api import draw

VOCAB = 50
both = pytest.mark.parametrize("draw_tokens", [draw, partial(draw, verify_rows=kernel.verify_rows)])


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_token_is_the_targets_where_the_logits_agree(draw_tokens, dtype):
    logits = (3 * torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))).to(dtype)
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.3, 1.0])
    seeds, positions = torch.tensor([1, 2, -3, 2**62, 5]), torch.tensor([0, 7, 9, 2**20, 3])
    tokens, probabilities = draw_tokens(logits, temperature, seeds, positions)
    for i, t in enumerate(temperature.tolist()):
        row = logits[i].double().numpy()
        scores = row if t == 0 else row / t + noise.gumbel(int(seeds[i]), int(positions[i]), np.arange(VOCAB))
        assert int(tokens[i]) == int(np.argmax(scores))
        expected = (logits[i].double() / (t or 1.0)).softmax(-1)[int(tokens[i])]
        assert float(probabilities[i]) == pytest.approx(float(expected), rel=1e-3)


@both
def test_broken_logits_give_token_0_with_probability_0(draw_tokens):
    logits = torch.zeros(3, VOCAB)
    logits[0] = float("nan")
    logits[1] = float("-inf")
    tokens, probabilities = draw_tokens(logits, torch.ones(3), torch.arange(3), torch.arange(3))
    assert tokens[:2].tolist() == [0, 0]
    assert probabilities[:2].tolist() == [0.0, 0.0]
    assert float(probabilities[2]) == pytest.approx(1 / VOCAB)
