"""Which drafted tokens of a recorded rollout a verifier accepts, from the target's and the draft's logits.

Three ways to draw a drafted token, each with a lossless verifier:

    greedy         the draft's most probable token, accepted when the target samples it: with its probability
    probabilistic  a sample of the draft's distribution, accepted or replaced by rejection sampling with both
                   distributions: with probability sum_v min(target, draft)
    coupled        the draft's sample under the noise that the target samples with, accepted when both are equal
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.engines.trained_drafters import draft_logits, run_target
from rollout_spec.noise.host import derive_seed, gumbel


class Rollout(NamedTuple):
    """Token ids of a prompt and of what was sampled after it with a seed."""

    prompt: list[int]
    tokens: list[int]
    seed: int


Floats = NDArray[np.float64]
DRAWS = ("greedy", "probabilistic", "coupled")


class FirstToken(NamedTuple):
    """Sums over positions, for one drafted token at each.

    Attributes:
        positions: How many.
        overlap: sum_v min(target, draft): what rejection sampling accepts.
        argmax_probability: The target's probability of the draft's most probable token: what greedy drafts get.
        coupled: Drafts under the target's noise that equal the target's sample.
    """

    positions: float
    overlap: float
    argmax_probability: float
    coupled: float


def log_probabilities(logits: Tensor, temperature: float) -> Floats:
    """log softmax(logits / temperature) in float64."""
    return (logits.double() / temperature).log_softmax(-1).numpy()


def noise_of(seed: int, num_prompt_tokens: int, num_tokens: int, vocabulary: int) -> Floats:
    """The Gumbel noise of a rollout's tokens [n, V]: token j is sampled at the position of the token before it."""
    positions = num_prompt_tokens - 1 + np.arange(num_tokens)
    return gumbel(seed, positions[:, None], np.arange(vocabulary)).astype(np.float64)


def first_token(target: Floats, draft: Floats, noise: Floats) -> FirstToken:
    """How well drafts of one token do. target, draft: log-probabilities [n, V]; noise: the target's [n, V]."""
    best = draft.argmax(-1)
    return FirstToken(
        len(target),
        np.exp(np.minimum(target, draft)).sum(),
        np.exp(np.take_along_axis(target, best[:, None], 1)).sum(),
        ((draft + noise).argmax(-1) == (target + noise).argmax(-1)).sum(),
    )


def accepted_tokens(draw: str, tokens: NDArray, target: Floats, draft: Floats, noise: Floats, seed: int) -> NDArray:
    """Whether each token of a rollout is accepted when it is drafted, given that the rollout says it.

    Rejection sampling accepts a draft that equals the rollout's token x with probability min(1, draft(x) / target(x))
    in all: min(target, draft) of both, over target. That is drawn here, with `seed`.

    Args:
        tokens: [n].
        target: Log-probabilities [n, V].
        draft: Log-probabilities [depth, n, V], by the place in the draft.
        noise: [n, V].

    Returns:
        bool [depth, n].
    """
    if draw == "greedy":
        return draft.argmax(-1) == tokens
    if draw == "coupled":
        return (draft + noise).argmax(-1) == tokens
    if draw != "probabilistic":
        raise ValueError(f"draw must be one of {DRAWS}, got {draw!r}")
    at = tokens[:, None]
    log_ratio = (
        np.stack([np.take_along_axis(d, at, 1) for d in draft])[..., 0] - np.take_along_axis(target, at, 1)[:, 0]
    )
    rng = np.random.default_rng(derive_seed("draft_acceptance", seed))
    return np.log(rng.random(log_ratio.shape)) < log_ratio


def request_steps(accepted: NDArray) -> int:
    """Engine steps that a rollout takes. accepted: bool [depth, n] from `accepted_tokens`.

    The first token comes from the prompt's step, without a draft. Each later step emits the accepted tokens of its
    draft and one more.
    """
    depth, length = accepted.shape
    steps, at = 1, 1
    while at < length:
        run = 0
        while run < depth and at + run < length and accepted[run, at + run]:
            run += 1
        at += run + 1
        steps += 1
    return steps


