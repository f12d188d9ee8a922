"""TRL trainers that generate on a vLLM server: the callback makes sure that it speculates, and brings its metrics."""

from __future__ import annotations

import json
import shlex
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from rollout_spec import RolloutSpecConfig, RolloutSpecGenerator
from rollout_spec.doctor import explain, read_report
from rollout_spec.integrations.trainers import trl
from rollout_spec.integrations.trainers.controller import EngineController
from rollout_spec.integrations.vllm import environment
from rollout_spec.stats import SpeculationStats
from tests.conftest import free_port
from tests.integrations.engines import own_processes
from tests.integrations.server import Server
from tests.integrations.trainers import make_trainer, reward_short

pytestmark = pytest.mark.engine

OPTIONS = {"num_speculative_tokens": 4, "budget": False, "drafter_options": {"min_survival": 0.0}}


@contextmanager
def answering(answer):
    """The URL of a server that answers each request by `answer(handler, body)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer(self, None)

        def do_POST(self):
            answer(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

        def log_message(self, *_):
            pass

        def send(self, status, text):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class Comparing:
    """Stands between a trainer and a server, and asks for each completion again without drafts.

    Attributes:
        compared: The number of completions that were the same.
        lock: Held while one is compared.
        errors: What went wrong while completions were compared.
        options: What each request said to us.
        different: (request, answer, answer without drafts) of the others.
    """

    def __init__(self, server):
        self.compared, self.different, self.errors, self.options = 0, [], [], []
        self.lock = threading.Lock()
        self._server, self._seed = server, 10**6

    def __call__(self, handler, body):
        if handler.path != "/v1/completions":
            return handler.send(*self._forward(handler.path, body))
        request = json.loads(body)
        self.options.append(request.get("vllm_xargs"))
        with self.lock:  # one at a time: drafting is switched off for all
            self._seed += 1000
            request.setdefault("seed", self._seed)
            status, text = self._forward(handler.path, json.dumps(request).encode())
            self._switch(False)
            _, plain = self._forward(handler.path, json.dumps(request).encode())
            self._switch(True)
        if status != 200:
            self.errors.append(text)
            return handler.send(status, text)
        for ours, theirs in zip(json.loads(text)["choices"], json.loads(plain)["choices"], strict=True):
            if ours["token_ids"] == theirs["token_ids"]:
                self.compared += 1
            else:
                self.different.append((request, ours["token_ids"], theirs["token_ids"]))
        return handler.send(status, text)

    def _switch(self, enabled):
        status, text = self._server.post(
            "/collective_rpc", {"method": "rollout_spec", "args": ["set_enabled", enabled]}
        )
        if status != 200:
            self.errors.append(text)

    def _forward(self, path, body):
        request = urllib.request.Request(self._server.url + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    server = Server(tiny_model, tmp_path_factory.mktemp("trl-server") / "log", **OPTIONS)
    yield server
    server.stop()


def load(server, path, named_parameters):
    """New weights for a server on a CPU, where it has no NCCL: by a file."""
    path.mkdir(exist_ok=True)
    save_file(
        {name: value.detach().clone().contiguous() for name, value in named_parameters}, path / "model.safetensors"
    )
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
    status, text = server.post("/collective_rpc", body)
    assert status == 200, text


@pytest.mark.exhaustive
@own_processes
def test_grpo(server, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda *_, **__: None)
    monkeypatch.setattr(
        VLLMClient, "update_named_params", lambda _, __, named: load(server, tmp_path / "weights", named)
    )
    comparing, generator = Comparing(server), RolloutSpecGenerator(num_speculative_tokens=4)
    with answering(comparing) as url:
        trainer = make_trainer(
            tiny_model, tmp_path, [generator], vllm_mode="server", vllm_server_base_url=url,
            vllm_gpu_memory_utilization=None, vllm_max_model_length=None,
        )  # fmt: skip
        before = generator.stats()
        trainer.train()
        stats, num_requests = generator.stats(), len(comparing.options)
        metrics = trainer.evaluate(Dataset.from_dict({"prompt": ["w7 w8"]}))
    assert (comparing.compared, comparing.different, comparing.errors) == (24 + 4, [], [])
    assert comparing.options == [None] * num_requests + [{"rollout_spec_keep_in_history": False}]
    assert metrics["eval_rollout_spec/tokens"] > 0
    logs = [entry for entry in trainer.state.log_history if "rollout_spec/tokens" in entry]
    assert len(logs) == 3
    versions = [entry["rollout_spec/policy_version"] - before["policy_version"] for entry in logs]
    assert versions == [0, 1, 2], "the server has the first weights already"
    accepted = sum(entry["rollout_spec/accepted_tokens"] for entry in logs)
    assert accepted == stats["accepted_tokens"] - before["accepted_tokens"] > 0
    report = read_report(tmp_path / "rollout_spec.json")
    assert "Where the time of a step goes" in explain(report)


class Weights:
    """AsyncGRPO's way to send weights, which on a GPU is NCCL. Requests in flight are kept, as there."""

    def __init__(self, server, comparing, path):
        self._server, self._comparing, self._path = server, comparing, path

    def init_weight_transfer(self):
        pass

    def pause(self):
        self._comparing.lock.acquire()  # both completions that are compared are of the same weights
        self._server.post("/pause?mode=keep", {})

    def send_weights(self, named_parameters):
        load(self._server, self._path, named_parameters)

    def resume(self):
        self._server.post("/resume", {})
        self._comparing.lock.release()

    def destroy(self):
        pass


