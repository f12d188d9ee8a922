"""TRL trainers that generate on a vLLM server: the callback makes sure that it speculates, and brings its metrics."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

from datasets import Dataset
from safetensors.torch import save_file
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.generation.vllm_client import VLLMClient

from rollout_spec import RolloutSpecGenerator
from rollout_spec.integrations.trainers.server import ServerCounters
from rollout_spec.integrations.trainers.trl import _server_url
from tests.conftest import free_port
from tests.integrations.engines import every_draft, own_processes
from tests.integrations.server import Server
from tests.integrations.trainers import make_trainer

pytestmark = pytest.mark.engine

OPTIONS = {"budget": False, **every_draft(4)}


@pytest.fixture
def answers(monkeypatch):
    """The pages that a server shows, one for each request and the last one again; an exception: it does not answer."""
    pages = []

    def get(url, timeout):
        page = pages.pop(0) if len(pages) > 1 else pages[0]
        if isinstance(page, Exception):
            raise page
        return SimpleNamespace(text=page)

    monkeypatch.setattr("rollout_spec.integrations.trainers.server.requests.get", get)
    return pages


def load(server, path, named_parameters):
    """New weights for a server on a CPU, where it has no NCCL: by a file."""
    path.mkdir(exist_ok=True)
    save_file(
        {name: value.detach().clone().contiguous() for name, value in named_parameters}, path / "model.safetensors"
    )
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
    status, text = server.post("/collective_rpc", body)
    assert status == 200, text


@own_processes
@pytest.mark.exhaustive
def test_grpo(tiny_model, tmp_path, monkeypatch):
    server = Server(tiny_model, tmp_path / "log", **OPTIONS)
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda *_, **__: None)
    monkeypatch.setattr(
        VLLMClient, "update_named_params", lambda _, __, named: load(server, tmp_path / "weights", named)
    )
    trainer = make_trainer(
        tiny_model, tmp_path, [RolloutSpecGenerator()], vllm_mode="server", vllm_server_base_url=server.url,
        vllm_gpu_memory_utilization=None, vllm_max_model_length=None,
    )  # fmt: skip
    try:
        trainer.train()
        metrics = trainer.evaluate(Dataset.from_dict({"prompt": ["w7 w8"]}))
    finally:
        server.stop()
    assert metrics["eval_rollout_spec/tokens"] > 0
    logs = [entry for entry in trainer.state.log_history if "rollout_spec/tokens" in entry]
    assert len(logs) == 3
    assert sum(entry["rollout_spec/accepted_tokens"] for entry in logs) > 0
    assert max(entry["rollout_spec/tokens_per_step"] for entry in logs) > 1


# -- what must not pass silently -------------------------------------------------------------------------------------

COUNTERS = """# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} %d.0
vllm:generation_tokens_total{engine="1",model_name="m"} 10.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 7.0
"""


@pytest.mark.parametrize("page", ["{}", 'vllm:generation_tokens_total{engine="0"} 1.0\n'])
def test_a_server_without_speculation(answers, page):
    answers.append(page)
    with pytest.raises(RuntimeError, match="does not speculate.*ROLLOUT_SPEC='{}' vllm serve"):
        ServerCounters("http://there", 10)


def test_no_server():
    with pytest.raises(OSError, match="refused"):
        ServerCounters(f"http://127.0.0.1:{free_port()}", 0)


def test_metrics_are_new_counts_and_a_server_that_goes_away_costs_one_warning(answers, caplog):
    """TRL's own requests decide whether the run goes on."""
    counts = (100, 10, 20, 10), (100, 10, 20, 10), (400, 60, 220, 160), (400, 60, 220, 160), (5, 1, 2, 1)
    answers += [COUNTERS % numbers for numbers in (*counts, (305, 51, 202, 151))]
    answers += ['vllm:generation_tokens_total{engine="0"} 999.0\n', ConnectionError("gone")]
    counters = ServerCounters("http://there", 10)
    assert counters.take_metrics() == {}, "nothing was generated"
    assert counters.take_metrics() == {
        "rollout_spec/tokens": 300,
        "rollout_spec/tokens_per_step": 2,
        "rollout_spec/mean_acceptance_length": 4,
        "rollout_spec/acceptance_rate": 0.75,
        "rollout_spec/draft_tokens": 200,
        "rollout_spec/accepted_tokens": 150,
    }
    assert counters.take_metrics() == {}
    assert counters.take_metrics() == {}, "it has started anew"
    assert counters.take_metrics()["rollout_spec/tokens"] == 300
    assert counters.take_metrics() == {}, "now without speculation"
    for _ in range(2):
        assert counters.take_metrics() == {}
    assert caplog.text.count("the vLLM server does not answer") == 1


@pytest.mark.parametrize(
    "ours", [{"num_speculative_tokens": 6}, {"llm_kwargs": {"dtype": "float32"}}, {"logprob_tolerance": 0.1}]
)
def test_an_engine_that_nobody_builds_takes_no_arguments(tiny_model, tmp_path, ours):
    with pytest.raises(ValueError, match="give options to the server"):
        make_trainer(tiny_model, tmp_path, [RolloutSpecGenerator(**ours)], vllm_mode="server")


def test_async_grpo_always_has_a_server(tmp_path):
    args = AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, vllm_server_base_url="http://there:8000")
    assert _server_url(args) == "http://there:8000"
