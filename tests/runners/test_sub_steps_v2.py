"""Steps of several forward passes give the rollouts of an engine that drafts nothing, however requests end in them."""

import contextlib
import itertools
import os
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from rollout_spec import engine_kwargs
from rollout_spec.integrations.vllm import compat, engine_v2, sub_steps
from tests.conftest import GPU_STAND_IN
from tests.integrations.engines import (
    DEVICE,
    FEW_BLOCKS,
    PLAIN,
    assert_same,
    build,
    check_features,
    count_preemptions,
    generate,
    mixed_params,
    prompts_of,
    rollouts_of,
    runner_of,
    session_of,
    stats_of,
    switching_off_and_on,
)
from tests.integrations.vllm.test_tensor_parallel import two_ranks
from tests.runners.adaptive import as_on_a_gpu, rising, schedule_of, set_costs

CASES = [tuple(map(int, case.split(":"))) for case in os.environ.get("SUB_STEPS", "4:3").split(",")]
"""(passes, K); `make test-all` has more."""


@pytest.fixture(scope="module")
def off(tiny_model):
    return build(tiny_model, **engine_kwargs(speculation=False))


@pytest.fixture(params=CASES, ids=lambda case: f"n{case[0]}-k{case[1]}")
def engine(request, tiny_model):
    """Builds engines; `engine.n` passes, `engine.k` draft tokens. `passes` counts an engine's steps by their passes."""

    def make(*, budget=False, **options):
        ours = engine_kwargs(num_speculative_tokens=make.k, budget=budget, **{**DEVICE, "sub_steps": make.n})
        llm = build(tiny_model, **{"max_num_seqs": 8, **ours, **options})
        scheduler = scheduler_of(llm)
        schedule, make.passes = scheduler.schedule, Counter()

        def look(*args, **kwargs):
            scheduled = schedule(*args, **kwargs)
            make.passes[sub_steps.num_passes(scheduled)] += bool(scheduled.num_scheduled_tokens)
            return scheduled

        scheduler.schedule = look
        return llm

    make.n, make.k = request.param
    return make


@pytest.fixture
def same(off, reference_model):
    """Rollouts, in some rounds, are those of the engine without drafts, which it returns."""

    def check(llm, params, prompts=None, rounds=2):
        plain = generate(off, params, prompts)
        for _ in range(rounds):
            ours = generate(llm, params, prompts)
            if params[0].logprobs is not None:
                assert_same(ours, plain, params, reference_model, prompts)
            for a, b in zip(ours, plain, strict=True):
                assert list(a.token_ids) == list(b.token_ids)
                assert (a.finish_reason, a.stop_reason, a.text) == (b.finish_reason, b.stop_reason, b.text)
            session_of(llm).drafter.check_integrity()
        return plain

    return check


def num_repeated(engine):
    """How many steps had several passes."""
    return engine.passes.total() - engine.passes[1]


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def test_ends_of_all_kinds(engine, same):
    """Stop tokens and strings, min_tokens, and max_tokens that end requests in each pass."""
    llm = engine()
    params = [
        *mixed_params(6, 2, max_tokens=40, stop=["w7", "w3"]),
        *mixed_params(4, 3, max_tokens=40, stop_token_ids=[7, 12], min_tokens=9),
        *(p for i in range(1, 7) for p in mixed_params(1, 10 + i, max_tokens=i, ignore_eos=True)),
    ]
    same(llm, params)
    assert num_repeated(engine) > 3


def test_all_requests_run_into_max_model_len(engine, same):
    llm = engine()
    prompts = [[1, *(4 + (i * j) % 19 for j in range(90 + 5 * i))] for i in range(6)]
    params = mixed_params(6, 5, max_tokens=None, ignore_eos=True)
    plain = same(llm, params, prompts)
    assert {len(prompt) + len(output.token_ids) for prompt, output in zip(prompts, plain, strict=True)} == {128}


