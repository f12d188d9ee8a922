"""Notices that the drafts of a model have become rarely right, as they do when it does not get the policy's updates.

Weight updates reach the target, and not what a drafter has of its own; sleep level 2 discards that too. Rollouts stay
those of the target, so nothing but the drafts' success tells.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MIN_TRIALS = 400
"""Drafted tokens by which a version is judged; versions with fewer are judged together with the next."""

MIN_RATE = 0.05
"""Drafts that are right less often are hardly worth the model's forward passes."""

MAX_LOSS = 0.5
"""Share of the best version's rate below which something has been lost."""

NUM_STANDARD_ERRORS = 2
"""What chance may have added to the best version's rate, and taken from the last one's."""


class _Trials(NamedTuple):
    """Outcomes of the first drafted tokens of one policy version, or of several in a row."""

    first: int  # versions
    last: int
    reached: int = 0
    right: int = 0

    @property
    def rate(self) -> float:
        return self.right / self.reached

    @property
    def margin(self) -> float:
        """What the rate may be off by chance."""
        return NUM_STANDARD_ERRORS * math.sqrt(self.rate * (1 - self.rate) / self.reached)

    def __str__(self) -> str:
        versions = f"version {self.first}" if self.first == self.last else f"versions {self.first} to {self.last}"
        return f"{100 * self.rate:.1f} % of {self.reached} in policy {versions}"


class DraftWatch:
    """Says once that a model's drafts have become rarely right.

    They have if, with allowance for chance, fewer than 5 % of them were right in a version, or fewer than half of those
    that were right in the best version before it.
    """

    def __init__(self) -> None:
        self._has_spoken = False
        self._counted = 0, 0
        self._best: _Trials | None = None
        self._current = _Trials(0, 0)

    def observe(self, version: int, reached: int, right: int) -> None:
        """Called when a policy version begins; may be called more often. Says what there is to say in vLLM's log.

        Arguments and errors as of `judge`.
        """
        message = self.judge(version, reached, right)
        if message is not None:
            from vllm.logger import init_logger

            init_logger("vllm.plugins.rollout_spec").warning("%s", message)

    def judge(self, version: int, reached: int, right: int) -> str | None:
        """Learn what became of drafts.

        Args:
            version: The version that is in use from now on; 0 as long as the engine has the weights it was built with.
            reached: First drafted tokens whose outcome is known, since the engine started.
            right: Those of them that the target said too.

        Returns:
            A warning, the first time that there is cause for one; otherwise None.

        Raises:
            ValueError: The version is lower than the last one, or the counts cannot be.
        """
        was_reached, was_right = self._counted
        if version < self._current.last:
            raise ValueError(f"version must not fall, got {version} after {self._current.last}")
        if not 0 <= right - was_right <= reached - was_reached:
            raise ValueError(
                f"reached and right must be counts since the start, got {reached} and {right} after "
                f"{was_reached} and {was_right}"
            )
        self._counted = reached, right
        current = self._current._replace(
            reached=self._current.reached + reached - was_reached, right=self._current.right + right - was_right
        )
        is_judged = current.reached >= MIN_TRIALS
        message = self._judge(current) if is_judged and not self._has_spoken else None
        if version > current.last:
            if is_judged:
                if self._best is None or current.rate > self._best.rate:
                    self._best = current
                current = _Trials(version, version)
            elif not current.reached:
                current = _Trials(version, version)
            else:
                current = current._replace(last=version)
        self._current = current
        return message

    def _judge(self, trials: _Trials) -> str | None:
        highest, best = trials.rate + trials.margin, self._best
        has_fallen = best is not None and highest < MAX_LOSS * (best.rate - best.margin)
        if highest >= MIN_RATE and not has_fallen:
            return None
        self._has_spoken = True
        before = f", after {best}" if best is not None and best.rate > trials.rate else ""
        return (
            f"The drafts of speculative_config's model are rarely right: {trials}{before}, counting the first drafted "
            "token of each draft. Rollouts are not affected, but the model costs time and saves little. Its weights "
            "are probably stale or lost: updates of the policy's weights do not reach what the drafter has of its "
            "own, and sleep level 2 discards it. Update the drafter's weights too, and load them again after sleep "
            "level 2 (with vLLM 0.32 or later, sleep_preserve_parameter_names=['draft.*'] keeps them), or remove the "
            "model."
        )
