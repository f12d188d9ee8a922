"""Folders that are full, read-only, hang, go away or hold odd things: what was said is written later, or counted."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import threading
import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_spec.history import folder as folder_module
from rollout_spec.history import problem, tidying
from rollout_spec.history.folder import HistoryFolder
from rollout_spec.history.partitions import path_of
from rollout_spec.history.problem import LONGEST_PAUSE, SHARDS_PER_MERGE
from rollout_spec.history.rollout import Rollout
from rollout_spec.history.shards import Origin
from rollout_spec.history.storage import UNFINISHED, LocalStorage, open_storage
from rollout_spec.history.tidying import prune_oldest

ORIGIN = Origin("tokenizer", 1000, "model", "states")
PROBLEM = 7


@pytest.fixture(autouse=True)
def _every_exchange_looks(monkeypatch):
    """Also at problems of which nothing has come for long."""
    monkeypatch.setattr(folder_module, "LONGEST", 1)
    monkeypatch.setattr(problem, "SHARE_OF_MERGES", 1.0)


def rollout(number, version=0):
    """8 tokens, its prompt's included, which say which it is."""
    tokens = np.full(5, number, np.int32)
    return Rollout(PROBLEM, version, tokens[:3], tokens, None)


def open_folder(path, max_bytes=1 << 30):
    return HistoryFolder(str(path), ORIGIN, max_bytes=max_bytes)


def write(folder, *numbers):
    folder.add([rollout(number) for number in numbers])
    folder.exchange()


def held_by(path):
    """The rollouts that a run that starts now would find."""
    return [int(rollout.tokens[0]) for rollout in open_folder(path).load(10**6)]


def received(folder):
    if PROBLEM not in folder._asked:
        folder.watch(PROBLEM, is_known=True)
    folder.exchange()
    return [int(rollout.tokens[0]) for rollout in folder.take()]


def shards_in(path):
    return sorted(path.rglob("*.parquet"))


def files_in(path):
    return [file for file in path.rglob("*") if file.is_file()]


def merge(path):
    """Let an engine read all, and so merge it. Returns how many shards are left."""
    received(open_folder(path))
    return len(shards_in(path))


def counts(folder):
    """(written, waiting, lost)."""
    stats = folder.stats
    return stats.rollouts_written, stats.rollouts_waiting, stats.rollouts_lost


@pytest.fixture
def clock(monkeypatch):
    """What folders take for the time: a list of one number of seconds."""
    now = [1000.0]
    for module in (folder_module, problem):
        fake = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
        monkeypatch.setattr(module, "time", fake)
    monkeypatch.setattr(folder_module, "SECONDS_PER_CHECK", 1e9)
    return now


