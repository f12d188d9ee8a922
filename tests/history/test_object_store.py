"""A history in an S3-compatible object store, on this machine: shared as in a folder, also while the store fails."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("s3fs")
if importlib.util.find_spec("moto") is None:
    pytest.skip("needs moto[server]", allow_module_level=True)

import fsspec
import s3fs

from rollout_spec.features.format import FEATURE_WORDS
from rollout_spec.history import folder as folder_module
from rollout_spec.history import problem as problem_module
from rollout_spec.history.folder import HistoryFolder
from rollout_spec.history.partitions import path_of
from rollout_spec.history.problem import LONGEST_PAUSE, SHARDS_PER_MERGE
from rollout_spec.history.rollout import Rollout
from rollout_spec.history.shards import Origin
from rollout_spec.history.storage import open_storage
from rollout_spec.history.tidying import prune_oldest
from tests.history.object_store import ENVIRONMENT, ObjectStore

ORIGIN = Origin("tokenizer", 1000, "model", "states")
URL = "s3://bucket/run"
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

SLOW_DOWN, DENIED = (503, "SlowDown"), (403, "AccessDenied")
PATIENCE = 60.0
"""Seconds until a test that waits for a thread gives up."""


def rollout(number, *, problem=1, version=0, size=5):
    """A rollout whose tokens say which it is."""
    tokens = np.full(size, number, np.int32)
    return Rollout(problem, version, tokens[:3], tokens, np.ones((size, FEATURE_WORDS), np.int64))


@pytest.fixture(scope="module")
def server():
    store = ObjectStore()
    yield store
    store.close()


@pytest.fixture
def store(server, monkeypatch):
    """The server with an empty bucket, and the environment as a user sets it."""
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": server.endpoint}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    s3fs.S3FileSystem.clear_instance_cache()
    files = fsspec.filesystem("s3")
    while files.exists("bucket"):
        with contextlib.suppress(OSError):  # a thread of the test before may still write
            files.rm("bucket", recursive=True)
    files.mkdir("bucket")
    server.requests.clear()
    yield server
    server.refusal, server.seconds_per_answer = None, 0.0
    server.resume()


def open_folder(url=URL, **options):
    """As in an engine of its own: what s3fs remembers is not shared."""
    s3fs.S3FileSystem.clear_instance_cache()
    return HistoryFolder(url, ORIGIN, max_bytes=1 << 30, **options)


def numbers(rollouts):
    return [int(rollout.tokens[0]) for rollout in rollouts]


def write(folder, *rollouts):
    folder.add(rollouts)
    folder.exchange()


def received(folder, problem=1):
    folder.watch(problem, is_known=True)
    folder.exchange()
    return numbers(folder.take())


def held(url=URL):
    """What a run that starts now finds."""
    return sorted(numbers(open_folder(url).load(10**9)))


def wait_until(is_so):
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def use_all_calls(folder, number):
    """Each call of an engine's step."""
    folder.add([rollout(number)])
    folder.watch(number % 40, is_known=bool(number % 2))
    folder.take()
    folder.unwatch((number + 20) % 40)
    folder.keep_only(lambda problem: problem % 3 == 0)
    folder.keep_learned({"counts": np.arange(3)}, number)
    assert folder.num_waiting_tokens == 0


def test_engines_share_and_a_later_run_has_it(store):
    one, two = open_folder(), open_folder()
    write(one, rollout(1), rollout(2))
    assert received(two) == [1, 2], "as soon as it is written"
    assert received(two) == received(one) == []
    write(two, rollout(3, version=7))
    assert received(one) == [3]
    one.keep_learned({"counts": np.arange(3)}, 7)
    one.close()
    later = open_folder()
    loaded = later.load(10**6)
    assert sorted(numbers(loaded)) == [1, 2, 3]
    assert all((entry.features == 1).all() for entry in loaded)
    assert later.newest_version == 7
    assert later.load_learned()["counts"].tolist() == [0, 1, 2]


