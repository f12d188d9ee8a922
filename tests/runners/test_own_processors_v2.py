"""Logits processors of a user's own, which V2 applies and V1 refuses."""

import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from tests.integrations.engines import DEVICE, build, generate, stats_of, verify_all


class NoOddTokens(LogitsProcessor):
    """Masks every other token of every request."""

    def apply(self, logits, ctx):
        logits[:, 1::2] = -torch.inf
        return logits


def test_they_are_applied_to_drafted_positions_too(tiny_model):
    own = {"logits_processors": [f"{__name__}:NoOddTokens"]}
    stock = build(tiny_model, **own)
    ours = build(tiny_model, **own, **verify_all(num_speculative_tokens=3, **DEVICE))
    params = [SamplingParams(seed=seed, max_tokens=20, ignore_eos=True) for seed in range(6)]
    for _ in range(2):  # the second time there is history
        expected, found = (
            [list(output.token_ids) for output in generate(llm, params, [[1, 4, 9]] * 6)] for llm in (stock, ours)
        )
        assert found == expected
        assert not any(token % 2 for tokens in found for token in tokens)
    assert stats_of(ours)["accepted_tokens"] > 20
