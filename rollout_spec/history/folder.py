"""One engine's end of a folder of shards: it writes its own rollouts there and reads those of the others.

A thread does both, several times a second, so that no decode step waits for a file. Engines of one node, or of several
that see the same folder, so have each other's rollouts within a second, and a run that resumes has those of the last
one. Small shards are merged by whoever comes first; the oldest are deleted when the folder exceeds its bound.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import secrets
import threading
import time
import zipfile
import zlib
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout_spec.history.rollout import Rollout
from rollout_spec.history.shards import (
    Entry,
    Origin,
    ShardError,
    decode,
    encode,
    read_bytes,
    read_info,
    release_memory,
    write_shard,
)
from rollout_spec.history.storage import LocalStorage, ShardStorage, open_storage
from rollout_spec.history.tidying import Tidier, by_version

logger = logging.getLogger(__name__)
T = TypeVar("T")

LEARNED, ORIGIN = "learned.npz", "origin"
"""What drafters have learned from outcomes; the last engine that writes it wins. One of its arrays says of what."""
SECONDS_LOCAL, SECONDS_REMOTE = 0.25, 5.0
"""Between two looks into a folder, and into one of another file system of fsspec."""
LOOKS_PER_TIDYING = 40
"""How often the folder is tidied."""
LOOKS_WHILE_MERGED = 3
"""How often the folder is listed at most where shards are merged while they are read."""
MAX_WAITING_TOKENS = 1_000_000
"""Of other engines' rollouts that the engine has not taken. The oldest are dropped."""
MAX_UNWRITTEN_TOKENS = 5_000_000
"""Of its own rollouts that have not been tried to be written, and as many of those where that failed: up to 36 bytes
each. A healthy folder never has so many. The oldest are dropped."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds until a folder that could not be written, or a shard that could not be read, is tried again; each time twice
as many."""
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
        rollouts_dropped: Were read, but the engine did not take them in time.
        shards_refused: Shards that were damaged or of another tokenizer.
        seconds: Time that its thread was busy.
    """

    rollouts_written: int = 0
    bytes_written: int = 0
    rollouts_read: int = 0
    bytes_read: int = 0
    rollouts_waiting: int = 0
    rollouts_lost: int = 0
    rollouts_dropped: int = 0
    shards_refused: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """Plain data."""
        return asdict(self)


class _Batches:
    """Numbers of batches, as ranges (first, last) in order, which neither overlap nor touch."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def has(self, first: int, last: int) -> bool:
        """Whether all these are there. O(log ranges)."""
        at = bisect_right(self._ranges, (first, 2**63)) - 1
        return at >= 0 and self._ranges[at][0] <= first and last <= self._ranges[at][1]

    def add(self, first: int, last: int) -> None:
        """Add these. O(ranges)."""
        apart = [r for r in self._ranges if r[1] < first - 1 or r[0] > last + 1]
        joined = [r for r in self._ranges if not (r[1] < first - 1 or r[0] > last + 1)]
        first, last = min([first, *(r[0] for r in joined)]), max([last, *(r[1] for r in joined)])
        self._ranges = sorted([*apart, (first, last)])


class Received(NamedTuple):
    """A rollout of another engine."""

    age: int
    """Policy versions between it and the newest of the same engine. Engines count versions on their own."""
    rollout: Rollout


