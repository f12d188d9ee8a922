"""Whether the passes of a model drafter pay, by how many requests a step has.

A model's passes cost time in every step, whatever becomes of its drafts, and history may draft as well without them. So
both ways are tried in turn, for some steps each, and the one with more tokens per second is kept. The other one is
tried again now and then, as the policy and the history change. Compared are whole steps, with all that they cost.

Simulated with the tokens per step of `bench_model_drafters.jsonl`, against a model that always drafts: where its passes
take 20 % of a step without them, rollouts are 2 to 5 % faster beside a trained model and 12 % beside one that is rarely
right, after 4,500 steps; where they take 5 %, from 0.8 % slower, which is what the trials cost, to 3 % faster.

The model's first pass is made in any case, as it fills the model's KV cache: with a gap there, later drafts of the same
requests would be wrong.
"""

from __future__ import annotations

from collections import deque

from rollout_spec.budget.estimates import median

TRIAL_STEPS = 16
"""Steps that are taken in one way before the other can be tried."""
SETTLING_STEPS = 2
"""Of these, the first ones are not counted: their drafts were made in the other way."""
KEPT_TRIALS = 3
"""The speed of a way is the median of so many last trials."""
STEPS_BETWEEN_TRIALS = 512
"""Steps after which the slower way is tried again."""


class _Size:
    """What is known for about one number of requests."""

    def __init__(self) -> None:
        self.uses_model = True
        self.num_steps = 0  # since the way was last changed
        self.num_tokens = 0
        self.seconds: list[float] = []
        self.speeds: tuple[deque[float], deque[float]] = deque(maxlen=KEPT_TRIALS), deque(maxlen=KEPT_TRIALS)

    def observe(self, num_tokens: int, seconds: float, uses_model: bool) -> None:
        if uses_model != self.uses_model:
            return
        self.num_steps += 1
        if self.num_steps <= SETTLING_STEPS:
            return
        self.num_tokens += num_tokens
        self.seconds.append(seconds)
        if len(self.seconds) == TRIAL_STEPS - SETTLING_STEPS:
            # Other work on the machine makes single steps longer: their median counts, not their sum.
            typical = max(median(self.seconds) * len(self.seconds), 1e-9)
            self.speeds[self.uses_model].append(self.num_tokens / typical)
            self.num_tokens, self.seconds = 0, []
            self._choose()

    def _choose(self) -> None:
        without, with_model = self.speeds
        if len(without) < KEPT_TRIALS or len(with_model) < KEPT_TRIALS:
            wanted = len(with_model) <= len(without)
        elif self.num_steps >= STEPS_BETWEEN_TRIALS:
            wanted = not self.uses_model
        else:
            wanted = median(with_model) >= median(without)
        if wanted != self.uses_model:
            self.uses_model, self.num_steps = wanted, 0


class ModelBudget:
    """Decides, step by step, whether a model drafts. The same observations give the same decisions."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # by floor(log2) of the number of requests

    def wants_model(self, num_requests: int) -> bool:
        """Whether the model shall draft at the end of a step with so many requests. O(1)."""
        return self._size(num_requests).uses_model

    def observe_step(self, num_requests: int, num_tokens: int, seconds: float, *, uses_model: bool) -> None:
        """Learn what a step took, prompts apart. O(1), with every 16th O(KEPT_TRIALS).

        Args:
            num_requests: Requests that sampled.
            num_tokens: What they sampled.
            seconds: The whole step, the model's passes included.
            uses_model: Whether it made these. Tensor-parallel ranks learn of steps some time after them, when they may
                have decided otherwise; such a step is not counted.
        """
        self._size(num_requests).observe(num_tokens, seconds, uses_model)

    def speeds(self) -> dict[int, tuple[float, float]]:
        """By the least number of requests of a size: tokens per second (without the model, with it), where known."""
        known = {octave: size.speeds for octave, size in self._sizes.items() if all(size.speeds)}
        return {2**octave: (median(without), median(with_)) for octave, (without, with_) in sorted(known.items())}

    def _size(self, num_requests: int) -> _Size:
        octave = max(num_requests, 1).bit_length() - 1
        return self._sizes.setdefault(octave, _Size())
