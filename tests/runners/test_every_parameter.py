"""Whatever a request asks of sampling, drafts change nothing, in both of vLLM's model runners.

`tests/both_runners.py` runs this folder once with each of them. One table: each row is asked for greedily and sampled,
all rows in one batch, so that steps mix them.
"""

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

from rollout_spec import engine_kwargs
from rollout_spec.integrations.vllm import compat
from rollout_spec.noise import host as noise
from tests.integrations.draft_models import write_eagle_head
from tests.integrations.engines import (
    DEVICE,
    IS_V2,
    MIXES_MASKS,
    RESIDENT,
    V2_OF_0_31,
    assert_same_scores,
    build,
    every_draft,
    runner_of,
    stats_of,
    verify_all,
)
from tests.runners import adaptive

PROMPT = [1, 4, 9, 5, 4, 9]
REPETITION = RepetitionDetectionParams(max_pattern_size=3, min_count=2)

FAST = {
    "temperature": {"temperature": 1.3},
    "n": {"n": 3},
    "max_tokens": {"max_tokens": 1},
    "ignore_eos": {"ignore_eos": True},
    "stop": {"stop": ["w7", "w3 w"], "ignore_eos": True},
    "stop after some tokens": {"stop": ["w1", "w11 w", "zz"], "min_tokens": 6, "max_tokens": 30},
    "stop within a word": {"stop": ["9"], "include_stop_str_in_output": True, "max_tokens": 30},
    "include_stop_str_in_output": {"stop": ["w5", "w9"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [7, 12], "ignore_eos": True},
    "detokenize": {"detokenize": False},
    "skip_special_tokens": {"skip_special_tokens": False},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False, "skip_special_tokens": False},
    "output_kind": {"output_kind": RequestOutputKind.FINAL_ONLY},
    "skip_reading_prefix_cache": {"skip_reading_prefix_cache": True},
    "extra_args": {"extra_args": {"somebody_elses": 1}},
    "logprobs": {"logprobs": 1},
    "repetition_detection": {"repetition_detection": REPETITION, "ignore_eos": True, "max_tokens": 40},
}
"""Sampled from the model's own logits."""

PROCESSED = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all three": {"top_k": 6, "top_p": 0.9, "min_p": 0.02},
    "presence_penalty": {"presence_penalty": 0.7},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": [5, 6, 7, 8]},
    "logit_bias": {"logit_bias": {7: 3.0, 8: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": [5, 6, 7, 8, 9, 10]},
    "bad_words": {"bad_words": ["w2", "w3 w4"]},
    "structured_outputs": {"structured_outputs": StructuredOutputsParams(regex="(w1|w2|w3)((w4|w5)(w6|w7))+")},
    "nothing is allowed": {"allowed_token_ids": [2], "min_tokens": 3, "max_tokens": 5, "logprobs": None},
    "none": {},
}
"""From logits that vLLM's processors have changed; requests that ask for nothing share their batches."""

SCORED = {
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "flat_logprobs": {"flat_logprobs": True, "logprobs": 2},
    "penalised": {"repetition_penalty": 1.2, "logprobs": 2},
    "truncated": {"top_k": 4, "logprobs": 2},
}
"""Scores of more tokens than the sampled one, which vLLM's code computes."""

NOT_HERE = {
    "seed": "all rows have one",
    "thinking_token_budget": "refused by V1 with drafts: test_thinking.py",
    "logprob_token_ids": "refused by V1: test_errors.py",
    "watermarking": "refused where an engine has it: test_vllm_config.py",
    "trace_decode_token_ids": "refused where an engine has it: test_vllm_config.py",
    "prompt_logprob_token_ids": "nothing is sampled in a prompt",
    "prompt_logprob_start": "nothing is sampled in a prompt",
    "routed_experts_prompt_start": "nothing is sampled in a prompt",
    "stream_interval": "of vLLM's front end alone",
    "skip_clone": "of vLLM's front end alone",
    "output_text_buffer_length": "of vLLM's front end alone",
}
"""Parameters without a row, and why."""
if MIXES_MASKS:
    del PROCESSED["allowed_token_ids"], PROCESSED["nothing is allowed"]
    NOT_HERE["allowed_token_ids"] = "vLLM mixes them up"

GROUPS = {"fast": FAST, "processed": PROCESSED, "scored": SCORED}
ROWS = [(group, name) for group, rows in GROUPS.items() for name in rows]
KINDS = ("greedy", "sampled")
DRAFTING = ("device",) if IS_V2 else ("history", "adversary")
if V2_OF_0_31:
    DRAFTING += ("adaptive", "model")


@pytest.fixture(scope="module")
def engines(tiny_model, tmp_path_factory):
    head = str(write_eagle_head(tiny_model, tmp_path_factory.mktemp("drafters") / "eagle"))
    eagle = {"method": "eagle", "model": head, "num_speculative_tokens": 2}
    named = {
        "without drafts": engine_kwargs(speculation=False),
        "history": verify_all(**every_draft(3)),
        "adversary": verify_all(num_speculative_tokens=3, drafter="tests.adversaries.Adversary"),
        "device": verify_all(num_speculative_tokens=3, **DEVICE),
        "model": engine_kwargs(num_speculative_tokens=3, speculative_config=eagle, **RESIDENT),
        "vLLM's own": {},
    }
    wanted = ["without drafts", *(name for name in DRAFTING if name != "adaptive"), "vLLM's own"]
    built = {name: build(tiny_model, **named[name]) for name in wanted}
    if V2_OF_0_31:
        with adaptive.as_on_a_gpu():
            built["adaptive"] = build(tiny_model, **engine_kwargs(num_speculative_tokens=3, **DEVICE))
        adaptive.set_costs(runner_of(built["adaptive"]), lambda num_tokens: 50.0 + num_tokens)
    return built


def params_of(group: str, name: str, kind: str) -> SamplingParams:
    fields = {"max_tokens": 14, "logprobs": 0, "temperature": 1.0, **GROUPS[group][name]}
    if kind == "greedy":
        fields |= {"temperature": 0.0, "n": 1}
    return SamplingParams(**fields, seed=noise.derive_seed(group, name))


def ask(llm, group):
    """By row and kind, what an engine gives: a batch for the group."""
    asked = [(name, kind) for name in GROUPS[group] for kind in KINDS]
    params = [params_of(group, name, kind) for name, kind in asked]
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * len(params), params, use_tqdm=False)
    return dict(zip(asked, outputs, strict=True))


