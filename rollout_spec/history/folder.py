"""One engine's end of a folder of shards: it writes its own rollouts there and reads those of the others.

A thread does both, several times a second, so that no decode step waits for a file. Engines of one node, or of several
that see the same folder, so have each other's rollouts within a second, and a run that resumes has those of the last
one. Small shards are merged by whoever comes first; the oldest are deleted when the folder exceeds its bound.
"""

from __future__ import annotations

import contextlib
import io
import logging
import secrets
import threading
import time
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.history.rollout import Rollout
from rollout_spec.history.shards import Entry, Origin, ShardError, read_shard, version_of, write_shard
from rollout_spec.history.storage import LocalStorage, Storage, open_storage

logger = logging.getLogger(__name__)

LEARNED = "learned.npz"
"""What drafters have learned from outcomes; the last engine that writes it wins."""
SECONDS_LOCAL, SECONDS_REMOTE = 0.25, 5.0
"""Between two looks into a folder, and into one of another file system of fsspec."""
LOOKS_PER_TIDYING = 40
"""How often the folder is tidied."""
TIER_BYTES, TIER_BITS, MAX_MERGED_BYTES = 1 << 16, 3, 1 << 26
"""Shards of similar size are of one tier: each is 2^TIER_BITS times the one before, the first up to some TIER_BYTES.
Those of MAX_MERGED_BYTES or more are not merged any further."""
SHARDS_PER_MERGE = 16
"""So many shards of one tier become one."""
SECONDS_UNTIL_ABANDONED = 3600.0
"""What a killed process was writing is removed after so long."""


