"""The drafting session's budget, without an engine."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_spec import RolloutSpecConfig
from rollout_spec.integrations import session as session_module
from rollout_spec.integrations.session import PROMPT_SHARE, STEPS_PER_AGREEMENT, DraftingSession
from rollout_spec.stats import SpeculationStats


def a_request(prompt=(1, 2, 3)):
    params = SimpleNamespace(
        temperature=1.0, seed=5, max_tokens=200, eos_token_id=None, stop_token_ids=[], min_tokens=0, extra_args=None
    )
    return SimpleNamespace(prompt_token_ids=list(prompt), sampling_params=params, lora_request=None, mm_features=None)


def a_session(agree=None, **options):
    config = RolloutSpecConfig(num_speculative_tokens=4, drafter="suffix", **options)
    engine = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=500, get_vocab_size=lambda: 50),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
    )
    return DraftingSession(config, engine, SpeculationStats(), agree)


def run(session, steps, request):
    """A request that always says 1 2 3 1 2 3, in steps of one token: nothing that was drafted is verified."""
    drafted = []
    for n in range(steps):
        last = len(drafted[-1]) if drafted else 0
        drafts = session.draft([], {}, [("a", request, [1 + n % 3])], 1 + last)
        drafted.append(drafts.get("a", []))
    return drafted


def test_without_a_budget_all_of_a_draft_is_verified():
    assert run(a_session(budget=False), 12, a_request())[-1] == [1, 2, 3, 1]


def test_steps_are_timed_and_ranks_agree_on_what_they_took():
    asked = []

    def agree(seconds):
        asked.append(seconds)
        return [1.25, 0.25] * (len(seconds) // 2)

    session = a_session(agree, budget=True)
    run(session, 3 * STEPS_PER_AGREEMENT + 2, a_request())
    assert [len(seconds) for seconds in asked] == [2 * STEPS_PER_AGREEMENT] * 3
    for drafted in (False, True):
        _, seconds = session.budget.cost.curve(drafted=drafted)
        assert set(seconds.tolist()) <= {1.0}
    assert session.budget.cost.plain(1) == 1.0


def num_timed(session):
    return sum(len(steps) for kind in session.budget.cost._steps for steps in kind.values())


def test_prompts_in_a_step_are_counted_by_their_tokens():
    session, request = a_session(budget=True), a_request()
    session.draft([], {}, [("a", request, [1])], 3)
    assert num_timed(session) == 0  # it began before the engine was watched
    session.draft([], {}, [("a", request, [2])], 41)
    assert num_timed(session) == 1
    assert session._prompt_tokens == pytest.approx(PROMPT_SHARE * 40)
    assert session._stats.steps_by_batch == []
    session.draft([], {}, [("a", request, [1])], 1)
    assert session._prompt_tokens == pytest.approx(PROMPT_SHARE * 40 * (1 - PROMPT_SHARE))
    assert (session._stats.steps_by_batch, session._stats.tokens_by_batch) == ([1], [1])


def test_the_time_between_two_generations_does_not_count():
    session, request = a_session(budget=True), a_request()
    session.draft([], {}, [("a", request, [1])], 3)
    session.draft([], {}, [("a", request, [2])], 1)
    timed, seconds = num_timed(session), session._stats.step_seconds
    session.draft(["a"], {}, [("b", a_request((7,)), [3])], 1)
    assert (num_timed(session), session._stats.step_seconds) == (timed, seconds)
    session.draft([], {}, [("b", a_request((7,)), [3])], 1)
    assert num_timed(session) == timed + 1


def test_lengths_of_ended_rollouts_are_remembered():
    session, request = a_session(budget=True), a_request()

    def expected():
        return session.budget.lengths.predict([0], np.array([0]), np.array([100]))[0].tolist()

    run(session, 10, request)
    session.draft(["a"], {}, [], 0)
    assert expected() == [50]  # one rollout is no distribution
    run(session, 20, request)
    session.draft(["a"], {}, [], 0)
    assert expected() == [15]
    assert not session._problems


def test_drafts_that_never_come_true_stop_being_asked_for(monkeypatch):
    """Steps take the same with and without drafts, and the drafter is sure of them; what is counted says otherwise."""
    ticks = itertools.count()
    monkeypatch.setattr(session_module, "time", SimpleNamespace(perf_counter=lambda: 1e-3 * next(ticks)))
    session, request = a_session(budget=True), a_request()
    request.sampling_params.max_tokens = session._max_model_len = 10_000
    guesses = []
    propose = session.drafter.propose

    def spy(*args):
        drafts = propose(*args)
        guesses.append(next(iter(drafts[0].token_ids.tolist()), 1))
        return drafts

    session.drafter.propose = spy
    drafts, token = {}, 1
    for n in range(1700):
        if n == 1500:
            asked_early = len(guesses)
        size = len(drafts.get("a", []))
        outcomes = {"a": ([token], 0)} if size else {}
        drafts = session.draft([], outcomes, [("a", request, [token])], 1 + size)
        token = 1 + (guesses[-1] if guesses else 1) % 3  # anything but what was guessed
    assert guesses
    assert len(guesses) - asked_early < 60


def test_drafts_leave_room_in_the_step():
    """The scheduler would hold requests back: 62 prompt tokens a step leave room for one draft."""
    session, request = a_session(budget=True), a_request()
    slots = 0
    longest = []
    for n in range(150):
        drafts = session.draft([], {}, [("a", request, [1 + n % 3])], 63 + slots)
        slots = len(drafts.get("a", []))
        longest.append(slots)
    assert max(longest[:30]) == 4
    assert max(longest[60:]) == 1


@pytest.mark.parametrize("budget", [False, True])
def test_a_draft_is_never_longer_than_what_is_left(budget):
    session, request = a_session(budget=budget), a_request()
    request.sampling_params.max_tokens = 30
    drafts = run(session, 29, request)
    assert all(len(draft) <= max(30 - n - 2, 0) for n, draft in enumerate(drafts))
