"""Drafts that fill the time for which the device would wait for the host.

A host that schedules, prepares and launches steps, and reads what they sampled, takes milliseconds for each, and more
for many requests. A GPU that needs less waits for it: with 64 requests of a 1.5B model and drafts, an H100 computed for
3.3 of 10 ms (experiments/results/README.md). Until the device has as much to do as the host, verifying a further draft
token takes no time at all. vLLM's adaptive verification does not know that, as it weighs the device's time alone.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from rollout_spec.step_sizes import known_costs

STEPS = 16
"""The host's time is the median of this many steps, so that prompts and ending requests do not count."""


class HostTime:
    """Lets vLLM's adaptive verification count a step's time as at least the host's.

    The host's time is that from one forward pass's launch to the next one's, if the device was idle at both. If it was
    not, the host may have waited for it, so this time is an upper bound.

    Steps in which nothing is drafted do not count, and leave the confidences that vLLM knows of requests as they are.

    Args:
        manager: vLLM's `AdaptiveVerificationManager`, which measures what steps cost on the device.
        timing: The runner's `StepTimingCollector`, which is told when a forward pass is launched.
        share: Gives all tensor-parallel ranks the first one's object; None for a single rank.
        is_drafting: Whether there are drafts for the next step.

    Attributes:
        milliseconds: The host's time, 0 while it is not known.
    """

    def __init__(
        self, manager: Any, timing: Any, share: Callable[[Any], Any] | None, is_drafting: Callable[[], bool]
    ) -> None:
        self.milliseconds = 0.0
        self._manager = manager
        self._share = share
        self._is_drafting = is_drafting
        self._launched = 0.0
        self._waited = False  # whether the device was idle at the last launch
        self._is_step = False  # whether that launch was a step's, and not of made-up requests
        self._last: deque[float] = deque(maxlen=STEPS)
        self._num_decisions = 0
        # vLLM captures graphs twice, the first time to see how much memory they take: the later object counts.
        self._choose = functools.partial(type(manager).get_num_tokens, manager)
        self._record = functools.partial(type(manager).record_confidences, manager)
        self._forward_start = functools.partial(type(timing).forward_start, timing)
        manager.get_num_tokens, manager.record_confidences = self._get_num_tokens, self._record_confidences
        timing.forward_start = self._launch

    def device_waits(self) -> bool:
        """Whether the device has finished the step before: its copy of the confidences was the last it had to do."""
        return bool(self._manager._copy_events[self._manager._stale_idx ^ 1].query())

    def _launch(self) -> None:
        now, waits = time.perf_counter(), self.device_waits()
        took = (now - self._launched) * 1e3
        if self._is_step and waits and self._waited:
            self._last.append(took)
        elif self._is_step:
            self._last = deque((min(before, took) for before in self._last), STEPS)
        # A step without drafts records no event, so what `waits` says is of an earlier step.
        self._launched, self._waited, self._is_step = now, waits and self._is_step, False
        self._forward_start()

    def _record_confidences(self, *args: Any) -> None:
        self._is_step = self._is_drafting()
        if self._is_step:
            self._record(*args)

    def _get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        if self._num_decisions % STEPS == 0 or self._share is None:  # all ranks ask in the same step
            known = float(np.median(self._last)) if self._last else 0.0
            self.milliseconds = self._share(known) if self._share else known
        self._num_decisions += 1
        drafting, verifying = tables = self._manager.cost_tables
        most = sum(num_tokens_per_req.values()) + 1
        on_device = verifying[:most] + drafting[len(num_tokens_per_req)]
        costs = known_costs(on_device, self.milliseconds, np.arange(most), self._manager._cudagraph_limit)
        self._manager.cost_tables = np.zeros(len(num_tokens_per_req) + 1), costs
        try:
            return int(self._choose(num_tokens_per_req, draft_tokens))
        finally:
            self._manager.cost_tables = tables
