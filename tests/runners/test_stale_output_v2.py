"""Requests that are preempted while a step of theirs is on its way: vLLM's own scheduler, with a made-up worker."""

import random

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from rollout_spec.integrations.vllm.config import PASSES
from tests.integrations.engines import DEVICE, verify_all

LENGTH, BLOCK, WINDOW = 60, 16, 32
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)


def make_scheduler(model, num_blocks, layer=FULL):
    config = EngineArgs(
        model=str(model), dtype="float32", enforce_eager=True, max_num_seqs=8, max_num_batched_tokens=64,
        block_size=BLOCK, enable_prefix_caching=False, **verify_all(num_speculative_tokens=3, **DEVICE),
    ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = num_blocks
    object.__setattr__(config.speculative_config, PASSES, (1, None))  # as the engine's core does
    cache = KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)])
    structured = StructuredOutputManager(config)
    scheduler = AsyncScheduler(config, cache, structured, block_size=BLOCK, hash_block_size=BLOCK, log_stats=False)
    assert config.scheduler_config.async_scheduling
    return scheduler


class Worker:
    """Samples 1000 + p at position p, and accepts as many drafts as chance wants."""

    def __init__(self, rng):
        self._rng = rng
        self._texts = {}  # length of each request's text, and how much of it is computed

    def run(self, scheduled):
        for req_id in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
            self._texts.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            self._texts[new.req_id] = [len(new.prefill_token_ids), new.num_computed_tokens]
        req_ids, sampled = list(scheduled.num_scheduled_tokens), []
        for req_id, count in scheduled.num_scheduled_tokens.items():
            num_drafts, text = len(scheduled.scheduled_spec_decode_tokens.get(req_id, ())), self._texts[req_id]
            known = text[1] + count - num_drafts
            assert known <= text[0], "the scheduler takes the text to be longer"
            text[1] = known
            sampled.append([])
            if known == text[0]:
                accepted = self._rng.randint(0, num_drafts)
                sampled[-1] = [1000 + text[0] + i for i in range(accepted + 1)]
                text[0], text[1] = text[0] + accepted + 1, text[0] + accepted
        indices = {req_id: i for i, req_id in enumerate(req_ids)}
        return ModelRunnerOutput(req_ids, indices, sampled_token_ids=sampled, prompt_logprobs_dict={}, pooler_output=[])


def live(scheduler, seed, *, resets):
    """Six requests, with two steps on their way as in vLLM's engine.

    Returns:
        (how many rollouts are not what the worker has said, how often a request was preempted).
    """
    rng = random.Random(seed)
    worker, on_their_way, requests = Worker(rng), [], []
    for i in range(6):
        params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
        requests.append(Request(f"{seed}-{i}", [5] * rng.randint(3, 40), params, None))
        scheduler.add_request(requests[-1])
    while scheduler.has_requests() or on_their_way:
        if resets and rng.random() < 0.1 and scheduler.running:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        if scheduler.has_requests():
            scheduled = scheduler.schedule()
            on_their_way.append((scheduled, worker.run(scheduled)))
            if len(on_their_way) < 2 and scheduled.total_num_scheduled_tokens:
                continue
        scheduler.update_from_output(*on_their_way.pop(0))
    expected = [[1000 + request.num_prompt_tokens + i for i in range(LENGTH)] for request in requests]
    num_wrong = sum(list(request.output_token_ids) != text for request, text in zip(requests, expected, strict=True))
    return num_wrong, sum(request.num_preemptions for request in requests)


@pytest.mark.parametrize(("num_blocks", "resets"), [(14, False), (200, True)], ids=["full cache", "resets"])
def test_no_token_is_lost(tiny_model, num_blocks, resets):
    scheduler = make_scheduler(tiny_model, num_blocks)
    lives = [live(scheduler, seed, resets=resets) for seed in range(8)]
    num_wrong, num_preemptions = map(sum, zip(*lives, strict=True))
    assert num_wrong == 0
    assert num_preemptions > 8


def test_a_window_keeps_the_blocks_that_it_reads(tiny_model, monkeypatch):
    """Drafts on their way may be rejected: then the next step's window begins earlier."""
    scheduler = make_scheduler(tiny_model, 400, SlidingWindowSpec(sliding_window=WINDOW, **SHAPE))
    (group,), run, num_read = scheduler.kv_cache_manager.coordinator.single_type_managers, Worker.run, []

    def run_and_look(worker, scheduled):
        for req_id in scheduled.scheduled_cached_reqs.req_ids:
            known = worker._texts[req_id][1]
            blocks = group.req_to_blocks[req_id][max(0, known - WINDOW + 1) // BLOCK : known // BLOCK]
            assert not any(block.is_null for block in blocks), "given away"
            num_read.append(len(blocks))
        return run(worker, scheduled)

    monkeypatch.setattr(Worker, "run", run_and_look)
    for seed in range(4):
        assert live(scheduler, seed, resets=False)[0] == 0
    assert max(num_read) >= WINDOW // BLOCK
