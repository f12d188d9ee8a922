"""What one tenant's requests are drafted does not depend on what the requests of others say.

Two drafters are given the same calls, but for the text of all other tenants: in one it is much like the tenant's own,
in the other it has no token in common with it. Lengths are the same, and so is where everything lies in memory: the
drafts must be equal to the bit. Outcomes of the others' drafts are left out, as what is learned from them is for all.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.drafters.host import ngram
from rollout_spec.drafters.host.history import HistoryDrafter
from rollout_spec.drafters.host.store import FIRST
from rollout_spec.history.rollout import Rollout
from tests.drafters.device.reference import ReferenceDrafter
from tests.drafters.recorder import examples, random_features

K = 5
TENANTS = [None, "a", "b"]
"""The first is the requests without a salt."""
PROBLEMS = 2
"""Of each tenant."""


def history(index, **options):
    def make():
        drafter = HistoryDrafter(index, max_draft_tokens=K, min_survival=0.0, num_threads=1, **options)
        if index == "ngram":  # in a small table the others' text takes the places of entries
            drafter._index = drafter._index._replace(buckets=ngram.new_buckets(1 << 17))
        return drafter

    return make


DRAFTERS = {
    "history": history("suffix", shared=True),
    "history, little memory": history("suffix", shared=True, max_history_tokens=300, lookahead=True),
    "suffix": history("suffix"),
    "ngram": history("ngram"),
    "ngram, shared, little memory": history("ngram", shared=True, max_history_tokens=300),
    "device": lambda: ReferenceDrafter(max_draft_tokens=K),
}


@st.composite
def streams(draw):
    """The tenant that is watched, and calls: (what, tenant, problem, numbers that say more)."""
    numbers = st.integers(0, 2**32)
    what = st.sampled_from(["start", "start", "extend", "extend", "extend", "stop", "drop", "add", "version"])
    call = st.tuples(what, st.sampled_from(TENANTS), st.integers(0, PROBLEMS - 1), numbers)
    return draw(st.sampled_from(TENANTS)), draw(st.lists(call, min_size=10, max_size=60))


def text_of(rng, tenant, watched, is_foreign):
    """Two words and their parts, again and again: all tenants say the same, unless the others' text is foreign."""
    words = [[1, 2, 3, 4, 5, 6], [3, 4, 1, 2, 6, 6]]
    parts = [words[rng.integers(2)][rng.integers(3) :] for _ in range(rng.integers(1, 8))]
    tokens = [token for part in parts for token in part]
    own_end = [10 + TENANTS.index(tenant)]  # what only this tenant says
    return [token + 100 * (is_foreign and tenant != watched) for token in tokens + own_end + tokens[:3]]


def drafts_of(make, watched, calls, is_foreign):
    """What the watched tenant's requests are drafted after each call."""
    drafter = make()
    takes = inspect.signature(drafter.start_request).parameters
    live, drafts, version = {}, [], 0
    for number, (what, tenant, problem, seed) in enumerate(calls):
        rng = np.random.default_rng(seed)
        text = text_of(rng, tenant, watched, is_foreign)
        problem_id, isolated = 10 * TENANTS.index(tenant) + problem, tenant is not None
        of_tenant = [req_id for req_id, owner in live.items() if owner == tenant]
        req_id = of_tenant[seed % len(of_tenant)] if of_tenant else None
        if what == "start":
            live[str(number)] = tenant
            given_isolated = {"isolated": isolated} if "isolated" in takes else {}
            coupled = seed if seed % 2 else None
            drafter.start_request(str(number), text, problem_id=problem_id, seed=coupled, **given_isolated)
        elif what == "add" and not isolated and hasattr(drafter, "add_rollouts"):
            context, tokens = np.array(text[:4], np.int32), np.array(text[4:], np.int32)
            drafter.add_rollouts([Rollout(problem_id, version, context, tokens)])
        elif what == "version":
            version += 1
            drafter.begin_policy_version(version)
        elif req_id is not None and what == "extend":
            features = random_features(rng, text) if seed % 3 == 0 else None
            drafter.extend(req_id, text, features)
        elif req_id is not None and what in ("stop", "drop"):
            drafter.stop_request(req_id, keep=what == "stop")
            del live[req_id]
        own = [req_id for req_id, owner in live.items() if owner == watched]
        found = drafter.propose(own, np.full(len(own), K, np.int32)) if own else []
        drafts += [(draft.token_ids.tolist(), draft.confidence.tolist()) for draft in found]
        targets = [[*draft.token_ids.tolist(), 7] for draft in found]
        accepted = [len(tokens) // 2 for tokens, _ in found]
        if own:
            drafter.observe(own, targets, np.array(accepted, np.int32))
    drafter.check_integrity()
    return drafts


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_tenants_drafts_do_not_depend_on_what_others_say(name):
    num_drafted = []

    @examples(40)
    @given(streams())
    def run(stream):
        watched, calls = stream
        alike, foreign = (drafts_of(DRAFTERS[name], watched, calls, is_foreign) for is_foreign in (False, True))
        assert alike == foreign
        others = {10 + i for i, tenant in enumerate(TENANTS) if tenant != watched}
        assert not others & {token for tokens, _ in alike for token in tokens}
        num_drafted.append(sum(len(tokens) for tokens, _ in alike))

    run()
    assert np.mean(num_drafted) > 10


@pytest.mark.parametrize("index", ["suffix", "ngram"])
def test_without_isolation_other_problems_are_drafted_from(index):
    """The text of `text_of` is such that a leak would show."""
    for isolated in (False, True):
        drafter = HistoryDrafter(index, shared=True, min_survival=0.0)
        drafter.start_request("other", [9], problem_id=1, isolated=isolated)
        drafter.extend("other", [1, 2, 3, 4, 5, 6, 10])
        for number, is_alone in enumerate((isolated, not isolated)):
            drafter.start_request(str(number), [8], problem_id=2 + number, isolated=is_alone)
            drafter.extend(str(number), [3, 4, 5, 6])
        drafts = drafter.propose(["0", "1"], np.full(2, 4, np.int32))
        assert [draft.token_ids.tolist() for draft in drafts] == [[] if isolated else [10], []]


@pytest.mark.parametrize("index", ["suffix", "ngram"])
def test_isolated_rollouts_are_not_recorded(index):
    drafter = HistoryDrafter(index, shared=True)
    drafter.record_rollouts()
    for number, isolated in enumerate((True, False)):
        drafter.start_request("r", [1, 2], problem_id=7, isolated=isolated)
        drafter.extend("r", [3, 4, number])
        drafter.stop_request("r")
    (recorded,) = drafter.take_recorded()
    assert recorded.tokens.tolist() == [3, 4, 1]
    drafter.check_integrity()


def test_a_page_that_was_anothers_is_not_drafted_from():
    """Entries of the n-gram table outlive their rollouts, and an isolated one may get the place of one that was not."""
    drafter = HistoryDrafter("ngram", shared=True, min_survival=0.0)
    said = [1, 2, 3, 4, 5, 6]
    places = []
    for isolated in (False, True):
        drafter.start_request("gone", [], problem_id=1, isolated=isolated)
        drafter.extend("gone", said)
        places.append(drafter.output_of("gone").size and int(drafter._store.arrays.documents[:, FIRST].max()))
        drafter.start_request("later", [8], problem_id=2)
        drafter.extend("later", said[:4])
        (draft,) = drafter.propose(["later"], np.array([2], np.int32))
        assert draft.token_ids.tolist() == ([] if isolated else [5, 6])
        for req_id in ("later", "gone"):
            drafter.stop_request(req_id, keep=False)
    assert places[0] == places[1]
