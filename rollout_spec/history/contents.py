"""What a folder of history holds, and how some of it is removed or written elsewhere."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet

from rollout_spec.features.format import LOGPROB_STEP, TOP_TOKENS, unpack
from rollout_spec.history.partitions import path_of, sizes_by_problem
from rollout_spec.history.recordings import exported_line
from rollout_spec.history.rollout import Rollout
from rollout_spec.history.shards import Entry, Origin, ShardError, ShardInfo, by_version, read_shard, write_shard
from rollout_spec.history.storage import ShardStorage


class Shard(NamedTuple):
    """A shard that can be used."""

    name: str
    """Its path in the history."""
    num_bytes: int
    info: ShardInfo
    entries: list[Entry]


class Contents:
    """The shards of a history, one after the other, oldest policy versions first.

    Args:
        problem_id: The problem whose shards are wanted; None: all.

    Attributes:
        num_bytes: Of all shards, those that cannot be used included.
        refused: Why shards cannot be used, by name; of those that have been iterated over.

    Raises:
        OSError: the folder cannot be read. So may iterating.
    """

    def __init__(self, storage: ShardStorage, problem_id: int | None = None) -> None:
        self._storage = storage
        folders = sizes_by_problem(storage)
        if problem_id is not None:
            folders = iter([(path_of(problem_id), storage.folder(path_of(problem_id)).sizes())])
        self._sizes = {f"{path}/{name}": size for path, sizes in folders for name, size in sizes.items()}
        self.num_bytes = sum(self._sizes.values())
        self.refused: dict[str, str] = {}

    def __len__(self) -> int:
        """Shards."""
        return len(self._sizes)

    def __iter__(self) -> Iterator[Shard]:
        for name in sorted(self._sizes, key=by_version):
            with contextlib.suppress(FileNotFoundError):  # merged or deleted meanwhile
                try:
                    info, entries = read_shard(self._storage, name, Origin())
                except ShardError as error:
                    self.refused[name] = str(error)
                else:
                    yield Shard(name, self._sizes[name], info, entries)


def each_once(shards: Iterable[Shard]) -> Iterator[Rollout]:
    """Their rollouts: while shards are merged, or after a crash, a batch can be in two of them."""
    seen: set[tuple[int, int, int]] = set()
    for shard in shards:
        keys = [(entry.rollout.problem_id, entry.writer, entry.batch) for entry in shard.entries]
        yield from (entry.rollout for key, entry in zip(keys, shard.entries, strict=True) if key not in seen)
        seen.update(keys)


@dataclass
class Summary:
    """Figures of a history.

    Attributes:
        shards, num_bytes: All that are there, those that cannot be used included.
        rollouts, tokens: What can be used; tokens are sampled ones, without contexts.
        rollouts_with_features: Those with what the target saw.
        problems: How many rollouts each has, by its id.
        versions: (rollouts, tokens) of each policy version.
        origins: How many shards come from each.
        refused: Why shards cannot be used, by name.
    """

    shards: int
    num_bytes: int
    rollouts: int = 0
    tokens: int = 0
    rollouts_with_features: int = 0
    problems: Counter[int] = field(default_factory=Counter)
    versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    origins: Counter[Origin] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "shards": self.shards,
            "bytes": self.num_bytes,
            "bytes_per_token": self.num_bytes / self.tokens if self.tokens else None,
            "rollouts": self.rollouts,
            "rollouts_with_features": self.rollouts_with_features,
            "problems": len(self.problems),
            "tokens": self.tokens,
            "versions": [
                {"version": version, "rollouts": rollouts, "tokens": tokens}
                for version, (rollouts, tokens) in sorted(self.versions.items())
            ],
            "origins": [{**origin._asdict(), "shards": count} for origin, count in self.origins.items()],
            "refused": self.refused,
        }


def summarize(contents: Contents) -> Summary:
    """Read everything once."""
    summary = Summary(len(contents), contents.num_bytes, refused=contents.refused)

    def counted() -> Iterator[Shard]:
        for shard in contents:
            summary.origins[shard.info.origin] += 1
            yield shard

    for rollout in each_once(counted()):
        summary.rollouts += 1
        summary.tokens += rollout.tokens.size
        summary.rollouts_with_features += rollout.features is not None
        summary.problems[rollout.problem_id] += 1
        rollouts, tokens = summary.versions.get(rollout.version, (0, 0))
        summary.versions[rollout.version] = rollouts + 1, tokens + rollout.tokens.size
    return summary


class Pruning(NamedTuple):
    """What is to be removed."""

    keep: dict[str, list[bool]]
    """Whether each rollout stays, by the shards of which some go."""
    rollouts: int
    """That go."""
    tokens: int
    num_bytes: int
    """About what they take; a shard that is written anew is compressed anew."""
    is_all: bool
    """Whether none would be left."""


class _Place(NamedTuple):
    """A rollout, ordered by age."""

    version: int
    writer: int
    batch: int
    shard: str
    row: int
    problem_id: int
    tokens: int
    num_bytes: float


def plan_pruning(
    contents: Contents,
    *,
    max_bytes: int | None = None,
    keep_versions: int | None = None,
    problem_id: int | None = None,
    writers: Collection[int] = (),
) -> Pruning:
    """What has to go. Shards that cannot be used are left alone.

    Args:
        max_bytes: So many bytes may stay; the oldest rollouts go first.
        keep_versions: So many policy versions stay, the newest that there are.
        problem_id: The problem whose rollouts go.
        writers: Those whose rollouts go.
    """
    places = []
    for name, size, _, entries in contents:
        num_tokens = sum(entry.rollout.tokens.size for entry in entries)
        for row, entry in enumerate(entries):
            rollout, tokens = entry.rollout, entry.rollout.tokens.size
            share = size * tokens / num_tokens
            place = _Place(rollout.version, entry.writer, entry.batch, name, row, rollout.problem_id, tokens, share)
            places.append(place)
    places.sort()
    versions = sorted({place.version for place in places}, reverse=True)
    oldest = versions[:keep_versions][-1] if versions and keep_versions is not None else 0
    is_out = [place.version < oldest or place.problem_id == problem_id or place.writer in writers for place in places]
    if max_bytes is not None:
        too_many = sum(place.num_bytes for place, out in zip(places, is_out, strict=True) if not out) - max_bytes
        for i, place in enumerate(places):
            if too_many > 0 and not is_out[i]:
                is_out[i] = True
                too_many -= place.num_bytes
    keep: dict[str, dict[int, bool]] = {}
    for place, out in zip(places, is_out, strict=True):
        keep.setdefault(place.shard, {})[place.row] = not out
    gone = list(itertools.compress(places, is_out))
    return Pruning(
        {name: [rows[i] for i in range(len(rows))] for name, rows in keep.items() if not all(rows.values())},
        len(gone),
        sum(place.tokens for place in gone),
        round(sum(place.num_bytes for place in gone)),
        len(gone) == len(places),
    )


def prune(storage: ShardStorage, pruning: Pruning) -> None:
    """Remove it. What stays of a shard is written before the shard is deleted.

    Raises:
        OSError: as `ShardStorage`.
    """
    for name, keep in pruning.keep.items():
        try:
            info, entries = read_shard(storage, name, Origin())
        except (FileNotFoundError, ShardError):  # merged or deleted since it was planned
            continue
        kept = list(itertools.compress(entries, keep))
        if kept:
            write_shard(storage.folder(name.rpartition("/")[0]), kept, info.origin)
        storage.delete(name)


def export_lines(rollouts: Iterable[Rollout], path: Path) -> int:
    """Write JSONL from which `rollout-spec history import` makes the same rollouts. Returns how many.

    Raises:
        OSError: the file cannot be written.
    """
    count = 0
    with path.open("w") as file:
        for rollout in rollouts:
            file.write(exported_line(rollout) + "\n")
            count += 1
    return count


def export_traces(contents: Contents, path: Path) -> tuple[int, int, bool]:
    """Write a Parquet file for `rollout-spec replay`: see `rollout_spec.history.traces`. Prompts are their ends alone.

    Isolated rollouts are left out: a replay knows no tenants, and imported traces serve every request.

    Returns:
        (rollouts, isolated ones, whether features are among the columns: they are where every rollout has some).

    Raises:
        OSError: the file cannot be written.
    """
    rollouts = each_once(contents)
    has_features = len(contents) > 0 and all(rollout.features is not None for rollout in rollouts)
    tokens = arrow.list_(arrow.int32())
    names = [("prompt_id", arrow.string()), ("sample_id", arrow.int64()), ("epoch", arrow.int32())]
    names += [("prompt_tokens", tokens), ("completion_tokens", tokens)]
    if has_features:
        names += [("top_ids", tokens), ("top_logprobs", arrow.list_(arrow.float32())), ("signatures", arrow.binary())]
    schema = arrow.schema(names)
    samples: Counter[int] = Counter()
    count = num_isolated = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        rollouts = each_once(contents)
        while some := list(itertools.islice(rollouts, 1024)):
            rows = []
            for rollout in some:
                if rollout.isolated:
                    num_isolated += 1
                    continue
                row = {
                    "prompt_id": f"{rollout.problem_id:016x}",
                    "sample_id": samples[rollout.problem_id],
                    "epoch": rollout.version,
                    "prompt_tokens": rollout.context,
                    "completion_tokens": rollout.tokens,
                }
                samples[rollout.problem_id] += 1
                if has_features:
                    row.update(_feature_columns(rollout))
                rows.append(row)
            writer.write_table(arrow.Table.from_pylist(rows, schema))
            count += len(rows)
    return count, num_isolated, has_features


def _feature_columns(rollout: Rollout) -> dict[str, Any]:
    assert rollout.features is not None
    signatures, top_ids, codes = unpack(rollout.features)
    logprobs = (1 - codes.astype(np.float32)) * LOGPROB_STEP
    logprobs[codes == 0] = -np.inf  # tokens of which nothing is known
    assert top_ids.shape[1] == TOP_TOKENS
    return {
        "top_ids": top_ids.ravel(),
        "top_logprobs": logprobs.ravel(),
        "signatures": signatures.astype("<u8").tobytes(),
    }
