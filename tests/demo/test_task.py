from __future__ import annotations

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from rollout_spec.demo.policy import EOS, build_tokenizer
from rollout_spec.demo.task import (
    GIVE_UP,
    LARGEST_NUMBER,
    MAX_VALUE,
    OPERATORS,
    SMALLEST_NUMBER,
    VOCABULARY,
    Problem,
    apply,
    expressions,
    in_range,
    make_problem,
    parse_answer,
    parse_prompt,
    prompt_text,
    reward,
    trace_text,
)

FIXED = settings(deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**32 - 1)
PROBLEM = Problem((7, 3, 5), 22)
TOKENIZER = build_tokenizer()


@FIXED
@given(SEEDS)
def test_problems_are_solvable_and_survive_their_prompt(seed: int) -> None:
    problem = make_problem(random.Random(seed))
    assert len(set(problem.numbers)) == 3
    assert all(SMALLEST_NUMBER <= number <= LARGEST_NUMBER for number in problem.numbers)
    assert any(expression.reaches(problem.target) for expression in expressions(problem.numbers))
    assert parse_prompt(prompt_text(problem)) == problem


def test_problems_rarely_repeat() -> None:
    rng = random.Random(0)
    assert len({prompt_text(make_problem(rng)) for _ in range(200)}) > 180


def test_same_seed_same_trace() -> None:
    assert trace_text(PROBLEM, random.Random(3)) == trace_text(PROBLEM, random.Random(3))
    assert trace_text(PROBLEM, random.Random(3)) != trace_text(PROBLEM, random.Random(4))


@FIXED
@given(SEEDS)
def test_trace_is_rewarded_exactly_when_it_claims_a_hit(seed: int) -> None:
    rng = random.Random(seed)
    problem = make_problem(rng)
    trace = trace_text(problem, rng)
    claims_a_hit = "answer" in trace.split()
    assert claims_a_hit != trace.endswith(GIVE_UP)
    assert reward(problem, trace) == float(claims_a_hit)
    assert reward(prompt_text(problem), trace) == reward(problem, trace)


@FIXED
@given(SEEDS)
def test_trace_states_true_equations_and_no_try_twice(seed: int) -> None:
    rng = random.Random(seed)
    problem = make_problem(rng)
    tries = [words.split() for words in trace_text(problem, rng).split("try ")[1:]]
    assert len({tuple(words) for words in tries}) == len(tries)
    for words in tries:
        for index in (index for index, word in enumerate(words) if word == "="):
            left, operator, right, _, result = words[index - 3 : index + 2]
            value = apply(operator, int(left), int(right))
            assert result == (str(value) if in_range(value) else "out")


def test_lengths_spread_below_the_cap() -> None:
    rng = random.Random(0)
    lengths = sorted(len(trace_text(make_problem(rng), rng).split()) for _ in range(500))
    assert lengths[50] < 60
    assert lengths[450] > 220
    assert lengths[-1] <= 368


@FIXED
@given(SEEDS)
def test_tokenizer_knows_every_word_and_round_trips(seed: int) -> None:
    rng = random.Random(seed)
    problem = make_problem(rng)
    text = f"{prompt_text(problem)} {trace_text(problem, rng)}"
    token_ids = TOKENIZER.encode(text)
    assert len(token_ids) == len(text.split())
    assert TOKENIZER.unk_token_id not in token_ids
    assert TOKENIZER.decode(token_ids) == text
    assert TOKENIZER.decode([*token_ids, TOKENIZER.eos_token_id], skip_special_tokens=True) == text
    assert TOKENIZER.decode([*token_ids, TOKENIZER.eos_token_id]) == f"{text} {EOS}"


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("answer ( 5 * 3 ) + 7", 1.0),
        ("try 3 - 7 = out no answer 7 + ( 3 * 5 )", 1.0),
        ("", 0.0),
        (GIVE_UP, 0.0),
        ("( 5 * 3 ) + 7", 0.0),
        ("answer ( 5 * 3 ) + 7 try", 0.0),
        ("answer answer ( 5 * 3 ) + 7", 0.0),
        ("answer ( 7 + 3 ) * 5 answer ( 5 * 3 ) + 7", 0.0),
        ("answer ( 5 * 3 ) + 7 )", 0.0),
        ("answer ( 5 * 3 ) / 7", 0.0),
        ("answer ( 5 ** 3 ) + 7", 0.0),
        ("answer ( -5 * 3 ) + 7", 0.0),
        ("answer ( 9 + 9 ) + 4", 0.0),
    ],
)
def test_reward_of_an_answer(completion: str, expected: float) -> None:
    assert reward(PROBLEM, completion) == expected


def test_reward_falls_with_the_miss_and_stays_below_half() -> None:
    near, far, hopeless = "( 7 * 3 ) - 5", "( 7 + 3 ) - 5", "( 7 * 5 ) * 3"
    assert 0.5 > reward(PROBLEM, f"answer {near}") > reward(PROBLEM, f"answer {far}") > 0.0
    assert reward(PROBLEM, f"answer {hopeless}") == 0.0


@FIXED
@given(SEEDS, st.data())
def test_changing_a_number_of_the_answer_forfeits_the_reward(seed: int, data: st.DataObject) -> None:
    problem = make_problem(random.Random(seed))
    solution = next(expression for expression in expressions(problem.numbers) if expression.reaches(problem.target))
    words = solution.text().split()
    place = data.draw(st.sampled_from([index for index, word in enumerate(words) if word.isdecimal()]))
    other = data.draw(st.integers(0, MAX_VALUE))
    assume(other != int(words[place]))
    words[place] = str(other)
    assert reward(problem, f"answer {' '.join(words)}") == 0.0


@FIXED
@given(st.lists(st.sampled_from(("answer", "(", ")", *OPERATORS, "3", "5", "7")), max_size=10))
def test_reward_agrees_with_evaluating_the_text(words: list[str]) -> None:
    completion = " ".join(("answer", *words))
    paid = reward(PROBLEM, completion) == 1.0
    assert not paid or (
        sorted(filter(str.isdecimal, words)) == ["3", "5", "7"] and eval(" ".join(words)) == PROBLEM.target
    )


@FIXED
@given(SEEDS)
def test_every_expression_parses_back(seed: int) -> None:
    problem = make_problem(random.Random(seed))
    for expression in expressions(problem.numbers):
        assert parse_answer(f"answer {expression.text()}") == expression


def test_vocabulary_is_small_and_has_no_word_twice() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY) <= 180


@pytest.mark.parametrize("prompt", ["", "numbers 1 2 target 3 :", "numbers 1 2 x target 3 :", "numbers 1 2 3 target 3"])
def test_bad_prompt_raises(prompt: str) -> None:
    with pytest.raises(ValueError, match="prompt must read"):
        reward(prompt, "answer ( 7 + 5 ) * 3")


def test_unknown_operator_raises() -> None:
    with pytest.raises(ValueError, match="operator must be one of"):
        apply("/", 6, 3)
