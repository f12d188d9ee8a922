"""Drafts from what the target saw: similar states weigh more, and candidates vote for all that was likely."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.drafters.host import constants
from rollout_spec.drafters.host.constants import MAX_DEPTH
from rollout_spec.drafters.host.store import KIND, PROMPT
from rollout_spec.features import no_features
from rollout_spec.noise import host as noise
from tests import naive
from tests.drafters.device.reference import Document, _distribution, _num_differing
from tests.drafters.recorder import Recorder, examples, features_of, random_features

K = 6


def make(index="suffix", **options):
    return Recorder(index, max_draft_tokens=K, **options)


def start(recorder, req_id, prompt, tokens, features, **kwargs):
    recorder.start(req_id, prompt, **kwargs)
    recorder.extend(req_id, tokens, features)


# -- the model -------------------------------------------------------------------------------------------------------


def source_weight(drafter, req_id, document):
    if drafter._store.arrays.documents[document, KIND] == PROMPT:
        return constants.PROMPT_WEIGHT
    return constants.OWN_WEIGHT if document == drafter._live[req_id].document else constants.SIBLING_WEIGHT


def drafted_by_hand(recorder, req_id, seed, features):
    """For each drafted position, the scores of the tokens that may come next."""
    drafter, problem, context = recorder.drafter, recorder.problem(req_id), recorder.context(req_id)
    features = features if drafter.wants_features else {}
    own = features.get(drafter._live[req_id].document)
    texts = {
        number: Document(text.tokens, 0, features.get(number, no_features(0)))
        for number, text in recorder.texts().items()
    }
    candidates = []
    token, depth = (yield None), 0
    while True:
        if not candidates:
            found, differing = recorder.tree_candidates(problem, context), []
            for (document, at), _ in found:
                place = at - (depth + 1)  # before the rollout's first token there are no states
                is_known = own is not None and len(own) and document in features and place >= 0
                differing.append(_num_differing(own, features[document], place) if is_known else None)
            fewest = min((n for n in differing if n is not None), default=None)
            for ((document, at), length), n in zip(found, differing, strict=True):
                more = 0 if fewest is None else constants.UNKNOWN_DISAGREEMENT if n is None else n - fewest
                if more <= constants.MAX_DISAGREEMENT:
                    weight = source_weight(drafter, req_id, document) * np.exp(-constants.SIMILARITY * more)
                    candidates.append((document, at, length, weight))
        q = naive.blend(
            [
                (_distribution(texts[document], at, texts[document].tokens[at]), length, weight)
                for document, at, length, weight in candidates
            ],
            constants.BLEND,
        )
        if seed is not None:
            q = {t: np.log(max(p, 1e-300)) + float(noise.gumbel(seed, len(context) - 1, t)) for t, p in q.items()}
        token = yield q
        candidates = [
            (document, at + 1, min(length + 1, MAX_DEPTH), weight)
            for document, at, length, weight in candidates
            if texts[document].tokens[at] == token and at + 1 < len(texts[document].tokens)
        ]
        context, depth = [*context, token], depth + 1


@pytest.mark.parametrize("options", [{}, {"features": False}])
@examples(60)
@given(
    history=st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=4),
    own=st.lists(st.integers(0, 2), max_size=12),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    random=st.integers(0, 2**31),
)
def test_drafts_are_the_favourites_of_the_blended_distributions(options, history, own, seed, random):
    recorder, rng, known = make(**options), np.random.default_rng(random), {}
    for name, text in [*((f"h{i}", text) for i, text in enumerate(history)), ("r", own)]:
        features = random_features(rng, text)
        start(recorder, name, [2, 0, 1, 3, 0, 1], text, features, seed=seed if name == "r" else random)
        known[recorder.drafter._live[name].document] = features
        if name != "r":
            recorder.stop(name)
    (draft,) = recorder.propose("r")
    by_hand = drafted_by_hand(recorder, "r", seed, known)
    next(by_hand)
    token = None
    for depth in range(K):
        scores = by_hand.send(token)
        if depth == len(draft.token_ids):
            assert not scores
            break
        token = int(draft.token_ids[depth])
        assert scores[token] == pytest.approx(max(scores.values()), abs=1e-4)


def test_features_that_say_nothing_change_no_draft():
    drafts = []
    for give in (lambda tokens: None, lambda tokens: no_features(tokens.size)):
        recorder, rng = make(), np.random.default_rng(5)
        for i in range(4):
            tokens = rng.integers(0, 4, 30)
            start(recorder, str(i), [1, 2], tokens, give(tokens))
        drafts.append([values.tolist() for values in recorder.propose("3")[0]])
    assert drafts[0] == drafts[1]
    assert drafts[0][0]


def test_features_stay_with_their_tokens_when_pages_are_used_again():
    """Removed rollouts leave pages with old features; tokens of which nothing is known must not inherit them."""
    recorder = make()
    start(recorder, "old", [1], [5, 6] * 40, features_of([0] * 80, [{9: 0.9}] * 80), problem_id=7)
    recorder.stop("old", keep=False)
    start(recorder, "new", [1], [5, 6] * 40, None, problem_id=7)
    assert recorder.draft("new", 2) == [5, 6]
    assert not recorder.drafter._store.read(recorder.drafter._live["new"].document)[1].any()
