"""The Triton kernels, compiled and emulated, and the CPU path against the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl

from rollout_spec.noise import host as noise
from rollout_spec.noise import triton as noise_triton
from rollout_spec.noise.torch import uniform32
from rollout_spec.noise.triton import finish_hash, gumbel, row_state, token_key, unfinished_hash
from rollout_spec.types import SamplingBatch
from rollout_spec.verify import kernel, reference
from tests.verify.batches import (
    LOGPROBS_MODES,
    METHODS,
    assert_agrees,
    batches,
    kernel_verify,
    oracle,
    right_drafts,
    verifiers,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled: experiments/check_gpu.py")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles per split and several splits per row, also in vocabularies that a test can afford."""
    monkeypatch.setattr(kernel, "ROWS", 8)
    monkeypatch.setattr(kernel, "BLOCK", 16)
    monkeypatch.setattr(kernel, "TARGET_PROGRAMS", 4)
    monkeypatch.setattr(kernel, "MAX_JOINED", 8)
    empty = torch.empty
    poison = {torch.int32: -77, torch.int64: -77, torch.float32: float("nan")}

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(poison[out.dtype]) if out.dtype in poison else out

    monkeypatch.setattr(torch, "empty", poisoned)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batches(),
    st.sampled_from(METHODS),
    st.sampled_from(LOGPROBS_MODES),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    st.booleans(),
)
@verifiers
def test_agreement_with_the_reference(verify, batch, method, mode, dtype, after_difference):
    assert_agrees(verify, batch, method, mode, dtype, after_difference=after_difference)


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 1023])
@pytest.mark.parametrize("accept", [True, False])
def test_odd_vocabularies_and_long_drafts(vocab_size, accept, monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", 8 if vocab_size < 100 else 256)
    rng = np.random.default_rng(vocab_size)
    cu = np.array([0, 17, 17, 20], np.int32)
    logits = (rng.standard_normal((24, vocab_size)) * 2).astype(np.float32)
    rows = SamplingBatch(
        temperature=np.array([0, 1, 0.6, 1], np.float32),
        seeds=np.array([1, 2, 3, 4]),
        positions=np.array([5, 6, 7, 2**33]),
    )
    drafts = np.zeros(20, np.int32)
    if accept:
        drafts = right_drafts(logits, cu, rows)
    assert_agrees(kernel_verify, (logits, drafts, cu, rows), "sample", "processed_logprobs")


def flat_rows(count, vocab_size, first=0):
    """A batch without drafts in which every token is equally probable, so that every tile may hold the winner."""
    seeds = np.random.default_rng(0).integers(0, 2**62, first + count)[first:]
    rows = SamplingBatch(np.ones(count, np.float32), seeds, np.arange(first, first + count))
    return np.zeros((count, vocab_size), np.float32), np.zeros(0, np.int32), np.zeros(count, np.int32), rows


@pytest.mark.parametrize(
    ("block", "batch", "other_logits"),
    [
        # Winners' hashes are so small that murmur3's last step hardly changes them.
        (2048, flat_rows(16, 32_768), 0.0),
        # After a negative score, a less probable token may win with any hash.
        (1, flat_rows(80, 3), -0.5),
        # Some of these rows' winners are just above what was found before them: a bound 5 % too tight loses one of
        # them, one 50 % too tight six.
        (4, flat_rows(60, 24, first=90), 0.0),
    ],
)
def test_winners(block, batch, other_logits, monkeypatch):
    monkeypatch.setattr(kernel, "ROWS", 1)
    monkeypatch.setattr(kernel, "BLOCK", block)
    batch[0][:, 1:] = other_logits
    assert_agrees(kernel_verify, batch, "sample", None)


@pytest.mark.parametrize(("low", "high", "draft"), [(3, 40, 40), (20, 40, 40), (20, 90, 70), (20, 40, 3)])
@pytest.mark.parametrize("max_joined", [1, 4, 64])
def test_ties_go_to_the_first_token_wherever_it_is(low, high, draft, max_joined, monkeypatch):
    """Greedy rows whose largest logit occurs in other tiles and splits, the draft among them or not.

    The splits are joined one by one, two at a time or all at once.
    """
    monkeypatch.setattr(kernel, "TARGET_PROGRAMS", 64)
    monkeypatch.setattr(kernel, "MAX_JOINED", max_joined)
    logits = np.zeros((3, 100), np.float32)
    logits[:, [low, high]] = 5.0
    if draft not in (low, high, 3):
        logits[:, draft] = 5.0
    rows = SamplingBatch(np.array([0.0, 1.0], np.float32), np.array([1, 2]), np.array([0, 0]))
    batch = (logits, np.array([draft], np.int32), np.array([1, 1], np.int32), rows)
    assert_agrees(kernel_verify, batch, "sample", "processed_logprobs")


@pytest.mark.parametrize("temperature", [0.01, 0.3, 30.0])
def test_steep_and_shallow_temperatures(temperature):
    """The bound that spares the noise's logarithms must hold where rounding grows with logit / T."""
    rng = np.random.default_rng(1)
    count, vocab_size = 16, 60
    logits = (rng.standard_normal((count, vocab_size)) * 8 + 40).astype(np.float32)
    logits[:, ::2] = logits[:, 1::2]  # ties
    rows = SamplingBatch(np.full(count, temperature, np.float32), rng.integers(0, 2**62, count), np.arange(count))
    batch = (logits, np.zeros(0, np.int32), np.zeros(count, np.int32), rows)
    assert_agrees(kernel_verify, batch, "sample", None)


@verifiers
@pytest.mark.parametrize("k", [1, 8])
def test_a_draft_without_alternatives_is_accepted_whatever_the_noise(verify, k, monkeypatch):
    """Rejection sampling accepts with probability 1, also where the rounding of logit / T is large."""
    monkeypatch.undo()  # how compiled code rounds depends on the size of tiles
    count = 32
    noise_of_seeds = uniform32(
        torch.arange(100_000), torch.zeros(1).long(), torch.zeros(1).long(), domain=noise.DOMAIN_ACCEPT
    )
    seeds = noise_of_seeds[:, 0].topk(count).indices  # of the first position
    logits = torch.zeros(count * (k + 1), 1100)
    logits[:, 700] = 1e4
    rows = SamplingBatch(torch.full((count,), 0.6), seeds, torch.zeros(count, dtype=torch.int64))
    drafts, cu = torch.full((count * k,), 700, dtype=torch.int32), torch.arange(k, count * k + 1, k, dtype=torch.int32)
    assert verify(logits, drafts, cu, rows, method="rejection").num_accepted.tolist() == [k] * count


def test_rows_that_point_into_larger_tensors():
    """The V2 runner's parameters are those of all requests, and rows come in any order of them."""
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.standard_normal((5, 30)).astype(np.float32))
    states = SamplingBatch(
        temperature=torch.tensor([9.0, 1.0, 9.0, 0.5]), seeds=torch.tensor([9, 11, 9, 13]), positions=None
    )
    layout = kernel.gather_layout(
        input_ids=torch.tensor([1, 2, 3, 4, 8, 6, 7, 5], dtype=torch.int32),
        positions=torch.tensor([0, 1, 2, 9, 10, 11, 20, 21]),
        logits_indices=torch.tensor([3, 4, 5, 6, 7]),
        starts=torch.tensor([0, 3, 5], dtype=torch.int32),
        request=torch.tensor([3, 1], dtype=torch.int32),
        prefill_len=torch.tensor([0, 20, 0, 9], dtype=torch.int32),
        temperature=states.temperature,
        seeds=states.seeds,
    )
    assert layout.draft.tolist() == [8, 6, -1, 5, -1]
    assert layout.position.tolist() == [9, 10, 11, 20, 21]
    got = kernel.verify_rows(logits, layout, max_draft_tokens=2)
    order = [3, 1]
    rows = SamplingBatch(states.temperature[order], states.seeds[order], torch.tensor([9, 20]))
    expected = reference.verify(logits, torch.tensor([8, 6, 5]), torch.tensor([2, 3]), rows)
    assert torch.equal(got.output_token_ids, expected.output_token_ids)


