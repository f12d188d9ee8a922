"""The drafting session's budget, without an engine."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from rollout_spec import RolloutSpecConfig
from rollout_spec.integrations import session as session_module
from rollout_spec.integrations.session import STEPS_PER_AGREEMENT, DraftingSession
from rollout_spec.stats import SpeculationStats


def a_request(prompt=(1, 2, 3)):
    params = SimpleNamespace(
        temperature=1.0, seed=5, max_tokens=200, eos_token_id=None, stop_token_ids=[], min_tokens=0, extra_args=None
    )
    return SimpleNamespace(prompt_token_ids=list(prompt), sampling_params=params, lora_request=None, mm_features=None)


def a_session(agree=None, **options):
    config = RolloutSpecConfig(num_speculative_tokens=4, drafter="suffix", **options)
    model = SimpleNamespace(max_model_len=500, get_vocab_size=lambda: 50)
    return DraftingSession(config, model, SpeculationStats(), agree)


def run(session, steps, request):
    """A request that always says 1 2 3 1 2 3, in steps of one token: nothing that was drafted is verified."""
    drafted = []
    for n in range(steps):
        drafts = session.draft([], {}, [("a", request, [1 + n % 3])])
        drafted.append(drafts.get("a", []))
    return drafted


def test_without_a_budget_all_of_a_draft_is_verified():
    assert run(a_session(), 12, a_request())[-1] == [1, 2, 3, 1]


def test_steps_are_timed_and_ranks_agree_on_what_they_took():
    asked = []

    def agree(seconds):
        asked.append(seconds)
        return [1.0] * len(seconds)

    session = a_session(agree, budget=True)
    run(session, 3 * STEPS_PER_AGREEMENT + 2, a_request())
    assert [len(seconds) for seconds in asked] == [STEPS_PER_AGREEMENT] * 3
    for drafted in (False, True):
        _, seconds = session.budget.cost.curve(drafted=drafted)
        assert set(seconds.tolist()) <= {1.0}
    assert session.budget.cost.plain(1) == 1.0


def test_steps_that_read_prompts_are_not_timed():
    session, request = a_session(budget=True), a_request()
    session.draft([], {}, [("a", request, [1])])
    session.draft([], {}, [("a", request, [2])], reads_prompts=True)
    session.draft([], {}, [("a", request, [3]), ("b", a_request((7,)), [3])])
    assert not session.budget.cost._steps[False]
    session.draft([], {}, [("a", request, [1]), ("b", a_request((7,)), [3])])
    assert sum(len(steps) for kind in session.budget.cost._steps for steps in kind.values()) == 1


def test_lengths_of_ended_rollouts_are_remembered():
    session, request = a_session(budget=True), a_request()
    run(session, 10, request)
    session.draft(["a"], {}, [])
    assert session.budget.lengths.predict(0, 0, 100) == (50, 50)  # one rollout is no distribution
    run(session, 20, request)
    session.draft(["a"], {}, [])
    assert session.budget.lengths.predict(0, 0, 100)[0] == 15
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
        drafts = session.draft([], {"a": ([token], 0)} if drafts.get("a") else {}, [("a", request, [token])])
        token = 1 + (guesses[-1] if guesses else 1) % 3  # anything but what was guessed
    assert guesses
    assert len(guesses) - asked_early < 60


@pytest.mark.parametrize("budget", [False, True])
def test_a_draft_is_never_longer_than_what_is_left(budget):
    session, request = a_session(budget=budget), a_request()
    request.sampling_params.max_tokens = 30
    drafts = run(session, 29, request)
    assert all(len(draft) <= max(30 - n - 2, 0) for n, draft in enumerate(drafts))
