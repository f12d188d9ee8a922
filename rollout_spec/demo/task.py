"""Countdown with a spoken search: reach the target with three numbers, each used exactly once.

A prompt states the problem and a completion tries expressions until one hits the target or the search gives up::

    numbers 7 3 5 target 22 :
    try 3 - 7 = out no
    try 7 + 5 = 12 then 12 * 3 = out no
    try 5 - 3 = 2 then 2 * 7 = 14 no
    try 5 * 3 = 15 then 15 + 7 = 22 yes answer ( 5 * 3 ) + 7

(on one line, words separated by single spaces). `out` stands for any value outside 0..`MAX_VALUE`, which ends a try.
Which numbers and operators a try uses is random, so a policy that learned the traces has real entropy there; the
rest (results, copies, the verdict) is determined. The reward looks at the answer alone, never at the search.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

MAX_VALUE = 30
SMALLEST_NUMBER, LARGEST_NUMBER = 2, 9
OPERATORS = ("+", "-", "*")
OUT_OF_RANGE = "out"
GIVE_UP = "stop"
WORDS = ("numbers", "target", ":", "try", "=", "then", "no", "yes", "answer", "(", ")", OUT_OF_RANGE, GIVE_UP)
VOCABULARY = (*WORDS, *OPERATORS, *(str(value) for value in range(MAX_VALUE + 1)))
"""Every word that a prompt or a completion can contain."""

MISS_SCALE = 20
"""An answer that misses the target by this much is worth nothing."""
MIN_TRIES, MAX_TRIES = 5, 27
"""A trace gives up after a random number of tries in this range; `MAX_TRIES` bounds it to 359 words."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Three distinct numbers and the value to reach with them."""

    numbers: tuple[int, int, int]
    target: int


@dataclass(frozen=True, slots=True)
class Expression:
    """Two steps: `first op1 second`, whose value is then combined with the third number.

    Attributes:
        first, op1, second: the step in parentheses.
        op2: operator of the second step.
        third: the number that the first step leaves over.
        third_leads: whether the second step is `third op2 (...)` instead of `(...) op2 third`.
    """

    first: int
    op1: str
    second: int
    op2: str
    third: int
    third_leads: bool

    def inner_value(self) -> int:
        """Value of the step in parentheses."""
        return apply(self.op1, self.first, self.second)

    def operands(self) -> tuple[int, int]:
        """Operands of the second step, in their order."""
        inner = self.inner_value()
        return (self.third, inner) if self.third_leads else (inner, self.third)

    def value(self) -> int:
        """Value of the whole expression; may lie outside 0..`MAX_VALUE`."""
        return apply(self.op2, *self.operands())

    def reaches(self, target: int) -> bool:
        """Whether both steps stay in range and the second one gives `target`."""
        return in_range(self.inner_value()) and self.value() == target

    def text(self) -> str:
        """The expression as an answer states it."""
        inner = f"( {self.first} {self.op1} {self.second} )"
        return f"{self.third} {self.op2} {inner}" if self.third_leads else f"{inner} {self.op2} {self.third}"

    def try_text(self, target: int) -> str:
        """The expression as one try of the search: both results, and whether the target was hit."""
        steps = f"try {self.first} {self.op1} {self.second} = {value_text(self.inner_value())}"
        if in_range(self.inner_value()):
            left, right = self.operands()
            steps += f" then {left} {self.op2} {right} = {value_text(self.value())}"
        return f"{steps} {'yes' if self.reaches(target) else 'no'}"


def apply(operator: str, left: int, right: int) -> int:
    """Value of `left operator right`.

    Raises:
        ValueError: the operator is none of `OPERATORS`.
    """
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    raise ValueError(f"operator must be one of {OPERATORS}, got {operator!r}")


def in_range(value: int) -> bool:
    """Whether `value` has a word of its own."""
    return 0 <= value <= MAX_VALUE


def value_text(value: int) -> str:
    """The word for `value`."""
    return str(value) if in_range(value) else OUT_OF_RANGE