@contextlib.contextmanager
def quota(size):
    """Longer files are written in part, then writing fails: the kernel does to them what a quota does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_there_is_no_room_for_is_written_once_there_is(tmp_path, clock, caplog):
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    write(one, 1)
    with quota(1000):
        write(one, 2, 3)
        one.keep_learned({"counts": np.arange(3)}, 1)
        clock[0] += LONGEST_PAUSE
        write(one, 4)
        assert counts(one) == (1, 3, 0)
        assert len(files_in(tmp_path)) == 1, "nothing half written is left"
    clock[0] += LONGEST_PAUSE
    write(one, 5)
    assert counts(one) == (5, 0, 0)
    assert sorted(held_by(tmp_path)) == sorted(received(two)) == [1, 2, 3, 4, 5]
    assert one.load_learned()["counts"].tolist() == [0, 1, 2]
    assert caplog.text.count("File too large") == 1, "one warning for each kind of error"


def mounted(path, options):
    """A small file system in memory."""
    path.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)]).returncode:
        pytest.skip("nothing can be mounted here")
    return path


def test_a_full_disk_and_a_read_only_one(tmp_path, clock, caplog):
    disk = mounted(tmp_path / "disk", "size=32k")
    try:
        one = open_folder(disk / "history")
        for number in range(20):
            write(one, number)
            clock[0] += LONGEST_PAUSE
        num_written, num_waiting, num_lost = counts(one)
        assert num_written + num_waiting == 20
        assert num_waiting > 10
        assert num_lost == 0
        assert held_by(disk / "history") == list(range(num_written))
        assert caplog.text.count("No space left") == 1
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        clock[0] += LONGEST_PAUSE
        write(one, 20)
        one.tidy()
        assert caplog.text.count("Read-only file system") == 1
        assert held_by(disk / "history") == list(range(num_written))
        subprocess.run(["mount", "-o", "remount,rw,size=4m", str(disk)], check=True)
        clock[0] += LONGEST_PAUSE
        one.exchange()
        assert counts(one) == (21, 0, 0)
        assert held_by(disk / "history") == list(range(21))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def failing(monkeypatch, error=errno.ENOSPC):
    """Nothing can be written from now on. Returns a list of the attempts."""
    attempts = []

    def fail(storage, name, data):
        attempts.append(name)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(LocalStorage, "write", fail)
    return attempts


def test_pauses_between_attempts_get_longer(tmp_path, clock, monkeypatch):
    one = open_folder(tmp_path)
    attempts = failing(monkeypatch)
    one.add([rollout(1)])
    made = []
    for _ in range(1200):  # five minutes
        one.exchange()
        made.append(len(attempts))
        clock[0] += 0.25
    assert made[:5] == [1, 1, 1, 1, 2]
    assert 8 <= made[-1] <= 12
    monkeypatch.undo()
    one.close()  # at once
    assert held_by(tmp_path) == [1]


def test_what_waits_is_bounded_and_what_is_dropped_is_counted(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(folder_module, "MAX_UNWRITTEN_TOKENS", 40)
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    with monkeypatch.context() as patched:
        failing(patched)
        for number in range(20):
            write(one, number)
            clock[0] += LONGEST_PAUSE
        assert counts(one) == (0, 5, 15)
        write(one, *range(20, 30))  # while nothing is tried
        assert len(one._outbox) <= 5
    clock[0] += LONGEST_PAUSE
    one.exchange()
    written, waiting, lost = counts(one)
    assert (written + lost, waiting) == (30, 0)
    assert sorted(held_by(tmp_path)) == received(two) == list(range(30 - written, 30)), "the newest"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EACCES])
def test_what_could_not_be_written_in_the_end_is_counted(tmp_path, monkeypatch, caplog, error):
    one = open_folder(tmp_path)
    failing(monkeypatch, error)
    write(one, 1, 2)
    one.add([rollout(3)])
    one.close()
    one.close()
    assert counts(one) == (0, 0, 3)
    assert caplog.text.count(os.strerror(error)) == 1
    assert caplog.text.count("3 rollouts could not be written") == 1


def test_a_shard_that_is_there_although_writing_failed_is_read_once(tmp_path, clock, monkeypatch):
    """As where the folder's new entry could not be flushed, or the answer of an object store was lost."""
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    original, fails = LocalStorage.write, iter([True])

    def write_and_fail(storage, name, data):
        original(storage, name, data)
        if next(fails, False):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalStorage, "write", write_and_fail)
    write(one, 1)
    assert received(two) == [1]
    one.add([rollout(2)])
    clock[0] += LONGEST_PAUSE
    assert received(one) == [], "its own"
    assert received(two) == [2]
    assert held_by(tmp_path) == [1, 2]
    assert counts(one) == (2, 0, 0)


def test_a_problems_folder_that_cannot_be_written_holds_up_no_other(tmp_path, clock, caplog):
    """As where another user's engine has made it."""
    one = open_folder(tmp_path)
    blocked = tmp_path / path_of(PROBLEM)
    blocked.parent.mkdir(parents=True)
    blocked.write_text("in the way")
    one.add([rollout(n)._replace(problem_id=n) for n in (1, PROBLEM, 2, 3)])
    one.exchange()
    assert counts(one) == (3, 1, 0)
    assert caplog.text.count("cannot be used as it should") == 1
    blocked.unlink()
    clock[0] += LONGEST_PAUSE
    one.exchange()
    assert counts(one) == (4, 0, 0)
    assert sorted(held_by(tmp_path)) == [1, 2, 3, PROBLEM]


def test_rollouts_that_no_shard_can_hold_hold_up_no_others(tmp_path, caplog):
    one = open_folder(tmp_path)
    negative = rollout(5)._replace(problem_id=-5)
    one.add([rollout(1), negative, rollout(2), rollout(3, version=2**40)])
    write(one, 4)
    assert counts(one) == (3, 0, 2)
    one.add([negative])
    one.exchange()
    one.add([rollout(5), rollout(6, version=2**40)])
    one.close()
    assert counts(one) == (4, 0, 4)
    assert sorted(held_by(tmp_path)) == [1, 2, 4, 5]
    assert caplog.text.count("rollouts that no shard can hold are not written") == 1


