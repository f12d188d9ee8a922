"""Problems of `reasoning-gym`, with worked solutions for the warm-up and the package's own verifier as the reward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

ANSWER = "Answer:"
"""Begins the last line of a solution; the verifier sees what follows it."""


class Problem(NamedTuple):
    """One problem."""

    prompt_id: str
    """Task, seed and number of the problem, e.g. "chain_sum/1/17"."""
    question: str
    solution: str
    """A worked solution that ends with the answer's line."""


class Task(NamedTuple):
    """A task of reasoning-gym."""

    options: dict[str, int]
    solve: Callable[[dict[str, Any]], str]
    """The steps that lead to an entry's answer, one per line."""


def _chain_sum(entry: dict[str, Any]) -> str:
    first, *rest = entry["metadata"]["expression"].split()
    total, lines = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        new = total + int(term) if sign == "+" else total - int(term)
        lines.append(f"{total} {sign} {term} = {new}")
        total = new
    return "\n".join(lines)


def _leg_counting(entry: dict[str, Any]) -> str:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    total, lines = 0, []
    for animal, count in entry["metadata"]["animals"].items():
        legs = count * ANIMALS[animal]
        lines.append(f"{count} {animal}: {count} * {ANIMALS[animal]} = {legs}, {total} + {legs} = {total + legs}")
        total += legs
    return "\n".join(lines)


def _letter_counting(entry: dict[str, Any]) -> str:
    letter, total, lines = entry["metadata"]["target_letter"], 0, []
    for word in entry["metadata"]["span"]:
        count = word.lower().count(letter)
        total += count
        lines.append(f"{word}: {' '.join(word.lower())}, {count} times, {total} so far")
    return "\n".join(lines)


def _gsm_symbolic(entry: dict[str, Any]) -> str:
    steps: str = entry["metadata"]["answer_cot"]
    return steps.split("####")[0].strip()


TASKS = {
    "chain_sum": Task({"min_terms": 3, "max_terms": 5, "min_digits": 1, "max_digits": 2}, _chain_sum),
    "leg_counting": Task({"min_animals": 2, "max_animals": 4, "max_instances": 9}, _leg_counting),
    "letter_counting": Task({"min_words": 3, "max_words": 5}, _letter_counting),
    "gsm_symbolic": Task({}, _gsm_symbolic),
}


@functools.lru_cache
def _dataset(task: str, seed: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=seed, size=100_000, **TASKS[task].options)


def make_problem(task: str, seed: int, number: int) -> Problem:
    """Problem `number` of a task's stream `seed`.

    Raises:
        KeyError: an unknown task.
        ImportError: reasoning-gym is missing.
    """
    entry = _dataset(task, seed)[number]
    solution = f"{TASKS[task].solve(entry)}\n{ANSWER} {entry['answer']}"
    return Problem(f"{task}/{seed}/{number}", entry["question"].strip(), solution)


def reward(prompt_id: str, completion: str) -> float:
    """1.0 where reasoning-gym's verifier accepts what follows the last "Answer:", else 0.0."""
    task, seed, number = prompt_id.split("/")
    dataset = _dataset(task, int(seed))
    answer = completion.rpartition(ANSWER)[2].strip() if ANSWER in completion else None
    return float(dataset.score_answer(answer=answer, entry=dataset[int(number)]) >= 1.0)
