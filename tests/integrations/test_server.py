"""A server with speculation: the engine in a process of its own, requests over HTTP, streamed and not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("vllm")

from rollout_spec import engine_kwargs
from tests.conftest import environment_for_a_process, free_port
from tests.integrations.engines import build, generate, own_processes
from tests.integrations.test_stop_strings import stopping_params

pytestmark = [pytest.mark.engine, own_processes]

PROMPT = [1, 4, 9]
START_SECONDS = 240


class Server:
    """A vLLM server on this machine. Vocabulary and weights are the tiny model's.

    Args:
        log: The file that gets what it prints.
        arguments: More of the server's, by name.
        **options: `engine_kwargs`.
    """

    def __init__(self, model, log, *, arguments=(), **options) -> None:
        self.port = free_port()
        given = {
            "model": model,
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "float32",
            "max-model-len": 128,
            "max-num-seqs": 32,
            "num-gpu-blocks-override": 300,
            "logprobs-mode": "processed_logprobs",
            "additional-config": json.dumps(options["additional_config"]),
            "speculative-config": json.dumps(options["speculative_config"]),
            **dict(arguments),
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        for name, value in given.items():
            command += [f"--{name}", str(value)]
        self._log = log
        self._process = subprocess.Popen(
            command,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment_for_a_process(VLLM_SERVER_DEV_MODE="1", VLLM_LOGGING_LEVEL="INFO"),
        )
        started = time.monotonic()
        while not self._is_up():
            assert self._process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() - started < START_SECONDS, log.read_text()[-4000:]
            time.sleep(0.5)

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except OSError:
            return False

    def post(self, path, body):
        """(status, text) of a request's answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
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

    def stats(self):
        status, text = self.post("/collective_rpc", {"method": "rollout_spec", "args": ["stats"]})
        assert status == 200, text
        return json.loads(text)["results"][0]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    options = engine_kwargs(num_speculative_tokens=6, budget=False, drafter_options={"min_survival": 0.0})
    server = Server(tiny_model, tmp_path_factory.mktemp("server") / "log", **options)
    yield server
    server.stop()


def as_body(params):
    return {
        "temperature": params.temperature,
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "stop": params.stop,
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "logprobs": 0,
    }


def test_stop_strings(server, tiny_model):
    """Ids, log-probabilities and counts end with the token that completes one, also in later repetitions."""
    params = stopping_params(12)
    expected = generate(build(tiny_model, **engine_kwargs(speculation=False)), params, [PROMPT] * 12)
    for _ in range(2):
        for p, plain in zip(params, expected, strict=True):
            answer = server.complete(**as_body(p))
            choice = answer["choices"][0]
            assert choice["token_ids"] == list(plain.token_ids)
            assert choice["text"] == plain.text
            assert choice["finish_reason"] == plain.finish_reason
            assert len(choice["logprobs"]["token_logprobs"]) == len(plain.token_ids)
            assert answer["usage"]["completion_tokens"] == len(plain.token_ids)
            pieces = server.complete(**as_body(p), stream=True, stream_options={"include_usage": True})
            choices = [piece["choices"][0] for piece in pieces if piece["choices"]]
            assert [token for c in choices for token in c["token_ids"] or ()] == list(plain.token_ids)
            assert "".join(c["text"] for c in choices) == plain.text
            assert pieces[-1]["usage"]["completion_tokens"] == len(plain.token_ids)
    assert server.stats()["accepted_tokens"] > 100


def test_a_bad_request_gets_the_error_and_nobody_else_notices(server):
    for extra, message in (
        ({"rollout_spec": "x"}, "must be a dict"),
        ({"rollout_spec_problem_id": "seven"}, "must be an integer"),
        ({"rollout_spec_problemid": 7}, "unknown key"),
    ):
        status, text = server.post("/v1/completions", {"prompt": PROMPT, "vllm_xargs": extra})
        assert status == 400, text
        assert message in text
    before = server.stats()["draft_tokens"]
    for _ in range(2):
        server.complete(max_tokens=40, ignore_eos=True, seed=3, vllm_xargs={"rollout_spec_problem_id": 7})
    stats = server.stats()
    assert stats["draft_tokens"] > before
    assert stats["drafter_errors"] == 0
