"""Keeps a folder of shards small: merges small shards, and deletes the oldest ones when there is no room."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from rollout_spec.history.shards import (
    Entry,
    Origin,
    ShardError,
    ShardInfo,
    read_bytes,
    read_info,
    read_shard,
    version_of,
    write_shard,
)
from rollout_spec.history.storage import ShardStorage

TIER_BYTES, TIER_BITS, MAX_MERGED_BYTES = 1 << 16, 3, 1 << 26
"""Shards of similar size are of one tier: each is 2^TIER_BITS times the one before, the first up to some TIER_BYTES.
Merged shards have at most about MAX_MERGED_BYTES."""
SHARDS_PER_MERGE = 16
"""So many shards of one tier and origin become one."""
SECONDS_UNTIL_ABANDONED = 3600.0
"""What a killed process was writing is removed after so long."""


class Tidier:
    """Merges and deletes the shards of a folder.

    Args:
        origin: Shards that cannot be used with it are the first to be deleted.
        max_bytes: Bound on the folder's shards.
        on_merged: Called with (the shards that were merged, the shard that has their rollouts).
    """

    def __init__(
        self,
        storage: ShardStorage,
        origin: Origin,
        max_bytes: int,
        on_merged: Callable[[Sequence[str], str], None] = lambda merged, name: None,
    ) -> None:
        self._storage = storage
        self._origin = origin
        self._max_bytes = max_bytes
        self._on_merged = on_merged
        self._origins: dict[str, Origin | None] = {}  # by name; None: the shard is damaged

    def note(self, name: str, info: ShardInfo) -> None:
        """A shard's metadata, which need not be read again."""
        self._origins[name] = info.origin.without_model()

    def tidy(self) -> None:
        """Merge small shards, and delete the oldest ones until the bound holds, unless another engine is at it.

        Raises:
            OSError: as `ShardStorage`.
        """
        with self._storage.tidying(abandoned_before=time.time() - SECONDS_UNTIL_ABANDONED) as is_ours:
            if is_ours:
                try:
                    self._merge()
                finally:  # also on a full disk, on which nothing can be merged
                    self._prune()

    def _sizes(self) -> dict[str, int]:
        sizes = {name: size for name, size in self._storage.sizes().items() if version_of(name) >= 0}
        self._origins = {name: origin for name, origin in self._origins.items() if name in sizes}
        return sizes

    def _origin_of(self, name: str) -> Origin | None:
        if name not in self._origins:
            try:
                self.note(name, read_info(read_bytes(self._storage, name)))
            except ShardError:
                self._origins[name] = None
            except OSError:  # perhaps it can be read later
                return None
        return self._origins[name]

    def _merge(self) -> None:
        tiers: defaultdict[tuple[int, Origin], list[str]] = defaultdict(list)
        sizes = self._sizes()
        for name, size in sizes.items():
            if size < MAX_MERGED_BYTES and (origin := self._origin_of(name)) is not None:
                tiers[max(size // TIER_BYTES, 1).bit_length() // TIER_BITS, origin].append(name)
        for names in tiers.values():
            names.sort(key=by_version)
            while len(names) >= SHARDS_PER_MERGE:
                some: list[str] = []
                while len(some) < SHARDS_PER_MERGE and sum(sizes[n] for n in [*some, names[0]]) <= MAX_MERGED_BYTES:
                    some.append(names.pop(0))
                if len(some) < 2:
                    names.pop(0)
                else:
                    self._merge_shards(some)

    def _merge_shards(self, names: Sequence[str]) -> None:
        """Merge shards of one origin. What is merged is deleted only once the merged shard is there."""
        merged: dict[tuple[int, int], list[Entry]] = {}
        done, origin = [], Origin()
        for name in names:
            try:
                info, entries = read_shard(self._storage, name, Origin())
            except (OSError, ShardError):
                continue
            batches = defaultdict(list)
            for entry in entries:
                batches[entry.writer, entry.batch].append(entry)
            for batch, some in batches.items():
                merged.setdefault(batch, some)
            done.append(name)
            origin = info.origin
        if len(done) > 1:
            name, _ = write_shard(self._storage, [entry for some in merged.values() for entry in some], origin)
            self._on_merged(done, name)
            for old in done:
                if old != name:
                    self._storage.delete(old)

    def _prune(self) -> None:
        sizes = self._sizes()
        num_bytes = sum(sizes.values())
        if num_bytes <= self._max_bytes:
            return
        failed: OSError | None = None
        for name in sorted(sizes, key=lambda name: (self._is_usable(name), *by_version(name))):
            if num_bytes <= self._max_bytes:
                break
            try:
                self._storage.delete(name)
                num_bytes -= sizes[name]
            except OSError as error:  # others make room in its place
                failed = failed or error
        if failed is not None:
            raise failed

    def _is_usable(self, name: str) -> bool:
        origin = self._origin_of(name)
        if origin is None:
            return name not in self._origins  # it cannot be read at present
        try:
            self._origin.check(origin)
            return True
        except ShardError:
            return False


def by_version(name: str) -> tuple[int, str]:
    """Sorts shards, oldest policy versions first."""
    return version_of(name), name
