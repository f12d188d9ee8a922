"""Values that cannot be used: each public call refuses them in one line that names the value."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")  # for the drafter on the device

from rollout_spec import RolloutSpecConfig, engine_kwargs
from rollout_spec.drafters import build_drafter, check_options
from rollout_spec.drafters.host.drafter import HistoryDrafter
from rollout_spec.integrations.vllm.commands import run_command
from rollout_spec.integrations.vllm.config import read_environment
from rollout_spec.integrations.vllm.requests import request_options
from rollout_spec.noise import host as noise

NAN = math.nan
MTP = {"method": "mtp", "num_speculative_tokens": 3}
NO_DRAFTS = RolloutSpecConfig(speculation=False)


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")


def controller(*config, **options):
    pytest.importorskip("vllm")
    from rollout_spec.integrations.trainers.controller import EngineController

    return EngineController(*(config or [RolloutSpecConfig()]), **options)


def a_drafter():
    """It drafts for request "a"."""
    drafter = HistoryDrafter("suffix", lookahead=True)
    drafter.start_request("a", [1, 2, 3, 1, 2], seed=5)
    drafter.extend("a", [3, 1])
    drafter.propose(["a"], np.array([4], np.int32))
    return drafter


def command(*words):
    return run_command(SimpleNamespace(finish_counting=lambda: None), *words)


def variable(text):
    return read_environment({"ROLLOUT_SPEC": text})


def generator(**options):
    for package in ("trl", "vllm"):
        pytest.importorskip(package)
    from rollout_spec import RolloutSpecGenerator

    return RolloutSpecGenerator(**options)


CALLS = [
    # Options of an engine and of its drafter.
    (lambda: engine_kwargs(num_speculative_tokens=True), "num_speculative_tokens must be an int, got True"),
    (lambda: engine_kwargs(history_dir="x", speculation=False), "history_dir is set, but the engine keeps no history"),
    (lambda: engine_kwargs(history_dir="x", drafter="lookahead"), "drafter 'lookahead' has no history"),
    (lambda: engine_kwargs(history_dir="nowhere://x"), "history_dir 'nowhere://x' cannot be used"),
    (lambda: engine_kwargs(max_history_dir_bytes="4 gigs"), "max_history_dir_bytes '4 gigs' is no size, such as 500MB"),
    (lambda: engine_kwargs(speculative_config={"method": "mtp"}), "speculative_config needs num_speculative_tokens"),
    (lambda: engine_kwargs(speculative_config=MTP, speculation=False), "remove one of them"),
    (lambda: engine_kwargs(num_speculative_tokens=Unprintable()), "num_speculative_tokens must be an int, got"),
    (lambda: engine_kwargs(drafter_options={1: 2}), "drafter_options must have strings as keys, got 1"),
    (lambda: check_options("history", {"max_history_tokens": 2**63}), "max_history_tokens must fit in 64 bits, got"),
    (lambda: check_options("tests.recurrent.drafter.Cut", {}), "missing a required argument: 'pattern'"),
    (lambda: build_drafter("history", min_survival=1), "min_survival must be in [0, 1), got 1"),
    (lambda: build_drafter("suffix", index="tree"), "index must be one of ('suffix', 'ngram'), got 'tree'"),
    (lambda: build_drafter("suffix", own_only=True, shared=True), "own_only and shared exclude each other"),
    (lambda: build_drafter("device"), "drafter 'device' runs on the device, where the engine makes it"),
    (lambda: build_drafter("no_such.Drafter"), "drafter 'no_such.Drafter' cannot be imported: No module named"),
    (lambda: build_drafter("rollout_spec.stats.REPORT_FORMAT"), "is not a callable object"),
    # What a trainer says.
    (lambda: controller(None), "config must be a RolloutSpecConfig, got None"),
    (lambda: controller(llm_kwargs=[("dtype", "float32")]), "llm_kwargs must be a dict of keyword arguments, got"),
    (lambda: controller(compare_every=2), "compare_every must be at least 3, got 2"),
    (lambda: controller(NO_DRAFTS, compare_every=4), "compare_every compares with drafts, and speculation is Fa"),
    (lambda: generator(logprob_tolerance=NAN), "logprob_tolerance must be at least 0, got nan"),
    # Requests, commands and the environment variable of an engine.
    (lambda: command("stat"), "got 'stat'; did you mean 'stats'?"),
    (lambda: command("stats", 1), "the rollout_spec command stats, got (1,): too many positional arguments"),
    (lambda: command("set_enabled", 1), "set_enabled: its argument must be a bool, got 1"),
    (lambda: variable('{"models": [1]}'), "ROLLOUT_SPEC: models must be a list of patterns, got [1]"),
    # Noise.
    (lambda: noise.derive_seed(), "derive_seed needs at least one part"),
    (lambda: noise.derive_seed(1.5), "parts of derive_seed must be integers and strings, got 1.5"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_call_that_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as raised:
        call()
    # A subclass, such as UnicodeError, would say what failed inside, and not what was passed.
    assert type(raised.value) in (TypeError, ValueError)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1500


CALLS_OF_A_DRAFTER = [
    (lambda d: d.start_request(None, [1]), "req_id must be a string, got None"),
    (lambda d: d.start_request("a", [1]), "request 'a' is live already"),
    (lambda d: d.start_request("new", [-1]), "prompt_token_ids must be one-dimensional integers from 0 to"),
    (lambda d: d.start_request("new", [5, True]), "prompt_token_ids must be one-dimensional integers from 0 to"),
    (lambda d: d.start_request("new", [1], problem_id=-1), "problem_id must be at least 0, got -1"),
    (lambda d: d.start_request("new", [1], seed=2**63), "seed must fit in 64 bits, got 9223372036854775808"),
    (lambda d: d.start_request("new", [1, 2, 3], num_known=4), "num_known must be from 0 to the prompt's 3 tokens"),
    (lambda d: d.extend("b", [1]), "request 'b' is not live: start_request comes first"),
    (lambda d: d.extend("a", [1], np.zeros((1, 3), np.int64)), "features of 1 tokens must be int64 [1, 4], got int64"),
    (lambda d: d.propose("a", [3]), "req_ids must be a list of strings, got 'a'"),
    (lambda d: d.propose(["a"], [3, 4]), "max_tokens must have shape [1], got int64 [2]"),
    (lambda d: d.propose(["a"], [0.5]), "max_tokens must be 1 integers, got float64 [1]"),
]


@pytest.mark.parametrize(("call", "message"), CALLS_OF_A_DRAFTER)
def test_a_call_of_a_drafter_that_is_refused_changes_nothing(call, message):
    drafter, untouched = a_drafter(), a_drafter()
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call(drafter)
    drafter.check_integrity()
    for d in (drafter, untouched):
        d.extend("a", [1, 2])
    drafts = [d.propose(["a"], np.array([4], np.int32))[0].token_ids.tolist() for d in (drafter, untouched)]
    assert drafts[0] == drafts[1] != []


@pytest.mark.parametrize(
    "call",
    [
        lambda: engine_kwargs(num_speculative_tokens=np.int32(8), drafter_options={"max_history_tokens": np.int64(5)}),
        lambda: engine_kwargs(drafter_options={"max_resident_tokens": 4096}),  # which "auto" takes on a GPU
        lambda: controller(logprob_tolerance=np.float32(0.1)).begin_run(seed=np.int64(-3), replica=np.int64(3)),
        lambda: request_options({"rollout_spec": {"problem_id": np.uint64(2**64 - 1), "keep_in_history": 1.0}}),
        lambda: a_drafter().start_request("new", torch.tensor([1, 2]), problem_id=2**64 - 1, seed=-(2**63)),
        lambda: a_drafter().propose(["a"], [-5]),
    ],
)
def test_what_only_looks_strange_is_taken(call):
    call()
