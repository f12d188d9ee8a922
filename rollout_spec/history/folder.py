"""One engine's end of a history that engines share: it writes its own rollouts, and reads those of others as it needs.

Each problem's shards have a folder of their own. An engine reads what others have said of a problem when it is asked
for that problem, and looks for more while requests of it are live. So what it reads does not grow with the number of
engines, but with what it is asked. When it starts it also reads some other problems, from which requests draft where
their own has nothing. A thread reads and writes, so that no decode step waits for a file.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - before `start` registers for the exit: who is last is called first
import contextlib
import errno
import io
import json
import logging
import os
import random
import threading
import time
import weakref
import zipfile
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout_spec.history.partitions import (
    groups_of,
    path_of,
    problem_ids,
    problems_by_text,
    shards_of_earlier_versions,
)
from rollout_spec.history.problem import FIRST_PAUSE, Found, ProblemShards, longer
from rollout_spec.history.rollout import Rollout
from rollout_spec.history.shards import Entry, Origin, encode, release_memory
from rollout_spec.history.storage import LocalStorage, ShardStorage, open_storage
from rollout_spec.history.tidying import tidy_if_due

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

LEARNED, ORIGIN, VERSION = "learned.npz", "origin", "version"
"""What drafters have learned from outcomes; the last engine that writes it wins. Two of its arrays say of what, and at
which policy version."""
SECONDS_LOCAL, SECONDS_REMOTE = 0.25, 5.0
"""Between two exchanges with a folder, and with one of another file system of fsspec. What is asked for is read at
once."""
LONGEST = 4
"""A problem of which nothing new has come is looked at in every second exchange, then once in so many: within 1.25
seconds, and within 25 on a remote file system."""
READERS_REMOTE = 16
"""Problems of a remote file system that are read at once: an answer takes long, and little work."""
SECONDS_PER_CHECK = 20.0
"""How often it is asked whether the history must be tidied."""
MAX_WAITING_TOKENS = 1_000_000
"""Of other engines' rollouts that the engine has not taken. No more are read until it has."""
MAX_PROBLEM_TOKENS = 262_144
"""Of one problem, newest policy versions first, that one look reads: a group of 16 in each of 30 epochs, 512 each."""
MAX_UNWRITTEN_TOKENS = 5_000_000
"""Of its own rollouts that have not been tried to be written, and as many of those where that failed: up to 36 bytes
each. A healthy folder never has so many. The oldest are dropped."""
SECONDS_TO_CLOSE = 10.0


@dataclass
class FolderStats:
    """What went through a folder, in this engine.

    Attributes:
        rollouts_written, bytes_written: Its own, merging not counted.
        rollouts_read, bytes_read: Of earlier runs and of other engines.
        rollouts_waiting: Could not be written yet, and will be tried again.
        rollouts_lost: Were never written: too many waited, the engine ended before the folder could be written, or no
            shard can hold them.
        shards_refused: Shards that were damaged or of another tokenizer.
        seconds: Time that its thread was busy.
    """

    rollouts_written: int = 0
    bytes_written: int = 0
    rollouts_read: int = 0
    bytes_read: int = 0
    rollouts_waiting: int = 0
    rollouts_lost: int = 0
    shards_refused: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """Plain data."""
        return asdict(self)


@dataclass(slots=True)
class _Asked:
    """When a problem is looked at next that requests are live of."""

    in_exchanges: int = 0  # 0: in this one
    pause: int = 1  # exchanges until the next look, if this one finds nothing


