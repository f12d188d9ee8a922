"""Folders of shards: a file is there as a whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rollout_spec.history.storage import UNFINISHED, LocalStorage, RemoteStorage, S3Storage, is_remote, open_storage


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    if request.param == "local":
        return open_storage(tmp_path / "a" / "b")
    pytest.importorskip("fsspec")
    return open_storage(f"memory://{tmp_path}")


def test_what_is_written_is_read(storage):
    assert storage.sizes() == {}
    storage.write("a.parquet", b"abc")
    storage.write("b.parquet", b"")
    assert storage.sizes() == {"a.parquet": 3, "b.parquet": 0}
    assert storage.read("a.parquet") == b"abc"
    storage.write("a.parquet", b"d")
    assert storage.read("a.parquet") == b"d"
    storage.delete("a.parquet")
    storage.delete("a.parquet")
    assert storage.sizes() == {"b.parquet": 0}
    with pytest.raises(FileNotFoundError):
        storage.read("a.parquet")


def test_other_files_are_not_seen(tmp_path):
    storage = LocalStorage(tmp_path)
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / f"a.parquet{UNFINISHED}").write_text("half")
    storage.write("a.parquet", b"whole")
    assert storage.sizes() == {"a.parquet": 5}
    storage.remove_unfinished(before=time.time() + 60)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "a.parquet"}


def test_only_abandoned_files_are_removed(tmp_path):
    storage = LocalStorage(tmp_path)
    old, new = (tmp_path / f"{name}.parquet{UNFINISHED}" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    storage.remove_unfinished(before=time.time() - 60)
    assert not old.exists()
    assert new.exists()


def test_one_process_tidies(tmp_path):
    storage, other = LocalStorage(tmp_path), LocalStorage(tmp_path)
    storage.write("a.parquet", b"a")
    with storage.tidying() as is_ours, other.tidying() as is_theirs:
        assert is_ours
        assert not is_theirs
    with other.tidying() as is_theirs:
        assert is_theirs


def test_there_is_nothing_to_tidy_where_nothing_was_written(tmp_path):
    with LocalStorage(tmp_path / "none").tidying() as is_ours:
        assert not is_ours
    assert not (tmp_path / "none").exists()


def test_what_was_never_written_has_nothing_in_it(storage):
    below = storage.folder("a/b")
    assert (below.sizes(), below.folders(), storage.folders()) == ({}, [], [])
    below.remove_unfinished(before=time.time() + 60)
    below.delete("a.parquet")
    with pytest.raises(FileNotFoundError):
        below.read("a.parquet")
    assert storage.folders() == []


def test_folders_of_a_folder(storage):
    storage.write("top.parquet", b"a")
    storage.folder("a/b").write("one.parquet", b"ab")
    storage.folder("a").folder("c").write("two.parquet", b"abc")
    storage.folder("d").write("no shard", b"abcd")
    assert sorted(storage.folders()) == ["a", "d"]
    assert sorted(storage.folder("a").folders()) == ["b", "c"]
    assert storage.sizes() == {"top.parquet": 1}
    assert storage.folder("a").sizes() == storage.folder("d").sizes() == {}
    assert storage.folder("a/c").sizes() == {"two.parquet": 3}
    assert storage.read("a/b/one.parquet") == storage.folder("a/b").read("one.parquet") == b"ab"
    storage.delete("a/b/one.parquet")
    assert storage.folder("a/b").sizes() == {}
    assert storage.folder("d").read("no shard") == b"abcd"


def test_what_is_abandoned_is_removed_in_one_folder_alone(tmp_path):
    storage = LocalStorage(tmp_path)
    here, below = tmp_path / f"a.parquet{UNFINISHED}", tmp_path / "below" / f"a.parquet{UNFINISHED}"
    below.parent.mkdir()
    for path in (here, below):
        path.write_bytes(b"half")
    storage.folder("below").remove_unfinished(before=time.time() + 60)
    assert here.exists()
    assert not below.exists()


def test_folders_are_tidied_by_one_process_each(tmp_path):
    one, other = (LocalStorage(tmp_path).folder(name) for name in ("a", "b"))
    for storage in (one, other):
        storage.write("a.parquet", b"a")
    with one.tidying() as is_ours, other.tidying() as is_theirs:
        assert is_ours
        assert is_theirs


def test_links_to_folders_are_none_of_a_history(tmp_path):
    """One that leads back up would be walked without end."""
    storage = LocalStorage(tmp_path / "h")
    storage.write("a.parquet", b"a")
    (tmp_path / "h" / "up").symlink_to(tmp_path)
    assert storage.folders() == []


def test_a_new_folder_is_on_the_disk_before_what_is_in_it(tmp_path, monkeypatch):
    """Each folder's name is flushed in the one above, or a crash could lose a shard that was written."""
    flushed = []
    monkeypatch.setattr("rollout_spec.history.storage._flush_names", flushed.append)
    LocalStorage(tmp_path).folder("a/b").write("a.parquet", b"a")
    assert flushed == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    flushed.clear()
    LocalStorage(tmp_path).folder("a/b").write("b.parquet", b"b")
    assert flushed == [tmp_path / "a" / "b"]


