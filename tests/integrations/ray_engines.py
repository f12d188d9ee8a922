"""Engines as OpenRLHF and verl make them through Ray: by the frameworks' own code, on a local cluster without a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import ActorUnavailableError

from tests.conftest import environment_for_a_process
from tests.integrations import framework_engines as frameworks

ROOT = Path(__file__).parents[2]
NODE = {"num_cpus": 3, "num_gpus": 1, "object_store_memory": 100 * 2**20}
"""What Ray is told that a node has. Both frameworks ask for a GPU for each engine."""
MAX_SECONDS = 240.0
"""Longest wait for anything."""


@contextlib.contextmanager
def cluster_of_three() -> Iterator[Cluster]:
    """A head, with the driver, and two nodes for an engine each."""
    variables = environment_for_a_process(PYTHONPATH=str(ROOT), RAY_USAGE_STATS_ENABLED="0")
    with mock.patch.dict(os.environ, variables, clear=True):
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_gpus": 0, "include_dashboard": False})
        try:
            for _ in range(2):
                cluster.add_node(**NODE)
            yield cluster
        finally:
            cluster.shutdown()


@contextlib.contextmanager
def job(cluster: Cluster, env_vars: dict[str, str]) -> Iterator[None]:
    """Make this process the driver of a job whose actors get these variables from Ray."""
    runtime_env = {"env_vars": env_vars, "worker_process_setup_hook": frameworks.adapt_ray_worker}
    ray.init(address=cluster.address, runtime_env=runtime_env, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


class Engine:
    """An engine's actor, seen from the driver.

    Args:
        start: Sends the actor a request with a seed and changes of the sampling parameters.
        tokens: Of the answer.
    """

    def __init__(self, actor: Any, start: Callable[..., Any], tokens: Callable[[Any], Iterable[int]]) -> None:
        self.actor = actor
        self._start = start
        self._tokens = tokens

    def start(self, seeds: Iterable[int], **changes: Any) -> list[Any]:
        """Start rollouts; does not wait."""
        return [self._start(seed, **changes) for seed in seeds]

    def tokens(self, started: list[Any]) -> list[list[int]]:
        """The tokens of rollouts, once they have ended. Raises RayActorError if the actor has died."""
        return [list(self._tokens(answer)) for answer in ray.get(started, timeout=MAX_SECONDS)]

    def rollouts(self, seeds: Iterable[int], **changes: Any) -> tuple[list[list[int]], float]:
        """The tokens of rollouts, and how many tokens there were per step."""
        before = self.command("stats")
        tokens = self.tokens(self.start(seeds, **changes))
        after = self.command("stats")
        emitted, steps = (after[name] - before[name] for name in ("emitted_tokens", "request_steps"))
        return tokens, emitted / steps

    def command(self, name: str) -> dict[str, Any]:
        """What the engine answers to a command. Waits for an actor that is being restarted."""
        return self._call(_run_command, name)[0]

    def place(self) -> tuple[str, int]:
        """Its node and its process."""
        return self._call(lambda _: (ray.get_runtime_context().get_node_id(), os.getpid()))

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        answer: list[Any] = []

        def is_answered() -> bool:
            with contextlib.suppress(ActorUnavailableError):
                answer.append(ray.get(self.actor.__ray_call__.remote(function, *args), timeout=MAX_SECONDS))
            return bool(answer)

        wait_until(is_answered)
        return answer[0]


class VerlEngine(Engine):
    """A server of verl's, and the worker that verl starts beside it."""

    def __init__(self, actor: Any, worker: Any, *functions: Callable[..., Any]) -> None:
        super().__init__(actor, *functions)
        self._worker = worker

    def update_weights(self, model: Path) -> None:
        """New weights, by verl's worker."""
        ray.get(self._worker.__ray_call__.remote(_send_weights, model), timeout=MAX_SECONDS)


def _send_weights(worker: Any, model: Path) -> None:
    """In the worker, beside its event loop."""
    worker.server_adapter.use_shm = True  # instead of CUDA's IPC
    asyncio.run(worker.server_adapter.update_weights(frameworks.changed_weights(model)))


def _run_command(actor: Any, name: str) -> Any:
    """In the actor, beside its event loop."""
    engine = getattr(actor, "llm", None) or actor.engine
    loop = engine.output_handler.get_loop()
    return asyncio.run_coroutine_threadsafe(engine.collective_rpc("rollout_spec", args=(name,)), loop).result()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until it holds, but not forever."""
    deadline = time.monotonic() + MAX_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.1)


def openrlhf_engines(model: Path, num_engines: int) -> list[Engine]:
    """Those that OpenRLHF makes, but Ray restarts them, and in float32: in bfloat16 rollouts depend on the batch."""
    import openrlhf.trainer.ray.vllm_engine as module

    made = module.RolloutRayActor

    def options(**given: Any) -> Any:
        actor = made.options(**given, max_restarts=-1)
        return SimpleNamespace(remote=lambda **arguments: actor.remote(**{**arguments, "dtype": "float32"}))

    with mock.patch.object(module, "RolloutRayActor", SimpleNamespace(options=options)):
        actors = frameworks.create_openrlhf_engines(model, num_engines)

    def engine(actor: Any) -> Engine:
        def start(seed: int, **changes: Any) -> Any:
            return actor.generate.remote(frameworks.prompt(seed), frameworks.openrlhf_params(seed, **changes))

        return Engine(actor, start, lambda output: output.outputs[0].token_ids)

    return [engine(actor) for actor in actors]


def verl_engines(model: Path, num_engines: int) -> list[VerlEngine]:
    """Those that verl makes."""
    from verl.workers.rollout.llm_server import LLMServerManager

    of_the_engines = {"model.path": model, "rollout.nnodes": num_engines, "rollout.n_gpus_per_node": 1}
    lines = [f"actor_rollout_ref.{key}={value}" for key, value in of_the_engines.items()]
    manager = LLMServerManager.create(frameworks.verl_config(lines))

    def engine(replica: Any) -> VerlEngine:
        actor = replica.server_handle

        def start(seed: int, **changes: Any) -> Any:
            params = frameworks.verl_params(seed, **changes)
            return actor.generate.remote(frameworks.prompt(seed), params, f"{seed}-{time.monotonic_ns()}")

        return VerlEngine(actor, replica.workers[0], start, lambda output: output.token_ids)

    return [engine(replica) for replica in manager.get_replicas()]
