"""A vLLM server with speculation, as users start it."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request

from tests.conftest import environment_for_a_process, free_port

PROMPT = [1, 4, 9]
START_SECONDS = 240


class Server:
    """A server that `ROLLOUT_SPEC` asks to speculate. Vocabulary and weights are the tiny model's.

    Args:
        log: The file that gets what it prints.
        arguments: More of vLLM's, by name.
        environment: More variables.
        **options: Fields of `RolloutSpecConfig`.
    """

    def __init__(self, model, log, *, arguments=(), environment=(), **options) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        given = {
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "float32",
            "max-model-len": 128,
            "max-num-seqs": 32,
            "num-gpu-blocks-override": 300,
            "logprobs-mode": "processed_logprobs",
            **dict(arguments),
        }
        # The CPU build's `vllm serve` does not start: it looks for the version of the CUDA build.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--enforce-eager"]
        for name, value in given.items():
            command += [f"--{name}", str(value)]
        self._log = log
        self._process = subprocess.Popen(
            command,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment_for_a_process(
                ROLLOUT_SPEC=json.dumps(options),
                VLLM_SERVER_DEV_MODE="1",
                VLLM_LOGGING_LEVEL="INFO",
                **dict(environment),
            ),
        )
        started = time.monotonic()
        while not self._is_up():
            assert self._process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() - started < START_SECONDS, log.read_text()[-4000:]
            time.sleep(0.5)

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False

    def post(self, path, body):
        """(status, text) of a request's answer."""
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def complete(self, **body):
        status, text = self.post("/v1/completions", {"prompt": PROMPT, "return_token_ids": True, **body})
        assert status == 200, text
        if not body.get("stream"):
            return json.loads(text)
        pieces = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return [json.loads(piece) for piece in pieces if piece != "[DONE]"]

    def begin_and_leave(self, num_chunks, **body):
        """Ask for a streamed completion, and hang up after some of it: vLLM aborts such requests."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        text = json.dumps({"prompt": PROMPT, "stream": True, **body})
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        for _ in range(num_chunks):
            answer.readline()
        connection.close()

    def metric(self, name, engine=""):
        """The sum of a metric over the engines, or that of one."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return sum(
            float(value) for value in re.findall(rf'^vllm:{name}{{.*engine="{engine}.*}} ([\d.e+]+)$', text, re.M)
        )

    def stats(self):
        return self.command("stats")

    def command(self, *args):
        """What a command says."""
        status, text = self.post("/collective_rpc", {"method": "rollout_spec", "args": args})
        assert status == 200, text
        return json.loads(text)["results"][0]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)
