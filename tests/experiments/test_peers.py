"""The plain rules that our drafters are measured against, against an obvious implementation."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.drafting import peers
from tests import naive
from tests.drafters.recorder import examples
from tests.naive import Text

texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def plain_draft(rule, documents, own, limit):
    """Drafts for documents[own]; the others are older in their order, and the own text is the newest."""
    prompt, tokens = documents[own].before, documents[own].tokens
    context, drafted = [*prompt, *tokens], []
    for _ in range(limit):
        found = naive.matches(documents, 7, [*context, *drafted], peers.MAX_DEPTH)
        if not found:
            break
        longest = max(found.values())
        if rule != "ppm":
            found = {place: match for place, match in found.items() if match == longest}
        said = {place: documents[place[0]].tokens[place[1]] for place in found}
        newest = {token: max((d == own, d, i) for (d, i), t in said.items() if t == token) for token in said.values()}
        q = dict.fromkeys(newest, 0.0)
        for length in range(1 if rule == "ppm" else longest, longest + 1):
            counts = Counter(said[place] for place, match in found.items() if match >= length)
            kappa = peers.KAPPA if rule == "ppm" and length > 1 else 0.0
            q = {t: (counts[t] + kappa * q[t]) / (counts.total() + kappa) for t in q}
        if rule == "recent":
            q = {t: float(q[t] > 0) for t in q}
        best = max(q.values())
        drafted.append(max((newest[t], t) for t in q if q[t] > best - 1e-12)[1])
    return drafted


@pytest.mark.parametrize("rule", peers.RULES)
@examples(60)
@given(prompt=texts, earlier=st.lists(texts, max_size=3), live=st.lists(texts, min_size=1, max_size=2))
def test_chains_draft_what_their_rule_says(rule, prompt, earlier, live):
    drafter, documents = peers.Chain(rule), {0: Text(7, [], prompt)}
    for i, tokens in enumerate([*earlier, *live]):
        drafter.start_request(str(i), prompt, problem_id=7)
        drafter.extend(str(i), tokens)
        documents[i + 1] = Text(7, prompt, tokens)
        if i < len(earlier):
            drafter.stop_request(str(i))
    (draft,) = drafter.propose([str(len(earlier))], np.array([4], np.int32))
    assert draft.token_ids.tolist() == plain_draft(rule, documents, len(earlier) + 1, 4)


def test_a_chain_ends_where_its_own_probability_says_so():
    drafter = peers.Chain("freq", min_survival=0.5)
    for i, tokens in enumerate([[1, 2, 3], [1, 2, 4], [1, 2, 4]]):
        drafter.start_request(str(i), [9, 8], problem_id=7)
        drafter.extend(str(i), tokens)
        drafter.stop_request(str(i), keep=i < 2)
    drafter.start_request("r", [9, 8], problem_id=7)
    (draft,) = drafter.propose(["r"], np.array([4], np.int32))
    assert draft.token_ids.tolist() == [1, 2, 4], "the newest of two that are as frequent; forgotten ones do not count"
    assert draft.confidence == pytest.approx([1.0, 1.0, 0.5])
    drafter = peers.Chain("freq", min_survival=0.6)
    drafter.start_request("r", [1, 2, 1, 3, 1], problem_id=7)
    (draft,) = drafter.propose(["r"], np.array([4], np.int32))
    assert draft.token_ids.tolist() == []