def test_what_a_storage_refuses_holds_up_no_later_batches(tmp_path, clock, monkeypatch):
    one, original, fails = open_folder(tmp_path), LocalStorage.write, iter([True])

    def write_but_once(storage, name, data):
        if next(fails, False):
            raise TypeError("no such data")
        original(storage, name, data)

    with monkeypatch.context() as patched:
        failing(patched)
        write(one, 1, 2)
    shards = one._shards_of(PROBLEM)
    one._unwritten.append((shards, shards.new_batch([rollout(3)])))
    monkeypatch.setattr(LocalStorage, "write", write_but_once)
    one.close()
    assert counts(one) == (1, 0, 2)
    assert held_by(tmp_path) == [3]


def test_what_there_was_no_memory_to_write_is_written_later(tmp_path, clock, monkeypatch, caplog):
    one = open_folder(tmp_path)

    def fail(storage, name, data):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "write", fail)
        write(one, 1, 2)
        assert counts(one) == (0, 2, 0)
        assert "MemoryError" in caplog.text
    clock[0] += LONGEST_PAUSE
    one.exchange()
    assert counts(one) == (2, 0, 0)
    assert held_by(tmp_path) == [1, 2]


def test_a_shard_that_cannot_be_read_is_tried_less_and_less_and_named_once(tmp_path, clock, monkeypatch, caplog):
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    write(one, 1)
    write(one, 2)
    unreadable, other = (path.name for path in shards_in(tmp_path))
    original, reads = LocalStorage.read, []

    def read(storage, name):
        reads.append(name)
        if name == unreadable:
            raise OSError(errno.EIO, "Input/output error")
        return original(storage, name)

    found = []
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "read", read)
        for _ in range(1200):  # five minutes
            found += received(two)
            clock[0] += 0.25
    assert reads.count(other) == 1
    assert 8 <= reads.count(unreadable) <= 12
    assert caplog.text.count(unreadable) == 1
    clock[0] += LONGEST_PAUSE
    assert sorted(found + received(two)) == [1, 2]


def test_a_file_system_that_hangs_does_not_keep_the_engine_from_ending(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "SECONDS_TO_CLOSE", 0.1)
    monkeypatch.setattr(folder_module, "MAX_UNWRITTEN_TOKENS", 40)
    one, released, hangs = open_folder(tmp_path), threading.Event(), threading.Event()

    def hang(storage, name, data):
        hangs.set()
        assert released.wait(60)

    monkeypatch.setattr(LocalStorage, "write", hang)
    one.start()
    one.add([rollout(0)])
    assert hangs.wait(60)
    for number in range(1, 20):
        one.add([rollout(number)])
    assert len(one._outbox) == 5, "memory is bounded meanwhile"
    closing = threading.Thread(target=one.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert one.stats.rollouts_lost == 20
    released.set()


def test_the_last_write_does_not_keep_the_engine_from_ending_either(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "SECONDS_TO_CLOSE", 0.1)
    monkeypatch.setattr(folder_module, "SECONDS_LOCAL", 3600.0)
    one, released = open_folder(tmp_path), threading.Event()
    monkeypatch.setattr(LocalStorage, "write", lambda storage, name, data: released.wait(60))
    one.start()
    one.add([rollout(1), rollout(2)])
    closing = threading.Thread(target=one.close)
    closing.start()
    closing.join(30)
    is_closed = not closing.is_alive()
    released.set()
    assert is_closed
    assert one.stats.rollouts_lost == 2


def test_what_waits_is_counted_while_the_thread_goes_on(tmp_path, monkeypatch, caplog):
    """An engine that no longer waits for its thread counts what is left, and just then the thread can write again."""
    monkeypatch.setattr(folder_module, "SECONDS_TO_CLOSE", 0.1)
    one, released, hangs = open_folder(tmp_path), threading.Event(), threading.Event()

    class Iterated(deque):
        """While it is iterated over, the thread has the time to write the first batch."""

        def __iter__(self):
            for batch in super().__iter__():
                released.set()
                time.sleep(0.2)
                yield batch

    def hang(storage, name, data):
        hangs.set()
        assert released.wait(60)

    monkeypatch.setattr(LocalStorage, "write", hang)
    shards = one._shards_of(PROBLEM)
    one._unwritten = Iterated([(shards, shards.new_batch([rollout(number)])) for number in range(2)])
    one.start()
    assert hangs.wait(60)
    one.close()
    assert "2 rollouts could not be written" in caplog.text
    one._thread.join(60)


def test_what_is_learned_while_the_thread_takes_something_older_is_written_later(tmp_path):
    learners = []

    class Folder(HistoryFolder):
        """Between the thread's look at what was learned and the next thing it does, the engine has learned more."""

        @property
        def _learned(self):
            value = vars(self)["learned"]
            if value is not None and not learners:
                learners.append(threading.Thread(target=self.keep_learned, args=({"counts": np.array([2])}, 2)))
                learners[0].start()
                learners[0].join(0.2)
            return value

        @_learned.setter
        def _learned(self, value):
            vars(self)["learned"] = value

    one = Folder(str(tmp_path), ORIGIN, max_bytes=1 << 30)
    one.keep_learned({"counts": np.array([1])}, 1)
    one.exchange()
    learners[0].join()
    one.close()
    assert one.load_learned()["counts"].tolist() == [2]


def test_what_was_learned_is_kept_where_the_version_in_the_folder_cannot_be_read(tmp_path, clock, monkeypatch):
    one = open_folder(tmp_path)

    def fail(storage, name):
        raise OSError(errno.EIO, "Input/output error")

    one.keep_learned({"counts": np.array([2])}, 3)
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "read", fail)
        one.exchange()
    clock[0] += LONGEST_PAUSE
    one.exchange()
    assert one.load_learned()["counts"].tolist() == [2]


