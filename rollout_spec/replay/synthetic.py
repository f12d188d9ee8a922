"""A stochastic target made of recorded text, for measuring drafts that know the noise.

The recorded samples of a prompt give counts of what followed each context of up to ORDER tokens, blended from short to
long: q_l(v) = (c_l(v) + KAPPA q_{l-1}(v)) / (n_l + KAPPA), q_0 the frequency of v. Fresh rollouts are sampled from the
longest known context's q with `rollout_spec.noise`. They stay close to what was recorded and still branch: after a
context that was seen once, the recorded continuation has probability 1 / (1 + KAPPA) and more.

Biases: the target is of the same family as the drafter's own model, so a drafter that has seen enough knows it exactly,
as it could not know a language model; and the target ignores what lies more than ORDER tokens back, so long matches
tell less than in real text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollout_spec.noise.host import gumbel
from rollout_spec.replay.traces import Problem, Rollout
from rollout_spec.types import Int32Array

ORDER = 12
"""Longest context that the policy knows."""
KAPPA = 0.5
"""Weight of the shorter context's distribution, in counts."""


class SyntheticPolicy:
    """The policy of one problem.

    Attributes:
        end_token: Ends a rollout; one more than the largest recorded token.

    Raises:
        ValueError: nothing was recorded.
    """

    def __init__(self, problem: Problem) -> None:
        texts = [rollout.tokens for rollout in problem.rollouts if rollout.tokens.size]
        if not texts:
            raise ValueError(f"prompt {problem.prompt_id!r} has no recorded tokens")
        self.prompt = problem.rollouts[0].prompt
        self.end_token = int(max(text.max() for text in texts)) + 1
        self._counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        head = self.prompt[-ORDER:].tolist()
        for tokens in texts:
            text = [*head, *tokens.tolist(), self.end_token]
            for at in range(len(head), len(text)):
                for length in range(min(at, ORDER) + 1):
                    self._counts[tuple(text[at - length : at])][text[at]] += 1
        self._known: dict[tuple[int, ...], tuple[Int32Array, NDArray[np.float64]]] = {}

    def probabilities(self, context: Sequence[int] | Int32Array) -> tuple[Int32Array, NDArray[np.float64]]:
        """(token ids int32 [n], probabilities float64 [n]) of what follows a context, prompt included. O(ORDER n)."""
        key = tuple(int(token) for token in context[max(0, len(context) - ORDER) :])
        while key and key not in self._counts:
            key = key[1:]
        if key not in self._known:
            blended: dict[int, float] = {}
            for start in range(len(key), -1, -1):
                counts = self._counts[key[start:]]
                kappa = KAPPA if blended else 0.0
                total = counts.total() + kappa
                blended = {token: kappa * q / total for token, q in blended.items()}
                for token, count in counts.items():
                    blended[token] = blended.get(token, 0.0) + count / total
            self._known[key] = np.array(list(blended), np.int32), np.array(list(blended.values()))
        return self._known[key]

    def next_token(self, context: Sequence[int] | Int32Array, seed: int, position: int) -> int:
        """The policy's own sample after a context; `position` is that of the context's last token (see `noise`)."""
        tokens, probabilities = self.probabilities(context)
        return int(tokens[(np.log(probabilities) + gumbel(seed, position, tokens)).argmax()])

    def sample(self, seed: int, max_tokens: int) -> Int32Array:
        """A rollout: int32 [n], n at most max_tokens, the end token included where it ended."""
        text = self.prompt.tolist()
        first = len(text)
        while len(text) < first + max_tokens and (len(text) == first or text[-1] != self.end_token):
            text.append(self.next_token(text[-ORDER:], seed, len(text) - 1))
        return np.array(text[first:], np.int32)

    def rollouts(self, seeds: Sequence[int], max_tokens: int, *, num_earlier: int) -> list[Rollout]:
        """Fresh rollouts, one per seed; the first `num_earlier` of them as epoch 0, the others as epoch 1."""
        samples = [self.sample(seed, max_tokens) for seed in seeds]
        return [
            Rollout(k, int(k >= num_earlier), self.prompt, text, (text.size,), seed)
            for k, (text, seed) in enumerate(zip(samples, seeds, strict=True))
        ]
