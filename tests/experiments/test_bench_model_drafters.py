"""The benchmark of model drafters without an engine: its gates, its heads and its checkpoints."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import torch
from safetensors.torch import load_file

from examples.demo.policy import build_model, build_tokenizer, trace_batches
from experiments.engines import bench_model_drafters, trained_drafters
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
    return bench_model_drafters.Rollout(prompt, ids[len(prompt) :], seed)


@pytest.fixture(params=["eagle", "mtp"])
def head(request, policy):
    return trained_drafters.build(policy, request.param, seed=3).eval()


def test_surprise_finds_samples_of_another_temperature():
    rng = np.random.default_rng(0)
    target = np.tile(np.log(rng.dirichlet(np.ones(VOCABULARY))), (20_000, 1))
    drawn = noise.gumbel(11, np.arange(20_000)[:, None], np.arange(VOCABULARY)).astype(np.float64)
    assert abs(bench_model_drafters.surprise([((target + drawn).argmax(-1), target)])) < 3
    assert bench_model_drafters.surprise([((target / 0.8 + drawn).argmax(-1), target)]) > 5


def test_what_the_policy_does_not_sample_is_found(policy, rollout):
    assert bench_model_drafters.noise_mismatches(policy, [rollout], 1.0) == 0
    changed = rollout._replace(tokens=[*rollout.tokens[:-1], (rollout.tokens[-1] + 1) % 40])
    assert bench_model_drafters.noise_mismatches(policy, [changed], 1.0) == 1
    with pytest.raises(SystemExit, match="1 tokens are not what the policy samples"):
        bench_model_drafters.check("none", policy, [changed], 1.0, max_tokens=24)
    with pytest.raises(SystemExit, match="did not end"):
        bench_model_drafters.check("none", policy, [rollout], 1.0, max_tokens=25)


def test_hidden_states_before_and_after_the_norm(policy, rollout):
    seen = trained_drafters.run_target(policy, torch.tensor([rollout.prompt]))
    with torch.no_grad():
        assert torch.equal(policy.model.norm(seen.hidden_states("mtp")), seen.hidden_states("eagle"))
        assert torch.equal(policy.lm_head(seen.hidden_states("eagle")), seen.logits)


def test_later_passes_are_a_draft_token_by_token(policy, rollout, head):
    """The passes over whole texts against a draft as an engine makes it: one sequence, its own states at the end."""
    token_ids, depth = rollout.prompt + rollout.tokens, 3
    input_ids, embed = torch.tensor([token_ids]), policy.model.embed_tokens
    with torch.no_grad():
        hidden = trained_drafters.run_target(policy, input_ids).hidden_states(head.method)
        found = trained_drafters.head_hidden_states(head, embed, input_ids, hidden, depth)
        for j in (2, 9):  # the draft's first token
            known = len(rollout.prompt) + j - 1  # tokens t + 1 of the first pass
            states = hidden[:, :known]
            for d in range(depth):
                out = head(embed(torch.tensor([token_ids[1 : known + 1 + d]])), states, [])
                assert torch.allclose(out[0, -1], found[d][0, known - 1 + d], atol=1e-4)
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


def test_head_checkpoints(policy, head, tmp_path):
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
    for name, weight in head.state_dict().items():
        assert torch.equal(saved[trained_drafters.checkpoint_name(head.method, name)], weight)


def test_draft_model_checkpoint(policy, tmp_path):
    model = trained_drafters.build(policy, "draft_model", seed=3).eval()
    trained_drafters.save(model, policy, build_tokenizer(), tmp_path)
    assert model.config.head_dim == 32
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