@dataclass
class FolderStats:
    """What went through a folder, in this engine.

    Attributes:
        rollouts_written, bytes_written: Its own, merging not counted.
        rollouts_read, bytes_read: Of earlier runs and of other engines.
        rollouts_lost: Could not be written.
        shards_refused: Shards that were damaged or of another tokenizer.
        seconds: Time that its thread was busy.
    """

    rollouts_written: int = 0
    bytes_written: int = 0
    rollouts_read: int = 0
    bytes_read: int = 0
    rollouts_lost: int = 0
    shards_refused: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """Plain data."""
        return asdict(self)


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
        self._storage: Storage = open_storage(url)
        self._origin = origin
        self._url = url
        self._max_bytes = max_bytes
        self._writer = secrets.randbits(64)
        self._next_batch = 0
        self._seen: dict[int, int] = {self._writer: 2**62}  # last batch by writer
        self._newest: dict[int, int] = {}  # newest version by writer
        self._known: set[str] = set()  # shards that need not be read any more
        self._outbox: list[Rollout] = []
        self._inbox: list[Entry] = []
        self._learned: dict[str, NDArray] | None = None
        self._lock = threading.Lock()  # of the two boxes
        self._has_warned = False
        self._looks = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

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
            rollouts = [entry.rollout for entry in entries]
            while rollouts and num_tokens > max_tokens:
                num_tokens -= rollouts.pop(0).num_tokens
            self.newest_version = rollouts[-1].version if rollouts else 0
            self.stats.rollouts_read += len(rollouts)
            return rollouts

    def load_learned(self) -> dict[str, NDArray]:
        """What the last engine to use the folder had learned from outcomes; empty if that is not known."""
        try:
            with np.load(io.BytesIO(self._storage.read(LEARNED)), allow_pickle=False) as arrays:
                return dict(arrays)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            logger.warning("history: %s in %s is left out: %s", LEARNED, self._url, error)
            return {}

    def keep_learned(self, learned: Mapping[str, NDArray]) -> None:
        """Write soon what this engine has learned."""
        self._learned = dict(learned)

    def start(self) -> None:
        """Begin to write and to read."""
        self._thread = threading.Thread(target=self._run, name="rollout_spec history", daemon=True)
        self._thread.start()

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Write rollouts soon."""
        with self._lock:
            self._outbox.extend(rollouts)

    def take(self) -> list[Received]:
        """The other engines' rollouts that have come since the last call."""
        if not self._inbox:
            return []
        with self._lock:
            entries, self._inbox = self._inbox, []
        return [Received(max(self._newest[e.writer] - e.rollout.version, 0), e.rollout) for e in entries]

    def close(self) -> None:
        """Write what is left, and stop."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._timed():
            self._write()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_remote = not isinstance(self._storage, LocalStorage)
        while not self._stopping.wait(SECONDS_REMOTE if is_remote else SECONDS_LOCAL):
            self.exchange()

    def exchange(self) -> None:
        """Write and read once, and tidy now and then. The thread's work; never raises OSError."""
        with self._timed():
            self._write()
            entries = self._read_new()
            for entry in entries:
                self._newest[entry.writer] = max(self._newest.get(entry.writer, 0), entry.rollout.version)
            with self._lock:
                self._inbox.extend(entries)
            self.stats.rollouts_read += len(entries)
            self._looks += 1
            if self._looks % LOOKS_PER_TIDYING == 0:
                self.tidy()

    def _write(self) -> None:
        learned, self._learned = self._learned, None
        if learned is not None:
            file = io.BytesIO()
            np.savez_compressed(file, allow_pickle=False, **learned)
            try:
                self._storage.write(LEARNED, file.getvalue())
            except OSError as error:
                self._warn(error)
        with self._lock:
            rollouts, self._outbox = self._outbox, []
        if not rollouts:
            return
        entries = [Entry(self._writer, self._next_batch, rollout) for rollout in rollouts]
        self._next_batch += 1
        try:
            name, size = write_shard(self._storage, entries, self._origin)
        except OSError as error:
            self.stats.rollouts_lost += len(rollouts)
            self._warn(error)
            return
        self._known.add(name)
        self.stats.rollouts_written += len(rollouts)
        self.stats.bytes_written += size

    def _read_new(self, is_enough: Callable[[Sequence[Entry]], bool] = lambda entries: False) -> list[Entry]:
        """The entries of shards that are new, newest shards first, without those of batches that were read before."""
        try:
            sizes = self._storage.sizes()
        except OSError as error:
            self._warn(error)
            return []
        self._known &= sizes.keys()
        found: dict[tuple[int, int], list[Entry]] = {}  # a batch can be in a shard and in the one it was merged into
        for name in sorted(sizes.keys() - self._known, key=_by_version, reverse=True):
            entries = self._read(name)
            self.stats.bytes_read += sizes[name] if entries else 0
            batches = defaultdict(list)
            for entry in entries:
                if entry.batch > self._seen.get(entry.writer, -1):
                    batches[entry.writer, entry.batch].append(entry)
            new = [entry for batch, some in batches.items() if batch not in found for entry in some]
            found = {**batches, **found}
            if new and is_enough(new):
                self._known |= sizes.keys()
                break
        for writer, batch in found:
            self._seen[writer] = max(batch, self._seen.get(writer, -1))
        return [entry for batch in sorted(found) for entry in found[batch]]

    def _read(self, name: str) -> list[Entry]:
        try:
            entries = read_shard(self._storage, name, self._origin)[1]
        except FileNotFoundError:  # merged or deleted meanwhile
            return []
        except ShardError as error:
            self._known.add(name)
            self.stats.shards_refused += 1
            logger.warning("history: %s in %s is left out: %s", name, self._url, error)
            return []
        except OSError as error:
            self._warn(error)
            return []
        self._known.add(name)
        return entries

    # -- tidying -----------------------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Merge small shards, and delete the oldest ones until the bound holds, unless another engine is at it."""
        try:
            with self._storage.tidying(abandoned_before=time.time() - SECONDS_UNTIL_ABANDONED) as is_ours:
                if is_ours:
                    self._merge()
                    self._prune()
        except OSError as error:
            self._warn(error)

    def _merge(self) -> None:
        tiers: defaultdict[int, list[str]] = defaultdict(list)
        for name, size in self._storage.sizes().items():
            if size < MAX_MERGED_BYTES and version_of(name) >= 0:
                tiers[max(size // TIER_BYTES, 1).bit_length() // TIER_BITS].append(name)
        for names in tiers.values():
            if len(names) >= SHARDS_PER_MERGE:
                self._merge_shards(sorted(names, key=_by_version))

    def _merge_shards(self, names: Sequence[str]) -> None:
        """Merge those of this engine's origin. What is merged is deleted only once the merged shard is there."""
        merged: dict[tuple[int, int], list[Entry]] = {}
        done = []
        for name in names:
            try:
                info, entries = read_shard(self._storage, name, self._origin)
            except (FileNotFoundError, ShardError):
                continue
            if info.origin != self._origin:
                continue
            batches = defaultdict(list)
            for entry in entries:
                batches[entry.writer, entry.batch].append(entry)
            merged = {**batches, **merged}
            done.append(name)
        if len(done) > 1:
            name, _ = write_shard(self._storage, [entry for some in merged.values() for entry in some], self._origin)
            if self._known.issuperset(done):
                self._known.add(name)
            for old in done:
                if old != name:
                    self._storage.delete(old)

    def _prune(self) -> None:
        sizes = {name: size for name, size in self._storage.sizes().items() if version_of(name) >= 0}
        num_bytes = sum(sizes.values())
        for name in sorted(sizes, key=_by_version):
            if num_bytes <= self._max_bytes:
                return
            self._storage.delete(name)
            num_bytes -= sizes[name]

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "history: %s cannot be used: %s. Rollouts go on; those that cannot be written are missing in later "
                "runs. This is said once",
                self._url,
                error,
            )

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stats.seconds += time.perf_counter() - started


def _by_version(name: str) -> tuple[int, str]:
    return version_of(name), name
