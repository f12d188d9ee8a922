"""An S3-compatible server on this machine: it counts requests by kind, and can refuse and go away."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
"""What a user sets for it, besides the endpoint, and nothing of the machine's own settings."""
_ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>told to</Message><RequestId>0</RequestId></Error>'


class ObjectStore:
    """Moto's server with one bucket, in a process of its own, and what stands before it and counts.

    Flask, which Moto needs, must not be imported here: vLLM looks at every attribute of every module, and some of
    Flask's raise. Connections are not kept, so that none outlives `stop`.

    Attributes:
        requests: Kind and path of each, as they came; the path of a LIST is its prefix.
        refusal: (status, code) of the answer to every request; None: they are answered.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.refusal: tuple[int, str] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.backend_port = free.getsockname()[1]
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.backend_port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", self.backend_port)):
            assert self._process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.05)
        self._port = 0
        self.start()

    @property
    def endpoint(self) -> str:
        """To be set as AWS_ENDPOINT_URL."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, again at the same port. What was stored is there."""
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Connections are refused from now on."""
        self._server.shutdown()
        self._server.server_close()

    def close(self) -> None:
        """End it."""
        self.stop()
        self._process.terminate()
        self._process.wait()


class _Handler(BaseHTTPRequestHandler):
    store: ObjectStore
    protocol_version = "HTTP/1.1"  # in which a client may wait to be told to go on with its body

    def log_message(self, *args):
        pass

    def _handle(self):
        store, kind_and_path = self.store, _kind_of(self.command, self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        store.requests.append(kind_and_path)
        if store.refusal is not None:
            status, code = store.refusal
            headers, data = [("Content-Type", "application/xml")], _ERROR.format(code=code).encode()
        else:
            status, headers, data = self._ask_backend(body)
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("connection", "content-length", "date", "server", "transfer-encoding"):
                self.send_header(name, value)
        if self.command == "HEAD":
            self.send_header("Content-Length", dict(headers).get("Content-Length", "0"))
        else:
            self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _ask_backend(self, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.store.backend_port)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "expect")}
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


def _kind_of(method: str, url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    key, query = parts.path.lstrip("/").partition("/")[2], parse_qs(parts.query, keep_blank_values=True)
    if method == "GET" and "list-type" in query:
        return "LIST", query.get("prefix", [""])[0]
    return method if key else f"{method} bucket", key
