"""Which problem a prompt belongs to, against a list of texts that is searched token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.drafters.base import problem_of_prompt
from rollout_spec.history.rollout import Root
from rollout_spec.history.roots import MIN_MORE, MIN_TOKENS, SLACK, Roots


def ids(tokens):
    return np.array(tokens, np.int32)


def start(roots, prompt, **options):
    """(problem, known tokens, turn) of a prompt whose id, if it is new, is its hash."""
    return tuple(begin(roots, prompt, **options)[:3])


def begin(roots, prompt, **options):
    return roots.start(ids(prompt), lambda: problem_of_prompt(prompt) if len(prompt) else None, **options)


def text(seed, size):
    return np.random.default_rng(seed).integers(0, 1000, size).tolist()


ROOT, SAID, ANSWER = text(0, 40), text(1, 10), text(2, 20)
PROBLEM = problem_of_prompt(ROOT)


class NaiveRoots:
    """The known texts in a list, the one that was met last at its end, with what a prompt equal to each gets."""

    def __init__(self, max_texts):
        self.max_texts = max_texts
        self.texts = []  # dicts

    def start(self, prompt):
        size = len(prompt)
        if not size:
            return None, 0, 0
        equal = [t for t in self.texts if t["tokens"] == prompt]
        if equal:
            return self.met(equal[0])["answer"]
        best, agreeing = None, 0
        for t in self.texts:
            length = len(t["tokens"])
            if length >= MIN_TOKENS and length < size and prompt[:length] == t["tokens"] and length >= agreeing:
                best, agreeing = t, length
        heads = {}
        for t in sorted(self.texts, key=lambda t: t["born"]):
            if t["has_head"]:
                heads[tuple(t["tokens"][: max(len(t["tokens"]) - SLACK, 0)])] = t
        for head, t in heads.items():
            is_long_enough = len(head) + SLACK >= MIN_TOKENS and size >= len(head) + SLACK + MIN_MORE
            if is_long_enough and tuple(prompt[: len(head)]) == head and len(head) > agreeing:
                best, agreeing = t, len(head)
        if best is None:
            answer = problem_of_prompt(prompt), 0, 0
        else:
            self.met(best)
            problem, _, turn = best["answer"]
            answer = problem, agreeing, turn + (not best["ended"])
        self.add(prompt, answer, ended=False, has_head=True)
        return answer

    def stop(self, prompt, answer, output):
        if prompt and output:
            problem, _, turn = answer
            tokens = prompt + output
            self.add(tokens, (problem, len(tokens), turn + 1), ended=True, has_head=len(output) > SLACK)

    def met(self, text):
        self.texts.remove(text)
        self.texts.append(text)
        return text

    def add(self, tokens, answer, **about):
        equal = [t for t in self.texts if t["tokens"] == tokens]
        if equal:
            self.met(equal[0])
            return
        self.born = getattr(self, "born", 0) + 1
        self.texts.append({"tokens": tokens, "answer": answer, "born": self.born, **about})
        # A head is known of its newest text only, also when that one is forgotten.
        for t in self.texts[:-1]:
            if about["has_head"] and t["has_head"] and t["tokens"][:-SLACK] == tokens[:-SLACK]:
                t["has_head"] = False
        del self.texts[: -self.max_texts]


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_it_finds_what_a_search_token_by_token_finds(data):
    """Conversations over an alphabet of two tokens, whose prompts are cut, changed at their end, continued or new."""
    max_texts = data.draw(st.sampled_from([3, 8, 1000]))
    roots, naive = Roots(max_texts), NaiveRoots(max_texts)
    token = st.integers(0, 1)
    pool = [[]]
    for _ in range(data.draw(st.integers(1, 25))):
        beginning = data.draw(st.sampled_from(pool))
        beginning = beginning[: len(beginning) - data.draw(st.integers(0, 6))]
        prompt = beginning + data.draw(st.lists(token, max_size=24))
        conversation = begin(roots, prompt)
        answer = naive.start(prompt)
        assert tuple(conversation[:3]) == answer
        assert conversation.length == len(prompt)
        if data.draw(st.booleans()):
            output = data.draw(st.lists(token, max_size=12))
            roots.stop(conversation, ids(output))
            naive.stop(prompt, answer, output)
            pool.append(prompt + output)
        pool.append(prompt)
        assert len(roots) == len(naive.texts)
        for problem in {t["answer"][0] for t in naive.texts}:
            first = [t["tokens"] for t in naive.texts if t["answer"] == (problem, 0, 0)]
            known = roots.root_of(problem)
            assert (known is None) == (not first)
            assert known is None or known.length == len(first[0])


def test_every_turn_belongs_to_the_first_prompts_problem_and_only_its_end_is_new():
    roots = Roots()
    assert start(roots, ROOT) == (PROBLEM, 0, 0)
    conversation = begin(roots, ROOT)  # a sibling
    assert conversation[:3] == (PROBLEM, 0, 0)
    roots.stop(conversation, ids(SAID))
    second = ROOT + SAID + ANSWER
    conversation = begin(roots, second)
    assert conversation[:3] == (PROBLEM, len(ROOT + SAID), 1)
    assert start(roots, second) == (PROBLEM, len(ROOT + SAID), 1)  # a sibling that said the same
    roots.stop(conversation, ids(SAID))
    assert start(roots, second + SAID + [5]) == (PROBLEM, len(second + SAID), 2)
    assert start(roots, second + SAID) == (PROBLEM, len(second + SAID), 2)  # resumed, with nothing added
    assert start(roots, text(7, 40)) == (problem_of_prompt(text(7, 40)), 0, 0)


def test_an_output_that_is_not_said_again_as_it_was_leaves_the_prompt_known():
    """As where a template leaves out what was thought, or where a request that is not kept has ended."""
    roots, changed = Roots(), [*ROOT, 1000, *SAID]
    roots.stop(begin(roots, ROOT), ids(SAID))
    assert start(roots, changed) == (PROBLEM, len(ROOT), 1)
    assert start(roots, changed + ANSWER) == (PROBLEM, len(changed), 2)


@pytest.mark.parametrize("num_dropped", range(SLACK + 2))
@pytest.mark.parametrize("num_more", [MIN_MORE - 1, MIN_MORE])
def test_a_template_may_drop_a_prompts_last_tokens(num_dropped, num_more):
    roots = Roots()
    start(roots, ROOT)
    prompt = ROOT[: len(ROOT) - num_dropped]
    prompt += text(3, len(ROOT) + num_more - len(prompt))
    expected = (PROBLEM, len(ROOT) - SLACK, 1)
    if num_dropped == 0:
        expected = (PROBLEM, len(ROOT), 1)
    elif num_dropped > SLACK or num_more < MIN_MORE:
        expected = (problem_of_prompt(prompt), 0, 0)
    assert start(roots, prompt) == expected


@pytest.mark.parametrize("size", [1, MIN_TOKENS - 1, MIN_TOKENS])
def test_a_short_prompt_begins_no_conversation_but_is_found_again(size):
    roots = Roots()
    short = text(4, size)
    assert start(roots, short) == start(roots, short) == (problem_of_prompt(short), 0, 0)
    longer = short + ANSWER
    is_known = size >= MIN_TOKENS
    assert start(roots, longer)[0] == problem_of_prompt(short if is_known else longer)


def test_an_empty_prompt_has_no_problem():
    roots = Roots()
    conversation = begin(roots, [])
    assert conversation[:3] == (None, 0, 0)
    roots.stop(conversation, ids(SAID))
    assert len(roots) == 0


def test_namespaces_do_not_share_texts():
    roots = Roots()
    start(roots, ROOT)
    assert roots.start(ids(ROOT + ANSWER), lambda: 5, namespace=1)[:2] == (5, 0)
    assert roots.start(ids(ROOT), lambda: 6, namespace=2)[:2] == (6, 0)
    assert roots.start(ids(ROOT + SAID), lambda: 7, namespace=2)[:2] == (6, len(ROOT))


def test_images_count_as_far_as_a_text_reaches():
    roots = Roots()
    prompt, later = ROOT, ROOT + SAID + ANSWER
    first = [(3, 111), (20, 222)]
    start(roots, prompt, images=first)
    found = (PROBLEM, len(ROOT), 1)
    for images, is_found in [
        (first, True),
        ([(20, 222), (3, 111)], True),
        ([*first, (len(ROOT), 333)], True),  # shown later
        (first[:1], False),
        ([(3, 222), (20, 111)], False),
        ([(4, 111), (20, 222)], False),
        ([], False),
    ]:
        other = Roots()
        start(other, prompt, images=first)
        assert (start(other, later, images=images) == found) == is_found
    assert start(roots, later, images=[*first, (45, 333)]) == found
    assert start(roots, later, images=[*first, (45, 333)]) == found
    assert start(roots, later + SAID, images=[*first, (45, 333)]) == (PROBLEM, len(later), 2)
    assert start(roots, later + ANSWER, images=[*first, (45, 334)]) == found


def test_roots_are_told_to_another_engine_which_has_their_tokens_not():
    here, there = Roots(), Roots()
    start(here, ROOT)
    root = here.root_of(PROBLEM)
    assert root.length == len(ROOT)
    there.add_root(PROBLEM, root)
    there.add_root(PROBLEM, root)
    assert len(there) == 1
    assert there.root_of(PROBLEM) == root
    assert start(there, ROOT + SAID + ANSWER) == (PROBLEM, 0, 1)
    assert start(there, ROOT[:-2] + text(9, 40)) == (PROBLEM, 0, 1)
    assert start(there, ROOT) == (PROBLEM, 0, 0)
    assert start(there, ROOT + ANSWER) == (PROBLEM, len(ROOT), 1)  # since it has been prompted here
    assert here.root_of(problem_of_prompt(ANSWER)) is None


def test_a_problem_that_the_caller_names_has_no_root():
    roots = Roots()
    for _ in range(2):
        assert start(roots, ROOT, is_named=True, namespace=3) == (PROBLEM, 0, 0)
    assert roots.root_of(PROBLEM) is None
    assert start(roots, ROOT + SAID, is_named=True, namespace=3) == (PROBLEM, len(ROOT), 1)


def test_the_texts_met_last_stay():
    roots = Roots(max_texts=3)
    prompts = [text(10 + i, 20) for i in range(4)]
    for prompt in prompts[:3]:
        start(roots, prompt)
    start(roots, prompts[0])
    start(roots, prompts[3])
    assert len(roots) == 3
    assert roots.root_of(problem_of_prompt(prompts[1])) is None
    for i in (0, 2, 3):
        assert roots.root_of(problem_of_prompt(prompts[i])) == Root(20, *hashes(roots, prompts[i]))
    assert start(roots, prompts[1]) == (problem_of_prompt(prompts[1]), 0, 0)


def hashes(roots, prompt):
    """(of all tokens, of all but the last few)."""
    found, _ = roots._hash(ids(prompt), 0)
    return int(found[-1]), int(found[-SLACK - 1])


def test_hashes_are_the_same_in_every_release():
    """They are kept in files and told to other engines."""
    assert hashes(Roots(), np.arange(40)) == (8177528958415117005, 11070520412418644575)


def test_the_filter_changes_nothing():
    """Whether everything passes it, or it is made anew after every text."""
    answers = []
    for filter_is in ("usual", "full", "new"):
        roots, rng = Roots(max_texts=20), np.random.default_rng(0)
        known = [text(i, 30) for i in range(5)]
        answers.append([])
        for _ in range(200):
            if filter_is == "full":
                roots._filter[:] = 255
            elif filter_is == "new":
                roots._num_filtered = 1000
            prompt = known[rng.integers(len(known))] + rng.integers(0, 2, rng.integers(0, 20)).tolist()
            conversation = begin(roots, prompt)
            answers[-1].append(conversation)
            roots.stop(conversation, ids([1, 0, 1]))
            known = [*known[-20:], [*prompt, 1, 0, 1]]
        assert len(roots) == 20
    assert answers[0] == answers[1] == answers[2]
    assert max(conversation.turn for conversation in answers[0]) > 3
