"""The plugin in vLLM's V2 model runner. vLLM's kernels and ours are emulated, so everything is small."""

from __future__ import annotations

import pytest
import torch
import vllm
from triton.runtime.errors import InterpreterError
from vllm import SamplingParams

from rollout_spec import engine_kwargs
from rollout_spec.integrations.vllm import runner_v2
from rollout_spec.integrations.vllm.sampling import scaled
from tests.integrations.engines import (
    PLAIN,
    assert_same,
    build,
    check_features,
    check_times,
    count_preemptions,
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

pytestmark = pytest.mark.engine

K = 4


@pytest.fixture(scope="module")
def off(tiny_model):
    return build(tiny_model, **engine_kwargs(speculation=False))


@pytest.fixture(scope="module")
def on(tiny_model):
    return build(tiny_model, **verify_all(**every_draft(K)))


@pytest.fixture(scope="module")
def adversarial(tiny_model):
    return build(tiny_model, **verify_all(num_speculative_tokens=K, drafter="tests.adversaries.Adversary"))


def test_it_is_the_v2_runner(stock, on, off):
    for llm in (stock, on, off):
        assert type(runner_of(llm)).__module__ == "vllm.v1.worker.cpu.model_runner"
    assert runner_of(stock).rollout_spec is None or vllm.__version_tuple__[:2] < (0, 31)
    assert isinstance(runner_of(on).speculator, runner_v2.HistorySpeculator)
    assert runner_of(off).speculator is None
    assert isinstance(runner_of(off).sampler, runner_v2.VerifyingSampler)


def test_indexing_while_the_device_computes_changes_no_rollout(on, off, reference_model, monkeypatch):
    params = mixed_params(6, 5, max_tokens=24, **PLAIN)
    prompts = prompts_of(params)
    with indexing_late(session_of(on), monkeypatch) as indexed:
        got = generate(on, params, prompts)
    assert_same(got, generate(off, params, prompts), prompts, params, reference_model)
    assert sum(indexed) > 20


def test_same_rollouts_as_stock_vllm(stock, off, on, adversarial, reference_model):
    """Tokens, log-probabilities and ranks, greedy and sampled requests mixed, end of sequence included."""
    params = mixed_params(9, 1, max_tokens=24, logprobs=0, **PLAIN)
    prompts = prompts_of(params)
    expected = generate(stock, params, prompts)
    for llm in (off, on, adversarial):
        assert_same(generate(llm, params, prompts), expected, prompts, params, reference_model)
    for llm in (on, adversarial):
        stats = stats_of(llm)
        assert stats["accepted_tokens"] > 0
        assert stats["rejected_tokens"] > 0
        assert stats["drafter_errors"] == 0


def test_the_drafter_is_told_what_the_target_saw(tiny_model, reference_model):
    llm = build(tiny_model, **verify_all(**every_draft(K)))
    generate(llm, mixed_params(6, 3, temperature=0.7, max_tokens=24, **PLAIN))
    generate(llm, mixed_params(1, temperature=0.7, max_tokens=2, **PLAIN))  # the others' end is noticed with this
    assert stats_of(llm)["accepted_tokens"] > 5
    checked, unknown = check_features(history_of(session_of(llm).drafter), reference_model, 0.7)
    assert checked > 50
    assert unknown == 0
    params = mixed_params(3, 8, temperature=0.7, max_tokens=20, ignore_eos=True, **PLAIN)
    switching_off_and_on(llm, params, prompts_of(params), [range(4, 7)])
    generate(llm, mixed_params(1, temperature=0.7, max_tokens=2, **PLAIN))
    now = check_features(history_of(session_of(llm).drafter), reference_model, 0.7)
    assert now[0] > checked + 20
    assert now[1] > 3


@pytest.mark.parametrize("num_logprobs", [0, 2])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_truncated_requests_are_sampled_as_by_stock_vllm(stock, off, adversarial, num_logprobs, mode, monkeypatch):
    """Tokens, log-probabilities and ranks, of greedy requests and of those that are not truncated, too."""
    params = mixed_params(8, 2, max_tokens=12, logprobs=num_logprobs)
    prompts, said = prompts_of(params), []
    for llm in (stock, off, adversarial):
        sampler = runner_of(llm).sampler
        monkeypatch.setattr(getattr(sampler, "inner", sampler), "logprobs_mode", mode)
        said.append(generate(llm, params, prompts))
    for ours in said[1:]:
        for a, b in zip(ours, said[0], strict=True):
            assert list(a.token_ids) == list(b.token_ids)
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert {token: v.rank for token, v in x.items()} == {token: v.rank for token, v in y.items()}
                assert [v.logprob for v in x.values()] == pytest.approx([v.logprob for v in y.values()], abs=1e-4)


def test_what_vllm_processes_is_verified_with_the_same_noise(stock, adversarial):
    """Penalties, banned words and biases depend on the drafts before a position; vLLM applies them, we sample."""
    params = mixed_params(6, 3, max_tokens=14, logprobs=0, **PLAIN)
    params[0].repetition_penalty = 1.3
    params[1].presence_penalty = 0.7
    params[2].min_tokens = 10
    params[3].logit_bias = {7: 3.0, 8: -100.0}
    params[4].allowed_token_ids = [5, 6, 7, 8, 9, 10]
    prompts = prompts_of(params)
    ours, plain = generate(adversarial, params, prompts), generate(stock, params, prompts)
    for a, b, p in zip(ours, plain, params, strict=True):
        assert list(a.token_ids) == list(b.token_ids), p
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert [v.logprob for v in x.values()] == pytest.approx([v.logprob for v in y.values()], abs=1e-4)


def test_what_frameworks_send_stays_on_the_fast_path(stock, on, adversarial, monkeypatch):
    """At least one token, and the most probable token besides; vLLM's own code copies all logits for that."""
    params = mixed_params(4, 9, max_tokens=14, logprobs=1, min_tokens=2, **PLAIN)
    processed, scored = [], []
    monkeypatch.setattr(runner_v2, "scaled", lambda *args: scored.append(1) or scaled(*args))
    for llm in (on, adversarial):
        sampler = runner_of(llm).sampler
        monkeypatch.setattr(sampler, "_process", lambda *args, f=sampler._process: processed.append(1) or f(*args))
    prompts = prompts_of(params)
    plain = generate(stock, params, prompts)
    for llm in (on, adversarial):
        processed.clear()
        ours = generate(llm, params, prompts)
        assert 0 < len(processed) <= 4, "until each request has said two tokens"
        for a, b in zip(ours, plain, strict=True):
            assert list(a.token_ids) == list(b.token_ids)
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert x.keys() == y.keys()
                assert [v.logprob for v in x.values()] == pytest.approx([v.logprob for v in y.values()], abs=1e-4)
    assert not scored


@pytest.mark.parametrize("speculation", [True, False])
def test_what_is_counted_is_what_requests_get(tiny_model, speculation):
    """Chunks of prompts sample nothing. A stop token within a draft ends a request in the middle of a step."""
    options = verify_all(num_speculative_tokens=K, drafter="tests.adversaries.Adversary")
    llm = build(
        tiny_model,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        enable_chunked_prefill=True,
        **(options if speculation else engine_kwargs(speculation=False)),
    )
    params = mixed_params(6, 11, max_tokens=12, ignore_eos=True, **PLAIN)
    if speculation:  # without, scheduling is asynchronous, and a stop token is noticed a step late
        for p in params[::2]:
            p.stop_token_ids = [3, 7, 9]
    outputs = generate(llm, params, [[1, 4 + i % 3, 9, 8, 7] * (3 + i) for i in range(6)])
    num_tokens, stats = sum(len(output.token_ids) for output in outputs), stats_of(llm)
    assert stats["emitted_tokens"] == num_tokens
    assert stats["request_steps"] + stats["accepted_tokens"] >= num_tokens
    assert stats["request_steps"] <= num_tokens
    assert (stats["request_steps"] == num_tokens) == (stats["accepted_tokens"] == 0) == (not speculation)


def test_preempted_requests_keep_their_noise_and_their_history(tiny_model, off, reference_model):
    small = build(
        tiny_model,
        block_size=32,
        num_gpu_blocks_override=5,
        enable_prefix_caching=False,
        **verify_all(num_speculative_tokens=K, drafter="tests.adversaries.Adversary"),
    )
    preempted = count_preemptions(small)
    params = mixed_params(4, 9, max_tokens=44, ignore_eos=True, **PLAIN)
    prompts = [[1, 4 + i % 3, 9] * 5 for i in range(4)]
    ours = generate(small, params, prompts)
    assert preempted
    assert_same(ours, generate(off, params, prompts), prompts, params, reference_model)
    generate(small, mixed_params(1, 12, max_tokens=2, ignore_eos=True))  # ended requests are noticed one step later
    kept = [tuple(tokens) for tokens in session_of(small).drafter.finished]
    assert sorted(kept[:4]) == sorted(tuple(output.token_ids) for output in ours)


def test_switched_on_in_the_middle_it_catches_up(adversarial, off, reference_model):
    """What was sampled while drafting was off is read back, so that the history has no holes."""
    session = session_of(adversarial)
    params = mixed_params(3, 5, temperature=1.0, max_tokens=16, ignore_eos=True, **PLAIN)
    prompts = prompts_of(params)
    runner = runner_of(adversarial)
    original, steps = runner.sample, []

    def sample(*args, **kwargs):
        steps.append(None)
        session.enabled = len(steps) < 3 or len(steps) > 7
        return original(*args, **kwargs)

    runner.sample = sample
    try:
        ours = generate(adversarial, params, prompts)
    finally:
        runner.sample = original
        session.enabled = True
    assert_same(ours, generate(off, params, prompts), prompts, params, reference_model)
    generate(adversarial, mixed_params(1, 12, max_tokens=2, ignore_eos=True))
    kept = {tuple(tokens) for tokens in session.drafter.finished}
    assert all(tuple(output.token_ids) in kept for output in ours)


def test_every_request_is_verified_at_its_drafts_own_length(tiny_model):
    """Also none: vLLM alone would verify K tokens for each."""
    llm = build(tiny_model, **verify_all(num_speculative_tokens=K, drafter="tests.adversaries.Uneven"))
    seen = []
    sampler = runner_of(llm).sampler
    original = sampler._book

    def book(input_batch, layout, result):
        seen.append((input_batch.cu_num_logits_np[1:] - input_batch.cu_num_logits_np[:-1] - 1).tolist())
        return original(input_batch, layout, result)

    sampler._book = book
    params = mixed_params(3, 6, temperature=1.0, max_tokens=10, ignore_eos=True, **PLAIN)
    generate(llm, params)
    assert [0, 0, 0] in seen
    assert any(sorted(lengths) == [0, 1, 2] for lengths in seen)


def test_rejection_sampling_runs_and_keeps_the_history_straight(tiny_model):
    llm = build(
        tiny_model, **verify_all(num_speculative_tokens=K, drafter="tests.adversaries.Adversary", verify="rejection")
    )
    outputs = generate(llm, mixed_params(4, 7, max_tokens=12, ignore_eos=True, **PLAIN))
    assert [len(output.token_ids) for output in outputs] == [12] * 4
    generate(llm, mixed_params(1, 12, max_tokens=2, ignore_eos=True))
    kept = {tuple(tokens) for tokens in session_of(llm).drafter.finished}
    assert all(tuple(output.token_ids) in kept for output in outputs)


@pytest.mark.parametrize("method", ["start_request", "extend", "propose", "observe", "stop_request"])
def test_a_drafter_that_raises_is_switched_off(tiny_model, off, reference_model, method):
    faulty = {"method": method, "fault": "raises", "calls": (2 if method != "stop_request" else 1, 10**9)}
    options = verify_all(num_speculative_tokens=K, drafter="tests.adversaries.Faulty", drafter_options=faulty)
    llm = build(tiny_model, **options)
    params = mixed_params(3, 15, max_tokens=12, ignore_eos=True, **PLAIN)
    for i, p in enumerate(params):
        p.max_tokens = 4 + 4 * i  # the first ends in the middle
    prompts = prompts_of(params)
    assert_same(generate(llm, params, prompts), generate(off, params, prompts), prompts, params, reference_model)
    assert stats_of(llm)["drafter_errors"] == 1


@pytest.mark.parametrize("speculation", [True, False])
def test_invalid_logits_raise(tiny_model, speculation):
    llm = build(tiny_model, **engine_kwargs(speculation=speculation))
    with torch.no_grad():
        for parameter in runner_of(llm).model.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="nothing can be sampled"):
        generate(llm, [SamplingParams(max_tokens=4)])