class HistoryFolder:
    """See the module's docstring. Calls under `called by the engine` but `load` do not touch files.

    Args:
        url: A path, or a URL that fsspec knows.
        origin: What this engine's rollouts come from.
        max_bytes: Bound on all problems' shards. The oldest policy versions go first.
        features: Whether to write what the target saw.

    Attributes:
        stats: What went through the folder.
        newest_version: The newest policy version that `load` found; 0 before.
        by_text: Problems that are told by their prompts' text, which `load` found.

    Raises:
        ValueError: as `open_storage`.
    """

    def __init__(self, url: str, origin: Origin, *, max_bytes: int, features: bool = True) -> None:
        self.stats = FolderStats()
        self.newest_version = 0
        self.by_text: set[int] = set()
        self._storage: ShardStorage = open_storage(url)
        self._is_remote = not isinstance(self._storage, LocalStorage)
        self._origin = origin
        self._url = url
        self._max_bytes = max_bytes
        self._features = features
        self._problems: dict[int, ProblemShards] = {}  # the thread's
        self._asked: dict[int, _Asked] = {}  # requests are live of these
        self._to_forget: set[int] = set()  # problems of which the engine has nothing any more
        self._outbox: deque[Rollout] = deque()
        self._outbox_tokens = 0
        self._unwritten: deque[tuple[ProblemShards, list[Entry]]] = deque()  # what could not be written, oldest first
        self._pause = 0.0  # seconds from the last write that failed to the next; 0: it did not fail
        self._next_write = 0.0  # by `time.monotonic`
        self._inbox: deque[Rollout] = deque()
        self._inbox_tokens = 0
        self._num_waiting: Counter[int] = Counter()  # rollouts of it, by problem
        self._learned: dict[str, NDArray] | None = None
        self._lock = threading.RLock()  # of what the engine's calls and the thread both change
        self._has_failed = False
        self._warned_of: set[int | type[Exception] | None] = set()  # numbers of errors, or what has none
        self._next_check = time.monotonic() + SECONDS_PER_CHECK  # whether the history must be tidied
        self._woken = threading.Event()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._tidying: threading.Thread | None = None
        self._is_closed = False
        self._process = os.getpid()

    # -- called by the engine ----------------------------------------------------------------------------------------

    def load(self, max_tokens: int) -> list[Rollout]:
        """Read what an engine needs before it is asked for anything: some problems, chosen at random, as far as
        `max_tokens` go, and what `newest_version` and `by_text` say.

        Shards that cannot be used are left out, each with a warning.

        Returns:
            The rollouts, oldest policy versions first.
        """
        with self._timed():
            found: list[Rollout] = []
            try:
                self.newest_version = self._read_version_patiently()
                self.by_text = problems_by_text(self._storage)
                earlier = shards_of_earlier_versions(self._storage)
                if earlier:
                    logger.warning(
                        "history: %d shards in %s, such as %s, are of an earlier version of rollout-spec and are not "
                        "used. `rollout-spec history convert %s` converts them",
                        len(earlier), self._url, earlier[0], self._url,
                    )  # fmt: skip
                groups = groups_of(self._storage)
                random.SystemRandom().shuffle(groups)  # a trainer may have seeded the other one
                problems = problem_ids(self._storage, groups)
                while max_tokens > 0 and (some := list(islice(problems, self._num_readers))):
                    for result in self._look_at(some):
                        found += [entry.rollout for entry in result.entries]
                        max_tokens -= sum(entry.rollout.num_tokens for entry in result.entries)
            except OSError as error:
                self._warn(error)
            found.sort(key=lambda rollout: rollout.version)
            self.stats.rollouts_read += len(found)
            self.newest_version = max([self.newest_version, *(rollout.version for rollout in found[-1:])])
            return found

    def load_learned(self) -> dict[str, NDArray]:
        """What the last engine to use the folder had learned from outcomes; empty if that is not known."""
        try:
            learned = self._read_learned()
        except OSError as error:
            self._warn(error)
            return {}
        learned.pop(VERSION, None)
        origin = learned.pop(ORIGIN, None)
        is_ours = origin is not None and origin.tolist() == json.dumps(self._origin.without_model())
        return learned if is_ours else {}

    def keep_learned(self, learned: Mapping[str, NDArray], version: int) -> None:
        """Write soon what this engine has learned, and which policy version it has."""
        with self._lock:
            self._learned = {**learned, VERSION: np.array(version)}

    def start(self) -> None:
        """Begin to write and to read. What is left when the process ends is written, if nobody calls `close`."""
        if self._is_remote:
            # Not by `atexit`: executors refuse work by then, and asyncio asks for addresses of hosts in one.
            register = getattr(threading, "_register_atexit", atexit.register)
            register(_close_if_alive, weakref.ref(self))
        self._thread = threading.Thread(target=self._run, name="rollout_spec history", daemon=True)
        self._thread.start()

    def watch(self, problem_id: int, *, is_known: bool) -> None:
        """Requests of a problem begin: read at once what there is of it, and look for more until `unwatch`.

        Args:
            is_known: Whether the engine has any history of it. Otherwise also what was read earlier is read again.
        """
        with self._lock:
            self._asked[problem_id] = _Asked()
            if not is_known:
                self._to_forget.add(problem_id)
        self._woken.set()

    def unwatch(self, problem_id: int) -> None:
        """The last request of a problem has ended."""
        with self._lock:
            self._asked.pop(problem_id, None)

    def unwatch_all(self) -> None:
        """Nothing more is wanted."""
        with self._lock:
            self._asked.clear()

    def keep_only(self, is_known: Callable[[int], bool]) -> None:
        """Forget what was read of problems of which the engine has no history any more."""
        with self._lock:
            self._to_forget.update(
                problem for problem in list(self._problems) if problem not in self._asked and not is_known(problem)
            )

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Write rollouts soon."""
        with self._lock:
            for rollout in rollouts:
                self._outbox.append(rollout if self._features else rollout._replace(features=None))
                self._outbox_tokens += rollout.num_tokens
            while self._outbox_tokens > MAX_UNWRITTEN_TOKENS:  # the thread hangs in a file system, or has to wait
                self._outbox_tokens -= self._outbox.popleft().num_tokens
                self.stats.rollouts_lost += 1

    @property
    def num_waiting_tokens(self) -> int:
        """Of rollouts that have come and were not taken."""
        return self._inbox_tokens

    def take(self, max_tokens: int = MAX_WAITING_TOKENS) -> list[Rollout]:
        """The first of the other engines' rollouts that have come, with `max_tokens` together, but at least one."""
        if not self._inbox:
            return []
        with self._lock:
            rollouts = pop_first(self._inbox, max_tokens)
            self._num_waiting.subtract(rollout.problem_id for rollout in rollouts)
            self._inbox_tokens -= sum(rollout.num_tokens for rollout in rollouts)
        return rollouts

    def close(self) -> None:
        """Write what is left, and stop. Waits SECONDS_TO_CLOSE at most for the thread, which writes it.

        A second call does nothing. Nor does one in a fork: rollouts are the parent's, and its thread may hold the lock.
        One in the thread itself, where a dropped engine may be collected as garbage, lets it end by itself.
        """
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = self._is_stopping = True
        self._woken.set()
        if self._thread is threading.current_thread():
            return
        try:
            if self._thread is None:
                self._write_last()
            else:
                self._thread.join(SECONDS_TO_CLOSE)
        finally:
            num_left = self._count_unwritten()
            self.stats.rollouts_lost += num_left
            self.stats.rollouts_waiting = 0
            if num_left:
                logger.warning("history: %d rollouts could not be written to %s", num_left, self._url)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        seconds = SECONDS_REMOTE if self._is_remote else SECONDS_LOCAL
        due = time.monotonic() + seconds
        while not self._is_stopping:
            self._woken.wait(max(due - time.monotonic(), 0.0))
            self._woken.clear()
            if self._is_stopping:
                break
            if time.monotonic() >= due:
                self._try(self.exchange)
                due = time.monotonic() + seconds
            else:
                self._try(self._read)
        self._try(self._write_last)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            with self._timed():
                work()
        except Exception:  # must end neither the run nor the thread
            if not self._has_failed:
                self._has_failed = True
                logger.exception("history: what goes through %s may be incomplete. This is said once", self._url)

    def exchange(self) -> None:
        """Write and read once, and tidy now and then. OSError is warned of.

        The thread's work: not to be called by others while it runs.
        """
        self._forget()
        self._write()
        with self._lock:
            for asked in self._asked.values():
                asked.in_exchanges = max(asked.in_exchanges - 1, 0)
        self._read()
        if time.monotonic() >= self._next_check and not (self._tidying and self._tidying.is_alive()):
            self._next_check = time.monotonic() + SECONDS_PER_CHECK
            # It may take minutes, in which rollouts are to be written and read.
            self._tidying = threading.Thread(target=self.tidy, name="rollout_spec tidying", daemon=True)
            self._tidying.start()
            release_memory()

    def tidy(self) -> None:
        """Delete the oldest policy versions until the bound holds, unless another engine has seen to it lately."""
        try:
            tidy_if_due(self._storage, self._max_bytes, lambda: self._is_stopping)
        except OSError as error:
            self._warn(error)

    def _forget(self) -> None:
        """Forget what was read of problems of which the engine has nothing, unless it is yet to take what was read."""
        with self._lock:
            self._num_waiting = +self._num_waiting
            for problem_id in self._to_forget - self._num_waiting.keys():
                self._problems.pop(problem_id, None)
            self._to_forget.clear()

    def _read(self) -> None:
        """Look at the problems that were asked for since the last look, and at those that are due."""
        self._forget()
        with self._lock:
            due = [problem for problem, asked in self._asked.items() if asked.in_exchanges == 0]
        while due and self._inbox_tokens < MAX_WAITING_TOKENS:
            some, due = due[: self._num_readers], due[self._num_readers :]
            for problem_id, result in zip(some, self._look_at(some), strict=True):
                rollouts = [entry.rollout for entry in result.entries]
                self.stats.rollouts_read += len(rollouts)
                with self._lock:
                    self._inbox.extend(rollouts)
                    self._num_waiting[problem_id] += len(rollouts)
                    self._inbox_tokens += sum(rollout.num_tokens for rollout in rollouts)
                    asked = self._asked.get(problem_id)
                    if asked is not None:
                        asked.in_exchanges = 1 if rollouts else asked.pause
                        asked.pause = 1 if rollouts else min(2 * asked.pause, LONGEST)

    @property
    def _num_readers(self) -> int:
        return READERS_REMOTE if self._is_remote else 1

    def _look_at(self, problem_ids: list[int]) -> list[Found]:
        """What is new of some problems."""

        def look(problem_id: int) -> Found:
            shards = self._shards_of(problem_id)
            try:
                return shards.read_new(MAX_PROBLEM_TOKENS)
            except OSError as error:
                self._warn(error)
                return Found([], 0, 0)

        results = in_threads(look, problem_ids)
        self.stats.bytes_read += sum(result.num_bytes for result in results)
        self.stats.shards_refused += sum(result.num_refused for result in results)
        return results

    def _shards_of(self, problem_id: int) -> ProblemShards:
        shards = self._problems.get(problem_id)
        if shards is None:
            path = path_of(problem_id)
            shards = ProblemShards(self._storage.folder(path), self._origin, f"{self._url}/{path}")
            with self._lock:  # `keep_only` iterates over them
                self._problems[problem_id] = shards
        return shards

    def _write(self) -> None:
        """Write what has come. What cannot be written now is kept, and tried again after a pause."""
        if time.monotonic() < self._next_write:
            self.stats.rollouts_waiting = self._count_unwritten()
            return
        with self._lock:
            outbox, self._outbox, self._outbox_tokens = self._outbox, deque(), 0
            by_problem: defaultdict[int, list[Rollout]] = defaultdict(list)
            for rollout in outbox:
                by_problem[rollout.problem_id].append(rollout)
            for problem_id, rollouts in by_problem.items():
                shards = self._shards_of(problem_id)
                self._unwritten.append((shards, shards.new_batch(rollouts)))
        try:
            left, failed = len(self._unwritten), None
            while left:
                some = [self._unwritten[at] for at in range(min(left, self._num_readers))]
                failed = self._write_some(some) or failed
                left -= len(some)
                if self._woken.is_set() and not self._is_stopping:  # prompts are being read now
                    self._woken.clear()
                    self._read()
            if failed is not None:
                raise failed
            self._write_learned()
            self._pause = 0.0
        except (OSError, MemoryError) as error:
            self._warn(error)
            self._pause = longer(self._pause)
            self._next_write = time.monotonic() + self._pause
            self._drop_oldest()
        self.stats.rollouts_waiting = self._count_unwritten()

    def _write_last(self) -> None:
        """Write what is left, at once."""
        self._next_write = 0.0
        self._write()

    def _write_some(self, batches: list[tuple[ProblemShards, list[Entry]]]) -> OSError | MemoryError | None:
        """Write the oldest batches, at once where an answer takes long.

        Returns:
            Why a problem's folder could not be written; its batch is the last one now.

        Raises:
            OSError, MemoryError: another batch could not be written either.
        """
        errors = in_threads(self._write_batch, batches)
        failed = [(error, batch) for error, batch in zip(errors, batches, strict=True) if error is not None]
        with self._lock:
            for _ in batches:
                self._unwritten.popleft()
            self._unwritten.extend(batch for error, batch in failed if _is_of_one_folder(error))
            self._unwritten.extendleft(batch for error, batch in reversed(failed) if not _is_of_one_folder(error))
        for error, _ in failed:
            if not _is_of_one_folder(error):
                raise error
        return failed[0][0] if failed else None

    def _write_batch(self, batch: tuple[ProblemShards, list[Entry]]) -> OSError | MemoryError | None:
        """Write a shard of a batch, without the rollouts that no shard can hold, which leave the batch."""
        shards, entries = batch
        try:
            size = shards.write(entries)
        except (OSError, MemoryError) as error:
            return error
        except Exception as error:  # these rollouts can never be written together
            left = [entry for entry in entries if self._can_be_written(entry)]
            if len(left) == len(entries):  # it is no single one's fault
                left = []
            with self._lock:
                self.stats.rollouts_lost += len(entries) - len(left)
                entries[:] = left
            self._warn_of_lost(error)
            return self._write_batch(batch) if left else None
        with self._lock:
            self.stats.rollouts_written += len(entries)
            self.stats.bytes_written += size
        return None

    def _can_be_written(self, entry: Entry) -> bool:
        try:
            encode([entry], self._origin)
            return True
        except (OSError, MemoryError):
            raise
        except Exception:
            return False

    def _read_version_patiently(self) -> int:
        """`_read_version`, twice more where that fails: what a run says that begins with version 0 is taken for old."""
        for pause in (FIRST_PAUSE, 2 * FIRST_PAUSE):
            try:
                return self._read_version()
            except OSError:
                time.sleep(pause)
        return self._read_version()

    def _read_version(self) -> int:
        """The policy version of LEARNED; 0 if it is not known. Raises OSError."""
        try:
            version = int(self._read_learned().get(VERSION, np.array(0)))
        except (ValueError, TypeError):
            return 0
        return version if 0 <= version < 2**31 else 0

    def _read_learned(self) -> dict[str, NDArray]:
        """The arrays of LEARNED; empty if there are none, or damaged ones. Raises OSError."""
        try:
            with np.load(io.BytesIO(self._storage.read(LEARNED)), allow_pickle=False) as arrays:
                return dict(arrays)
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            logger.warning("history: %s in %s is left out: %s", LEARNED, self._url, error)
            return {}

    def _write_learned(self) -> None:
        with self._lock:
            learned, self._learned = self._learned, None
        if learned is None:
            return
        file = io.BytesIO()
        about = np.array(json.dumps(self._origin.without_model()))
        try:
            version = np.maximum(learned[VERSION], self._read_version())  # engines may count on their own
            np.savez_compressed(file, allow_pickle=False, **{**learned, VERSION: version, ORIGIN: about})
            self._storage.write(LEARNED, file.getvalue())
        except OSError:
            with self._lock:
                self._learned = self._learned or learned
            raise

    def _count_unwritten(self) -> int:
        with self._lock:  # where the thread is stuck, `close` counts, and the thread may go on at any moment
            return len(self._outbox) + sum(len(entries) for _, entries in self._unwritten)

    def _drop_oldest(self) -> None:
        """Drop batches that could not be written, until those that are left, but at least one, are within the bound."""
        num_tokens = [sum(entry.rollout.num_tokens for entry in entries) for _, entries in self._unwritten]
        while len(num_tokens) > 1 and sum(num_tokens) > MAX_UNWRITTEN_TOKENS:
            num_tokens.pop(0)
            with self._lock:
                self.stats.rollouts_lost += len(self._unwritten.popleft()[1])

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def _warn_of_lost(self, error: Exception) -> None:
        if type(error) not in self._warned_of:
            self._warned_of.add(type(error))
            logger.warning(
                "history: rollouts that no shard can hold are not written to %s: %r. `rollouts_lost` counts them; this "
                "is said once",
                self._url,
                error,
            )

    def _warn(self, error: OSError | MemoryError) -> None:
        number = error.errno if isinstance(error, OSError) else type(error)
        if number not in self._warned_of:
            self._warned_of.add(number)
            logger.warning(
                "history: %s cannot be used as it should: %s. Rollouts go on; what cannot be written or read now is "
                "tried again. This is said once",
                self._url,
                str(error) or repr(error),
            )

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stats.seconds += time.perf_counter() - started


