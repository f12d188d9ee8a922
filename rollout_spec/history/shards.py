"""Shards: files of a problem's ended rollouts, which no one changes once they are complete.

A shard is a Parquet file with the columns of SCHEMA, one row per rollout. Its name holds the newest policy version in
it, by which shards are ordered, and a digest of that and of its bytes: one that was cut, changed or renamed is refused
before anything of it is used. Its metadata say what the rollouts are of (`Origin`) and who wrote them. A writer numbers
its batches, so that a reader that has seen a batch knows it again in a merged shard.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet

from rollout_spec.checks import first_line
from rollout_spec.features.format import FEATURE_WORDS
from rollout_spec.history.rollout import CONTEXT_TOKENS, Rollout, Root
from rollout_spec.history.storage import SUFFIX, ShardStorage

FORMAT = 1
"""Raised when shards of older code can no longer be read."""
METADATA_KEY = b"rollout_spec.history"
_TOKENS = arrow.list_(arrow.field("element", arrow.int32(), nullable=False))
SCHEMA = arrow.schema(
    [
        arrow.field("writer", arrow.uint64(), nullable=False),
        arrow.field("batch", arrow.int64(), nullable=False),
        arrow.field("problem_id", arrow.uint64(), nullable=False),
        arrow.field("by_text", arrow.bool_(), nullable=False),
        arrow.field("version", arrow.int32(), nullable=False),
        arrow.field("context", _TOKENS, nullable=False),
        arrow.field("tokens", _TOKENS, nullable=False),
        arrow.field("features", arrow.binary()),  # int64 [n, FEATURE_WORDS], little-endian
        arrow.field("root_length", arrow.int32()),
        arrow.field("root_whole", arrow.uint64()),
        arrow.field("reward", arrow.float32()),
    ]
)
ISOLATED = arrow.field("isolated", arrow.bool_(), nullable=False)
"""The last column of shards with rollouts that requests of other problems must not draft from; others are without it.
Code that does not know the column, and would let them, so refuses such shards."""
_COMPRESSION = {
    (f"{field.name}.list.element" if field.type == _TOKENS else field.name): "zstd"
    for field in (*SCHEMA, ISOLATED)
    if field.name != "features"  # nearly random bits
}


class ShardError(ValueError):
    """A shard cannot be used; the message says why, but not which it is."""


class Origin(NamedTuple):
    """What a shard's rollouts come from. None: not known, which fits everything."""

    tokenizer: str | None = None
    """Fingerprint of the tokenizer's vocabulary."""
    vocab_size: int | None = None
    """Tokens that the model knows."""
    model: str | None = None
    """The model's name, for people."""
    states: str | None = None
    """Tells apart models whose hidden states cannot be compared."""

    def without_model(self) -> Origin:
        """By what origins are told apart: a model's name changes with its checkpoint's folder."""
        return self._replace(model=None)

    def check(self, theirs: Origin) -> None:
        """Raise ShardError if rollouts of another origin cannot be used here."""
        for name, ours, other in (
            ("tokenizer", self.tokenizer, theirs.tokenizer),
            ("vocabulary", self.vocab_size, theirs.vocab_size),
        ):
            if ours is not None and other is not None and ours != other:
                model = f" (model {theirs.model})" if theirs.model else ""
                raise ShardError(f"it is of another {name}{model}: {other} and not {ours}")


class Entry(NamedTuple):
    """A rollout in a shard."""

    writer: int
    """64 bits, drawn at random by each process that writes, for each problem."""
    batch: int
    """The writer's number of the shard that this rollout first came in, from 0."""
    rollout: Rollout


class ShardInfo(NamedTuple):
    """What a shard's metadata say."""

    origin: Origin
    batches: dict[int, tuple[int, int]]
    """Its first and last batch, by writer."""
    num_rollouts: int
    num_tokens: int
    """Sampled tokens, without contexts."""
    num_problems: int
    oldest_version: int
    newest_version: int


