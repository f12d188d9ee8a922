"""Which problem a prompt belongs to, against a list of texts that is searched token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.drafters.base import problem_of_prompt
from rollout_spec.history import roots as module
from rollout_spec.history.rollout import Root
from rollout_spec.history.roots import (
    LAST_SAID,
    MAX_LONGER,
    MAX_TEXTS,
    MIN_TEXTS,
    MIN_TOKENS,
    RUN,
    SLACK,
    Roots,
    namespace_of,
    root_of_prompt,
    texts_for,
)


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
        self.said = set()  # (prompt, run of tokens)
        self.born = 0

    def start(self, prompt):
        size = len(prompt)
        if not size:
            return None, 0, 0
        equal = [t for t in self.texts if t["tokens"] == prompt]
        if equal:
            equal[0]["met"] += 1
            return self.move(equal[0])["answer"]
        best, agreeing = None, 0
        for t in self.texts:
            length = len(t["tokens"])
            if length >= MIN_TOKENS and prompt[:length] == t["tokens"] and length > agreeing and not self.is_shared(t):
                best, agreeing = t, length
        heads = {}
        for t in sorted(self.texts, key=lambda t: t["born"]):
            if t["has_head"]:
                heads[tuple(t["tokens"][: max(len(t["tokens"]) - SLACK, 0)])] = t
        for head, t in heads.items():
            begins = len(head) >= MIN_TOKENS and tuple(prompt[: len(head)]) == head and not self.is_shared(t)
            if begins and len(head) > agreeing and (t["ended"] or self.follows(t, prompt[len(head) :])):
                best, agreeing = t, len(head)
        if best is None:
            answer = problem_of_prompt(prompt), 0, 0
        else:
            self.move(best)
            best["longer"] += 1
            problem, _, turn = best["answer"]
            answer = problem, agreeing, turn + (not best["ended"])
        self.add(prompt, answer, ended=False, has_head=True)
        return answer

    def stop(self, prompt, answer, output):
        if prompt and output:
            problem, _, turn = answer
            tokens = prompt + output
            self.said |= {(tuple(prompt), tuple(output[i : i + RUN])) for i in range(len(output))}
            self.add(tokens, (problem, len(tokens), turn + 1), ended=True, has_head=len(output) > SLACK)

    def is_shared(self, text):
        return text["longer"] >= module.MAX_LONGER * text["met"]

    def follows(self, text, tokens):
        runs = [tuple(tokens[i : i + RUN]) for i in range(2 * SLACK + 1)]
        return any(len(run) == RUN and (tuple(text["tokens"]), run) in self.said for run in runs)

    def move(self, text):
        self.texts.remove(text)
        self.texts.append(text)
        return text

    def add(self, tokens, answer, **about):
        equal = [t for t in self.texts if t["tokens"] == tokens]
        if equal:
            self.move(equal[0])["met"] += 1
            return
        self.born += 1
        self.texts.append({"tokens": tokens, "answer": answer, "born": self.born, "met": 1, "longer": 0, **about})
        # A head is known of its newest text only, also when that one is forgotten.
        for t in self.texts[:-1]:
            if about["has_head"] and t["has_head"] and t["tokens"][:-SLACK] == tokens[:-SLACK]:
                t["has_head"] = False
        del self.texts[: -self.max_texts]


@pytest.mark.parametrize("max_longer", [1, MAX_LONGER])
@settings(deadline=None, max_examples=150, derandomize=True)
@given(data=st.data())
def test_it_finds_what_a_search_token_by_token_finds(max_longer, data):
    """Conversations over an alphabet of two tokens, whose prompts are cut, changed at their end, continued or new."""
    max_texts = data.draw(st.sampled_from([3, 8, 1000]))
    roots, naive = Roots(max_texts), NaiveRoots(max_texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_LONGER", max_longer)
        compare(data, roots, naive)


def compare(data, roots, naive):
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
            output = data.draw(st.lists(token, max_size=20))
            roots.stop(conversation, ids(output))
            naive.stop(prompt, answer, output)
            pool.append(prompt + output)
            num_dropped, num_thought = data.draw(st.integers(0, SLACK + 1)), data.draw(st.integers(0, 8))
            pool.append(prompt[: len(prompt) - num_dropped] + output[num_thought:])
        pool.append(prompt)
        assert len(roots) == len(naive.texts)
        for problem in {t["answer"][0] for t in naive.texts}:
            first = [t for t in naive.texts if t["answer"] == (problem, 0, 0)]
            known = roots.root_of(problem)
            assert (known is None) == (not first or naive.is_shared(first[0]))
            assert known is None or known.length == len(first[0]["tokens"])


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
@pytest.mark.parametrize("num_thought", [0, 100])
@pytest.mark.parametrize("num_other", [0, SLACK])
def test_a_template_may_drop_a_prompts_last_tokens(num_dropped, num_thought, num_other):
    """And what was thought after them, and put others in their place. Siblings' turns are found, too."""
    roots, kept = Roots(), ROOT[: len(ROOT) - num_dropped]
    conversations = [begin(roots, ROOT) for _ in range(8)]
    outputs = [text(100 + i, 200) for i in range(8)]
    for conversation, output in zip(conversations, outputs, strict=True):
        roots.stop(conversation, ids(output))
    for output in outputs:
        prompt = kept + text(9, num_other) + output[num_thought:] + ANSWER
        expected = (PROBLEM, len(ROOT) - SLACK, 1)
        if num_dropped == num_other == 0:
            expected = (PROBLEM, len(ROOT) if num_thought else len(ROOT) + 200, 1)
        elif num_dropped == 0:
            expected = (PROBLEM, len(ROOT), 1)
        elif num_dropped > SLACK:
            expected = (problem_of_prompt(prompt), 0, 0)
        assert start(roots, prompt) == expected


