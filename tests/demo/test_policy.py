from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_spec.demo.policy import HEAD_DIM, MAX_POSITION_EMBEDDINGS, build_model, build_tokenizer
from rollout_spec.demo.task import VOCABULARY
from rollout_spec.demo.warm_start import IGNORED_LABEL, learning_rate_factor, trace_batches, warm_start


def test_model_is_small_and_shaped_for_the_engine() -> None:
    model = build_model(build_tokenizer(), seed=0)
    assert model.num_parameters() < 1_000_000
    assert model.dtype == torch.float32
    assert model.config.num_hidden_layers == 2
    assert model.config.head_dim == HEAD_DIM
    assert model.config.max_position_embeddings == MAX_POSITION_EMBEDDINGS


def test_forward_gives_one_logit_per_token() -> None:
    tokenizer = build_tokenizer()
    batch = tokenizer(["numbers 7 3 5 target 22 :", "numbers 7 3 5"], return_tensors="pt", padding=True)
    logits = build_model(tokenizer, seed=0)(**batch).logits
    assert logits.shape == (2, 7, len(tokenizer))
    assert torch.isfinite(logits).all()


def test_weights_depend_on_the_seed_and_leave_the_global_generator_alone() -> None:
    tokenizer = build_tokenizer()
    state = torch.random.get_rng_state()
    first, again, other = (build_model(tokenizer, seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_tokenizer_pads_left_and_adds_nothing() -> None:
    tokenizer = build_tokenizer()
    assert len(tokenizer) == len(VOCABULARY) + 4
    batch = tokenizer(["try 7", "try"], padding=True)
    assert batch["attention_mask"] == [[1, 1], [0, 1]]
    assert batch["input_ids"][1][0] == tokenizer.pad_token_id
    assert tokenizer.decode(batch["input_ids"][0]) == "try 7"
    assert tokenizer.encode("unheard-of") == [tokenizer.unk_token_id]


def test_batches_label_the_completion_and_its_end() -> None:
    tokenizer = build_tokenizer()
    input_ids, labels = next(trace_batches(tokenizer, random.Random(0), batch_size=4, batches_per_pool=2))
    assert input_ids.shape == labels.shape
    for ids, wanted in zip(input_ids, labels, strict=True):
        learned = wanted != IGNORED_LABEL
        assert torch.equal(ids[learned], wanted[learned])
        assert not learned[:7].any()
        assert learned[7]
        assert wanted[learned][-1] == tokenizer.eos_token_id
        assert (ids[learned.nonzero()[-1] + 1 :] == tokenizer.pad_token_id).all()


def test_learning_rate_warms_up_and_ends_near_zero() -> None:
    factors = [learning_rate_factor(step, 100) for step in range(100)]
    assert max(factors) == factors[4] == 1.0
    assert factors[:5] == sorted(factors[:5])
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert 0.0 < factors[-1] < 0.01


def test_warm_start_learns_repeats_and_saves(tmp_path: Path) -> None:
    losses: list[float] = []
    stats = warm_start(tmp_path / "a", seed=5, steps=8, batch_size=4, progress=lambda _, loss: losses.append(loss))
    warm_start(tmp_path / "b", seed=5, steps=8, batch_size=4)
    assert stats["steps"] == len(losses) == 8
    assert losses[-1] < losses[0]
    saved, repeated = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "ab")
    for weight, twin in zip(saved.parameters(), repeated.parameters(), strict=True):
        assert torch.equal(weight, twin)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.padding_side == "left"
    assert tokenizer.decode(tokenizer.encode("try 7 + 5 = 12")) == "try 7 + 5 = 12"


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"batch_size": 0}])
def test_empty_training_raises(tmp_path: Path, arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        warm_start(tmp_path, **arguments)
