"""The noise: one definition in three implementations, and good ones."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rollout_spec.jit import njit
from rollout_spec.noise import host as noise
from rollout_spec.noise import torch as noise_torch
from tests.distributions import matches_distribution

N = 200_000


def uniform32(*arguments):
    return noise.uniform_from_hash(noise.hash32(*arguments))


def murmur3_32(data: bytes, seed: int) -> int:
    """MurmurHash3_x86_32 of whole words, from its description."""

    def rotl(x, r):
        return ((x << r) | (x >> (32 - r))) & 0xFFFFFFFF

    h = seed
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        h = (rotl(h ^ (rotl(k, 15) * 0x1B873593 & 0xFFFFFFFF), 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= len(data)
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h = (h ^ (h >> shift)) * multiplier & 0xFFFFFFFF
    return h ^ (h >> 16)


words = st.one_of(st.integers(0, 2**31 + 1), st.sampled_from([0, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 5, -1]))
seeds = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([-1, -(2**63), 2**63 - 1, 2**32, 2**31]))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(seeds, words, words, st.sampled_from([noise.DOMAIN_TARGET, noise.DOMAIN_ACCEPT, noise.DOMAIN_RESIDUAL]))
def test_implementations_agree(seed, position, token, domain):
    data = (seed & (2**64 - 1)).to_bytes(8, "little") + (position & 0xFFFFFFFF).to_bytes(4, "little")
    expected = murmur3_32(data + (token & 0xFFFFFFFF).to_bytes(4, "little"), domain)
    assert int(noise.hash32(seed, position, token, domain)) == expected
    assert noise.hash_words(seed, position, token, domain) == expected
    s, p, t = (torch.tensor([value]) for value in (seed, position, token))
    assert noise_torch.uniform32(s, p, t, domain=domain).numpy()[0, 0] == noise.uniform_from_hash(expected)
    g = noise.gumbel(seed, position, token, domain)
    assert abs(float(noise_torch.gumbel(s, p, t, domain=domain)) - g) <= noise_torch.GUMBEL_TOLERANCE


def test_extremes_are_finite_and_as_stated():
    g = noise.gumbel_from_hash(np.array([0, 2**32 - 1], np.uint32))
    assert g.tolist() == pytest.approx([33 * math.log(2), -math.log(24 * math.log(2))], abs=1e-5)


AXES = {
    "token": lambda n: (12345, 7, np.arange(n)),
    "position": lambda n: (12345, np.arange(n), 7),
    "seed": lambda n: (np.random.default_rng(0).integers(0, 2**63 - 1, n), 7, 7),
    "neighbouring seeds": lambda n: (np.arange(n), 7, 7),
    "seeds that differ in the high word": lambda n: (np.arange(n) << 32, 7, 7),
}


@pytest.mark.parametrize("axis", AXES)
def test_uniform_and_uncorrelated_along(axis):
    """Chi-square over 256 cells, and correlation at lags 1 to 4 within 5 standard errors."""
    u = uniform32(*AXES[axis](N))
    assert matches_distribution((u * 256).astype(int).clip(max=255), np.full(256, 1 / 256))
    g = noise.gumbel(*AXES[axis](N))
    for lag in range(1, 5):
        assert abs(np.corrcoef(g[:-lag], g[lag:])[0, 1]) < 5 / math.sqrt(N)


def test_streams_are_independent():
    rng = np.random.default_rng(2)
    seed, position = rng.integers(0, 2**62, N), rng.integers(0, 10_000, N)
    streams = [noise.gumbel(seed, position, 0, d) for d in (0, noise.DOMAIN_ACCEPT, noise.DOMAIN_RESIDUAL)]
    correlations = np.corrcoef(streams)[np.triu_indices(3, 1)]
    assert (np.abs(correlations) < 5 / math.sqrt(N)).all()
    assert len({noise.DOMAIN_TARGET, noise.DOMAIN_ACCEPT, noise.DOMAIN_RESIDUAL, 0x9E3779B9}) == 4


def test_gumbel_distribution_and_the_softmax_that_it_samples():
    g = noise.gumbel(np.arange(N) * 7919, 3, 11)
    assert stats.kstest(g, stats.gumbel_r.cdf).pvalue > 1e-6
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5])
    sampled = np.argmax(logits + noise.gumbel(np.arange(N)[:, None], 9, np.arange(5)), axis=1)
    assert matches_distribution(sampled, np.exp(logits) / np.exp(logits).sum())
    assert not matches_distribution(sampled, np.exp(logits / 1.05) / np.exp(logits / 1.05).sum())


BORDERS = np.array([0, 1, 127, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 127, 2**32 - 1])


@njit
def draw(seed, position, tokens, domain, hashes, noises):
    for i in range(tokens.size):
        hashes[i] = noise.hash_words(int(seed), int(position), int(tokens[i]), domain)
        noises[i] = noise.gumbel_from_hash(hashes[i])


def test_compiled_code_agrees():
    """The definition and the loop over one row: hashes of borders and of a vocabulary."""
    tokens = np.concatenate([np.arange(3000), BORDERS, BORDERS + 2**32, [-1, -(2**31)]])
    for seed in (0, -1, -(2**63), 2**63 - 1, 2**31, 2**32):
        for position in (-1, 0, 2**31 - 1, 2**31, 2**32 - 1, 2**32):
            for domain in (noise.DOMAIN_TARGET, noise.DOMAIN_ACCEPT, noise.DOMAIN_RESIDUAL):
                expected = noise.hash32(seed, position, tokens, domain)
                hashes, noises = np.zeros(len(tokens), np.uint32), np.zeros(len(tokens), np.float32)
                state = noise.row_state(seed, position, domain)
                with np.errstate(over="ignore"):  # interpreted, where numba is switched off
                    noise.finish_hashes(state, noise.token_keys(tokens), hashes)
                np.testing.assert_array_equal(hashes, expected)
                draw(seed, position, tokens, domain, hashes, noises)
                np.testing.assert_array_equal(hashes, expected)
                np.testing.assert_array_equal(noises, noise.gumbel(seed, position, tokens, domain))


def test_torch_logarithms_stay_within_the_tolerance(monkeypatch):
    """From the rarest to the commonest noise, through the device's float32 logarithms."""
    hashes = np.concatenate([BORDERS, 2 ** np.arange(32), np.linspace(0, 2**32 - 1, 100_000)]).astype(np.uint32)
    uniforms = noise.uniform_from_hash(hashes)
    monkeypatch.setattr(noise_torch, "uniform32", lambda *_, **__: torch.from_numpy(uniforms.copy()))
    got = noise_torch.gumbel(None, None, None).numpy()
    assert np.isfinite(got).all()
    assert np.abs(got - noise.gumbel_from_hash(hashes)).max() <= noise_torch.GUMBEL_TOLERANCE


