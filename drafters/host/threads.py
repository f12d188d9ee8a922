"""Large batches on several cores: compiled functions that release the GIL are called for parts of a batch at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

MAX_THREADS = 8
"""An engine's other processes, such as tensor-parallel ranks that all draft, need cores, too."""
LEAST_REQUESTS = 32
"""Fewest requests per thread: waking a thread can take as long as drafting for this many."""

_pool: ThreadPoolExecutor | None = None


def usable_threads() -> int:
    """Cores that this process may use, at most MAX_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_THREADS)


def share_out(call: Callable[[int, int, int], None], size: int, num_threads: int) -> None:
    """call(part, start, end) for parts that make up range(size), at once, as far as they are worth a thread.

    Args:
        size: Requests of the batch.
        num_threads: Most parts, at most MAX_THREADS.
    """
    parts = min(num_threads, size // LEAST_REQUESTS)
    if parts < 2:
        call(0, 0, size)
        return
    edges = [size * part // parts for part in range(parts + 1)]
    others: list[Future[None]] = []
    try:
        for part in range(1, parts):
            others.append(_threads().submit(call, part, edges[part], edges[part + 1]))
        call(0, edges[0], edges[1])
    finally:
        wait(others)  # nothing may change under a thread that still runs
    for other in others:
        other.result()


def _threads() -> ThreadPoolExecutor:
    """This process' threads, made when they are wanted first."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(MAX_THREADS - 1, thread_name_prefix="rollout_spec")
    return _pool


def _forget() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget)  # a fork has none of its parent's threads