class TorchAttention:
    """What AsyncGRPO's forward pass asks of FlashAttention, which runs on GPUs only."""

    @staticmethod
    def flash_attn_varlen_func(query, key, value, cu_queries, cu_keys, *_, softmax_scale, **__):
        cu_queries, cu_keys, groups = cu_queries.long(), cu_keys.long(), query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        pieces = []
        for q, k, v in zip(
            query.tensor_split(cu_queries[1:-1]), key.tensor_split(cu_keys[1:-1]), value.tensor_split(cu_keys[1:-1]),
            strict=True,
        ):  # fmt: skip
            scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
            future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - len(q) + 1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            pieces.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(pieces)


@pytest.mark.exhaustive
@own_processes
def test_async_grpo(server, tiny_model, tmp_path, monkeypatch):
    """Its rollouts come from a process of their own, while the trainer trains."""
    peak = "trl.experimental.async_grpo.async_grpo_trainer.get_peak_flops_per_device"
    monkeypatch.setattr(peak, lambda *_: 1e12)  # it asks CUDA
    monkeypatch.setattr("trl.experimental.async_grpo.packing._flash_attn", lambda: TorchAttention)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    content = {"close_pattern": "<eos>", "content": "text"}
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": content}}
    comparing, generator = Comparing(server), RolloutSpecGenerator()
    with answering(comparing) as url:
        trainer = AsyncGRPOTrainer(
            model=str(tiny_model),
            reward_funcs=reward_short,
            args=AsyncGRPOConfig(
                output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=3, per_device_train_batch_size=4,
                num_generations=4, max_completion_length=24, max_inflight_tasks=4, vllm_server_base_url=url,
                learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
                model_init_kwargs={"dtype": "float32"},
            ),
            train_dataset=Dataset.from_dict(
                {"prompt": [[{"role": "user", "content": f"w{i} w{i + 1}"}] for i in range(8)]}
            ),
            processing_class=tokenizer,
            callbacks=[generator],
            weight_transfer=Weights(server, comparing, tmp_path / "weights"),
        )  # fmt: skip
        before = generator.stats()
        trainer.train()
        stats = generator.stats()
    assert comparing.different == comparing.errors == []
    assert comparing.compared >= 12
    logs = [entry for entry in trainer.state.log_history if "rollout_spec/tokens" in entry]
    assert logs
    assert sum(entry["rollout_spec/accepted_tokens"] for entry in logs) > 0
    assert stats["policy_version"] - before["policy_version"] >= 3
    assert read_report(tmp_path / "rollout_spec.json")["num_speculative_tokens"] == 4


# -- what must not pass silently -------------------------------------------------------------------------------------


def connect(url, tiny_model, tmp_path, timeout=10, **options):
    make_trainer(
        tiny_model, tmp_path, [RolloutSpecGenerator(**options)], vllm_mode="server", vllm_server_base_url=url,
        vllm_server_timeout=timeout, vllm_gpu_memory_utilization=None, vllm_max_model_length=None,
    )  # fmt: skip


