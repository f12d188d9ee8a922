"""Where shards are: a local folder, or any file system of fsspec, such as s3://bucket/history.

A file is there as a whole or not at all, and never changes. Every method raises OSError where it fails.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

SUFFIX = ".parquet"
"""Of shards. Other files of the folder are left alone."""
UNFINISHED = ".unfinished"
"""Suffix of files that are being written. What a killed process has left is removed by `tidying`."""
LOCK = ".lock"
"""Held by the process that merges and deletes shards."""


class ShardStorage(Protocol):
    """A flat folder of shards."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each shard, by name."""

    def read(self, name: str) -> bytes:
        """A shard's bytes."""

    def write(self, name: str, data: bytes) -> None:
        """Write a shard; after a crash at any moment it is there as a whole or not at all."""

    def delete(self, name: str) -> None:
        """Delete a shard; none of that name is no error."""

    def tidying(self, *, abandoned_before: float) -> contextlib.AbstractContextManager[bool]:
        """To be entered while shards are merged and deleted. Gives whether this process may; another one may be at it.

        Args:
            abandoned_before: Unfinished files are removed that were last changed before, in seconds since the epoch.
        """


class LocalStorage:
    """A folder of this machine, or one that is mounted on it. It is made at the first `write`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        try:
            entries = list(os.scandir(self._path))
        except FileNotFoundError:  # nothing has been written
            return found
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(OSError):  # merged or pruned meanwhile, or no other shard's fault
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode):  # to read a pipe would be to wait for a writer
                        found[entry.name] = status.st_size
        return found

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        path, unfinished = self._path / name, self._path / f"{name}.{secrets.token_hex(8)}{UNFINISHED}"
        try:
            with unfinished.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        folder = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name
        finally:
            os.close(folder)

    def delete(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def tidying(self, *, abandoned_before: float) -> Iterator[bool]:
        if not self._path.exists():  # nothing has been written
            yield False
            return
        with (self._path / LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):  # another process has it
                    yield False
                    return
                # The file system has no locks. Where two merge the same shards, readers take each batch once.
            for path in self._path.glob(f"*{UNFINISHED}"):
                with contextlib.suppress(OSError):
                    if path.stat().st_mtime < abandoned_before:
                        path.unlink()
            yield True


class RemoteStorage:
    """A folder of a file system of fsspec. A file must be seen only once all of it is there, as in object stores."""

    def __init__(self, url: str) -> None:
        import fsspec

        self._files, self._path = fsspec.core.url_to_fs(url)

    def sizes(self) -> dict[str, int]:
        with _raising_os_errors():
            try:
                entries = self._files.ls(self._path, detail=True, refresh=True)
            except FileNotFoundError:
                return {}
        names = {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in entries if entry["type"] == "file"}
        return {name: size for name, size in names.items() if name.endswith(SUFFIX)}

    def read(self, name: str) -> bytes:
        with _raising_os_errors():
            data: bytes = self._files.cat_file(f"{self._path}/{name}")
            return data

    def write(self, name: str, data: bytes) -> None:
        with _raising_os_errors():
            self._files.makedirs(self._path, exist_ok=True)
            self._files.pipe_file(f"{self._path}/{name}", data)

    def delete(self, name: str) -> None:
        with _raising_os_errors(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._path}/{name}")

    def tidying(self, *, abandoned_before: float) -> contextlib.AbstractContextManager[bool]:
        # There are no locks. Where two merge the same shards, readers take each batch once.
        return contextlib.nullcontext(True)


@contextlib.contextmanager
def _raising_os_errors() -> Iterator[None]:
    """Raise OSError for whatever a file system's own code raises: each has other exceptions."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def is_remote(url: str) -> bool:
    """Whether a URL names a file system of fsspec other than the local one."""
    return "://" in url and not url.startswith(("file://", "local://"))


def open_storage(url: str | os.PathLike[str]) -> ShardStorage:
    """The storage behind a path or a URL. Touches nothing.

    Raises:
        ValueError: `url` is empty, or fsspec knows no such file system, or cannot use it.
    """
    url = os.fspath(url)
    if not url:
        raise ValueError("the name of the history's folder is empty")
    if not is_remote(url):
        return LocalStorage(Path(url.removeprefix("file://").removeprefix("local://")))
    try:
        return RemoteStorage(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"history_dir {url!r} cannot be used: {error}") from error