class HistoryFolder:
    """See the module's docstring. Calls of `add` and `take` do not touch files.

    Args:
        url: A path, or a URL that fsspec knows.
        origin: What this engine's rollouts come from.
        max_bytes: Bound on the folder's shards. The oldest policy versions go first.

    Attributes:
        stats: What went through the folder.
        newest_version: The newest policy version that `load` found; 0 before.

    Raises:
        ValueError: as `open_storage`.
    """

    def __init__(self, url: str, origin: Origin, *, max_bytes: int) -> None:
        self.stats = FolderStats()
        self.newest_version = 0
        self._storage: ShardStorage = open_storage(url)
        self._origin = origin
        self._url = url
        self._tidier = Tidier(self._storage, origin, max_bytes, self._on_merged)
        self._writer = secrets.randbits(64)
        self._next_batch = 0
        self._seen: defaultdict[int, _Batches] = defaultdict(_Batches)  # by writer
        self._newest: dict[int, int] = {}  # newest version by writer
        self._known: set[str] = set()  # shards that need not be read any more
        self._refused: dict[str, int] = {}  # sizes of shards that cannot be used
        self._unreadable: dict[str, tuple[float, float]] = {}  # of shards: their pause, and when it ends
        self._outbox: deque[Rollout] = deque()
        self._outbox_tokens = 0
        self._unwritten: deque[list[Entry]] = deque()  # batches that could not be written, oldest first
        self._pause = 0.0  # seconds from the last write that failed to the next; 0: it did not fail
        self._next_write = 0.0  # by `time.monotonic`
        self._inbox: deque[Entry] = deque()
        self._inbox_tokens = 0
        self._learned: dict[str, NDArray] | None = None
        self._lock = threading.Lock()  # of the boxes, of what is unwritten and of what was learned
        self._has_failed = False
        self._warned_of: set[int | type[Exception] | None] = set()  # numbers of errors, or what has none
        self._looks = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._process = os.getpid()

    # -- called by the engine ----------------------------------------------------------------------------------------

    def load(self, max_tokens: int) -> list[Rollout]:
        """Read what the folder holds, newest policy versions first, until there are `max_tokens`.

        Shards that cannot be used are left out, each with a warning.

        Returns:
            The rollouts, oldest first. Their versions are those of the run that wrote them.
        """
        with self._timed():
            num_tokens = 0

            def is_enough(entries: Sequence[Entry]) -> bool:
                nonlocal num_tokens
                num_tokens += sum(entry.rollout.num_tokens for entry in entries)
                return num_tokens >= max_tokens

            entries = sorted(self._read_new(is_enough), key=lambda e: (e.rollout.version, e.writer, e.batch))
            first = 0
            while first < len(entries) and num_tokens > max_tokens:
                num_tokens -= entries[first].rollout.num_tokens
                first += 1
            rollouts = [entry.rollout for entry in entries[first:]]
            self.newest_version = rollouts[-1].version if rollouts else 0
            self.stats.rollouts_read += len(rollouts)
            return rollouts

    def load_learned(self) -> dict[str, NDArray]:
        """What the last engine to use the folder had learned from outcomes; empty if that is not known."""
        try:
            with np.load(io.BytesIO(self._storage.read(LEARNED)), allow_pickle=False) as arrays:
                learned = dict(arrays)
            is_ours = learned.pop(ORIGIN).item() == json.dumps(self._origin.without_model())
            return learned if is_ours else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            logger.warning("history: %s in %s is left out: %s", LEARNED, self._url, error)
            return {}

    def keep_learned(self, learned: Mapping[str, NDArray]) -> None:
        """Write soon what this engine has learned."""
        with self._lock:
            self._learned = dict(learned)

    def start(self) -> None:
        """Begin to write and to read."""
        self._thread = threading.Thread(target=self._run, name="rollout_spec history", daemon=True)
        self._thread.start()

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Write rollouts soon."""
        with self._lock:
            for rollout in rollouts:
                self._outbox.append(rollout)
                self._outbox_tokens += rollout.num_tokens
            while self._outbox_tokens > MAX_UNWRITTEN_TOKENS:  # the thread hangs in a file system, or has to wait
                self._outbox_tokens -= self._outbox.popleft().num_tokens
                self.stats.rollouts_lost += 1

    def take(self, max_tokens: int = MAX_WAITING_TOKENS) -> list[Received]:
        """The first of the other engines' rollouts that have come, with `max_tokens` together, but at least one."""
        if not self._inbox:
            return []
        with self._lock:
            entries = pop_first(self._inbox, max_tokens, lambda entry: entry.rollout.num_tokens)
            self._inbox_tokens -= sum(entry.rollout.num_tokens for entry in entries)
        return [Received(max(self._newest[e.writer] - e.rollout.version, 0), e.rollout) for e in entries]

    def close(self) -> None:
        """Write what is left, and stop. Waits SECONDS_TO_CLOSE at most for the thread, which writes it.

        A second call does nothing. Nor does one in a fork: rollouts are the parent's, and its thread may hold the lock.
        One in the thread itself, where a dropped engine may be collected as garbage, lets it end by itself.
        """
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        self._stopping.set()
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
        is_remote = not isinstance(self._storage, LocalStorage)
        while not self._stopping.wait(SECONDS_REMOTE if is_remote else SECONDS_LOCAL):
            self._try(self.exchange)
        self._try(self._write_last)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # must end neither the run nor the thread
            if not self._has_failed:
                self._has_failed = True
                logger.exception("history: what goes through %s may be incomplete. This is said once", self._url)

    def exchange(self) -> None:
        """Write and read once, and tidy now and then. OSError is warned of.

        The thread's work: not to be called by others while it runs.
        """
        with self._timed():
            self._write()
            entries = self._read_new()
            self.stats.rollouts_read += len(entries)
            with self._lock:
                self._inbox.extend(entries)
                self._inbox_tokens += sum(entry.rollout.num_tokens for entry in entries)
                while self._inbox_tokens > MAX_WAITING_TOKENS:  # the engine takes none, as when it is switched off
                    self._inbox_tokens -= self._inbox.popleft().rollout.num_tokens
                    self.stats.rollouts_dropped += 1
            self._looks += 1
            if self._looks % LOOKS_PER_TIDYING == 0:
                self.tidy()
                release_memory()

    def tidy(self) -> None:
        """Merge small shards, and delete the oldest ones until the bound holds, unless another engine is at it."""
        try:
            self._tidier.tidy()
        except OSError as error:
            self._warn(error)

    def _write(self) -> None:
        """Write what has come. What cannot be written now is kept, and tried again after a pause."""
        if time.monotonic() < self._next_write:
            self.stats.rollouts_waiting = self._count_unwritten()
            return
        with self._lock:
            if self._outbox:
                self._unwritten.append([Entry(self._writer, self._next_batch, rollout) for rollout in self._outbox])
                self._seen[self._writer].add(self._next_batch, self._next_batch)
                self._next_batch += 1
            self._outbox, self._outbox_tokens = deque(), 0
        try:
            while self._unwritten:
                self._write_batch(self._unwritten[0])
                with self._lock:
                    self._unwritten.popleft()
            self._write_learned()
            self._pause = 0.0
        except (OSError, MemoryError) as error:
            self._warn(error)
            self._pause = _longer(self._pause)
            self._next_write = time.monotonic() + self._pause
            self._drop_oldest()
        self.stats.rollouts_waiting = self._count_unwritten()

    def _write_last(self) -> None:
        """Write what is left, at once."""
        self._next_write = 0.0
        with self._timed():
            self._write()

    def _write_batch(self, entries: list[Entry]) -> None:
        """Write a shard of the oldest batch, without the rollouts that no shard can hold.

        Where that fails, it is written with the same name later: it may be there nevertheless.
        """
        try:
            name, size = write_shard(self._storage, entries, self._origin)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # these rollouts can never be written together
            left = [entry for entry in entries if self._can_be_written(entry)]
            if len(left) == len(entries):  # it is no single one's fault
                left = []
            self.stats.rollouts_lost += len(entries) - len(left)
            self._warn_of_lost(error)
            self._unwritten[0] = left
            if left:
                self._write_batch(left)
            return
        self._known.add(name)
        self.stats.rollouts_written += len(entries)
        self.stats.bytes_written += size

    def _can_be_written(self, entry: Entry) -> bool:
        try:
            encode([entry], self._origin)
            return True
        except (OSError, MemoryError):
            raise
        except Exception:
            return False

    def _write_learned(self) -> None:
        with self._lock:
            learned, self._learned = self._learned, None
        if learned is None:
            return
        file = io.BytesIO()
        about = np.array(json.dumps(self._origin.without_model()))
        np.savez_compressed(file, allow_pickle=False, **{**learned, ORIGIN: about})
        try:
            self._storage.write(LEARNED, file.getvalue())
        except OSError:
            with self._lock:
                self._learned = self._learned or learned
            raise

    def _count_unwritten(self) -> int:
        with self._lock:  # where the thread is stuck, `close` counts, and the thread may go on at any moment
            return len(self._outbox) + sum(map(len, self._unwritten))

    def _drop_oldest(self) -> None:
        """Drop batches that could not be written, until those that are left, but at least one, are within the bound."""
        num_tokens = [sum(entry.rollout.num_tokens for entry in entries) for entries in self._unwritten]
        while len(num_tokens) > 1 and sum(num_tokens) > MAX_UNWRITTEN_TOKENS:
            num_tokens.pop(0)
            with self._lock:
                self.stats.rollouts_lost += len(self._unwritten.popleft())

    def _read_new(self, is_enough: Callable[[Sequence[Entry]], bool] = lambda entries: False) -> list[Entry]:
        """The entries of shards that are new, newest shards first, without those of batches that were read before.

        Once there is enough, other shards are not decoded, and never will be.
        """
        found: dict[tuple[int, int], list[Entry]] = {}
        wants_more = True
        for _ in range(LOOKS_WHILE_MERGED):
            try:
                sizes = self._storage.sizes()
            except OSError as error:
                self._warn(error)
                break
            self._known &= sizes.keys()
            self._refused = {name: size for name, size in self._refused.items() if sizes.get(name) == size}
            self._unreadable = {name: pause for name, pause in self._unreadable.items() if name in sizes}
            now = time.monotonic()
            pausing = {name for name, (_, ends) in self._unreadable.items() if now < ends}
            names = sorted(sizes.keys() - self._known - self._refused.keys() - pausing, key=by_version, reverse=True)
            are_gone = False
            for name in names:
                try:
                    new = self._read(name, decodes=wants_more)
                except FileNotFoundError:  # merged meanwhile, into a shard that has not been listed
                    are_gone = True
                    continue
                except ShardError as error:
                    self._refused[name] = sizes[name]
                    self.stats.shards_refused += 1
                    # By %r: somebody else's file may have a name that is no text, with which no log can be written.
                    logger.warning("history: %r in %s is left out: %s", name, self._url, error)
                    continue
                except OSError as error:  # perhaps only now
                    self._note_unreadable(name, error)
                    continue
                self._known.add(name)
                self._unreadable.pop(name, None)
                self.stats.bytes_read += sizes[name]
                found.update(new)
                wants_more = wants_more and not is_enough([entry for entries in new.values() for entry in entries])
            if not are_gone:
                break
        return [entry for batch in sorted(found) for entry in found[batch]]

    def _read(self, name: str, *, decodes: bool) -> dict[tuple[int, int], list[Entry]]:
        """A shard's batches that were not read before; none of them will be read again. Raises as `read_shard`."""
        data = read_bytes(self._storage, name)
        info = read_info(data)
        self._tidier.note(name, info)
        self._origin.check(info.origin)
        if all(self._seen[writer].has(*span) for writer, span in info.batches.items()):
            return {}  # merged from shards that were read
        if not decodes:
            for writer, span in info.batches.items():
                self._seen[writer].add(*span)
                self._note_version(writer, info.newest_version)
            return {}
        batches = defaultdict(list)
        for entry in decode(data, self._origin)[1]:
            if not self._seen[entry.writer].has(entry.batch, entry.batch):
                batches[entry.writer, entry.batch].append(entry)
                self._note_version(entry.writer, entry.rollout.version)
        for writer, batch in batches:
            self._seen[writer].add(batch, batch)
        return batches

    def _note_version(self, writer: int, version: int) -> None:
        self._newest[writer] = max(version, self._newest.get(writer, 0))

    def _on_merged(self, names: Sequence[str], merged: str) -> None:
        if self._known.issuperset(names):
            self._known.add(merged)

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def _note_unreadable(self, name: str, error: OSError) -> None:
        """Let a shard be tried again after a pause; the first time, warn of it."""
        if name not in self._unreadable:
            logger.warning("history: %r in %s cannot be read, and is tried again: %s", name, self._url, error)
        pause = _longer(self._unreadable.get(name, (0.0, 0.0))[0])
        self._unreadable[name] = pause, time.monotonic() + pause

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


def _longer(pause: float) -> float:
    """The pause after one that did not help; 0: there was none."""
    return min(2 * pause, LONGEST_PAUSE) or FIRST_PAUSE


def pop_first(waiting: deque[T], max_tokens: int, num_tokens: Callable[[T], int]) -> list[T]:
    """Take as many from the left as have at most `max_tokens` together, but at least one if there is any."""
    some: list[T] = []
    left = max_tokens
    while waiting and (not some or num_tokens(waiting[0]) <= left):
        left -= num_tokens(waiting[0])
        some.append(waiting.popleft())
    return some
