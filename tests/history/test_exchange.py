"""The thread that reads and writes an engine's folder."""

import errno
import os
import subprocess
import sys
import threading
import time
from collections import deque

import pytest

pytest.importorskip("pyarrow")

from rollout_spec.history import exchange as module
from rollout_spec.history.exchange import FolderThread
from rollout_spec.history.folder import HistoryFolder
from tests.conftest import ROOT, wait_until
from tests.history.made_up import ORIGIN, numbers, rollout

PATIENCE = 60.0
"""Seconds until a test that waits for a thread gives up."""


@pytest.fixture
def threads(tmp_path, monkeypatch):
    """Makes started threads of one folder, and closes them."""
    for name in ("SECONDS_LOCAL", "SECONDS_TO_RETRY"):
        monkeypatch.setattr(module, name, 0.02)
    made = []

    def make(folder=None):
        made.append(FolderThread(folder or HistoryFolder(str(tmp_path), ORIGIN)))
        made[-1].start()
        return made[-1]

    yield make
    for thread in made:
        thread.close()


def taken(thread, count):
    rollouts = []
    wait_until(lambda: rollouts.extend(thread.take()) or len(rollouts) >= count)
    return numbers(rollouts)


def held(path):
    """What a run that starts now finds."""
    return sorted(numbers(HistoryFolder(str(path), ORIGIN).load(10**9)))


def test_a_watched_problem_is_read_at_once_and_again_until_it_is_no_more(threads):
    one, other = threads(), threads()
    one.add([rollout(1), rollout(2)])
    wait_until(lambda: one.stats()["rollouts_written"] == 2)
    other.watch(1, is_known=False)
    assert taken(other, 2) == [1, 2]
    one.add([rollout(3), rollout(4, problem=2)])
    assert taken(other, 1) == [3]
    other.unwatch(1)
    one.add([rollout(5)])
    wait_until(lambda: one.stats()["rollouts_written"] == 5)
    time.sleep(0.2)
    assert other.take() == []
    other.watch(1, is_known=True)
    assert taken(other, 1) == [5]
    other.unwatch(1)
    other.watch(1, is_known=False)  # the engine has dropped all of it
    assert sorted(taken(other, 4)) == [1, 2, 3, 5]


def test_a_live_problems_rollouts_wait_for_each_other(threads, tmp_path, monkeypatch):
    """They are one file, unless that takes long."""
    one = threads()
    one.watch(1, is_known=False)
    for number in range(3):
        one.add([rollout(number)])
        time.sleep(0.05)
    assert one.stats()["rollouts_waiting"] == 3
    one.unwatch(1)
    wait_until(lambda: one.stats()["rollouts_written"] == 3)
    assert len(list(tmp_path.rglob("*.parquet"))) == 1
    monkeypatch.setattr(module, "SECONDS_TO_WRITE", 0.1)
    one.watch(1, is_known=False)
    one.add([rollout(7)])
    wait_until(lambda: one.stats()["rollouts_written"] == 4)


def test_what_ends_while_a_file_is_written_is_written_after_it(threads, tmp_path):
    one = threads()
    write = one.folder.write

    def slowly(rollouts):
        if numbers(rollouts) == [1]:
            one.add([rollout(2), rollout(3)])
        return write(rollouts)

    one.folder.write = slowly
    one.add([rollout(1)])
    one.close()
    assert held(tmp_path) == [1, 2, 3]
    assert one.stats()["rollouts_written"] == 3
    assert one._num_unwritten_tokens == 0


def test_what_cannot_be_written_is_tried_again_and_said_once(threads, tmp_path, monkeypatch, caplog):
    one, replace = threads(), os.replace
    refusals = deque([OSError(errno.ENOSPC, "no space")] * 5)

    def refuse(*names):
        if refusals:
            raise refusals.popleft()
        replace(*names)

    monkeypatch.setattr(os, "replace", refuse)
    one.add([rollout(1), rollout(2, problem=2)])
    wait_until(lambda: one.stats()["rollouts_written"] == 2)
    assert held(tmp_path) == [1, 2]
    assert one.stats()["rollouts_waiting"] == 0
    (record,) = caplog.records
    assert "no space" in record.getMessage()


