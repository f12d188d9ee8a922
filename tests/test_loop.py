"""`generate` on a toy target: the whole system without an engine."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.budget import Budget
from rollout_spec.drafters import build_drafter
from rollout_spec.loop import RequestState, generate
from rollout_spec.noise import host as noise
from tests.adversaries import Adversary, Silent
from tests.distributions import matches_distribution

VOCAB = 6
END = 0


def markov_target(seed=0, sharpness=2.0):
    """A random target whose logits depend on the last two tokens."""
    table = (np.random.default_rng(seed).standard_normal((VOCAB, VOCAB, VOCAB)) * sharpness).astype(np.float32)

    def target(contexts):
        return np.stack([table[context[-2], context[-1]] for context in contexts])

    return target, table


def requests(count, max_tokens=40, temperature=1.0, run=0):
    return [
        RequestState(f"{run}/{i}", [1, 2, 1 + i % 3], 3, noise.derive_seed(run, i), max_tokens, temperature, END)
        for i in range(count)
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    target_seed=st.integers(0, 1000),
    count=st.integers(1, 6),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    k=st.integers(1, 8),
    drafter=st.sampled_from(["history", "suffix", "ngram", "adversary"]),
    budget=st.sampled_from([None, Budget]),
)
def test_same_rollouts_as_without_drafts(target_seed, count, temperature, k, drafter, budget):
    target, _ = markov_target(target_seed)
    plain = requests(count, temperature=temperature)
    steps = generate(plain, Silent(), target, k)
    ours = requests(count, temperature=temperature)
    drafting = (
        Adversary(VOCAB) if drafter == "adversary" else build_drafter(drafter, max_draft_tokens=k, min_survival=0.0)
    )
    assert generate(ours, drafting, target, k, budget=budget() if budget else None) <= steps
    for a, b in zip(plain, ours, strict=True):
        assert a.token_ids == b.token_ids
        said = a.token_ids[a.num_prompt_tokens :]
        assert len(said) <= 40
        assert said[-1] == END or len(said) == 40
        assert END not in said[:-1]


def test_history_saves_steps():
    """The second epoch of the same problems is decoded in far fewer steps than tokens."""
    target, _ = markov_target(3, sharpness=4.0)
    drafter = build_drafter("history", max_draft_tokens=8)
    steps = [generate(requests(8, run=run), drafter, target, 8) for run in range(6)]
    assert steps[-1] < 0.6 * generate(requests(8, run=5), Silent(), target, 8)
    drafter.check_integrity()


def test_tokens_emitted_by_a_ratio_test_follow_the_target():
    """Transitions of 3,000 rollouts against the analytic softmax; power as stated in `matches_distribution`."""
    target, table = markov_target(5)
    drafter = Adversary(VOCAB)
    transitions: dict[tuple[int, int], list[int]] = {}
    for run in range(30):
        batch = requests(100, max_tokens=8, run=run)
        generate(batch, drafter, target, 4, method="rejection")
        for request in batch:
            for i in range(3, len(request.token_ids)):
                transitions.setdefault(tuple(request.token_ids[i - 2 : i]), []).append(request.token_ids[i])
    assert sum(map(len, transitions.values())) > 8000
    for context, following in transitions.items():
        if len(following) > 200:
            p = torch.from_numpy(table[context]).double().softmax(0).numpy()
            assert matches_distribution(following, p), context


@pytest.mark.parametrize(
    ("temperature", "method", "is_known"), [(1.0, "sample", True), (0.0, "sample", False), (1.0, "rejection", False)]
)
def test_drafts_go_by_the_noise_only_where_the_target_samples_with_it(temperature, method, is_known):
    drafter = build_drafter("history", max_draft_tokens=4)
    generate(requests(1, temperature=temperature), drafter, markov_target()[0], 4, method=method)
    assert drafter.table.arrays.has_seed.any() == is_known


def test_invalid_logits_raise():
    batch = requests(1)
    with pytest.raises(FloatingPointError, match="nothing can be sampled"):
        generate(batch, Silent(), lambda contexts: np.full((len(contexts), VOCAB), np.nan, np.float32), 2)
    assert len(batch[0].token_ids) == batch[0].num_prompt_tokens
