"""Child processes that answer messages. An engine in one has its own environment, log and time limit."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

STOP_SECONDS = 90


class Child:
    """A spawned process that runs a generator: it yields once it is ready, and then an answer to each message.

    As a context manager it is killed at the end, if it has not ended before.

    Args:
        serve: Makes the generator in the process; a function of a module. The generator is closed in `stop`.
        args: Arguments of `serve`.
        log: What the process prints is appended to this file.
        environment: Variables that are set before the process imports anything.
    """

    def __init__(
        self, serve: Callable[..., Generator[Any, Any, None]], *args: Any, log: Path, environment: Mapping[str, str]
    ) -> None:
        context = get_context("spawn")
        self._log = log
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs, log, serve, args))
        path = filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])  # for its own children, too
        with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(path), **environment}):
            self._process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        """Send a message, anything but None. If the process has ended, `answer` says so."""
        with suppress(BrokenPipeError):
            self._pipe.send(message)

    def answer(self, seconds: float | None = None) -> Any:
        """Wait for the next answer, the first of which is what is yielded when it is ready.

        Raises:
            RuntimeError: the process has raised, has ended, or does not answer within these seconds.
        """
        what = "no answer in time"
        try:
            if self._pipe.poll(seconds):
                is_answer, what = self._pipe.recv()
                if is_answer:
                    return what
        except (EOFError, ConnectionResetError):
            self._process.join()
            what = f"the process ended with exit code {self._process.exitcode}"
        raise RuntimeError(f"see {self._log}: {what.strip()}")

    def stop(self) -> None:
        """Close the generator and wait for the process's end. Raises RuntimeError if it does not end."""
        with suppress(BrokenPipeError):
            self._pipe.send(None)
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            raise RuntimeError(f"see {self._log}: the process does not end within {STOP_SECONDS} s")

    def kill(self) -> None:
        """Kill the process and its children."""
        if self._process.is_alive():
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.kill()
        self._process.join()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _answer(pipe: Any, log: Path, serve: Callable[..., Generator[Any, Any, None]], args: tuple[Any, ...]) -> None:
    """What the process runs."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        answers = serve(*args)
        pipe.send((True, next(answers)))
        while (message := pipe.recv()) is not None:
            pipe.send((True, answers.send(message)))
        answers.close()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
