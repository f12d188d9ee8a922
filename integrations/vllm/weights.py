"""Notices when a worker gets new weights, in whichever way its trainer hands them over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

NOT_LOADING = ("init_", "prepare_", "fetch_", "compute_", "get_", "check_", "supports_")
"""Beginnings of the names of workers' methods that do something else with weights."""


def loads_weights(method: str) -> bool:
    """Whether a worker's method loads weights. Frameworks bring their own methods, whose names say what they do."""
    is_loading = "weight" in method or "refit" in method
    is_pause = "sleep" in method or "wake" in method
    return is_loading and not is_pause and not method.startswith(NOT_LOADING)


class WeightWatch:
    """Counts policy versions of one worker.

    Trainers load weights in many calls, one per parameter or per bucket, some announce what they do in others, and some
    load the same weights again before every generation. So calls only leave a mark. With the next step of the engine a
    version begins if a checksum of the model's parameters has changed. Tensor-parallel ranks get the same calls between
    the same steps, but hold different parts of the parameters: a version begins on all of them if one part has changed.

    Args:
        on_any_rank: See `ranks.agreeing_on_any`. None: there is a single rank.

    Attributes:
        version: Policy versions so far; 0 as long as the engine has the weights that it was built with.
    """

    def __init__(self, on_any_rank: Callable[[bool], bool] | None = None) -> None:
        self.version = 0
        self._on_any_rank = on_any_rank
        self._model: Any = None
        self._checksum: Any = None  # of the last version's parameters
        self._is_marked = False
        self._num_announced = 0

    def mark(self) -> None:
        """Weights may have been loaded. Where no model is followed, they have."""
        self._is_marked = True

    def announce(self, num_versions: int = 1) -> None:
        """There are new weights, in the parameters or elsewhere; several versions make older history go sooner."""
        self._num_announced = max(self._num_announced, num_versions)

    def follow(self, model: Any) -> None:
        """Compare this model's parameters from now on, which are those that the engine was built with.

        Also marks when `model.load_weights` is called, as TRL does without a method of the worker.
        """
        self._model, self._checksum = model, _checksum(model)
        load_weights = getattr(model, "load_weights", None)
        if load_weights is None:
            return

        @functools.wraps(load_weights)
        def load_and_mark(*args: Any, **kwargs: Any) -> Any:
            self.mark()
            return load_weights(*args, **kwargs)

        model.load_weights = load_and_mark

    def begin_step(self) -> int | None:
        """The number of the policy version that begins with this step; None: it is still the last one's.

        Waits for the device if there is a mark.
        """
        if not self._is_marked and not self._num_announced:
            return None
        num_versions = max(self._num_announced, int(self._have_weights_changed()))
        self._is_marked, self._num_announced = False, 0
        self.version += num_versions
        return self.version if num_versions else None

    def _have_weights_changed(self) -> bool:
        """Whether the parameters are others than when this was last called, or followed."""
        if self._model is None:
            return self._is_marked
        before, self._checksum = self._checksum, _checksum(self._model)
        has_changed = not self._checksum.equal(before)
        return has_changed if self._on_any_rank is None else self._on_any_rank(has_changed)


def _checksum(model: Any) -> Any:
    from rollout_spec.integrations.vllm.checksum import checksum  # imports torch, which the plugin's hooks do without

    return checksum(model)
