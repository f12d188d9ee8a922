"""A soak's engines: `vllm.LLM`, as in a trainer's process, or vLLM's server with a client for each request.

Each has a process of its own, which gets rounds and gives answers (see `experiments.processes`).
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from experiments.engines.build import build_engine
from experiments.processes import Child
from experiments.soak.workload import ADAPTERS, MAX_MODEL_LEN, Request, Round
from tests.conftest import VOCAB_SIZE, free_port

ANSWER_SECONDS = 600
"""Within these an engine must have started, or have served a round; otherwise it hangs."""


@dataclass
class Rollout:
    """What a client got. `top` has the log-probabilities of each position by token."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    top: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answer:
    """What an engine says of a round: rollouts by request and number, counts of events and of the command `stats`, the
    number of requests of which each rank has state left, and the memory of all its processes.
    """

    rollouts: dict[tuple[str, int], Rollout]
    events: Counter[str] = field(default_factory=Counter)
    stats: dict[str, Any] = field(default_factory=dict)
    live: list[int] = field(default_factory=list)
    memory_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """How an engine is built: fields of `RolloutSpecConfig`, and arguments beside those that all of a soak have."""

    kind: str
    model: Path
    log: Path
    options: Mapping[str, Any]
    arguments: Mapping[str, Any]

    @property
    def speculates(self) -> bool:
        """Whether it is the one that is tested, and not the one that it is compared with."""
        return self.options.get("speculation", True)

    def engine_arguments(self) -> dict[str, Any]:
        """Of `vllm.LLM`. The key-value cache has too few blocks for a round's requests: some are preempted."""
        return {
            "dtype": "float32", "enforce_eager": True, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16,
            "max_num_batched_tokens": 96, "block_size": 32, "num_gpu_blocks_override": 12,
            "logprobs_mode": "processed_logprobs", "max_logprobs": VOCAB_SIZE,
            "worker_extension_cls": "experiments.soak.worker.SoakWorker", **self.arguments,
        }  # fmt: skip

    def parameters(self, request: Request) -> dict[str, Any]:
        """Of sampling. The engine without speculation gives every log-probability."""
        return request.params if self.speculates else {**request.params, "logprobs": VOCAB_SIZE}


def start(plan: Plan) -> Child:
    """An engine's process, whose first answer says that it is ready."""
    environment = {"VLLM_USE_V2_MODEL_RUNNER": str(int(plan.kind == "device"))}
    return Child(serve_rounds, plan, log=plan.log, environment=environment)


def serve_rounds(plan: Plan) -> Generator[Answer | None, Round, None]:
    """Answers each round, in a process of its own."""
    engine = _Server(plan) if plan.kind == "served" else _Colocated(plan)
    answer: Answer | None = None
    try:
        while True:
            round_ = yield answer
            answer = engine.serve(round_)
    finally:
        engine.stop()