def test_a_row_that_masks_leave_empty_ends_nobody_elses_request(stock, off, adversarial):
    """vLLM emits token 0 where nothing is allowed; only logits that are broken end the run."""
    stuck = SamplingParams(allowed_token_ids=[2], min_tokens=3, max_tokens=4, seed=1)
    params = [stuck, *mixed_params(2, 29, max_tokens=6, **PLAIN)]
    expected = [list(o.token_ids) for o in generate(stock, params)]
    for llm in (off, adversarial):
        assert [list(o.token_ids) for o in generate(llm, params)] == expected
        assert stats_of(llm)["drafter_errors"] == 0


def test_vllms_warm_up_leaves_no_trace(tiny_model, monkeypatch):
    """On GPUs vLLM runs made-up requests without seeds through the runner, to compile kernels."""
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup, warmup_kernels
    from vllm.v1.worker.gpu_worker import Worker

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: None)  # torch's CUDA build looks for a device
    llm = build(tiny_model, **verify_all(num_speculative_tokens=K, drafter="tests.adversaries.Adversary"))
    worker = llm.llm_engine.model_executor.driver_worker.worker
    runner = runner_of(llm)
    assert Worker.compile_or_warm_up_model.__wrapped__.__module__ == "vllm.v1.worker.gpu_worker"
    with runner.rollout_spec.warm_up():
        assert run_mixed_prefill_decode_warmup(runner, worker.execute_model, worker.sample_tokens, 8)
        try:
            warmup_kernels(runner, worker.execute_model, worker.sample_tokens)
        except InterpreterError:
            pass  # vLLM's own grammar kernel comes last, and the interpreter cannot run it
        except RuntimeError as error:
            if "NVIDIA" not in str(error):  # it asks for a stream, which torch's CUDA build does not have here
                raise
    assert not runner.rollout_spec.warming_up
    assert not runner.rollout_spec.requests
    assert stats_of(llm)["request_steps"] == 0
    assert not runner.speculator.session.live


def test_asynchronous_scheduling_with_a_drafter_on_the_host_is_refused(tiny_model):
    with pytest.raises(ValueError, match='leave async_scheduling .* out, or use drafter="device"'):
        build(tiny_model, **engine_kwargs(), async_scheduling=True)


def test_options_that_our_sampler_would_ignore_are_refused(tiny_model):
    with pytest.raises(ValueError, match="use_fp64_gumbel"):
        build(tiny_model, **engine_kwargs(), use_fp64_gumbel=True)


def test_a_budget_changes_no_rollout(tiny_model, off, reference_model):
    """It learns what steps of so many tokens take, prompts among them."""
    llm = build(tiny_model, **engine_kwargs(num_speculative_tokens=K))
    params = mixed_params(6, 5, max_tokens=40, ignore_eos=True, **PLAIN)
    prompts = prompts_of(params)
    assert_same(generate(llm, params, prompts), generate(off, params, prompts), prompts, params, reference_model)
    session = session_of(llm)
    tokens, _ = session.budget.cost.curve(drafted=False)
    assert tokens.size
    assert tokens.max() <= sum(map(len, prompts)) + len(prompts) * (K + 1)
    stats = stats_of(llm)
    assert stats["drafter_errors"] == 0
    check_times(stats)