class KilledError(BaseException):
    """What no handler catches."""


@pytest.mark.parametrize("function", ["os.fsync", "pathlib.Path.replace"])
def test_a_process_that_is_killed_leaves_nothing_that_is_read(tmp_path, monkeypatch, function):
    storage = LocalStorage(tmp_path)
    storage.write("a.parquet", b"first")

    def killed(*arguments):
        raise KilledError

    monkeypatch.setattr(function, killed)
    for name in ("a.parquet", "b.parquet"):
        with pytest.raises(KilledError):
            storage.write(name, b"second")
    monkeypatch.undo()
    assert storage.sizes() == {"a.parquet": 5}
    assert storage.read("a.parquet") == b"first"


@pytest.mark.parametrize("function", ["os.fsync", "pathlib.Path.replace"])
def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch, function):
    storage = LocalStorage(tmp_path)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(function, full)
    with pytest.raises(OSError, match="No space left"):
        storage.write("a.parquet", b"abc")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    storage.write("a.parquet", b"abc")
    assert storage.sizes() == {"a.parquet": 3}


@pytest.mark.slow
def test_killed_writers(tmp_path):
    """Files are whole at every moment while a process that writes them is killed."""
    code = """
        import sys
        from pathlib import Path
        from rollout_spec.history.storage import LocalStorage
        storage = LocalStorage(Path(sys.argv[1]))
        for i in range(10**6):
            storage.write(f"{i % 7}.parquet", bytes([i % 251]) * 3_000_000)
    """
    root = Path(__file__).parents[2]
    storage = LocalStorage(tmp_path / "h")
    for milliseconds in range(0, 100, 20):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "h")],
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        while not storage.sizes():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(milliseconds / 1000)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert set(storage.sizes().values()) == {3_000_000}
        for name in storage.sizes():
            assert len(set(storage.read(name))) == 1
            storage.delete(name)
    storage.remove_unfinished(before=time.time() + 60)
    assert not list((tmp_path / "h").glob(f"*{UNFINISHED}"))


def test_files_that_vanish_while_they_are_listed(tmp_path):
    storage = LocalStorage(tmp_path)
    stopping = threading.Event()

    def write_and_delete():
        while not stopping.is_set():
            storage.write("a.parquet", b"abc")
            storage.delete("a.parquet")

    thread = threading.Thread(target=write_and_delete)
    thread.start()
    try:
        for _ in range(200):
            assert storage.sizes() in ({}, {"a.parquet": 3})
    finally:
        stopping.set()
        thread.join()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_by_permission(tmp_path):
    storage = LocalStorage(tmp_path)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            storage.write("a.parquet", b"abc")
        assert storage.sizes() == {}
    finally:
        tmp_path.chmod(0o700)


