"""Shards: what is written is read, and what was damaged or is of something else is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.features.format import no_features
from rollout_spec.history.rollout import Rollout
from rollout_spec.history.shards import (
    FORMAT,
    ISOLATED,
    METADATA_KEY,
    SCHEMA,
    Entry,
    Origin,
    ShardError,
    decode,
    encode,
    name_of,
    read_bytes,
    read_info,
    read_shard,
    version_of,
    write_shard,
)
from tests.history.made_up import UINT64, MemoryStorage, plain, rollouts

ANY = Origin()
OURS = Origin("tokenizer", 100, "model", "states")
ENTRIES = st.lists(st.builds(Entry, UINT64, st.integers(0, 2**63 - 1), rollouts()), min_size=1, max_size=8)


def a_rollout(version=3, tokens=(2, 3), context=(1,), features=None):
    return Rollout(7, version, np.array(context, np.int32), np.array(tokens, np.int32), features)


def a_shard(*some, origin=OURS):
    """(a storage, the shard's name)."""
    storage = MemoryStorage()
    name, _ = write_shard(storage, [Entry(9, i, rollout) for i, rollout in enumerate(some or [a_rollout()])], origin)
    return storage, name


def refused(storage, name, origin=ANY):
    with pytest.raises(ShardError) as error:
        read_shard(storage, name, origin)
    return str(error.value)


# -- what is written is read -----------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True)
@given(ENTRIES, st.builds(Origin, *[st.none() | st.text()] * 1, st.none() | st.just(2**31), st.none() | st.text()))
def test_round_trip(entries, origin):
    storage = MemoryStorage()
    name, size = write_shard(storage, entries, origin)
    assert storage.sizes() == {name: size}
    info, found = read_shard(storage, name, origin)
    assert [(e.writer, e.batch, plain(e.rollout)) for e in found] == [
        (e.writer, e.batch, plain(e.rollout)) for e in entries
    ]
    for entry in found:
        assert entry.rollout.tokens.dtype == entry.rollout.context.dtype == np.int32
        assert entry.rollout.features is None or entry.rollout.features.dtype == np.int64
    assert info == read_info(storage.read(name))
    assert info.origin == origin
    assert info.num_rollouts == len(entries)
    assert info.num_tokens == sum(entry.rollout.tokens.size for entry in entries)
    assert info.num_problems == len({entry.rollout.problem_id for entry in entries})
    versions = [entry.rollout.version for entry in entries]
    assert (info.oldest_version, info.newest_version) == (min(versions), max(versions))
    assert version_of(name) == max(versions)
    batches = {}
    for entry in entries:
        batches.setdefault(entry.writer, []).append(entry.batch)
    assert info.batches == {writer: (min(some), max(some)) for writer, some in batches.items()}


def test_the_same_entries_give_the_same_shard():
    assert a_shard()[1] == a_shard()[1]
    assert len({a_shard()[1], a_shard(a_rollout(tokens=(2, 4)))[1], a_shard(origin=ANY)[1]}) == 3


def test_names_are_ordered_by_version():
    names = [a_shard(a_rollout(version), a_rollout(0))[1] for version in (0, 9, 10, 2**31 - 1)]
    assert names == sorted(names)
    assert [version_of(name) for name in names] == [0, 9, 10, 2**31 - 1]
    assert version_of("foreign.parquet") == version_of(names[0] + ".unfinished") == -1


def test_large_rollouts(tmp_path):
    """More tokens than one data page of Parquet holds, after a context that is empty."""
    rng = np.random.default_rng(0)
    made = [a_rollout(tokens=rng.integers(0, 100, size), context=()) for size in (1, 300_000, 1, 5, 200_000)]
    storage, name = a_shard(*made)
    _, found = read_shard(storage, name, OURS)
    assert all(np.array_equal(e.rollout.tokens, r.tokens) for e, r in zip(found, made, strict=True))


# -- what is of something else ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        (OURS._replace(tokenizer="other"), "it is of another tokenizer (model model): tokenizer and not other"),
        (OURS._replace(vocab_size=99), "it is of another vocabulary (model model): 100 and not 99"),
    ],
)
def test_other_origins(ours, message):
    assert refused(*a_shard(), ours) == message


FITTING = [ANY, OURS, Origin(tokenizer="tokenizer"), OURS._replace(model="other", states="other")]


@pytest.mark.parametrize("ours", FITTING)
def test_origins_that_fit(ours):
    assert len(read_shard(*a_shard(), ours)[1]) == 1
    assert len(read_shard(*a_shard(origin=ANY), ours)[1]) == 1


