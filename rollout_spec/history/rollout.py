"""What history keeps of an ended rollout."""

from __future__ import annotations

from typing import NamedTuple

from rollout_spec.features.format import Features
from rollout_spec.types import Int32Array

CONTEXT_TOKENS = 32
"""Last tokens of a prompt that are kept with its rollouts: drafters compare contexts of at most so many tokens."""


FIRST_TIME = 10**9
"""Of `Rollout.order`: no Unix time is lower, and no step of a log as high, so what is imported is the oldest."""


class Root(NamedTuple):
    """By what a prompt is recognised at the beginning of a later one; see `rollout_spec.history.problems`."""

    length: int
    """Its tokens."""
    whole: int
    """Hash of all of them, 64 bits."""


class Rollout(NamedTuple):
    """An ended rollout."""

    problem_id: int
    """Rollouts of the same problem have the same number, 64 bits."""
    context: Int32Array
    """int32 [at most CONTEXT_TOKENS]: the end of its prompt."""
    tokens: Int32Array
    """int32 [n]: what was sampled."""
    features: Features | None = None
    """int64 [n, FEATURE_WORDS], what the target saw at each token; None: not known."""
    root: Root | None = None
    """The prompt that its conversation begins with; None: the caller has named the problem, or it is not known."""
    order: int = 0
    """Rollouts of a higher one are newer. Of an engine: the Unix time at which its generation began. Below FIRST_TIME:
    of an import, the log's step; or of rollout_spec 0.3, which counted policy versions."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it takes in a history."""
        return self.context.size + self.tokens.size
