"""A thread that reads and writes a history's folder for an engine.

It reads a problem's files when the engine is asked for the problem, and looks again while requests of it are live. It
writes a problem's rollouts once none of its requests is live any more, and at most half a minute after they ended.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - before `start` registers for the exit: who is last is called first
import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.pool import ThreadPool
from typing import Any

from rollout_spec.history.folder import READERS, HistoryFolder
from rollout_spec.history.rollout import Rollout

logger = logging.getLogger(__name__)

SECONDS_LOCAL, SECONDS_REMOTE = 0.5, 5.0
"""Until a problem is looked at again, twice as long each time that nothing new has come, up to 16 times as long."""
SECONDS_TO_WRITE = 30.0
"""Ended rollouts wait at most so long for the other requests of their problem, with which they are one file."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds until what could not be written is tried again; each time twice as many."""
MAX_WAITING_TOKENS = 1_000_000
"""Of rollouts that were read and the engine has not taken. No more are read until it has."""
MAX_UNWRITTEN_TOKENS = 5_000_000
"""Of rollouts that could not be written, up to 36 bytes each. The oldest are dropped."""
MAX_FAILURES = 3
"""After so many groups that cannot be written, the others wait for the next attempt, too."""
SECONDS_TO_CLOSE = 10.0


@dataclass
class _Unwritten:
    since: float = field(default_factory=time.monotonic)
    rollouts: list[Rollout] = field(default_factory=list)


