"""Lives of engines with vLLM's V2 model runner: with a drafter on the host, and with one on the device."""

from __future__ import annotations

import pytest

from rollout_spec import engine_kwargs
from tests.conftest import VOCAB_SIZE
from tests.integrations import engine_life
from tests.integrations.engine_life import EngineLife, Rollout, Watch, Weights
from tests.integrations.engines import build, count_preemptions, every_draft, runner_of, session_of, stats_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": 32, "num_gpu_blocks_override": 9}
"""Prompts come in chunks, requests wait for a place, and the cache is full now and then."""


class PlainLife(EngineLife):
    """vLLM's own kernels for top-k and top-p cannot be interpreted."""

    truncates = False


class AsynchronousLife(PlainLife):
    """With the device drafter."""

    is_asynchronous = True


@pytest.fixture(scope="module")
def off(tiny_model):
    return build(tiny_model, max_logprobs=VOCAB_SIZE, **engine_kwargs(speculation=False))


def check_activity(on, preempted):
    stats = stats_of(on)
    assert stats["accepted_tokens"] > 0
    assert stats["rejected_tokens"] > 0
    assert preempted


def test_any_life_gives_the_same_rollouts(tiny_model, off):
    options = every_draft(3, max_history_tokens=2000, max_history_versions=3)
    on = build(tiny_model, **SMALL, **engine_kwargs(budget=False, **options))
    preempted, weights = count_preemptions(on), Weights(on, off)
    watch = Watch(session_of(on))

    def new_life() -> EngineLife:
        life = PlainLife(on, off, weights, watch.check, watch.check_end)
        watch.forget()
        return life

    engine_life.run(new_life, num_lives=2, num_events=20)
    check_activity(on, preempted)


def test_so_does_one_with_the_drafter_on_the_device(tiny_model, off):
    arguments = engine_kwargs(num_speculative_tokens=3, drafter="device", drafter_options={"max_resident_tokens": 600})
    on = build(tiny_model, **SMALL, **arguments)
    preempted, weights = count_preemptions(on), Weights(on, off)
    speculator, requests = runner_of(on).speculator, runner_of(on).rollout_spec.requests

    def check(life: EngineLife, took_part: bool) -> None:
        speculator.drafter.check_integrity()
        if took_part:
            assert speculator._req_indices.keys() <= requests.keys()
            indices = list(speculator._req_indices.values())
            assert len(set(indices)) == len(indices)
            assert speculator._versions.keys() <= requests.keys()

    def check_end(life: EngineLife) -> None:
        assert len(speculator._req_indices) <= 1, "only the last request's end is still unknown"
        assert not speculator._versions
        for archived in [a for a in speculator.drafter._archive.order if all(a is not k for k in known)]:
            known.append(archived)
            tokens, _, num_prompt, _ = archived.read()
            assert any(could_be(tokens[num_prompt:].tolist(), rollout) for rollout in life.rollouts)

    def could_be(text: list[int], rollout: Rollout) -> bool:
        if rollout.finish_reason is not None:
            return text == rollout.sampled
        count = min(len(text), len(rollout.sampled))  # a step may have been on its way when it was aborted
        return text[:count] == rollout.sampled[:count]

    known: list[object] = []
    engine_life.run(lambda: AsynchronousLife(on, off, weights, check, check_end), num_lives=3, num_events=25)
    check_activity(on, preempted)
