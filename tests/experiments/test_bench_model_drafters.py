"""The benchmark of model drafters without an engine: its theory against closed forms, its heads and its checkpoints."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import torch
from safetensors.torch import load_file

from experiments.engines import bench_model_drafters, draft_acceptance, trained_drafters
from experiments.engines.draft_acceptance import Recorded, Rollout
from rollout_spec.demo.policy import build_model, build_tokenizer
from rollout_spec.demo.warm_start import trace_batches
from rollout_spec.noise import host as noise

VOCABULARY = 6


@pytest.fixture(scope="module")
def policy():
    """Untrained, with logits as far apart as a trained one's."""
    model = build_model(build_tokenizer(), seed=0).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    return model


@pytest.fixture(scope="module")
def rollout(policy):
    """A rollout that the policy samples with the project's noise at temperature 1."""
    prompt, seed = bench_model_drafters.held_out_prompts()[0], 7
    ids = list(prompt)
    for _ in range(24):
        logits = trained_drafters.run_target(policy, torch.tensor([ids])).logits[0, -1].numpy()
        ids.append(int((logits + noise.gumbel(seed, len(ids) - 1, np.arange(logits.size))).argmax()))
    return Rollout(prompt, ids[len(prompt) :], seed)


@pytest.fixture(params=["eagle", "mtp"])
def head(request, policy):
    return trained_drafters.build(policy, request.param, seed=3).eval()


def distributions(count):
    """(target, draft, noise) for tokens that are drawn independently from one distribution each."""
    rng = np.random.default_rng(0)
    target, draft = np.log(rng.dirichlet(np.ones(VOCABULARY), 2))
    rows = np.arange(count)
    drawn = noise.gumbel(11, rows[:, None], np.arange(VOCABULARY)).astype(np.float64)
    return np.tile(target, (count, 1)), np.tile(draft, (count, 1)), drawn


def test_acceptance_of_first_tokens():
    target, draft, drawn = distributions(20_000)
    p, q = np.exp(target[0]), np.exp(draft[0])
    found = draft_acceptance.first_token(target, draft, drawn)
    assert found.overlap / found.positions == pytest.approx(np.minimum(p, q).sum())
    assert found.argmax_probability / found.positions == pytest.approx(p[q.argmax()])
    # Gumbel noise that both share: both are v when v beats every u by either; 1 / sum_u max(p_u / p_v, q_u / q_v)
    coupled = (1 / np.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)).sum()
    assert found.coupled / found.positions == pytest.approx(coupled, abs=0.012)


@pytest.mark.parametrize("draw", draft_acceptance.DRAWS)
def test_tokens_are_accepted_as_often_as_the_theory_says(draw):
    target, draft, drawn = distributions(20_000)
    tokens = (target + drawn).argmax(-1)
    accepted = draft_acceptance.accepted_tokens(draw, tokens, target, draft[None], drawn, seed=5)
    found = draft_acceptance.first_token(target, draft, drawn)
    total = {"greedy": found.argmax_probability, "probabilistic": found.overlap, "coupled": found.coupled}[draw]
    assert accepted.mean() == pytest.approx(total / found.positions, abs=0.012)


def test_unknown_draw():
    with pytest.raises(ValueError, match="draw must be one of"):
        draft_acceptance.accepted_tokens("best", np.zeros(1, int), *distributions(1)[:2], np.zeros(1), 0)


def test_request_steps():
    accepted = np.zeros((2, 6), bool)
    assert draft_acceptance.request_steps(accepted) == 6
    accepted[:, :] = True  # the prompt's token, then drafts of two and one more each
    assert draft_acceptance.request_steps(accepted) == 3
    accepted[0, 1] = False  # the prompt's, one, three, one
    assert draft_acceptance.request_steps(accepted) == 4


def test_surprise_finds_samples_of_another_temperature():
    target, _, drawn = distributions(20_000)
    assert abs(draft_acceptance.surprise_z([((target + drawn).argmax(-1), target)])) < 3
    assert draft_acceptance.surprise_z([((target / 0.8 + drawn).argmax(-1), target)]) > 5


