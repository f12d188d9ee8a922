"""Metrics of ours on a server's /metrics, beside vLLM's.

They are counted in the worker, so the server's front end asks for them, by the commands that anybody can use, whenever
vLLM logs its own statistics: every 10 seconds (VLLM_LOG_STATS_INTERVAL). A command waits for the step that runs, so a
scrape does not ask: it shows what the last answer was.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

logger = logging.getLogger(__name__)

COUNTERS = {
    "emitted_tokens": "Tokens that requests got. Divided by request_steps: tokens per request and step.",
    "request_steps": "Requests summed over engine steps.",
    "requests": "Requests that have started.",
    "requests_with_history": "Of these the ones whose problem had history when they started.",
    "drafter_errors": "Exceptions of the drafter: the first one switches it off.",
}
"""Fields of the answers to `stats` and `history` that only grow, and what they are."""
GAUGES = {
    "rollouts": "Rollouts in the history.",
    "tokens": "Tokens of rollouts in the history.",
    "bytes": "Memory that the history and its index take.",
}
"""Fields of the answer to `history` that may shrink. Their metrics' names begin with `history_`."""


class ServerMetrics:
    """Metrics of one engine, of the first one where there are several.

    Args:
        model_name: Their label, as in vLLM's metrics.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._seen: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._has_warned = False

    def refresh(self, ask: Callable[..., Awaitable[list[Any]]]) -> None:
        """Ask the engine in the background, unless it still has to answer the last time.

        Args:
            ask: `AsyncLLM.collective_rpc`.
        """
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._refresh(ask))

    async def _refresh(self, ask: Callable[..., Awaitable[list[Any]]]) -> None:
        try:
            values = {**(await ask("rollout_spec", args=("stats",)))[0]}
            values |= (await ask("rollout_spec", args=("history",)))[0]
        except Exception as error:  # vLLM raises nothing more special; whatever it is, requests will tell
            if not self._has_warned:
                logger.warning("the engine does not answer, so rollout_spec's metrics stay as they are: %s", error)
            self._has_warned = True
            return
        self._has_warned = False
        metrics = _metrics()
        for name in COUNTERS:
            new = values.get(name, 0)
            metrics[name].labels(self._model_name).inc(max(new - self._seen.get(name, 0), 0))
            self._seen[name] = new
        for name in GAUGES:
            metrics[name].labels(self._model_name).set(values.get(name, 0))


@functools.cache
def _metrics() -> dict[str, Any]:
    """Prometheus's objects; one process can have each only once."""
    from prometheus_client import Counter, Gauge

    labels = ("model_name",)
    counters = {name: Counter(f"rollout_spec:{name}", text, labels) for name, text in COUNTERS.items()}
    gauges = {
        name: Gauge(f"rollout_spec:history_{name}", text, labels, multiprocess_mode="mostrecent")
        for name, text in GAUGES.items()
    }
    return counters | gauges
