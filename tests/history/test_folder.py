"""A folder of shards: what engines write there lasts, is read once by each of the others, and is never half there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.features.format import FEATURE_WORDS
from rollout_spec.history import folder as folder_module
from rollout_spec.history import problem, tidying
from rollout_spec.history.contents import Contents
from rollout_spec.history.folder import LEARNED, HistoryFolder
from rollout_spec.history.partitions import path_of
from rollout_spec.history.problem import SHARDS_PER_MERGE, ProblemShards
from rollout_spec.history.rollout import Rollout
from rollout_spec.history.shards import Entry, Origin, read_shard, write_shard
from rollout_spec.history.storage import UNFINISHED, LocalStorage, open_storage
from rollout_spec.history.tidying import TIDIED, prune_oldest, tidy_if_due
from tests.history.made_up import MemoryStorage

ORIGIN = Origin("tokenizer", 1000, "model", "states")
PROBLEM = 7


@pytest.fixture(autouse=True)
def _every_exchange_looks(monkeypatch):
    """Also at problems of which nothing has come for long."""
    monkeypatch.setattr(folder_module, "LONGEST", 1)
    monkeypatch.setattr(problem, "SHARE_OF_MERGES", 1.0)


def rollout(number, *, problem_id=PROBLEM, version=0, size=5, features=False):
    """A rollout whose tokens say which it is."""
    tokens = np.full(size, number, np.int32)
    known = np.ones((size, FEATURE_WORDS), np.int64) if features else None
    return Rollout(problem_id, version, tokens[:3], tokens, known)


def open_folder(path, *, origin=ORIGIN, max_bytes=1 << 30):
    return HistoryFolder(str(path), origin, max_bytes=max_bytes)


def write(folder, *rollouts):
    folder.add(rollouts)
    folder.exchange()


def numbers(rollouts):
    return [int(rollout.tokens[0]) for rollout in rollouts]


def received(folder, *problem_ids):
    """What comes of these problems, of PROBLEM if none are named."""
    for problem_id in problem_ids or [PROBLEM]:
        if problem_id not in folder._asked:
            folder.watch(problem_id, is_known=True)
    folder.exchange()
    return numbers(folder.take())


def shards_in(path):
    return sorted(path.rglob("v*.parquet"))


def test_what_is_written_is_there_in_a_later_run(tmp_path):
    first = open_folder(tmp_path)
    for version in range(3):
        write(first, rollout(10 * version, version=version, features=True))
        write(first, rollout(10 * version + 1, problem_id=8, version=version))
    first.keep_learned({"counts": np.arange(3)}, 5)
    first.close()
    assert received(first) == [], "its own come not back"
    second = open_folder(tmp_path)
    rollouts = second.load(10**6)
    assert sorted(numbers(rollouts)) == [0, 1, 10, 11, 20, 21]
    assert [r.version for r in rollouts] == [0, 0, 1, 1, 2, 2]
    assert {int(r.tokens[0]): r.features is not None for r in rollouts}[10]
    assert {int(r.tokens[0]): r.features is not None for r in rollouts}[11] is False
    assert second.newest_version == 5
    assert second.load_learned().keys() == {"counts"}
    assert second.load_learned()["counts"].tolist() == [0, 1, 2]
    assert second.stats.rollouts_read == 6
    assert second.stats.bytes_read == first.stats.bytes_written


def test_features_are_left_out_of_a_folder_on_demand(tmp_path):
    one = HistoryFolder(str(tmp_path), ORIGIN, max_bytes=1 << 30, features=False)
    write(one, rollout(1, size=500, features=True))
    assert one.stats.bytes_written < 500 * 32
    (found,) = open_folder(tmp_path).load(10**6)
    assert (int(found.tokens[0]), found.features) == (1, None)


def test_an_engine_begins_with_some_problems_and_reads_the_others_when_it_is_asked(tmp_path):
    first = open_folder(tmp_path)
    for problem_id in range(5):
        write(first, *(rollout(problem_id, problem_id=problem_id) for _ in range(2)))
    later = open_folder(tmp_path)
    sample = numbers(later.load(17))  # 8 tokens each, contexts included
    assert len(sample) == 4
    assert len(set(sample)) == 2
    assert received(later, *range(5)) == [number for number in range(5) if number not in sample for _ in range(2)]
    assert later.stats.rollouts_read == 10


def test_of_a_problem_with_much_history_the_newest_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "MAX_PROBLEM_TOKENS", 17)
    first = open_folder(tmp_path)
    for version in range(5):
        write(first, rollout(version, version=version))
    later = open_folder(tmp_path)
    assert numbers(later.load(1)) == [2, 3, 4]
    assert received(later) == [], "what was left out comes not later"


def test_nothing_is_read_that_is_not_asked_for(tmp_path, monkeypatch):
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    for problem_id in range(20):
        write(one, rollout(problem_id, problem_id=problem_id))
    reads, original = [], LocalStorage.read
    monkeypatch.setattr(LocalStorage, "read", lambda storage, name: reads.append(name) or original(storage, name))
    two.exchange()
    assert (reads, two.take()) == ([], [])
    assert received(two, 3, 11) == [3, 11]
    assert len(reads) == 2
    two.unwatch(3)
    write(one, rollout(50, problem_id=3), rollout(51, problem_id=11))
    two.exchange()
    assert numbers(two.take()) == [51]
    assert received(two, 3) == [50], "once it is asked again"


def test_what_the_engine_has_forgotten_is_read_again(tmp_path):
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    write(one, rollout(1))
    write(two, rollout(2))
    assert received(two) == [1]
    two.unwatch(PROBLEM)
    two.watch(PROBLEM, is_known=True)
    assert received(two) == []
    two.unwatch(PROBLEM)
    two.watch(PROBLEM, is_known=False)
    assert sorted(received(two)) == [1, 2], "also what it has written itself"
    two.unwatch(PROBLEM)
    two.keep_only(lambda problem_id: problem_id == PROBLEM)
    assert received(two) == []
    two.keep_only(lambda problem_id: False)
    assert received(two) == [], "requests of it are live"
    two.unwatch(PROBLEM)
    two.keep_only(lambda problem_id: False)
    two.exchange()
    assert not two._problems
    write(two, rollout(3))
    write(one, rollout(4))
    assert sorted(received(one)) == [2, 3]
    assert sorted(received(open_folder(tmp_path))) == [1, 2, 3, 4], "no batch has another one's number"


def test_engines_get_each_others_rollouts_once(tmp_path):
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    write(one, rollout(1))
    write(two, rollout(2))
    assert received(two) == [1]
    assert received(one) == [2]
    write(one, rollout(3))
    assert received(two) == [3]
    assert received(one) == received(two) == []


def test_a_problem_of_which_nothing_comes_is_looked_at_less_often(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "LONGEST", 4)
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    looks, original = [], LocalStorage.sizes
    monkeypatch.setattr(LocalStorage, "sizes", lambda storage: looks.append(storage) or original(storage))
    two.watch(PROBLEM, is_known=True)
    for _ in range(16):
        two.exchange()
    assert len(looks) == 6  # in exchanges 1, 2, 4, 8, 12 and 16
    write(one, rollout(1))
    for _ in range(4):
        two.exchange()
    assert numbers(two.take()) == [1]
    looks.clear()
    two.exchange()
    two.unwatch(PROBLEM)
    two.watch(PROBLEM, is_known=True)
    two._read()  # as the thread does when it is woken
    assert len(looks) == 2


def test_merged_shards_bring_nothing_twice_and_lose_nothing(tmp_path):
    one, two, late = (open_folder(tmp_path) for _ in range(3))
    for number in range(SHARDS_PER_MERGE - 1):
        write(one, rollout(number, version=number % 3))
    assert sorted(received(two)) == list(range(15))
    write(two, rollout(15))
    assert len(shards_in(tmp_path)) == 16
    assert sorted(received(late)) == list(range(16))
    assert len(shards_in(tmp_path)) == 1, "who reads many shards at once writes them as one"
    assert received(one) == [15], "merged before it was read"
    assert received(two) == []
    write(one, rollout(16))
    assert received(two) == received(late) == [16]
    assert sorted(numbers(open_folder(tmp_path).load(10**6))) == list(range(17))


def merged(storage, origin=ORIGIN):
    """Let an engine read all of a problem, and so merge it."""
    return ProblemShards(storage, origin, "here").read_new(10**9)


def test_the_oldest_versions_are_merged_first():
    """Among newer ones they would be deleted with them, or later than they should."""
    storage = MemoryStorage()
    for version in (9, 3, 5, *range(100, 100 + SHARDS_PER_MERGE), 4):
        write_shard(storage, [Entry(1, version, rollout(version, version=version))], ORIGIN)
    storage.files = dict(sorted(storage.files.items(), reverse=True))  # a folder is listed in any order
    merged(storage)
    held = [sorted(e.rollout.version for e in read_shard(storage, name, ORIGIN)[1]) for name in sorted(storage.files)]
    newest = 100 + SHARDS_PER_MERGE - 5
    assert held == [[3, 4, 5, 9, *range(100, newest + 1)], *([version] for version in range(newest + 1, newest + 5))]


def test_shards_are_merged_where_each_is_read_as_it_comes(tmp_path):
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    found = []
    for number in range(200):
        write(one, rollout(number))
        found += received(two)
    assert found == list(range(200))
    assert len(shards_in(tmp_path)) < 70
    assert sorted(numbers(open_folder(tmp_path).load(10**6))) == list(range(200))
    assert sorted(set(received(one))) == []


def test_tidying_that_hangs_keeps_nothing_from_being_written_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "SECONDS_LOCAL", 0.01)
    monkeypatch.setattr(folder_module, "SECONDS_PER_CHECK", 0.0)
    hangs, released = threading.Event(), threading.Event()

    def hang(*args):
        hangs.set()
        released.wait(60)

    monkeypatch.setattr(folder_module, "tidy_if_due", hang)
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    two.watch(PROBLEM, is_known=True)
    two.start()
    assert hangs.wait(60)
    write(one, rollout(1))
    two.add([rollout(2)])
    deadline = time.monotonic() + 30
    while not (taken := two.take()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert numbers(taken) == [1]
    two.close()
    released.set()
    assert sorted(numbers(open_folder(tmp_path).load(10**6))) == [1, 2]


def test_engines_that_count_on_their_own_leave_the_highest_version(tmp_path):
    for version in (100, 3):
        one = open_folder(tmp_path)
        one.keep_learned({}, version)
        one.close()
    later = open_folder(tmp_path)
    later.load(10)
    assert later.newest_version == 100


def test_large_shards_stay_as_they_are(monkeypatch):
    storage = MemoryStorage()
    for number in range(SHARDS_PER_MERGE + 1):
        size = 200 if number == 5 else 5
        write_shard(storage, [Entry(1, number, rollout(number, size=size, features=True))], ORIGIN)
    monkeypatch.setattr(problem, "SMALL_BYTES", sorted(map(len, storage.files.values()))[-2])
    merged(storage)
    assert len(storage.files) == 2


def test_engines_that_merge_the_same_at_the_same_time_write_the_same(tmp_path, monkeypatch):
    one, two, three = (open_folder(tmp_path) for _ in range(3))
    for number in range(SHARDS_PER_MERGE):
        write(one, rollout(number))
    original, others = LocalStorage.write, iter([three])

    def write_after_another(storage, name, data):
        for other in others:
            assert sorted(received(other)) == list(range(SHARDS_PER_MERGE))
        original(storage, name, data)

    monkeypatch.setattr(LocalStorage, "write", write_after_another)
    assert sorted(received(two)) == list(range(SHARDS_PER_MERGE))
    assert len(shards_in(tmp_path)) == 1
    assert sorted(numbers(open_folder(tmp_path).load(10**6))) == list(range(SHARDS_PER_MERGE))


def test_what_an_engine_has_not_read_again_is_in_no_merged_shard_of_it(tmp_path):
    """It deletes what it merges, and knows the content of what it has just read alone."""
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    write(one, rollout(100))
    assert received(two) == [100]
    for number in range(SHARDS_PER_MERGE):
        write(one, rollout(number))
    assert len(received(two)) == SHARDS_PER_MERGE
    assert len(shards_in(tmp_path)) == 2
    assert sorted(numbers(open_folder(tmp_path).load(10**6))) == [*range(SHARDS_PER_MERGE), 100]


def test_shards_of_which_one_holds_all_that_the_others_hold_are_merged_into_that_one():
    """As after a merge that was killed while it removed what it had merged."""
    storage = MemoryStorage()
    entries = [Entry(1, number, rollout(number, version=number)) for number in range(SHARDS_PER_MERGE - 1)]
    whole, _ = write_shard(storage, entries, ORIGIN)
    for entry in entries:
        write_shard(storage, [entry], ORIGIN)
    merged(storage)
    assert list(storage.files) == [whole]


def test_a_merge_that_was_cut_short_doubles_nothing(tmp_path, monkeypatch):
    """Killed between the merged shard and the removal of the others."""
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    for number in range(SHARDS_PER_MERGE):
        write(one, rollout(number))
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "delete", lambda self, name: None)
        assert sorted(received(two)) == list(range(SHARDS_PER_MERGE))
        assert len(shards_in(tmp_path)) == SHARDS_PER_MERGE + 1
        assert sorted(numbers(open_folder(tmp_path).load(10**6))) == list(range(SHARDS_PER_MERGE))
    for number in range(SHARDS_PER_MERGE):
        write(one, rollout(100 + number))
    assert sorted(received(two)) == list(range(100, 100 + SHARDS_PER_MERGE))
    expected = [*range(SHARDS_PER_MERGE), *range(100, 100 + SHARDS_PER_MERGE)]
    assert sorted(numbers(open_folder(tmp_path).load(10**6))) == expected
    assert len(shards_in(tmp_path)) < SHARDS_PER_MERGE


def test_the_oldest_versions_of_all_problems_go_when_the_folder_is_full(tmp_path):
    one = open_folder(tmp_path)
    for version in range(12):
        write(one, rollout(version, problem_id=version % 5, version=version))
    size = sum(path.stat().st_size for path in shards_in(tmp_path))
    prune_oldest(open_storage(tmp_path), size // 2)
    left = sum(path.stat().st_size for path in shards_in(tmp_path))
    assert size // 3 < left <= size // 2
    kept = numbers(open_folder(tmp_path).load(10**6))
    assert kept == list(range(12))[-len(kept) :] != []
    prune_oldest(open_storage(tmp_path), left)
    assert sum(path.stat().st_size for path in shards_in(tmp_path)) == left


def test_of_the_oldest_version_that_may_stay_as_much_stays_as_there_is_room_for(tmp_path):
    one = open_folder(tmp_path)
    for number in range(10):
        write(one, rollout(number, problem_id=number))
    size = sum(path.stat().st_size for path in shards_in(tmp_path))
    prune_oldest(open_storage(tmp_path), size * 3 // 4)
    assert size // 2 < sum(path.stat().st_size for path in shards_in(tmp_path)) <= size * 3 // 4


def test_one_engine_of_many_looks_through_the_history_now_and_then(tmp_path, monkeypatch):
    storage = open_storage(tmp_path)
    looks = []
    monkeypatch.setattr(tidying, "prune_oldest", lambda storage, max_bytes, _: looks.append(max_bytes))
    for max_bytes in (1, 2, 3):
        tidy_if_due(storage, max_bytes)
    assert looks == [1]
    for content in (b"nonsense", b"", f"{time.time() + 10**6}".encode(), f"{time.time() - 1}".encode()):
        storage.write(TIDIED, content)
        tidy_if_due(storage, 4)
    assert looks == [1, 4, 4, 4, 4]


def test_what_takes_long_is_done_less_often(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(tidying.time, "time", lambda: now[0])

    def take_long(storage, max_bytes, is_stopping):
        now[0] += 30

    monkeypatch.setattr(tidying, "prune_oldest", take_long)
    storage = open_storage(tmp_path)
    tidy_if_due(storage, 1)
    assert float(storage.read(TIDIED)) == 1030 + 30 / tidying.SHARE_OF_TIDYING


def test_other_files_are_left_alone(tmp_path):
    one = open_folder(tmp_path)
    write(one, rollout(1))
    others = [tmp_path / "dataset.parquet", shards_in(tmp_path)[0].with_name("dataset.parquet")]
    for path in others:
        path.write_bytes(b"someone's" * 1000)
    prune_oldest(open_storage(tmp_path), 1)
    assert shards_in(tmp_path) == []
    assert all(path.exists() for path in others)
    assert one.load(10**6) == []


def test_shards_of_another_tokenizer_are_refused_by_name_and_reason(tmp_path, caplog):
    theirs = open_folder(tmp_path, origin=ORIGIN._replace(tokenizer="another", model="theirs"))
    write(theirs, rollout(1))
    write(open_folder(tmp_path, origin=ORIGIN._replace(vocab_size=5000)), rollout(2))
    write(open_folder(tmp_path, origin=ORIGIN._replace(states="other")), rollout(3, features=True))
    ours = open_folder(tmp_path)
    (found,) = ours.load(10**6)
    assert (int(found.tokens[0]), found.features) == (3, None), "states that cannot be compared are left out"
    assert ours.stats.shards_refused == 2
    assert "it is of another tokenizer (model theirs): another and not tokenizer" in caplog.text
    assert "it is of another vocabulary (model model): 5000 and not 1000" in caplog.text
    assert sum(path.name in caplog.text for path in shards_in(tmp_path)) == 2
    received(ours)
    assert ours.stats.shards_refused == 2, "said once"


def test_shards_of_earlier_versions_are_named_with_the_command_that_converts_them(tmp_path, caplog):
    name, _ = write_shard(open_storage(tmp_path), [Entry(1, 0, rollout(1))], ORIGIN)
    one = open_folder(tmp_path)
    assert one.load(10**6) == []
    assert f"1 shards in {tmp_path}, such as {name}" in caplog.text
    assert f"`rollout-spec history convert {tmp_path}` converts them" in caplog.text


def test_an_engine_merges_shards_of_its_own_origin_alone(tmp_path):
    """Also those of a model whose name has changed since, but not those whose features it cannot use."""
    for origin in (ORIGIN._replace(tokenizer="another"), ORIGIN._replace(states="other"), ORIGIN):
        one = open_folder(tmp_path, origin=origin)
        later = open_folder(tmp_path, origin=origin._replace(model="checkpoint-2"))
        for number in range(SHARDS_PER_MERGE):
            write(later if number % 2 else one, rollout(number, features=True))
    assert len(received(open_folder(tmp_path))) == 2 * SHARDS_PER_MERGE
    assert len(shards_in(tmp_path)) == 2 * SHARDS_PER_MERGE + 1
    others = open_folder(tmp_path, origin=ORIGIN._replace(states="other")).load(10**6)
    assert sum(found.features is not None for found in others) == SHARDS_PER_MERGE


def test_a_shard_that_cannot_be_merged_is_warned_of_and_read(tmp_path, monkeypatch, caplog):
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    for number in range(SHARDS_PER_MERGE):
        write(one, rollout(number))

    def fail(storage, name, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStorage, "write", fail)
    assert sorted(received(two)) == list(range(SHARDS_PER_MERGE))
    assert "cannot be merged" in caplog.text
    assert len(shards_in(tmp_path)) == SHARDS_PER_MERGE


def test_what_others_merge_while_it_is_read_is_not_missed(tmp_path, monkeypatch):
    one, two, three = open_folder(tmp_path), open_folder(tmp_path), open_folder(tmp_path)
    for number in range(SHARDS_PER_MERGE):
        write(one, rollout(number))
    original = LocalStorage.sizes

    def merge_after_listing(storage):
        listed = original(storage)
        monkeypatch.setattr(LocalStorage, "sizes", original)
        received(three)
        assert len(shards_in(tmp_path)) == 1, "merged"
        write(one, rollout(99))
        return listed

    monkeypatch.setattr(LocalStorage, "sizes", merge_after_listing)
    assert sorted(received(two) + received(two)) == [*range(SHARDS_PER_MERGE), 99]


def test_a_shard_that_could_not_be_read_once_is_read_later(tmp_path, monkeypatch):
    monkeypatch.setattr(problem, "FIRST_PAUSE", 0.0)
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    write(one, rollout(0))
    write(one, rollout(1))
    original, fails = LocalStorage.read, iter([True])

    def read(storage, name):
        if next(fails, False):
            raise OSError(5, "Input/output error")
        return original(storage, name)

    monkeypatch.setattr(LocalStorage, "read", read)
    assert sorted(received(two) + received(two)) == [0, 1]


def test_no_more_is_read_until_the_engine_has_taken_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "MAX_WAITING_TOKENS", 16)
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    for problem_id in range(10):
        write(one, rollout(problem_id, problem_id=problem_id))
        two.watch(problem_id, is_known=True)
    found = []
    while some := (two.exchange(), two.take())[1]:
        assert len(some) == 2  # of 8 tokens each
        found += numbers(some)
    assert sorted(found) == list(range(10)), "nothing is lost"


def test_an_engine_takes_a_part_of_what_has_come(tmp_path):
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    write(one, *(rollout(number) for number in range(5)))  # of 8 tokens each
    two.watch(PROBLEM, is_known=True)
    two.exchange()
    assert two.num_waiting_tokens == 40
    parts = [numbers(two.take(max_tokens)) for max_tokens in (16, 1, 23, 100, 100)]
    assert parts == [[0, 1], [2], [3, 4], [], []]
    assert two.num_waiting_tokens == 0


def test_what_is_asked_for_is_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "SECONDS_LOCAL", 3600.0)
    write(open_folder(tmp_path), rollout(1))
    one = open_folder(tmp_path)
    one.start()
    one.watch(PROBLEM, is_known=True)
    deadline = time.monotonic() + 30
    while not (taken := one.take()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert numbers(taken) == [1]
    one.close()


def test_no_exception_ends_the_thread(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(folder_module, "SECONDS_LOCAL", 0.01)
    one = open_folder(tmp_path)
    one.watch(PROBLEM, is_known=True)
    with monkeypatch.context() as patched:
        patched.setattr(one, "_look_at", lambda *args: 1 / 0)
        one.start()
        time.sleep(0.2)
        assert caplog.text.count("ZeroDivisionError") == 1
    write(open_folder(tmp_path), rollout(1))
    deadline = time.monotonic() + 30
    while not (taken := one.take()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert numbers(taken) == [1]
    one.close()


def test_a_remote_file_systems_own_exceptions_are_warned_of(monkeypatch, caplog):
    one = HistoryFolder("memory://fails", ORIGIN, max_bytes=1 << 30)

    def fail(*args, **kwargs):
        raise RuntimeError("no credentials")

    monkeypatch.setattr(type(one._storage._files), "pipe_file", fail)
    write(one, rollout(1))
    one.close()
    assert one.stats.rollouts_lost == 1
    assert "RuntimeError: no credentials" in caplog.text


def test_engines_that_write_what_they_learned_at_once_do_not_disturb_each_other(tmp_path, caplog):
    folders = [open_folder(tmp_path) for _ in range(4)]
    for one in folders:
        one.start()
    for count in range(30):
        for one in folders:
            one.keep_learned({"counts": np.full(1000, count)}, count)
        time.sleep(0.01)
    for one in folders:
        one.close()
    assert folders[0].load_learned()["counts"].tolist() == [29] * 1000
    assert "cannot be used" not in caplog.text
    other = open_folder(tmp_path, origin=ORIGIN._replace(states="of another model"))
    assert other.load_learned() == {}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_damaged_shards_bring_nothing_wrong(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("history")
    one = open_folder(path)
    for number in range(4):
        write(one, rollout(number, version=number, features=bool(number % 2)))
    for shard in shards_in(path):
        whole = shard.read_bytes()
        how = data.draw(st.sampled_from(["whole", "cut", "flipped", "random", "doubled", "swapped", "foreign"]))
        if how == "cut":
            shard.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        elif how == "flipped":
            at = data.draw(st.integers(0, len(whole) - 1))
            shard.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << data.draw(st.integers(0, 7))]) + whole[at + 1 :])
        elif how == "random":
            shard.write_bytes(data.draw(st.binary(max_size=200)))
        elif how == "doubled":
            shard.with_name("copy.parquet").write_bytes(whole)
        elif how == "swapped":
            shard.write_bytes(shards_in(path)[0].read_bytes())
        elif how == "foreign":
            shard.with_name("v0000000001-" + "0" * 32 + ".parquet").write_bytes(whole)
    intact = {0, 1, 2, 3}
    reader = open_folder(path)
    found = reader.load(10**6)
    assert len(set(numbers(found))) == len(found), "no rollout twice"
    assert set(numbers(found)) <= intact
    for entry in found:
        number = int(entry.tokens[0])
        assert entry.tokens.tolist() == [number] * 5
        assert (entry.problem_id, entry.version) == (PROBLEM, number)
    merged(open_storage(path).folder(path_of(PROBLEM)))
    received(reader)
    assert set(numbers(open_folder(path).load(10**6))) <= intact


def test_what_was_learned_is_left_out_where_it_is_damaged(tmp_path, caplog):
    one = open_folder(tmp_path)
    assert one.load_learned() == {}
    one.keep_learned({"counts": np.arange(1000)}, 1)
    one.close()
    whole = (tmp_path / LEARNED).read_bytes()
    for damaged in (whole[:-30], b"", b"PK\x03\x04", b"\x93NUMPY", whole[:60] + b"xx" + whole[62:]):
        (tmp_path / LEARNED).write_bytes(damaged)
        found = one.load_learned()
        assert found == {} or found["counts"].tolist() == list(range(1000))
    assert caplog.text.count("learned.npz") >= 4


def test_a_file_system_that_fails_at_first_does_not_begin_with_version_0(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "FIRST_PAUSE", 0.0)
    one = open_folder(tmp_path)
    one.keep_learned({}, 57)
    one.close()
    original, fails = LocalStorage.read, iter([True, True])

    def read(storage, name):
        if next(fails, False):
            raise OSError(5, "Input/output error")
        return original(storage, name)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "read", read)
        two = open_folder(tmp_path)
        two.load(10)
        assert two.newest_version == 57
        fails = iter([True] * 4)
        three = open_folder(tmp_path)
        three.load(10)
        assert three.newest_version == 0
        three.keep_learned({}, 1)
        three.close()
    later = open_folder(tmp_path)
    later.load(10)
    assert later.newest_version == 57


def test_a_folder_that_goes_away_comes_back_or_not(tmp_path):
    path = tmp_path / "history"
    one, two = open_folder(path), open_folder(path)
    write(one, rollout(1))
    shutil.rmtree(path)
    assert received(two) == []
    two.tidy()
    write(one, rollout(2))
    assert received(two) == [2]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_read(tmp_path):
    one = open_folder(tmp_path)
    write(one, rollout(1))
    tmp_path.chmod(0o500)
    two = open_folder(tmp_path)
    assert numbers(two.load(10**6)) == [1]
    write(two, rollout(2))
    two.tidy()
    assert two.stats.rollouts_waiting == 1
    tmp_path.chmod(0o700)


def test_what_a_killed_writer_left_is_not_read_and_goes(tmp_path, monkeypatch):
    one = open_folder(tmp_path)
    write(one, rollout(1))
    left = shards_in(tmp_path)[0].with_name(f"v0000000000-{'0' * 32}.parquet{UNFINISHED}")
    left.write_bytes(b"PAR1 half")
    assert numbers(open_folder(tmp_path).load(10**6)) == [1]
    prune_oldest(open_storage(tmp_path), 1 << 30)
    assert left.exists(), "it may be being written"
    monkeypatch.setattr(tidying, "SECONDS_UNTIL_ABANDONED", -10.0)
    prune_oldest(open_storage(tmp_path), 1 << 30)
    assert not left.exists()


def test_folders_of_fsspec():
    one, two = (HistoryFolder("memory://history/run", ORIGIN, max_bytes=1 << 30) for _ in range(2))
    assert one.load(10) == []
    for number in range(SHARDS_PER_MERGE - 1):
        write(one, rollout(number))
    write(one, rollout(50, problem_id=8))
    assert sorted(received(two, 8, PROBLEM, 9)) == [*range(SHARDS_PER_MERGE - 1), 50]
    write(one, rollout(15))
    assert received(two) == [15]
    one.keep_learned({"counts": np.arange(3)}, 2)
    one.close()
    assert two.load_learned()["counts"].tolist() == [0, 1, 2]
    later = HistoryFolder("memory://history/run", ORIGIN, max_bytes=1)
    assert sorted(numbers(later.load(10**6))) == [*range(16), 50]
    assert len(Contents(two._storage)) == 2, "merged"
    assert later.newest_version == 2
    later.tidy()
    assert len(Contents(two._storage)) == 0
    with pytest.raises(ValueError, match="history_dir 'no-such-protocol://x' cannot be used"):
        open_storage("no-such-protocol://x")


WRITER = """
import sys
from tests.history.test_folder import open_folder, rollout
folder, reader = open_folder(sys.argv[1]), open_folder(sys.argv[1])
for problem_id in range(3):
    reader.watch(problem_id, is_known=True)
number = int(sys.argv[2])
while True:
    folder.add([rollout(number % 1000, problem_id=number % 3, version=number // 1000, size=200)])
    number += 1
    if number % 50 == 0:
        folder.exchange()
        reader.exchange()  # and merges
        reader.take()
        print(number, flush=True)
"""


def test_a_killed_writer_leaves_whole_shards_only(tmp_path):
    """At random moments; what had been written before is all there, and nothing is there twice."""
    rng = np.random.default_rng(0)
    start = written = 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(start)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        first = int(process.stdout.readline())
        time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        lines = process.communicate()[0].split()
        last = int(lines[-1]) if lines else first
        reader = open_folder(tmp_path)
        found = [1000 * r.version + int(r.tokens[0]) for r in reader.load(10**9)]
        assert reader.stats.shards_refused == 0
        assert len(set(found)) == len(found)
        written += last - start
        assert set(range(start, last)) <= set(found), "what was written before it was killed"
        start = max(found) + 1
    contents = Contents(open_storage(tmp_path))
    assert [shard.info for shard in contents]
    assert not contents.refused
