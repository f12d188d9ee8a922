"""A history in an S3-compatible object store on this machine, also while the store fails."""

import contextlib
import importlib.util
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("s3fs")
if importlib.util.find_spec("moto") is None:
    pytest.skip("needs moto[server]", allow_module_level=True)

import fsspec
import s3fs
from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import EndpointConnectionError

from rollout_spec.history import exchange
from rollout_spec.history.exchange import FolderThread
from rollout_spec.history.folder import HistoryFolder
from tests.conftest import free_port, wait_until
from tests.history.made_up import ORIGIN, numbers, rollout
from tests.history.test_exchange import taken

URL = "s3://bucket/a run"
pytestmark = pytest.mark.slow


ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
"""What a user sets, besides the endpoint, and nothing of the machine's own settings."""
ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>told to</Message><RequestId>0</RequestId></Error>"


class Requests(list):
    """Methods of the requests that reach the wire, LIST for a GET of a folder.

    Attributes:
        refusal: (status, code) of the answer to every request, or "gone": nobody listens; None: they are answered.
    """

    refusal = None

    async def send(self, send, session, request):
        """Instead of the client's own `send`."""
        self.append("LIST" if "list-type=" in request.url else request.method)
        if self.refusal is None:
            return await send(session, request)
        if self.refusal == "gone":
            raise EndpointConnectionError(endpoint_url=request.url)
        status, code = self.refusal
        body = SimpleNamespace(read=AsyncMock(return_value=ERROR.format(code).encode()))
        return AioAWSResponse(request.url, status, {"content-type": "application/xml"}, body)


@pytest.fixture(scope="module")
def endpoint():
    """Moto's server, in a process of its own: vLLM looks at every attribute of modules, and some of Flask's raise."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: not socket.socket().connect_ex(("127.0.0.1", port)))
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait()


@pytest.fixture
def requests(endpoint, monkeypatch):
    """Those to an empty bucket, and the environment as a user sets it."""
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    s3fs.S3FileSystem.clear_instance_cache()
    files = fsspec.filesystem("s3")
    while files.exists("bucket"):
        with contextlib.suppress(OSError):  # a thread of the test before may still write
            files.rm("bucket", recursive=True)
    files.mkdir("bucket")
    requests, send = Requests(), AIOHTTPSession.send
    monkeypatch.setattr(AIOHTTPSession, "send", lambda *about: requests.send(send, *about))
    return requests


def open_again(url=URL, **options):
    """As in an engine of its own: what s3fs remembers is not shared."""
    s3fs.S3FileSystem.clear_instance_cache()
    return HistoryFolder(url, ORIGIN, **options)


@pytest.mark.usefixtures("requests")
def test_engines_share_a_bucket():
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


def test_a_file_takes_one_request_and_a_look_at_a_problem_one_more(requests):
    one = open_again()
    one.write([rollout(1)])
    assert requests == ["PUT"]
    requests.clear()
    assert numbers(open_again().read(1)) == [1]
    assert requests == ["LIST", "GET"]
    requests.clear()
    one.read(1)
    assert requests == ["LIST"]


def test_a_bucket_is_not_looked_at_as_often_as_a_folder(requests, monkeypatch):
    monkeypatch.setattr(exchange, "SECONDS_LOCAL", 0.0)
    thread = FolderThread(open_again())
    thread.watch(1, is_known=False)
    thread._read()
    requests.clear()
    thread._read()
    assert not requests


@pytest.mark.usefixtures("requests")
def test_a_bucket_that_is_not_there_is_not_made():
    with pytest.raises(OSError):
        open_again("s3://another/run").write([rollout(1)])
    assert not fsspec.filesystem("s3").exists("another")


@pytest.mark.parametrize("refusal", [(503, "SlowDown"), (403, "AccessDenied"), "gone"])
def test_what_fails_is_tried_again(requests, monkeypatch, caplog, refusal):
    """Where the store refuses, and where it is not there."""
    for name in ("SECONDS_REMOTE", "SECONDS_TO_RETRY"):
        monkeypatch.setattr(exchange, name, 0.05)
    one, other = FolderThread(open_again()), FolderThread(open_again())
    one.start(), other.start()
    try:
        requests.refusal = refusal
        other.watch(1, is_known=False)
        one.add([rollout(1)])
        wait_until(lambda: len(caplog.records) >= 2)
        time.sleep(0.3)
        assert one.stats()["rollouts_waiting"] == 1
        requests.refusal = None
        assert taken(other, 1) == [1]
    finally:
        one.close(), other.close()
    assert 2 <= len(caplog.records) <= 4  # each kind of fault once
