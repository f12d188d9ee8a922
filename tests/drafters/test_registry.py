"""Drafters by name: what is made of them, and what their options may be."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys

import numpy as np
import pytest

from rollout_spec.drafters import DRAFTERS, build_drafter, check_options, find_drafter, runs_on_device
from rollout_spec.drafters.host.history import HistoryDrafter

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the device drafter needs Triton")


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_by_name(name):
    drafter = build_drafter(name, max_draft_tokens=2)
    assert isinstance(drafter, HistoryDrafter)
    assert find_drafter(name) == (HistoryDrafter, DRAFTERS[name])
    drafter.start_request("a", [1, 2, 3, 4, 1, 2])
    (draft,) = drafter.propose(["a"], np.full(1, 9, np.int32))
    assert len(draft.token_ids) == len(draft.confidence) <= 2
    assert drafter.memory_bytes() > 0
    drafter.check_integrity()


def test_options_override_what_the_name_implies():
    assert build_drafter("history", shared=False)._settings.use_shared is False
    find_drafter("history")[1]["shared"] = None
    assert DRAFTERS["history"]["shared"] is True


def test_an_old_name_is_the_present_drafter_with_one_warning_per_process():
    program = """
import warnings
from rollout_spec import engine_kwargs
from rollout_spec.cli import main
from rollout_spec.drafters import build_drafter, check_options, find_drafter
from rollout_spec.drafters.registry import check_keeps_history

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert build_drafter("mixture", max_draft_tokens=2)._settings.use_shared
    assert find_drafter("mixture") == find_drafter("history")
    check_options("mixture", {"recency": 0.5})
    check_keeps_history("mixture")
    assert engine_kwargs(drafter="mixture")["additional_config"]["rollout_spec"]["drafter"] == "history"
    assert main(["replay", "/nonexistent.parquet", "--drafter", "mixture"]) == 2
(warning,) = [str(w.message) for w in caught if "mixture" in str(w.message)]
assert warning == "drafter 'mixture' is called 'history' now: the old name will go in a later release", warning
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "nonexistent.parquet" in done.stderr, "the name was no obstacle"


def test_drafters_by_path():
    drafter = build_drafter("rollout_spec.drafters.host.history.HistoryDrafter", index="ngram")
    assert isinstance(drafter, HistoryDrafter)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("treee", {}, r"unknown drafter 'treee': use one of \["),
        ("no.such.Drafter", {}, "cannot be imported"),
        ("rollout_spec.drafters.host.history.Nothing", {}, "cannot be imported"),
        ("suffix", {"depth": 3}, "'suffix' does not take these drafter_options"),
        ("history", {"max_draft_tokens": 0}, "max_draft_tokens"),
        ("device", {}, "'device' runs on the device, where the engine makes it"),
    ],
)
def test_drafters_that_cannot_be_built(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_drafter(name, **options)


def test_a_drafter_of_ones_own_that_is_not_on_the_path(tmp_path, monkeypatch):
    """Where its module is missing the remedy is the path; what the module itself lacks is another matter."""
    for name in ("no_such_module.Drafter", "rollout_spec.no_such_module.Drafter"):
        with pytest.raises(ValueError, match=r"PYTHONPATH of every process of the engine$"):
            build_drafter(name)
    (tmp_path / "needs_another.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("needs_another.Drafter", "rollout_spec.drafters.host.history.Nothing"):
        with pytest.raises(ValueError) as raised:
            build_drafter(name)
        assert "PYTHONPATH" not in str(raised.value)


@needs_triton
def test_the_device_drafter_has_a_name_too():
    from rollout_spec.drafters.device.drafter import DeviceDrafter

    assert find_drafter("device") == (DeviceDrafter, {})
    assert runs_on_device("device")
    assert not any(map(runs_on_device, [*DRAFTERS, "rollout_spec.drafters.device.drafter.DeviceDrafter", "devise"]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("history", {"recency": 0.5, "shared": False}),
        pytest.param("device", {"recency": 0.5, "max_problem_tokens": 9}, marks=needs_triton),
        ("rollout_spec.drafters.host.history.HistoryDrafter", {"index": "ngram"}),
    ],
)
def test_options_that_can_be_taken(name, options):
    check_options(name, options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("devise", {}, "unknown drafter 'devise'.*'device', 'history', 'lookahead', 'ngram', 'suffix'"),
        ("no.such.Drafter", {}, "cannot be imported"),
        ("history", {"depth": 3}, "'history' does not take these drafter_options.*depth"),
        ("history", {"recency": 2}, "recency must be in"),
        ("history", {"signatures": False}, "signatures and distributions are one option now: features"),
        ("suffix", {"features": True, "distributions": False}, "are one option now: features"),
        pytest.param("device", {"recency": 2}, "recency must be in", marks=needs_triton),
        pytest.param(
            "device",
            {"max_requests": 8},
            "'device' does not take these drafter_options.*max_requests",
            marks=needs_triton,
        ),
        (
            "rollout_spec.drafters.host.history.HistoryDrafter",
            {"depth": 3},
            "does not take these drafter_options.*depth",
        ),
    ],
)
def test_options_that_cannot(name, options, message):
    with pytest.raises(ValueError, match=message):
        check_options(name, options)


@needs_triton
def test_every_option_of_the_device_drafter_is_checked():
    from rollout_spec.drafters.device import drafter as device

    of_the_engine = {"max_requests", "max_model_len", "device", "max_draft_tokens", "use_noise"}
    options = inspect.signature(device.DeviceDrafter).parameters.keys() - of_the_engine
    assert options == inspect.signature(device.check_options).parameters.keys()
