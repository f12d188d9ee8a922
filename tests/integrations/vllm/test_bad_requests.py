"""Requests and commands of any kind to a running engine: each is refused alone, by name, and the engine goes on."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from rollout_spec import RolloutSpecConfig
from rollout_spec.history.problems import problem_of_prompt
from rollout_spec.integrations.vllm.requests import FrontEnd, RequestOptions, request_options, without_history
from tests.integrations.engines import build, generate, mixed_params, session_of, stats_of, verify_all

pytestmark = pytest.mark.engine

VALUES = [-1, 0.5, math.nan, "7", b"7", [7], {"a": 7}, {1}, object(), np.array([1, 2])]
BAD_OPTIONS = [
    *(({"rollout_spec": {"problem_id": value}}, "problem_id") for value in [*VALUES, True, np.float32(1)]),
    *(({"rollout_spec_keep_in_history": value}, "keep_in_history") for value in VALUES),
    ({"rollout_spec": "x"}, "must be a dict"),
    ({"rollout_spec": {"problemid": 1}}, "unknown key 'problemid'"),
    ({"rolout_spec": {"problem_id": 1}}, "unknown key 'rolout_spec'"),
    ({"rollout_spec_problemid": 1}, "unknown key 'rollout_spec_problemid'"),
    ({"problem_id": 7}, "unknown key 'problem_id'"),
    ({"keep_in_history": False}, "unknown key 'keep_in_history'.*'rollout_spec_keep_in_history': False"),
    ({"rollout_spec_problem_id": 7, "rollout_spec": {"problem_id": 7}}, "both set"),
]


@pytest.fixture(scope="module")
def llm(tiny_model):
    return build(tiny_model, **verify_all(num_speculative_tokens=4))


@pytest.fixture
def goes_on(llm):
    """Afterwards the engine drafts, and has nothing left of what it refused."""
    yield
    before = stats_of(llm)
    outputs = generate(llm, mixed_params(4, 3, temperature=0.0, max_tokens=20, ignore_eos=True))
    after = stats_of(llm)
    assert all(len(output.token_ids) == 20 for output in outputs)
    assert after["draft_tokens"] > before["draft_tokens"]
    assert after["drafter_errors"] == 0
    assert not llm.llm_engine.has_unfinished_requests()


def test_options_of_requests(llm, goes_on):
    for extra_args, message in BAD_OPTIONS:
        with pytest.raises(ValueError, match=message):
            generate(llm, [SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, extra_args=extra_args)])


def test_seeds_of_requests(llm, goes_on):
    bad = [SamplingParams(seed=2**63 - 1, n=2)]
    bad += [SamplingParams(seed=seed) for seed in (True, 0.5, math.nan, "7", [7], 2**63, np.array(3), np.uint64(2**63))]
    for params in bad:
        with pytest.raises((TypeError, ValueError), match="seed|must fit in 64 bits"):
            generate(llm, [params])


def test_commands_answer_with_plain_data(llm, off):
    """Also where nothing is drafted, which cannot be switched on."""
    for engine in (llm, off):
        for command in ("stats", "report", "history", "config"):
            (answer,) = engine.collective_rpc("rollout_spec", args=(command,))
            assert json.loads(json.dumps(answer)) == answer
        assert RolloutSpecConfig.from_dict(answer).to_dict() == answer
    (report,) = off.collective_rpc("rollout_spec", args=("report",))
    assert {**report, "num_speculative_tokens": 0, "history": {}, "has_budget": False} == report
    assert (stats_of(off)["drafter_bytes"], stats_of(off)["live_requests"]) == (0, 0)
    with pytest.raises(ValueError, match="set_enabled: this engine was built with speculation=False"):
        off.collective_rpc("rollout_spec", args=("set_enabled", False))


@pytest.mark.parametrize(
    ("extra_args", "options"),
    [
        (None, ()),
        ({"somebody_elses": 1, 5: 6}, ()),
        ({"rollout_spec": None}, ()),
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
    with pytest.raises(ValueError, match="must be a dict"):
        request_options(without_history({"rollout_spec": "x"}))


def test_problems_and_seeds_reach_the_drafter(llm, monkeypatch):
    """Said in both ways, and as numbers of NumPy, which reach a worker of another process as Python's."""
    seen, drafter = [], session_of(llm).drafter
    start_request = drafter.start_request
    monkeypatch.setattr(
        drafter, "start_request", lambda *args, **given: seen.append(given) or start_request(*args, **given)
    )
    args = ({"rollout_spec": {"problem_id": 7}}, {"rollout_spec_problem_id": np.uint8(7)}, None)
    outputs = [
        generate(llm, [SamplingParams(max_tokens=10, seed=seed, extra_args=a)], [[1, 6, 9]])[0]
        for seed, a in zip((5, np.int64(5), 5), args, strict=True)
    ]
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert [given["problem_id"] for given in seen] == [7, 7, problem_of_prompt([1, 6, 9])]
    assert {type(given[name]) for given in seen for name in ("problem_id", "seed")} == {int}


def a_front_end(launcher=None, number=0, seed=0, is_offline=True, data_parallel=(0, 1)):
    (rank, size), other = data_parallel, {"distributed_executor_backend": launcher, "_api_process_rank": number}
    parallel = SimpleNamespace(data_parallel_rank=rank, data_parallel_size=size, **other)
    model = SimpleNamespace(seed=seed)
    engine = SimpleNamespace(use_v2_model_runner=True, parallel_config=parallel, model_config=model)
    return FrontEnd(engine, RolloutSpecConfig(), is_offline=is_offline)


@pytest.mark.parametrize("launcher", [None, "external_launcher"])
def test_data_parallel_engines_with_one_seed_sample_no_copies(launcher):
    seeds = set()
    for rank in range(2):
        params = SamplingParams()
        front_end = a_front_end(launcher, seed=3, data_parallel=(rank, 2))
        front_end.prepare(SimpleNamespace(sampling_params=params, cache_salt=None, resumable=False))
        seeds.add(params.seed)
    assert len(seeds) == 2


@pytest.mark.parametrize("launcher", [None, "external_launcher"])
def test_seeds_that_follow_from_the_engines_are_repeated_and_are_no_copies(launcher):
    """Of several front ends, each of which counts its requests from 1."""

    def seeds(number, seed=3):
        front_end, given = a_front_end(launcher, number, seed), [SamplingParams() for _ in range(3)]
        for params in given:
            front_end.prepare(SimpleNamespace(sampling_params=params, cache_salt=None, resumable=False))
        return [params.seed for params in given]

    different = [seed for number in range(2) for engine_seed in (3, 4) for seed in seeds(number, engine_seed)]
    assert len(set(different)) == len(different)
    assert seeds(1) == seeds(1)


def test_servers_with_one_engine_seed_give_different_seeds():
    """Frameworks give all their replicas one seed."""
    keys = {a_front_end(seed=42, is_offline=False)._key for _ in range(2)}
    assert len(keys) == 2


def test_what_the_caller_gave_stays_as_it_is():
    """A dict may be that of many requests, of which one has a salt."""
    given = {"rollout_spec_problem_id": 7, "other": [1]}
    params = SamplingParams(extra_args=given)
    a_front_end().prepare(SimpleNamespace(sampling_params=params, cache_salt="tenant", resumable=False))
    assert given == {"rollout_spec_problem_id": 7, "other": [1]}
    assert request_options(params.extra_args).own_only
    assert params.extra_args["other"] == [1]
