"""A history in an S3-compatible object store on this machine, also while the store fails."""

from __future__ import annotations

import contextlib
import importlib.util
import time

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("s3fs")
if importlib.util.find_spec("moto") is None:
    pytest.skip("needs moto[server]", allow_module_level=True)

import fsspec
import s3fs

from rollout_spec.history import exchange
from rollout_spec.history.exchange import FolderThread
from rollout_spec.history.folder import HistoryFolder
from tests.conftest import wait_until
from tests.history.made_up import ORIGIN, numbers, rollout
from tests.history.object_store import ENVIRONMENT, ObjectStore
from tests.history.test_exchange import taken

URL = "s3://bucket/a run"
pytestmark = pytest.mark.slow


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
    server.refusal = None


def open_again(url=URL, **options):
    """As in an engine of its own: what s3fs remembers is not shared."""
    s3fs.S3FileSystem.clear_instance_cache()
    return HistoryFolder(url, ORIGIN, **options)


def test_engines_share_a_bucket(store):
    one, other = open_again(), open_again()
    assert one.load(1000) == []
    one.write([rollout(1), rollout(2)])
    one.write([rollout(3, problem=2**64 - 1, order=1)])
    assert numbers(other.read(1)) == [1, 2]
    assert other.read(1) == one.read(1) == other.read(7) == []
    third = open_again()
    assert numbers(third.load(1000)) == [1, 2, 3]
    (old, new) = sorted(third.files())
    assert third.prune(new.size) == [old]
    assert numbers(open_again().load(1000)) == [3]


def test_a_file_takes_one_request_and_a_look_at_a_problem_one_more(store):
    one = open_again()
    one.write([rollout(1)])
    assert [kind for kind, _ in store.requests] == ["PUT"]
    store.requests.clear()
    assert numbers(open_again().read(1)) == [1]
    assert [kind for kind, _ in store.requests] == ["LIST", "GET"]
    store.requests.clear()
    one.read(1)
    assert [kind for kind, _ in store.requests] == ["LIST"]


def test_a_bucket_is_not_looked_at_as_often_as_a_folder(store, monkeypatch):
    monkeypatch.setattr(exchange, "SECONDS_LOCAL", 0.0)
    thread = FolderThread(open_again())
    thread.watch(1, is_known=False)
    thread._read()
    store.requests.clear()
    thread._read()
    assert not store.requests


def test_a_bucket_that_is_not_there_is_not_made(store):
    with pytest.raises(OSError):
        open_again("s3://another/run").write([rollout(1)])
    assert not fsspec.filesystem("s3").exists("another")


@pytest.mark.parametrize("refusal", [(503, "SlowDown"), (403, "AccessDenied"), None])
def test_what_fails_is_tried_again(store, monkeypatch, caplog, refusal):
    """Where the store refuses, and where it is not there."""
    for name in ("SECONDS_REMOTE", "SECONDS_TO_RETRY"):
        monkeypatch.setattr(exchange, name, 0.05)
    one, other = FolderThread(open_again()), FolderThread(open_again())
    one.start(), other.start()
    try:
        if refusal is None:
            store.stop()
        store.refusal = refusal
        other.watch(1, is_known=False)
        one.add([rollout(1)])
        wait_until(lambda: len(caplog.records) >= 2)
        time.sleep(0.3)
        assert one.stats()["rollouts_waiting"] == 1
        store.refusal = None
        if refusal is None:
            store.start()
        assert taken(other, 1) == [1]
    finally:
        one.close(), other.close()
    assert 2 <= len(caplog.records) <= 4  # each kind of fault once