def test_placeholders_of_a_step_within_the_prompt_are_no_drafts():
    """Also of those that lie behind the prompt's end."""
    layout = kernel.gather_layout(
        input_ids=torch.tensor([4, 5, 6], dtype=torch.int32),
        positions=torch.tensor([7, 8, 9]),
        logits_indices=torch.tensor([0, 1, 2]),
        starts=torch.tensor([0, 3], dtype=torch.int32),
        request=torch.zeros(1, dtype=torch.int32),
        prefill_len=torch.tensor([8], dtype=torch.int32),
        temperature=torch.ones(1),
        seeds=torch.zeros(1, dtype=torch.int64),
    )
    assert layout.draft.tolist() == [-1, -1, -1]


def test_the_noise_in_triton():
    """Same hashes as in NumPy, and noise within the stated tolerance."""

    @triton.jit
    def roll(seed_ptr, position_ptr, hash_ptr, gumbel_ptr, DOMAIN: tl.constexpr, BLOCK: tl.constexpr):
        state = row_state(tl.load(seed_ptr + tl.program_id(0)), tl.load(position_ptr + tl.program_id(0)), DOMAIN)
        token = tl.arange(0, BLOCK)
        h = finish_hash(unfinished_hash(state, token_key(token.to(tl.uint32))))
        tl.store(hash_ptr + tl.program_id(0) * BLOCK + token, h.to(tl.int64))
        tl.store(gumbel_ptr + tl.program_id(0) * BLOCK + token, gumbel(h))

    rng = np.random.default_rng(0)
    seeds, positions = rng.integers(-(2**63), 2**63 - 1, 8), rng.integers(0, 2**40, 8)
    for domain in (noise.DOMAIN_TARGET, noise.DOMAIN_ACCEPT, noise.DOMAIN_RESIDUAL):
        hashes, noises = torch.zeros(8, 1024, dtype=torch.int64), torch.zeros(8, 1024)
        roll[(8,)](torch.from_numpy(seeds), torch.from_numpy(positions), hashes, noises, DOMAIN=domain, BLOCK=1024)
        arguments = (seeds[:, None], positions[:, None], np.arange(1024), domain)
        np.testing.assert_array_equal(hashes.numpy(), noise.hash32(*arguments).astype(np.int64))
        error = np.abs(noises.numpy() - noise.gumbel(*arguments)).max()
        assert error <= noise_triton.GUMBEL_TOLERANCE