def test_features_of_other_states_are_left_out():
    rollout = a_rollout(features=no_features(2) + 5)
    for theirs, ours, is_known in (("a", "a", True), ("a", "b", False), (None, "b", True), ("a", None, True)):
        shard = a_shard(rollout, origin=OURS._replace(states=theirs))
        _, ((_, _, found),) = read_shard(*shard, OURS._replace(states=ours))
        assert (found.features is not None) == is_known
        assert found.tokens.tolist() == [2, 3]


@pytest.mark.parametrize("rollout", [a_rollout(tokens=(1, 100)), a_rollout(context=(100,)), a_rollout(tokens=(-1,))])
def test_tokens_outside_of_the_vocabulary(rollout):
    assert refused(*a_shard(rollout), OURS) == "it holds tokens outside of the vocabulary of 100"
    negative = rollout.tokens.min() < 0
    if negative:
        assert "outside of the vocabulary" in refused(*a_shard(rollout))
    else:
        read_shard(*a_shard(rollout), ANY)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (a_rollout(tokens=()), "rollout 0 has 0 tokens after 1 of its prompt"),
        (a_rollout(context=range(33)), "rollout 0 has 2 tokens after 33 of its prompt"),
        (a_rollout(features=no_features(3)), "features of rollout 0 do not fit its 2 tokens"),
    ],
)
def test_rollouts_that_are_none(rollout, message):
    assert refused(*a_shard(rollout)) == message


# -- what was damaged ------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True)
@given(st.data())
def test_damaged_shards_are_refused(data):
    storage, name = a_shard(a_rollout(), a_rollout(4, features=no_features(2)))
    content = storage.files[name]
    kind = data.draw(st.sampled_from(["cut", "flip", "longer", "random", "empty"]))
    where = data.draw(st.integers(0, len(content) - 1))
    if kind == "cut":
        content = content[:where]
    elif kind == "flip":
        flipped = content[where] ^ 1 << data.draw(st.integers(0, 7))
        content = content[:where] + bytes([flipped]) + content[where + 1 :]
    elif kind == "longer":
        content += data.draw(st.binary(min_size=1))
    else:
        content = data.draw(st.binary()) if kind == "random" else b""
    storage.files[name] = content
    assert refused(storage, name) == "it was cut or changed: its content does not agree with its name"
    with pytest.raises(ShardError):
        read_bytes(storage, name)


def test_shards_under_another_name_are_refused():
    storage, name = a_shard()
    for other in ("foreign.parquet", "v0000000003-.parquet", f"v0000000003-{'0' * 32}.parquet"):
        storage.files[other] = storage.files[name]
        assert refused(storage, other).startswith("it was cut or changed")


def test_a_shard_that_is_renamed_to_another_version_is_refused():
    """It would be taken for newer than it is, and stay where newer ones are deleted."""
    storage, name = a_shard(a_rollout(version=5))
    assert version_of(name) == 5
    for version in (3, 9):
        other = f"v{version:010d}{name[11:]}"
        storage.files[other] = storage.files[name]
        assert refused(storage, other).startswith("it was cut or changed")
    assert read_shard(storage, name, ANY)[0].newest_version == 5


def test_a_shard_is_known_by_its_path():
    storage, name = a_shard(a_rollout(version=5))
    path = f"problems/00/{name}"
    storage.files[path] = storage.files[name]
    assert version_of(path) == 5
    assert read_shard(storage, path, ANY)[0].newest_version == 5
    other = f"problems/00/v{9:010d}{name[11:]}"
    storage.files[other] = storage.files[name]
    assert refused(storage, other).startswith("it was cut or changed")
    assert version_of(f"{name}/other.parquet") == -1


def forged(table, metadata, **options):
    """A shard of a table, with a name that fits. None as metadata: none."""
    sink = arrow.BufferOutputStream()
    raw = None if metadata is None else {METADATA_KEY: json.dumps(metadata)}
    parquet.write_table(table.replace_schema_metadata(raw), sink, **options)
    return stored_as_named(sink.getvalue().to_pybytes())


def stored_as_named(data):
    storage = MemoryStorage()
    name = name_of(3, data)
    storage.files[name] = data
    return storage, name


def parts(*some):
    """(the table of a shard, its metadata)."""
    storage, name = a_shard(*some)
    table = parquet.read_table(arrow.BufferReader(storage.files[name]))
    return table, json.loads(table.schema.metadata[METADATA_KEY])


@settings(deadline=None, derandomize=True)  # whether pyarrow takes all bytes is not ours to find out
@given(st.binary() | st.binary().map(lambda data: b"PAR1" + data + b"PAR1"))
def test_no_bytes_do_more_than_be_refused(data):
    assert refused(*stored_as_named(data)).startswith("it cannot be read: ")


