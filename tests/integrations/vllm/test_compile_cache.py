"""vLLM finds the compiled model again when only our options have changed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.compilation import caching
from vllm.compilation.backends import VllmBackend
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from rollout_spec import engine_kwargs


@pytest.fixture
def configs(tiny_model):
    """Three engines' configurations, of which the first two differ in our options only."""
    few = {"max_history_tokens": 1000}
    options = [engine_kwargs(), engine_kwargs(drafter_options=few, verify="rejection"), engine_kwargs()]
    options[-1]["additional_config"]["another_plugin"] = {"depth": 3}
    return [
        EngineArgs(model=str(tiny_model), dtype="float32", max_model_len=128, **kwargs).create_engine_config()
        for kwargs in options
    ]


class Found(Exception):
    """The backend has asked for all hashes that it needs of a configuration."""


def hash_when_compiling(config, monkeypatch):
    """What the backend of `torch.compile` goes by."""
    hashes, compute_hash = [], VllmConfig.compute_hash

    def stop(vllm_config):
        raise Found

    with monkeypatch.context() as patch:
        patch.setattr(VllmConfig, "compute_hash", lambda self: hashes.append(compute_hash(self)) or hashes[-1])
        backend = SimpleNamespace(
            vllm_config=config,
            compiler_manager=SimpleNamespace(compute_hash=stop),
            compilation_config=config.compilation_config,
            _log_compilation_config=lambda: None,
        )
        with pytest.raises(Found):
            VllmBackend.__call__(backend, None, ())
    (found,) = hashes
    return found


def test_our_options_alone_compile_nothing_anew(configs, monkeypatch):
    for hashes in (
        [hash_when_compiling(config, monkeypatch) for config in configs],
        [caching.aot_compile_hash_factors(config) for config in configs],
    ):
        assert hashes[0] == hashes[1] != hashes[2]
    assert all("rollout_spec" in config.additional_config for config in configs)


def test_kernels_that_are_tuned_at_start_are_found_again(configs, tiny_model):
    """vLLM asks with an argument there, in engines without us, too."""
    tuning = pytest.importorskip("vllm.model_executor.warmup.flashinfer_autotune_cache")  # from 0.31 on
    without = EngineArgs(model=str(tiny_model), dtype="float32", max_model_len=128).create_engine_config()
    found = [
        tuning.flashinfer_autotune_cache_hash(SimpleNamespace(vllm_config=config)) for config in (*configs, without)
    ]
    assert len(set(found)) == 4


def test_measured_memory_depends_on_our_options(configs):
    plan = pytest.importorskip("vllm.v1.worker.startup_plan")  # from 0.26 on
    assert len({config.compute_hash() for config in configs}) == 3
    assert len({plan.compute_plan_fingerprint(config, 0, 1) for config in configs}) == 3