def test_the_oldest_are_dropped_where_nothing_can_be_written_for_long(threads, monkeypatch):
    monkeypatch.setattr(module, "MAX_UNWRITTEN_TOKENS", 100)
    one = threads()
    one.watch(1, is_known=False)
    for order in range(40):
        one.add([rollout(order, order=order)])
    stats = one.stats()
    assert stats["rollouts_lost"] + stats["rollouts_waiting"] == 40
    assert stats["rollouts_waiting"] == 100 // 8
    one.close()
    assert numbers(HistoryFolder(one.folder.url, ORIGIN).read(1)) == list(range(28, 40))


def test_no_more_is_read_while_the_engine_takes_nothing(threads, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING_TOKENS", 1)
    one, other = threads(), threads()
    one.add([rollout(1), rollout(2)])
    wait_until(lambda: one.stats()["rollouts_written"] == 2)
    other.watch(1, is_known=False)
    wait_until(lambda: other.stats()["rollouts_read"] == 2)
    one.add([rollout(3)])
    wait_until(lambda: one.stats()["rollouts_written"] == 3)
    time.sleep(0.2)
    assert other.stats()["rollouts_read"] == 2
    assert numbers(other.take(1)) == [1]
    assert taken(other, 2) == [2, 3]


def test_closing_writes_what_is_left_and_a_second_time_does_nothing(threads, tmp_path):
    one = threads()
    one.watch(1, is_known=False)
    one.add([rollout(1)])
    one.close()
    one.close()
    assert held(tmp_path) == [1]
    never_started = FolderThread(HistoryFolder(str(tmp_path), ORIGIN))
    never_started.add([rollout(2)])
    never_started.close()
    assert held(tmp_path) == [1, 2]


def test_closing_does_not_wait_for_a_disk_that_hangs(threads, monkeypatch, caplog):
    monkeypatch.setattr(module, "SECONDS_TO_CLOSE", 0.1)
    goes_on = threading.Event()
    monkeypatch.setattr(os, "replace", lambda *names: goes_on.wait(PATIENCE))
    one = threads()
    one.add([rollout(1)])
    one.close()
    assert one.stats()["rollouts_lost"] == 1
    assert "1 rollouts could not be written" in caplog.text
    goes_on.set()


def test_a_problem_that_cannot_be_written_keeps_no_other_from_it(threads, tmp_path, monkeypatch):
    replace = os.replace

    def refuse(unfinished, path):
        if f"{1:016x}" in path:
            raise PermissionError(errno.EACCES, "no", path)
        replace(unfinished, path)

    monkeypatch.setattr(os, "replace", refuse)
    one = threads()
    one.add([rollout(number, problem=number) for number in range(1, 6)])
    one.close()
    assert held(tmp_path) == [2, 3, 4, 5]
    assert one.stats()["rollouts_lost"] == one.stats()["rollouts_waiting"] == 1


def test_a_problem_that_cannot_be_read_keeps_no_other_from_it(threads, monkeypatch):
    one, other = threads(), threads()
    one.add([rollout(number, problem=number) for number in range(1, 6)])
    wait_until(lambda: one.stats()["rollouts_written"] == 5)
    read = other.folder.read

    def refuse(problem_id):
        if problem_id == 1:
            raise PermissionError(errno.EACCES, "no")
        return read(problem_id)

    monkeypatch.setattr(other.folder, "read", refuse)
    for problem in range(1, 6):
        other.watch(problem, is_known=False)
    assert sorted(taken(other, 4)) == [2, 3, 4, 5]


def test_a_problem_whose_last_request_ends_while_it_is_read_is_watched_no_more(tmp_path, monkeypatch):
    thread = FolderThread(HistoryFolder(str(tmp_path), ORIGIN))  # never started
    monkeypatch.setattr(thread.folder, "read", lambda problem_id: thread.unwatch(problem_id) or [])
    thread.watch(1, is_known=False)
    thread._read()
    assert not thread._watched


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "os.kill(os.getpid(), 15)"])
def test_a_process_that_ends_writes_what_is_left(tmp_path, ending):
    """At its end, and not by a signal that nobody handles: what had not been written then is lost."""
    script = f"""
import os, time
from rollout_spec.history.exchange import FolderThread
from rollout_spec.history.folder import HistoryFolder
from tests.history.made_up import ORIGIN, rollout
thread = FolderThread(HistoryFolder({str(tmp_path)!r}, ORIGIN))
thread.start()
thread.watch(1, is_known=False)
thread.add([rollout(1)])
if os.fork() == 0:
    thread.close()  # rollouts are the parent's
    os._exit(0)
os.wait()
{ending}
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=PATIENCE)
    assert held(tmp_path) == ([] if "kill" in ending else [1])
