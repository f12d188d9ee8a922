"""Rollouts that would be copies of each other are told once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rollout_spec.integrations.vllm import copies
from rollout_spec.integrations.vllm.copies import SeedWatch, warn_of_copies


class OutputProcessor:
    """vLLM's, as far as it keeps track of the live requests."""

    def __init__(self):
        self.request_states = {}

    def add_request(self, request, prompt=None):
        self.request_states[request.request_id] = prompt
        return prompt


def a_request(req_id, seed, prompt=(1, 2), temperature=1.0, adapter=None, images=(), **limits):
    return SimpleNamespace(
        request_id=req_id,
        prompt_token_ids=None if prompt is None else list(prompt),
        sampling_params=SimpleNamespace(
            seed=seed, temperature=temperature, **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, **limits}
        ),
        lora_request=None if adapter is None else SimpleNamespace(lora_name=adapter),
        mm_features=[SimpleNamespace(identifier=image) for image in images],
    )


@pytest.fixture
def processor():
    processor = OutputProcessor()
    warn_of_copies(processor)
    return processor


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records]


def test_equal_prompt_and_seed_are_told_once(processor, caplog):
    for req_id in ("a", "b", "c", "d"):
        assert processor.add_request(a_request(req_id, 7), "text") == "text"
    assert list(processor.request_states) == ["a", "b", "c", "d"]
    [message] = warnings_of(caplog)
    assert "requests a and b have the same prompt and the same seed, 7" in message


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 8},
        {"prompt": (1, 3)},
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"seed": None},
        {"adapter": "second"},
        {"images": ("cat",)},
        {"prompt": None},
    ],
    ids=str,
)
def test_other_requests_are_no_copies(processor, caplog, other):
    processor.add_request(a_request("a", 7))
    processor.add_request(a_request("b", **{"seed": 7, **other}))
    assert not warnings_of(caplog)


def test_a_request_that_has_ended_is_no_copy(processor, caplog):
    processor.add_request(a_request("a", 7))
    del processor.request_states["a"]
    processor.add_request(a_request("b", 7))
    assert not warnings_of(caplog)
    processor.add_request(a_request("b", 7))  # a streaming session goes on
    assert not warnings_of(caplog)
    processor.add_request(a_request("c", 7))
    assert len(warnings_of(caplog)) == 1


def test_ended_requests_are_forgotten_and_live_ones_are_not(monkeypatch):
    """A front end asks before the request is live."""
    monkeypatch.setattr(copies, "SLACK", 4)
    live = set()
    watch = SeedWatch(live)
    for i in range(100):
        assert watch.find_copy(a_request(str(i), i)) is None
        live.add(str(i))
        if i != 2:
            live.discard(str(i - 2))  # the first one stays
        assert len(watch.seen) <= 4 + 2 * 4
        assert live <= set(watch.seen.values())
    assert watch.find_copy(a_request("again", 0)) == "0"
    assert watch.find_copy(a_request("again", 99)) == "99"


@pytest.mark.engine
@pytest.mark.parametrize("speculation", [True, False])
def test_an_engine_tells_it(tiny_model, caplog, speculation):
    """With several samples per request vLLM itself counts the seed up."""
    pytest.importorskip("vllm")
    from vllm import SamplingParams

    from rollout_spec import engine_kwargs
    from tests.integrations.engines import build, generate

    llm = build(tiny_model, **engine_kwargs(speculation=speculation))
    generate(llm, [SamplingParams(n=4, seed=7, max_tokens=5), SamplingParams(max_tokens=5)], [[1, 4], [1, 4]])
    assert not [message for message in warnings_of(caplog) if "copy" in message]
    first, second = generate(llm, [SamplingParams(seed=7, max_tokens=5)] * 2, [[1, 4], [1, 4]])
    assert first.token_ids == second.token_ids
    assert sum("one rollout is a copy of the other" in message for message in warnings_of(caplog)) == 1
