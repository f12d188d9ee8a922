"""What a soak asks of an engine's workers, on top of vLLM's own methods: `worker_extension_cls`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm import _custom_ops

from experiments.soak.workload import weights_of

_custom_ops._supports_onednn = False  # on a CPU vLLM packs weights for it, and cannot load others any more


class SoakWorker:
    """Methods that `collective_rpc` calls on each rank."""

    model_runner: Any
    model_config: Any

    def soak_set_weights(self, version: int) -> None:
        """Load a policy version's weights, as a trainer does."""
        self.model_runner.model.load_weights(weights_of(Path(self.model_config.model), version))

    def soak_check(self) -> dict[str, int]:
        """Check the drafter's structures. Returns how much state of requests is left. Raises AssertionError."""
        session = self.model_runner.rollout_spec.session
        if session is None:
            return {"live": 0}
        session.drafter.check_integrity()
        return {"live": len(session.live)}
