"""The comparison of the engine's log-probabilities with the trainer's forward pass, without an engine."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import torch
from vllm import SamplingParams

from rollout_spec.integrations.trainers.logprob_check import (
    NUM_CHECKED_ROLLOUTS,
    NUM_CHECKED_TOKENS,
    compare,
    logprob_errors,
)


@pytest.mark.parametrize("length", [1, NUM_CHECKED_TOKENS + 40])
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


def compared(model, outputs, params=None, *, mode="raw_logprobs", prompt="w1", autocast=None, tolerance=None):
    params = [params or SamplingParams(logprobs=0)] * len(outputs)
    engine = SimpleNamespace(dtype=torch.float32, logprobs_mode=mode)
    return compare(model, engine, [prompt] * len(outputs), outputs, params, autocast, tolerance)


@pytest.mark.parametrize("logprob", [-50.0, math.nan])
def test_other_weights_are_found(reference_model, logprob):
    with pytest.raises(RuntimeError, match="computes in float32, the trainer in float32: .* else look for weights"):
        compared(reference_model, [an_output(logprob)])


def test_a_trainer_under_autocast_computes_in_its_precision(reference_model):
    """TRL's default: weights in float32, bf16=True."""
    with torch.no_grad():
        exact = float(reference_model(torch.tensor([[1, 4]])).logits[0, -1].log_softmax(-1)[5])
    near, far = [an_output(exact + 0.02)], [an_output(exact + 1)]
    assert compared(reference_model, near, autocast="bfloat16")[1] == pytest.approx(0.02, abs=1e-4)
    with pytest.raises(RuntimeError, match="the trainer in float32"):
        compared(reference_model, near)
    with pytest.raises(RuntimeError, match="computes in float32, the trainer in bfloat16"):
        compared(reference_model, far, autocast="bfloat16")


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": {"prompt_token_ids": [1, 4], "multi_modal_data": {"image": object()}}}, "images"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "w1"}, IMAGE]}]}, "images"),
        ({"mode": "raw_logits"}, "logprobs_mode='raw_logits' gives none"),
        ({"model": None}, "the trainer's model is not known"),
        ({"params": SamplingParams(top_p=0.9), "mode": "processed_logprobs"}, "top-p"),
        ({"params": SamplingParams(presence_penalty=1.0), "mode": "processed_logprobs"}, "penalties"),
    ],
)
def test_what_cannot_be_compared_is_no_alarm(changed, message, caplog):
    assert math.isnan(compared(**{"model": object(), "outputs": [an_output(-50.0)], **changed})[0])
    assert "were not compared" in caplog.text
    assert message in caplog.text


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
            ([an_output(exact + 1)] * 2, plain, "look for weights"),
        ):
            passes.append(0)
            with pytest.raises(RuntimeError, match=complaint) if complaint else nullcontext():
                compared(reference_model, outputs, params, mode="processed_logprobs")
    assert passes == ([NUM_CHECKED_ROLLOUTS] * 8 if num_ranks > 1 else [NUM_CHECKED_ROLLOUTS, 2, 2, 0, 0, 0, 2, 2])


def test_infinite_tolerance_skips_the_check(caplog):
    assert math.isnan(compared(None, [an_output(-50.0)], tolerance=math.inf)[0])
    assert not caplog.text
