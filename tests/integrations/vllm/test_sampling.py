"""Log-probabilities and masks as RL frameworks ask for them: scored by the verifier, not by vLLM's slower code."""

import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams

from rollout_spec.integrations.vllm.sampling import keep_broken, needs_processing, scored_tokens, truncate
from rollout_spec.types import SamplingBatch
from tests.verify.batches import truncated, verify_on_host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_the_most_probable_token_is_scored_beside_the_sampled_one(dtype, mode):
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(6, 50, generator=generator)).to(dtype)
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.3, 0.0, 2.0])
    rows = SamplingBatch(temperature, torch.arange(6), torch.arange(6))
    empty, none = torch.empty(0, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    result = verify_on_host(logits, empty, none, rows, logprobs_mode=mode)
    tokens, logprobs = scored_tokens(result, logits, temperature if mode == "processed_logprobs" else None, 1)
    assert tokens.tolist() == [[int(a), int(b)] for a, b in zip(result.target_token_ids, logits.argmax(1), strict=True)]
    scale = torch.where(temperature > 0, temperature, 1.0)[:, None] if mode == "processed_logprobs" else 1.0
    scores = logits.float() / scale
    torch.testing.assert_close(logprobs, scores.log_softmax(1).gather(1, tokens), atol=2e-5, rtol=1e-5)
    alone, its_logprob = scored_tokens(result, logits, None, 0)
    assert torch.equal(alone[:, 0], tokens[:, 0])
    assert torch.equal(its_logprob[:, 0], logprobs[:, 0])


@pytest.mark.parametrize("names", [(), ("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p", "min_p")])
def test_truncation(names):
    """Temperature, min-p, top-k, top-p, as vLLM orders them. Requests in any order of rows, greedy ones among them."""
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(30, 50, generator=generator)
    limits = {
        "top_k": torch.tensor([50, 5, 12], dtype=torch.int32),
        "top_p": torch.tensor([1.0, 0.8, 1.0]),
        "min_p": torch.tensor([0.0, 0.05, 0.2]),
    }
    temperature, request = torch.tensor([0.0, 0.7, 1.3]), torch.arange(30, dtype=torch.int32) % 3
    found = truncate(logits.clone(), temperature, request, **{name: limits[name] for name in names})
    for row, i in enumerate(request.tolist()):
        asked = {name: limits[name][i].item() for name in names} if i else {}
        assert torch.equal(found[row], truncated(logits[row], temperature[i] if i else 1.0, **asked))


CHANGES_LOGITS = {
    "presence_penalty": 0.1, "frequency_penalty": -0.1, "repetition_penalty": 1.1, "bad_words": ["no"],
    "allowed_token_ids": [3], "logit_bias": {3: 1.0}, "thinking_token_budget": 0, "top_k": 5,
    "top_p": 0.9, "min_p": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES_LOGITS)
def test_whatever_changes_logits_is_processed_also_alone(name):
    """One request that needs it is enough for its batch, so a batch of several parameters would hide a missing one."""
    params = SamplingParams(**{name: CHANGES_LOGITS[name]})
    assert needs_processing(params)
    assert not needs_processing(SamplingParams())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_row_stays_so_whatever_the_processors_leave(bad):
    logits = torch.zeros(4, 5, dtype=torch.bfloat16)
    logits[1, 3], logits[2], logits[3, 3] = bad, -torch.inf, -torch.inf
    processed = keep_broken(logits.float().nan_to_num(posinf=0.0), logits)
    assert processed.isnan().any(1).tolist() == [False, True, False, False]
