"""An S3-compatible server on this machine: it counts requests by kind, and can be slow, refuse, hang and go away."""

from __future__ import annotations

import threading
import time
from collections import Counter
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

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
    """Moto's server, with one bucket. Connections are not kept, so that none outlives `stop`.

    Attributes:
        requests: Kind and path of each, as they came; the path of a LIST is its prefix.
        num_bytes: Of bodies that came in and went out.
        seconds_per_answer: Each request waits for so long.
        refusal: (status, code) of the answer to every request; None: they are answered.
        num_hanging: Requests that wait for `resume`.
    """

    def __init__(self, bucket: str = "bucket") -> None:
        self.requests: list[tuple[str, str]] = []
        self.num_bytes: Counter[str] = Counter()
        self.seconds_per_answer = 0.0
        self.refusal: tuple[int, str] | None = None
        self.num_hanging = 0
        self._answers = threading.Event()
        self._answers.set()
        self._backend = DomainDispatcherApplication(create_backend_app)
        self._port = 0
        self._bucket = bucket
        self.start()

    @property
    def endpoint(self) -> str:
        """To be set as AWS_ENDPOINT_URL."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def kinds(self) -> Counter[str]:
        """Requests by kind."""
        return Counter(kind for kind, _ in self.requests)

    def start(self) -> None:
        """Listen, again at the same port. What was stored is there."""
        self._server = make_server("127.0.0.1", self._port, self._answer, threaded=True, request_handler=_Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Connections are refused from now on."""
        self.resume()
        self._server.shutdown()
        self._server.server_close()

    def hang(self) -> None:
        """Requests get no answer from now on."""
        self._answers.clear()

    def resume(self) -> None:
        """Those that hang, and later ones, are answered."""
        self._answers.set()

    def _answer(self, environ, start_response):
        kind, path = _kind_of(environ)
        self.requests.append((kind, path))
        self.num_bytes["in"] += int(environ.get("CONTENT_LENGTH") or 0)
        if not self._answers.is_set():
            self.num_hanging += 1
            self._answers.wait()
            self.num_hanging -= 1
        time.sleep(self.seconds_per_answer)
        if self.refusal is not None:
            status, code = self.refusal
            start_response(f"{status} {code}", [("Content-Type", "application/xml")])
            return [b"" if kind == "HEAD" else _ERROR.format(code=code).encode()]
        body = b"".join(self._backend(environ, start_response))
        self.num_bytes["out"] += len(body)
        return [body]


class _Handler(WSGIRequestHandler):
    def log_request(self, *args):
        pass


def _kind_of(environ) -> tuple[str, str]:
    method, (_, _, key) = environ["REQUEST_METHOD"], environ["PATH_INFO"].lstrip("/").partition("/")
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    if method == "GET" and "list-type" in query:
        return "LIST", query.get("prefix", [""])[0]
    return method if key else f"{method} bucket", key
