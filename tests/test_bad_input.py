"""Values of any type for every public argument: it works, or ValueError or TypeError name the argument.

What is public is written down below: a new argument fails `test_every_argument_has_a_case` until it has a case.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")  # for the drafter on the device

import rollout_spec
from rollout_spec import RolloutSpecConfig, engine_kwargs
from rollout_spec.demo.run import run_demo
from rollout_spec.drafters import build_drafter, check_options
from rollout_spec.drafters.device.drafter import DeviceDrafter
from rollout_spec.drafters.device.drafter import check_options as check_device_options
from rollout_spec.drafters.host.history import HistoryDrafter
from rollout_spec.integrations.trainers.controller import EngineController
from rollout_spec.integrations.vllm import environment
from rollout_spec.integrations.vllm.commands import COMMANDS, EngineParts, run_command
from rollout_spec.integrations.vllm.request_options import RequestOptions, request_options
from rollout_spec.integrations.vllm.weights import WeightWatch
from rollout_spec.noise import host as noise
from rollout_spec.noise import torch as noise_torch
from rollout_spec.stats import SpeculationStats
from rollout_spec.types import SamplingBatch
from rollout_spec.verify.api import verify

# -- values ----------------------------------------------------------------------------------------------------------


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")


def _deep() -> list:
    value: list = []
    for _ in range(100_000):
        value = [value]
    return value


DEEP = _deep()
NUMBERS = [
    *(True, False, 0, 1, 2, 3, 8, 128, 129, -1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 2.0, 1e300, 5e-324, -1.5, math.nan, math.inf, -math.inf, 1j),
    *(np.int64(3), np.uint8(2), np.uint64(2**64 - 1), np.float32(0.5), np.float64(0.5), np.float64("nan"), np.bool_(1)),
]
OTHERS = [
    *(None, "", " ", "x", "8", "true", "a.b", "..", "\0", "ä", b"8", bytearray(b"x"), [], [1], [[1], [2, 3]], ()),
    *({}, {"a": 1}, {1: 2}, {"num_speculative_tokens": 3}, {1, 2}, frozenset(), range(3), DEEP, object(), int, len),
    *(Unprintable(), Path("x"), np.array(3), np.array([3]), np.array([[0.5, 1]]), np.array(["a"]), np.zeros(0)),
    *(np.datetime64("2020-01-01"), torch.tensor(3), torch.tensor([1.5, 2]), torch.tensor(True), torch.zeros(0)),
]
VALUES = st.sampled_from(NUMBERS + OTHERS) | st.integers() | st.floats() | st.text(max_size=20)
"""Of any type."""


def is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return (is_int(value) or isinstance(value, float | np.floating)) and value == value


def is_switch(value: object) -> bool:
    return isinstance(value, bool | np.bool_)


def nothing_or(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


class Argument(NamedTuple):
    """What a public argument takes.

    `may_be` must hold for every value that is accepted: an oracle of types, so that nothing is rounded or taken for
    something else. `typical` are accepted.
    """

    may_be: Callable[[Any], bool]
    typical: tuple[Any, ...]
    names: tuple[str, ...] = ()
    """What an error may name in place of the argument."""


def check(name: str, argument: Argument, value: Any, use: Callable[[Any], Any]) -> None:
    """The oracle: `use(value)` works, or says by name what is wrong."""
    error = error_of(use, value)
    if error is None:
        assert argument.may_be(value), f"{name} took {type(value)}"
    else:
        assert any(word in str(error) for word in (name, *argument.names)), str(error)
        assert "\n" not in str(error)


def error_of(use: Callable[[Any], Any], value: Any) -> Exception | None:
    """The ValueError or TypeError of a call. A subclass would say what failed inside, and not what was passed."""
    try:
        use(value)
    except (TypeError, ValueError) as error:
        if type(error) in (TypeError, ValueError):
            return error
        raise
    return None


def fuzz(arguments: Mapping[str, Argument], use: Callable[[str, Any], Any], **options: Any) -> Callable[..., None]:
    """A test of every argument with values of any type. `use(name, value)` sets one of them."""

    @pytest.mark.parametrize("name", arguments)
    @settings(derandomize=True, deadline=None, database=None, **{"max_examples": 60, **options})
    @given(value=VALUES)
    def test(name: str, value: Any) -> None:
        check(name, arguments[name], value, lambda v: use(name, v))

    return test


def every_value(arguments: Mapping[str, Argument], use: Callable[[str, Any], Any]) -> Callable[..., None]:
    """A test that every listed value of any type is taken or refused, and that the typical ones are taken."""

    @pytest.mark.parametrize("name", arguments)
    def test(name: str) -> None:
        for value in NUMBERS + OTHERS:
            check(name, arguments[name], value, lambda v: use(name, v))
        for value in arguments[name].typical:
            use(name, value)

    return test


SWITCH = Argument(is_switch, (True, False))
COUNT = Argument(is_int, (1, np.int64(5)))
SHARE = Argument(is_number, (0.5, np.float32(0.5)))
TEMPERATURE = Argument(nothing_or(is_number), (None, 1, 0.5, np.float32(2)))
MODEL = {"method": "mtp", "num_speculative_tokens": 3}

# -- options of an engine ----------------------------------------------------------------------------------------------

CONFIG = {
    "num_speculative_tokens": Argument(nothing_or(is_int), (None, 1, 128, np.int32(8))),
    "drafter": Argument(
        lambda value: isinstance(value, str), ("auto", "history", "suffix", "ngram", "lookahead", "device")
    ),
    "drafter_options": Argument(lambda value: isinstance(value, dict), ({}, {"recency": np.float32(0.5)})),
    "verify": Argument(lambda value: isinstance(value, str), ("sample", "rejection")),
    "speculation": SWITCH,
    "budget": SWITCH,
    "num_speculative_tokens_per_batch_size": Argument(
        nothing_or(lambda value: isinstance(value, list)), (None, [(1, 4, 2), [5, np.int64(9), 0]])
    ),
    "speculative_config": Argument(nothing_or(lambda value: isinstance(value, dict)), (None, MODEL)),
    "num_model_draft_tokens": Argument(nothing_or(is_int), (None, 1, np.int64(2))),
    "history_dir": Argument(nothing_or(lambda v: isinstance(v, str | os.PathLike)), (None, "x", Path("x"))),
    "max_history_dir_bytes": Argument(is_int, (1, 2**40)),
    "history_dir_features": SWITCH,
    "ignore_cache_salt": SWITCH,
}


def use_config(name: str, value: Any) -> None:
    options = {name: value}
    if name == "num_speculative_tokens_per_batch_size":
        options["drafter"] = "device"
    config = RolloutSpecConfig(**options)
    plain = json.loads(json.dumps(config.to_dict()))
    assert RolloutSpecConfig.from_dict(plain).to_dict() == RolloutSpecConfig.from_dict(config.to_dict()).to_dict()
    assert engine_kwargs(**options)["additional_config"]
    if name == "drafter" and config.drafter != "auto":
        check_options(config.drafter, config.drafter_options)


test_options_of_an_engine = every_value(CONFIG, use_config)
test_any_options_of_an_engine = fuzz(CONFIG, use_config, max_examples=30)

DRAFTER = {
    "index": Argument(lambda value: isinstance(value, str), ("suffix", "ngram")),
    "own_only": SWITCH,
    "shared": SWITCH,
    "lookahead": SWITCH,
    "max_draft_tokens": Argument(is_int, (1, np.int64(4))),
    "min_survival": SHARE,
    "inverse_temperature": TEMPERATURE,
    "recency": SHARE,
    "features": SWITCH,
    "max_history_tokens": COUNT,
    "max_history_versions": Argument(nothing_or(is_int), (None, 0, np.int64(3))),
    "num_threads": Argument(nothing_or(is_int), (None, 1, np.int64(2))),
}
DEVICE = {
    **{name: DRAFTER[name] for name in ("recency", "inverse_temperature", "features")},
    **dict.fromkeys(("max_resident_tokens", "max_problem_tokens", "max_history_tokens"), COUNT),
}


def draft_once(drafter: Any) -> None:
    """A request from start to stop, with a draft."""
    drafter.start_request("a", [1, 2, 3, 1, 2], seed=5)
    drafter.extend("a", [3, 1])
    (draft,) = drafter.propose(["a"], np.array([4], np.int32))
    drafter.observe(["a"], [[*draft.token_ids.tolist(), 0]], np.array([draft.token_ids.size], np.int32))
    drafter.stop_request("a")
    drafter.begin_policy_version(1)
    drafter.check_integrity()


def use_drafter(name: str, value: Any) -> None:
    draft_once(HistoryDrafter(**{name: value}))
    check_options("history" if name not in ("own_only", "index") else "suffix", {name: value})


test_options_of_the_drafters_on_the_host = every_value(DRAFTER, use_drafter)
test_options_of_the_drafter_on_the_device = every_value(DEVICE, lambda name, v: check_options("device", {name: v}))


@pytest.mark.parametrize("drafter", ["history", "suffix", "ngram", "lookahead", "device"])
def test_a_misspelt_option_of_a_drafter_gets_a_suggestion(drafter):
    with pytest.raises(ValueError, match=rf"drafter '{drafter}' .*'recncy'; did you mean 'recency'\?"):
        check_options(drafter, {"recncy": 0.5})


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("histori", "unknown drafter 'histori': .*; did you mean 'history'"),
        ("no_such.Drafter", "drafter 'no_such.Drafter' cannot be imported"),
        (
            "rollout_spec.stats.REPORT_FORMAT",
            "drafter 'rollout_spec.stats.REPORT_FORMAT' must be a class, got",
        ),
        (".x", "unknown drafter '.x'"),
        ("a..b", "unknown drafter 'a..b'"),
    ],
)
def test_names_that_are_no_drafters(drafter, message):
    with pytest.raises(ValueError, match=message):
        build_drafter(drafter)


def test_an_option_that_is_called_name():
    with pytest.raises(ValueError, match="drafter 'history' does not take these drafter_options"):
        build_drafter("history", name=1)


# -- requests to a drafter ---------------------------------------------------------------------------------------------

TOKENS = Argument(lambda value: isinstance(value, list | tuple | range | np.ndarray | torch.Tensor | bytearray), ([1],))
CALLS: dict[str, tuple[Callable[[Any, Any], Any], Argument]] = {
    "start_request.req_id": (lambda d, v: d.start_request(v, [1]), Argument(lambda v: isinstance(v, str), ("new",))),
    "start_request.prompt_token_ids": (lambda d, v: d.start_request("new", v), TOKENS),
    "start_request.problem_id": (
        lambda d, v: d.start_request("new", [1], problem_id=v),
        Argument(nothing_or(is_int), (None, 0, 2**64 - 1, np.uint64(2**64 - 1))),
    ),
    "start_request.seed": (
        lambda d, v: d.start_request("new", [1], seed=v),
        Argument(nothing_or(is_int), (None, -(2**63), 2**63 - 1, np.int64(3))),
    ),
    "start_request.num_known": (
        lambda d, v: d.start_request("new", [1, 2, 3], num_known=v),
        Argument(is_int, (0, 3, np.int64(1))),
    ),
    "start_request.isolated": (lambda d, v: d.start_request("new", [1, 2, 3], isolated=v), SWITCH),
    "extend.req_id": (lambda d, v: d.extend(v, [1]), Argument(lambda v: v == "a", ("a",), ("request",))),
    "extend.new_token_ids": (lambda d, v: d.extend("a", v), TOKENS),
    "extend.features": (
        lambda d, v: d.extend("a", [1], v),
        Argument(lambda v: v is None, (None, np.zeros((1, 4), np.int64))),
    ),
    "propose.req_ids": (
        lambda d, v: d.propose(v, np.zeros(1, np.int32)),
        Argument(lambda v: False, (["a"],), ("request", "max_tokens")),
    ),
    "propose.max_tokens": (
        lambda d, v: d.propose(["a"], v),
        Argument(lambda v: isinstance(v, list | np.ndarray | bytearray), ([3], np.array([-5]), np.array([2**40]))),
    ),
    "observe.req_ids": (
        lambda d, v: d.observe(v, [[1]], [0]),
        Argument(lambda v: False, (["a"],), ("request", "target_token_ids")),
    ),
    "observe.target_token_ids": (
        lambda d, v: d.observe(["a"], v, [0]),
        Argument(lambda v: isinstance(v, list), ([[1]], [[1, 2, 3]], [np.array([1, 2])])),
    ),
    "observe.num_accepted": (
        lambda d, v: d.observe(["a"], [[1, 2]], v),
        Argument(lambda v: isinstance(v, list | np.ndarray | bytearray), ([0], [1], np.array([1], np.int8))),
    ),
    "stop_request.req_id": (lambda d, v: d.stop_request(v), Argument(lambda v: v == "a", ("a",), ("request",))),
    "stop_request.keep": (lambda d, v: d.stop_request("a", keep=v), SWITCH),
    "begin_policy_version.version": (
        lambda d, v: d.begin_policy_version(v),
        Argument(is_int, (0, 5, np.int64(5))),
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_a_drafter(call):
    """Whatever is passed, nothing changes but by calls that succeed, and what is drafted after it is sound."""
    use, argument = CALLS[call]
    name = call.split(".")[1]

    def once(value: Any) -> None:
        drafter = HistoryDrafter("suffix", lookahead=True)
        drafter.start_request("a", [1, 2, 3, 1, 2], seed=5)
        drafter.extend("a", [3, 1])
        drafter.propose(["a"], np.array([4], np.int32))
        try:
            use(drafter, value)
        finally:
            drafter.check_integrity()
            for req_id in list(drafter._live):
                drafter.extend(req_id, [1, 2])
                (draft,) = drafter.propose([req_id], np.array([4], np.int32))
                assert 0 <= draft.token_ids.min(initial=0) <= draft.token_ids.max(initial=0) < 2**31

    for value in [*NUMBERS, *OTHERS]:
        check(name, argument, value, once)
    for value in argument.typical:
        once(value)


# -- the trainer's side ------------------------------------------------------------------------------------------------

GENERATOR = {
    "llm_kwargs": Argument(nothing_or(lambda value: isinstance(value, dict)), (None, {"dtype": "float32"})),
    "logprob_tolerance": Argument(nothing_or(is_number), (None, 0, 1e-3, math.inf, np.float32(0.1))),
}


def use_controller(name: str, value: Any) -> None:
    EngineController(RolloutSpecConfig(), **{name: value})


test_arguments_of_a_controller = every_value(GENERATOR, use_controller)

RUN: dict[str, tuple[Callable[[Any, Any], Any], Argument]] = {
    "seed": (lambda c, v: c.begin_run(seed=v), Argument(is_int, (0, -1, np.int64(3)))),
    "replica": (lambda c, v: c.begin_run(seed=0, replica=v), Argument(is_int, (0, np.int64(3)))),
    "step": (lambda c, v: c.begin_step(v), Argument(is_int, (0, np.int64(3)))),
    "enabled": (lambda c, v: setattr(c, "enabled", v), SWITCH),
    "base_url": (lambda c, v: c.connect(v, model="m", timeout=0), Argument(lambda value: False, ())),
    "timeout": (lambda c, v: c.connect("no url", model="m", timeout=v), Argument(is_number, (), ("base_url",))),
}


@pytest.mark.parametrize("name", RUN)
def test_what_a_trainer_says(name):
    use, argument = RUN[name]
    for value in [*NUMBERS, *OTHERS]:
        check(name, argument, value, lambda v: use(EngineController(RolloutSpecConfig()), v))
    for value in argument.typical:
        use(EngineController(RolloutSpecConfig()), value)


@pytest.mark.parametrize("value", [None, {}, "x", 3])
def test_a_configuration_that_is_none(value):
    with pytest.raises(TypeError, match="config must be a RolloutSpecConfig"):
        EngineController(value)


def test_the_callback_takes_what_the_controller_takes():
    pytest.importorskip("trl")
    from rollout_spec import RolloutSpecGenerator

    given = set(inspect.signature(RolloutSpecGenerator.__init__).parameters) - {"self", "options"}
    assert given == set(GENERATOR)
    with pytest.raises(ValueError, match="takes no 'llm_kwarg'; did you mean 'llm_kwargs'"):
        RolloutSpecGenerator(llm_kwarg={})
    with pytest.raises(TypeError, match="history_dir must be a path"):
        RolloutSpecGenerator(history_dir=1)
    with pytest.raises(ValueError, match="logprob_tolerance must be at least 0, got nan"):
        RolloutSpecGenerator(logprob_tolerance=math.nan)


# -- requests, commands, the environment -------------------------------------------------------------------------------

REQUEST = {
    "problem_id": Argument(nothing_or(is_int), (None, 0, 2**64 - 1, np.uint64(2**64 - 1))),
    "keep_in_history": Argument(
        nothing_or(lambda value: is_switch(value) or value in (0, 1)), (None, True, 0, 1.0, np.bool_(0))
    ),
}


def use_request(name: str, value: Any) -> None:
    options = [request_options(extra) for extra in ({"rollout_spec": {name: value}}, {f"rollout_spec_{name}": value})]
    assert options[0] == options[1]
    assert type(getattr(options[0], name)) in (int, bool, type(None)), "what a worker is sent"


test_options_of_a_request = every_value(REQUEST, use_request)
test_any_options_of_a_request = fuzz(REQUEST, use_request)


def test_extra_args_of_any_type():
    for value in NUMBERS + OTHERS:
        check("extra_args", Argument(nothing_or(lambda v: isinstance(v, dict)), ()), value, request_options)
        if value is not None:
            argument = Argument(lambda v: isinstance(v, dict) and not v, ())
            check("extra_args", argument, value, lambda v: request_options({"rollout_spec": v}))


def run(name: Any, *args: Any) -> Any:
    speculation = SimpleNamespace(
        set_enabled=lambda enabled: None, memory_bytes=lambda: 0, num_live_requests=lambda: 0, history_summary=dict
    )
    return run_command(
        EngineParts(RolloutSpecConfig(), speculation, SpeculationStats(), WeightWatch()),  # type: ignore[arg-type]
        name,
        *args,
    )


def test_commands_of_any_name():
    argument = Argument(lambda value: False, (), ("command",))
    for value in NUMBERS + OTHERS:
        check("command", argument, value, run)
    with pytest.raises(ValueError, match="did you mean 'stats'"):
        run("stat")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_with_any_arguments(command):
    may_be = {"set_enabled": is_switch, "begin_policy_version": is_int}.get(command, lambda value: False)
    for value in NUMBERS + OTHERS:
        check(command, Argument(may_be, ()), value, lambda v: run(command, v))
    with pytest.raises(ValueError, match=command):
        run(command, 1, 2)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(derandomize=True, deadline=None, database=None, max_examples=150)
@given(
    text=st.text(max_size=30)
    | st.dictionaries(st.sampled_from(["models", *CONFIG]), JSON, max_size=3).map(json.dumps)
    | st.sampled_from(["[" * 100_000, '{"models": {}}', '{"model": []}', "9" * 5000, '{"budget": "no"}', "{}", "NaN"])
)
def test_the_environment_variable(text):
    error = error_of(environment.read, {"ROLLOUT_SPEC": text})
    if error is not None:
        assert "ROLLOUT_SPEC" in str(error)
        assert len(str(error)) < 1500


def test_a_misspelt_key_of_the_environment_variable():
    with pytest.raises(ValueError, match="ROLLOUT_SPEC: unknown key 'model'; did you mean 'models'"):
        environment.read({"ROLLOUT_SPEC": '{"model": ["*"]}'})


DEMO = {"steps": Argument(lambda value: False, ()), "seed": Argument(lambda value: False, ())}


@pytest.mark.parametrize("value", [*NUMBERS, "x", None])
def test_numbers_of_the_demo(value, tmp_path):
    if not is_int(value) or value < 2:
        with pytest.raises((TypeError, ValueError), match="steps must be|steps must fit"):
            run_demo(tmp_path, steps=value, seed=0)
    if not is_int(value) or not 0 <= value < 2**32:
        with pytest.raises((TypeError, ValueError), match="seed must be|seed must fit"):
            run_demo(tmp_path, steps=2, seed=value)
    assert not list(tmp_path.iterdir())


# -- noise and verification --------------------------------------------------------------------------------------------

INTEGERS = Argument(
    lambda v: is_int(v) or isinstance(v, list | tuple | range | np.ndarray | torch.Tensor | bytearray),
    (0, [1, 2], np.array([3, 4], np.uint8), np.arange(6)[::3]),
    ("shapes",),
)
NOISE = {"seeds": INTEGERS, "positions": INTEGERS, "tokens": INTEGERS, "domain": Argument(is_int, (0, np.int64(1)))}


def use_noise(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"seeds": 3, "positions": [4, 5], "tokens": 6, "domain": 0}
    for function in (noise.hash32, noise.uniform32, noise.gumbel):
        found = function(**{**arguments, name: value})
        assert found.dtype == (np.uint32 if function is noise.hash32 else np.float32)
    if name == "tokens":
        noise.token_keys(value)


test_arguments_of_the_noise = every_value(NOISE, use_noise)
test_any_arguments_of_the_noise = fuzz(NOISE, use_noise)


def is_long(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


ROWS = Argument(is_long, (torch.tensor([1, 2]), torch.arange(4)[::2]))
TORCH_NOISE = {
    "seeds": Argument(is_long, ROWS.typical, ("positions",)),
    "positions": ROWS,
    "tokens": Argument(lambda v: is_int(v) or is_long(v), (7, np.int64(7), torch.tensor([0, 6]), torch.zeros(0).int())),
    "domain": Argument(is_int, (0, np.int64(1))),
}


def use_torch_noise(name: str, value: Any) -> None:
    if name == "tokens" and is_int(value) and 2**20 < value < 2**31:
        return  # gigabytes
    arguments: dict[str, Any] = {"seeds": torch.tensor([3, 4]), "positions": torch.tensor([5, 6]), "tokens": 7}
    found = noise_torch.gumbel(**{**arguments, name: value})
    tokens = torch.arange(7) if name != "tokens" or is_int(value) else value
    if is_int(value) and name == "tokens":
        tokens = torch.arange(int(value))
    plain = {k: np.asarray(v)[:, None] for k, v in {**arguments, name: value}.items() if k in ("seeds", "positions")}
    domain = int(value) if name == "domain" else 0
    expected = noise.gumbel(plain["seeds"], plain["positions"], np.asarray(tokens), domain)
    np.testing.assert_allclose(found.numpy(), expected, atol=noise_torch.GUMBEL_TOLERANCE)


test_arguments_of_the_noise_on_a_device = every_value(TORCH_NOISE, use_torch_noise)


def test_seeds_are_derived_of_integers_and_strings():
    for value in NUMBERS + OTHERS:
        check("parts", Argument(lambda v: is_int(v) or isinstance(v, str), ()), value, noise.derive_seed)
    assert noise.derive_seed(np.int64(3)) == noise.derive_seed(3)


def a_batch(**changed: Any) -> dict[str, Any]:
    rows = {
        "temperature": torch.tensor([1.0, 0.0]),
        "seeds": torch.tensor([1, 2]),
        "positions": torch.tensor([5, 6]),
        **{name.removeprefix("rows."): value for name, value in changed.items() if name.startswith("rows.")},
    }
    arguments = {
        "target_logits": torch.linspace(-1, 1, 25).view(5, 5),
        "draft_token_ids": torch.tensor([4, 4, 1]),
        "cu_num_draft_tokens": torch.tensor([2, 3]),
        "rows": SamplingBatch(**rows),
    }
    return {**arguments, **{name: value for name, value in changed.items() if "." not in name}}


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


TENSOR = Argument(is_tensor, ())
NO_TENSOR = Argument(nothing_or(is_tensor), (None,))
VERIFY = {
    "target_logits": Argument(is_tensor, (torch.zeros(5, 5, dtype=torch.bfloat16), torch.zeros(5, 10)[:, ::2])),
    "draft_token_ids": Argument(is_tensor, (torch.tensor([-1, 2**40, 5]), torch.arange(6)[::2]), ("target_logits",)),
    "cu_num_draft_tokens": Argument(is_tensor, (torch.tensor([0, 3], dtype=torch.int32),), ("target_logits",)),
    "rows": Argument(lambda value: False, ()),
    "method": Argument(lambda value: isinstance(value, str), ("sample", "rejection")),
    "draft_probs": NO_TENSOR,
    "logprobs_mode": Argument(nothing_or(lambda v: isinstance(v, str)), (None, "raw_logprobs", "processed_logprobs")),
    "after_difference": SWITCH,
    "max_draft_tokens": Argument(nothing_or(is_int), (None, 2, np.int64(9))),
}
ROWS_OF_VERIFY = {
    "temperature": Argument(is_tensor, (torch.tensor([1e-9, 1e30]), torch.rand(4).double()[::2])),
    "seeds": Argument(nothing_or(is_tensor), (torch.tensor([-(2**63), 2**63 - 1]),)),
    "positions": Argument(is_tensor, (torch.tensor([-1, 2**62]),)),
    "top_k": Argument(nothing_or(is_tensor), (None, torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32))),
    "top_p": Argument(nothing_or(is_tensor), (None, torch.tensor([0.0, 1.0]))),
    "min_p": Argument(nothing_or(is_tensor), (None, torch.tensor([0.0, 1.0]))),
}
ALL_OF_VERIFY = {**VERIFY, **{f"rows.{name}": argument for name, argument in ROWS_OF_VERIFY.items()}}
NAN = torch.tensor([1.0, math.nan])
BAD_TENSORS = {
    "target_logits": [torch.zeros(4, 5), torch.zeros(5, 0), torch.zeros(5), torch.zeros(5, 5, dtype=torch.int32)],
    "draft_token_ids": [torch.zeros(3), torch.zeros(2).long(), torch.zeros(3, 1).long(), torch.zeros(3, device="meta")],
    "cu_num_draft_tokens": [
        torch.tensor([2, 4]),
        torch.tensor([3, 2]),
        torch.tensor([-1, 3]),
        torch.tensor([2**63 - 1, 3]),
        torch.tensor([2, 3]).double(),
    ],
    "rows.temperature": [NAN, torch.tensor([-1.0, 1]), torch.tensor([math.inf, 1]), torch.ones(3), torch.ones(2).int()],
    "rows.seeds": [torch.ones(2), torch.ones(2, 1).long()],
    "rows.positions": [torch.ones(2), torch.ones(1).long()],
    "rows.top_k": [torch.ones(2), torch.ones(3).int()],
    "rows.top_p": [NAN, torch.tensor([1.5, 1]), torch.ones(2, dtype=torch.int32)],
    "rows.min_p": [NAN, torch.tensor([-0.5, 1]), torch.ones(2, requires_grad=True)],
    "draft_probs": [torch.ones(3, 5), torch.ones(2, 5)],
    "max_draft_tokens": [1, -1],
}


def use_verify(name: str, value: Any) -> None:
    result = verify(**a_batch(**{name: value}))
    tokens = result.target_token_ids
    assert tokens.shape == (5,)
    assert ((tokens >= -1) & (tokens < (value if name == "target_logits" else torch.zeros(5, 5)).shape[1])).all()
    assert ((result.num_accepted >= 0) & (result.num_accepted <= torch.tensor([3, 3]))).all()


test_arguments_of_verify = every_value(ALL_OF_VERIFY, use_verify)


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_do_not_fit(name):
    for value in BAD_TENSORS[name]:
        with pytest.raises((TypeError, ValueError), match=name if name != "draft_token_ids" else "draft|target_logits"):
            verify(**a_batch(**{name: value}))


def test_sums_of_draft_lengths_that_wrap():
    """Differences of these wrap to lengths of at least 0: the compiled loop would read past the drafts."""
    batch = a_batch(
        target_logits=torch.zeros(6, 5),
        cu_num_draft_tokens=torch.tensor([2**63 - 1, -2, 3]),
        **{"rows.temperature": torch.ones(3), "rows.seeds": torch.arange(3), "rows.positions": torch.arange(3)},
    )
    with pytest.raises(ValueError, match="cu_num_draft_tokens must rise"):
        verify(**batch)


# -- the list is whole -------------------------------------------------------------------------------------------------


def parameters(function: Callable[..., Any]) -> set[str]:
    kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    return {name for name, p in inspect.signature(function).parameters.items() if p.kind not in kinds} - {"self"}


def test_every_argument_has_a_case():
    """Add a case above for what is missing here."""
    assert set(rollout_spec.__all__) == {"RolloutSpecConfig", "RolloutSpecGenerator", "__version__", "engine_kwargs"}
    assert set(CONFIG) == {field.name for field in dataclasses.fields(RolloutSpecConfig)}
    assert set(DRAFTER) == parameters(HistoryDrafter.__init__)
    of_the_engine = {"max_requests", "max_model_len", "device", "max_draft_tokens", "use_noise"}
    assert set(DEVICE) == parameters(check_device_options) == parameters(DeviceDrafter.__init__) - of_the_engine
    assert set(GENERATOR) == parameters(EngineController.__init__) - {"config"}
    assert set(REQUEST) == set(RequestOptions._fields)
    assert set(VERIFY) == parameters(verify)
    assert set(ROWS_OF_VERIFY) == {field.name for field in dataclasses.fields(SamplingBatch)}
    assert set(DEMO) == parameters(run_demo) - {"out_dir"}
    for function in (noise.hash32, noise.uniform32, noise.gumbel):
        assert set(NOISE) == parameters(function)
    for function in (noise_torch.uniform32, noise_torch.negative_gumbel, noise_torch.gumbel):
        assert set(TORCH_NOISE) == parameters(function)
    methods = ("start_request", "extend", "propose", "observe", "stop_request", "begin_policy_version")
    cases = {f"{method}.{name}" for method in methods for name in parameters(getattr(HistoryDrafter, method))}
    assert set(CALLS) == cases
