"""What a step tells the host in one copy."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("vllm")

from rollout_spec.integrations.vllm import hooks
from rollout_spec.integrations.vllm.outputs import StepBuffers
from rollout_spec.stats import SpeculationStats

WIDTH, REQ_IDS = 3, ["a", "b", "c"]
EMPTY = torch.zeros(0, dtype=torch.int32)


def a_step(buffer, sampled=(2, 1, 0), rows=(3, 1, 1), broken=(0, 0, 0)):
    """As the verifier's kernel writes it, of three requests; the last one reads its prompt."""
    step = buffer.step(REQ_IDS, EMPTY, EMPTY, EMPTY)
    step.output[: 3 * WIDTH] = torch.arange(3 * WIDTH)
    for tensor, values in ((step.num_sampled, sampled), (step.num_rows, rows), (step.num_broken, broken)):
        tensor[:3] = torch.tensor(values)
    for tensor in (step.targets, step.logprobs, step.ranks):
        tensor[:5] = torch.arange(5)


@pytest.fixture
def stats():
    return SpeculationStats()


@pytest.fixture
def buffers(stats):
    return StepBuffers(4, WIDTH, torch.device("cpu"), 2, stats)


def test_the_whole_step_is_copied_once_and_then_counted_once(buffers, stats):
    buffer = buffers.next()
    a_step(buffer)
    tokens, counts = buffer.sampled(3, WIDTH)
    logprobs = buffer.logprobs(3, 5)
    buffer.count(stats)
    assert stats.steps == 0, "nothing has been copied"
    on_host = hooks.copy_to_host_v2(None, tokens)
    buffer.on_device["num_sampled"].zero_()  # the next steps may write there
    assert on_host.tolist() == torch.arange(9).view(3, 3).tolist()
    assert hooks.copy_to_host_v2(None, counts).tolist() == [2, 1, 0]
    lists = logprobs.to_cpu_nonblocking().tolists()
    buffer.count(stats)
    buffer.count(stats)
    assert (stats.steps, stats.request_steps, stats.draft_tokens, stats.accepted_tokens) == (1, 2, 2, 1)
    a_step(buffer, rows=(1, 1, 1))
    hooks.copy_to_host_v2(None, buffer.sampled(3, 1)[0])
    assert lists.logprob_token_ids.tolist() == [[0], [1], [2], [3], [4]], "a copy of its own"
    assert lists.cu_num_generated_tokens == [0, 3, 4, 5]
    assert buffer.logprobs(3, 3).to_cpu_nonblocking().tolists().cu_num_generated_tokens is None


def test_broken_logits_are_an_error_for_whoever_asks(buffers, stats):
    """Also for vLLM, which reads the step after a command has been told."""
    buffer, other = buffers.next(), buffers.next()
    a_step(other)
    a_step(buffer, broken=(0, 1, 0))
    buffer.copy()
    buffers.read(other)
    for ask in (buffers.finish_counting, lambda: buffers.read(buffer)):
        with pytest.raises(FloatingPointError, match="request b"):
            ask()
    assert stats.steps == 0


def test_an_output_is_read_before_its_buffer_is_used_again(buffers):
    """By vLLM, in the one process of an engine in which it reads any. What it failed to read is not waited for."""
    *_, first, _ = (buffers.next() for _ in range(6))
    buffers.read(first, is_sound=False)
    assert buffers.next() is first
    with pytest.raises(RuntimeError, match="vLLM has launched 3 steps before reading"):
        buffers.next()


def test_what_vllm_has_not_read_yet_is_counted_when_it_is_asked_for(buffers, stats):
    for _ in range(2):
        buffer = buffers.next()
        a_step(buffer)
        buffer.copy()
    buffers.finish_counting()
    assert stats.steps == 0, "where vLLM reads no outputs nothing is counted"
    buffers.read(buffer)
    buffers.finish_counting()
    buffers.read(buffer)
    assert stats.steps == 2
