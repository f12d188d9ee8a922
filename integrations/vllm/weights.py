"""Notices when a worker gets new weights, in whichever way its trainer hands them over."""

from __future__ import annotations

import functools
from typing import Any


class WeightWatch:
    """Counts policy versions of one worker.

    Trainers load weights in many calls, one per parameter or per bucket, and some announce what they do in others. So
    calls only leave a mark: a version begins with the next step of the engine. Tensor-parallel ranks get the same calls
    between the same steps.

    Attributes:
        version: Policy versions so far; 0 as long as the engine has the weights that it was built with.
    """

    def __init__(self) -> None:
        self.version = 0
        self._is_announced = False

    def announce(self) -> None:
        """Weights are loaded."""
        self._is_announced = True

    def watch(self, model: Any) -> None:
        """Notice calls of `model.load_weights`, as TRL makes them without a method of the worker."""
        load_weights = getattr(model, "load_weights", None)
        if load_weights is None:
            return

        @functools.wraps(load_weights)
        def load_and_announce(*args: Any, **kwargs: Any) -> Any:
            self.announce()
            return load_weights(*args, **kwargs)

        model.load_weights = load_and_announce

    def begin_step(self) -> int | None:
        """The number of the policy version that begins with this step; None: it is still the last one's."""
        if not self._is_announced:
            return None
        self.version, self._is_announced = self.version + 1, False
        return self.version
