"""Keeps a history within its bound: the oldest shards of all problems are deleted when there is no room."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

from rollout_spec.history.partitions import IMPORTS, TEXTS, sizes_by_problem
from rollout_spec.history.shards import version_of
from rollout_spec.history.storage import ShardStorage

SECONDS_UNTIL_ABANDONED = 3600.0
"""What a killed process was writing is removed after so long."""
TIDIED = "tidied"
"""Says when the whole history is to be looked through again, in seconds since the epoch."""
SECONDS_PER_TIDYING = 60.0
SHARE_OF_TIDYING = 0.05
"""Where it takes long, it is done less often: so much of one engine's time, however many engines there are."""
LONGEST_REST = 3600.0
"""Between two times. A clock that says more is wrong."""


def tidy_if_due(storage: ShardStorage, max_bytes: int, is_stopping: Callable[[], bool] = lambda: False) -> None:
    """Delete the oldest policy versions of all problems until a bound holds, if no engine has seen to it lately.

    Args:
        is_stopping: Asked now and then: whether to leave it to others.

    Raises:
        OSError: as `ShardStorage`.
    """
    try:
        rest = float(storage.read(TIDIED)) - time.time()
    except (FileNotFoundError, ValueError):
        rest = 0.0
    if 0 < rest <= LONGEST_REST:
        return
    started = time.time()
    _rest(storage, SECONDS_PER_TIDYING)
    prune_oldest(storage, max_bytes, is_stopping)
    took = time.time() - started
    if took > SHARE_OF_TIDYING * SECONDS_PER_TIDYING:
        _rest(storage, min(took / SHARE_OF_TIDYING, LONGEST_REST))


def _rest(storage: ShardStorage, seconds: float) -> None:
    """Let no engine look through the history for so long."""
    with contextlib.suppress(OSError):  # on a full disk others look, too, until something has been deleted
        storage.write(TIDIED, f"{time.time() + seconds:.0f}".encode())


def prune_oldest(storage: ShardStorage, max_bytes: int, is_stopping: Callable[[], bool] = lambda: False) -> None:
    """Delete the oldest policy versions until all problems' shards have at most `max_bytes`; also what is abandoned.

    Args:
        is_stopping: As of `tidy_if_due`.

    Raises:
        OSError: as `ShardStorage`; once what can be deleted is deleted.
    """
    with storage.tidying() as is_ours:
        if not is_ours:
            return
        by_version: Counter[int] = Counter()
        abandoned, renewed = time.time() - SECONDS_UNTIL_ABANDONED, time.time()
        for folder in (storage, storage.folder(TEXTS), storage.folder(IMPORTS)):
            folder.remove_unfinished(before=abandoned)
        for folder, sizes in _shards(storage):
            if is_stopping():
                return
            if time.time() > renewed + SECONDS_PER_TIDYING / 2:  # so that no other engine begins meanwhile
                renewed = time.time()
                _rest(storage, SECONDS_PER_TIDYING)
            folder.remove_unfinished(before=abandoned)
            for name, size in sizes.items():
                by_version[version_of(name)] += size
        surplus, newest = by_version.total() - max_bytes, -1
        if surplus <= 0:
            return
        num_bytes = 0
        for newest in sorted(by_version):
            num_bytes += by_version[newest]
            if num_bytes >= surplus:
                break
        kept = num_bytes - surplus  # bytes of the newest of these versions that may stay
        failed: OSError | None = None
        for folder, sizes in _shards(storage):
            for name, size in sizes.items():
                version = version_of(name)
                if version == newest and size <= kept:
                    kept -= size
                elif version <= newest:
                    try:
                        folder.delete(name)
                    except OSError as error:  # others make room in its place
                        failed = failed or error
        if failed is not None:
            raise failed


def _shards(storage: ShardStorage) -> Iterator[tuple[ShardStorage, dict[str, int]]]:
    """(a problem's folder, sizes of its shards by name), of each problem."""
    for path, sizes in sizes_by_problem(storage):
        yield storage.folder(path), {name: size for name, size in sizes.items() if version_of(name) >= 0}
