"""Files that commands read and write."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout_spec.checks import shown

MAX_JSON_BYTES = 1 << 26
"""Larger reports and cost curves are refused unread: real ones have less than a megabyte."""


def check_writable(path: Path) -> None:
    """Check that a file can be written, before the work whose result goes there. Leaves the file as it was.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(os.path.realpath(path))  # of a link that leads nowhere, it is not the link that is removed
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file to an OSError that does not say which: reading and writing raise such ones, opening does not."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Gives the path of a new file, which then takes the place of `path`. Where writing fails, all is as it was before.

    What can only be written in place is: pipes and devices, and files whose folder takes no new ones.

    Raises:
        OSError: it cannot be written.
    """
    check_writable(path)
    path = Path(os.path.realpath(path))
    unfinished = path.with_name(f".{secrets.token_hex(8)}")
    try:
        if path.exists() and not path.is_file():
            raise FileExistsError
        unfinished.touch(exist_ok=False)
    except OSError:
        yield path
        return
    try:
        yield unfinished
        if path.exists():
            shutil.copymode(path, unfinished)
        try:
            unfinished.replace(path)
        except OSError:  # a file that is mounted
            shutil.copyfile(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, as a whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    with naming(path), writing(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ValueError: it does not, or is larger than `MAX_JSON_BYTES`. The message does not name the file.
        OSError: it cannot be read.
    """
    with naming(path), path.open("rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"it is larger than {MAX_JSON_BYTES:,} bytes")
    if not data.strip():
        raise ValueError("it is empty")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:  # no JSON, no text, or brackets without end
        raise ValueError(f"it is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"it must be a JSON object, got {shown(values)}")
    return values
