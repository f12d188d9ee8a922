"""Brute-force oracles for the drafters' indexes. Plain Python, quadratic, obvious."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Text(NamedTuple):
    """A prompt or a rollout."""

    problem: int
    before: Sequence[int]
    """What its contexts reach back into: a rollout's prompt."""
    tokens: list[int]


Place = tuple[int, int]
"""(document, index of a token in it)"""


def common_suffix(left: Sequence[int], right: Sequence[int], limit: int) -> int:
    """How many last tokens agree, at most `limit`."""
    length = 0
    while length < min(len(left), len(right), limit) and left[-1 - length] == right[-1 - length]:
        length += 1
    return length


def matches(texts: Mapping[int, Text], problem: int, context: Sequence[int], limit: int) -> dict[Place, int]:
    """Every token of the problem whose context ends with the last token of `context`, and how far the two agree."""
    found = {}
    for document, text in texts.items():
        whole = [*text.before, *text.tokens]
        for i in range(len(text.tokens) if text.problem == problem else 0):
            end = len(text.before) + i
            length = common_suffix(whole[max(0, end - limit) : end], context, limit)
            if length:
                found[document, i] = length
    return found


def blend(candidates: Iterable[tuple[Mapping[int, float], int, float]], weight: float) -> dict[int, float]:
    """Probability of each next token from (tokens' probabilities, match length, weight of the candidate).

    q_l = (weights of the candidates that match at least l tokens + weight * q of the next shorter length) / their sum.
    """
    candidates = list(candidates)
    q: dict[int, float] = {}
    for level in sorted({length for _, length, _ in candidates}):
        new: dict[int, float] = defaultdict(float)
        total = 0.0
        for distribution, length, votes in candidates:
            if length >= level:
                total += votes
                for token, probability in distribution.items():
                    new[token] += votes * probability
        q = {token: (new[token] + weight * q.get(token, 0.0)) / (total + weight) for token in {*new, *q}}
    return q
