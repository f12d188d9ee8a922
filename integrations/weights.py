"""Notices when a worker gets new weights, in whichever way its trainer hands them over."""

from __future__ import annotations

import functools
from typing import Any

NOT_LOADING = ("init_", "prepare_", "fetch_", "compute_", "get_", "check_", "supports_")
"""Beginnings of the names of workers' methods that do something else with weights."""


def loads_weights(method: str) -> bool:
    """Whether a worker's method loads weights. Frameworks bring their own methods, whose names say what they do."""
    is_loading = "weight" in method or "refit" in method or method == "add_lora"
    is_pause = "sleep" in method or "wake" in method
    return is_loading and not is_pause and not method.startswith(NOT_LOADING)


class WeightWatch:
    """Counts policy versions of one worker.

    Trainers load weights in many calls, one per parameter or per bucket, and some announce what they do in others. So
    calls only leave a mark, and a version begins with the next step of the engine. Tensor-parallel ranks get the same
    calls between the same steps, so they count alike.

    Attributes:
        version: Policy versions so far; 0 as long as the engine has the weights that it was built with.
    """

    def __init__(self) -> None:
        self.version = 0
        self._num_pending = 0

    def mark(self, num_versions: int = 1) -> None:
        """Weights were loaded; several versions at once make older history go sooner."""
        self._num_pending = max(self._num_pending, num_versions)

    def follow(self, model: Any) -> None:
        """Mark from now on when `model.load_weights` is called, as TRL does without a method of the worker."""
        load_weights = getattr(model, "load_weights", None)
        if load_weights is None:
            return

        @functools.wraps(load_weights)
        def load_and_mark(*args: Any, **kwargs: Any) -> Any:
            self.mark()
            return load_weights(*args, **kwargs)

        model.load_weights = load_and_mark

    def begin_step(self) -> int | None:
        """The number of the policy version that begins with this step; None: it is still the last one's."""
        if not self._num_pending:
            return None
        self.version += self._num_pending
        self._num_pending = 0
        return self.version
