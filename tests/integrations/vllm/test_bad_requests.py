"""Requests and commands of any kind to a running engine: each is refused alone, by name, and the engine goes on."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.integrations.engines import build, generate, mixed_params, session_of, stats_of, verify_all

pytestmark = pytest.mark.engine

VALUES = [True, -1, 0.5, math.nan, "7", b"7", [7], {"a": 7}, {1}, object(), np.array([1, 2]), np.float32(1)]


@pytest.fixture(scope="module")
def llm(tiny_model):
    return build(tiny_model, **verify_all(num_speculative_tokens=4))


def goes_on(llm) -> None:
    """The engine drafts, and has nothing left of what it refused."""
    before = stats_of(llm)
    outputs = generate(llm, mixed_params(4, 3, temperature=0.0, max_tokens=20, ignore_eos=True))
    after = stats_of(llm)
    assert all(len(output.token_ids) == 20 for output in outputs)
    assert after["draft_tokens"] > before["draft_tokens"]
    assert after["drafter_errors"] == 0
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("name", ["problem_id", "keep_in_history"])
def test_options_of_requests(llm, name):
    may_be = {"problem_id": (), "keep_in_history": (True, np.float32(1))}[name]
    for value in VALUES:
        for extra_args in ({"rollout_spec": {name: value}}, {f"rollout_spec_{name}": value}):
            if any(value is good or value == good for good in may_be if np.isscalar(value)):
                continue
            with pytest.raises(ValueError, match=name):
                generate(llm, [SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, extra_args=extra_args)])
    goes_on(llm)


@pytest.mark.parametrize(
    "seed", [True, 0.5, math.nan, "7", [7], 2**63, -(2**63) - 1, np.array(3), np.uint64(2**64 - 1)]
)
def test_seeds_of_requests(llm, seed):
    with pytest.raises((TypeError, ValueError), match="seed"):
        generate(llm, [SamplingParams(max_tokens=2, seed=seed)])
    goes_on(llm)


def test_numbers_of_numpy(llm):
    """They give the rollouts of Python's numbers, and reach a worker of another process as those."""
    seen = []
    drafter = session_of(llm).drafter
    start_request = drafter.start_request

    def spy(*args, **options):
        seen.append((options["problem_id"], options["seed"]))
        return start_request(*args, **options)

    params = [
        SamplingParams(max_tokens=10, seed=seed, extra_args={"rollout_spec": {"problem_id": problem_id}})
        for seed, problem_id in ((5, 7), (np.int64(5), np.uint8(7)))
    ]
    drafter.start_request = spy
    try:
        ours, theirs = (generate(llm, [p], [[1, 4, 9]])[0] for p in params)
    finally:
        del drafter.start_request
    assert list(ours.token_ids) == list(theirs.token_ids)
    assert seen == [(7, 5)] * 2
    assert {type(number) for pair in seen for number in pair} == {int}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "command"),
        (("stat",), "did you mean 'stats'"),
        (("stats", 1), "command stats.*too many"),
        (("set_enabled", "false"), "set_enabled: its argument must be a bool, got 'false'"),
        (("begin_policy_version", 0), "begin_policy_version"),
    ],
)
def test_commands(llm, args, message):
    with pytest.raises((TypeError, ValueError), match=message):
        llm.collective_rpc("rollout_spec", args=args)
    goes_on(llm)
