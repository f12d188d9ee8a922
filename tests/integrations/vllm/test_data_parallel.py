"""Two engines behind one server, each with a history of its own."""

from __future__ import annotations

import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm")

from tests.integrations.engines import every_draft, own_processes
from tests.integrations.server import PROMPT, Server

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, own_processes]


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    options = {"budget": False, **every_draft(4)}
    log = tmp_path_factory.mktemp("data-parallel") / "log"
    server = Server(tiny_model, log, **options, arguments={"data-parallel-size": 2})
    yield server
    server.stop()


def accepted_by_engine(server):
    """vLLM's own counters."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(r'^vllm:spec_decode_num_accepted_tokens_total\{engine="(\d)".*\} ([\d.e+]+)$', text, re.M)
    return {engine: float(value) for engine, value in found}


def test_both_engines_draft_and_no_rollout_is_a_copy(server):
    """Requests without seeds get seeds of their own, also where two engines serve the same prompt."""

    def complete(_):
        return tuple(server.complete(max_tokens=40, ignore_eos=True, temperature=1.0)["choices"][0]["token_ids"])

    with ThreadPoolExecutor(8) as clients:
        rollouts = list(clients.map(complete, range(48)))
    assert len(set(rollouts)) == 48
    accepted = accepted_by_engine(server)
    assert accepted.keys() == {"0", "1"}
    assert min(accepted.values()) > 20


def test_a_seed_means_the_same_in_both_engines(server):
    def complete(_):
        choice = server.complete(max_tokens=30, ignore_eos=True, temperature=1.0, seed=7, prompt=PROMPT)["choices"][0]
        return tuple(choice["token_ids"])

    with ThreadPoolExecutor(8) as clients:
        assert len(set(clients.map(complete, range(16)))) == 1
