"""One problem's shards, as an engine reads and writes them."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from rollout_spec.history.rollout import Rollout
from rollout_spec.history.shards import (
    Entry,
    Origin,
    ShardError,
    ShardInfo,
    by_version,
    read_shard,
    write_shard,
)
from rollout_spec.history.storage import ShardStorage

logger = logging.getLogger(__name__)
_Batches: TypeAlias = "dict[tuple[int, int], list[Entry]]"
"""Entries by writer and batch."""

LOOKS_WHILE_MERGED = 3
"""How often the folder is listed at most where shards are merged while they are read."""
SHARDS_PER_MERGE, SMALL_BYTES = 16, 1 << 17
"""So many shards of this size at most are written as one by an engine that has read them all."""
MANY_SHARDS = 64
"""Where there are so many small ones, an engine that has read them reads some again, to merge them."""
SHARE_OF_MERGES = 0.25
"""Engines that are asked for the same problem read it at the same time. About one in four of them merges."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds until what could not be read or written is tried again; each time twice as many."""


def longer(pause: float) -> float:
    """The pause after one that did not help; 0: there was none."""
    return min(2 * pause, LONGEST_PAUSE) or FIRST_PAUSE


class Found(NamedTuple):
    """What a look at a problem's shards has found."""

    entries: list[Entry]
    num_bytes: int
    num_refused: int
    """Shards that were damaged or of another tokenizer, each counted once."""