def _is_of_one_folder(error: OSError | MemoryError) -> bool:
    """Whether others may be written, as where another user's engine has made the folder."""
    numbers = (errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
    return isinstance(error, OSError) and error.errno in numbers


def _close_if_alive(folder: weakref.ref[HistoryFolder]) -> None:
    if (alive := folder()) is not None:
        alive.close()


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Do something with each item in a thread of its own, and wait for all. What is raised first is raised here.

    One item takes no thread.
    The threads are daemons: a process ends while one hangs in a file system. That of an executor would be waited for.
    """

    def run(item: Item, future: Future[Result]) -> None:
        try:
            future.set_result(work(item))
        except BaseException as error:
            future.set_exception(error)

    if len(items) == 1:
        return [work(items[0])]
    futures: list[Future[Result]] = []
    for item in items:
        futures.append(Future())
        threading.Thread(target=run, args=(item, futures[-1]), name="rollout_spec history", daemon=True).start()
    return [future.result() for future in futures]


def pop_first(waiting: deque[Rollout], max_tokens: int) -> list[Rollout]:
    """Take as many from the left as have at most `max_tokens` together, but at least one if there is any."""
    some: list[Rollout] = []
    left = max_tokens
    while waiting and (not some or waiting[0].num_tokens <= left):
        left -= waiting[0].num_tokens
        some.append(waiting.popleft())
    return some