def test_the_threads_of_two_engines_exchange(store, monkeypatch):
    monkeypatch.setattr(folder_module, "SECONDS_REMOTE", 0.05)
    one, two = open_folder(), open_folder()
    one.start()
    two.start()
    for problem in range(20):
        two.watch(problem, is_known=False)
        one.add([rollout(100 + problem, problem=problem)])
    taken = []
    wait_until(lambda: taken.extend(numbers(two.take())) or len(taken) == 20)
    assert sorted(taken) == list(range(100, 120))
    one.close()
    two.close()
    assert one.stats.rollouts_written == 20


def test_no_request_is_made_in_vain(store):
    one, two = open_folder(), open_folder()
    assert store.requests == []
    one._next_check = two._next_check = float("inf")
    assert received(one) == []
    assert store.requests == [("LIST", f"run/{path_of(1)}/")], "nobody has written it"
    store.requests.clear()
    write(one, rollout(1))
    assert store.kinds == {"PUT": 1, "LIST": 1}
    store.requests.clear()
    assert received(two) == [1]
    assert store.kinds == {"LIST": 1, "GET": 1}
    store.requests.clear()
    assert open_folder("s3://bucket/none").load(1000) == []
    assert store.kinds == {"GET": 1, "LIST": 3}
    store.requests.clear()
    two.tidy()
    first = store.kinds
    store.requests.clear()
    two.tidy()
    assert (first, store.kinds) == ({"GET": 1, "PUT": 1, "LIST": 1}, {"GET": 1})


