"""What the host takes for a step, which drafts cost nothing to fill.

A host that schedules, prepares and launches steps, and reads what they sampled, takes milliseconds for each, and more
for many requests. A GPU that needs less waits for it: on an H100, steps of a 1.5B model kept it busy for a third of the
time (experiments/results/README.md). Until the device has as much to do as the host, verifying a further draft token
takes no time at all, which vLLM's adaptive verification, that weighs the device's time alone, does not know.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

STEPS = 16
"""As many of the last steps say what the host takes, by their median: some read prompts, and requests come and go."""
SHARE = 0.9
"""Of the host's time that the device gets to fill: the rest shows that it still waits."""


class HostTime:
    """Lets vLLM's adaptive verification count a step's time as at least the host's.

    The host's time is that from one forward pass's launch to the next one's. It is known where the device had finished
    the step before when the next one was launched. Where it had not, the host takes at most that long.

    Args:
        manager: vLLM's `AdaptiveVerificationManager`, which has measured what steps cost.
        timing: The runner's `StepTimingCollector`, which is told when a forward pass is launched.
        share: Gives all tensor-parallel ranks the first one's object; None for a single rank.
    """

    def __init__(self, manager: Any, timing: Any, share: Callable[[Any], Any] | None) -> None:
        self.milliseconds = 0.0
        self._manager = manager
        self._share = share
        self._launched = time.perf_counter()
        self._last: deque[float] = deque(maxlen=STEPS)
        self._num_decisions = 0
        # vLLM captures graphs twice, the first time to see how much memory they take: the later object counts.
        self._choose = functools.partial(type(manager).get_num_tokens, manager)
        self._forward_start = functools.partial(type(timing).forward_start, timing)
        manager.get_num_tokens, timing.forward_start = self._get_num_tokens, self._launch

    def device_waits(self) -> bool:
        """Whether the device has finished the step before: its copy of the confidences was the last it had to do."""
        return bool(self._manager._copy_events[self._manager._stale_idx ^ 1].query())

    def _launch(self) -> None:
        now = time.perf_counter()
        took, self._launched = (now - self._launched) * 1e3, now
        if self.device_waits():
            self._last.append(took)
        else:
            self._last = deque((min(before, took) for before in self._last), STEPS)
        self._forward_start()

    def _get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        if self._num_decisions % STEPS == 0 or self._share is None:  # ranks that decide otherwise would hang
            known = float(np.median(self._last)) if self._last else 0.0
            self.milliseconds = self._share(known) if self._share else known
        self._num_decisions += 1
        drafting, verifying = tables = self._manager.cost_tables
        self._manager.cost_tables = np.zeros_like(drafting), self._costs(verifying + drafting[len(num_tokens_per_req)])
        try:
            return int(self._choose(num_tokens_per_req, draft_tokens))
        finally:
            self._manager.cost_tables = tables

    def _costs(self, on_device: np.ndarray) -> np.ndarray:
        """Milliseconds of a step by its tokens, from those of the device."""
        costs: np.ndarray = np.maximum(on_device, SHARE * self.milliseconds)
        largest = self._manager._cudagraph_limit + 1
        costs[largest:] = on_device[largest:] + SHARE * self.milliseconds  # the host launches kernel after kernel
        return costs
