"""Whatever happens to the requests of an engine, they get the rollouts of one that drafts nothing."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm")

from rollout_spec import engine_kwargs
from rollout_spec.history.roots import Roots
from tests.conftest import VOCAB_SIZE
from tests.integrations import engine_life
from tests.integrations.engine_life import EngineLife, Weights
from tests.integrations.engines import build, count_preemptions, runner_of, stats_of

pytestmark = pytest.mark.engine

SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "block_size": 32, "num_gpu_blocks_override": 12}
"""Prompts come in chunks, requests wait for a place, and the cache is full now and then."""


class Watch:
    """Follows what a session on the host tells its drafter."""

    def __init__(self, session) -> None:
        self.session = session
        self._stopped: dict[str, tuple[list[int], bool]] = {}  # (output, whether it is kept), by request
        stop_request = session.drafter.stop_request

        def stop(req_id, *, keep=True):
            assert req_id not in self._stopped
            self._stopped[req_id] = session.drafter.output_of(req_id).tolist(), keep
            stop_request(req_id, keep=keep)

        session.drafter.stop_request = stop

    def check(self, life: EngineLife, took_part: bool) -> None:
        """After a step: the drafter knows the requests that are there, and what they have said."""
        session, runner = self.session, runner_of(life.on)
        if not took_part:
            return
        session.drafter.check_integrity()
        check_roots(session.roots)
        assert session.live.keys() <= set(runner.requests)
        assert session.live.keys() == session.drafter._live.keys()
        rows = [live.row for live in session.live.values()]
        assert len(set(rows)) == len(rows)
        assert set(session._stop_strings_by_row) <= set(rows)
        assert set(np.flatnonzero(session.arrays.draft >= 0)) <= set(rows)
        for req_id in session.live.keys() & set(life.scheduler.requests):
            output = list(life.scheduler.requests[req_id].output_token_ids)
            known = session.drafter.output_of(req_id).tolist()
            assert known == (output if req_id in runner.input_batch.req_ids else output[: len(known)])

    def check_end(self, life: EngineLife) -> None:
        """All have ended: the drafter was told of each once, and what it had said."""
        assert len(self.session.live) <= 1, "only the last request's end is still unknown"
        assert len(self.session._stop_strings_by_row) == 0
        for rollout in life.rollouts[:-1]:
            options = (rollout.params.extra_args or {}).get("rollout_spec", {})
            said, keep = self._stopped.pop(rollout.inner_id, ([], options.get("keep_in_history", True)))
            assert keep == options.get("keep_in_history", True)
            if rollout.was_drafting and rollout.is_whole:
                assert said == rollout.sampled
            else:
                count = min(len(said), len(rollout.sampled))
                assert said[:count] == rollout.sampled[:count]
        self.forget()

    def forget(self) -> None:
        """Another life begins."""
        self._stopped.clear()


def check_roots(roots: Roots) -> None:
    """The known texts are found by their hashes."""
    assert len(roots) <= roots._max_texts
    for whole, text in roots._texts.items():
        assert text.whole == whole
        assert 0 <= text.num_known <= text.length
    for head, text in roots._heads.items():
        assert text.head == head
        assert roots._texts[text.whole] is text
    for problem_id, text in roots._roots.items():
        assert text.is_root
        assert text.problem_id == problem_id
        assert roots._texts[text.whole] is text


@pytest.fixture(scope="module")
def off(tiny_model):
    return build(tiny_model, max_logprobs=VOCAB_SIZE, **engine_kwargs(speculation=False))


HISTORY = {"min_survival": 0.0, "max_history_tokens": 2000, "max_history_versions": 3}


def live(model, off, *, num_lives: int, **options) -> None:
    """Let a new engine live some lives."""
    on = build(model, **SMALL, **engine_kwargs(num_speculative_tokens=5, **options))
    session, preempted = runner_of(on).drafter.session, count_preemptions(on)
    session.roots._max_texts = 60
    watch, weights = Watch(session), Weights(on, off)

    def new_life() -> EngineLife:
        life = EngineLife(on, off, weights, watch.check, watch.check_end)
        watch.forget()
        return life

    engine_life.run(new_life, num_lives=num_lives, num_events=30)
    stats = stats_of(on)
    assert stats["accepted_tokens"] > 5 * num_lives
    assert stats["rejected_tokens"] > 5 * num_lives
    assert len(preempted) > num_lives


def test_any_life_gives_the_same_rollouts(tiny_model, off):
    live(tiny_model, off, num_lives=20, budget=False, drafter_options=HISTORY)


def test_so_does_one_whose_history_goes_to_a_folder(tiny_model, off, tmp_path):
    """A batch that is complete ends at once there."""
    live(tiny_model, off, num_lives=10, budget=False, history_dir=str(tmp_path), drafter_options=HISTORY)
