"""Training-free, lossless speculation for RL rollouts with vLLM and TRL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout_spec.config import RolloutSpecConfig, engine_kwargs
from rollout_spec.installation import install

if TYPE_CHECKING:
    from rollout_spec.integrations.trainers.trl import RolloutSpecGenerator

__all__ = ["RolloutSpecConfig", "RolloutSpecGenerator", "__version__", "engine_kwargs"]
__version__ = "0.4.0"


def __getattr__(name: str) -> Any:
    # Only the trainer hook needs transformers, so it is imported when it is asked for.
    if name == "RolloutSpecGenerator":
        try:
            from rollout_spec.integrations.trainers.trl import RolloutSpecGenerator
        except ModuleNotFoundError as error:
            if error.name not in ("trl", "transformers", "accelerate"):
                raise
            raise ImportError(f"{name} needs TRL ({error}): {install('trl')}") from error

        return RolloutSpecGenerator
    if name == "RolloutSpecProposer":  # which vLLM looks up by `speculative_config`'s path
        from rollout_spec.integrations.vllm.engine_v1 import RolloutSpecProposer

        return RolloutSpecProposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