def test_what_could_not_be_written_of_what_was_learned_replaces_nothing_newer(tmp_path, clock, monkeypatch):
    one, original = open_folder(tmp_path), LocalStorage.write

    def fail(storage, name, data):
        one.keep_learned({"counts": np.array([2])}, 2)
        monkeypatch.setattr(LocalStorage, "write", original)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalStorage, "write", fail)
    one.keep_learned({"counts": np.array([1])}, 1)
    one.exchange()
    one.close()
    assert one.load_learned()["counts"].tolist() == [2]


def test_a_dropped_engine_may_be_collected_in_the_folders_own_thread(tmp_path, monkeypatch, caplog):
    """Garbage is collected wherever memory is asked for, and what it ends closes its folder there."""
    monkeypatch.setattr(folder_module, "SECONDS_LOCAL", 0.01)
    one, original = open_folder(tmp_path), LocalStorage.sizes

    def collect(storage):
        if threading.current_thread() is one._thread:
            one.add([rollout(2)])
            one.close()
        return original(storage)

    monkeypatch.setattr(LocalStorage, "sizes", collect)
    one.watch(PROBLEM, is_known=True)
    one.add([rollout(1)])
    one.start()
    one._thread.join(60)
    assert not one._thread.is_alive()
    assert sorted(held_by(tmp_path)) == [1, 2]
    assert counts(one) == (2, 0, 0)
    assert not caplog.text


