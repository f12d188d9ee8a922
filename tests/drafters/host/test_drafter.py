"""The history drafter: what it drafts, what it learns, and its life cycle."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rollout_spec.drafters.host import constants, store, voting
from rollout_spec.drafters.host import drafter as history
from rollout_spec.drafters.host.constants import MAX_DEPTH
from rollout_spec.drafters.host.store import NEXT, PAGE_TOKENS, ROLLOUT, TextStore, append_token
from rollout_spec.features import no_features
from rollout_spec.history.store import Rollout
from tests.drafters.recorder import Recorder, examples, random_features

K = 6
LARGEST = 2**31 - 1

both_indexes = pytest.mark.parametrize("index", ["suffix", "ngram"])


def make(index="suffix", **options):
    return Recorder(index, **{"max_draft_tokens": K, **options})


def check_draft(draft, limit):
    assert draft.token_ids.dtype == np.int32
    assert draft.confidence.dtype == np.float32
    assert len(draft.token_ids) == len(draft.confidence) <= max(limit, 0)
    assert (np.diff(draft.confidence) <= 0).all()
    assert ((draft.confidence >= 0) & (draft.confidence <= 1)).all()


# -- what requests see -----------------------------------------------------------------------------------------------


def test_requests_on_their_own_see_nothing_else():
    recorder = make(own_only=True)
    for keep in (True, False):
        recorder.start("gone", [1, 2], [5, 6, 7, 8], problem_id=7)
        recorder.stop("gone", keep=keep)
    recorder.start("a", [1, 2], [5, 6, 7, 8], problem_id=7)
    recorder.start("b", [1, 2], [5, 6], problem_id=7)
    assert recorder.draft("b") == []
    recorder.extend("b", [9, 5, 6])
    assert recorder.draft("b", 2) == [9, 5]
    recorder.stop("a")
    recorder.stop("b")
    recorder.check()
    assert recorder.drafter._store.num_used_pages == 0


def test_prompts_are_stored_once_per_problem_until_their_last_user_leaves():
    recorder, prompt = make(), list(range(100))
    for name, problem_id in (("a", None), ("b", None), ("c", 5)):
        recorder.start(name, prompt, [1], problem_id=problem_id)
    assert recorder.drafter._store.num_tokens == 2 * len(prompt) + 3
    for name in "abc":
        recorder.stop(name, keep=False)
    assert recorder.drafter._store.num_tokens == len(recorder.drafter._problems) == 0


def test_texts_and_features_are_copied_when_they_are_given_and_drafts_when_they_are_returned():
    recorder = make()
    buffer, features = np.array([5, 6, 7], np.int32), random_features(np.random.default_rng(0), range(3))
    kept = features.copy()
    recorder.drafter.start_request("a", buffer)
    recorder.drafter.extend("a", buffer, features)
    buffer[:] = features[:] = 9  # the engine fills them again before the next propose
    recorder.drafter.start_request("b", [5, 6, 7])
    (draft,) = recorder.propose("b", limit=3)
    recorder.drafter.extend("b", [6])
    recorder.propose("b", "a")
    assert draft.token_ids.tolist() == [5, 6, 7]
    assert (recorder.drafter._store.read(recorder.drafter._live["a"].document)[1] == kept).all()


# -- the model -------------------------------------------------------------------------------------------------------


def one_against_two(index, num_agreeing, common=()):
    """What is drafted where one text agrees with all of the context and two with its last `num_agreeing` tokens.

    They go on with `common` and then say 200 and twice 300: the one counts for more only where its match is longer.
    """
    recorder = make(index)
    context = list(range(100, 100 + MAX_DEPTH + 8))
    recorder.start("whole", [1], [*context, *common, 200], problem_id=7)
    for i in range(2):
        recorder.start(str(i), [1], [2 + i] * 9 + [*context[-num_agreeing:], *common, 300], problem_id=7)
    recorder.start("r", [1], [9, *context], problem_id=7)
    return recorder.draft("r", len(common) + 1)


@both_indexes
def test_contexts_count_as_far_back_as_max_depth(index):
    """Also those that get longer in a draft."""
    assert one_against_two(index, MAX_DEPTH - 1) == [200]
    assert one_against_two(index, MAX_DEPTH) == [300]
    assert one_against_two(index, MAX_DEPTH - 2, [50]) == [50, 200]
    assert one_against_two(index, MAX_DEPTH - 1, [50]) == [50, 300]


@pytest.mark.parametrize(("num_others", "expected"), [(4, 9), (6, 50)])
def test_other_problems_weigh_a_fifth_of_a_prompt(num_others, expected):
    recorder = make(shared=True)
    for i in range(num_others):
        recorder.start(str(i), [100 + i, 1, 2, 3], [50], problem_id=8 + i)
    recorder.start("r", [1, 2, 3, 9, 1, 2, 3], problem_id=7)
    assert recorder.draft("r", 1) == [expected]


def test_drafts_follow_texts_whose_pages_lie_apart():
    """Rollouts of large tokens that grow in turns, so that none has two pages side by side."""
    recorder = make()
    texts = [[LARGEST - 1000 * i - n for n in range(5 * PAGE_TOKENS + 3)] for i in range(3)]
    for i in range(3):
        recorder.start(f"h{i}", [1, 2, 3], problem_id=7)
    for column in zip(*texts, strict=True):
        for i, token in enumerate(column):
            recorder.extend(f"h{i}", [token])
    recorder.drafter._flush()
    pages = recorder.drafter._store.arrays.pages[:, NEXT]
    assert not ((pages >= 0) & (pages == np.arange(pages.size) + 1)).any()
    for i, text in enumerate(texts):
        recorder.start(f"r{i}", [1, 2, 3], text[:1], problem_id=7)
        for at in range(1, len(text)):
            (draft,) = recorder.propose(f"r{i}")
            assert draft.token_ids.tolist() == text[at : at + K]
            recorder.extend(f"r{i}", [text[at]])
        recorder.stop(f"r{i}", keep=False)


# -- outcomes --------------------------------------------------------------------------------------------------------


def drafted_once(recorder, known, said, then):
    """What is drafted after `said` while a rollout of the problem is known; `then` follows, and both are dropped."""
    recorder.start("h", [1, 2], known, problem_id=7)
    recorder.start("r", [1, 2], said, problem_id=7)
    (draft,) = recorder.propose("r")
    recorder.extend("r", then)
    for req_id in "rh":
        recorder.stop(req_id, keep=False)
    return draft


def test_confidence_follows_the_rate_of_acceptance():
    recorder, rng = make(), np.random.default_rng(0)
    for _ in range(3000):
        draft = drafted_once(recorder, [5, 6], [5], [6 if rng.random() < 0.6 else 9])
    assert draft.confidence[0] == pytest.approx(0.6, abs=0.05)


def test_drafts_without_a_chance_are_not_made():
    """min_survival cuts what confidence says is hopeless, and only that."""
    histories = [([5, 6, 7, 8], 0.9), ([5, 9, 9, 9], 0.1)]
    drafts = []
    for min_survival in (0.0, 0.5):
        recorder = make(min_survival=min_survival)
        for i in range(4):
            recorder.start(str(i), [1, 2], histories[i % 2][0])
        recorder.start("r", [1, 2])
        drafts.append(recorder.propose("r")[0])
    loose, strict = drafts
    assert (strict.confidence >= 0.5).all()
    assert len(strict.token_ids) == (loose.confidence >= 0.5).sum() < len(loose.token_ids)


def test_full_counters_are_halved():
    cell = np.array([constants.MAX_TRIALS, 1000], np.float32)
    for hit in (True, False):
        voting.count_outcome(cell, hit)
    assert cell.tolist() == [constants.MAX_TRIALS / 2 + 2, 501]


def test_proposals_survive_the_growth_of_rows():
    recorder = make()
    recorder.start("h", [1], [5, 6])
    recorder.start("r", [1])
    assert recorder.draft("r", 2) == [5, 6]
    size = recorder.drafter.table.arrays.document.size
    for i in range(size):
        recorder.start(f"more{i}", [2])
    assert recorder.drafter.table.arrays.document.size > size
    recorder.extend("r", [5, 9])
    assert recorder.drafter._outcomes.sum(0).tolist() == [2, 1]


def test_a_new_request_does_not_inherit_a_proposal():
    recorder = make()
    recorder.start("h", [1, 2], [5, 6, 7])
    recorder.start("r", [1, 2])
    recorder.propose("r")
    recorder.stop("r", keep=False)
    recorder.start("s", [1, 2])
    recorder.extend("s", [9])
    assert recorder.drafter._outcomes.sum() == 0


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_first_tokens_are_drafted_however_rarely_they_were_right():
    """Otherwise none would be graded ever after. They are right from some day on, and are believed again."""
    recorder = make(min_survival=0.3)
    wrong = [drafted_once(recorder, [5, 6, 7], [], [9]) for _ in range(500)]
    assert wrong[-1].token_ids.tolist() == [5]
    assert wrong[-1].confidence[0] < 0.01
    right = [drafted_once(recorder, [5, 6, 7], [], [5, 6, 7]) for _ in range(3000)]
    assert right[-1].token_ids.tolist() == [5, 6, 7]


@both_indexes
def test_memory_is_used_again(index):
    recorder, sizes = make(index, shared=index == "suffix", max_history_tokens=50 * PAGE_TOKENS), set()
    rng = np.random.default_rng(0)
    for i in range(400):
        recorder.start(str(i), [i], rng.integers(0, 1000, 100))
        recorder.stop(str(i))
        if i >= 100:
            sizes.add(recorder.drafter.memory_bytes())
    assert len(sizes) == 1
    assert len(recorder.drafter._problems) < 100


def test_history_makes_room_for_what_is_live_however_large_its_bound(monkeypatch):
    for module in (history, store):
        monkeypatch.setattr(module, "MAX_PAGES", 200)
    recorder = make(max_history_tokens=10**9)
    rng = np.random.default_rng(0)
    for i in range(30):
        recorder.start(str(i), [1], rng.integers(0, 9, 10 * PAGE_TOKENS), problem_id=i)
        recorder.draft(str(i))
        recorder.stop(str(i))
    recorder.check()
    assert 100 < recorder.drafter._store.num_used_pages <= 200


def test_the_store_grows_in_proportion():
    texts, replaced, documents = TextStore(), 0, []
    for number in range(2000):
        before = texts.num_pages
        texts.reserve(1)
        replaced += texts.num_pages > before
        documents.append(texts.new_document(0, ROLLOUT))
        append_token(texts.arrays, documents[-1], number)
    assert [texts.text(document).tolist() for document in documents] == [[number] for number in range(2000)]
    assert replaced < 60
    assert texts.num_pages <= 2000 * 9 // 8 + 64


def test_every_page_that_positions_can_tell_apart_is_used_and_no_more(monkeypatch):
    texts = TextStore()
    monkeypatch.setattr(store, "MAX_PAGES", texts.num_pages + 1)  # less than growth by an eighth asks for
    with pytest.raises(MemoryError, match="need more than"):
        texts.reserve(store.MAX_PAGES + 1)
    texts.reserve(store.MAX_PAGES)
    assert texts.num_pages == store.MAX_PAGES


# -- any order of calls ----------------------------------------------------------------------------------------------


class LifeCycle(RuleBasedStateMachine):
    """Any order of calls: the store, the index and the bookkeeping hold exactly the texts that they should."""

    INDEX, SHARED = "suffix", False
    MAX_PAGES = 9

    def __init__(self):
        super().__init__()
        self.recorder = make(
            self.INDEX, shared=self.SHARED, max_draft_tokens=4, max_history_tokens=self.MAX_PAGES * PAGE_TOKENS
        )
        self.live: list[str] = []
        self.started = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), max_size=3) | st.just([0, 1] * PAGE_TOKENS),
        problem_id=st.none() | st.integers(7, 8),
        seed=st.none() | st.integers(0, 9),
        share_known=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    )
    def start(self, prompt, problem_id, seed, share_known):
        self.started += 1
        self.live.append(str(self.started))
        num_known = int(share_known * len(prompt))
        self.recorder.start(self.live[-1], prompt, problem_id=problem_id, seed=seed, num_known=num_known)

    @rule(
        problem_id=st.integers(7, 8),
        context=st.lists(st.integers(0, 2), max_size=MAX_DEPTH),
        tokens=st.lists(st.integers(0, 2), max_size=9),
    )
    def add(self, problem_id, context, tokens):
        self.recorder.add(Rollout(problem_id, np.array(context, np.int32), np.array(tokens, np.int32)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), max_size=9), times=st.sampled_from([1, 1, 5]))
    def extend(self, data, tokens, times):
        self.recorder.extend(data.draw(st.sampled_from(self.live)), tokens * times)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_told=st.booleans())
    def propose(self, data, is_told):
        req_ids = data.draw(st.lists(st.sampled_from(self.live), unique=True, min_size=1))
        limits = np.array([data.draw(st.integers(0, 5)) for _ in req_ids], np.int32)
        drafts = self.recorder.drafter.propose(req_ids, limits)
        for draft, limit in zip(drafts, limits, strict=True):
            check_draft(draft, min(int(limit), 4))
        if is_told:
            for req_id, draft in zip(req_ids, drafts, strict=True):
                accepted = data.draw(st.integers(0, len(draft.token_ids)))
                self.recorder.extend(req_id, [*draft.token_ids[:accepted], 2])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def stop(self, data, keep):
        req_id = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.recorder.stop(req_id, keep=keep)

    @invariant()
    def everything_is_in_its_place(self):
        self.recorder.check()
        drafter = self.recorder.drafter
        assert not drafter.rollouts.by_age or drafter._store.num_used_pages <= self.MAX_PAGES
        texts = self.recorder.texts().values()
        contexts = [[0], [1, 2], [2, 0, 1, 0]]
        for text in list(texts)[-3:]:
            whole = [*text.before, *text.tokens]
            contexts += [whole[:end] for end in {len(whole), len(whole) // 2} - {0}]
        for problem in {text.problem for text in texts}:
            for context in contexts:
                if self.INDEX == "suffix":
                    self.recorder.check_tree(problem, context)
                self.recorder.check_table(problem, context)

    def teardown(self):
        for req_id in self.live:
            self.recorder.stop(req_id, keep=False)
        self.recorder.check()


@pytest.mark.parametrize(("index", "shared"), [("suffix", False), ("suffix", True), ("ngram", False)])
def test_any_order_of_calls(index, shared):
    machine = type("LifeCycle", (LifeCycle,), {"INDEX": index, "SHARED": shared})
    run_state_machine_as_test(machine, settings=examples(25, stateful_step_count=30))


# -- rollouts from elsewhere -----------------------------------------------------------------------------------------


@both_indexes
def test_a_load_of_more_than_fits_takes_no_more_memory_than_fits(index):
    recorder = make(index, max_history_tokens=10 * PAGE_TOKENS)
    drafter = recorder.drafter
    tokens = np.random.default_rng(0).integers(0, 9, (102, PAGE_TOKENS)).astype(np.int32)
    rollouts = [Rollout(number % 3, text[:0], text) for number, text in enumerate(tokens)]
    num_pages = drafter._store.num_pages
    assert 10 < num_pages < len(rollouts)
    drafter.add_rollouts(rollouts)
    drafter.check_integrity()
    assert drafter._store.num_pages == num_pages

    def kept():
        return [drafter._store.text(request.document).tolist() for request in drafter.rollouts.by_age]

    assert kept() == tokens[-10:].tolist()
    with pytest.raises(ValueError, match="negative"):
        drafter.add_rollouts([rollouts[0], rollouts[1]._replace(tokens=-tokens[1])])
    with pytest.raises(ValueError, match="features of 32 tokens"):
        drafter.add_rollouts([rollouts[0], rollouts[1]._replace(features=no_features(3))])
    assert kept() == tokens[-10:].tolist()
