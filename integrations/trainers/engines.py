"""What the engines of all of a trainer's processes have done, without waiting for any of them.

Each process publishes its engine's counters in torch.distributed's store after every generation, and the one that logs
reads what is there. That is no collective operation: a process that logs alone, or whose peers are late or gone, goes
on. Counters only grow, so what comes late is counted in a later log.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rollout_spec.stats import SpeculationStats

logger = logging.getLogger(__name__)

_NUMBERS = itertools.count()
"""All processes make trainers with several engines in the same order, so a trainer has the same number in each."""


class Progress(NamedTuple):
    """What an engine has done since it was attached."""

    stats: dict[str, Any]
    """`SpeculationStats.to_dict`."""
    num_tokens: int
    seconds: float
    """Of its generations."""
    drafter_bytes: int
    policy_version: int

    def since(self, earlier: Progress | None) -> Progress:
        """What is new."""
        if earlier is None:
            return self
        return self._replace(
            stats=SpeculationStats.between(earlier.stats, self.stats).to_dict(),
            num_tokens=self.num_tokens - earlier.num_tokens,
            seconds=self.seconds - earlier.seconds,
        )


class Engines:
    """The engines of a trainer.

    Args:
        replica: The number of this process's engine; the ranks of one tensor-parallel group share it.
        num_replicas: How many there are.
    """

    def __init__(self, replica: int, num_replicas: int) -> None:
        self._replica, self._num_replicas = replica, num_replicas
        number = next(_NUMBERS) if num_replicas > 1 else 0
        self._key = f"rollout_spec/{number}/engine/{{}}"

    @property
    def are_several(self) -> bool:
        """Whether there is something to share, and the means."""
        distributed = torch.distributed
        return self._num_replicas > 1 and distributed.is_available() and distributed.is_initialized()

    def publish(self, progress: Progress) -> None:
        """Say what this process's engine has done."""
        self._ask(lambda store: store.set(self._key.format(self._replica), json.dumps(progress)))

    def others(self) -> dict[int, Progress]:
        """What the other engines have done, by their numbers, as far as they have said. For the first process."""
        found: dict[int, Progress] = {}

        def read(store: Any) -> None:
            for replica in range(self._num_replicas):
                key = self._key.format(replica)
                if replica != self._replica and store.check([key]):
                    found[replica] = Progress(*json.loads(store.get(key)))

        self._ask(read)
        return found

    def _ask(self, call: Callable[[Any], Any]) -> None:
        """Use the store. If that fails, metrics are this engine's from then on, which ends no run."""
        try:
            call(torch.distributed.distributed_c10d._get_default_store())
        except Exception as error:
            logger.warning("rollout_spec's metrics are those of one engine from here on: %s", error)
            self._num_replicas = 1
