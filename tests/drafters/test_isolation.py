"""Drafts of a request that has its own text alone do not depend on what others say, nor theirs on what it says.

Two drafters are given the same calls, but for the text of all but those who are watched: in one it is much like theirs,
in the other it has no token in common with it. Lengths are the same, and so is where everything lies in memory: the
drafts must be equal to the bit. Outcomes of the others' drafts are left out, as what is learned from them is for all.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.drafters.host import ngram
from rollout_spec.drafters.host.drafter import HistoryDrafter
from tests.drafters.recorder import examples, random_features, reject

K = 5
DRAFTERS = {
    "history": {"shared": True},
    "history, little memory": {"shared": True, "max_history_tokens": 300, "lookahead": True},
    "suffix": {},
    "ngram": {"index": "ngram"},
    "ngram, little memory": {"index": "ngram", "max_history_tokens": 300},
}


@st.composite
def streams(draw):
    """Who is watched, None for all who share, or a number among the others; calls: (what, shares, problem, seed)."""
    what = st.sampled_from(["start", "start", "extend", "extend", "extend", "extend", "stop", "drop"])
    call = st.tuples(what, st.booleans(), st.integers(0, 1), st.integers(0, 2**32))
    return draw(st.sampled_from([None, 0, 1])), draw(st.lists(call, min_size=10, max_size=60))


def text_of(rng, owner, is_foreign):
    """Two words and their parts, again and again: all say the same, unless the text is foreign."""
    words = [[1, 2, 3, 4, 5, 6], [3, 4, 1, 2, 6, 6]]
    parts = [words[rng.integers(2)][rng.integers(3) :] for _ in range(rng.integers(1, 8))]
    tokens = [token for part in parts for token in part]
    own_end = [10 if owner is None else 11 + owner]  # what only this owner says
    return [token + 100 * is_foreign for token in tokens + own_end + tokens[:3]]


def drafts_of(options, watched, calls, others_are_foreign, num_entries):
    """What those who are watched are drafted after each call."""
    drafter = HistoryDrafter(max_draft_tokens=K, min_survival=0.0, **options)
    if "index" in options:
        drafter._index = drafter._index._replace(buckets=ngram.new_buckets(num_entries))
    live, drafts, num_alone = {}, [], 0
    for number, (what, shares, problem_id, seed) in enumerate(calls):
        rng, req_id = np.random.default_rng(seed), str(number)
        if what == "start":
            live[req_id] = None if shares else num_alone
            num_alone += not shares
        elif live:
            req_id = list(live)[seed % len(live)]
        owner = live.get(req_id)
        text = text_of(rng, owner, others_are_foreign and owner != watched)
        if what == "start":
            seed = seed if seed % 2 else None
            drafter.start_request(req_id, text, problem_id=problem_id, seed=seed, own_only=not shares)
        elif req_id in live and what == "extend":
            drafter.extend(req_id, text, random_features(rng, text) if seed % 3 == 0 else None)
        elif req_id in live:
            drafter.stop_request(req_id, keep=what == "stop")
            del live[req_id]
        own = [req_id for req_id, owner in live.items() if owner == watched]
        found = drafter.propose(own, np.full(len(own), K, np.int32)) if own else []
        drafts += [(draft.token_ids.tolist(), draft.confidence.tolist()) for draft in found]
        if own and drafter.wants_rejected_targets:
            reject(drafter, own, [[7, *draft.token_ids.tolist()] for draft in found])
    drafter.check_integrity()
    return drafts


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_text_passes_between_a_request_on_its_own_and_others(name):
    num_drafted = []

    @examples(40)
    @given(streams())
    def run(stream):
        for num_entries in (1 << 17, 1 << 25):
            alike, foreign = (
                drafts_of(DRAFTERS[name], *stream, is_foreign, num_entries) for is_foreign in (False, True)
            )
            if alike == foreign:
                break  # else in the small table of n-grams the others' text may have taken the places of entries
        assert alike == foreign
        num_drafted.append(sum(len(tokens) for tokens, _ in alike))

    run()
    assert np.mean(num_drafted) > 10
