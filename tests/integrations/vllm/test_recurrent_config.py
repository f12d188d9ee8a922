"""What engines of models with recurrent layers are refused, and what they get where they ask for nothing special.

Their rollouts are in `tests/recurrent`.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import MambaSpec

from rollout_spec import engine_kwargs
from rollout_spec.config import PROPOSER_PATH, RolloutSpecConfig
from rollout_spec.integrations.vllm import log
from rollout_spec.integrations.vllm.configuration import check_engine, config_of
from tests.recurrent.models import MODELS


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    path = tmp_path_factory.mktemp("recurrent") / "mamba2"
    MODELS["mamba2"](path)
    return path


def make(model, **arguments):
    arguments = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, **arguments}
    return EngineArgs(model=str(model), **arguments).create_engine_config()


@pytest.mark.parametrize("version", [(0, 24, 0), (0, 31, 0), (0, 32, 0), (0, 33, 1), (0, 0)])
def test_refused_where_vllm_mixes_up_their_states(recurrent, tiny_model, monkeypatch, version):
    monkeypatch.setattr(vllm, "__version_tuple__", version)
    monkeypatch.setattr(vllm, "__version__", ".".join(map(str, version)))
    vllm_config = make(recurrent, **engine_kwargs())
    if (0, 0) < version < (0, 32):
        with pytest.raises(ValueError, match=r"wrongly where it speculates.* install vLLM 0\.32 .*speculation=False"):
            check_engine(vllm_config, config_of(vllm_config))
    else:
        check_engine(vllm_config, config_of(vllm_config))
    for model, options in ((recurrent, {"speculation": False}), (tiny_model, {})):
        vllm_config = make(model, **engine_kwargs(**options))
        check_engine(vllm_config, config_of(vllm_config))


def test_refused_beside_a_model_drafter_too(recurrent, monkeypatch):
    """Its last step, before `max_tokens`, has no draft."""
    monkeypatch.setattr(vllm, "__version_tuple__", (0, 31, 0))
    beside = {"method": "draft_model", "model": str(recurrent), "num_speculative_tokens": 3}
    vllm_config = make(recurrent, **engine_kwargs(speculative_config=beside))
    with pytest.raises(ValueError, match="recurrent layers wrongly"):
        check_engine(vllm_config, config_of(vllm_config))


def test_they_have_few_draft_tokens_unless_told_otherwise(recurrent, tiny_model):
    """Each is a state more of each request."""
    proposer = {"method": "custom_class", "model": PROPOSER_PATH, "num_speculative_tokens": 6}
    draft_model = {"method": "draft_model", "model": str(recurrent)}
    additional = {"additional_config": engine_kwargs()["additional_config"]}
    for model, arguments, k in (
        (recurrent, engine_kwargs(), 3),
        (tiny_model, engine_kwargs(), 8),
        (recurrent, engine_kwargs(num_speculative_tokens=8), 8),
        (recurrent, {"speculative_config": proposer, "additional_config": {"rollout_spec": {}}}, 6),
        (recurrent, {"speculative_config": proposer}, 6),
        (recurrent, {"speculative_config": proposer, **additional}, 6),
        (
            recurrent,
            RolloutSpecConfig(speculative_config={**draft_model, "num_speculative_tokens": 2}).engine_kwargs(),
            2,
        ),
    ):
        vllm_config = make(model, **arguments)
        assert config_of(vllm_config).num_speculative_tokens == k
        assert vllm_config.speculative_config.num_speculative_tokens == k
        vllm_config.__post_init__()
        assert config_of(vllm_config).num_speculative_tokens == k


def test_what_their_states_take_is_said():
    spec = MambaSpec(
        block_size=16,
        shapes=((256, 1024),),
        dtypes=(torch.float32,),
        page_size_padded=3 << 20,
        num_speculative_blocks=3,
    )
    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none"))
    said = log.describe_states([spec, SimpleNamespace(), spec], vllm_config)
    assert "holds 3 more states of its recurrent layers" in said
    assert "24.0 MiB on each rank instead of 6.0" in said, "with what vLLM adds to align them"
    assert log.describe_states([SimpleNamespace()], vllm_config) is None
    assert log.describe_states([dataclasses.replace(spec, num_speculative_blocks=0)], vllm_config) is None
