"""Where shards are: in local folders, or in those of any file system of fsspec, such as s3://bucket/history.

A file is there as a whole or not at all, and never changes. Every method raises OSError where it fails.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

SUFFIX = ".parquet"
"""Of shards. Other files of the folder are left alone."""
UNFINISHED = ".unfinished"
"""Suffix of files that are being written. What a killed process has left is removed by `tidying`."""
LOCK = ".lock"
"""Held by the process that merges and deletes shards."""

S3_URLS = ("s3://", "s3a://")
S3_OPTIONS = {
    "max_concurrency": 1,
    "use_listings_cache": False,
    "config_kwargs": {"retries": {"total_max_attempts": 1}},
}
"""Of s3fs. With more requests at once, it asks for a file's size before it reads it. Its listings, of each folder that
was ever read, would be kept for good. It tries five times itself, and botocore would try each of these five times: a
store that throttles would get 25 requests for one."""


class ShardStorage(Protocol):
    """A folder of shards, and of other folders. It need not exist before something is written."""

    def folder(self, path: str) -> ShardStorage:
        """A folder within it, by its path, such as `a/b`. Touches nothing."""

    def folders(self) -> list[str]:
        """Names of the folders within it."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each shard, by name, without those in other folders."""

    def read(self, name: str) -> bytes:
        """A file's bytes."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file; after a crash at any moment it is there as a whole or not at all."""

    def delete(self, name: str) -> None:
        """Delete a file; none of that name is no error."""

    def remove_unfinished(self, *, before: float) -> None:
        """Remove what a killed process was writing, if it was last changed before, in seconds since the epoch."""

    def tidying(self) -> contextlib.AbstractContextManager[bool]:
        """To be entered while shards are merged and deleted. Gives whether this process may: another may be at it."""


class LocalStorage:
    """A folder of this machine, or one that is mounted on it. It is made at the first `write`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def folder(self, path: str) -> LocalStorage:
        return LocalStorage(self._path / path)

    def folders(self) -> list[str]:
        return [entry.name for entry in self._entries() if entry.is_dir(follow_symlinks=False)]

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._path) as entries:
                return list(entries)
        except FileNotFoundError:  # nothing has been written
            return []

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for entry in self._entries():
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(OSError):  # merged or pruned meanwhile, or no other shard's fault
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode):  # to read a pipe would be to wait for a writer
                        found[entry.name] = status.st_size
        return found

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        _make_folder(self._path)
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
        _flush_names(self._path)

    def delete(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def remove_unfinished(self, *, before: float) -> None:
        for entry in self._entries():
            if entry.name.endswith(UNFINISHED):
                with contextlib.suppress(OSError):
                    if entry.stat().st_mtime < before:
                        self.delete(entry.name)

    @contextlib.contextmanager
    def tidying(self) -> Iterator[bool]:
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
            yield True


def _make_folder(path: Path) -> None:
    """Make a folder and those that it is in, so that they are there after a crash."""
    if not path.exists():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        _flush_names(path.parent)


def _flush_names(folder: Path) -> None:
    """Wait until a folder's new names are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RemoteStorage:
    """A folder of a file system of fsspec. A file must be seen only once all of it is there, as in object stores.

    Args:
        files: The file system.
        path: The folder's path on it.
    """

    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path

    def folder(self, path: str) -> RemoteStorage:
        return RemoteStorage(self._files, f"{self._path}/{path}")

    def folders(self) -> list[str]:
        return [_name_of(entry) for entry in self._entries() if entry["type"] == "directory"]

    def _entries(self) -> list[dict[str, Any]]:
        with _raising_os_errors():
            try:
                return list(self._files.ls(self._path, detail=True, refresh=True))
            except FileNotFoundError:
                return []

    def sizes(self) -> dict[str, int]:
        sizes = {_name_of(entry): entry["size"] for entry in self._entries() if entry["type"] == "file"}
        return {name: size for name, size in sizes.items() if name.endswith(SUFFIX)}

    def read(self, name: str) -> bytes:
        with _raising_os_errors():
            data: bytes = self._files.cat_file(f"{self._path}/{name}")
            return data

    def write(self, name: str, data: bytes) -> None:
        path = f"{self._path}/{name}"
        with _raising_os_errors():
            try:
                self._files.pipe_file(path, data)
            except FileNotFoundError:  # object stores need no folder, and would be asked for it each time
                self._make_folder(path.rsplit("/", 1)[0])
                self._files.pipe_file(path, data)

    def _make_folder(self, path: str) -> None:
        self._files.makedirs(path, exist_ok=True)

    def delete(self, name: str) -> None:
        with _raising_os_errors(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._path}/{name}")

    def remove_unfinished(self, *, before: float) -> None:
        pass  # a file is there as a whole or not at all

    def tidying(self) -> contextlib.AbstractContextManager[bool]:
        # There are no locks. Where two merge the same shards, readers take each batch once.
        return contextlib.nullcontext(True)


class S3Storage(RemoteStorage):
    """A folder of an S3-compatible object store, through s3fs, with as few requests as there can be.

    A listing of nothing is one request, where `ls` of s3fs goes on to list the folder above, which may be a bucket
    with millions of names.
    """

    def folder(self, path: str) -> S3Storage:
        return S3Storage(self._files, f"{self._path}/{path}")

    def sizes_below(self) -> Iterator[tuple[str, dict[str, int]]]:
        """(path of a folder within it, `sizes` there), of all that have shards: 1000 shards per request."""
        by_folder = itertools.groupby(self._pages(delimiter=""), lambda file: file["name"].rpartition("/")[0])
        for path, files in by_folder:
            sizes = {_name_of(file): file["size"] for file in files if file["name"].endswith(SUFFIX)}
            if sizes:
                yield f"{self._bucket}/{path}".removeprefix(f"{self._path}/"), sizes

    def _entries(self) -> list[dict[str, Any]]:
        return list(self._pages(delimiter="/"))

    @property
    def _bucket(self) -> str:
        return self._path.partition("/")[0]

    def _pages(self, *, delimiter: str) -> Iterator[dict[str, Any]]:
        key = self._path.partition("/")[2]
        asked = {"Bucket": self._bucket, "Prefix": key and f"{key}/", "Delimiter": delimiter}
        while True:
            with _raising_os_errors():
                answer = self._files.call_s3("list_objects_v2", **asked)
            for file in answer.get("Contents", []):
                yield {"name": file["Key"], "size": file["Size"], "type": "file"}
            for folder in answer.get("CommonPrefixes", []):
                yield {"name": folder["Prefix"], "type": "directory"}
            if not answer.get("IsTruncated"):
                return
            asked["ContinuationToken"] = answer["NextContinuationToken"]

    def _make_folder(self, path: str) -> None:
        # s3fs would make a bucket, perhaps of a misspelled name, in the user's account.
        raise FileNotFoundError(errno.ENOENT, "there is no such bucket", path.partition("/")[0])


def _name_of(entry: dict[str, Any]) -> str:
    """The last part of a path as fsspec lists it."""
    return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]


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
        import fsspec

        if url.startswith(S3_URLS):
            return S3Storage(*fsspec.core.url_to_fs(url, **S3_OPTIONS))
        return RemoteStorage(*fsspec.core.url_to_fs(url))
    except (ImportError, ValueError) as error:
        raise ValueError(f"history_dir {url!r} cannot be used: {error}") from error