@pytest.mark.parametrize("num_thought", [0, 1, 3000 - LAST_SAID - 1, 3000 - LAST_SAID, 3000 - RUN])
@pytest.mark.parametrize("num_said", [RUN - 1, RUN])
def test_what_was_said_is_found_at_an_outputs_beginning_and_near_its_end(num_thought, num_said):
    roots, output = Roots(), text(5, 3000)
    roots.stop(begin(roots, ROOT), ids(output))
    prompt = ROOT[:-2] + output[num_thought:][:num_said] + ANSWER
    is_found = num_said == RUN and num_thought in (0, 3000 - LAST_SAID, 3000 - RUN)
    assert (start(roots, prompt)[0] == PROBLEM) == is_found


@pytest.mark.parametrize("num_ending", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("is_told", [False, True])
def test_a_system_prompt_in_common_makes_no_conversation(num_ending, is_told):
    """After a request of one word, a health check say. One of its answers echoes it."""
    roots, system, ending = Roots(), text(0, 60), [1001, 1002, 1003, 1004, 1005][:num_ending]
    first = [*system, 1000, *ending]
    if is_told:
        there = roots
        start(there, first)
        roots = Roots()
        roots.add_root(problem_of_prompt(first), there.root_of(problem_of_prompt(first)))
    else:
        roots.stop(begin(roots, first), ids([1000, 1006]))
        roots.stop(begin(roots, first), ids(text(1, 30)))
    for _ in range(2):
        problems = set()
        for i in range(500):
            prompt = system + text(100 + i, 2 + i % 30) + ending
            conversation = begin(roots, prompt)
            problems.add(conversation.problem_id)
            output = text(1000 + i, 20)
            roots.stop(conversation, ids(output))
            assert begin(roots, prompt + output + ANSWER).problem_id == conversation.problem_id
        prompts = {tuple(system + text(100 + i, 2 + i % 30) + ending) for i in range(500)}
        assert len(problems) == len(prompts) > 490


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("output", [[], [2000]])
def test_a_request_that_only_fills_the_prefix_cache_joins_few_conversations(num_requests, output):
    """Also where it ended with the token that all of them go on with. Other engines are told nothing of it."""
    roots, system = Roots(), text(0, 60)
    for _ in range(num_requests):
        roots.stop(begin(roots, system), ids(output))
    prompts = [[*system, 2000, *text(100 + i, 10)] for i in range(500)]
    problems = [begin(roots, prompt).problem_id for prompt in prompts]
    num_joined = MAX_LONGER * num_requests * (1 + len(output))
    assert problems[:num_joined] == [problem_of_prompt(system)] * num_joined
    assert problems[num_joined:] == [problem_of_prompt(prompt) for prompt in prompts[num_joined:]]
    assert roots.root_of(problem_of_prompt(system)) is None
    assert [begin(roots, prompt).problem_id for prompt in prompts] == problems
    assert start(roots, system) == (problem_of_prompt(system), 0, 0)


def test_a_prompt_begins_as_many_others_as_it_has_rollouts():
    """Where templates leave out what was thought, only the prompt begins its rollouts' next turns."""
    roots = Roots()
    for epoch in range(20):
        for _ in range(8):
            roots.stop(begin(roots, ROOT), ids(SAID))
        for i in range(8):
            assert start(roots, ROOT + text(1000 + 8 * epoch + i, 30)) == (PROBLEM, len(ROOT), 1)
    assert roots.root_of(PROBLEM) is not None


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
    assert start(there, ROOT[:-2] + text(9, 40))[0] != PROBLEM
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
        assert roots.root_of(problem_of_prompt(prompts[i])) == Root(20, hash_of(roots, prompts[i]))
    assert start(roots, prompts[1]) == (problem_of_prompt(prompts[1]), 0, 0)


@pytest.mark.parametrize(
    ("max_history_tokens", "num_texts"),
    [(0, MIN_TEXTS), (20_000, MIN_TEXTS), (64_000, 2000), (8_000_000, MAX_TEXTS), (None, MAX_TEXTS)],
)
def test_as_many_texts_are_known_as_the_history_can_hold(max_history_tokens, num_texts):
    assert texts_for(max_history_tokens) == num_texts


def hash_of(roots, prompt):
    found, _ = roots._hash(ids(prompt), 0)
    return int(found[-1])


def test_hashes_are_the_same_in_every_release():
    """They are kept in files and told to other engines."""
    assert hash_of(Roots(), np.arange(40)) == 8177528958415117005


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


def test_what_was_said_for_another_problem_is_not_stored_for_the_one_that_a_later_turn_belongs_to():
    roots = Roots()
    later = [*ROOT, *ANSWER]
    roots.add_root(9, root_of_prompt(ids(later)))  # another engine met the second turn first
    roots.stop(roots.start(ids(ROOT), lambda: 1, namespace=namespace_of()), ids(ANSWER))
    assert start(roots, [*later, *SAID], namespace=namespace_of())[:2] == (9, 0)
