"""Log-probabilities and masks as RL frameworks ask for them: scored by the verifier, not by vLLM's slower code."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import torch

from rollout_spec import engine_kwargs
from rollout_spec.integrations.vllm.sampling import keep_broken, scored_tokens, truncate, verifier_scores
from rollout_spec.types import SamplingBatch
from rollout_spec.verify.api import verify
from rollout_spec.verify.reference import process
from tests.integrations.engines import (
    PLAIN,
    assert_same,
    build,
    every_draft,
    generate,
    mixed_params,
    prompts_of,
    runner_of,
    verify_all,
)


@pytest.mark.parametrize(
    ("mode", "num_logprobs", "is_processed", "here"),
    [
        ("processed_logprobs", 0, True, True),
        ("processed_logprobs", 1, True, True),
        ("processed_logprobs", 2, False, False),
        ("processed_logprobs", None, False, False),
        ("processed_logprobs", -1, False, False),
        ("raw_logprobs", 1, False, True),
        ("raw_logprobs", 1, True, False),
        ("processed_logits", 1, False, False),
    ],
)
def test_what_the_verifier_scores(mode, num_logprobs, is_processed, here):
    assert verifier_scores(mode, num_logprobs, is_processed) is here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_the_most_probable_token_is_scored_beside_the_sampled_one(dtype, mode):
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(6, 50, generator=generator)).to(dtype)
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.3, 0.0, 2.0])
    rows = SamplingBatch(temperature, torch.arange(6), torch.arange(6))
    empty, none = torch.empty(0, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    result = verify(logits, empty, none, rows, logprobs_mode=mode)
    tokens, logprobs = scored_tokens(result, logits, temperature if mode == "processed_logprobs" else None, 1)
    assert tokens.tolist() == [[int(a), int(b)] for a, b in zip(result.target_token_ids, logits.argmax(1), strict=True)]
    scale = torch.where(temperature > 0, temperature, 1.0)[:, None] if mode == "processed_logprobs" else 1.0
    scores = logits.float() / scale
    torch.testing.assert_close(logprobs, scores.log_softmax(1).gather(1, tokens), atol=2e-5, rtol=1e-5)
    alone, its_logprob = scored_tokens(result, logits, None, 0)
    assert torch.equal(alone[:, 0], tokens[:, 0])
    assert torch.equal(its_logprob[:, 0], logprobs[:, 0])


@pytest.mark.parametrize("names", [(), ("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p", "min_p")])
def test_vllms_truncation_is_the_references(names):
    """Requests in any order of rows, greedy ones among them, whose limits vLLM has reset."""
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(30, 50, generator=generator)
    limits = {
        "top_k": torch.tensor([50, 5, 12], dtype=torch.int32),
        "top_p": torch.tensor([1.0, 0.8, 1.0]),
        "min_p": torch.tensor([0.0, 0.05, 0.2]),
    }
    rows = SamplingBatch(torch.tensor([0.0, 0.7, 1.3]), torch.arange(3), None, **{name: limits[name] for name in names})
    request = torch.arange(30, dtype=torch.int32) % 3
    ours = process(logits, rows, request.long())
    torch.testing.assert_close(truncate(logits.clone(), rows, request), ours, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_row_stays_so_whatever_the_processors_leave(bad):
    logits = torch.zeros(4, 5, dtype=torch.bfloat16)
    logits[1, 3], logits[2], logits[3, 3] = bad, -torch.inf, -torch.inf
    processed = keep_broken(logits.float().nan_to_num(posinf=0.0), logits)
    assert processed.isnan().any(1).tolist() == [False, True, False, False]


def count_calls(monkeypatch, owner, name):
    """A list that grows by one number per call: how many have been made."""
    calls, original = [], getattr(owner, name)

    def count(*args, **kwargs):
        calls.append(len(calls))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, count)
    return calls


@pytest.mark.engine
def test_what_frameworks_send_stays_on_the_fast_path(tiny_model, reference_model, monkeypatch):
    """The most probable token besides (SkyRL, open-instruct), and at least one token (OpenRLHF)."""
    options = verify_all(**every_draft(4))
    on, off = build(tiny_model, **options), build(tiny_model, **engine_kwargs(speculation=False))
    stock = build(tiny_model)
    runner = runner_of(on)
    gathered = count_calls(monkeypatch, runner.sampler, "gather_logprobs")
    processed = count_calls(monkeypatch, runner.rollout_spec, "_process")
    params = mixed_params(8, 4, max_tokens=40, logprobs=1, min_tokens=1, ignore_eos=False, **PLAIN)
    for _ in range(2):
        ours = generate(on, params)
    assert not gathered
    assert 1 <= len(processed) <= 4, "in steps in which a request says its first token"
    assert_same(ours, generate(off, params), prompts_of(params), params, reference_model)
    # Greedy rollouts have stock vLLM's tokens and log-probabilities, those of the most probable tokens included.
    greedy = mixed_params(4, 5, temperature=0.0, max_tokens=30, logprobs=1, min_tokens=1, **PLAIN)
    assert_same(generate(on, greedy), generate(stock, greedy), prompts_of(greedy), greedy, reference_model)


@pytest.mark.engine
def test_minimum_lengths_hold_and_then_cost_nothing(tiny_model, monkeypatch):
    llm = build(tiny_model, **verify_all(**every_draft(4)))
    off = build(tiny_model, **engine_kwargs(speculation=False))
    steps = count_calls(monkeypatch, runner_of(llm).rollout_spec, "sample")
    processed = count_calls(monkeypatch, runner_of(llm).rollout_spec, "_process")
    params = mixed_params(4, 6, max_tokens=60, min_tokens=12, stop_token_ids=list(range(4, 20)), logprobs=0)
    ours = generate(llm, params)
    assert [list(o.token_ids) for o in ours] == [list(o.token_ids) for o in generate(off, params)]
    lengths = [len(output.token_ids) for output in ours]
    assert min(lengths) >= 12
    longer = mixed_params(4, 6, max_tokens=60, min_tokens=2, ignore_eos=True, **PLAIN)
    del steps[:], processed[:]
    generate(llm, longer)
    assert 0 < len(processed) <= 2 < len(steps)
