"""Each problem's shards are found without those of the others, whatever else lies in the folder."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.history.contents import Contents
from rollout_spec.history.partitions import (
    TEXTS,
    groups_of,
    path_of,
    problem_ids,
    problems_by_text,
    shards_of_earlier_versions,
    write_rollouts,
)
from rollout_spec.history.rollout import Rollout
from rollout_spec.history.shards import Entry, Origin, read_shard, write_shard
from rollout_spec.history.storage import open_storage
from tests.history.made_up import UINT64, MemoryStorage, plain, rollouts, stored

ORIGIN = Origin("tokenizer", None, "model", "states")
IDS = (0, 1, 0x3FA9000000000000, 0x3FFFFFFFFFFFFFFF, 2**64 - 1)


def a_rollout(problem_id=1, version=0, *, by_text=False):
    tokens = np.array([2, 3], np.int32)
    return Rollout(problem_id, version, np.array([1], np.int32), tokens, by_text=by_text)


def written(*some, batch=0, storage=None):
    """A storage with these rollouts."""
    storage = MemoryStorage() if storage is None else storage
    write_rollouts(storage, [Entry(1, batch, rollout) for rollout in some], ORIGIN)
    return storage


@pytest.fixture(params=["dictionary", "local", "memory"])
def storage(request, tmp_path):
    if request.param == "dictionary":
        return MemoryStorage()
    if request.param == "local":
        return open_storage(tmp_path / "h")
    pytest.importorskip("fsspec")
    return open_storage(f"memory://{tmp_path}")


def test_a_problem_has_a_folder_by_its_id(storage):
    written(*map(a_rollout, IDS), storage=storage)
    assert path_of(0x3FA9000000000000) == "problems/3f/3fa9000000000000"
    assert path_of(1) == "problems/00/0000000000000001"
    assert sorted(groups_of(storage)) == ["00", "3f", "ff"]
    assert sorted(problem_ids(storage)) == sorted(IDS)
    assert set(problem_ids(storage, ["3f"])) == set(IDS[2:4])
    assert list(problem_ids(storage, [])) == list(problem_ids(storage, ["ab"])) == []
    for problem_id in IDS:
        assert len(storage.folder(path_of(problem_id)).sizes()) == 1
        assert [e.rollout.problem_id for shard in Contents(storage, problem_id) for e in shard.entries] == [problem_id]


def test_nothing_is_found_where_nothing_was_written(storage):
    assert groups_of(storage) == list(problem_ids(storage)) == shards_of_earlier_versions(storage) == []
    assert problems_by_text(storage) == set()
    assert write_rollouts(storage, [], ORIGIN) == 0
    assert storage.folders() == []


@settings(deadline=None, derandomize=True)
@given(st.lists(st.builds(Entry, UINT64, st.integers(0, 2**63 - 1), rollouts()), max_size=8))
def test_what_is_written_is_found_by_problem(entries):
    storage = MemoryStorage()
    num_bytes = write_rollouts(storage, entries, ORIGIN)
    assert num_bytes == Contents(storage).num_bytes
    assert set(problem_ids(storage)) == {entry.rollout.problem_id for entry in entries}
    assert problems_by_text(storage) == {entry.rollout.problem_id for entry in entries if entry.rollout.by_text}
    for problem_id in problem_ids(storage):
        folder = storage.folder(path_of(problem_id))
        (name,) = folder.sizes()
        info, found = read_shard(folder, name, Origin())
        expected = [entry for entry in entries if entry.rollout.problem_id == problem_id]
        assert [(e.writer, e.batch, plain(e.rollout)) for e in found] == [
            (e.writer, e.batch, plain(e.rollout)) for e in expected
        ]
        assert info.origin == ORIGIN


def test_what_is_written_again_has_the_same_name():
    """So that an import or a conversion that was interrupted can be repeated."""
    some = [a_rollout(1), a_rollout(2, by_text=True), a_rollout(1, 3)]
    storage = written(*some)
    files = dict(storage.files)
    written(*some, storage=storage)
    assert storage.files == files


def test_folders_and_files_of_others_are_no_problems(tmp_path):
    storage = open_storage(tmp_path)
    written(a_rollout(1), storage=storage)
    group = tmp_path / "problems" / "00"
    for name in ("1", "notes", f"{1:016x}0", f"{0xAB:016X}", f"-{1:015x}", f"0x{1:014x}", "\udcff"):
        (group / name).mkdir()
    (group / f"{2:016x}").write_text("a file with a problem's name")
    (group / f"{3:016x}").symlink_to(tmp_path)
    for path in (tmp_path / "problems" / "notes.txt", tmp_path / "notes.txt"):
        path.write_text("text")
    for name in ("notes", "\udcfe"):
        (tmp_path / "problems" / name).mkdir()
        (tmp_path / name).mkdir()
    assert list(problem_ids(storage)) == [1]
    assert len(stored(storage)) == 1


def test_a_problem_in_another_group_than_its_own_is_not_read(tmp_path):
    storage = open_storage(tmp_path)
    write_shard(storage.folder(f"problems/ab/{1:016x}"), [Entry(1, 0, a_rollout(1))], ORIGIN)
    assert stored(storage) == []


def test_problems_of_which_all_shards_are_deleted_have_their_folder():
    storage = written(a_rollout(1), a_rollout(2))
    folder = storage.folder(path_of(1))
    (name,) = folder.sizes()
    folder.delete(name)
    folder.write("other", b"file")
    assert set(problem_ids(storage)) == {1, 2}
    assert len(stored(storage)) == 1


# -- problems that are told by text ----------------------------------------------------------------------------------


def test_problems_by_text_are_those_of_all_files():
    storage = written(a_rollout(1, by_text=True), a_rollout(2))
    written(a_rollout(2**64 - 1, by_text=True), a_rollout(1, by_text=True), storage=storage)
    written(a_rollout(5), storage=storage)
    assert problems_by_text(storage) == {1, 2**64 - 1}
    assert len(storage.folder(TEXTS).sizes()) == 2


def test_damaged_files_of_problems_by_text_are_left_out():
    storage = written(a_rollout(1, by_text=True))
    written(a_rollout(2, by_text=True), storage=storage)
    texts = storage.folder(TEXTS)
    first, second = sorted(texts.sizes())
    whole = texts.read(first)
    (of_second,) = problems_by_text(MemoryStorage({f"{TEXTS}/{second}": texts.read(second)}))
    for place in range(0, len(whole), 7):
        texts.write(first, whole[:place])
        assert problems_by_text(storage) == {of_second}
        texts.write(first, whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert problems_by_text(storage) == {of_second}
    texts.write(first, whole)
    texts.write("foreign.parquet", whole)
    texts.write("notes.txt", b"text")
    assert problems_by_text(storage) == {1, 2}


def test_a_file_of_problems_by_text_that_cannot_be_read_is_an_error(tmp_path):
    storage = open_storage(tmp_path)
    written(a_rollout(1, by_text=True), storage=storage)
    (tmp_path / TEXTS).rename(tmp_path / "away")
    (tmp_path / TEXTS).write_text("no folder")
    with pytest.raises(OSError):
        problems_by_text(storage)


# -- what earlier versions have written ------------------------------------------------------------------------------


def test_shards_of_earlier_versions_lie_beside_the_folders(storage):
    name, _ = write_shard(storage, [Entry(1, 0, a_rollout(1)), Entry(1, 0, a_rollout(2))], ORIGIN)
    storage.write("foreign.parquet", b"PAR1")
    storage.write("learned.npz", b"")
    written(a_rollout(3, by_text=True), storage=storage)
    assert shards_of_earlier_versions(storage) == [name]
    assert [rollout.problem_id for rollout in stored(storage)] == [3], "they are not used"