def test_torch_token_tensors():
    """The same tokens in all rows, other tokens in each, and a whole vocabulary."""
    seeds, positions = torch.tensor([3, -7, 2**40]), torch.tensor([0, 2**31, 2**32 - 1])
    rows = torch.tensor([[0, 5, 2**31 - 1], [7, 7, 1], [2, 3, 4]], dtype=torch.int32)
    for asked, tokens in ((rows[0], rows[0].numpy()), (rows, rows.numpy()), (5000, np.arange(5000))):
        expected = uniform32(seeds.numpy()[:, None], positions.numpy()[:, None], tokens, 3)
        np.testing.assert_array_equal(noise_torch.uniform32(seeds, positions, asked, domain=3).numpy(), expected)
    assert noise_torch.uniform32(seeds[:0], positions[:0], 4).shape == (0, 4)


def test_derived_seeds_differ_and_never_change():
    """Recorded runs are replayed by these numbers."""
    tuples = [(1,), ("1",), (1, 2), (12,), ("a", "b"), ("ab",), (-1,), (0, 0)]
    tuples += [(0, step, i) for step in range(100) for i in range(1000)]
    derived = {noise.derive_seed(*parts) for parts in tuples}
    assert len(derived) == len(tuples)
    assert all(0 <= seed < 2**63 for seed in derived)
    assert noise.derive_seed(0) == 5882227149313166412
    assert noise.derive_seed(7, 3, 41) == 695179768711157409
    assert noise.derive_seed("run", -1) == 6943943979154080069
    assert noise.derive_seed(np.int64(7), 3, np.int32(41)) == noise.derive_seed(7, 3, 41)
