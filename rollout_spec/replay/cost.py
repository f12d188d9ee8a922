"""The time of an engine's steps as a curve over their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.checks import number, shown
from rollout_spec.files import read_json

Floats = NDArray[np.float64]
MAX_NUMBER = 1e15
"""Bound on the tokens and seconds of a curve, so that what is computed from them is finite."""


class EngineCost(NamedTuple):
    """Seconds of a step by its tokens, interpolated linearly; beyond the last point with the upper half's mean slope.

    `tokens` and `seconds` are float64 [n] with n >= 2; tokens rise, seconds do not fall.
    """

    name: str
    tokens: Floats
    seconds: Floats
    drafted_seconds: float
    """Extra seconds of a step with drafts, however many: other CUDA graphs, synchronous scheduling."""
    draft_seconds: float
    """Seconds of drafting per request, in steps that ask the drafter."""
    draft_call_seconds: float = 0.0
    """Seconds of drafting per step that asks the drafter, besides those per request."""
    cold_seconds: float = 0.0
    """Extra seconds of the first step with each number of tokens, in which kernels for that size are made."""
    request_seconds: float = 0.0
    """Seconds per request in every step, besides its tokens: reading its KV cache, and what else is not hidden."""
    host_seconds: float = 0.0
    """With asynchronous scheduling the host works while the device computes. No step takes less than this."""
    host_request_seconds: float = 0.0
    """What each request of a step adds to `host_seconds`."""

    def step(self, num_tokens: float) -> float:
        """Seconds of a step without drafts."""
        return float(self.steps(np.array([num_tokens]))[0])

    def steps(self, num_tokens: NDArray[Any]) -> Floats:
        """Seconds of steps without drafts, float64 of the shape of `num_tokens`."""
        half = (self.tokens.size - 1) // 2  # not the last two points alone: measured times may be equal there
        slope = (self.seconds[-1] - self.seconds[half]) / (self.tokens[-1] - self.tokens[half])
        beyond = np.maximum(np.asarray(num_tokens, np.float64) - self.tokens[-1], 0.0)
        return np.asarray(np.interp(num_tokens, self.tokens, self.seconds) + slope * beyond)

    def drafting(self, num_requests: int) -> float:
        """Seconds of asking the drafter in a step."""
        return self.draft_call_seconds + self.draft_seconds * num_requests

    def whole_step(self, num_requests: int, num_draft_tokens: int) -> float:
        """Seconds of a step, without those of the drafter and of a size's first step."""
        seconds = self.step(num_requests + num_draft_tokens) + self.request_seconds * num_requests
        seconds += self.drafted_seconds * (num_draft_tokens > 0)
        return max(seconds, self.host_seconds + self.host_request_seconds * num_requests)


def read_cost(path: Path) -> EngineCost:
    """Read a cost curve: JSON with `name`, `tokens`, `seconds` and, if wanted, the other fields of `EngineCost`.

    Raises:
        ValueError: the file is no JSON object, a field is missing or wrong, tokens do not rise, or seconds fall.
        OSError: the file cannot be read.
    """
    try:
        values = read_json(path)
        for name in ("name", "tokens", "seconds"):
            if name not in values:
                raise ValueError(f"{name} is missing")
        tokens, seconds = (_numbers(name, values[name]) for name in ("tokens", "seconds"))
        prices = [_numbers(name, [values.get(name, 0.0)])[0] for name in EngineCost._fields[3:]]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no cost curve: {error}") from None
    rising = np.all(np.diff(tokens) > 0) and np.all(np.diff(seconds) >= 0)
    if tokens.shape != seconds.shape or tokens.size < 2 or not rising or seconds[0] == 0:
        raise ValueError(f"{path}: tokens must rise and seconds must not fall, from above 0, two or more of each")
    return EngineCost(str(values["name"]), tokens, seconds, *map(float, prices))


def _numbers(name: str, values: object) -> Floats:
    """float64 of a list of numbers from 0 to MAX_NUMBER."""
    if not isinstance(values, list):
        raise TypeError(f"{name} must be a list of numbers, got {shown(values)}")
    expected = f"from 0 to {MAX_NUMBER:g}"
    return np.array([number(name, value, lambda n: 0 <= n <= MAX_NUMBER, expected) for value in values], np.float64)
