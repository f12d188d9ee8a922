"""A folder of shards: what engines write there lasts, is read once by each of the others, and is never half there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.features.format import FEATURE_WORDS
from rollout_spec.history import folder as folder_module
from rollout_spec.history import tidying
from rollout_spec.history.folder import LEARNED, HistoryFolder
from rollout_spec.history.rollout import Rollout
from rollout_spec.history.shards import Entry, Origin, read_shard, write_shard
from rollout_spec.history.storage import UNFINISHED, LocalStorage, open_storage
from rollout_spec.history.tidying import SHARDS_PER_MERGE, Tidier
from tests.history.made_up import MemoryStorage

ORIGIN = Origin("tokenizer", 1000, "model", "states")


def rollout(number, *, version=0, size=5, features=False):
    """A rollout whose tokens say which it is."""
    tokens = np.full(size, number, np.int32)
    return Rollout(number, version, tokens[:3], tokens, np.ones((size, FEATURE_WORDS), np.int64) if features else None)


def open_folder(path, *, origin=ORIGIN, max_bytes=1 << 30):
    return HistoryFolder(str(path), origin, max_bytes=max_bytes)


def write(folder, *rollouts):
    folder.add(rollouts)
    folder.exchange()


def numbers(rollouts):
    return [int(rollout.tokens[0]) for rollout in rollouts]


def received(folder):
    folder.exchange()
    return numbers(rollout for _, rollout in folder.take())


def test_what_is_written_is_there_in_a_later_run(tmp_path):
    first = open_folder(tmp_path)
    for version in range(3):
        write(first, rollout(10 * version, version=version, features=True), rollout(10 * version + 1, version=version))
    first.keep_learned({"counts": np.arange(3)})
    first.close()
    assert received(first) == [], "its own come not back"
    second = open_folder(tmp_path)
    rollouts = second.load(10**6)
    assert numbers(rollouts) == [0, 1, 10, 11, 20, 21]
    assert [r.version for r in rollouts] == [0, 0, 1, 1, 2, 2]
    assert (rollouts[0].features == 1).all()
    assert rollouts[1].features is None
    assert second.newest_version == 2
    assert second.load_learned()["counts"].tolist() == [0, 1, 2]
    assert second.stats.rollouts_read == 6
    assert second.stats.bytes_read == first.stats.bytes_written


def test_the_newest_are_loaded_where_there_is_no_room_for_all(tmp_path):
    first = open_folder(tmp_path)
    for version in range(5):
        write(first, rollout(version, version=version))
    assert numbers(open_folder(tmp_path).load(17)) == [3, 4]  # 8 tokens each, contexts included
    later = open_folder(tmp_path)
    later.load(8)
    assert received(later) == [], "what was left out comes not later"


def test_engines_get_each_others_rollouts_once(tmp_path):
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    write(one, rollout(1))
    write(two, rollout(2))
    assert received(two) == [1]
    assert received(one) == [2]
    write(one, rollout(3))
    assert received(two) == [3]
    assert received(one) == received(two) == []


def test_an_age_counts_from_the_newest_version_of_the_same_engine(tmp_path):
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    write(one, rollout(1, version=7), rollout(2, version=5))
    two.exchange()
    assert [(age, int(r.tokens[0])) for age, r in two.take()] == [(0, 1), (2, 2)]
    write(one, rollout(3, version=6))
    two.exchange()
    assert [age for age, _ in two.take()] == [1]


def test_ages_do_not_depend_on_how_other_engines_count(tmp_path):
    old, new = open_folder(tmp_path), open_folder(tmp_path)
    write(old, rollout(1, version=1), rollout(3, version=3))
    write(new, rollout(50, version=50))
    reader, late = open_folder(tmp_path), open_folder(tmp_path)
    reader.exchange()
    assert {(age, int(r.tokens[0])) for age, r in reader.take()} == {(2, 1), (0, 3), (0, 50)}
    assert numbers(late.load(8)) == [50]  # the older engine's shard is left out, but not how far that engine was
    write(old, rollout(2, version=2))
    late.exchange()
    assert [(age, int(r.tokens[0])) for age, r in late.take()] == [(1, 2)]


def test_merged_shards_bring_nothing_twice_and_lose_nothing(tmp_path):
    one, two, late = (open_folder(tmp_path) for _ in range(3))
    for number in range(SHARDS_PER_MERGE - 1):
        write(one, rollout(number, version=number % 3))
    assert sorted(received(two)) == list(range(15))
    write(two, rollout(15))
    one.tidy()
    assert len(list(tmp_path.glob("*.parquet"))) == 1
    assert received(one) == [15], "merged before it was read"
    assert received(two) == []
    assert sorted(received(late)) == list(range(16))
    write(one, rollout(16))
    assert received(two) == received(late) == [16]
    assert sorted(numbers(open_folder(tmp_path).load(10**6))) == list(range(17))


def test_the_oldest_versions_are_merged_first():
    """Among newer ones they would be deleted with them, or later than they should."""
    storage = MemoryStorage()
    for version in (9, 3, 5, *range(100, 100 + SHARDS_PER_MERGE), 4):
        write_shard(storage, [Entry(1, version, rollout(version, version=version))], ORIGIN)
    storage.files = dict(sorted(storage.files.items(), reverse=True))  # a folder is listed in any order
    Tidier(storage, ORIGIN, 1 << 30).tidy()
    held = [[e.rollout.version for e in read_shard(storage, name, ORIGIN)[1]] for name in sorted(storage.files)]
    newest = 100 + SHARDS_PER_MERGE - 5
    assert held == [[3, 4, 5, 9, *range(100, newest + 1)], *([version] for version in range(newest + 1, newest + 5))]


def test_shards_of_which_one_holds_all_that_the_others_hold_are_merged_into_that_one():
    """As after a merge that was killed while it removed what it had merged."""
    storage = MemoryStorage()
    entries = [Entry(1, number, rollout(number, version=number)) for number in range(SHARDS_PER_MERGE - 1)]
    whole, _ = write_shard(storage, entries, ORIGIN)
    for entry in entries:
        write_shard(storage, [entry], ORIGIN)
    Tidier(storage, ORIGIN, 1 << 30).tidy()
    assert list(storage.files) == [whole]


def test_a_merge_that_was_cut_short_doubles_nothing(tmp_path, monkeypatch):
    """Killed between the merged shard and the removal of the others."""
    one = open_folder(tmp_path)
    for number in range(SHARDS_PER_MERGE):
        write(one, rollout(number))
    monkeypatch.setattr(LocalStorage, "delete", lambda self, name: None)
    one.tidy()
    assert len(list(tmp_path.glob("*.parquet"))) == SHARDS_PER_MERGE + 1
    assert sorted(numbers(open_folder(tmp_path).load(10**6))) == list(range(SHARDS_PER_MERGE))
    monkeypatch.undo()
    for number in range(SHARDS_PER_MERGE):
        write(one, rollout(100 + number))
    one.tidy()
    expected = [*range(SHARDS_PER_MERGE), *range(100, 100 + SHARDS_PER_MERGE)]
    assert sorted(numbers(open_folder(tmp_path).load(10**6))) == expected


def test_the_oldest_versions_go_when_the_folder_is_full(tmp_path):
    one = open_folder(tmp_path, max_bytes=20_000)
    for version in range(12):
        write(one, rollout(version, version=version))
    one.tidy()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.parquet")) <= 20_000
    kept = numbers(open_folder(tmp_path).load(10**6))
    assert kept == list(range(12))[-len(kept) :] != []


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "dataset.parquet").write_bytes(b"someone's" * 1000)
    one = open_folder(tmp_path, max_bytes=1)
    write(one, rollout(1))
    one.tidy()
    assert [path.name for path in tmp_path.glob("*.parquet")] == ["dataset.parquet"]
    assert one.load(10**6) == []


def test_shards_of_another_tokenizer_are_refused_by_name_and_reason(tmp_path, caplog):
    theirs = open_folder(tmp_path, origin=ORIGIN._replace(tokenizer="another", model="theirs"))
    write(theirs, rollout(1))
    write(open_folder(tmp_path, origin=ORIGIN._replace(vocab_size=5000)), rollout(2))
    write(open_folder(tmp_path, origin=ORIGIN._replace(states="other"), max_bytes=1), rollout(3, features=True))
    ours = open_folder(tmp_path)
    (found,) = ours.load(10**6)
    assert (int(found.tokens[0]), found.features) == (3, None), "states that cannot be compared are left out"
    assert ours.stats.shards_refused == 2
    assert "it is of another tokenizer (model theirs): another and not tokenizer" in caplog.text
    assert "it is of another vocabulary (model model): 5000 and not 1000" in caplog.text
    assert sum(path.name in caplog.text for path in tmp_path.glob("*.parquet")) == 2
    received(ours)
    assert ours.stats.shards_refused == 2, "said once"


def test_origins_are_merged_apart_and_each_shard_is_read_once(tmp_path, monkeypatch):
    """Also shards of another tokenizer, and those of a model whose name has changed since."""
    theirs = open_folder(tmp_path, origin=ORIGIN._replace(tokenizer="another"))
    ours, later = open_folder(tmp_path), open_folder(tmp_path, origin=ORIGIN._replace(model="checkpoint-2"))
    for number in range(SHARDS_PER_MERGE - 1):
        write(theirs, rollout(number))
        write(ours if number % 2 else later, rollout(100 + number))
    reads = []
    fresh = open_folder(tmp_path)
    original = fresh._storage.read
    monkeypatch.setattr(fresh._storage, "read", lambda name: reads.append(name) or original(name))
    for _ in range(3):
        fresh.tidy()
    assert len(reads) == len(set(reads)) == 2 * (SHARDS_PER_MERGE - 1)
    assert len(list(tmp_path.glob("*.parquet"))) == 2 * (SHARDS_PER_MERGE - 1), "too few of either"
    write(theirs, rollout(50))
    write(ours, rollout(150))
    fresh.tidy()
    assert len(list(tmp_path.glob("*.parquet"))) == 2
    assert sorted(numbers(open_folder(tmp_path, origin=theirs._origin).load(10**6))) == [*range(15), 50]
    assert sorted(numbers(open_folder(tmp_path).load(10**6))) == [*range(100, 115), 150]


def test_what_others_merge_while_it_is_read_is_not_missed(tmp_path, monkeypatch):
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    for number in range(SHARDS_PER_MERGE):
        write(one, rollout(number))
    original = two._storage.sizes

    def merge_after_listing():
        listed = original()
        monkeypatch.setattr(two._storage, "sizes", original)
        one.tidy()
        write(one, rollout(99))
        return listed

    monkeypatch.setattr(two._storage, "sizes", merge_after_listing)
    assert sorted(received(two) + received(two)) == [*range(SHARDS_PER_MERGE), 99]


def test_a_shard_that_could_not_be_read_once_is_read_later(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "FIRST_PAUSE", 0.0)
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    write(one, rollout(0))
    write(one, rollout(1))
    original, fails = two._storage.read, iter([True])

    def read(name):
        if next(fails, False):
            raise OSError(5, "Input/output error")
        return original(name)

    monkeypatch.setattr(two._storage, "read", read)
    assert sorted(received(two) + received(two)) == [0, 1]


def test_what_was_too_old_to_load_does_not_come_back_when_it_is_merged(tmp_path):
    one = open_folder(tmp_path)
    for version in range(SHARDS_PER_MERGE):
        write(one, rollout(version, version=version))
    reader = open_folder(tmp_path)
    assert numbers(reader.load(8)) == [SHARDS_PER_MERGE - 1]
    one.tidy()
    assert received(reader) == []
    write(one, rollout(50, version=3))
    reader.exchange()
    assert [(age, int(r.tokens[0])) for age, r in reader.take()] == [(SHARDS_PER_MERGE - 1 - 3, 50)]


def test_what_the_engine_does_not_take_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "MAX_WAITING_TOKENS", 40)
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    for number in range(10):
        write(one, rollout(number))
        two.exchange()
    assert numbers(rollout for _, rollout in two.take()) == [5, 6, 7, 8, 9]  # of 8 tokens each
    for number in range(10, 20):
        write(one, rollout(number))
        assert received(two) == [number], "what was taken makes room"
    assert two.stats.rollouts_dropped == 5


def test_an_engine_takes_a_part_of_what_has_come(tmp_path):
    one, two = open_folder(tmp_path), open_folder(tmp_path)
    write(one, *(rollout(number) for number in range(5)))  # of 8 tokens each
    two.exchange()
    parts = [numbers(r for _, r in two.take(max_tokens)) for max_tokens in (16, 1, 23, 100, 100)]
    assert parts == [[0, 1], [2], [3, 4], [], []]


def test_unusable_shards_are_the_first_to_go(tmp_path):
    theirs = open_folder(tmp_path, origin=ORIGIN._replace(tokenizer="another"))
    for version in range(500, 505):
        write(theirs, rollout(version, version=version))
    size = sum(path.stat().st_size for path in tmp_path.glob("*.parquet"))
    ours = open_folder(tmp_path, max_bytes=size)
    write(ours, rollout(1))
    ours.tidy()
    assert numbers(open_folder(tmp_path).load(10**6)) == [1]


def test_no_exception_ends_the_thread(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(folder_module, "SECONDS_LOCAL", 0.01)
    one = open_folder(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(one._storage, "sizes", lambda: 1 / 0)  # of this folder alone: others' threads may be running
        one.start()
        time.sleep(0.2)
        assert caplog.text.count("ZeroDivisionError") == 1
    write(open_folder(tmp_path), rollout(1))
    deadline = time.monotonic() + 30
    while not (taken := one.take()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert numbers(rollout for _, rollout in taken) == [1]
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
            one.keep_learned({"counts": np.full(1000, count)})
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
    for shard in sorted(path.glob("*.parquet")):
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
            shard.write_bytes(min(path.glob("v*.parquet")).read_bytes())
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
        assert (entry.problem_id, entry.version) == (number, number)
    reader.tidy()
    reader.exchange()
    assert set(numbers(open_folder(path).load(10**6))) <= intact


def test_what_was_learned_is_left_out_where_it_is_damaged(tmp_path, caplog):
    one = open_folder(tmp_path)
    assert one.load_learned() == {}
    one.keep_learned({"counts": np.arange(1000)})
    one.close()
    whole = (tmp_path / LEARNED).read_bytes()
    for damaged in (whole[:-30], b"", b"PK\x03\x04", b"\x93NUMPY", whole[:60] + b"xx" + whole[62:]):
        (tmp_path / LEARNED).write_bytes(damaged)
        found = one.load_learned()
        assert found == {} or found["counts"].tolist() == list(range(1000))
    assert caplog.text.count("learned.npz") >= 4


def test_a_folder_that_goes_away_comes_back_or_not(tmp_path):
    path = tmp_path / "history"
    one, two = open_folder(path), open_folder(path)
    write(one, rollout(1))
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
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
    left = tmp_path / f"v0000000000-{'0' * 32}.parquet{UNFINISHED}"
    left.write_bytes(b"PAR1 half")
    assert numbers(open_folder(tmp_path).load(10**6)) == [1]
    one.tidy()
    assert left.exists(), "it may be being written"
    monkeypatch.setattr(tidying, "SECONDS_UNTIL_ABANDONED", -10.0)
    one.tidy()
    assert not left.exists()


def test_one_process_tidies_at_a_time(tmp_path):
    storage = open_storage(tmp_path)
    with storage.tidying(abandoned_before=0) as first, open_storage(tmp_path).tidying(abandoned_before=0) as second:
        assert (first, second) == (True, False)
    with open_storage(tmp_path / "nothing").tidying(abandoned_before=0) as is_ours:
        assert not is_ours


def test_folders_of_fsspec():
    one, two = (HistoryFolder("memory://history/run", ORIGIN, max_bytes=1 << 30) for _ in range(2))
    assert one.load(10) == []
    for number in range(SHARDS_PER_MERGE):
        write(one, rollout(number))
    assert sorted(received(two)) == list(range(SHARDS_PER_MERGE))
    one.keep_learned({"counts": np.arange(3)})
    one.close()
    assert two.load_learned()["counts"].tolist() == [0, 1, 2]
    two.tidy()
    assert len(two._storage.sizes()) == 1
    assert sorted(numbers(HistoryFolder("memory://history/run", ORIGIN, max_bytes=1).load(10**6))) == list(range(16))
    with pytest.raises(ValueError, match="history_dir 'no-such-protocol://x' cannot be used"):
        open_storage("no-such-protocol://x")


WRITER = """
import sys
from tests.history.test_folder import open_folder, rollout
folder = open_folder(sys.argv[1])
number = int(sys.argv[2])
while True:
    folder.add([rollout(number % 1000, version=number // 1000, size=200)])
    number += 1
    if number % 50 == 0:
        folder.tidy()
        folder.exchange()
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
    storage = open_storage(tmp_path)
    assert all(read_shard(storage, name, ORIGIN) for name in storage.sizes())