def barely_won_rows(level, margin):
    """A batch without drafts in which token 8, in another tile than token 0, wins by `margin`; logits are near `level`.

    Its hash is so small that the bound by which the scan passes over tokens is no larger than what it needs to win.
    """
    seeds = np.arange(200_000)
    seeds = seeds[noise.hash32(seeds, 0, 8) < 2**32 * 1e-4]
    logits = np.full((len(seeds), 9), -np.inf, np.float32)
    logits[:, 0] = level
    logits[:, 8] = level + noise.gumbel(seeds, 0, 0) - noise.gumbel(seeds, 0, 8) + margin
    rows = SamplingBatch(np.ones(len(seeds), np.float32), seeds, np.zeros_like(seeds))
    return logits, np.zeros(0, np.int32), np.zeros(len(seeds), np.int32), rows


@pytest.mark.parametrize(("level", "margin"), [(0.0, 2e-4), (5000.0, 2e-3)])
def test_the_bound_is_loose_enough(level, margin, monkeypatch):
    """One from which its slack is taken away instead of added loses these winners."""
    monkeypatch.setattr(kernel, "ROWS", 1)
    monkeypatch.setattr(kernel, "BLOCK", 8)
    monkeypatch.setattr(kernel, "TARGET_PROGRAMS", 1)  # all of a row in one program, as with many rows
    batch = barely_won_rows(level, margin)
    assert 10 < len(batch[0]) < 40
    assert (oracle(*batch).target_token_ids == 8).all()
    assert_agrees(kernel_verify, batch, "sample", None)