def test_recorded_rollouts_are_the_targets(policy, rollout):
    record = Recorded(policy, [[rollout]], temperature=1.0)
    assert record.noise_mismatches(1e-3) == 0
    changed = rollout._replace(tokens=[*rollout.tokens[:-1], (rollout.tokens[-1] + 1) % 40])
    assert Recorded(policy, [[changed]], temperature=1.0).noise_mismatches(1e-3) == 1


def test_target_as_its_own_draft_model(policy, rollout):
    record = Recorded(policy, [[rollout]], temperature=1.0)
    one = record.first_token(policy)
    assert one.overlap == pytest.approx(23)
    assert one.coupled == one.positions == 23
    steps = record.request_steps(policy, 3, ["probabilistic", "coupled"])
    assert steps == {"probabilistic": [7], "coupled": [7]}  # one token, then 23 in steps of four


def test_hidden_states_before_and_after_the_norm(policy, rollout):
    seen = trained_drafters.run_target(policy, torch.tensor([rollout.prompt]))
    with torch.no_grad():
        assert torch.equal(policy.model.norm(seen.hidden_states("mtp")), seen.hidden_states("eagle"))
        assert torch.equal(policy.lm_head(seen.hidden_states("eagle")), seen.logits)


def test_later_passes_are_a_draft_token_by_token(policy, rollout, head):
    """The passes over whole texts against a draft as an engine makes it: one sequence, its own states at the end."""
    token_ids, depth = rollout.prompt + rollout.tokens, 3
    found = trained_drafters.draft_logits(head, policy, token_ids, len(rollout.prompt), depth)
    with torch.no_grad():
        hidden = trained_drafters.run_target(policy, torch.tensor([token_ids])).hidden_states(head.method)
        embed = policy.model.embed_tokens
        for j in (2, 9):  # the draft's first token
            known = len(rollout.prompt) + j - 1  # tokens t + 1 of the first pass
            states = hidden[:, :known]
            for d in range(depth):
                out = head(embed(torch.tensor([token_ids[1 : known + 1 + d]])), states, [])
                assert torch.allclose(policy.lm_head(out[0, -1]), found[d, j + d], atol=1e-4)
                states = torch.cat((states, out[:, -1:]), 1)


@pytest.mark.parametrize("method", trained_drafters.Method.__args__)
def test_training_lowers_the_loss(policy, method):
    held_out = bench_model_drafters.held_out_prompts()
    _, losses = trained_drafters.train(policy, build_tokenizer(), method, steps=8, held_out=held_out, batch_size=4)
    assert losses[-1] < losses[0] - 0.1


def test_held_out_prompts_are_left_out():
    batches = trace_batches(build_tokenizer(), random.Random(0), 4)
    input_ids, labels = next(batches)
    prompt = input_ids[1, :7].tolist()
    kept, kept_labels = next(trained_drafters.without_prompts(iter([(input_ids, labels)]), [prompt]))
    assert torch.equal(kept, input_ids[[0, 2, 3]])
    assert torch.equal(kept_labels, labels[[0, 2, 3]])


def test_head_checkpoints(policy, rollout, head, tmp_path):
    trained_drafters.save(head, policy, build_tokenizer(), tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    if head.method == "eagle":
        projections = {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
        mlp = {f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        assert set(saved) == {"fc.weight", "layers.0.post_attention_layernorm.weight"} | projections | mlp
    else:
        assert {name for name in saved if name.startswith("model.layers.")} >= {
            name for name in policy.state_dict() if name.startswith("model.layers.")
        }
        assert not saved["model.mtp_layers.0.self_attn.q_proj.bias"].any()
        assert saved["model.mtp_layers.0.input_proj.weight"].shape == (128, 256)
    again = trained_drafters.load(policy, head.method, tmp_path)
    token_ids = rollout.prompt + rollout.tokens
    logits = [trained_drafters.draft_logits(h, policy, token_ids, len(rollout.prompt), 2) for h in (head, again)]
    assert torch.equal(*logits)


def test_draft_model_checkpoint(policy, rollout, tmp_path):
    model = trained_drafters.build(policy, "draft_model", seed=3).eval()
    trained_drafters.save(model, policy, build_tokenizer(), tmp_path)
    assert model.config.head_dim == 32
    again = trained_drafters.load(policy, "draft_model", tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
