"""Which problem a prompt belongs to, against a list of texts that is searched token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.history import problems as module
from rollout_spec.history.problems import (
    MAX_LONGER,
    MIN_LONGER,
    MIN_TEXTS,
    MIN_TOKENS,
    SLACK,
    Problems,
    problem_of_prompt,
    root_of_prompt,
)
from rollout_spec.history.store import Root


def ids(tokens):
    return np.array(tokens, np.int32)


def begin(problems, prompt, **options):
    return problems.start(ids(prompt), **options)


def start(problems, prompt, **options):
    """(problem, known tokens) of a prompt."""
    return tuple(begin(problems, prompt, **options)[:2])


def text(seed, size):
    return np.random.default_rng(seed).integers(0, 1000, size).tolist()


ROOT, SAID, ANSWER = text(0, 40), text(1, 10), text(2, 20)
PROBLEM = problem_of_prompt(ROOT)


class NaiveProblems:
    """The known texts in a list, the one that was met last at its end, with what a prompt equal to each gets."""

    def __init__(self, max_texts):
        self.max_texts = max_texts
        self.texts = []  # dicts
        self.born = 0

    def start(self, prompt):
        size = len(prompt)
        if not size:
            return None, 0
        equal = [t for t in self.texts if t["tokens"] == prompt]
        if equal:
            equal[0]["met"] += 1
            return self.move(equal[0])["answer"]
        best, agreeing = None, 0
        for t in sorted(self.texts, key=lambda t: t["born"]):
            length = len(t["tokens"])
            head = length - SLACK if t["has_head"] else 0
            for known, is_enough in ((head, t["ended"] or size >= length + MIN_LONGER), (length, True)):
                begins = known >= MIN_TOKENS and prompt[:known] == t["tokens"][:known] and not self.is_shared(t)
                if begins and is_enough and known >= agreeing:
                    whole_is_as_long = best is not None and known == agreeing == len(best["tokens"])
                    best, agreeing = (best if whole_is_as_long else t), known
        if best is None:
            answer = problem_of_prompt(prompt), 0
        else:
            best["longer"] += 1
            self.move(best)
            answer = best["answer"][0], agreeing
        self.add(prompt, answer, ended=False, has_head=size > SLACK)
        return answer

    def stop(self, prompt, answer, output):
        if prompt and output:
            tokens = prompt + output
            self.add(tokens, (answer[0], len(tokens)), ended=True, has_head=len(output) > SLACK)

    def is_shared(self, text):
        return text["longer"] >= module.MAX_LONGER * text["met"]

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
@settings(deadline=None, max_examples=50, derandomize=True)
@given(data=st.data())
def test_it_finds_what_a_search_token_by_token_finds(max_longer, data):
    """Conversations over an alphabet of two tokens, whose prompts are cut, changed at their end, continued or new."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_LONGER", max_longer)
        patch.setattr(module, "MIN_TEXTS", data.draw(st.sampled_from([3, 8, 1000])))
        problems, naive = Problems(0), NaiveProblems(module.MIN_TEXTS)
        pool = [[]]
        for _ in range(data.draw(st.integers(1, 20))):
            beginning = data.draw(st.sampled_from(pool))
            beginning = beginning[: len(beginning) - data.draw(st.integers(0, 6))]
            prompt = beginning + data.draw(st.lists(st.integers(0, 1), max_size=24))
            conversation, answer = begin(problems, prompt), naive.start(prompt)
            assert tuple(conversation[:2]) == answer
            assert conversation.length == len(prompt)
            if data.draw(st.booleans()):
                output = data.draw(st.lists(st.integers(0, 1), max_size=20))
                problems.stop(conversation, ids(output))
                naive.stop(prompt, answer, output)
                pool.append(prompt + output)
            pool.append(prompt)
            assert len(problems) == len(naive.texts)


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("output", [[], [2000]])
def test_a_system_prompt_joins_few_conversations(num_requests, output):
    """Also where it ended with the token that all of them go on with. Other engines are told nothing of it."""
    problems, system = Problems(), text(0, 60)
    for _ in range(num_requests):
        problems.stop(begin(problems, system), ids(output))
    prompts = [[*system, 2000, *text(100 + i, 10)] for i in range(500)]
    found = [begin(problems, prompt).problem_id for prompt in prompts]
    num_joined = MAX_LONGER * num_requests * (1 + len(output))
    assert found[:num_joined] == [problem_of_prompt(system)] * num_joined
    assert found[num_joined:] == [problem_of_prompt(prompt) for prompt in prompts[num_joined:]]
    assert problems.root_of(problem_of_prompt(system)) is None
    assert [begin(problems, prompt).problem_id for prompt in prompts] == found
    assert start(problems, system) == (problem_of_prompt(system), 0)


def test_models_do_not_share_texts():
    problems = Problems()
    start(problems, ROOT)
    others = [start(problems, ROOT + ANSWER, model=model) for model in ("a", "b")]
    assert len({PROBLEM, *(problem for problem, _ in others)}) == 3
    assert [known for _, known in others] == [0, 0]
    assert start(problems, ROOT + ANSWER + SAID, model="b") == (others[1][0], len(ROOT + ANSWER))
    assert start(problems, [], model="a")[0] is not None


def test_images_count_as_far_as_a_text_reaches():
    first = [(3, "one"), (20, "two")]
    for images, is_found in [
        (first, True),
        (first[::-1], True),
        ([*first, (len(ROOT), "three")], True),  # shown later
        (first[:1], False),
        ([(3, "two"), (20, "one")], False),
        ([(4, "one"), (20, "two")], False),
        ([], False),
    ]:
        problems = Problems()
        problem = begin(problems, ROOT, images=first).problem_id
        assert problem != PROBLEM
        assert (start(problems, ROOT + SAID + ANSWER, images=images)[:2] == (problem, len(ROOT))) == is_found


def test_roots_are_told_to_another_engine_which_has_their_tokens_not():
    here, there = Problems(), Problems()
    start(here, ROOT)
    root = here.root_of(PROBLEM)
    assert root == root_of_prompt(ids(ROOT))
    for _ in range(2):
        there.add_root(PROBLEM, root)
    assert len(there) == 1
    assert there.root_of(PROBLEM) == root
    assert start(there, ROOT + SAID + ANSWER) == (PROBLEM, 0)
    assert start(there, ROOT) == (PROBLEM, 0)
    assert start(there, ROOT + ANSWER) == (PROBLEM, len(ROOT))  # since it has been prompted here
    assert here.root_of(problem_of_prompt(ANSWER)) is None


@pytest.mark.parametrize(("most", "known"), [(0, MIN_TEXTS), (64_000, 2000), (None, 2010)])
def test_as_many_texts_are_known_as_the_history_can_hold(most, known):
    problems = Problems(most)
    for i in range(2010):
        start(problems, [i])
    assert len(problems) == known


def test_hashes_are_the_same_in_every_release():
    """They are kept in files and told to other engines."""
    assert root_of_prompt(np.arange(40, dtype=np.int32)) == Root(40, 4042750780303318157)