class ProblemShards:
    """Which of a problem's shards an engine has read or written, so that it takes each rollout once.

    Batches are numbered for each of these objects, which is a writer of its own: one that was dropped and made again
    finds in the folder what it had written.

    Args:
        storage: The problem's folder.
        origin: What the engine's rollouts come from.
        where: The folder's name, for warnings.
    """

    def __init__(self, storage: ShardStorage, origin: Origin, where: str) -> None:
        self._storage = storage
        self._origin = origin
        self._where = where
        self._writer = secrets.randbits(64)
        self._next_batch = 0
        self._seen: defaultdict[int, set[int]] = defaultdict(set)  # batches by writer
        self._known: set[str] = set()  # shards that need not be read any more
        self._refused: dict[str, int] = {}  # sizes of shards that cannot be used
        self._unreadable: dict[str, tuple[float, float]] = {}  # of shards: their pause, and when it ends

    def new_batch(self, rollouts: Sequence[Rollout]) -> list[Entry]:
        """This engine's next batch."""
        batch, self._next_batch = self._next_batch, self._next_batch + 1
        self._seen[self._writer].add(batch)
        return [Entry(self._writer, batch, rollout) for rollout in rollouts]

    def write(self, entries: Sequence[Entry]) -> int:
        """Write a batch, and return its bytes. A second time it gets the same name: it may be there nevertheless.

        Raises:
            OSError: as `ShardStorage.write`.
            Exception: a rollout does not fit the shards' columns.
        """
        name, size = write_shard(self._storage, entries, self._origin)
        self._known.add(name)
        return size

    def read_new(self, max_tokens: int) -> Found:
        """The entries of shards that are new, oldest policy versions first, without batches that were read before.

        Newest shards are read first. Once they have `max_tokens`, older ones are not read.

        Raises:
            OSError: the folder cannot be listed. What is said of single shards is a warning.
        """
        found: _Batches = {}
        small: dict[str, _Batches] = {}
        num_tokens = num_bytes = num_refused = 0
        for look in range(LOOKS_WHILE_MERGED):
            try:
                sizes = self._storage.sizes()
            except OSError:
                if look == 0:
                    raise
                break
            are_gone = False
            for name in self._new_names(sizes):
                if num_tokens >= max_tokens:
                    self._known.add(name)
                    continue
                try:
                    batches, is_whole = self._read(name)
                except FileNotFoundError:  # merged meanwhile, into a shard that has not been listed
                    are_gone = True
                    continue
                except ShardError as error:
                    self._refused[name] = sizes[name]
                    num_refused += 1
                    # By %r: somebody else's file may have a name that is no text, with which no log can be written.
                    logger.warning("history: %r in %s is left out: %s", name, self._where, error)
                    continue
                except OSError as error:  # perhaps only now
                    self._note_unreadable(name, error)
                    continue
                self._known.add(name)
                self._unreadable.pop(name, None)
                num_bytes += sizes[name]
                if is_whole and sizes[name] <= SMALL_BYTES:
                    small[name] = batches
                new = {key: entries for key, entries in batches.items() if key not in found}
                found.update(new)
                num_tokens += sum(entry.rollout.num_tokens for entries in new.values() for entry in entries)
            if not are_gone:
                break
        for writer, batch in found:
            self._seen[writer].add(batch)
        if secrets.SystemRandom().random() < SHARE_OF_MERGES:
            self._merge(small if len(small) >= SHARDS_PER_MERGE else self._read_small_again(sizes))
        entries = [entry for batch in found.values() for entry in batch]
        entries.sort(key=lambda entry: (entry.rollout.version, entry.writer, entry.batch))
        return Found(entries, num_bytes, num_refused)

    def _new_names(self, sizes: dict[str, int]) -> list[str]:
        """Shards that are to be read, newest policy versions first."""
        self._known &= sizes.keys()
        self._refused = {name: size for name, size in self._refused.items() if sizes.get(name) == size}
        self._unreadable = {name: pause for name, pause in self._unreadable.items() if name in sizes}
        now = time.monotonic()
        pausing = {name for name, (_, ends) in self._unreadable.items() if now < ends}
        return sorted(sizes.keys() - self._known - self._refused.keys() - pausing, key=by_version, reverse=True)

    def _read(self, name: str) -> tuple[_Batches, bool]:
        """(a shard's batches that were new at the beginning of this look, whether they are all that it holds).

        Raises:
            ShardError, OSError: as `read_shard`.
        """
        info, batches = self._load(name)
        new = {(writer, batch): some for (writer, batch), some in batches.items() if batch not in self._seen[writer]}
        # Of another model's rollouts features were left out, which may be of use to its engines.
        return new, len(new) == len(batches) and info.origin.without_model() == self._origin.without_model()

    def _load(self, name: str) -> tuple[ShardInfo, _Batches]:
        """All that a shard holds. Raises as `_read`."""
        info, entries = read_shard(self._storage, name, self._origin)
        batches: defaultdict[tuple[int, int], list[Entry]] = defaultdict(list)
        for entry in entries:
            batches[entry.writer, entry.batch].append(entry)
        return info, batches

    def _read_small_again(self, sizes: dict[str, int]) -> dict[str, _Batches]:
        """The oldest small shards, if there are very many: an engine that looks often reads few at a time."""
        names = sorted((n for n, size in sizes.items() if n in self._known and size <= SMALL_BYTES), key=by_version)
        small: dict[str, _Batches] = {}
        if len(names) >= MANY_SHARDS:
            for name in names[:SHARDS_PER_MERGE]:
                with contextlib.suppress(OSError, ShardError):  # others merge, or cannot use it
                    info, batches = self._load(name)
                    if info.origin.without_model() == self._origin.without_model():
                        small[name] = batches
        return small

    def _merge(self, small: Mapping[str, _Batches]) -> None:
        """Write small shards as one, and delete them then. Two engines that merge the same write the same."""
        names = sorted(small, key=by_version)
        try:
            while len(names) >= SHARDS_PER_MERGE:
                some, names = names[:SHARDS_PER_MERGE], names[SHARDS_PER_MERGE:]
                batches = {key: entries for name in some for key, entries in small[name].items()}
                entries = [entry for key in sorted(batches) for entry in batches[key]]
                merged, _ = write_shard(self._storage, entries, self._origin)
                self._known.add(merged)
                for name in some:
                    if name != merged:
                        self._storage.delete(name)
        except OSError as error:  # others or a later run will
            logger.warning("history: shards in %s cannot be merged: %s", self._where, error)

    def _note_unreadable(self, name: str, error: OSError) -> None:
        """Let a shard be tried again after a pause; the first time, warn of it."""
        if name not in self._unreadable:
            logger.warning("history: %r in %s cannot be read, and is tried again: %s", name, self._where, error)
        pause = longer(self._unreadable.get(name, (0.0, 0.0))[0])
        self._unreadable[name] = pause, time.monotonic() + pause