def test_folders_that_are_none(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    for path in (file, file / "below"):
        with pytest.raises(OSError):
            LocalStorage(path).sizes()
        with pytest.raises(OSError):
            LocalStorage(path).write("a.parquet", b"abc")
    with pytest.raises(OSError):
        LocalStorage(Path("/proc/none")).write("a.parquet", b"abc")
    assert file.read_text() == "text"


def test_urls(tmp_path):
    assert isinstance(open_storage(f"file://{tmp_path}"), LocalStorage)
    assert isinstance(open_storage(f"local://{tmp_path}"), LocalStorage)
    assert isinstance(open_storage("some/folder"), LocalStorage)
    open_storage(f"file://{tmp_path}/h").write("a.parquet", b"abc")
    assert (tmp_path / "h" / "a.parquet").read_bytes() == b"abc"
    assert not is_remote("file:///a")
    assert is_remote("s3://bucket/a")
    pytest.importorskip("fsspec")
    assert isinstance(open_storage("memory://some/folder"), RemoteStorage)
    with pytest.raises(ValueError, match="history_dir 'nothing://there' cannot be used: Protocol not known"):
        open_storage("nothing://there")


def test_another_process_sees_the_files_of_a_shared_file_system(tmp_path):
    """fsspec keeps listings in a cache, which must not hide what others have written since."""
    pytest.importorskip("fsspec")
    first, second = open_storage(f"memory://{tmp_path}"), open_storage(f"memory://{tmp_path}")
    assert second.sizes() == {}
    first.write("a.parquet", b"abc")
    assert second.sizes() == {"a.parquet": 3}
    first.write("notes.txt", b"abc")
    first.write("below/b.parquet", b"abc")
    assert second.sizes() == {"a.parquet": 3}


class Listed:
    """A file system of s3fs that lists a bucket as S3 does, two names at a time.

    Args:
        sizes: Bytes of each object, by key.
    """

    def __init__(self, sizes):
        self._sizes = sizes

    def call_s3(self, method, *, Bucket, Prefix, Delimiter, ContinuationToken="0"):
        assert (method, Bucket) == ("list_objects_v2", "bucket")
        found = {}  # by key, a folder's ends with the delimiter; None: a folder
        for key, size in sorted(self._sizes.items()):
            if key.startswith(Prefix):
                below, is_in_folder, _ = key.removeprefix(Prefix).partition(Delimiter or "\0")
                found[f"{Prefix}{below}/" if is_in_folder else key] = None if is_in_folder else size
        first = int(ContinuationToken)
        some = list(found.items())[first : first + 2]
        return {
            "Contents": [{"Key": key, "Size": size} for key, size in some if size is not None],
            "CommonPrefixes": [{"Prefix": key} for key, size in some if size is None],
            "IsTruncated": first + 2 < len(found),
            "NextContinuationToken": str(first + 2),
        }


def test_a_listing_of_a_bucket_has_all_that_is_in_a_folder_and_nothing_else():
    """Keys only begin alike: `run2/` is no folder in `run/`."""
    sizes = {
        "run/a.parquet": 1, "run/notes.txt": 2, "run/problems/00/0/b.parquet": 3, "run/problems/00/0/c.parquet": 4,
        "run/problems/01/1/d.parquet": 5, "run/problems/01/1/notes.txt": 6, "run/problems/02/2/notes.txt": 7,
        "run/texts/e.parquet": 8, "run2/f.parquet": 9, "run2/problems/03/3/g.parquet": 10, "h.parquet": 11,
    }  # fmt: skip
    bucket = S3Storage(Listed(sizes), "bucket")
    run = bucket.folder("run")
    assert run.sizes() == {"a.parquet": 1}
    assert run.folders() == ["problems", "texts"]
    assert list(run.folder("problems").sizes_below()) == [
        ("00/0", {"b.parquet": 3, "c.parquet": 4}),
        ("01/1", {"d.parquet": 5}),
    ]
    assert (bucket.sizes(), bucket.folders()) == ({"h.parquet": 11}, ["run", "run2"])
    assert run.folder("none").sizes() == {}