def test_what_is_kept_of_rollouts(engine, same, reference_model, monkeypatch):
    """They end at their last token, and what the target saw is known of each.

    Bounds on their lengths hold in each pass: the drafter's, by which rollouts are cut, and attention's.
    """
    llm = engine()
    runner, session, spare, unseen = runner_of(llm), session_of(llm), [], []
    draft, prepare_attn = runner.rollout_spec.draft, runner.model_state.prepare_attn

    def draft_and_look(batch, *args):
        found, slots = draft(batch, *args), batch.idx_mapping_np
        spare.extend((session._most_tokens[slots] - runner.req_states.total_len.gpu[slots].numpy()).tolist())
        return found

    def prepare_and_look(batch, *args, **options):
        unseen.extend((batch.seq_lens_cpu_upper_bound - batch.seq_lens)[: batch.num_reqs].tolist())
        return prepare_attn(batch, *args, **options)

    monkeypatch.setattr(runner.rollout_spec, "draft", draft_and_look)
    monkeypatch.setattr(runner.model_state, "prepare_attn", prepare_and_look)
    params = mixed_params(6, 4, temperature=1.0, ignore_eos=True, stop_token_ids=[0], **{**PLAIN, "max_tokens": 60})
    params += mixed_params(2, 5, temperature=0.0, ignore_eos=True, **{**PLAIN, "max_tokens": 33})
    plain = same(llm, params, rounds=2)
    found = rollouts_of(llm)
    assert sorted(tokens.tolist() for _, tokens, _ in found) == sorted(list(out.token_ids) for out in plain * 2)
    assert min(spare) >= 0
    assert min(unseen) == 0
    num_checked, num_unknown = check_features(found[:6], reference_model, 1.0)
    assert num_checked > 0.9 * (num_checked + num_unknown)


@pytest.mark.parametrize("logprobs", ["mixed", None, 0])
def test_log_probabilities(engine, same, logprobs):
    llm = engine()
    params = mixed_params(8, 6, max_tokens=25, **({} if logprobs == "mixed" else {"logprobs": logprobs, **PLAIN}))
    for i, p in enumerate(params if logprobs == "mixed" else ()):
        p.logprobs = (0, 1, 3, 0)[i % 4]
        p.prompt_logprobs = 1 if i == 5 else None
    same(llm, params)
    assert num_repeated(engine) > 3


def test_groups_wait_for_places(engine, off):
    llm = engine(disable_log_stats=False)
    params = [
        SamplingParams(temperature=1.0, n=8, seed=5 + i, max_tokens=30 + 7 * i, logprobs=1, stop_token_ids=[9])
        for i in range(3)
    ]
    said = []
    for each in (off, llm):
        outputs = each.generate([{"prompt_token_ids": p} for p in prompts_of(params)], params, use_tqdm=False)
        said.append([[(list(o.token_ids), o.finish_reason) for o in output.outputs] for output in outputs])
    assert said[0] == said[1]


def test_prompts_come_in_chunks_between_steps(engine, same):
    llm = engine(max_num_batched_tokens=8 * (engine.k + 1), enable_prefix_caching=True)
    rng = np.random.default_rng(0)
    prompts = [[1, *rng.integers(4, 24, int(rng.integers(3, 70))).tolist()] for _ in range(20)]
    same(llm, mixed_params(20, 8), prompts, rounds=1)
    assert engine.passes[1] > 0 < num_repeated(engine)


def test_a_cache_that_is_too_small(engine, same):
    llm = engine(**FEW_BLOCKS)
    preempted = count_preemptions(llm)
    same(llm, mixed_params(8, 9, max_tokens=60, ignore_eos=True), rounds=1)
    assert preempted
    assert num_repeated(engine) > 0


def test_nobody_is_preempted_for_further_passes(engine):
    """A cache has just room for all, who would take turns in holding blocks that others need."""
    engine.k = 7
    llm = engine(block_size=32, num_gpu_blocks_override=18, enable_prefix_caching=False)
    preempted, params = count_preemptions(llm), mixed_params(8, 9, max_tokens=40, ignore_eos=True)
    for _ in range(3):
        generate(llm, params)
    assert not preempted
    assert num_repeated(engine) > 0