def surprise_z(rollouts: list[tuple[NDArray, Floats]]) -> float:
    """How many standard errors rollouts' log-probability lies from its expectation under the target.

    A sampler that is too greedy, or drafts that are accepted too often, make it positive: rollouts that are more
    probable than samples of the target are.

    Args:
        rollouts: (tokens [n], the target's log-probabilities [n, V]).
    """
    excess = variance = 0.0
    for tokens, logprobs in rollouts:
        probabilities = np.exp(logprobs)
        safe = np.where(probabilities > 0, logprobs, 0.0)
        mean = (probabilities * safe).sum(-1)
        excess += (np.take_along_axis(logprobs, tokens[:, None], 1)[:, 0] - mean).sum()
        variance += ((probabilities * safe**2).sum(-1) - mean**2).sum()
    return float(excess / np.sqrt(variance))


class Recorded:
    """Rollouts of a policy, and what draft models would do for them.

    Args:
        policy: The target.
        epochs: Rollouts of each epoch.
        temperature: Theirs.
    """

    def __init__(self, policy: Any, epochs: Sequence[Sequence[Rollout]], temperature: float) -> None:
        self.policy, self.epochs, self.temperature = policy, epochs, temperature

    def all(self) -> Iterator[Rollout]:
        """Every rollout."""
        return (rollout for rollouts in self.epochs for rollout in rollouts)

    def target(self, rollout: Rollout) -> tuple[Floats, Floats]:
        """The target's log-probabilities [n, V] and noise [n, V]."""
        output = run_target(self.policy, torch.tensor([rollout.prompt + rollout.tokens]))
        logprobs = log_probabilities(output.logits[0, len(rollout.prompt) - 1 : -1], self.temperature)
        return logprobs, noise_of(rollout.seed, len(rollout.prompt), *logprobs.shape)

    def draft(self, model: Any, rollout: Rollout, depth: int) -> Floats:
        """Log-probabilities [depth, n, V] of a draft model, by the place in the draft."""
        token_ids = rollout.prompt + rollout.tokens
        logits = draft_logits(model, self.policy, token_ids, len(rollout.prompt), depth)
        return log_probabilities(logits, self.temperature)

    def request_steps(self, model: Any, depth: int, draws: Sequence[str]) -> dict[str, list[int]]:
        """Engine steps of each epoch's rollouts with drafts of up to `depth` tokens, by how these are drawn."""
        steps = {draw: [0] * len(self.epochs) for draw in draws}
        for epoch, rollouts in enumerate(self.epochs):
            for rollout in rollouts:
                tokens, (target, noise) = np.array(rollout.tokens), self.target(rollout)
                draft = self.draft(model, rollout, depth)
                for draw in draws:
                    accepted = accepted_tokens(draw, tokens, target, draft, noise, rollout.seed)
                    steps[draw][epoch] += request_steps(accepted)
        return steps

    def first_token(self, model: Any) -> FirstToken:
        """`first_token` at every position but the first, which the prompt's step samples."""
        total = np.zeros(len(FirstToken._fields))
        for rollout in self.all():
            target, noise = self.target(rollout)
            total += first_token(target[1:], self.draft(model, rollout, 1)[0, 1:], noise[1:])
        return FirstToken(*total.tolist())

    def surprise(self) -> float:
        """`surprise_z` of all rollouts."""
        return surprise_z([(np.array(rollout.tokens), self.target(rollout)[0]) for rollout in self.all()])

    def noise_mismatches(self, gap: float) -> int:
        """Tokens that lie further than `gap` below the best one under the rollout's noise."""
        wrong = 0
        for rollout in self.all():
            logprobs, noise = self.target(rollout)
            scores = logprobs + noise
            said = np.take_along_axis(scores, np.array(rollout.tokens)[:, None], 1)[:, 0]
            wrong += int((scores.max(-1) - said > gap).sum())
        return wrong
