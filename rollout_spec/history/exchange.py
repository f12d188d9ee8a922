"""A thread that reads and writes a history's folder for an engine.

It reads a problem's files when the engine is asked for the problem, and looks again while requests of it are live. It
writes a problem's rollouts once none of its requests is live any more, and at most half a minute after they ended.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - exit hooks run last to first, and ours must run before its own
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

from rollout_spec.history.folder import READERS, HistoryFolder
from rollout_spec.history.store import Rollout

logger = logging.getLogger(__name__)

SECONDS_LOCAL, SECONDS_REMOTE = 0.5, 10.0
"""Until a problem is looked at again."""
SECONDS_TO_WRITE = 30.0
"""Ended rollouts wait at most so long for the other requests of their problem, with which they are one file."""
SECONDS_TO_RETRY = 10.0
"""Until what could not be written is tried again."""
MAX_WAITING_TOKENS = 1_000_000
"""Of rollouts that were read and the engine has not taken. No more are read until it has."""
MAX_UNWRITTEN_TOKENS = 5_000_000
"""Of rollouts that could not be written, up to 36 bytes each. The oldest are dropped."""
SECONDS_TO_CLOSE = 10.0


@dataclass
class _Group:
    """Rollouts of one problem and generation, to be written as one file."""

    since: float = field(default_factory=time.monotonic)
    rollouts: list[Rollout] = field(default_factory=list)


class FolderThread:
    """See the module's docstring. The engine's calls touch no files, and none of them waits but `close`."""

    def __init__(self, folder: HistoryFolder) -> None:
        self.folder = folder
        self.is_closed = False
        self._seconds_to_look = SECONDS_REMOTE if folder.is_remote else SECONDS_LOCAL
        self._watched: dict[int, float] = {}  # when a problem is looked at
        self._to_forget: set[int] = set()
        self._inbox: deque[Rollout] = deque()
        self._num_waiting_tokens = 0  # of the inbox
        self._groups: dict[tuple[int, int], _Group] = {}  # to be written, by problem and order, oldest first
        self._num_unwritten_tokens = 0
        self._num_lost = 0
        self._next_write = 0.0
        self._warned_of: set[object] = set()
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    # -- called by the engine ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin. What is left when the process ends is written, if nobody calls `close`."""
        # Not by `atexit`: executors refuse work by then, and asyncio asks for addresses of hosts in one.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(_close_if_alive, weakref.ref(self))
        self._thread = threading.Thread(target=self._run, name="rollout_spec history", daemon=True)
        self._thread.start()

    def watch(self, problem_id: int, *, is_known: bool) -> None:
        """Requests of a problem begin: read at once what there is of it, and look again until `unwatch`.

        Args:
            is_known: Whether the engine has any history of it. Otherwise also what was read earlier is read again.
        """
        with self._lock:
            self._watched[problem_id] = 0.0
            if not is_known and all(rollout.problem_id != problem_id for rollout in self._inbox):
                self._to_forget.add(problem_id)
        self._woken.set()

    def unwatch(self, problem_id: int) -> None:
        """The last request of a problem has ended."""
        with self._lock:
            self._watched.pop(problem_id, None)

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Write rollouts soon."""
        with self._lock:
            for rollout in rollouts:
                self._groups.setdefault((rollout.problem_id, rollout.order), _Group()).rollouts.append(rollout)
                self._num_unwritten_tokens += rollout.num_tokens
            while self._num_unwritten_tokens > MAX_UNWRITTEN_TOKENS and len(self._groups) > 1:
                oldest = self._groups.pop(next(iter(self._groups))).rollouts
                self._num_unwritten_tokens -= _num_tokens(oldest)
                self._num_lost += len(oldest)

    def take(self, max_tokens: int = MAX_WAITING_TOKENS) -> list[Rollout]:
        """The first rollouts that have come from elsewhere, with at most `max_tokens` together, but at least one."""
        some: list[Rollout] = []
        with self._lock:
            while self._inbox and (not some or self._inbox[0].num_tokens <= max_tokens):
                max_tokens -= self._inbox[0].num_tokens
                some.append(self._inbox.popleft())
            self._num_waiting_tokens -= _num_tokens(some)
        return some

    def stats(self) -> dict[str, float]:
        """`FolderStats`, and rollouts that wait to be written and that were lost."""
        return {**asdict(self.folder.stats), "rollouts_waiting": self._num_unwritten(), "rollouts_lost": self._num_lost}

    def close(self) -> None:
        """Write what is left, and stop. Waits SECONDS_TO_CLOSE at most for the thread, which writes it.

        A second call does nothing. Nor does one in a forked child: rollouts are the parent's. Called from the thread
        itself, by the collection of garbage, it lets the thread end.
        """
        if self.is_closed or os.getpid() != self._process:
            return
        self.is_closed = True
        self._woken.set()
        if self._thread is threading.current_thread():
            return
        if self._thread is None:
            self._do(self._write)
        else:
            self._thread.join(SECONDS_TO_CLOSE)
        left = self._num_unwritten()
        self._num_lost += left
        if left:
            logger.warning("history: %d rollouts could not be written to %s", left, self.folder.url)

    def _num_unwritten(self) -> int:
        with self._lock:
            return sum(len(group.rollouts) for group in self._groups.values())

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.is_closed:
            self._woken.wait(SECONDS_LOCAL)
            self._woken.clear()
            self._do(self._write)
            self._do(self._read)
        self._do(self._write)

    def _do(self, work: Callable[..., None], *item: Any) -> bool:
        """Do what must end neither the run nor the thread: False if it fails. Each kind of error is said once."""
        try:
            work(*item)
            return True
        except Exception as error:
            kind = error.errno if isinstance(error, OSError) else type(error)
            with self._lock:
                is_first = kind not in self._warned_of
                self._warned_of.add(kind)
            if is_first:
                logger.warning(
                    "history: %s cannot be used as it should: %s. Rollouts go on; what cannot be written or read now "
                    "is tried again. This is said once",
                    self.folder.url,
                    str(error) or repr(error),
                    exc_info=None if isinstance(error, OSError) else error,
                )
            return False

    def _write(self) -> None:
        now = time.monotonic()
        if now < self._next_write and not self.is_closed:
            return
        with self._lock:
            ready = [
                key
                for key, group in self._groups.items()
                if key[0] not in self._watched or now - group.since > SECONDS_TO_WRITE or self.is_closed
            ]
        is_written = self._do_each(self._write_group, ready)
        self._next_write = 0.0 if is_written else now + SECONDS_TO_RETRY

    def _write_group(self, key: tuple[int, int]) -> None:
        with self._lock:
            group = self._groups.get(key)
            rollouts = [] if group is None else list(group.rollouts)
        if group is None:  # dropped meanwhile
            return
        written = self.folder.write(rollouts)
        with self._lock:
            if self._groups.get(key) is group:
                self._num_unwritten_tokens -= _num_tokens(rollouts)
                del group.rollouts[: len(rollouts)]
                if not group.rollouts:
                    del self._groups[key]
        self.folder.prune_by_chance(written.size)

    def _read(self) -> None:
        with self._lock:
            to_forget, self._to_forget = self._to_forget, set()
            now = time.monotonic()
            due = [problem for problem, when in self._watched.items() if when <= now]
        for problem_id in to_forget:
            self.folder.forget(problem_id)
        self._do_each(self._read_problem, due)

    def _read_problem(self, problem_id: int) -> None:
        if self.is_closed or self._num_waiting_tokens >= MAX_WAITING_TOKENS:
            return
        rollouts: list[Rollout] = []
        try:
            rollouts = self.folder.read(problem_id)
        finally:
            with self._lock:
                self._inbox.extend(rollouts)
                self._num_waiting_tokens += _num_tokens(rollouts)
                if problem_id in self._watched:
                    self._watched[problem_id] = time.monotonic() + self._seconds_to_look

    def _do_each(self, work: Callable[[Any], None], items: Sequence[Any]) -> bool:
        """`_do` for each item, for READERS at once where the folder is remote. False if any of them fails."""
        if self.folder.is_remote and len(items) > 1:
            with ThreadPool(min(READERS, len(items))) as pool:  # its threads do not keep a process from ending
                done = pool.map(partial(self._do, work), items, 1)
        else:
            done = [self._do(work, item) for item in items]
        return all(done)


def _num_tokens(rollouts: Iterable[Rollout]) -> int:
    return sum(rollout.num_tokens for rollout in rollouts)


def _close_if_alive(thread: weakref.ref[FolderThread]) -> None:
    if (alive := thread()) is not None:
        alive.close()
