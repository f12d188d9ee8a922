"""What a soak tells its engines and hears from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from experiments.soak.workload import ADAPTER_VERSIONS, ADAPTERS, MAX_MODEL_LEN, VOCAB_SIZE, Request

PROBE = "probe"
"""Key of the request of one token that ends each round: with it the drafter sees that the others have ended."""
BLOCKS = 12
"""Of the key-value cache, 32 tokens each: too few for a round's requests, so that some are preempted."""
START_SECONDS, ROUND_SECONDS = 300, 300
"""Within these an engine must be there, and a round must end; otherwise it hangs."""
SEARCH_PATH = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])}
"""So that the engine's processes find the workers' methods."""
ADAPTER_NAMES = [f"{name}-v{version}" for name in ADAPTERS for version in range(ADAPTER_VERSIONS)]


@dataclass
class Rollout:
    """What a client got. `top` has the log-probabilities of each position by token."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    top: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None
    at_new_weights: float = float("inf")
    """Its tokens when weights changed during the round."""


@dataclass
class Answer:
    """What an engine says of a round.

    Attributes:
        rollouts: By request and by number in the request.
        has_new_weights: Whether weights have changed during the round.
        stats, history: Of these commands.
        checks: Of `SoakWorker.soak_check`, of each rank.
        events: How often each happened.
        memory_bytes, open_files: Of all processes of the engine.
        seconds: That the round took.
    """

    rollouts: dict[tuple[str, int], Rollout] = field(default_factory=dict)
    has_new_weights: bool = False
    stats: dict[str, Any] = field(default_factory=dict)
    history: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, int]] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)
    memory_bytes: int = 0
    open_files: int = 0
    seconds: float = 0.0

    def rollout(self, key: str, index: int) -> Rollout:
        """That of a request's sample."""
        if (key, index) not in self.rollouts:
            self.rollouts[key, index] = Rollout(at_new_weights=0 if self.has_new_weights else float("inf"))
        return self.rollouts[key, index]

    def begin_new_weights(self) -> None:
        """The rest is sampled by other weights."""
        self.has_new_weights = True
        for rollout in self.rollouts.values():
            rollout.at_new_weights = min(rollout.at_new_weights, len(rollout.token_ids))

    def count(self, name: str, number: int = 1) -> None:
        """Note that something happened."""
        self.events[name] = self.events.get(name, 0) + number


@dataclass(frozen=True)
class Plan:
    """How an engine is built.

    Attributes:
        options: Fields of `RolloutSpecConfig`.
        arguments: Of the engine, on top of those that all engines of a soak have.
    """

    model: str
    log: str
    options: Mapping[str, Any]
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]

    @property
    def speculates(self) -> bool:
        """Whether it is the one that is tested, and not the one that it is compared with."""
        return self.options.get("speculation", True)

    def engine_arguments(self) -> dict[str, Any]:
        """Of `vllm.LLM`, without those that `rollout_spec.engine_kwargs` gives."""
        return {
            "dtype": "float32", "enforce_eager": True, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16,
            "max_num_batched_tokens": 96, "block_size": 32, "num_gpu_blocks_override": BLOCKS,
            "logprobs_mode": "processed_logprobs", "max_logprobs": VOCAB_SIZE,
            "worker_extension_cls": "experiments.soak.worker.SoakWorker", **self.arguments,
        }  # fmt: skip


def sampling_arguments(request: Request, *, is_reference: bool) -> dict[str, Any]:
    """`request.params` for an engine. The one that ours is compared with gives every log-probability."""
    return {**request.params, "logprobs": VOCAB_SIZE} if is_reference else dict(request.params)


def usage(pid: int) -> tuple[int, int]:
    """(bytes in memory, open files) of a process and its children."""
    memory = files = 0
    process = psutil.Process(pid)
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            memory += one.memory_info().rss
            files += one.num_fds()
    return memory, files
