"""Whatever happens to the requests of an engine, they get the rollouts of one that drafts nothing."""

import random

import pytest

from rollout_spec import engine_kwargs
from tests.conftest import VOCAB_SIZE
from tests.integrations.engines import IS_V2, build, count_preemptions, every_draft, session_of, stats_of, verify_all
from tests.runners import engine_life
from tests.runners.engine_life import EngineLife, Rollout, Watch, changer_of_weights, check_what_is_live

SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "block_size": 32, "num_gpu_blocks_override": 12}
"""Prompts come in chunks, requests wait for a place, and the cache is full now and then."""
HISTORY = every_draft(5, max_history_tokens=2000)
K, MOST_PASSES = 3, 4
"""Of the engine with the drafter on the device, whose steps have as many forward passes as chance says."""


@pytest.fixture(scope="module")
def off(tiny_model):
    return build(tiny_model, max_logprobs=VOCAB_SIZE, **engine_kwargs(speculation=False))


def live(on, new_life, *, num_lives: int) -> None:
    """Let an engine live some lives."""
    preempted = count_preemptions(on)
    engine_life.run(new_life, num_lives=num_lives, num_events=30)
    stats = stats_of(on)
    assert min(stats["accepted_tokens"], stats["rejected_tokens"]) > (0 if IS_V2 else 5 * num_lives)
    assert preempted or IS_V2  # whose few lives need not


@pytest.mark.skipif(IS_V2, reason="V2 has no drafter on the host")
@pytest.mark.parametrize("has_folder", [False, True])
def test_any_life_gives_the_same_rollouts(tiny_model, off, tmp_path, has_folder):
    """With a folder a batch that is complete ends at once."""
    folder = {"history_dir": str(tmp_path)} if has_folder else {}
    on = build(tiny_model, **SMALL, **engine_kwargs(budget=False, **HISTORY, **folder))
    session, change_weights = session_of(on), changer_of_weights(on, off)
    session.problems._max_texts = 60
    watch = Watch(session)

    def new_life() -> EngineLife:
        life = EngineLife(on, off, change_weights, watch.check, watch.check_end)
        watch.forget()
        return life

    live(on, new_life, num_lives=10 // (1 + has_folder))


@pytest.mark.skipif(not IS_V2, reason="V1 has no drafter on the device")
def test_so_does_one_with_the_drafter_on_the_device(tiny_model, off, tmp_path):
    options = {"drafter": "device", "drafter_options": {"max_resident_tokens": 64}, "sub_steps": MOST_PASSES}
    on = build(tiny_model, **SMALL, **verify_all(num_speculative_tokens=K, history_dir=str(tmp_path), **options))
    session, change_weights = session_of(on), changer_of_weights(on, off)
    steps, rng = on.llm_engine.engine_core.engine_core.scheduler.rollout_spec, random.Random(0)
    steps._choose = lambda num_requests, has_drafts: rng.randint(1, MOST_PASSES)

    class AsynchronousLife(EngineLife):
        is_asynchronous = True

    def check(life: EngineLife, took_part: bool) -> None:
        session.drafter.check_integrity()
        check_what_is_live(session)
        if took_part:
            requests = {*life.scheduler.requests, *life.scheduler.finished_req_ids}
            assert session.live.keys() <= requests
            indices = [live.req_idx for live in session.live.values()]
            assert len(set(indices)) == len(indices)

    def check_end(life: EngineLife) -> None:
        assert len(session.live) <= 1, "only the last request's end is still unknown"
        for archived in [a for a in session.drafter.rollouts.by_age if all(a is not k for k in known)]:
            known.append(archived)
            archived.arrive(wait=True)
            assert any(could_be(archived.read().tokens.tolist(), rollout) for rollout in life.rollouts)

    def could_be(text: list[int], rollout: Rollout) -> bool:
        if rollout.finish_reason is not None:
            surplus = text[len(rollout.sampled) :]  # what the last two steps sampled past a stop string
            most = 2 * MOST_PASSES * (K + 1) * bool(rollout.max_surplus)
            return text[: len(rollout.sampled)] == rollout.sampled and len(surplus) <= most
        count = min(len(text), len(rollout.sampled))  # a step may have been on its way when it was aborted
        return text[:count] == rollout.sampled[:count]

    known: list[object] = []
    places, place = [], session.drafter._place
    session.drafter._place = lambda *args: places.append(place(*args)) or places[-1]
    live(on, lambda: AsynchronousLife(on, off, change_weights, check, check_end), num_lives=3)
    assert None in places, "there was no room for some rollouts"