def make_problem(rng: random.Random) -> Problem:
    """Draw a solvable problem: distinct numbers in random order, and one of the values that they can reach.

    Every reachable value is equally likely, so targets with a single solution are as common as those with many.
    """
    first, second, third = rng.sample(range(SMALLEST_NUMBER, LARGEST_NUMBER + 1), 3)
    numbers = (first, second, third)
    values = {
        expression.value()
        for expression in expressions(numbers)
        if in_range(expression.inner_value()) and in_range(expression.value())
    }
    return Problem(numbers, rng.choice(sorted(values)))


def expressions(numbers: tuple[int, int, int]) -> list[Expression]:
    """All 48 ways to use each number once. Sums and products name the larger number, or the first step, first."""
    return [
        Expression(first, op1, second, op2, third, third_leads)
        for first, second, third in itertools.permutations(numbers)
        for op1, op2 in itertools.product(OPERATORS, repeat=2)
        for third_leads in (False, True)
        if (op1 == "-" or first > second) and (op2 == "-" or not third_leads)
    ]


def prompt_text(problem: Problem) -> str:
    """The prompt that states `problem`."""
    first, second, third = problem.numbers
    return f"numbers {first} {second} {third} target {problem.target} :"


def parse_prompt(prompt: str) -> Problem:
    """The problem that `prompt_text` stated.

    Raises:
        ValueError: `prompt` does not have that form.
    """
    match prompt.split():
        case ["numbers", first, second, third, "target", target, ":"] if all(
            word.isdecimal() for word in (first, second, third, target)
        ):
            return Problem((int(first), int(second), int(third)), int(target))
    raise ValueError(f"prompt must read 'numbers A B C target T :', got {prompt!r}")


def trace_text(problem: Problem, rng: random.Random) -> str:
    """Draw a search for `problem`: tries in random order, none twice, until one hits or a drawn limit is reached."""
    order = expressions(problem.numbers)
    rng.shuffle(order)
    max_tries = rng.randint(MIN_TRIES, MAX_TRIES)
    words: list[str] = []
    tried: set[str] = set()
    for expression in order:
        text = expression.try_text(problem.target)
        if text in tried:  # a first step that leaves the range ends a try, whatever was to follow
            continue
        tried.add(text)
        words.append(text)
        if expression.reaches(problem.target):
            return " ".join((*words, "answer", expression.text()))
        if len(tried) == max_tries:
            break
    return " ".join((*words, GIVE_UP))


def parse_answer(completion: str) -> Expression | None:
    """The expression that ends `completion`, or None when it does not end in exactly one well-formed answer."""
    _, separator, answer = completion.partition("answer")
    if not separator:
        return None
    match answer.split():
        case ["(", first, op1, second, ")", op2, third]:
            third_leads = False
        case [third, op2, "(", first, op1, second, ")"]:
            third_leads = True
        case _:
            return None
    if op1 not in OPERATORS or op2 not in OPERATORS or not all(n.isdecimal() for n in (first, second, third)):
        return None
    return Expression(int(first), op1, int(second), op2, int(third), third_leads)


def reward(problem: Problem | str, completion: str) -> float:
    """How close the answer that ends `completion` comes to the target, in [0, 1].

    1.0 for an answer that uses each number exactly once and equals the target; an answer that misses the target by d
    gets max(0, 0.5 * (1 - d / `MISS_SCALE`)); no answer, or one with other numbers, 0. The search before the answer
    is not checked, nor whether a step of the answer leaves 0..`MAX_VALUE`.

    Args:
        problem: the problem, or the prompt that states it.
        completion: the generated text without special tokens.

    Raises:
        ValueError: `problem` is text but not a prompt.
    """
    if isinstance(problem, str):
        problem = parse_prompt(problem)
    answer = parse_answer(completion)
    if answer is None or sorted((answer.first, answer.second, answer.third)) != sorted(problem.numbers):
        return 0.0
    miss = abs(answer.value() - problem.target)
    return 1.0 if miss == 0 else max(0.0, 0.5 * (1 - miss / MISS_SCALE))