@pytest.fixture(scope="module")
def answers(engines):
    """By group and engine. History knows it the second time."""
    for group in GROUPS:
        for name in DRAFTING:
            ask(engines[name], group)
    return {(group, name): ask(llm, group) for group in GROUPS for name, llm in engines.items()}


def assert_equal(ours, theirs):
    """Two `RequestOutput`s: everything that a caller gets of the samples and the prompt."""
    assert len(ours.outputs) == len(theirs.outputs)
    for a, b in zip(ours.outputs, theirs.outputs, strict=True):
        assert list(a.token_ids) == list(b.token_ids)
        assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
        assert_same_scores(a.logprobs or [], b.logprobs or [])
    assert_same_scores(ours.prompt_logprobs or [], theirs.prompt_logprobs or [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("group", "name"), ROWS)
def test_drafts_change_nothing(answers, group, name, kind):
    expected = answers[group, "without drafts"][name, kind]
    for engine in DRAFTING:
        assert_equal(answers[group, engine][name, kind], expected)


@pytest.mark.parametrize("kind", KINDS if V2_OF_0_31 else KINDS[:1])
@pytest.mark.parametrize(("group", "name"), ROWS)
def test_without_drafts_it_is_what_vllm_samples(answers, group, name, kind):
    """In V1, and before 0.31 in V2, whose noise is another, where nothing is random."""
    assert_equal(answers[group, "without drafts"][name, kind], answers[group, "vLLM's own"][name, kind])


MODES = ["raw_logprobs", *(() if IS_V2 and compat.is_before(0, 26) else ("raw_logits", "processed_logits"))]


@pytest.mark.parametrize(("mode", "group"), [("raw_logprobs", "processed"), *((mode, "scored") for mode in MODES)])
def test_every_kind_of_logprobs(engines, monkeypatch, mode, group):
    """The tables' engines give those that are processed. Where vLLM's own noise is another, only greedy rows agree."""
    for llm in engines.values():
        sampler = runner_of(llm).sampler
        sampler = getattr(sampler, "inner", sampler)
        for part in (sampler, getattr(sampler, "topk_topp_sampler", sampler)):
            monkeypatch.setattr(part, "logprobs_mode", mode)
    expected = ask(engines["without drafts"], group)
    for name in (*DRAFTING, "vLLM's own"):
        for row, output in ask(engines[name], group).items():
            if name in DRAFTING or V2_OF_0_31 or row[1] == "greedy":
                assert_equal(output, expected[row])


def test_drafts_were_accepted_and_rejected(engines, answers):
    for name in DRAFTING:
        stats = stats_of(engines[name])
        assert stats["accepted_tokens"] > 10
        assert stats["rejected_tokens"] > 100
        assert stats["drafter_errors"] == 0
        assert (stats["drafter_bytes"] > 0) == (name != "adversary"), "which does not say what it takes"


def test_every_parameter_has_a_row():
    """A new release of vLLM may have more."""
    asked = {field for rows in GROUPS.values() for fields in rows.values() for field in fields}
    fields = {field for field in SamplingParams.__struct_fields__ if not field.startswith("_")}
    assert fields <= asked | set(NOT_HERE)
