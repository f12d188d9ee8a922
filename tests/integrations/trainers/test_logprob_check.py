"""The comparison of the engine's log-probabilities with the trainer's forward pass, without an engine."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from rollout_spec.integrations.trainers.logprob_check import (
    NUM_CHECKED_ROLLOUTS,
    NUM_CHECKED_TOKENS,
    LogprobCheck,
    logprob_errors,
)


def an_engine(mode="raw_logprobs"):
    return SimpleNamespace(dtype=torch.float32, logprobs_mode=mode)


@pytest.mark.parametrize("length", [1, 64, 65, NUM_CHECKED_TOKENS + 40])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_long_rollouts_are_compared_in_part(reference_model, length, mode):
    tokens = [3 + (7 * i) % 20 for i in range(length)]
    with torch.no_grad():
        logits = reference_model(torch.tensor([[1, 4, *tokens]])).logits[0, 1:-1]
    scores = (logits / (0.5 if mode == "processed_logprobs" else 1)).log_softmax(-1)
    logprobs = [{t: SimpleNamespace(logprob=float(row[t]))} for t, row in zip(tokens, scores, strict=True)]
    completion = SimpleNamespace(token_ids=tokens, logprobs=logprobs)
    output = SimpleNamespace(prompt_token_ids=[1, 4], outputs=[completion])
    errors = logprob_errors(reference_model, output, SamplingParams(temperature=0.5), mode)
    assert len(errors) == min(length, NUM_CHECKED_TOKENS)
    assert errors.max() < 1e-4
    logprobs[min(length, NUM_CHECKED_TOKENS) - 1][tokens[min(length, NUM_CHECKED_TOKENS) - 1]].logprob += 1
    assert logprob_errors(reference_model, output, SamplingParams(temperature=0.5), mode)[-1] > 0.9


def an_output(logprob):
    completion = SimpleNamespace(token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=logprob)}])
    return SimpleNamespace(prompt_token_ids=[1, 4], outputs=[completion])


@pytest.mark.parametrize("logprob", [-50.0, math.nan])
def test_equal_precisions_are_not_blamed(tiny_model, logprob):
    """Another cause is looked for: here, other weights."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    check = LogprobCheck()
    with pytest.raises(RuntimeError, match="Both compute in float32, so look for other weights"):
        check.compare(model, an_engine(), ["w1"], [an_output(logprob)], [SamplingParams(logprobs=0)])
    assert not check.error[0] <= 1e-4


def test_a_trainer_under_autocast_computes_in_its_precision(tiny_model):
    """TRL's default: weights in float32, bf16=True."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        exact = float(model(torch.tensor([[1, 4]])).logits[0, -1].log_softmax(-1)[5])
    near, far = [an_output(exact + 0.02)], [an_output(exact + 1)]
    args = (["w1"], near, [SamplingParams(logprobs=0)])
    LogprobCheck().compare(model, an_engine(), *args, autocast_dtype="bfloat16")
    with pytest.raises(RuntimeError, match="Both compute in float32"):
        LogprobCheck().compare(model, an_engine(), *args)
    with pytest.raises(RuntimeError, match="engine computes in float32 and the trainer in bfloat16"):
        LogprobCheck().compare(model, an_engine(), ["w1"], far, args[2], autocast_dtype="bfloat16")


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_token_ids": [1, 4], "multi_modal_data": {"image": object()}},
        [{"role": "user", "content": [{"type": "text", "text": "w1"}, IMAGE]}],
    ],
)
def test_prompts_with_images_are_left_out(prompt, caplog):
    check = LogprobCheck()
    check.compare(object(), an_engine(), [prompt], [an_output(-50.0)], [SamplingParams(logprobs=0)])
    assert math.isnan(check.error[0])
    assert "1 of the first 1 rollouts were not compared" in caplog.text
    assert "images" in caplog.text


def what_it_raises(check, *args):
    try:
        check.compare(*args)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_ranks_run_the_model_as_often(reference_model, monkeypatch, num_ranks):
    """Under FSDP and ZeRO-3 every pass is a collective, for which a rank that runs more of them waits forever."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: num_ranks > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: num_ranks)
    with torch.no_grad():
        exact = float(reference_model(torch.tensor([[1, 4]])).logits[0, -1].log_softmax(-1)[5])
    good, empty, unscored = an_output(exact), an_output(exact), an_output(exact)
    empty.outputs[0].token_ids = []
    unscored.outputs[0].logprobs = None
    plain, penalised = SamplingParams(logprobs=0), SamplingParams(logprobs=0, presence_penalty=1.0)
    passes = []
    with monkeypatch.context() as patch:
        forward = reference_model.forward

        def counting(input_ids, logits_to_keep):
            passes[-1] += 1
            return forward(input_ids, logits_to_keep=logits_to_keep)

        patch.setattr(reference_model, "forward", counting)
        for outputs, params, complaint in (
            ([good] * (NUM_CHECKED_ROLLOUTS + 3), plain, None),
            ([good] * 2, plain, None),
            ([good, empty, good], plain, None),
            ([empty] * 3, plain, None),
            ([good] * 3, penalised, None),
            ([], plain, None),
            ([unscored, good], plain, "by nan on average"),
            ([an_output(exact + 1)] * 2, plain, "other weights"),
        ):
            passes.append(0)
            check, count = LogprobCheck(), len(outputs)
            error = what_it_raises(
                check, reference_model, an_engine("processed_logprobs"), ["w1"] * count, outputs, [params] * count
            )
            assert (error is None) == (complaint is None)
            assert complaint is None or complaint in error
            assert check.error is not None, "it would compare again at this rank's next generation alone"
    assert passes == ([NUM_CHECKED_ROLLOUTS] * 8 if num_ranks > 1 else [NUM_CHECKED_ROLLOUTS, 2, 2, 0, 0, 0, 2, 2])


def test_infinite_tolerance_skips_the_check():
    check = LogprobCheck(math.inf)
    check.compare(None, an_engine("processed_logprobs"), ["w1"], [an_output(-50.0)], [SamplingParams(logprobs=0)])
    assert math.isnan(check.error[0])


def test_modes_without_logprobs_are_named(caplog):
    check = LogprobCheck()
    check.compare(object(), an_engine("raw_logits"), ["w1"], [an_output(-50.0)], [SamplingParams(logprobs=0)])
    assert math.isnan(check.error[0])
    assert "logprobs_mode='raw_logits' gives none" in caplog.text


def test_a_model_that_is_not_known_is_no_alarm(caplog):
    check = LogprobCheck()
    check.compare(None, an_engine(), ["w1"], [an_output(-50.0)], [SamplingParams(logprobs=0)])
    assert math.isnan(check.error[0])
    assert "the trainer's model is not known" in caplog.text


def test_rollouts_that_the_trainer_wants_no_scores_of():
    params = [SamplingParams(logprobs=1 if i == 2 else None) for i in range(NUM_CHECKED_ROLLOUTS + 2)]
    unscored = LogprobCheck().ask_for_logprobs(params)
    assert unscored == [i for i in range(NUM_CHECKED_ROLLOUTS) if i != 2]
    assert [p.logprobs for p in params] == [0, 0, 1, *[0] * (NUM_CHECKED_ROLLOUTS - 3), None, None]
