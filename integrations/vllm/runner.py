"""What the adapters of vLLM's two model runners have in common."""

from __future__ import annotations

from rollout_spec.integrations.vllm.commands import Speculation
from rollout_spec.integrations.vllm.weights import WeightWatch


class HistoryKeepingAdapter:
    """Begins and ends the history that outlives an engine.

    Attributes:
        weights: Notices when the worker gets new ones.
    """

    weights: WeightWatch
    _speculation: Speculation | None

    def load_history(self) -> None:
        """Take in the history of earlier runs. Called once the engine is built, before its first request."""
        if self._speculation is not None and self._speculation.engine_history is not None:
            self.weights.version = self._speculation.engine_history.load()

    def close(self) -> None:
        """Called when the worker shuts down."""
        if self._speculation is not None:
            self._speculation.close()
