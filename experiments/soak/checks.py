"""What a soak checks: rollouts against those without speculation, counters, and that nothing grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.soak.engines import Answer, Rollout
from experiments.soak.workload import Request, Round, all_tokens
from rollout_spec.noise.host import gumbel

CLOSE = 1e-3
"""Logits vary by about 1e-6 with the batch: two tokens whose perturbed logits are this close may change places."""
NEAR = 2e-3
"""So much may a log-probability differ for the same reason."""


@dataclass
class Compared:
    """Counts of a comparison.

    Attributes:
        rollouts: That were compared, and as a whole where neither the client left nor weights changed.
        ties: Rollouts that go apart where two tokens were equally good but for rounding; compared up to there.
        differences: What may not be, in words.
    """

    rollouts: int = 0
    tokens: int = 0
    ties: int = 0
    differences: list[str] = field(default_factory=list)


def compare_round(round_: Round, ours: Answer, reference: Answer) -> Compared:
    """Compare all rollouts of a round with those of the engine without speculation."""
    found = Compared()
    for request in round_.requests:
        for index in range(request.params["n"]):
            a, b = (answer.rollouts.get((request.key, index), Rollout()) for answer in (ours, reference))
            _compare(request, index, a, b, found)
    return found


def _compare(request: Request, index: int, a: Rollout, b: Rollout, found: Compared) -> None:
    found.rollouts += 1
    name = f"{request.key}/{index}"
    same_weights = a.at_new_weights == b.at_new_weights
    limit = min(len(a.token_ids), len(b.token_ids))
    if not same_weights:
        limit = int(min(limit, a.at_new_weights, b.at_new_weights))
    at = next((i for i in range(limit) if a.token_ids[i] != b.token_ids[i]), limit)
    found.tokens += at
    for i in range(min(at, len(a.top), len(b.top))):
        token = a.token_ids[i]
        if token not in a.top[i] or not math.isclose(a.top[i][token], b.top[i][token], abs_tol=NEAR):
            found.differences.append(f"{name}: log-probability of token {i}: {a.top[i].get(token)}, {b.top[i][token]}")
            return
    if at < limit:
        if _is_tie(request, index, at, a.token_ids[at], b):
            found.ties += 1
        else:
            found.differences.append(f"{name}: token {at} is {a.token_ids[at]} instead of {b.token_ids[at]}")
        return
    if request.leave_after is not None or not same_weights:
        return
    whole = [(rollout.token_ids, rollout.text, rollout.finish_reason, rollout.stop_reason) for rollout in (a, b)]
    if whole[0] != whole[1]:
        found.differences.append(f"{name}: {whole[0]} instead of {whole[1]}")


def _is_tie(request: Request, index: int, at: int, token: int, reference: Rollout) -> bool:
    """Whether another token was as good as the reference's, but for rounding."""
    logprobs = reference.top[at]
    values = np.array([logprobs.get(one, -np.inf) for one in all_tokens().tolist()])
    if request.params["temperature"] > 0:
        seed, position = request.params["seed"] + index, len(request.prompt) + at - 1
        values = values + gumbel(seed, position, all_tokens())
    return bool(values.max() - values[token] < CLOSE)


def check_answer(round_: Round, ours: Answer, before: dict[str, Any]) -> list[str]:
    """What may not be in counters and in what is left of requests.

    Args:
        before: The counters before the round.
    """
    wrong = []
    grown = {
        name: ours.stats[name] - before.get(name, 0) for name in ours.stats if not isinstance(ours.stats[name], list)
    }
    if grown["emitted_tokens"] > grown["accepted_tokens"] + grown["request_steps"]:
        wrong.append(f"more emitted than accepted tokens and one per request-step: {grown}")
    if grown["accepted_tokens"] > grown["draft_tokens"]:
        wrong.append(f"more accepted than drafted: {grown}")
    returned = sum(len(rollout.token_ids) for rollout in ours.rollouts.values())
    if returned > grown["emitted_tokens"]:
        wrong.append(f"{returned} tokens returned, {grown['emitted_tokens']} emitted")
    if ours.stats["drafter_errors"]:
        wrong.append("the drafter has raised")
    for rank, checked in enumerate(ours.checks):
        if checked["live"] > 1:  # the probe's end is seen with the next request
            wrong.append(f"rank {rank}: state of {checked['live']} requests is left after round {round_.number}")
    return wrong


def slope(values: Sequence[float]) -> tuple[float, float]:
    """(mean change per value, its standard error) of a line through evenly spaced values, without the first third.

    The error is that of means of ten blocks, which are nearly independent where single values are not.
    """
    rest = np.asarray(values[len(values) // 3 :], float)
    if rest.size < 20:
        return math.nan, math.nan
    blocks = np.array([block.mean() for block in np.array_split(rest, 10)])
    x = np.arange(10) - 4.5
    fitted = float((x * blocks).sum() / (x * x).sum())
    residuals = blocks - blocks.mean() - fitted * x
    error = math.sqrt(float((residuals**2).sum()) / 8 / float((x * x).sum()))
    per_value = 10 / rest.size
    return fitted * per_value, error * per_value