def test_other_parquet_files():
    table, metadata = parts()
    assert refused(*forged(table, None)) == "it is a Parquet file, but no shard of a history"
    assert refused(*forged(arrow.table({"a": [1]}), None)) == "it is a Parquet file, but no shard of a history"
    wrong = refused(*forged(table.drop_columns(["reward"]), metadata))
    assert wrong.startswith(f"its columns are not those of format {FORMAT}: writer, batch, ")
    other_type = table.set_column(4, "version", table["version"].cast(arrow.int64()))
    assert "its columns are not" in refused(*forged(other_type, metadata))
    turned = table.select(table.column_names[::-1])
    assert "its columns are not" in refused(*forged(turned, metadata))


def test_other_formats():
    table, metadata = parts()
    message = f"its format is {FORMAT + 1}, and this version of rollout-spec reads {FORMAT}"
    assert refused(*forged(table, {**metadata, "format": FORMAT + 1})) == message
    with pytest.raises(ShardError, match="its format is"):
        read_info(forged(table, {**metadata, "format": 0})[0].files.popitem()[1])


@pytest.mark.parametrize("missing", ["format", "origin", "batches", "rollouts", "tokens", "problems", "versions"])
@pytest.mark.parametrize("value", ["missing", None, 5, "text", [1], {"a": 1}])
def test_metadata_that_are_not_whole(missing, value):
    table, metadata = parts()
    if value == "missing":
        del metadata[missing]
    else:
        metadata[missing] = value
    if missing in ("tokens", "problems") and value == 5:  # figures that nothing else says
        assert len(read_shard(*forged(table, metadata), ANY)[1]) == 1
    else:
        refused(*forged(table, metadata))


@pytest.mark.parametrize("metadata", [[], None, 3, "text"])
def test_metadata_of_another_kind(metadata):
    table, _ = parts()
    sink = arrow.BufferOutputStream()
    parquet.write_table(table.replace_schema_metadata({METADATA_KEY: json.dumps(metadata)}), sink)
    refused(*stored_as_named(sink.getvalue().to_pybytes()))


def test_rows_that_are_missing_or_too_many():
    table, metadata = parts(a_rollout(), a_rollout())
    assert refused(*forged(table.slice(0, 1), metadata)) == "it has 1 rollouts where its metadata say 2"
    assert "it has 4 rollouts" in refused(*forged(arrow.concat_tables([table, table]), metadata))
    assert "it has 0 rollouts" in refused(*forged(table.slice(0, 0), {**metadata, "rollouts": 0}))


def test_rows_in_another_order_are_the_same_rollouts():
    """Whatever writes a shard anew: other order, row groups, compression and encodings."""
    made = [a_rollout(tokens=range(i + 1), context=range(i)) for i in range(6)]
    table, metadata = parts(*made)
    turned = table.take([5, 0, 3, 1, 4, 2])
    for options in ({}, {"row_group_size": 1}, {"compression": "none"}, {"use_dictionary": True, "version": "1.0"}):
        _, found = read_shard(*forged(turned, metadata, **options), ANY)
        assert [e.rollout.tokens.size for e in found] == [6, 1, 4, 2, 5, 3]
        assert all(e.rollout.context.size == e.rollout.tokens.size - 1 for e in found)


COUNT_THREADS = """
import os, sys
from pathlib import Path
from rollout_spec.history.shards import Origin, decode
data = Path(sys.argv[1]).read_bytes()
before = os.listdir("/proc/self/task")
decode(data, Origin())
print(len(os.listdir("/proc/self/task")) - len(before))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads cannot be counted")
def test_to_decode_starts_no_threads(tmp_path):
    """They could let go of Python's bytes while the interpreter ends, which aborts the process."""
    (tmp_path / "shard").write_bytes(encode([Entry(1, 0, a_rollout())], ANY))
    run = subprocess.run(
        [sys.executable, "-c", COUNT_THREADS, str(tmp_path / "shard")], capture_output=True, text=True, check=True
    )
    assert run.stdout == "0\n"


def test_the_schema_is_what_files_have():
    """Readers of older code compare it as a whole: a change needs another FORMAT.

    They refuse what requests of other problems must not draft from, which they would let them.
    """
    isolated = a_rollout()._replace(isolated=True)
    for some, expected in (
        ([a_rollout()], SCHEMA),
        ([isolated], SCHEMA.append(ISOLATED)),
        ([a_rollout(), isolated], SCHEMA.append(ISOLATED)),
    ):
        data = encode([Entry(1, 2, rollout) for rollout in some], ANY)
        assert parquet.read_schema(arrow.BufferReader(data)).equals(expected)
        assert [entry.rollout.isolated for entry in decode(data, ANY)[1]] == [rollout.isolated for rollout in some]
    names = "writer batch problem_id by_text version context tokens features root_length root_whole reward"
    assert SCHEMA.names == names.split()