class FolderThread:
    """See the module's docstring. The engine's calls touch no files, and none of them waits but `close`."""

    def __init__(self, folder: HistoryFolder) -> None:
        self.folder = folder
        self.is_closed = False
        self.num_waiting_tokens = 0
        self._first_look = SECONDS_REMOTE if folder.is_remote else SECONDS_LOCAL
        self._watched: dict[int, tuple[float, float]] = {}  # when a problem is looked at, and the pause after that
        self._unwritten: dict[tuple[int, int], _Unwritten] = {}  # by problem and version, oldest first
        self._num_unwritten_tokens = 0
        self._inbox: deque[Rollout] = deque()
        self._num_inbox: Counter[int] = Counter()  # its rollouts by problem
        self._to_forget: set[int] = set()
        self._num_lost = 0
        self._seconds = 0.0
        self._pause, self._next_write = 0.0, 0.0
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
            self._watched[problem_id] = 0.0, self._first_look
            if not is_known and problem_id not in self._num_inbox:  # the engine is about to get these
                self._to_forget.add(problem_id)
        self._woken.set()

    def unwatch(self, problem_id: int) -> None:
        """The last request of a problem has ended."""
        with self._lock:
            self._watched.pop(problem_id, None)

    def keep_only(self, is_known: Callable[[int], bool]) -> None:
        """Forget what was read of problems of which the engine has no history any more."""
        unknown = {problem for problem in self.folder.problems() if not is_known(problem)}
        with self._lock:
            self._to_forget |= unknown - self._watched.keys() - self._num_inbox.keys()

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Write rollouts soon."""
        with self._lock:
            for rollout in rollouts:
                key = rollout.problem_id, rollout.version
                self._unwritten.setdefault(key, _Unwritten()).rollouts.append(rollout)
                self._num_unwritten_tokens += rollout.num_tokens
            while self._num_unwritten_tokens > MAX_UNWRITTEN_TOKENS:
                key = next(iter(self._unwritten))
                self._remove(key, self._unwritten[key].rollouts[:1])
                self._num_lost += 1

    def take(self, max_tokens: int = MAX_WAITING_TOKENS) -> list[Rollout]:
        """The first rollouts that have come from elsewhere, with at most `max_tokens` together, but at least one."""
        with self._lock:
            rollouts = pop_first(self._inbox, max_tokens)
            self.num_waiting_tokens -= sum(rollout.num_tokens for rollout in rollouts)
            self._num_inbox -= Counter(rollout.problem_id for rollout in rollouts)
        return rollouts

    def stats(self) -> dict[str, float]:
        """`FolderStats`, rollouts that wait to be written and that were lost, and seconds that the thread was busy."""
        with self._lock:
            waiting = sum(len(unwritten.rollouts) for unwritten in self._unwritten.values())
        more = {"rollouts_waiting": waiting, "rollouts_lost": self._num_lost, "seconds": self._seconds}
        return {**asdict(self.folder.stats), **more}

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
        with self._lock:
            left = sum(len(unwritten.rollouts) for unwritten in self._unwritten.values())
        self._num_lost += left
        if left:
            logger.warning("history: %d rollouts could not be written to %s", left, self.folder.url)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.is_closed:
            self._woken.wait(SECONDS_LOCAL)
            self._woken.clear()
            self._do(self._write)
            self._do(self._read)
        self._do(self._write)

    def _do(self, work: Callable[[], None]) -> None:
        """Do what must end neither the run nor the thread. What goes wrong is said once for each kind."""
        started = time.monotonic()
        try:
            work()
        except Exception as error:
            kind = error.errno if isinstance(error, OSError) else type(error)
            if kind not in self._warned_of:
                self._warned_of.add(kind)
                logger.warning(
                    "history: %s cannot be used as it should: %s. Rollouts go on; what cannot be written or read now "
                    "is tried again. This is said once",
                    self.folder.url,
                    str(error) or repr(error),
                    exc_info=None if isinstance(error, OSError) else error,
                )
        finally:
            self._seconds += time.monotonic() - started

    def _write(self) -> None:
        now = time.monotonic()
        if now < self._next_write and not self.is_closed:
            return
        with self._lock:
            ready = [
                key
                for key, unwritten in self._unwritten.items()
                if key[0] not in self._watched or now - unwritten.since > SECONDS_TO_WRITE or self.is_closed
            ]
        errors: list[Exception] = []
        num_bytes = 0
        for some in self._parts(ready):
            if len(errors) >= MAX_FAILURES and not self.is_closed:
                break
            for key, outcome in zip(some, self._try_each(self._write_group, some), strict=True):
                if isinstance(outcome, Exception):
                    errors.append(outcome)
                    with self._lock:  # to the end: one that cannot be written must not keep others from it
                        if key in self._unwritten:
                            self._unwritten[key] = self._unwritten.pop(key)
                else:
                    num_bytes += outcome
        if errors:
            self._pause = min(2 * self._pause, LONGEST_PAUSE) or FIRST_PAUSE
            self._next_write = time.monotonic() + self._pause
            raise errors[0]
        self._pause = 0.0
        self.folder.prune_by_chance(num_bytes)

    def _write_group(self, key: tuple[int, int]) -> int:
        """Write the rollouts of a problem and version. Returns how many bytes that took."""
        with self._lock:
            rollouts = list(self._unwritten[key].rollouts) if key in self._unwritten else []
        if not rollouts:  # dropped meanwhile
            return 0
        num_bytes = self.folder.write(rollouts)
        with self._lock:
            self._remove(key, rollouts)
        return num_bytes

    def _remove(self, key: tuple[int, int], rollouts: Sequence[Rollout]) -> None:
        """These are no longer to be written."""
        gone, unwritten = set(map(id, rollouts)), self._unwritten.get(key, _Unwritten())
        self._num_unwritten_tokens -= sum(rollout.num_tokens for rollout in unwritten.rollouts if id(rollout) in gone)
        unwritten.rollouts = [rollout for rollout in unwritten.rollouts if id(rollout) not in gone]
        if not unwritten.rollouts:
            self._unwritten.pop(key, None)

    def _read(self) -> None:
        with self._lock:
            to_forget, self._to_forget = self._to_forget - self._num_inbox.keys(), set()
            now = time.monotonic()
            due = [problem for problem, (when, _) in self._watched.items() if when <= now]
        for problem_id in to_forget:
            self.folder.forget(problem_id)
        errors: list[Exception] = []
        for some in self._parts(due):
            if self.num_waiting_tokens >= MAX_WAITING_TOKENS or self.is_closed:
                break
            for problem_id, outcome in zip(some, self._try_each(self.folder.read, some), strict=True):
                rollouts = [] if isinstance(outcome, Exception) else outcome
                if isinstance(outcome, Exception):
                    errors.append(outcome)
                with self._lock:
                    self._inbox.extend(rollouts)
                    self._num_inbox.update(rollout.problem_id for rollout in rollouts)
                    self.num_waiting_tokens += sum(rollout.num_tokens for rollout in rollouts)
                    if problem_id in self._watched:
                        pause = self._first_look if rollouts else self._watched[problem_id][1]
                        longer = min(2 * pause, 16 * self._first_look)
                        self._watched[problem_id] = time.monotonic() + pause, longer
        if errors:
            raise errors[0]

    def _parts(self, items: Sequence[Any]) -> Iterable[Sequence[Any]]:
        """As many of the items at a time as are read or written at once."""
        size = READERS if self.folder.is_remote else 1
        return (items[i : i + size] for i in range(0, len(items), size))

    def _try_each(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """What `work` returns for each item, or the exception that it raises."""

        def attempt(item: Any) -> Any:
            try:
                return work(item)
            except Exception as error:
                return error

        if len(items) == 1:
            return [attempt(items[0])]
        with ThreadPool(len(items)) as pool:  # its threads do not keep a process from ending
            return pool.map(attempt, items, 1)


def _close_if_alive(thread: weakref.ref[FolderThread]) -> None:
    if (alive := thread()) is not None:
        alive.close()


def pop_first(waiting: deque[Rollout], max_tokens: int) -> list[Rollout]:
    """Take as many from the left as have at most `max_tokens` together, but at least one if there is any."""
    some: list[Rollout] = []
    left = max_tokens
    while waiting and (not some or waiting[0].num_tokens <= left):
        left -= waiting[0].num_tokens
        some.append(waiting.popleft())
    return some
