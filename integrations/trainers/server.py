"""A vLLM server that speculates, as far as the trainer's side has to do with it: commands over HTTP."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any
from urllib.parse import urlparse

from rollout_spec.checks import shown
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.integrations.vllm.environment import VARIABLE

RPC_SECONDS = 60.0
"""The longest that one command may take; the server answers between two steps."""


class ServerError(ConnectionError):
    """A server's answer that is none."""


class ServedEngine:
    """Stands where `EngineController` has a `vllm.LLM`, for its commands only.

    With data parallelism the server answers for its first engine.

    Args:
        base_url: The server's, such as "http://localhost:8000".
        config: What it should have been started with; for the command in error messages.
        model: The model that it should serve; likewise.

    Raises:
        TypeError: `base_url` is no string.
        ValueError: it does not begin with http:// or https://, or has a port that is none.
    """

    def __init__(self, base_url: str, config: RolloutSpecConfig, model: str) -> None:
        if not isinstance(base_url, str):
            raise TypeError(f"base_url must be a string, got {shown(base_url)}")
        try:
            parts = urlparse(base_url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # of brackets and ports
            is_url = False
        if not is_url:
            raise ValueError(f"base_url must be a URL such as http://localhost:8000, got {shown(base_url)}")
        self.base_url = base_url.rstrip("/")
        self._config = config
        self._model = model

    def wait(self, timeout: float) -> None:
        """Wait until the server answers.

        Raises:
            TimeoutError: it does not, for `timeout` seconds. The message has the command that starts it.
        """
        import requests

        deadline = time.monotonic() + timeout
        while True:
            try:
                if requests.get(f"{self.base_url}/health", timeout=5).ok:
                    return
            except requests.RequestException:
                pass
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"no vLLM server has answered at {self.base_url} for {timeout:.0f} s. {self.how_to_start()}"
                )
            time.sleep(1)

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of the server's workers, as `vllm.LLM.collective_rpc` does.

        Raises:
            TimeoutError: the server takes more than a minute.
            ServerError: it has no development mode, its engine runs without rollout_spec, it does not answer, or it is
                no vLLM server.
        """
        import requests

        body = {"method": method, "args": list(args)}
        where = f"the vLLM server at {self.base_url}"
        try:
            response = requests.post(f"{self.base_url}/collective_rpc", json=body, timeout=RPC_SECONDS)
        except requests.Timeout as error:
            raise TimeoutError(f"{where} has not answered {method}{tuple(args)} for {RPC_SECONDS:.0f} s") from error
        except requests.RequestException as error:
            raise ServerError(f"{where} does not answer: {error}") from error
        if response.status_code in (404, 405):
            raise ServerError(
                f"{where} has no /collective_rpc, by which rollout_spec asks whether it speculates: it runs without "
                "VLLM_SERVER_DEV_MODE=1"
            )
        if not response.ok:
            raise ServerError(
                f"{where} runs without rollout_spec, or cannot answer {method}{tuple(args)} (status "
                f"{response.status_code}): {response.text[:500]}"
            )
        try:
            results = list(response.json()["results"])
        except (LookupError, TypeError, ValueError):
            results = []
        if not results:
            raise ServerError(f"what answers at {self.base_url} is no vLLM server: {shown(response.text)}")
        return results

    def how_to_start(self) -> str:
        """A sentence with the command that starts such a server."""
        defaults = RolloutSpecConfig().to_dict()
        options = {name: value for name, value in self._config.to_dict().items() if value != defaults[name]}
        variable = f"{VARIABLE}={shlex.quote(json.dumps(options))}"
        port = urlparse(self.base_url).port  # of what stands before the server nothing is known
        arguments = shlex.quote(self._model) + (f" --port {port}" if port else "")
        return (
            "Start it with these arguments, besides those that the trainer's library asks for:\n"
            f"VLLM_SERVER_DEV_MODE=1 {variable} vllm serve {arguments}"
        )
