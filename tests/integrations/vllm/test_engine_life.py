"""Whatever happens to the requests of an engine, they get the rollouts of one that drafts nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from rollout_spec import engine_kwargs
from tests.conftest import VOCAB_SIZE
from tests.integrations import engine_life
from tests.integrations.engine_life import EngineLife, Watch, Weights
from tests.integrations.engines import build, count_preemptions, every_draft, session_of, stats_of

pytestmark = pytest.mark.engine

SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "block_size": 32, "num_gpu_blocks_override": 12}
"""Prompts come in chunks, requests wait for a place, and the cache is full now and then."""


@pytest.fixture(scope="module")
def off(tiny_model):
    return build(tiny_model, max_logprobs=VOCAB_SIZE, **engine_kwargs(speculation=False))


HISTORY = every_draft(5, max_history_tokens=2000, max_history_versions=3)


def live(model, off, *, num_lives: int, **options) -> None:
    """Let a new engine live some lives."""
    on = build(model, **SMALL, **engine_kwargs(budget=False, **HISTORY, **options))
    session, preempted = session_of(on), count_preemptions(on)
    session.problems._max_texts = 60
    watch, weights = Watch(session), Weights(on, off)

    def new_life() -> EngineLife:
        life = EngineLife(on, off, weights, watch.check, watch.check_end)
        watch.forget()
        return life

    engine_life.run(new_life, num_lives=num_lives, num_events=30)
    stats = stats_of(on)
    assert stats["accepted_tokens"] > 5 * num_lives
    assert stats["rejected_tokens"] > 5 * num_lives
    assert preempted


def test_any_life_gives_the_same_rollouts(tiny_model, off):
    live(tiny_model, off, num_lives=10)


def test_so_does_one_whose_history_goes_to_a_folder(tiny_model, off, tmp_path):
    """A batch that is complete ends at once there."""
    live(tiny_model, off, num_lives=5, history_dir=str(tmp_path))