class _Server:
    """vLLM's server. Clients leave, and things happen, while requests run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._version, self._enabled = 0, True
        self._start()

    def serve(self, round_: Round) -> Answer:
        """Serve a round."""
        if round_.version != self._version:
            self._version = round_.version
            self._rpc("soak_set_weights", round_.version)
            self._preempt()
        keys = [(request.key, i) for request in round_.requests for i in range(request.params["n"])]
        answer = Answer({key: Rollout() for key in keys})
        preempted = self._num_preempted()
        self._generate(round_, answer)
        answer.events["preemption"] += self._num_preempted() - preempted
        if not self._enabled:
            self._happen("switch", answer)
        self._generate_one()  # with which the drafter sees that the others have ended
        answer.live = [checked["live"] for checked in self._rpc("soak_check")]
        answer.stats = self._rpc("rollout_spec", "stats")[0]
        process = psutil.Process()
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                answer.memory_bytes += one.memory_info().rss
        return answer

    def stop(self) -> None:
        """Before the process ends."""
        self._process.terminate()
        self._process.wait(60)

    def _happen(self, name: str, answer: Answer) -> None:
        answer.events[name] += 1
        if name == "preempt":
            self._preempt()
        elif name == "switch" and self._plan.speculates:
            self._enabled = not self._enabled
            self._rpc("rollout_spec", "set_enabled", self._enabled)
        elif name == "vanish" and "history_dir" in self._plan.options:
            shutil.rmtree(self._plan.options["history_dir"], ignore_errors=True)

    def _start(self) -> None:
        plan = self._plan
        self._port = free_port()
        program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(plan.model)]
        program += ["--host", "127.0.0.1", "--port", str(self._port), "--shutdown-timeout", "60"]
        for name, value in plan.engine_arguments().items():
            flag = "--" + name.replace("_", "-")
            program += [flag] if value is True else [flag, str(value)]
        if plan.arguments.get("enable_lora"):
            program += ["--lora-modules", *(f"{name}={plan.model.parent / name}" for name in ADAPTERS)]
        variables = {"ROLLOUT_SPEC": json.dumps(plan.options), "VLLM_SERVER_DEV_MODE": "1"}
        self._process = subprocess.Popen(program, env={**os.environ, **variables})
        while self._process.poll() is None:
            with suppress(OSError):
                self._ask("/health")
                return
            time.sleep(0.3)
        raise RuntimeError("the server does not start")

    def _generate(self, round_: Round, answer: Answer) -> None:
        started = time.perf_counter()
        with ThreadPoolExecutor(len(round_.requests)) as clients:
            done = [clients.submit(self._client, request, answer) for request in round_.requests]
            for seconds, name in round_.events:
                time.sleep(max(0.0, started + seconds - time.perf_counter()))
                self._happen(name, answer)
        for client in done:
            client.result()

    def _client(self, request: Request, answer: Answer) -> None:
        time.sleep(request.arrives)
        body = {
            "prompt": request.prompt, "stream": True, "return_token_ids": True, "return_tokens_as_token_ids": True,
            "model": request.adapter, **self._plan.parameters(request),
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{request}: {response.read().decode()}")
        for line in response:
            text = line.decode().removeprefix("data: ").strip()
            for choice in json.loads(text)["choices"] if text not in ("", "[DONE]") else ():
                rollout = answer.rollouts[request.key, choice["index"]]
                rollout.token_ids += choice["token_ids"] or ()
                rollout.text += choice["text"]
                rollout.finish_reason = choice["finish_reason"] or rollout.finish_reason
                if (found := choice["logprobs"]) is not None:
                    for names in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
                        every = {names[0]: names[1], **(names[2] or {})}
                        rollout.top.append({int(name.split(":")[1]): value for name, value in every.items()})
                if request.leave_after is not None and len(rollout.token_ids) >= request.leave_after:
                    answer.events["abort"] += 1
                    connection.close()
                    return
        connection.close()

    def _generate_one(self) -> None:
        keeps_nothing = {"rollout_spec_keep_in_history": 0}
        self._ask("/v1/completions", {"prompt": [1], "max_tokens": 1, "vllm_xargs": keeps_nothing})

    def _preempt(self) -> None:
        self._ask("/reset_prefix_cache?reset_running_requests=true", {})

    def _rpc(self, method: str, *args: Any) -> Any:
        return json.loads(self._ask("/collective_rpc", {"method": method, "args": args}))["results"]

    def _num_preempted(self) -> int:
        lines = [line for line in self._ask("/metrics").splitlines() if line.startswith("vllm:num_preemptions_total{")]
        return int(sum(float(line.split()[-1]) for line in lines))

    def _ask(self, path: str, body: Any = None) -> str:
        data, url = None if body is None else json.dumps(body).encode(), f"http://127.0.0.1:{self._port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
            return response.read().decode()


class _Colocated(_Server):
    """`vllm.LLM` in this process. A round is one call; what happens comes before it."""

    def _start(self) -> None:
        if self._plan.kind == "device":
            from tests.emulation import schedule_as_on_gpus, show_vllm_a_backend

            show_vllm_a_backend()
            schedule_as_on_gpus()
        plan = self._plan
        mode = "budget" if plan.speculates else "off"
        arguments = {**plan.engine_arguments(), "disable_log_stats": False}
        self._llm = build_engine(plan.model, mode, options=plan.options, **arguments)

    def stop(self) -> None:
        """Before the process ends."""

    def _generate(self, round_: Round, answer: Answer) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        for _, name in round_.events:
            self._happen(name, answer)
        folder = self._plan.model.parent
        known = {name: LoRARequest(name, i, str(folder / name)) for i, name in enumerate(ADAPTERS, 1)}
        prompts = [{"prompt_token_ids": request.prompt} for request in round_.requests]
        params = [SamplingParams(**self._plan.parameters(request)) for request in round_.requests]
        adapters = [known.get(request.adapter) for request in round_.requests]
        outputs = self._llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
        for request, output in zip(round_.requests, outputs, strict=True):
            for completion in output.outputs:
                top = [{token: found.logprob for token, found in by.items()} for by in completion.logprobs]
                rollout = Rollout(list(completion.token_ids), completion.text, top, completion.finish_reason)
                answer.rollouts[request.key, completion.index] = rollout

    def _generate_one(self) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, extra_args={"rollout_spec": {"keep_in_history": False}})
        self._llm.generate({"prompt_token_ids": [1]}, params, use_tqdm=False)
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks of the key-value cache are lost"
        assert not scheduler.requests, "the scheduler keeps requests"

    def _preempt(self) -> None:
        self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    def _rpc(self, method: str, *args: Any) -> Any:
        return self._llm.collective_rpc(method, args=args)

    def _num_preempted(self) -> int:
        return sum(metric.value for metric in self._llm.get_metrics() if metric.name == "vllm:num_preemptions")
