"""The time of an engine's steps as a curve over their tokens. `rollout-spec doctor` writes measured curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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

    def step(self, num_tokens: float) -> float:
        """Seconds of a step without drafts."""
        return float(self.steps(np.array([num_tokens]))[0])

    def steps(self, num_tokens: NDArray[Any]) -> Floats:
        """Seconds of steps without drafts, float64 of the shape of `num_tokens`."""
        half = (self.tokens.size - 1) // 2  # not the last two points alone: measured times may be equal there
        slope = (self.seconds[-1] - self.seconds[half]) / (self.tokens[-1] - self.tokens[half])
        beyond = np.maximum(np.asarray(num_tokens, np.float64) - self.tokens[-1], 0.0)
        return np.asarray(np.interp(num_tokens, self.tokens, self.seconds) + slope * beyond)


def read_cost(path: Path) -> EngineCost:
    """Read a cost curve: JSON with `name`, `tokens`, `seconds` and, if wanted, `drafted_seconds`, `draft_seconds`,
    `draft_call_seconds`.

    Raises:
        ValueError: a field is missing, tokens do not rise, or seconds fall.
        OSError: the file cannot be read.
    """
    try:
        values = json.loads(path.read_text())
        cost = EngineCost(
            str(values["name"]),
            np.array(values["tokens"], np.float64),
            np.array(values["seconds"], np.float64),
            float(values.get("drafted_seconds", 0.0)),
            float(values.get("draft_seconds", 0.0)),
            float(values.get("draft_call_seconds", 0.0)),
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no cost curve: {error!r}") from None
    rising = np.all(np.diff(cost.tokens) > 0) and np.all(np.diff(cost.seconds) >= 0)
    if cost.tokens.ndim != 1 or cost.tokens.shape != cost.seconds.shape or cost.tokens.size < 2 or not rising:
        raise ValueError(f"{path}: tokens must rise and seconds must not fall, two values or more of each")
    return cost
