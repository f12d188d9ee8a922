"""A server with speculation: the engine in a process of its own, requests over HTTP, streamed and not."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from rollout_spec import engine_kwargs
from tests.conftest import GPU_STAND_IN, wait_until
from tests.integrations.engines import RESIDENT, build, every_draft, generate, mixed_params, own_processes
from tests.integrations.server import PROMPT, Server
from tests.integrations.vllm.test_compat import stopping_params

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, own_processes]


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    options = {"budget": False, **every_draft(6)}
    server = Server(tiny_model, tmp_path_factory.mktemp("server") / "log", **options)
    yield server
    server.stop()


def as_body(params):
    names = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop"]
    return {name: getattr(params, name) for name in [*names, "include_stop_str_in_output"]} | {"logprobs": 0}


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
    status, text = server.post("/v1/completions", {"prompt": PROMPT, "vllm_xargs": {"rollout_spec_problemid": 7}})
    assert status == 400, text
    assert "unknown key" in text
    before = server.stats()["draft_tokens"]
    for _ in range(2):
        server.complete(max_tokens=40, ignore_eos=True, seed=3, vllm_xargs={"rollout_spec_problem_id": 7})
    stats = server.stats()
    assert stats["draft_tokens"] > before
    assert stats["drafter_errors"] == 0


def test_vllms_own_metrics_are_right(server):
    """What its dashboards show. Nothing is aborted here: vLLM does not count those requests' last step."""
    names = {
        "spec_decode_num_draft_tokens_total": "draft_tokens",
        "spec_decode_num_accepted_tokens_total": "accepted_tokens",
        "generation_tokens_total": None,
    }
    before, ours_before = {name: server.metric(name) for name in names}, server.stats()
    params = mixed_params(12, 7, max_tokens=60, ignore_eos=True)
    for p in params:
        server.complete(**as_body(p), ignore_eos=True)
    ours = server.stats()
    for name, counter in names.items():
        expected = 12 * 60 if counter is None else ours[counter] - ours_before[counter]
        wait_until(lambda name=name, expected=expected: server.metric(name) - before[name] == expected)
        assert expected > 0


def test_twenty_clients_some_of_which_hang_up(server, tiny_model):
    """Every completion is the one without speculation, and of those who left nothing stays."""
    params = mixed_params(120, 8, max_tokens=50, ignore_eos=True)
    prompts = [[1, 4 + i % 5, 9] for i in range(120)]
    plain = generate(build(tiny_model, **engine_kwargs(speculation=False)), params, prompts)
    chance, before = random.Random(1), server.stats()
    leaving = [chance.randint(0, 20) if chance.random() < 0.4 else None for _ in params]

    def ask(number):
        body = {**as_body(params[number]), "prompt": prompts[number], "ignore_eos": True}
        if leaving[number] is not None:
            server.begin_and_leave(leaving[number], **body)
        return server.complete(**body)["choices"][0]

    with ThreadPoolExecutor(20) as clients:
        choices = list(clients.map(ask, range(120)))
    assert [choice["token_ids"] for choice in choices] == [list(output.token_ids) for output in plain]
    for choice, output in zip(choices, plain, strict=True):
        expected = [logprobs[token].logprob for token, logprobs in zip(output.token_ids, output.logprobs, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    server.begin_and_leave(1, max_tokens=110, ignore_eos=True)
    wait_until(lambda: server.stats()["live_requests"] == 0)
    stats = server.stats()
    assert stats["accepted_tokens"] > before["accepted_tokens"]
    assert stats["drafter_errors"] == 0


def sampled(server, seed):
    """Tokens of a completion; None: the request has no seed."""
    body = {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0} | ({} if seed is None else {"seed": seed})
    return tuple(server.complete(**body)["choices"][0]["token_ids"])


def test_two_engines_draft_and_only_seeds_make_copies(tiny_model, tmp_path):
    """Each has a history of its own. Requests without seeds get seeds of their own, also for the same prompt."""
    options = {"budget": False, **every_draft(4)}
    server = Server(tiny_model, tmp_path / "log", **options, arguments={"data-parallel-size": 2})
    try:
        with ThreadPoolExecutor(8) as clients:
            assert len(set(clients.map(partial(sampled, server), [None] * 48))) == 48
            assert len(set(clients.map(partial(sampled, server), [7] * 16))) == 1
        assert min(server.metric("spec_decode_num_accepted_tokens_total", engine) for engine in (0, 1)) > 20
    finally:
        server.stop()


def test_two_engines_in_v2_draft_equally_many_tokens(tiny_model, tmp_path):
    """In every step, as engines of a mixture of experts wait for each other; kernels are emulated."""
    server = Server(
        tiny_model,
        tmp_path / "log",
        arguments={"data-parallel-size": 2, "max-num-seqs": 64},
        environment={"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": GPU_STAND_IN},
        **RESIDENT,
    )
    try:
        with ThreadPoolExecutor(8) as clients:
            assert len(set(clients.map(partial(sampled, server), [7] * 16))) == 1
        for engine in (0, 1):
            drafts = server.metric("spec_decode_num_drafts_total", engine)
            assert server.metric("spec_decode_num_draft_tokens_total", engine) == 3 * drafts > 0
            assert server.metric("spec_decode_num_accepted_tokens_total", engine) > 0
    finally:
        server.stop()
    assert (tmp_path / "log").read_text().count("3 draft tokens for every request, as data-parallel engines") == 1