def check_command(message, tiny_model, url, **options):
    """The message ends with a command that starts such a server."""
    mode, variable, *words = shlex.split(message.splitlines()[-1])
    assert (mode, words) == (
        "VLLM_SERVER_DEV_MODE=1",
        ["vllm", "serve", str(tiny_model), "--port", url.rpartition(":")[2]],
    )
    name, _, text = variable.partition("=")
    assert json.loads(text) == options, "what is as usual is left out"
    assert environment.read({name: text}).config == RolloutSpecConfig(**options)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({}, "runs without VLLM_SERVER_DEV_MODE=1"),
        (
            {"/collective_rpc": (500, {"error": {"message": "this engine runs without rollout_spec"}})},
            "runs without rollout_spec",
        ),
    ],
)
def test_a_server_without_speculation(tiny_model, tmp_path, answers, message):
    def answer(handler, _):
        status, body = {"/health": (200, {}), **answers}.get(handler.path, (404, {}))
        handler.send(status, json.dumps(body).encode())

    with answering(answer) as url, pytest.raises(RuntimeError, match=message) as raised:
        connect(url, tiny_model, tmp_path, num_speculative_tokens=6)
    check_command(str(raised.value), tiny_model, url, num_speculative_tokens=6)


def test_a_server_is_told_of_evaluations_alone(monkeypatch):
    asked = []

    def generate(generation, prompts, images=None):
        asked.append(generation.generation_kwargs)

    monkeypatch.setattr(VLLMGeneration, "generate", generate)
    trl._hook_server_requests()
    model = SimpleNamespace(training=True)
    generation = SimpleNamespace(mode="server", model=model, generation_kwargs={"min_tokens": 1})
    for model.training in (True, False, True):
        VLLMGeneration.generate(generation, ["w1"])
    told = {"min_tokens": 1, "vllm_xargs": {"rollout_spec_keep_in_history": False}}
    assert asked == [{"min_tokens": 1}, told, {"min_tokens": 1}]


def test_a_server_with_other_settings(tiny_model, tmp_path):
    def answer(handler, _):
        served = RolloutSpecConfig(num_speculative_tokens=4, drafter="suffix").to_dict()
        handler.send(200, json.dumps({"results": [served]}).encode())

    with (
        answering(answer) as url,
        pytest.raises(RuntimeError, match="started with num_speculative_tokens=4 and not 6") as raised,
    ):
        connect(url, tiny_model, tmp_path, num_speculative_tokens=6, drafter="suffix")
    check_command(str(raised.value), tiny_model, url, num_speculative_tokens=6, drafter="suffix")


def test_no_server(tiny_model, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TimeoutError, match=f"no vLLM server has answered at {url} for 1 s") as raised:
        connect(url, tiny_model, tmp_path, timeout=1)
    check_command(str(raised.value), tiny_model, url)


def test_an_engine_that_nobody_builds_takes_no_arguments(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="give them to the server"):
        connect("http://127.0.0.1:1", tiny_model, tmp_path, llm_kwargs={"dtype": "float32"})


def test_a_drafter_that_has_raised(tiny_model, tmp_path):
    """It cannot be switched on again."""

    def answer(handler, body):
        stats = {**SpeculationStats(drafter_errors=1).to_dict(), "drafter_bytes": 0}
        results = {"config": RolloutSpecConfig().to_dict(), "stats": stats}
        name = json.loads(body)["args"][0] if body else ""
        handler.send(200, json.dumps({"results": [results.get(name)]}).encode())

    with answering(answer) as url, pytest.raises(RuntimeError, match="has raised, and stays off") as raised:
        connect(url, tiny_model, tmp_path)
    check_command(str(raised.value), tiny_model, url)


@pytest.mark.parametrize("status", [500, 503, None])
def test_a_server_that_goes_away_costs_one_warning(tmp_path, caplog, status):
    """And the metrics. TRL's own requests decide whether the run goes on."""
    controller, later = EngineController(RolloutSpecConfig()), []

    def answer(handler, body):
        if later:
            handler.send(status, b"busy")
            return
        name = json.loads(body)["args"][0] if body else ""
        stats = {**SpeculationStats().to_dict(), "drafter_bytes": 0, "live_requests": 0, "policy_version": 0}
        results = {"config": RolloutSpecConfig().to_dict(), "stats": stats}
        handler.send(200, json.dumps({"results": [results.get(name)]}).encode())

    with answering(answer) as url:
        controller.connect(url, model="m", timeout=10)
        assert controller.take_metrics() == {}, "nothing was generated"
        if status is not None:
            later.append(True)
            assert controller.take_metrics() == {}
    for _ in range(2):
        assert controller.take_metrics() == {}
    controller.write_report(tmp_path / "report.json")
    said = [record.getMessage() for record in caplog.records]
    assert sum("the vLLM server does not answer" in message for message in said) == 1
    assert sum("could not be written" in message for message in said) == 1
    assert not (tmp_path / "report.json").exists()
