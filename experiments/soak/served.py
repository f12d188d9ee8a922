"""A soak's engine behind vLLM's server, with a client for each request."""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from experiments.soak.engines import (
    ADAPTER_NAMES,
    ROUND_SECONDS,
    SEARCH_PATH,
    START_SECONDS,
    Answer,
    Plan,
    sampling_arguments,
    usage,
)
from experiments.soak.workload import MAX_MODEL_LEN, Request, Round


class Served:
    """vLLM's server, which `ROLLOUT_SPEC` asks to speculate, with a client for each request."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._port = _free_port()
        self._version = 0
        self._log = open(plan.log, "a")  # noqa: SIM115 (as long as the server)
        models = Path(plan.model).parent
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", plan.model]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        for name, value in plan.engine_arguments().items():
            flag = "--" + name.replace("_", "-")
            command += [flag] if value is True else [flag, str(value)]
        if plan.arguments.get("enable_lora"):
            command.append("--lora-modules")
            command += [f"{name}={models / name.replace('-v', '-')}" for name in ADAPTER_NAMES]
        environment = {**os.environ, **plan.environment, **SEARCH_PATH, "VLLM_SERVER_DEV_MODE": "1"}
        environment["ROLLOUT_SPEC"] = json.dumps(dict(plan.options))
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)

    def wait_until_ready(self) -> None:
        """Raises RuntimeError if it does not start."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not start: {self._plan.log}")
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5):
                break
            time.sleep(0.3)

    def begin(self, round_: Round) -> None:
        """Let it serve a round."""
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve_in_a_thread, args=(round_,))
        self._thread.start()

    def end(self) -> Answer:
        """Wait for the round's end. Raises RuntimeError if the engine fails or hangs."""
        self._thread.join(ROUND_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError("the server hangs")
        if self._error is not None:
            raise RuntimeError(f"the server has failed, see {self._plan.log}: {self._error}") from self._error
        assert self._answer is not None
        return self._answer

    def stop(self, *, kill: bool = False) -> None:
        """End it with SIGTERM, or kill it and its workers."""
        if self._process.poll() is not None:
            return
        children = psutil.Process(self._process.pid).children(recursive=True)
        if kill:
            for process in children:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            self._process.kill()
        else:
            self._process.terminate()
        self._process.wait(60)
        self._log.close()

    def _serve_in_a_thread(self, round_: Round) -> None:
        try:
            self._answer = self._serve(round_)
        except BaseException as error:
            self._error = error

    def _serve(self, round_: Round) -> Answer:
        started, preempted = time.perf_counter(), self._metric("num_preemptions")
        answer = Answer()
        self._set_weights(round_.version)
        enabled = True
        coming = sorted(round_.requests, key=lambda request: request.arrives)
        events, clients, errors = list(round_.events), [], []
        while coming or any(client.is_alive() for client in clients):
            count = sum(len(rollout.token_ids) for rollout in list(answer.rollouts.values()))
            idle = not any(client.is_alive() for client in clients)
            while coming and (count >= coming[0].arrives or idle):
                request = coming.pop(0)
                for i in range(request.params["n"]):
                    answer.rollout(request.key, i)
                clients.append(threading.Thread(target=self._client, args=(request, answer, errors)))
                clients[-1].start()
                idle = False
            while events and count >= events[0].after:
                name = events.pop(0).name
                answer.count(name)
                if name == "switch" and self._plan.speculates:
                    enabled = not enabled
                    self._rpc("rollout_spec", "set_enabled", enabled)
                elif name == "vanish" and "history_dir" in self._plan.options:
                    shutil.rmtree(self._plan.options["history_dir"], ignore_errors=True)
                elif name == "preempt":
                    self._post("/reset_prefix_cache?reset_running_requests=true")
                elif name in ("pause", "weights"):
                    self._post("/pause?mode=keep")
                    time.sleep(0.3)
                    if name == "weights":
                        answer.begin_new_weights()
                        self._set_weights(self._version + 1)
                    self._post("/resume")
            time.sleep(0.005)
        if errors:
            raise errors[0]
        if not enabled:
            self._rpc("rollout_spec", "set_enabled", True)
        self._post(
            "/v1/completions", {"prompt": [1], "max_tokens": 1, "vllm_xargs": {"rollout_spec_keep_in_history": 0}}
        )
        answer.count("preemption", int(self._metric("num_preemptions") - preempted))
        answer.checks = self._rpc("soak_check")
        answer.stats = self._rpc("rollout_spec", "stats")[0]
        answer.history = self._rpc("rollout_spec", "history")[0]
        answer.memory_bytes, answer.open_files = usage(self._process.pid)
        answer.seconds = time.perf_counter() - started
        return answer

    def _client(self, request: Request, answer: Answer, errors: list[BaseException]) -> None:
        try:
            self._stream(request, answer)
        except BaseException as error:
            errors.append(error)

    def _stream(self, request: Request, answer: Answer) -> None:
        body = {
            "prompt": request.prompt, "stream": True, "return_token_ids": True, "return_tokens_as_token_ids": True,
            **sampling_arguments(request, is_reference=not self._plan.speculates),
        }  # fmt: skip
        # The server refuses what `LLM` ends at the model's length.
        body["max_tokens"] = min(body["max_tokens"], MAX_MODEL_LEN - len(request.prompt))
        if request.adapter is not None:
            body["model"] = "{}-v{}".format(*request.adapter)
        if request.is_evaluation:
            body["vllm_xargs"] = {"rollout_spec_keep_in_history": 0}
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ROUND_SECONDS)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{request}: {response.read().decode()}")
        for line in response:
            text = line.decode().removeprefix("data: ").strip()
            if not text or text == "[DONE]":
                continue
            for choice in json.loads(text)["choices"]:
                rollout = answer.rollouts[request.key, choice["index"]]
                rollout.text += choice["text"]
                rollout.finish_reason = choice["finish_reason"] or rollout.finish_reason
                rollout.stop_reason = choice.get("stop_reason") or rollout.stop_reason
                if choice["logprobs"] is not None:
                    for token, logprob, others in zip(
                        *(choice["logprobs"][name] for name in ("tokens", "token_logprobs", "top_logprobs")),
                        strict=True,
                    ):
                        every = {token: logprob, **(others or {})}
                        rollout.top.append({int(key.split(":")[1]): value for key, value in every.items()})
                rollout.token_ids += choice["token_ids"] or ()
                if request.leave_after is not None and len(rollout.token_ids) >= request.leave_after:
                    connection.close()
                    answer.count("abort")
                    return
        connection.close()

    def _set_weights(self, version: int) -> None:
        if version != self._version:
            self._version = version
            self._rpc("soak_set_weights", version)
            self._post("/reset_prefix_cache?reset_running_requests=true")

    def _rpc(self, method: str, *args: Any) -> Any:
        return json.loads(self._post("/collective_rpc", {"method": method, "args": args}))["results"]

    def _post(self, path: str, body: Any = None) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            json.dumps(body or {}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ROUND_SECONDS) as response:
                return response.read().decode()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.read().decode()}") from None

    def _metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}_total{{"))


def _free_port() -> int:
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
