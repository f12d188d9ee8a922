"""Brute-force oracles for the drafters' indexes. Plain Python, quadratic, obvious."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rollout_spec.drafters.kernels import (
    BLEND,
    MAX_DEPTH,
    MAX_LEVELS,
    MIN_MATCH,
    NEGLIGIBLE_MASS,
    OWN_BASE,
)

Rollout = tuple[Sequence[int], int, float]
"""(text with the end of the prompt in front, length of that, weight)"""


def occurrences(rollouts: Sequence[Rollout], context: Sequence[int], length: int) -> list[tuple[int, int]]:
    """(rollout, position of the next token) wherever the last `length` tokens of `context` were continued."""
    suffix = list(context[len(context) - length :])
    return [
        (i, position)
        for i, (text, num_prompt, _) in enumerate(rollouts)
        for position in range(num_prompt, len(text))
        if position >= length and list(text[position - length : position]) == suffix
    ]


def continuations(rollouts: Sequence[Rollout], context: Sequence[int], length: int) -> dict[int, float]:
    """Weight of each token that followed the last `length` tokens of `context`."""
    weights: dict[int, float] = defaultdict(float)
    for i, position in occurrences(rollouts, context, length):
        weights[rollouts[i][0][position]] += rollouts[i][2]
    return dict(weights)


def longest_match(rollouts: Sequence[Rollout], context: Sequence[int]) -> int:
    """Length of the longest suffix of `context` (at most MAX_DEPTH) that was continued."""
    length = 0
    while length < min(len(context), MAX_DEPTH) and occurrences(rollouts, context, length + 1):
        length += 1
    return length


def tree_distribution(
    rollouts: Sequence[Rollout], context: Sequence[int], unit_weight: float = 1.0
) -> tuple[dict[int, float], int]:
    """(blended distribution, match length). Match lengths with the same occurrences count once."""
    longest = longest_match(rollouts, context)
    levels: list[list[tuple[int, int]]] = []
    for length in range(longest, 0, -1):
        found = occurrences(rollouts, context, length)
        if not levels or found != levels[-1]:
            levels.append(found)
    blended: dict[int, float] = defaultdict(float)
    mass = 1.0
    for depth, found in enumerate(levels):
        last = depth == len(levels) - 1 or depth == MAX_LEVELS - 1
        total = sum(rollouts[i][2] for i, _ in found) + (0.0 if last else BLEND * unit_weight)
        for i, position in found:
            blended[rollouts[i][0][position]] += mass * rollouts[i][2] / total
        mass *= BLEND * unit_weight / total
        if last or mass < NEGLIGIBLE_MASS:
            break
    return dict(blended), longest


def own_matches(text: Sequence[int], drafted: Sequence[int], max_match: int) -> list[tuple[int, int]]:
    """(position, match length) of earlier ends of the context, newest first; at least MIN_MATCH tokens agree."""
    context = [*text, *drafted]
    found = []
    for position in range(len(text) - 2, 0, -1):
        length = 0
        while length < min(max_match, position + 1) and text[position - length] == context[-1 - length]:
            length += 1
        if length >= MIN_MATCH:
            found.append((position, length))
    return found


def own_distribution(text: Sequence[int], drafted: Sequence[int], max_match: int) -> tuple[dict[int, float], int]:
    """(distribution, longest match) of a request's own context."""
    found = own_matches(text, drafted, max_match)
    if not found:
        return {}, 0
    longest = max(length for _, length in found)
    weights: dict[int, float] = defaultdict(float)
    for position, length in found:
        weights[text[position + 1]] += OWN_BASE ** (length - longest)
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}, longest
