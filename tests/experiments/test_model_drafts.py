"""The probes of model drafts: drafts against generation token by token, and simulations whose result is known."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch

from model_drafts import Drafts, demo_prompts, draft, noise_of, only_layers, read, sample
from probe_continuation import K, simulate
from probe_early_exit import chains, forms_of, walk
from rollout_spec.demo.policy import build_model, build_tokenizer
from rollout_spec.replay.traces import Problem, Rollout


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return build_model(build_tokenizer(), seed=0).float().eval()


@pytest.fixture(scope="module")
def rollout(model):
    (problem,) = sample(model, demo_prompts(1), 1, 0.7, 12)
    return problem.rollouts[0]


@pytest.mark.parametrize("coupled", [False, True])
@torch.inference_mode()
def test_early_exit_drafts_are_those_of_the_first_layers_alone(model, rollout, coupled):
    p, cache = read(model, rollout, 0.7)
    noise = noise_of(rollout, p.shape[1])
    drafts = draft(model, (0,), cache, rollout, 0.7, noise if coupled else None, 3)
    expected = np.full((rollout.tokens.size, 3), -1)
    with only_layers(model, (0,)):
        for at in range(rollout.tokens.size):
            text = [*rollout.prompt.tolist(), *rollout.tokens[:at].tolist()]
            for depth in range(min(3, rollout.tokens.size - at)):
                logprobs = (model(torch.tensor([text])).logits[0, -1] / 0.7).log_softmax(-1)
                text.append(int((logprobs + coupled * noise[at + depth]).argmax()))
                expected[at, depth] = text[-1]
                assert drafts.probabilities[at, depth] == pytest.approx(logprobs[text[-1]].exp().item(), rel=1e-4)
    np.testing.assert_array_equal(drafts.tokens, expected)
    short = draft(model, (0,), cache, rollout, 0.7, noise if coupled else None, 3, only_accepted=True)
    np.testing.assert_array_equal(short.num_accepted(rollout), drafts.num_accepted(rollout))


def test_all_layers_draft_the_rollout_itself(model, rollout):
    p, cache = read(model, rollout, 0.7)
    drafts = draft(model, (0, 1), cache, rollout, 0.7, noise_of(rollout, p.shape[1]), 4)
    np.testing.assert_array_equal(drafts.num_accepted(rollout), np.minimum(4, np.arange(rollout.tokens.size, 0, -1)))
    torch.testing.assert_close(drafts.first_logprobs, p, atol=1e-5, rtol=1e-5)


def test_skipped_layers_read_the_whole_models_cache():
    """Without a first layer that adds nothing, the second one drafts the rollout from its own part of the cache."""
    model = build_model(build_tokenizer(), seed=0).float().eval()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        torch.nn.init.zeros_(model.model.layers[0].get_submodule(name).weight)
    (problem,) = sample(model, demo_prompts(1), 1, 0.7, 12)
    (rollout,) = problem.rollouts
    p, cache = read(model, rollout, 0.7)
    drafts = draft(model, (1,), cache, rollout, 0.7, noise_of(rollout, p.shape[1]), 4)
    np.testing.assert_array_equal(drafts.num_accepted(rollout), np.minimum(4, np.arange(rollout.tokens.size, 0, -1)))


def test_forms_keep_different_layers():
    forms = forms_of(30)
    assert forms["first 3"] == (0, 1, 2)
    assert forms["first 6, last 6"] == (*range(6), *range(24, 30))
    assert all(len(set(kept)) == len(kept) < 30 for kept in forms.values())
    assert forms_of(2) == {"first 1": (0,)}


def test_walks_and_speeds():
    accepted = np.array([9, 2, 1, 0, 0, 3, 2, 1, 0])
    sure = np.ones(9)
    # From token 1 two are accepted, from token 4 none, from token 5 all three that can be drafted before the last.
    assert walk(accepted, sure, 8) == (8, 3, 7 + 4 + 3, 2 + 0 + 3)
    assert walk(accepted, sure, 1) == (8, 5, 5, 3)
    assert walk(accepted, np.where(np.arange(9) == 4, 0.1, 1), 8, 0.5) == (8, 3, 4 + 1 + 3, 5)
    found = chains([accepted], [sure], {"layers": 0.5})
    assert found["tokens_per_step"][7] == pytest.approx(8 / 3)
    assert found["speed"]["layers"]["perfect"] == pytest.approx(8 / (3 + 0.5 * 5))
    assert found["speed"]["layers"]["fixed"] == pytest.approx(8 / (4 + 0.5 * 6))
    assert found["speed"]["layers"]["fixed_k"] == 2


def right_drafts(rollout: Rollout, m: int) -> Drafts:
    following = np.append(rollout.tokens, np.full(m, -1))
    tokens = np.stack([following[j : j + rollout.tokens.size] for j in range(m)], 1)
    return Drafts(tokens, np.ones(tokens.shape, np.float32), torch.zeros(0))


def test_history_continues_what_the_model_began():
    rng = np.random.default_rng(0)
    known, new = rng.permutation(200), rng.integers(1000, 2000, 100)
    # A token that nobody said before, then a piece of the known text, of which the model drafts the first two tokens.
    text = np.concatenate([np.append(new[i], known[i : i + rng.integers(10, 20)]) for i in range(60)])
    prompt = np.array([5, 6], np.int32)
    rollouts = [Rollout(i, i, prompt, np.array(t, np.int32), (len(t),)) for i, t in enumerate((known, text))]
    problem = Problem("a", rollouts)
    model = {("a", 1): right_drafts(rollouts[1], 3)}
    speed = {
        name: simulate([problem], model, name, 3, False).tokens_per_step
        for name in ("history", "model", "both", "both, oracle", "continued, oracle")
    }
    assert speed["model"] == pytest.approx(4, abs=0.1)
    assert speed["history"] > 4
    assert speed["both, oracle"] >= speed["both"] > 1.1 * speed["history"]
    assert speed["continued, oracle"] > 1.05 * speed["both, oracle"]

    repeated = Problem("a", [rollouts[0], rollouts[0]._replace(sample_id=1, epoch=1)])
    model = {("a", 1): right_drafts(rollouts[0], 3)}
    assert simulate([repeated], model, "continued, oracle", 3, False).tokens_per_step > 0.95 * (K + 1)