def encode(entries: Sequence[Entry], origin: Origin) -> bytes:
    """The bytes of a shard. At least one entry. O(tokens)."""
    rollouts = [entry.rollout for entry in entries]
    roots = [rollout.root for rollout in rollouts]
    columns: dict[str, Any] = {
        "writer": np.array([entry.writer for entry in entries], np.uint64),
        "batch": np.array([entry.batch for entry in entries], np.int64),
        "problem_id": np.array([rollout.problem_id for rollout in rollouts], np.uint64),
        "by_text": [rollout.by_text for rollout in rollouts],
        "version": np.array([rollout.version for rollout in rollouts], np.int32),
        "context": _lists([rollout.context for rollout in rollouts]),
        "tokens": _lists([rollout.tokens for rollout in rollouts]),
        "features": [None if r.features is None else r.features.astype("<i8").tobytes() for r in rollouts],
        "root_length": [None if root is None else root.length for root in roots],
        "root_whole": [None if root is None else root.whole for root in roots],
        "reward": [rollout.reward for rollout in rollouts],
        "isolated": [rollout.isolated for rollout in rollouts],
    }
    schema = SCHEMA.append(ISOLATED) if any(columns["isolated"]) else SCHEMA
    arrays = [arrow.array(columns[field.name], field.type) for field in schema]
    table = arrow.Table.from_arrays(arrays, schema=schema)
    batches: dict[int, tuple[int, int]] = {}
    for entry in entries:
        first, last = batches.get(entry.writer, (entry.batch, entry.batch))
        batches[entry.writer] = min(first, entry.batch), max(last, entry.batch)
    metadata = {
        "format": FORMAT,
        "origin": origin._asdict(),
        "batches": {f"{writer:016x}": list(span) for writer, span in batches.items()},
        "rollouts": len(rollouts),
        "tokens": sum(rollout.tokens.size for rollout in rollouts),
        "problems": len({rollout.problem_id for rollout in rollouts}),
        "versions": [min(r.version for r in rollouts), max(r.version for r in rollouts)],
    }
    out = arrow.BufferOutputStream()
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps(metadata)})
    parquet.write_table(table, out, compression=_COMPRESSION, use_dictionary=False)
    encoded: bytes = out.getvalue().to_pybytes()
    return encoded


def write_shard(storage: ShardStorage, entries: Sequence[Entry], origin: Origin) -> tuple[str, int]:
    """Write a shard. At least one entry.

    Returns:
        (its name, its bytes).

    Raises:
        OSError: as `ShardStorage.write`.
    """
    data = encode(entries, origin)
    name = name_of(max(entry.rollout.version for entry in entries), data)
    storage.write(name, data)
    return name, len(data)


def read_shard(storage: ShardStorage, name: str, origin: Origin) -> tuple[ShardInfo, list[Entry]]:
    """Read a shard. Features of a model with other states are left out. O(tokens).

    Args:
        origin: What its rollouts are to be used with.

    Raises:
        ShardError: it is no shard, cut, changed, of another format or of another origin.
        OSError: as `ShardStorage.read`.
    """
    return decode(read_bytes(storage, name), origin)


def read_bytes(storage: ShardStorage, name: str) -> bytes:
    """A shard's bytes, if they are what was written.

    Raises:
        ShardError: it was cut or changed.
        OSError: as `ShardStorage.read`.
    """
    # What has another name is not read, however large it is.
    data = storage.read(name) if version_of(name) >= 0 else b""
    if name.rsplit("/", 1)[-1] != name_of(version_of(name), data):
        raise ShardError("it was cut or changed: its content does not agree with its name")
    return data


def version_of(name: str) -> int:
    """The newest policy version in a shard, by its name or path; -1 of names that are no shard's."""
    match = _NAME.fullmatch(name.rsplit("/", 1)[-1])
    return int(match[1]) if match else -1


def by_version(name: str) -> tuple[int, str]:
    """Sorts shards by their names or paths, oldest policy versions first."""
    return version_of(name), name


def release_memory() -> None:
    """Give back what this thread has freed after reading and writing: Arrow keeps it, more of it from day to day."""
    arrow.default_memory_pool().release_unused()


def name_of(version: int, data: bytes) -> str:
    """The name of a shard with these bytes, whose newest policy version is `version`."""
    digest = hashlib.blake2b(data, digest_size=16, salt=version.to_bytes(8, "little", signed=True))
    return f"v{version:010d}-{digest.hexdigest()}{SUFFIX}"


_NAME = re.compile(r"v(\d{10})-[0-9a-f]{32}" + re.escape(SUFFIX))


