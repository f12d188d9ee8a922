"""What a step tells the host in one copy."""

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm.v1.outputs import ModelRunnerOutput

from rollout_spec.integrations.vllm import hooks
from rollout_spec.integrations.vllm.outputs import StepBuffers
from rollout_spec.integrations.vllm.sub_steps import COUNTS
from rollout_spec.stats import SpeculationStats

WIDTH, REQ_IDS = 3, ["a", "b", "c"]
EMPTY = torch.zeros(0, dtype=torch.int32)


def a_step(buffer, rows=(3, 1, 1)):
    """As the verifier's kernel writes it, of three requests; the last one reads its prompt."""
    buffer.begin(REQ_IDS, WIDTH, 1)
    of_pass(buffer.passes[0], (2, 1, 0), rows)


def of_pass(part, sampled, rows, broken=(0, 0, 0), first=0):
    step = part.output(EMPTY, EMPTY, EMPTY)
    step.output[: 3 * WIDTH] = first + torch.arange(3 * WIDTH)
    for tensor, values in ((step.num_sampled, sampled), (step.num_rows, rows), (step.num_broken, broken)):
        tensor[:3] = torch.tensor(values)
    for tensor in (step.targets, step.logprobs, step.ranks):
        tensor[:5] = first + torch.arange(5)


def one_pass():
    """What vLLM has made of the first pass."""
    return ModelRunnerOutput(req_ids=REQ_IDS, req_id_to_index={}, sampled_token_ids=[[0, 1], [3], []])


@pytest.fixture
def stats():
    return SpeculationStats()


@pytest.fixture
def buffers(stats):
    return StepBuffers(4, WIDTH, 3, torch.device("cpu"), 2, stats)


def test_the_whole_step_is_copied_once_and_then_counted_once(buffers, stats):
    buffer = buffers.next()
    a_step(buffer)
    tokens, counts = buffer.passes[0].sampled(3)
    logprobs = buffer.passes[0].logprobs(3, 5)
    buffer.count(stats)
    assert stats.steps == 0, "nothing has been copied"
    on_host = hooks.copy_to_host_v2(None, tokens)
    buffer.passes[0].on_device["num_sampled"].zero_()  # the next steps may write there
    assert on_host.tolist() == torch.arange(9).view(3, 3).tolist()
    assert hooks.copy_to_host_v2(None, counts).tolist() == [2, 1, 0]
    lists = logprobs.to_cpu_nonblocking().tolists()
    buffer.count(stats)
    buffer.count(stats)
    assert (stats.steps, stats.request_steps, stats.draft_tokens, stats.accepted_tokens) == (1, 2, 2, 1)
    a_step(buffer, rows=(1, 1, 1))
    hooks.copy_to_host_v2(None, buffer.passes[0].sampled(3)[0])
    assert lists.logprob_token_ids.tolist() == [[0], [1], [2], [3], [4]], "a copy of its own"
    assert lists.cu_num_generated_tokens == [0, 3, 4, 5]
    assert buffer.passes[0].logprobs(3, 3).to_cpu_nonblocking().tolists().cu_num_generated_tokens is None


@pytest.mark.parametrize("num_passes", [1, 2])
def test_broken_logits_are_an_error_for_whoever_asks(buffers, stats, num_passes):
    """In the last pass. Also for vLLM, which reads the step after a command has been told."""
    buffer, other = buffers.next(), buffers.next()
    a_step(other)
    a_step(buffer)
    buffer.begin(REQ_IDS, WIDTH, num_passes)
    of_pass(buffer.passes[num_passes - 1], (1, 1, 1), (1, 1, 1), broken=(0, 1, 0))
    buffer.copy(is_complete=True)
    buffers.read(other, one_pass())
    for ask in (buffers.finish_counting, lambda: buffers.read(buffer, one_pass())):
        with pytest.raises(FloatingPointError, match="request b"):
            ask()
    assert stats.steps == 0


def test_an_output_is_read_before_its_buffer_is_used_again(buffers):
    """By vLLM, in the one process of an engine in which it reads any. What it failed to read is not waited for."""
    *_, first, _ = (buffers.next() for _ in range(6))
    buffers.read(first, None)
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
    buffers.read(buffer, one_pass())
    buffers.finish_counting()
    buffers.read(buffer, one_pass())
    assert stats.steps == 2


def test_the_passes_of_a_step_are_read_as_one(buffers, stats):
    """Each request's tokens and their log-probabilities, pass by pass; each pass counts as a step."""
    buffer = buffers.next()
    buffer.begin(REQ_IDS, WIDTH, 3)
    sampled, rows = [(2, 1, 1), (1, 3, 1), (3, 1, 2)], [(2, 2, 1), (1, 3, 1), (3, 1, 2)]
    for number, part in enumerate(buffer.passes):
        of_pass(part, sampled[number], rows[number], first=100 * number)
        for tensor in (part.on_device["targets"], part.on_device["logprobs"], part.on_device["ranks"]):
            tensor[:6] = 100 * number + torch.arange(6)
        part.scores = part.logprobs(3, sum(rows[number]))
    on_host = hooks.copy_to_host_v2(None, buffer.passes[0].sampled(3)[0])
    first = buffer.passes[0].scores.to_cpu_nonblocking()
    assert not on_host.any(), "the others are not there yet"
    buffer.copy(is_complete=True)
    result = one_pass()
    result.logprobs = first.tolists()
    buffers.read(buffer, result)
    # Row r of a pass has tokens 3 r, 3 r + 1, ...
    assert result.sampled_token_ids == [[0, 1, 100, 200, 201, 202], [3, 103, 104, 105, 203], [6, 106, 206, 207]]
    assert getattr(result, COUNTS).tolist() == [list(of) for of in sampled]
    assert result.logprobs.cu_num_generated_tokens == [0, 6, 11, 15]
    expected = [0, 1, 100, 200, 201, 202, 2, 101, 102, 103, 203, 4, 104, 204, 205]
    for column in (result.logprobs.logprob_token_ids[:, 0], result.logprobs.logprobs[:, 0]):
        assert column.tolist() == expected
    assert result.logprobs.sampled_token_ranks.tolist() == expected
    assert (stats.steps, stats.request_steps, stats.accepted_tokens) == (3, 9, 6)
