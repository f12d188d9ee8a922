"""The plugin in a real vLLM engine on a tiny random model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm import SamplingParams

from rollout_spec import engine_kwargs
from rollout_spec.doctor import explain
from rollout_spec.integrations.vllm import runner_v1
from rollout_spec.noise import host as noise
from rollout_spec.types import Draft
from tests.distributions import matches_distribution
from tests.integrations.engines import (
    assert_same,
    build,
    check_features,
    check_times,
    every_draft,
    generate,
    history_of,
    indexing_late,
    mixed_params,
    prompts_of,
    runner_of,
    session_of,
    stats_of,
    switching_off_and_on,
    verify_all,
)
from tests.verify.batches import probabilities

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def on(tiny_model):
    return build(tiny_model, **verify_all(**every_draft(5)))


@pytest.fixture(scope="module")
def adversarial(tiny_model):
    return build(tiny_model, **verify_all(num_speculative_tokens=5, drafter="tests.adversaries.Adversary"))


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1000), count=st.integers(1, 32), which=st.sampled_from(["on", "adversarial"]))
def test_same_rollouts_with_and_without_speculation(on, adversarial, off, reference_model, seed, count, which):
    """Any drafts, any mixture of temperatures, top-k, top-p, min-p, lengths; end of sequence included."""
    params = mixed_params(count, seed)
    prompts = [[1, 4 + i % 3, 9] for i in range(count)]
    llm = {"on": on, "adversarial": adversarial}[which]
    assert_same(generate(llm, params, prompts), generate(off, params, prompts), prompts, params, reference_model)


def test_the_drafter_is_told_what_the_target_saw(tiny_model, reference_model):
    """Prompts come in chunks and requests wait for a place, so that steps mix them."""
    options = verify_all(**every_draft(5))
    llm = build(tiny_model, max_num_seqs=6, max_num_batched_tokens=24, enable_chunked_prefill=True, **options)
    params = mixed_params(16, 3, temperature=0.7, top_k=0, top_p=1.0, min_p=0.0)
    generate(llm, params, [[1, *range(4, 4 + 7 * (i % 3)), 9] for i in range(16)])
    generate(llm, mixed_params(1, temperature=0.7, max_tokens=2))  # a request's end is noticed with the next step
    assert stats_of(llm)["accepted_tokens"] > 20
    num_checked, num_unknown = check_features(history_of(session_of(llm).drafter), reference_model, 0.7)
    assert num_checked > 200
    assert num_unknown == 0


def test_what_was_sampled_while_it_was_off_is_unknown(tiny_model, off, reference_model):
    """Switched off and on again within the rollouts: before and after, features are those of their own tokens."""
    llm = build(tiny_model, **verify_all(**every_draft(5)))
    params = mixed_params(6, 3, temperature=0.7, top_k=0, top_p=1.0, min_p=0.0, max_tokens=40, ignore_eos=True)
    prompts = prompts_of(params)
    ours = switching_off_and_on(llm, params, prompts, [range(4, 9), range(15, 17)])
    assert_same(ours, generate(off, params, prompts), prompts, params, reference_model)
    generate(llm, mixed_params(1, temperature=0.7, max_tokens=2))
    num_checked, num_unknown = check_features(history_of(session_of(llm).drafter), reference_model, 0.7)
    assert num_checked > 60
    assert num_unknown > 20


def test_drafts_are_accepted_and_rejected(on, adversarial):
    for llm in (on, adversarial):
        params = mixed_params(32, 7, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=60)
        generate(llm, params)
        stats = stats_of(llm)
        assert stats["accepted_tokens"] > 20
        assert stats["rejected_tokens"] > 20
        assert stats["drafter_errors"] == 0


def test_indexing_while_the_device_computes_changes_no_rollout(on, off, reference_model, monkeypatch):
    params = mixed_params(12, 5)
    prompts = prompts_of(params)
    with indexing_late(session_of(on), monkeypatch) as indexed:
        before = stats_of(on)
        assert_same(generate(on, params, prompts), generate(off, params, prompts), prompts, params, reference_model)
    assert sum(indexed) > 100
    assert stats_of(on)["accepted_tokens"] > before["accepted_tokens"]


def test_switching_off_and_on_between_generations(on, off, reference_model):
    params = mixed_params(12, 3)
    prompts = [[1, 4 + i % 3, 9] for i in range(12)]
    expected = generate(off, params, prompts)
    for enabled in (False, True, False):
        on.collective_rpc("rollout_spec", args=("set_enabled", enabled))
        before = stats_of(on)["draft_tokens"]
        assert_same(generate(on, params, prompts), expected, prompts, params, reference_model)
        assert (stats_of(on)["draft_tokens"] > before) == enabled
    on.collective_rpc("rollout_spec", args=("set_enabled", True))


def test_up_to_the_models_length(adversarial, on, off, reference_model):
    """Near max_model_len vLLM alone would verify zeros for every request."""
    params = mixed_params(8, 5, max_tokens=500, ignore_eos=True, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    prompts = [[1, 4, 9] * (1 + i) for i in range(8)]
    plain = generate(off, params, prompts)
    assert {len(p) + len(o.token_ids) for p, o in zip(prompts, plain, strict=True)} == {128}
    for llm in (adversarial, on):
        assert_same(generate(llm, params, prompts), plain, prompts, params, reference_model)


def test_history_holds_the_rollouts_as_trimmed(adversarial, off, monkeypatch):
    """What the drafter keeps is what the caller got: nothing past the end of sequence or the length.

    The drafter knows what is coming, so that most rollouts end with an accepted draft, after which the step samples on.
    """
    params = [*mixed_params(24, 11, temperature=1.0), *mixed_params(2, 12, ignore_eos=True)]
    texts = [list(output.token_ids) for output in generate(off, params)]
    # Ended requests are noticed one step later: only this one is left of those before.
    (before,) = generate(adversarial, mixed_params(1, 10, max_tokens=2, ignore_eos=True))
    session = session_of(adversarial)
    drafter, seen = session.drafter._drafter, []  # behind the calls for batches
    request_of = {}  # each request's place, by its seed

    def start_request(req_id, prompt_token_ids, *, problem_id=None, seed=None):
        type(drafter).start_request(drafter, req_id, prompt_token_ids)
        request_of[req_id] = [p.seed for p in params].index(
            runner_of(adversarial).requests[req_id].sampling_params.seed
        )

    def propose(req_ids, max_tokens):
        drafts = []
        for req_id, limit in zip(req_ids, max_tokens, strict=True):
            at = len(drafter._outputs[req_id])
            tokens = np.array(texts[request_of[req_id]][at : at + max(int(limit), 0)], np.int32)
            drafts.append(Draft(tokens, np.ones(len(tokens), np.float32)))
        return drafts

    def observe(req_ids, target_token_ids, num_accepted):
        for req_id, targets, accepted in zip(req_ids, target_token_ids, num_accepted, strict=True):
            seen.append((request_of[req_id], [*drafter._outputs[req_id], *targets[: accepted + 1]]))

    monkeypatch.setattr(drafter, "start_request", start_request)
    monkeypatch.setattr(drafter, "propose", propose)
    monkeypatch.setattr(drafter, "observe", observe)
    num_finished = len(drafter.finished)
    outputs = generate(adversarial, params)
    params.append(mixed_params(1, 13, max_tokens=2, ignore_eos=True)[0])
    texts.append([])
    generate(adversarial, params[-1:])
    assert [list(output.token_ids) for output in outputs] == texts[:-1]
    assert sorted(drafter.finished[num_finished:]) == sorted([list(before.token_ids), *texts[:-1]])
    past_the_end = {i for i, sampled in seen if len(sampled) > len(texts[i]) and outputs[i].finish_reason == "stop"}
    assert len(past_the_end) > 3


# -- the distribution ------------------------------------------------------------------------------------------------

NUM_SAMPLES = 6000
PROMPT = [1, 4, 9]


def sampled_pairs(llm, seeded=True, **parameters):
    params = [
        SamplingParams(
            max_tokens=3, ignore_eos=True, seed=noise.derive_seed("pairs", i) if seeded else None, **parameters
        )
        for i in range(NUM_SAMPLES)
    ]
    return np.array([list(o.token_ids) for o in generate(llm, params, [PROMPT] * NUM_SAMPLES)])


def follows_target(tokens, reference_model, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> bool:
    """First tokens, and second tokens given the three most frequent first ones, against the analytic softmax."""
    limits = {"top_k": np.int32(top_k), "top_p": np.float32(top_p), "min_p": np.float32(min_p)}

    def matches(context, samples):
        with torch.no_grad():
            logits = reference_model(torch.tensor([context])).logits[0, -1].numpy()
        return matches_distribution(samples, probabilities(logits, temperature=temperature, **limits))

    frequent = np.argsort(np.bincount(tokens[:, 0]))[::-1][:3]
    return matches(PROMPT, tokens[:, 0]) and all(
        matches([*PROMPT, int(first)], tokens[tokens[:, 0] == first, 1]) for first in frequent if first in tokens[:, 0]
    )


@pytest.fixture(scope="module")
def constant(tiny_model):
    return build(
        tiny_model, max_num_seqs=256, **verify_all(num_speculative_tokens=2, drafter="tests.adversaries.SameToken")
    )


@pytest.fixture(scope="module")
def rejecting(tiny_model):
    return build(
        tiny_model,
        max_num_seqs=256,
        **verify_all(num_speculative_tokens=2, drafter="tests.adversaries.SameToken", verify="rejection"),
    )


PARAMETERS = ({"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.9}, {"temperature": 1.2, "top_k": 5, "min_p": 0.05})


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        pytest.param(name, parameters, marks=() if name == kind else pytest.mark.exhaustive, id=f"{name}-{parameters}")
        for parameters, kind in zip(PARAMETERS, ("rejecting", "constant", "rejecting"), strict=True)
        for name in ("constant", "rejecting", "off")
    ],
)
def test_samples_follow_the_target(request, reference_model, name, parameters):
    tokens = sampled_pairs(request.getfixturevalue(name), **parameters)
    assert follows_target(tokens, reference_model, **parameters)


def test_stock_vllm_follows_the_same_target(tiny_model, reference_model):
    """The yardstick itself, and: an engine that asks for nothing is untouched."""
    stock = build(tiny_model, max_num_seqs=256)
    assert runner_of(stock).rollout_spec is None
    tokens = sampled_pairs(stock, seeded=False, temperature=0.5)
    assert follows_target(tokens, reference_model, temperature=0.5)
    with pytest.raises(RuntimeError, match="without rollout_spec"):
        stock.collective_rpc("rollout_spec", args=("stats",))


def test_broken_verifier_is_caught(constant, reference_model, monkeypatch):
    """An engine that accepts every draft fails the same check."""
    original = runner_v1.verify_rows

    def accept_all(logits, layout, rows, **kwargs):
        result = original(logits, layout, rows, **kwargs)
        output = result.output_token_ids.clone()
        for i, (start, end) in enumerate(zip(layout.starts[:-1].tolist(), layout.starts[1:].tolist(), strict=True)):
            output[i, : end - start - 1] = layout.draft[start : end - 1]
        return result._replace(output_token_ids=output)

    monkeypatch.setattr(runner_v1, "verify_rows", accept_all)
    assert not follows_target(sampled_pairs(constant, temperature=1.0), reference_model)


# -- seeds, processing, faults ---------------------------------------------------------------------------------------


def test_every_request_has_a_seed_of_its_own(on, monkeypatch):
    seeds = []
    describe = runner_v1.RunnerAdapterV1._describe_batch

    def spy(self, sampling):
        batch = describe(self, sampling)
        seeds.extend(zip(batch.req_ids, batch.rows.seeds.tolist(), strict=True))
        return batch

    monkeypatch.setattr(runner_v1.RunnerAdapterV1, "_describe_batch", spy)
    generate(on, [SamplingParams(max_tokens=12, n=1) for _ in range(20)], [PROMPT] * 20)
    outputs = on.generate([{"prompt_token_ids": PROMPT}], SamplingParams(max_tokens=12, n=8), use_tqdm=False)[0].outputs
    by_request = dict(seeds)
    assert len(by_request) == 28 == len(set(by_request.values()))
    assert set(seeds) == set(by_request.items()), "a request changed its seed"
    assert len({tuple(o.token_ids) for o in outputs}) > 1


def test_what_vllm_processes_is_verified_with_the_same_noise(on, adversarial, off):
    """Penalties and masks depend on the drafts before a position; vLLM applies them, our verifier samples.

    Without speculation vLLM applies biases, too, and before penalties; with speculation it refuses them.
    """
    params = mixed_params(12, 13, logprobs=1)
    params[0].repetition_penalty = 1.3
    params[1].presence_penalty = 0.7
    params[2].frequency_penalty = 0.5
    params[3].min_tokens = 30
    params[4].allowed_token_ids = [5, 6, 7, 8, 9, 10]
    params[5]._bad_words_token_ids = [[6], [7, 8]]
    params[5].bad_words = ["w2", "w3 w4"]
    params[6].logit_bias = {7: 3.0, 8: -100.0}
    params[7].logit_bias, params[7].repetition_penalty = {tokens: 2.0 + tokens / 10 for tokens in range(3, 24)}, 1.5
    params[8].logit_bias, params[8].allowed_token_ids = {5: 20.0, 6: 4.0, 7: 4.0}, [6, 7, 8, 9]
    prompts = [[1, 4 + i % 3, 9] for i in range(12)]
    plain = generate(off, params, prompts)
    for llm in (on, adversarial):
        for a, b, p in zip(generate(llm, params, prompts), plain, params, strict=True):
            assert list(a.token_ids) == list(b.token_ids), p
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert [v.logprob for v in x.values()] == pytest.approx([v.logprob for v in y.values()], abs=1e-4)


@pytest.mark.parametrize("name", ["on", "off"])
def test_scores_of_chosen_tokens_are_refused(request, name):
    with pytest.raises(ValueError, match="logprob_token_ids"):
        generate(request.getfixturevalue(name), [SamplingParams(logprob_token_ids=[5])])


def test_own_logits_processors_are_refused(tiny_model):
    with pytest.raises(ValueError, match="KeepAll"):
        build(tiny_model, logits_processors=["tests.adversaries:KeepAll"], **engine_kwargs(speculation=False))


def test_a_row_that_masks_leave_empty_ends_nobody_elses_request(on, adversarial, off):
    """vLLM emits token 0 where nothing is allowed; only logits that are broken end the run."""
    stuck = SamplingParams(allowed_token_ids=[2], min_tokens=3, max_tokens=5, seed=1)
    params = [stuck, *mixed_params(3, 29, max_tokens=10)]
    plain = generate(off, params)
    assert list(plain[0].token_ids[:3]) == [0, 0, 0]
    for llm in (on, adversarial):
        assert [list(o.token_ids) for o in generate(llm, params)] == [list(o.token_ids) for o in plain]
        assert stats_of(llm)["drafter_errors"] == 0


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logits"])
def test_every_kind_of_logprobs_is_the_same_with_speculation(tiny_model, mode):
    options = {"logprobs_mode": mode}
    plain = build(tiny_model, **engine_kwargs(speculation=False), **options)
    llm = build(tiny_model, **verify_all(num_speculative_tokens=5, drafter="tests.adversaries.Adversary"), **options)
    for count in (0, 2):
        params = mixed_params(6, 17, logprobs=count, max_tokens=20, min_p=0.0)
        params[0].repetition_penalty = 1.2
        for a, b in zip(generate(llm, params), generate(plain, params), strict=True):
            assert list(a.token_ids) == list(b.token_ids)
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert [v.logprob for v in x.values()] == pytest.approx([v.logprob for v in y.values()], abs=1e-4)


@pytest.mark.parametrize("drafter", ["RaisesAfterSomeSteps", "DraftsTooMany", "OutOfVocabulary"])
def test_a_drafter_with_a_fault_is_switched_off(tiny_model, off, reference_model, drafter):
    llm = build(tiny_model, **verify_all(num_speculative_tokens=5, drafter=f"tests.adversaries.{drafter}"))
    params = mixed_params(8, 15, max_tokens=40, ignore_eos=True)
    prompts = [[1, 4 + i % 3, 9] for i in range(8)]
    assert_same(generate(llm, params, prompts), generate(off, params, prompts), prompts, params, reference_model)
    assert stats_of(llm)["drafter_errors"] == 1


def test_invalid_logits_raise(tiny_model):
    llm = build(tiny_model, **verify_all(num_speculative_tokens=2, drafter="tests.adversaries.SameToken"))
    with torch.no_grad():
        for parameter in runner_of(llm).model.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="nothing can be sampled"):
        generate(llm, [SamplingParams(max_tokens=4)])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"additional_config": {"rollout_spec": {"num_speculativ_tokens": 4}}},
            "did you mean 'num_speculative_tokens'",
        ),
        ({"additional_config": {"rollout_spec": {}}}, "speculative_config is missing"),
        (
            {**engine_kwargs(), "additional_config": {"rollout_spec": {"drafter": "no.such.module.Drafter"}}},
            "cannot be imported",
        ),
        (
            {**engine_kwargs(), "additional_config": {"rollout_spec": {"drafter": "suffixx"}}},
            "unknown drafter 'suffixx'.*did you mean 'suffix'",
        ),
        (
            {
                **engine_kwargs(num_speculative_tokens=4),
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
            },
            "can draft beside history",
        ),
        (
            {**engine_kwargs(speculation=False), "speculative_config": engine_kwargs()["speculative_config"]},
            "speculation=False",
        ),
        (
            {
                **engine_kwargs(num_speculative_tokens=8),
                "speculative_config": engine_kwargs(num_speculative_tokens=3)["speculative_config"],
            },
            "make them equal",
        ),
    ],
)
def test_bad_configurations_raise_before_anything_is_generated(tiny_model, kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(tiny_model, **kwargs)


@pytest.mark.parametrize("drafter", ["history", "tests.adversaries.Adversary"])
def test_a_budget_changes_no_rollout(tiny_model, off, reference_model, drafter):
    """Drafts are cut by what steps take, which differs from run to run; the rollouts do not."""
    llm = build(tiny_model, **engine_kwargs(num_speculative_tokens=5, drafter=drafter))
    for seed in range(3):
        params = mixed_params(12, 40 + seed, max_tokens=40, ignore_eos=True)
        prompts = prompts_of(params)
        assert_same(generate(llm, params, prompts), generate(off, params, prompts), prompts, params, reference_model)
    tokens, seconds = session_of(llm).budget.cost.curve(drafted=False)
    assert tokens.size
    assert (seconds > 0).all()
    stats = stats_of(llm)
    assert stats["drafter_errors"] == 0
    assert stats["draft_tokens"] > 0
    check_times(stats)
    report = llm.collective_rpc("rollout_spec", args=("report",))[0]
    assert json.loads(json.dumps(report)) == report
    assert report["stats"]["draft_tokens"] == stats["draft_tokens"]
    text = explain(report)
    assert "forward pass" in text
    assert "Verified tokens by position" in text
