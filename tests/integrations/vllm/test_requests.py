"""Requests as callers and the scheduler make them: options of their own, bad ones among them, and prompts in chunks."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import RequestStatus

from rollout_spec import engine_kwargs
from rollout_spec.drafters.base import problem_of_prompt
from rollout_spec.integrations.vllm import hooks
from rollout_spec.integrations.vllm.requests import RequestOptions, request_options, without_history
from tests.integrations.engines import (
    assert_same,
    build,
    count_preemptions,
    every_draft,
    generate,
    mixed_params,
    prompts_of,
    runner_of,
    session_of,
    stats_of,
    verify_all,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def on(tiny_model):
    return build(tiny_model, **verify_all(**every_draft(4)))


BAD_OPTIONS = [
    ({"rollout_spec": "x"}, "must be a dict"),
    ({"rollout_spec": {"problem_id": "seven"}}, "problem_id must be an integer"),
    ({"rollout_spec": {"problem_id": 1.0}}, "problem_id must be an integer"),
    ({"rollout_spec": {"problem_id": True}}, "problem_id must be an integer"),
    ({"rollout_spec": {"problem_id": -1}}, "from 0 to"),
    ({"rollout_spec": {"problemid": 1}}, "unknown key 'problemid'"),
    ({"rolout_spec": {"problem_id": 1}}, "unknown key 'rolout_spec'"),
    ({"rollout_spec_problemid": 1}, "unknown key 'rollout_spec_problemid'"),
    ({"rollout_spec_problem_id": "7"}, "problem_id must be an integer"),
    ({"problem_id": 7}, "unknown key 'problem_id'"),
    ({"problemid": 7}, "unknown key 'problemid'"),
    ({"rollout_spec_problem_id": 7, "rollout_spec": {"problem_id": 7}}, "both set"),
    ({"rollout_spec": {"keep_in_history": "no"}}, "keep_in_history must be true or false"),
    ({"rollout_spec_keep_in_history": 2}, "keep_in_history must be true or false"),
    ({"keep_in_history": False}, "unknown key 'keep_in_history'.*'rollout_spec_keep_in_history': False"),
    ({"rollout_spec_keep_history": False}, "unknown key 'rollout_spec_keep_history'"),
]


@pytest.mark.parametrize(("extra_args", "message"), BAD_OPTIONS)
def test_bad_options_are_refused(extra_args, message):
    with pytest.raises(ValueError, match=message):
        request_options(extra_args)


@pytest.mark.parametrize(
    ("extra_args", "options"),
    [
        (None, ()),
        ({}, ()),
        ({"somebody_elses": 1, 5: 6}, ()),
        ({"rollout_spec": None}, ()),
        ({"rollout_spec": {}}, ()),
        ({"rollout_spec": {"problem_id": 7}}, (7,)),
        ({"rollout_spec_problem_id": 2**64 - 1}, (2**64 - 1,)),
        ({"rollout_spec": {"keep_in_history": False}}, (None, False)),
        ({"rollout_spec_keep_in_history": 0, "rollout_spec": {"problem_id": 7}}, (7, False)),
        ({"rollout_spec_keep_in_history": 1.0}, ()),
        ({"rollout_spec": {"own_only": True}}, (None, False, True)),
    ],
)
def test_options_that_callers_give(extra_args, options):
    assert request_options(extra_args) == RequestOptions(*options)


@pytest.mark.parametrize(
    ("extra_args", "keep"),
    [
        (None, False),
        ({"rollout_spec": {"problem_id": 7}}, False),
        ({"rollout_spec": {"keep_in_history": True}}, True),
        ({"rollout_spec_keep_in_history": True}, True),
    ],
)
def test_evaluation_leaves_the_history_alone_unless_told_otherwise(extra_args, keep):
    before = repr(extra_args)
    options = request_options(without_history(extra_args))
    assert options.keep_in_history is keep
    assert options.problem_id == request_options(extra_args).problem_id
    assert repr(extra_args) == before


def test_bad_options_are_refused_in_evaluations_too():
    with pytest.raises(ValueError, match="must be a dict"):
        request_options(without_history({"rollout_spec": "x"}))


def test_one_bad_request_is_refused_alone(on, off, reference_model):
    """Its caller gets the error; the drafter of the others never hears of it."""
    bad = [(SamplingParams(extra_args=extra_args), message) for extra_args, message in BAD_OPTIONS]
    bad += [(SamplingParams(seed=2**63 - 1, n=n), "must fit in 64 bits") for n in (2, 3)]
    for params, message in bad:
        with pytest.raises(ValueError, match=message):
            generate(on, [SamplingParams(), params])
    params = mixed_params(8, 21, max_tokens=40)
    prompts = [[1, 4 + i % 3, 9] for i in range(8)]
    before = stats_of(on)["draft_tokens"]
    assert_same(generate(on, params, prompts), generate(off, params, prompts), prompts, params, reference_model)
    stats = stats_of(on)
    assert stats["draft_tokens"] > before
    assert stats["drafter_errors"] == 0


def test_an_aborted_rollout_goes_on_where_it_was(on, off):
    """As verl and others send it, the prompt and what was said so far: with its seed nothing shows that it stopped."""
    params = mixed_params(6, 22, max_tokens=40, ignore_eos=True)
    prompts = prompts_of(params)
    whole = [list(output.token_ids) for output in generate(off, params, prompts)]
    for p in params:
        p.output_kind = RequestOutputKind.CUMULATIVE  # vllm.LLM asks for the last output only
    engine = on.llm_engine
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, p)
    partial = [[] for _ in params]
    while engine.has_unfinished_requests():
        for output in engine.step():
            partial[int(output.request_id)] = list(output.outputs[0].token_ids)
        engine.abort_request([str(i) for i, said in enumerate(partial) if len(said) >= 10])
    assert all(10 <= len(said) < 40 for said in partial)
    continued = [prompt + said for prompt, said in zip(prompts, partial, strict=True)]
    for p, said in zip(params, partial, strict=True):
        p.max_tokens -= len(said)
    rest = [list(output.token_ids) for output in generate(on, params, continued)]
    assert [said + more for said, more in zip(partial, rest, strict=True)] == whole
    generate(on, [SamplingParams(max_tokens=1)])  # the others' end is noticed with this
    assert stats_of(on)["live_requests"] == 0


def test_an_engine_with_a_seed_repeats_itself(tiny_model, monkeypatch):
    """With drafts and without, as stock vLLM does; vLLM's default is 0, which nobody chose."""
    said = []
    monkeypatch.setattr(hooks, "say", said.append)

    def outputs(options, **engine):
        llm = build(tiny_model, **options, **engine)
        params = [SamplingParams(max_tokens=30, ignore_eos=True) for _ in range(4)]
        return [tuple(output.token_ids) for output in generate(llm, params, [[1, 4, 9]] * 4)]

    on, off = verify_all(num_speculative_tokens=4), engine_kwargs(speculation=False)
    first, again, without, other = (
        outputs(on, seed=42),
        outputs(on, seed=42),
        outputs(off, seed=42),
        outputs(on, seed=7),
    )
    assert first == again == without
    assert sum("requests without a seed get theirs from the engine's, 42" in line for line in said) == 3
    assert len({*first, *other}) == 8
    said.clear()
    assert len({*outputs(on), *outputs(on, seed=0)}) == 8
    assert not any("without a seed" in line for line in said)


