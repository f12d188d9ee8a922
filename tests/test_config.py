"""Configuration, counters, and what must import without what."""

import json
import subprocess
import sys
from collections import UserList
from types import MappingProxyType

import numpy as np
import pytest

from rollout_spec import RolloutSpecConfig, checks, engine_kwargs
from rollout_spec.config import CONFIG_KEY

MTP = {"method": "mtp", "num_speculative_tokens": 3}


def test_options_of_configuration_libraries():
    """Their mappings and sequences are no dicts and lists; numbers may be NumPy's."""
    nested = MappingProxyType({"a": MappingProxyType({"b": UserList([np.int64(1), "c"])})})
    assert checks.plain("options", nested) == {"a": {"b": [1, "c"]}}
    options = RolloutSpecConfig(drafter_options=MappingProxyType({"max_history_tokens": np.int64(5)})).drafter_options
    assert options == {"max_history_tokens": 5}


def test_round_trip():
    config = RolloutSpecConfig(num_speculative_tokens=3, drafter_options={"features": False})
    assert RolloutSpecConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    kwargs = config.engine_kwargs()
    assert kwargs["speculative_config"]["num_speculative_tokens"] == 3
    assert "speculative_config" not in engine_kwargs(speculation=False)


def test_a_folder_for_history(monkeypatch, tmp_path):
    config = RolloutSpecConfig(history_dir=tmp_path / "history")
    assert config.history_dir == str(tmp_path / "history")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RolloutSpecConfig(history_dir="~/history") == config
    assert RolloutSpecConfig(history_dir="memory://~/history").history_dir == "memory://~/history"
    assert RolloutSpecConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert not (tmp_path / "history").exists(), "made by the engine, once there is something to keep"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"history_dir needs pyarrow and fsspec: pip install 'rollout-spec\[history\]'"
    ):
        RolloutSpecConfig(history_dir="history")


@pytest.mark.parametrize(("given", "bound"), [("4GB", 4_000_000_000), ("1.5k", 1500), (7, 7), (np.int64(7), 7)])
def test_the_bound_of_a_folder_is_a_size_as_prune_takes_it(given, bound):
    assert RolloutSpecConfig(max_history_dir_bytes=given).max_history_dir_bytes == bound


def test_a_model_beside_history():
    """K is the model's unless it is given; then the model drafts as many tokens as before, and at most K."""
    for options, k, num_model in (
        ({}, 3, 3),
        ({"num_speculative_tokens": 8}, 8, 3),
        ({"num_speculative_tokens": 2}, 2, 2),
    ):
        kwargs = engine_kwargs(speculative_config=MTP, **options)
        assert kwargs["speculative_config"] == {"method": "mtp", "num_speculative_tokens": k}
        ours = RolloutSpecConfig.from_dict(json.loads(json.dumps(kwargs["additional_config"][CONFIG_KEY])))
        assert (ours.num_speculative_tokens, ours.num_model_draft_tokens, ours.drafter) == (k, num_model, "auto")
        assert ours.engine_kwargs() == kwargs


def test_imports_without_optional_packages():
    """`import rollout_spec` needs neither vllm, trl, transformers, torch nor triton; drafters need numba only."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(['vllm', 'trl', 'transformers', 'torch', 'triton']))\n"
    code = blocked + (
        "import rollout_spec, rollout_spec.cli\n"
        "from rollout_spec.drafters import build_drafter\n"
        "build_drafter('history')\n"
        "from rollout_spec.integrations.vllm import plugin\n"
        "plugin.register(); plugin.register()\n"
        "try:\n    rollout_spec.RolloutSpecGenerator\n"
        "except ImportError:\n    print('ok')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "ok\n", result.stderr


def test_no_second_identity():
    code = "import sys; sys.path.insert(0, '.'); import drafters"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "import this package as rollout_spec.drafters" in result.stderr


def test_versions():
    from rollout_spec.integrations.vllm.compat import check_version

    check_version((0, 31, 0), "0.31.0")
    check_version((0, 0, "dev"), "dev")
    with pytest.raises(RuntimeError, match="needs vLLM 0.24 or newer"):
        check_version((0, 11, 0), "0.11.0")
    with pytest.warns(UserWarning, match="tested with vLLM up to"):
        check_version((0, 99, 0), "0.99.0")
