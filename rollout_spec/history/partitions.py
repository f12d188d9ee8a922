"""Where a history keeps what: each problem's shards have a folder, so that they are found without the others.

| Path | What |
|---|---|
| `problems/3f/3fa9…/v….parquet` | Shards of the problem with this id, in folders by its first two digits |
| `texts/v….parquet` | Ids of problems that are told by their prompts' text, one file per import that brought some |
| `imports/3fa9…` | How far a recording has been imported, by its writer |
| `learned.npz`, `tidied` | See `folder.py` and `tidying.py` |
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pyarrow as arrow
import pyarrow.parquet as parquet

from rollout_spec.history.shards import Entry, Origin, ShardError, name_of, read_bytes, version_of, write_shard
from rollout_spec.history.storage import S3Storage, ShardStorage

PROBLEMS, TEXTS, IMPORTS = "problems", "texts", "imports"


def path_of(problem_id: int) -> str:
    """The folder of a problem's shards."""
    name = f"{problem_id:016x}"
    return f"{PROBLEMS}/{name[:2]}/{name}"


def groups_of(storage: ShardStorage) -> list[str]:
    """The first two digits of problems that there are."""
    return storage.folder(PROBLEMS).folders()


def problem_ids(storage: ShardStorage, groups: Iterable[str] | None = None) -> Iterator[int]:
    """Problems that have a folder, also those whose shards are deleted.

    Args:
        groups: As of `groups_of`; None: all.
    """
    for group in groups_of(storage) if groups is None else groups:
        for name in storage.folder(f"{PROBLEMS}/{group}").folders():
            if re.fullmatch("[0-9a-f]{16}", name):
                yield int(name, 16)


def sizes_by_problem(storage: ShardStorage) -> Iterator[tuple[str, dict[str, int]]]:
    """(path of a problem's folder, `ShardStorage.sizes` there), of all problems, in as few requests as can be."""
    if isinstance(storage, S3Storage):
        for path, sizes in storage.folder(PROBLEMS).sizes_below():
            yield f"{PROBLEMS}/{path}", sizes
        return
    for problem_id in problem_ids(storage):
        path = path_of(problem_id)
        yield path, storage.folder(path).sizes()


def shards_of_earlier_versions(storage: ShardStorage) -> list[str]:
    """Shards that an earlier version of rollout-spec has written, which put those of all problems into one folder."""
    return [name for name in storage.sizes() if version_of(name) >= 0]


def write_rollouts(storage: ShardStorage, entries: Iterable[Entry], origin: Origin) -> int:
    """Write rollouts of any problems. Returns their bytes.

    Raises:
        OSError: as `ShardStorage.write`.
    """
    by_problem: defaultdict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_problem[entry.rollout.problem_id].append(entry)
    by_text = sorted(problem for problem, some in by_problem.items() if any(entry.rollout.by_text for entry in some))
    num_bytes = sum(
        write_shard(storage.folder(path_of(problem)), some, origin)[1] for problem, some in by_problem.items()
    )
    if by_text:
        file = io.BytesIO()
        parquet.write_table(arrow.table({"problem_id": arrow.array(by_text, arrow.uint64())}), file)
        storage.folder(TEXTS).write(name_of(0, file.getvalue()), file.getvalue())
    return num_bytes


def problems_by_text(storage: ShardStorage) -> set[int]:
    """Problems that are told by their prompts' text. Files that are damaged are left out.

    Raises:
        OSError: as `ShardStorage`.
    """
    texts, found = storage.folder(TEXTS), set()
    for name in texts.sizes():
        try:
            data = read_bytes(texts, name)
        except ShardError:
            continue
        found.update(parquet.ParquetFile(arrow.BufferReader(data)).read(use_threads=False)["problem_id"].to_pylist())
    return found