def test_requests_are_aborted_while_a_step_runs(engine, off, reference_model):
    """Until one is left of many."""
    llm = engine(max_num_seqs=16)
    params = mixed_params(16, 11, max_tokens=40, ignore_eos=True)
    prompts, outputs, aborted = prompts_of(params), {}, set()
    plain = generate(off, params, prompts)
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, p)
    for step in itertools.count():
        outputs |= {output.request_id: output.outputs[0] for output in llm.llm_engine.step()}
        if not llm.llm_engine.has_unfinished_requests():
            break
        if step % 2 and step < 20:
            aborted.add(str(step // 2))
            llm.llm_engine.abort_request([str(step // 2)])
    left = [i for i in range(16) if str(i) not in aborted]
    assert 2 < len(left) < 14
    of_left = [[each[i] for i in left] for each in ([outputs[str(i)] if i in left else None for i in range(16)], plain)]
    assert_same(*of_left, [params[i] for i in left], reference_model, [prompts[i] for i in left])
    session_of(llm).drafter.check_integrity()


def test_statistics_count_passes(engine, same):
    """Ours, the schedule's and vLLM's, with K that changes: whole drafts, some, none."""
    llm = engine(budget=True, disable_log_stats=False)
    ks, told, by_vllm = itertools.cycle([0, engine.k, 1, 0, *[engine.k] * 6, *[1] * 5, *[0] * 6]), [], Counter()
    schedule, scheduler, ours = schedule_of(llm), scheduler_of(llm), runner_of(llm).rollout_spec
    observe, make_stats, begin_step, draft = schedule.observe, scheduler.make_stats, ours.begin_step, ours.draft
    wanted, drafts = [], []
    schedule.choose = lambda *of_step: next(ks)
    schedule.observe = lambda *of_pass: told.append(of_pass) or observe(*of_pass)

    def make_and_add(stats=None, *args, **kwargs):
        if stats is not None:
            by_vllm.update(drafted=stats.num_draft_tokens, accepted=stats.num_accepted_tokens)
            assert len(stats.num_accepted_tokens_per_pos) == engine.k
        return make_stats(stats, *args, **kwargs)

    def begin_and_look(scheduled):
        first = begin_step(scheduled)
        if scheduled.num_scheduled_tokens:
            width = min(first.num_scheduled_tokens.values())
            wanted.append([*[width > 1] * (ours._num_passes - 1), scheduled.num_spec_tokens_to_schedule > 0])
            drafts.append([])
        return first

    scheduler.make_stats, ours.begin_step = make_and_add, begin_and_look
    ours.draft = lambda *args: drafts[-1].append(draft(*args) is not None)
    params = mixed_params(8, 6, temperature=1.0, ignore_eos=True, **{**PLAIN, "max_tokens": 40})
    same(llm, params)
    stats = stats_of(llm)
    assert sum(engine.passes.values()) < stats["steps"] <= sum(n * count for n, count in engine.passes.items())
    assert told or engine.n > 4, "of long steps there are too few alike"
    drafted, accepted = (sum(int(np.sum(of_pass[i])) for of_pass in told) for i in range(2))
    assert bool(told) <= drafted <= stats["draft_tokens"]
    assert bool(told) <= accepted <= stats["accepted_tokens"]
    assert all(of_pass[1].max() <= engine.k for of_pass in told)
    assert drafts == wanted, "each pass drafts for the next one, the last for the next step"
    assert any(len(of_step) > 1 and of_step[0] != of_step[-1] for of_step in wanted)
    # Requests that have ended are counted by us alone.
    assert 0.5 * stats["draft_tokens"] < by_vllm["drafted"] <= stats["draft_tokens"]
    assert 0.5 * stats["accepted_tokens"] < by_vllm["accepted"] <= stats["accepted_tokens"]


def test_a_pause_has_plain_passes(engine, off, reference_model):
    llm = engine(budget=True)
    schedule_of(llm).choose = lambda num_requests, most: most
    params = mixed_params(6, 3, temperature=1.0, ignore_eos=True, **{**PLAIN, "max_tokens": 40})
    ours = switching_off_and_on(llm, params, [range(3, 6), range(9, 10)])
    assert_same(ours, generate(off, params), params, reference_model)
    assert num_repeated(engine) > 3
    engine.passes.clear()
    llm.collective_rpc("rollout_spec", args=("set_enabled", False, False))
    generate(llm, params)
    assert set(engine.passes) == {1}, "as a comparison with and without drafts has it"


@pytest.mark.skipif(compat.is_v2_old(), reason="before 0.31 drafts are not cut")
def test_drafts_are_cut_in_each_pass(engine, same, monkeypatch):
    """By the confidences of the drafts that it has, which are copied to the host once per step."""
    with as_on_a_gpu():
        llm = engine(budget=True)
    set_costs(runner_of(llm), rising)
    manager, cuts, copied = runner_of(llm).adaptive_verification, [], []
    again, record = manager.cut.again, manager.record_confidences

    def record_and_look(*args):
        before = manager._stale_idx
        record(*args)
        copied.append(manager._stale_idx != before)

    monkeypatch.setattr(manager.cut, "again", lambda slots, budget: cuts.append(budget) or again(slots, budget))
    monkeypatch.setattr(manager, "record_confidences", record_and_look)
    same(llm, mixed_params(10, 12, max_tokens=40))
    assert len(cuts) > engine.passes.total()
    assert sum(copied) == engine.passes.total()
    stats = stats_of(llm)
    assert stats["draft_tokens"] > stats["accepted_tokens"] > 0


def test_all_passes_are_copied_after_the_last_one(monkeypatch):
    """In the stream for copies, for which vLLM waits once more."""
    done = []
    monkeypatch.setattr(engine_v2, "stream", lambda *streams: contextlib.nullcontext())

    def says(name):
        return lambda *args, **options: done.append(name)

    runner = SimpleNamespace(main_stream="main", output_copy_stream=SimpleNamespace(wait_stream=says("wait")))
    buffer = SimpleNamespace(passes=[None] * 3, copy=says("copy"))
    ours = SimpleNamespace(
        _repetition=SimpleNamespace(batch=None), _of_step=(buffer, None), _num_passes=3, _runner=runner,
        _run_further_pass=says("pass"), is_cutting=False,
    )  # fmt: skip
    for _ in range(2):  # the second step has one pass
        engine_v2.EngineV2.end_step(ours, SimpleNamespace(copy_event=SimpleNamespace(record=says("record"))))
    assert done == ["pass", "pass", "wait", "copy", "record"]


@pytest.mark.parametrize("name", ["async_scheduling", "per_request_spec_decode_metrics"])
def test_what_keeps_steps_to_one_pass(engine, same, name):
    if name not in EngineArgs.__dataclass_fields__:
        pytest.skip("this release does not have it")
    llm = engine(**{name: {"async_scheduling": False}.get(name, "summary")})
    assert llm.collective_rpc("rollout_spec", args=("report",))[0]["most_passes"] == 1
    same(llm, mixed_params(4, 1, max_tokens=10), rounds=1)
    assert set(engine.passes) == {1}


@pytest.mark.exhaustive
def test_two_ranks_run_the_same_passes(engine, off, reference_model, tiny_model, monkeypatch):
    """Workers that are other processes than the scheduler's."""
    monkeypatch.setenv("PYTHONPATH", GPU_STAND_IN)
    ours = engine_kwargs(num_speculative_tokens=engine.k, budget=False, **{**DEVICE, "sub_steps": engine.n})
    params = mixed_params(8, 6, max_tokens=30, ignore_eos=True)
    with two_ranks(tiny_model, max_num_seqs=8, **ours) as llm:
        for _ in range(2):
            assert_same(generate(llm, params), generate(off, params), params, reference_model)
        first, second = llm.collective_rpc("rollout_spec", args=("report",))
    assert first["most_passes"] == second["most_passes"] == engine.n
    assert first["stats"]["accepted_tokens"] > 0
