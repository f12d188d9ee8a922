"""Countdown with a spoken search: reach the target with three numbers, each used exactly once.

A prompt states the problem and a completion tries expressions until one hits the target or the search gives up::

    numbers 7 3 5 target 22 :
    try 3 - 7 = out no
    try 7 + 5 = 12 then 12 * 3 = out no
    try 5 * 3 = 15 then 15 + 7 = 22 yes answer ( 5 * 3 ) + 7

(on one line, words separated by single spaces). `out` is any value outside 0..`MAX_VALUE` and ends a try. A try's
numbers and operators are random, so there a policy that learned the traces has real entropy; the rest (results, copies,
the verdict) is determined. The reward looks at the answer alone, never at the search.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Iterator, Sequence

MAX_VALUE = 30
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
WORDS = ("numbers", "target", ":", "try", "=", "then", "no", "yes", "answer", "(", ")", "out", "stop")
VOCABULARY = (*WORDS, *OPERATORS, *(str(value) for value in range(MAX_VALUE + 1)))  # of prompts and completions
MISS_SCALE = 20  # an answer that misses the target by this much is worth nothing
MIN_TRIES, MAX_TRIES = 5, 27  # a trace gives up after a random number of them, so after 359 words at most


def expressions(numbers: Sequence[int]) -> Iterator[tuple[str, str, int, bool]]:
    """All ways to use each number once: two steps, of which one is in parentheses and the other has the third number.

    Yields each as an answer states it, as the search states it (without the verdict), its value, and whether the
    search tries it: where sums and products name the larger number, or the first step, first.
    """
    for a, b, c in itertools.permutations(numbers):
        for op1, op2 in itertools.product(OPERATORS, repeat=2):
            first = OPERATORS[op1](a, b)
            for c_leads in (False, True):
                left, right = (c, first) if c_leads else (first, c)
                value = OPERATORS[op2](left, right)
                answer = f"{c} {op2} ( {a} {op1} {b} )" if c_leads else f"( {a} {op1} {b} ) {op2} {c}"
                tried = f"try {a} {op1} {b} = {word(first)}"
                if word(first) != "out":
                    tried += f" then {left} {op2} {right} = {word(value)}"
                yield answer, tried, value, (op1 == "-" or a > b) and (op2 == "-" or not c_leads)


def word(value: int) -> str:
    return str(value) if 0 <= value <= MAX_VALUE else "out"


def make_prompt(rng: random.Random) -> str:
    """Draw a solvable problem: each value that its numbers can reach is equally likely to be the target."""
    numbers = rng.sample(range(2, 10), 3)
    results = {tried.split()[-1] for _, tried, _, _ in expressions(numbers)} - {"out"}
    return f"numbers {' '.join(map(str, numbers))} target {rng.choice(sorted(results, key=int))} :"


def parse_prompt(prompt: str) -> tuple[list[int], int]:
    """The numbers and the target."""
    _, *numbers, _, target, _ = prompt.split()
    return [int(number) for number in numbers], int(target)


def trace_text(prompt: str, rng: random.Random) -> str:
    """Draw a search: tries in random order, none twice, until one hits or a drawn limit is reached."""
    numbers, target = parse_prompt(prompt)
    order = [(answer, tried) for answer, tried, _, is_tried in expressions(numbers) if is_tried]
    rng.shuffle(order)
    max_tries = rng.randint(MIN_TRIES, MAX_TRIES)
    tries: dict[str, None] = {}  # in order; a first step out of range is the same try whatever was to follow
    for answer, tried in order:
        if tried.endswith(f" = {target}"):  # one that leaves the range ends in "out"
            return " ".join((*tries, tried, "yes answer", answer))
        tries[f"{tried} no"] = None
        if len(tries) == max_tries:
            break
    return " ".join((*tries, "stop"))


def reward(prompt: str, completion: str) -> float:
    """How close the answer that ends `completion` comes to the target, in [0, 1].

    1.0 for an answer that uses each number exactly once and equals the target; max(0, 0.5 * (1 - d / `MISS_SCALE`)) for
    one that misses it by d; 0 for no answer, or one with other numbers.
    """
    numbers, target = parse_prompt(prompt)
    answers = {answer: value for answer, _, value, _ in expressions(numbers)}
    value = answers.get(" ".join(completion.partition("answer")[2].split()))
    if value is None:
        return 0.0
    return 1.0 if value == target else max(0.0, 0.5 * (1 - abs(value - target) / MISS_SCALE))
