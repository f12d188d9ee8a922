"""What is kept of the target's states and distributions."""

import numpy as np
import pytest
import torch

from rollout_spec.features import (
    FEATURE_WORDS,
    LOGPROB_STEP,
    MAX_CODE,
    TOP_TOKENS,
    decoded_probabilities,
    encode_logprobs,
    signature_matrix,
    unpack,
)
from rollout_spec.types import SamplingBatch
from rollout_spec.verify.cpu import CHUNK
from tests.verify.batches import verifiers, verify_on_host

MATRIX = (1.1176220178604126, -1.3871248960494995, -0.6902609467506409, 2.365145683288574)
"""The first entries of `signature_matrix(2)`: signatures that were kept must keep their meaning."""


def bits(signatures):
    """bool [T, SIGNATURE_BITS], bit 0 of word 0 first."""
    return np.unpackbits(signatures.view(np.uint8), axis=1, bitorder="little").astype(bool)


def computed(verify, hidden, logits, temperature):
    """Features of rows that each have a request of their own."""
    size = len(hidden)
    zeros = torch.zeros(size, dtype=torch.int64)
    rows = SamplingBatch(temperature, zeros, zeros)
    nothing = torch.zeros(0, dtype=torch.int32)
    packed = verify(logits, nothing, zeros.int(), rows, hidden=hidden).features
    assert packed.shape == (size, FEATURE_WORDS)
    assert packed.dtype == torch.int64
    return unpack(packed.numpy())


@verifiers
@pytest.mark.parametrize("vocab_size", [5, CHUNK, 50, 5 * CHUNK, 1000, 2000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_those_of_plain_arithmetic(verify, dtype, vocab_size):
    rng = np.random.default_rng(0)
    hidden = torch.from_numpy(rng.standard_normal((5, 24), np.float32)).to(dtype)
    logits = torch.from_numpy(3 * rng.standard_normal((5, vocab_size), np.float32)).to(dtype)
    temperature = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0])
    signatures, ids, codes = computed(verify, hidden, logits, temperature)

    assert (bits(signatures) == (hidden.float().numpy() @ signature_matrix(24) > 0)).all()
    divisor = np.array([1.0, 0.5, 1.0, 2.0, 1.0])[:, None]
    scaled = logits.double().numpy() / divisor
    assert np.take_along_axis(scaled, ids, 1) == pytest.approx(-np.sort(-scaled, 1)[:, :TOP_TOKENS])  # there are ties
    for row in range(5):
        total = np.exp(scaled[row]).sum()
        if verify is verify_on_host:  # of other chunks only the most probable token is counted
            counted = np.full(-(-vocab_size // CHUNK), -np.inf)
            np.maximum.at(counted, np.arange(vocab_size) // CHUNK, scaled[row])
            top_chunks = np.argsort(-counted)[:TOP_TOKENS]
            inside = np.isin(np.arange(vocab_size) // CHUNK, top_chunks)
            counted[top_chunks] = -np.inf
            total = np.exp(scaled[row][inside]).sum() + np.exp(counted).sum()
        logprobs = scaled[row][ids[row]] - np.log(total)
        assert LOGPROB_STEP * (1.0 - codes[row]) == pytest.approx(np.maximum(logprobs, -15.9), abs=0.51 * LOGPROB_STEP)


@verifiers
@pytest.mark.parametrize("vocab_size", [70, 600, 1100])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_most_probable_tokens_are_kept_wherever_they_are(verify, place, vocab_size):
    """Also in the last chunk or tile, which is shorter than the others."""
    ids = [3, vocab_size // 2, 66]
    ids.insert(place, vocab_size - 1)
    logits = torch.zeros(1, vocab_size)
    logits[0, ids] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    _, found, _ = computed(verify, torch.ones(1, 4), logits, torch.ones(1))
    assert found[0].tolist() == ids[:TOP_TOKENS]


@verifiers
def test_masked_tokens_are_not_kept(verify):
    _, ids, codes = computed(
        verify, torch.ones(1, 4), torch.tensor([[-float("inf"), 0.0, *[-float("inf")] * (CHUNK - 2)]]), torch.ones(1)
    )
    assert ids[0].tolist() == [1, 0, 0]
    assert codes.tolist() == [[1, 0, 0]]


@verifiers
def test_small_vocabularies_have_fewer_tokens_to_keep(verify):
    _, _, codes = computed(verify, torch.ones(1, 4), torch.zeros(1, 2), torch.ones(1))
    assert codes[0].tolist() == [1 + round(np.log(2) / LOGPROB_STEP)] * 2 + [0] * (TOP_TOKENS - 2)


@verifiers
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_a_distribution_leaves_its_neighbours_alone(verify, bad):
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.standard_normal((8, 1100), np.float32))
    broken, hidden = logits.clone(), torch.ones(8, 4)
    broken[::2, :: 1 if bad == -np.inf else 7] = bad
    expected, found = (computed(verify, hidden, each, torch.ones(8)) for each in (logits, broken))
    for one, other in zip(expected, found, strict=True):
        assert (one[1::2] == other[1::2]).all()
    assert not found[2][::2].any()


def test_ratio_tests_have_the_same_features():
    """Of emitted rows, which the others need not have."""
    rng = np.random.default_rng(4)
    logits, hidden = torch.from_numpy(rng.standard_normal((6, 300), np.float32)), torch.ones(6, 4)
    cu, drafts, zeros = torch.tensor([2, 3, 3]), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    rows = SamplingBatch(torch.ones(3), zeros, zeros)
    first = torch.tensor([0, 3, 5])
    found = [
        verify_on_host(logits, drafts, cu, rows, method=method, hidden=hidden).features[first]
        for method in ("sample", "rejection")
    ]
    assert torch.equal(*found)


def test_the_matrix_is_the_same_in_every_process():
    assert signature_matrix(2)[:, :2].ravel().tolist() == pytest.approx(MATRIX, abs=1e-6)


def test_log_probabilities_survive_in_a_byte():
    logprobs = -np.linspace(0, 15.8, 400)
    codes = encode_logprobs(logprobs)
    assert np.log(decoded_probabilities()[codes]) == pytest.approx(logprobs, abs=0.51 * LOGPROB_STEP)
    assert encode_logprobs(np.array([-20.0, -np.inf, 1e-9])).tolist() == [MAX_CODE, MAX_CODE, 1]
    assert decoded_probabilities()[0] == 0