def read_info(data: bytes) -> ShardInfo:
    """What a shard is about, from its metadata alone.

    Raises:
        ShardError: it is no shard, or of another format.
    """
    with _refusing():
        return _info(parquet.read_schema(arrow.BufferReader(data)))


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise ShardError for what bytes raise that are no shard."""
    try:
        yield
    except ShardError:
        raise
    except (arrow.ArrowException, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ShardError(f"it cannot be read: {first_line(error)}") from error


def decode(data: bytes, origin: Origin) -> tuple[ShardInfo, list[Entry]]:
    """`read_shard`, from the bytes that `encode` gave. Raises ShardError."""
    info = read_info(data)
    origin.check(info.origin)
    with _refusing():
        # Not by `read_table`: threads of Arrow's pools could let go of these bytes, which are Python's, while the
        # interpreter ends, and that aborts the process.
        table = parquet.ParquetFile(arrow.BufferReader(data)).read(use_threads=False)
        if table.schema.equals(SCHEMA):
            table = table.append_column(ISOLATED, arrow.array([False] * table.num_rows, arrow.bool_()))
        if not table.schema.equals(SCHEMA.append(ISOLATED)):
            raise ShardError(f"its columns are not those of format {FORMAT}: {', '.join(table.column_names)}")
        if table.num_rows != info.num_rollouts or not table.num_rows:
            raise ShardError(f"it has {table.num_rows} rollouts where its metadata say {info.num_rollouts}")
        return info, _entries(table, origin, info)


def _entries(table: Any, origin: Origin, info: ShardInfo) -> list[Entry]:
    contexts, tokens = _arrays(table["context"]), _arrays(table["tokens"])
    vocab_size = 2**31 if origin.vocab_size is None else origin.vocab_size
    some = np.concatenate([*contexts, *tokens])
    if some.size and not 0 <= some.min() <= some.max() < vocab_size:
        raise ShardError(f"it holds tokens outside of the vocabulary of {vocab_size}")
    has_states = origin.states is None or info.origin.states is None or origin.states == info.origin.states
    names = ("writer", "batch", "problem_id", "version", "features", "by_text", "reward", "isolated")
    rows = zip(*(table[name].to_pylist() for name in names), _roots(table), contexts, tokens, strict=True)
    entries = []
    for number, row in enumerate(rows):
        writer, batch, problem_id, version, packed, by_text, reward, isolated, root, context, ids = row
        if ids.size == 0 or context.size > CONTEXT_TOKENS:
            raise ShardError(f"rollout {number} has {ids.size} tokens after {context.size} of its prompt")
        if packed is not None and len(packed) != 8 * FEATURE_WORDS * ids.size:
            raise ShardError(f"features of rollout {number} do not fit its {ids.size} tokens")
        features = None
        if packed is not None and has_states:
            features = np.frombuffer(packed, "<i8").astype(np.int64, copy=False).reshape(-1, FEATURE_WORDS)
        rollout = Rollout(problem_id, version, context, ids, features, root, by_text, reward, isolated)
        entries.append(Entry(writer, batch, rollout))
    return entries


def _roots(table: Any) -> list[Root | None]:
    columns = (table[name].to_pylist() for name in ("root_length", "root_whole"))
    rows = zip(*columns, strict=True)
    return [None if length is None else Root(length, whole or 0) for length, whole in rows]


def _lists(values: Sequence[Any]) -> Any:
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([value.size for value in values], out=offsets[1:])
    flat = np.concatenate([np.asarray(value, np.int32) for value in values])
    return arrow.ListArray.from_arrays(arrow.array(offsets), arrow.array(flat), type=_TOKENS)


def _arrays(column: Any) -> list[Any]:
    column = column.combine_chunks() if isinstance(column, arrow.ChunkedArray) else column
    if isinstance(column, arrow.ChunkedArray):  # what combine_chunks gives differs between releases of pyarrow
        column = arrow.concat_arrays(column.chunks)
    offsets = column.offsets.to_numpy()
    return np.split(column.values.to_numpy()[offsets[0] : offsets[-1]], (offsets[1:-1] - offsets[0]))


def _info(schema: Any) -> ShardInfo:
    raw = (schema.metadata or {}).get(METADATA_KEY)
    if raw is None:
        raise ShardError("it is a Parquet file, but no shard of a history")
    metadata = json.loads(raw)
    if metadata["format"] != FORMAT:
        raise ShardError(f"its format is {metadata['format']!r}, and this version of rollout-spec reads {FORMAT}")
    origin = Origin(**metadata["origin"])
    batches = {int(writer, 16): (int(first), int(last)) for writer, (first, last) in metadata["batches"].items()}
    oldest, newest = map(int, metadata["versions"])
    num_rollouts, num_tokens, num_problems = (int(metadata[name]) for name in ("rollouts", "tokens", "problems"))
    return ShardInfo(origin, batches, num_rollouts, num_tokens, num_problems, oldest, newest)
