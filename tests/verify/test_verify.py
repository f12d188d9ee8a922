"""The reference against plain sampling, vLLM and the distribution itself; the CPU path and the kernels against it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.noise import host as noise
from rollout_spec.types import PLACEHOLDER_TOKEN_ID, SamplingBatch, VerifyResult
from rollout_spec.verify import reference
from tests.distributions import matches_distribution
from tests.verify.batches import (
    METHODS,
    as_torch,
    batches,
    kernel_verify,
    of_fields,
    oracle,
    probabilities,
    verify_on_host,
)

RUNS = {"cpu": verify_on_host, "reference": reference.verify, "kernel": kernel_verify}
runs = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches())
def test_output_does_not_depend_on_the_drafts(batch):
    """Sample-and-compare emits a prefix of what the target samples at the drafted positions, whatever is drafted.

    A row without a distribution ends the prefix without a token.
    """
    logits, drafts, cu, rows = batch
    result = VerifyResult(*(None if values is None else values.numpy() for values in oracle(logits, drafts, cu, rows)))
    start = 0
    for request, end in enumerate(cu + np.arange(len(cu)) + 1):
        emitted = result.output_token_ids[request]
        emitted = emitted[emitted >= 0]
        for j, token in enumerate(emitted):
            alone = of_fields(rows, lambda values: values[request : request + 1])  # noqa: B023
            alone = replace(alone, positions=alone.positions + j)
            plain = oracle(logits[start + j : start + j + 1], drafts[:0], np.zeros(1, np.int32), alone)
            assert token == plain.output_token_ids[0, 0]
        last = result.target_token_ids[start + result.num_accepted[request]]
        assert len(emitted) == result.num_accepted[request] + (last != PLACEHOLDER_TOKEN_ID)
        start = end


@runs
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_log_probabilities_are_those_of_temperature_1(run, temperature):
    """Also where the temperature is not 0 but below what counts as greedy."""
    rows = SamplingBatch(torch.tensor([temperature]), torch.tensor([1]), torch.tensor([1]))
    nothing = torch.zeros(1, dtype=torch.int32)
    logits = torch.tensor([[1.0, 2.0, 0.0]])
    result = run(logits, nothing[:0], nothing, rows, logprobs_mode="processed_logprobs")
    assert result.output_token_ids.tolist() == [[1]]
    assert float(result.logprobs[0]) == pytest.approx(2 - np.log(np.exp([0, 1, 2]).sum()), abs=1e-5)


# -- the distribution ------------------------------------------------------------------------------------------------

NUM_SAMPLES = 30_000  # a difference of 0.03 in total variation is missed with 6e-6
VOCAB = 8


def target() -> np.ndarray:
    """Logits after each first token: [VOCAB + 1, VOCAB], the last row for the empty context."""
    return (np.random.default_rng(0).standard_normal((VOCAB + 1, VOCAB)) * 1.5).astype(np.float32)


def emitted_tokens(method, temperature, draft_of):
    """First and second emitted token of many requests, each with one drafted token."""
    logits = target()
    n = NUM_SAMPLES
    seeds = np.array([noise.derive_seed("statistics", i) for i in range(n)])
    positions = np.full(n, 7)
    drafts = draft_of(seeds, positions).astype(np.int32)
    stacked = np.empty((2 * n, VOCAB), np.float32)
    stacked[0::2], stacked[1::2] = logits[VOCAB], logits[drafts]
    rows = SamplingBatch(temperature=np.full(n, temperature, np.float32), seeds=seeds, positions=positions)
    result = reference.verify(
        torch.from_numpy(stacked),
        torch.from_numpy(drafts),
        torch.arange(1, n + 1, dtype=torch.int32),
        as_torch(rows),
        method=method,
    )
    return result.output_token_ids.numpy(), drafts, float(result.num_accepted.float().mean())


def is_lossless(output, drafts, temperature) -> bool:
    """First tokens follow the target; second tokens do, given that the draft was accepted."""
    logits = target()
    if not matches_distribution(output[:, 0], probabilities(logits[VOCAB], temperature=temperature)):
        return False
    for token in range(VOCAB):
        second = output[(drafts == token) & (output[:, 0] == token), 1]
        expected = probabilities(logits[token], temperature=temperature)
        if len(second) > 500 and not matches_distribution(second, expected):
            return False
    return True


HISTORY = np.array([0.3, 0.05, 0.2, 0.05, 0.1, 0.1, 0.15, 0.05])


def constant(seeds, positions):
    return np.full(len(seeds), 2)


def independent(seeds, positions):
    return np.random.default_rng(1).choice(VOCAB, len(seeds), p=HISTORY)


def coupled(seeds, positions):
    """What a drafter that knows the noise does."""
    return np.argmax(np.log(HISTORY) + noise.gumbel(seeds[:, None], positions[:, None], np.arange(VOCAB)), axis=1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.4])
@pytest.mark.parametrize("draft_of", [constant, independent, coupled])
@pytest.mark.parametrize("method", METHODS)
def test_lossless(method, draft_of, temperature):
    output, drafts, accepted = emitted_tokens(method, temperature, draft_of)
    assert is_lossless(output, drafts, temperature)
    assert 0.02 < accepted < 0.98
    if draft_of is constant:
        assert accepted == pytest.approx(probabilities(target()[VOCAB], temperature=temperature)[2], abs=0.02)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(1, 9), st.booleans())
def test_accepted_and_recovered_tokens_add_up_to_the_target(seed, vocab_size, is_certain):
    """The draft with its probability, and the residual with the probability that is left, are p."""
    rng = np.random.default_rng(seed)
    p = torch.from_numpy(rng.dirichlet(np.full(vocab_size, 0.5), 1))
    draft = torch.from_numpy(rng.integers(0, vocab_size, (1, 1)))
    if is_certain:
        p = torch.zeros_like(p).scatter(1, draft, 1.0)
    rest, accepted = reference.residual(p, draft), torch.zeros_like(p).scatter(1, draft, p.gather(1, draft))
    assert torch.allclose(accepted + (1 - accepted.sum()) * rest / rest.sum(), p, atol=1e-12)


# -- bad logits and drafts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
@pytest.mark.parametrize("method", METHODS)
@runs
def test_rows_without_a_distribution_are_not_sampled(method, mode, run):
    """Those that are broken are told from those that masks left empty."""
    logits = torch.zeros(8, 5)
    logits[::2, 1] = 50.0  # so that both methods accept the drafts
    logits[1, 3] = torch.nan
    logits[3, 3] = torch.inf
    logits[5] = -torch.inf
    rows = SamplingBatch(torch.full((4,), 0.9), torch.arange(4), torch.arange(4))
    drafts, cu = torch.ones(4, dtype=torch.int32), torch.arange(1, 5, dtype=torch.int32)
    result = run(logits, drafts, cu, rows, method=method, logprobs_mode=mode)
    assert result.num_broken_rows.tolist() == [1, 1, 0, 0]
    assert (result.output_token_ids[:, 1] == PLACEHOLDER_TOKEN_ID).tolist() == [True, True, True, False]
    assert result.num_accepted.tolist() == [1] * 4, "a bonus row without a token is no accepted draft"


@pytest.mark.parametrize("draft", [PLACEHOLDER_TOKEN_ID, 4, 2**31 - 1, 2**31 + 2, 2**32 + 2, 2 - 2**32])
@pytest.mark.parametrize("method", METHODS)
@runs
def test_drafts_outside_the_vocabulary_are_rejected(run, method, draft):
    """The token in their place is sampled from the target; a row without a distribution does not accept padding."""
    logits = torch.zeros(200, 4)
    logits[-2, 0] = torch.nan
    rows = SamplingBatch(torch.ones(100), torch.arange(100), torch.arange(100))
    result = run(logits, torch.full((100,), draft), torch.arange(1, 101), rows, method=method)
    assert (result.num_accepted == 0).all()
    assert set(result.output_token_ids[:-1, 0].tolist()) == {0, 1, 2, 3}
    assert result.output_token_ids[-1].tolist() == [PLACEHOLDER_TOKEN_ID, PLACEHOLDER_TOKEN_ID]


@runs
def test_strided_and_half_precision_logits(run):
    wide = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    rows = SamplingBatch(torch.ones(2), torch.arange(2), torch.arange(2))
    drafts, cu = torch.zeros(4, dtype=torch.int32), torch.tensor([1, 4])
    for logits in (wide[:, ::2], wide[:, ::2].bfloat16(), wide[:, ::2].half()):
        plain = run(logits.float().contiguous(), drafts, cu, rows, logprobs_mode="raw_logprobs")
        got = run(logits, drafts, cu, rows, logprobs_mode="raw_logprobs")
        assert torch.equal(got.target_token_ids, plain.target_token_ids)
        assert torch.equal(got.logprobs, plain.logprobs)