def test_requests_of_one_problem_share_history(on):
    """Whatever their prompts are, and in both ways to say it."""
    seen = []
    drafter = session_of(on).drafter
    start_request = drafter.start_request

    def spy(req_id, prompt, *, problem_id=None, **options):
        seen.append(problem_id)
        return start_request(req_id, prompt, problem_id=problem_id, **options)

    drafter.start_request = spy
    try:
        args = ({"rollout_spec": {"problem_id": 7}}, {"rollout_spec_problem_id": 7}, None)
        generate(on, [SamplingParams(max_tokens=3, extra_args=a) for a in args])
    finally:
        del drafter.start_request
    assert sorted(seen) == sorted([7, 7, problem_of_prompt([1, 6, 9])])


@pytest.mark.parametrize("speculation", [True, False])
def test_prompts_that_are_read_in_chunks(tiny_model, off, reference_model, speculation):
    """Together they exceed what a step may compute. Preemption reads prompts again, in chunks, too."""
    options = verify_all(num_speculative_tokens=4, drafter="tests.adversaries.Adversary")
    llm = build(
        tiny_model,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        enable_chunked_prefill=True,
        block_size=32,
        num_gpu_blocks_override=9,
        enable_prefix_caching=False,
        **(options if speculation else engine_kwargs(speculation=False)),
    )
    preempted = count_preemptions(llm)
    params = mixed_params(8, 19, max_tokens=60, ignore_eos=True)
    prompts = [[1, 4 + i % 3, 9, 8, 7] * (5 + i) for i in range(8)]
    ours = generate(llm, params, prompts)
    assert preempted
    assert_same(ours, generate(off, params, prompts), prompts, params, reference_model)
    if speculation:
        assert stats_of(llm)["accepted_tokens"] > 0


@pytest.mark.parametrize("name", ["on", "off"])
def test_a_streaming_session_goes_on_with_its_new_parameters(request, off, name):
    """The same request in the same row, with another seed and min-p: what was kept of the first chunk's is renewed."""
    engine = request.getfixturevalue(name).llm_engine
    client, tasks = engine.engine_core, engine.get_supported_tasks()
    requests = client.engine_core.scheduler.requests
    chunks = [([1, 4, 9], SamplingParams(seed=1, max_tokens=12, ignore_eos=True))]
    chunks += [([3, 5], SamplingParams(seed=2, max_tokens=20, min_p=0.9, ignore_eos=True))]
    chunks += [([6], SamplingParams(seed=3, max_tokens=20, temperature=1.3, ignore_eos=True))]
    prompts, said = [], []
    for chunk, params in chunks:
        update = engine.input_processor.process_inputs(
            "s", {"prompt_token_ids": chunk}, params, supported_tasks=tasks, resumable=True
        )
        client.add_request(update)
        prompts.append(list(requests["s"].prompt_token_ids))
        said.append([])
        while requests["s"].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            said[-1] += [token for output in client.get_output().outputs for token in output.new_token_ids]
    client.abort_requests(["s"])
    expected = generate(off, [params for _, params in chunks], prompts)
    assert said == [list(output.token_ids) for output in expected]


def test_vllm_makes_no_generators_for_us(on):
    """Our sampler draws by seed and position; a generator for each request would only cost."""
    runner, kept = runner_of(on), []
    sample = runner.rollout_spec.sample

    def spy(logits, metadata):
        kept.append(dict(runner.input_batch.generators))
        return sample(logits, metadata)

    runner.rollout_spec.sample = spy
    try:
        generate(on, mixed_params(6, 31, temperature=1.0, max_tokens=5))
    finally:
        del runner.rollout_spec.sample
    assert kept
    assert not any(kept)