def test_all_problems_are_tidied_with_few_requests(store):
    one = open_folder()
    for version in range(2):
        for problem in range(20):
            write(one, rollout(problem, problem=problem << 58 | problem, version=version))
    storage = open_storage(URL)
    store.requests.clear()
    prune_oldest(storage, 1 << 30)
    assert store.kinds == {"LIST": 1}
    assert len(held()) == 40
    prune_oldest(storage, one.stats.bytes_written // 2 + 100)
    assert held() == sorted(range(20))
    assert {entry.version for entry in open_folder().load(10**9)} == {1}


def test_problems_are_written_at_once(store):
    """Answers take long."""
    one = open_folder()
    store.hang()
    one.start()
    one.add([rollout(problem, problem=problem) for problem in range(5)])
    wait_until(lambda: store.num_hanging == 5)
    store.resume()
    one.close()
    assert held() == [0, 1, 2, 3, 4]


def test_a_long_listing_is_read_to_its_end(store):
    storage = open_storage(URL)
    for number in range(1005):
        storage.write(f"{number}.parquet", b"x")
        if number < 5:
            storage.folder(f"folder-{number}").write("a.parquet", b"x")
    assert storage.sizes() == {f"{number}.parquet": 1 for number in range(1005)}
    assert sorted(storage.folders()) == [f"folder-{number}" for number in range(5)]
    assert "run" in open_storage("s3://bucket").folders()


def test_what_others_write_later_is_found_where_nothing_was(store):
    """s3fs remembers listings."""
    one, two = open_folder(), open_folder()
    write(one, rollout(0))
    assert numbers(two.load(10**6)) == [0]
    one.keep_learned({"counts": np.arange(3)}, 1)
    one.exchange()
    assert two.load_learned()["counts"].tolist() == [0, 1, 2]
    one.keep_learned({"counts": np.arange(10_000)}, 2)
    one.exchange()
    assert two.load_learned()["counts"].tolist() == list(range(10_000))


def test_no_bucket_is_made(store, caplog):
    one = open_folder("s3://misspelled/run")
    assert one.load(1000) == []
    write(one, rollout(1))
    assert one.stats.rollouts_waiting == 1
    assert not fsspec.filesystem("s3").exists("misspelled")
    assert "bucket" in caplog.text


def test_engines_that_merge_at_once_lose_and_double_nothing(store, monkeypatch):
    """Two write while two others, which begin again and again, read and merge."""
    monkeypatch.setattr(problem_module, "SHARE_OF_MERGES", 1.0)
    writers = [open_folder() for _ in range(2)]
    taken = []

    def write_all(engine):
        writers[engine]._next_check = float("inf")
        for number in range(40):
            write(writers[engine], rollout(100 * engine + number))

    def read_again_and_again():
        while any(writer.is_alive() for writer in threads[:2]):
            taken.append(received(open_folder()))

    threads = [threading.Thread(target=write_all, args=(engine,)) for engine in range(2)]
    threads += [threading.Thread(target=read_again_and_again) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(set(some)) == len(some) for some in taken)
    for engine, folder in enumerate(writers):
        others = 1 - engine
        assert sorted(received(folder)) == list(range(100 * others, 100 * others + 40))
    assert held() == [*range(40), *range(100, 140)]
    assert store.kinds["DELETE"] >= SHARDS_PER_MERGE


def test_what_is_deleted_while_it_is_read_is_left_out(store, monkeypatch):
    one, two = open_folder(), open_folder()
    for number in range(3):
        write(one, rollout(number, version=number))
    files = open_folder()._storage.folder(path_of(1))
    shards = two._shards_of(1)._storage
    listed = shards.sizes()
    files.delete(min(listed))
    later = iter([listed])
    original = shards.sizes
    monkeypatch.setattr(shards, "sizes", lambda: next(later, None) or original())
    assert received(two) == [1, 2]
    assert two.stats.shards_refused == 0


WRITER = """
import sys
from tests.history.test_object_store import open_folder, rollout
folder = open_folder()
for number in range(1000):
    folder.add([rollout(number % 1000, version=number, size=900)])
    folder.exchange()
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_no_half_object(store):
    rng = random.Random(0)
    process = subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(rng.random())
    process.send_signal(signal.SIGKILL)
    last = int(([0, *process.communicate()[0].split()])[-1])
    reader = open_folder()
    found = numbers(reader.load(10**9))
    assert set(range(last + 1)) <= set(found)
    assert len(set(found)) == len(found)
    assert reader.stats.shards_refused == 0


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_store_that_hangs_holds_up_no_call_of_the_engine(store, monkeypatch, caplog):
    """It never answers while the engine runs: the calls return nevertheless."""
    monkeypatch.setattr(folder_module, "SECONDS_REMOTE", 0.01)
    monkeypatch.setattr(folder_module, "SECONDS_TO_CLOSE", 0.2)
    one = open_folder()
    store.hang()
    one.start()
    for number in range(500):
        use_all_calls(one, number)
    wait_until(lambda: store.num_hanging > 0)
    for number in range(500, 1000):
        use_all_calls(one, number)
    assert store.num_hanging > 0, "and it still waits for the store"
    one.close()
    assert one.stats.rollouts_lost == 1000
    assert "1000 rollouts could not be written" in caplog.text


EXITS = """
import sys, time
from tests.history.test_object_store import open_folder, rollout
from rollout_spec.history import folder as folder_module
folder_module.SECONDS_TO_CLOSE = 0.2
folder = open_folder()
folder.start()
for problem in range(3):
    folder.watch(problem, is_known=False)
sys.stdin.readline()
folder.close()
print("closed", flush=True)
"""


def test_a_process_ends_while_the_store_hangs(store):
    store.hang()
    process = subprocess.Popen([sys.executable, "-c", EXITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: store.num_hanging >= 3)
        hanging = store.num_hanging
        assert process.communicate("\n", timeout=PATIENCE)[0] == "closed\n"
        assert store.num_hanging >= hanging, "no answer has come"
    finally:
        process.kill()
    assert process.returncode == 0


ENDS = """
from tests.history.test_object_store import open_folder, rollout
folder = open_folder()
folder.start()
folder.add([rollout(1)])
"""


def test_a_script_that_ends_leaves_what_was_said(store, monkeypatch):
    """Nobody closes the folder, and the host's address is not known yet."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint.replace("127.0.0.1", "localhost"))
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert held() == [1]


FAULTS = {"throttles": SLOW_DOWN, "denies": DENIED, "is away": None}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_was_said_while_the_store_fails_is_written_later(store, monkeypatch, caplog, fault):
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    one, two = open_folder(), open_folder()
    write(one, rollout(0))
    assert received(two) == [0]
    if FAULTS[fault] is None:
        store.stop()
    else:
        store.refusal = FAULTS[fault]
    for number in range(1, 5):
        one._next_write = 0.0  # its pause is over
        write(one, rollout(number))
        assert received(two) == []
        one.tidy()
    assert (one.stats.rollouts_written, one.stats.rollouts_waiting, one.stats.rollouts_lost) == (1, 4, 0)
    assert 0 < one._pause <= LONGEST_PAUSE
    said = [record for record in caplog.records if "cannot be used as it should" in record.getMessage()]
    assert len(said) == 2, "once by each of the engines"
    assert open_folder().load(1000) == [], "an engine starts without it"
    if FAULTS[fault] is None:
        store.start()
    store.refusal = None
    one._next_write = 0.0
    one.exchange()
    assert (one.stats.rollouts_written, one.stats.rollouts_waiting, one.stats.rollouts_lost) == (5, 0, 0)
    assert sorted(received(two)) == [1, 2, 3, 4]
    assert held() == [0, 1, 2, 3, 4]


def test_what_was_said_while_the_store_never_answers_rightly_is_counted(store, monkeypatch, caplog):
    monkeypatch.setattr(folder_module, "MAX_UNWRITTEN_TOKENS", 40)  # five rollouts
    store.refusal = DENIED
    one = open_folder()
    for number in range(20):
        one._next_write = 0.0
        write(one, rollout(number))
    assert (one.stats.rollouts_waiting, one.stats.rollouts_lost) == (5, 15)
    one.close()
    assert (one.stats.rollouts_waiting, one.stats.rollouts_lost) == (0, 20)
    assert caplog.text.count("cannot be used as it should") == 1


def test_a_throttled_store_is_not_asked_many_times_for_one_object(store):
    one = open_folder()
    store.refusal = SLOW_DOWN
    with pytest.raises(OSError):
        one._storage.write("a.parquet", b"x")
    assert store.kinds["PUT"] <= 5


def test_an_answer_that_was_lost_doubles_nothing(store, monkeypatch):
    """The object was stored, but the writer was told that it failed."""
    one, two = open_folder(), open_folder()
    original, fails = type(one._storage).write, iter([True])

    def fail_after(storage, name, data):
        original(storage, name, data)
        if next(fails, False):
            raise OSError("no answer")

    monkeypatch.setattr(type(one._storage), "write", fail_after)
    write(one, rollout(1))
    assert one.stats.rollouts_waiting == 1
    one._next_write = 0.0
    write(one, rollout(2))
    assert one.stats.rollouts_written == 2
    assert sorted(received(two)) == held() == [1, 2]


def test_a_slow_store_delays_and_loses_nothing(store, monkeypatch):
    monkeypatch.setattr(folder_module, "SECONDS_REMOTE", 0.05)
    one, two = open_folder(), open_folder()
    store.seconds_per_answer = 2.0
    one.start()
    two.start()
    for number in range(200):
        use_all_calls(one, number)
    for problem in range(3):
        two.watch(problem, is_known=False)
        one.watch(problem, is_known=True)
    wait_until(lambda: one.stats.rollouts_written == 200)
    store.seconds_per_answer = 0.0
    two.watch(1, is_known=False)
    taken = []
    wait_until(lambda: taken.extend(numbers(two.take())) or len(taken) == 200)
    assert sorted(taken) == list(range(200))
    one.close()
    two.close()


@pytest.mark.parametrize("settings", ["AWS", "FSSPEC"])
def test_users_settings_are_found(store, monkeypatch, settings):
    """The environment of AWS's own tools, and fsspec's settings."""
    if settings == "FSSPEC":
        for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        # As FSSPEC_S3_ENDPOINT_URL and the like, which fsspec reads when it is imported.
        given = {"endpoint_url": store.endpoint, "key": "key", "secret": "secret"}
        monkeypatch.setitem(fsspec.config.conf, "s3", given)
    write(open_folder(), rollout(1))
    assert held() == [1]


def test_without_credentials_it_says_so(store, monkeypatch, caplog):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    one = open_folder()
    write(one, rollout(1))
    assert "NoCredentialsError" in caplog.text
    assert one.stats.rollouts_waiting == 1