def test_the_thread_writes_what_is_left_at_once(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(folder_module, "SECONDS_LOCAL", 3600.0)
    one = open_folder(tmp_path)
    with monkeypatch.context() as patched:
        failing(patched)
        write(one, 1)
    one.start()
    one.add([rollout(2)])
    one.close()
    assert counts(one) == (2, 0, 0)
    assert held_by(tmp_path) == [1, 2]


def test_a_fork_neither_waits_for_the_lock_nor_writes(tmp_path):
    """Its parent's thread may have held the lock, and does not run in it."""
    one = open_folder(tmp_path)
    one.add([rollout(1)])
    with one._lock:
        child = os.fork()
        if child == 0:
            one.close()
            os._exit(0)
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    assert not list(tmp_path.iterdir())
    one.close()
    assert held_by(tmp_path) == [1]


def test_a_full_disk_is_pruned_though_nothing_can_be_merged_on_it(tmp_path, monkeypatch):
    one = open_folder(tmp_path)
    for version in range(SHARDS_PER_MERGE):
        one.add([rollout(version, version=version)])
        one.exchange()
    size = sum(path.stat().st_size for path in shards_in(tmp_path))
    failing(monkeypatch)
    open_folder(tmp_path, max_bytes=size // 2).tidy()
    kept = held_by(tmp_path)
    assert kept == list(range(SHARDS_PER_MERGE - len(kept), SHARDS_PER_MERGE))
    assert 0 < len(kept) <= SHARDS_PER_MERGE / 2


def test_a_shard_that_cannot_be_deleted_keeps_no_others(tmp_path, monkeypatch, caplog):
    one = open_folder(tmp_path)
    for version in range(10):
        one.add([rollout(version, version=version)])
        one.exchange()
    shards = shards_in(tmp_path)
    original = LocalStorage.delete

    def delete(storage, name):
        if name == shards[0].name:
            raise OSError(errno.EPERM, "Operation not permitted")
        original(storage, name)

    monkeypatch.setattr(LocalStorage, "delete", delete)
    open_folder(tmp_path, max_bytes=sum(path.stat().st_size for path in shards[6:])).tidy()
    kept = held_by(tmp_path)
    assert kept[0] == 0
    assert kept[1:] == list(range(11 - len(kept), 10))
    assert 2 <= len(kept) <= 5
    assert caplog.text.count("Operation not permitted") == 1


def test_a_shard_that_cannot_be_read_keeps_no_others_from_being_merged(tmp_path, monkeypatch):
    one = open_folder(tmp_path)
    for version in range(SHARDS_PER_MERGE + 1):
        one.add([rollout(version, version=version)])
        one.exchange()
    unreadable, original = shards_in(tmp_path)[0].name, LocalStorage.read

    def read(storage, name):
        if name == unreadable:
            raise OSError(errno.EIO, "Input/output error")
        return original(storage, name)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "read", read)
        assert merge(tmp_path) == 2
    assert sorted(held_by(tmp_path)) == list(range(SHARDS_PER_MERGE + 1)), "it may be read later"


def test_what_is_no_file_is_not_read(tmp_path):
    """To open a pipe would be to wait for somebody who writes into it."""
    one = open_folder(tmp_path)
    write(one, 1)
    name, folder = shards_in(tmp_path)[0].name, shards_in(tmp_path)[0].parent
    os.mkfifo(folder / "pipe.parquet")
    os.mkfifo(folder / f"v0000000007{name[11:]}")
    (folder / f"v0000000008{name[11:]}").mkdir()
    (folder / "nowhere.parquet").symlink_to(folder / "nothing")
    (folder / "loop.parquet").symlink_to("loop.parquet")
    found = []
    reader = threading.Thread(target=lambda: found.extend(held_by(tmp_path)), daemon=True)
    reader.start()
    reader.join(30)
    assert found == [1]
    prune_oldest(open_storage(tmp_path), 1 << 30)
    assert len(list(folder.iterdir())) == 6, "what was there"


@pytest.mark.parametrize("name", ["with spaces", "üñí 漢字", "[a-z]*?", "per%20cent#?&", "line\nbreak", "a" * 200])
def test_folders_with_odd_names(tmp_path, name):
    one = open_folder(tmp_path / name)
    for number in range(SHARDS_PER_MERGE):
        write(one, number)
    left = shards_in(tmp_path / name)[0].with_name(f"x{UNFINISHED}")
    left.write_text("")
    os.utime(left, (0, 0))
    one.tidy()
    assert not left.exists()
    assert sorted(received(open_folder(tmp_path / name))) == list(range(SHARDS_PER_MERGE))
    assert len(shards_in(tmp_path / name)) == 1, "merged"


def test_a_shard_whose_name_is_no_text(tmp_path, caplog):
    one = open_folder(tmp_path)
    write(one, 1)
    for folder in (shards_in(tmp_path)[0].parent, tmp_path):
        with open(os.fsencode(folder) + b"/\xff\xfe.parquet", "wb") as file:
            file.write(b"something")
    (tmp_path / "problems" / os.fsdecode(b"\xff") / "x").mkdir(parents=True)
    assert held_by(tmp_path) == [1]
    one.tidy()
    assert caplog.text.encode("utf-8"), "what is said of it can be written to a log"
    assert "fe.parquet" in caplog.text


def test_a_file_that_is_taken_for_abandoned_while_it_is_written_is_written_again(tmp_path, clock, monkeypatch):
    """As where another machine's clock is hours ahead, or this one's was set."""
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    write(two, 1)
    original, fails = os.fsync, iter([True])

    def fsync(descriptor):
        if next(fails, False):
            prune_oldest(open_storage(tmp_path), 1 << 30)
        original(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(tidying, "SECONDS_UNTIL_ABANDONED", -7200.0)
        patched.setattr(os, "fsync", fsync)
        write(one, 2)
    assert counts(one) == (0, 1, 0)
    clock[0] += LONGEST_PAUSE
    one.exchange()
    assert counts(one) == (1, 0, 0)
    assert sorted(held_by(tmp_path)) == [1, 2]


def test_times_of_files_count_for_nothing_but_what_is_unfinished(tmp_path):
    one = open_folder(tmp_path)
    for number in range(SHARDS_PER_MERGE - 1):
        write(one, number)
        for shard in shards_in(tmp_path):
            when = time.time() + (number % 3 - 1) * 10**9  # decades ago, now, or decades to come
            os.utime(shard, (when, when))
    for name, age in (("future", -(10**9)), ("past", 10**9)):
        left = shards_in(tmp_path)[0].with_name(f"{name}{UNFINISHED}")
        left.write_text("")
        os.utime(left, (time.time() - age,) * 2)
    one.tidy()
    assert [path.name for path in tmp_path.rglob(f"*{UNFINISHED}")] == [f"future{UNFINISHED}"]
    assert sorted(held_by(tmp_path)) == list(range(SHARDS_PER_MERGE - 1))
