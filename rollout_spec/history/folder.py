"""A folder in which history lasts, and which engines share.

Each problem has a folder in it, named by its id, with Parquet files of ended rollouts, `<order>-<id>.parquet`, where
the order is `Rollout.order` and the id a hash of the content. A file is written once, as a whole, and never changed. So
engines need not know of each other, may be killed at any moment, and read only what they are asked for; a file that is
lost or damaged costs drafts, and never a token. Where the folder is too large, the oldest files go first, whoever
deletes them.

The folder is a local one, or one of any file system of fsspec, such as s3://bucket/history.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple

import numpy as np

from rollout_spec.checks import first_line
from rollout_spec.features import FEATURE_WORDS
from rollout_spec.history.store import CONTEXT_TOKENS, Rollout, Root

logger = logging.getLogger(__name__)

FORMAT = 2
"""Incremented when files of older code can no longer be read."""
METADATA_KEY = b"rollout_spec.history"
MAX_PROBLEM_TOKENS = 262_144
"""Of one problem, newest first, that an engine reads: a group of 16 in each of 30 epochs, 512 each."""
READERS = 16
"""Files of a remote file system that are read at once: an answer takes long, and little work."""
CHECKS_PER_BOUND = 16
"""About so many times a full folder is listed and pruned while all engines together write as many bytes as its bound:
after each write, with a probability in proportion to its bytes."""
S3_OPTIONS = {"max_concurrency": 1, "config_kwargs": {"retries": {"total_max_attempts": 1}}}
"""Of s3fs. With more requests at once it asks for a file's size before it reads it. It tries five times itself, and
botocore would try each of these five times: a store that throttles would get 25 requests for one."""
SECONDS_UNFINISHED = 3600
"""A file that is still half written after so long is what a killed process left."""
_NAME = re.compile(r"([0-9a-f]{16})/(\d{10})-[0-9a-f]{16}\.parquet")
_RANDOM = random.Random()  # `random` itself may be what a reward function in this process has seeded
_PROBLEM = re.compile("[0-9a-f]{16}")
MAX_SAID = 20
"""Reasons for which files are left out are named up to so many."""


class OtherOriginError(ValueError):
    """A file's tokens are not those of the model that they are to be used with."""


class Origin(NamedTuple):
    """What a file's rollouts come from. None: not known, which fits everything."""

    tokenizer: str | None = None
    """`fingerprint` of the tokenizer's vocabulary."""
    vocab_size: int | None = None
    """Tokens that the model knows: perhaps more than the tokenizer has. Files with others are refused."""
    model: str | None = None
    """The model's name, for people."""
    states: str | None = None
    """Tells apart models whose hidden states cannot be compared."""


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """128 bits that are equal for equal vocabularies, by token."""
    digest = hashlib.blake2b(digest_size=16)
    for token, number in sorted(vocabulary.items(), key=lambda item: item[1]):
        digest.update(f"{number} {token}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


# -- one file --------------------------------------------------------------------------------------------------------


def encode(rollouts: Sequence[Rollout], origin: Origin) -> bytes:
    """The bytes of a file with these rollouts, at least one. O(tokens)."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    lists = arrow.list_(arrow.int32())
    roots = [rollout.root for rollout in rollouts]
    packed_features = [None if r.features is None else r.features.astype("<i8").tobytes() for r in rollouts]
    columns = {
        "context": arrow.array([rollout.context for rollout in rollouts], lists),
        "tokens": arrow.array([rollout.tokens for rollout in rollouts], lists),
        "features": arrow.array(packed_features, arrow.binary()),
        "root_length": arrow.array([None if root is None else root.length for root in roots], arrow.int64()),
        "root_hash": arrow.array([None if root is None else root.whole for root in roots], arrow.uint64()),
    }
    about = json.dumps({"format": FORMAT, "origin": origin._asdict()})
    table = arrow.table(columns, metadata={METADATA_KEY: about})
    out = arrow.BufferOutputStream()
    parquet.write_table(table, out, compression="zstd", use_dictionary=False, write_page_checksum=True)
    data: bytes = out.getvalue().to_pybytes()
    return data


def decode(data: bytes, problem_id: int, order: int, origin: Origin) -> list[Rollout]:
    """The rollouts of a file. Features of a model with other states are left out. O(tokens).

    Args:
        origin: What they are to be used with.

    Raises:
        OtherOriginError: it is of another tokenizer, or has tokens that the model does not know.
        ValueError: it is damaged, or of another format. Neither message names it.
    """
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(arrow.BufferReader(data), page_checksum_verification=True)
        about = json.loads((file.schema_arrow.metadata or {}).get(METADATA_KEY, b"{}"))
        if about.get("format") != FORMAT:
            raise ValueError(f"its format is {about.get('format')!r}, and this version of rollout-spec reads {FORMAT}")
        theirs = Origin(**about["origin"])
        if None not in (origin.tokenizer, theirs.tokenizer) and origin.tokenizer != theirs.tokenizer:
            raise OtherOriginError(f"it is of another tokenizer (model {theirs.model}): {theirs.tokenizer}")
        # Not by threads of Arrow's pools: they could let go of these bytes, which are Python's, while the interpreter
        # ends, and that aborts the process.
        table = file.read(use_threads=False)
        has_states = None in (origin.states, theirs.states) or origin.states == theirs.states
        contexts, texts = _arrays(table["context"], origin), _arrays(table["tokens"], origin)
        others = (table[name].to_pylist() for name in ("features", "root_length", "root_hash"))
        rollouts = []
        for context, tokens, packed, length, whole in zip(contexts, texts, *others, strict=True):
            if not tokens.size or context.size > CONTEXT_TOKENS:
                raise ValueError(f"a rollout has {tokens.size} tokens after {context.size} of its prompt")
            features = None
            if packed is not None and has_states:
                features = np.frombuffer(packed, "<i8").reshape(tokens.size, FEATURE_WORDS).astype(np.int64)
            root = None if length is None else Root(length, whole)
            rollouts.append(Rollout(problem_id, context, tokens, features, root, order))
        return rollouts
    except OtherOriginError:
        raise
    except (arrow.ArrowException, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(first_line(error)) from error


def _arrays(column: Any, origin: Origin) -> list[Any]:
    """int32 arrays, one per row of a column of token lists."""
    lists = column.combine_chunks()
    tokens = lists.flatten().to_numpy()
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < (origin.vocab_size or 2**31):
        raise OtherOriginError(f"it holds tokens outside of the vocabulary of {origin.vocab_size or 2**31}")
    return np.split(tokens, np.cumsum(lists.value_lengths())[:-1])


# -- the folder ------------------------------------------------------------------------------------------------------


@dataclass
class FolderStats:
    """What went through a folder, in this process."""

    rollouts_written: int = 0
    rollouts_read: int = 0
    files_refused: int = 0
    """Those that were damaged or of another tokenizer."""


class Found(NamedTuple):
    """A file of a folder."""

    order: int
    problem_id: int
    path: str
    size: int


class HistoryFolder:
    """See the module's docstring. Each method raises OSError where the folder cannot be used.

    Different problems may be read and written by different threads at once.

    Args:
        url: A path, or a URL that fsspec knows.
        origin: What the rollouts that are written come from, and what those that are read are used with.
        max_bytes: Bound on all files. None: there is none.

    Attributes:
        is_remote: Whether files come over a network that fsspec knows of.
        stats: What went through the folder.

    Raises:
        ValueError: fsspec knows no such file system, or cannot use it.
    """

    def __init__(self, url: str, origin: Origin, *, max_bytes: int | None = None) -> None:
        self.url, self.origin, self.stats = url, origin, FolderStats()
        self._fs, self._root = open_folder(url)
        protocols = self._fs.protocol
        self.is_remote = "file" not in ((protocols,) if isinstance(protocols, str) else protocols)
        self._max_bytes = max_bytes
        self._seen: defaultdict[int, set[int]] = defaultdict(set)  # hashes of paths read or written, by problem
        self._said: set[str] = set()  # reasons that a warning has named

    def load(self, max_tokens: int) -> list[Rollout]:
        """Read the newest files, as far as `max_tokens` go. Oldest first."""
        files = sorted(self.files(), reverse=True)
        read: list[list[Rollout]] = []
        with ThreadPool(READERS if self.is_remote else 1) as pool:
            while files and max_tokens > 0:
                some, files = files[:READERS], files[READERS:]
                read += pool.map(self._read, some, 1)
                max_tokens -= sum(rollout.num_tokens for rollouts in read[-len(some) :] for rollout in rollouts)
        return [rollout for rollouts in reversed(read) for rollout in rollouts]

    def read(self, problem_id: int) -> list[Rollout]:
        """A problem's rollouts in files that were neither read nor written here. Oldest first."""
        new = [file for file in self.files(problem_id) if hash(file.path) not in self._seen[problem_id]]
        read: list[list[Rollout]] = []
        num_tokens = 0
        for file in sorted(new, reverse=True):
            if num_tokens >= MAX_PROBLEM_TOKENS:
                self._seen[problem_id].add(hash(file.path))
                continue
            read.append(self._read(file))
            num_tokens += sum(rollout.num_tokens for rollout in read[-1])
        return [rollout for rollouts in reversed(read) for rollout in rollouts]

    def write(self, rollouts: Sequence[Rollout]) -> Found:
        """Write rollouts of one problem and order, at least one, as a file."""
        problem_id, order = rollouts[0].problem_id, rollouts[0].order
        data = encode(rollouts, self.origin)
        # Named by its content: what is imported twice, or written again after an answer that was lost, is there once.
        name = hashlib.blake2b(data, digest_size=8).hexdigest()
        path = f"{self._root}/{problem_id:016x}/{order:010d}-{name}.parquet"
        self._put(path, data)
        self._seen[problem_id].add(hash(path))
        self.stats.rollouts_written += len(rollouts)
        return Found(order, problem_id, path, len(data))

    def prune_by_chance(self, num_bytes: int) -> None:
        """Prune to `max_bytes`, by a chance that grows with the bytes that were written."""
        if self._max_bytes is not None and _RANDOM.random() < num_bytes * CHECKS_PER_BOUND / self._max_bytes:
            self.prune(self._max_bytes)

    def forget(self, problem_id: int) -> None:
        """Read again what was read or written of a problem, if it is asked for: the engine has nothing of it left."""
        self._seen.pop(problem_id, None)

    def files(self, problem_id: int | None = None) -> Iterator[Found]:
        """A problem's files, or all, in no order. An object store lists 1,000 of them per request.

        What cannot be listed is left out, with a line in the log; if that is the whole folder, OSError is raised.
        """
        with _raising_os_errors():
            for path, size in self._remote_files(problem_id) if self.is_remote else self._local_files(problem_id):
                match = _NAME.fullmatch(path.removeprefix(f"{self._root}/"))
                if match:
                    yield Found(int(match[2]), int(match[1], 16), path, size)

    def _remote_files(self, problem_id: int | None) -> Iterator[tuple[str, int]]:
        """(path, size) of all files in a problem's folder, or in all folders."""
        self._fs.invalidate_cache()
        below = self._root if problem_id is None else f"{self._root}/{problem_id:016x}"
        with contextlib.suppress(FileNotFoundError):
            for path, about in self._fs.find(below, detail=True).items():
                yield path, about["size"]

    def _local_files(self, problem_id: int | None) -> Iterator[tuple[str, int]]:
        """As `_remote_files`, but only in folders that are named as a problem's are. Faster than fsspec's."""
        problems = [] if problem_id is None else [f"{problem_id:016x}"]
        if problem_id is None:
            with contextlib.suppress(FileNotFoundError):
                problems = list(filter(_PROBLEM.fullmatch, os.listdir(self._root)))
        for problem in problems:
            path = f"{self._root}/{problem}"
            try:
                with os.scandir(path) as entries:
                    for entry in entries:
                        with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
                            yield entry.path, entry.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:  # another user's, or on a server that has forgotten it
                self._warn(f"{path} is left out", error)

    def all_rollouts(self, on_bad: Callable[[str, Exception], object]) -> Iterator[Rollout]:
        """Those of all files, oldest first.

        Args:
            on_bad: Called with the path of each file that cannot be used, and the error.
        """
        for file in sorted(self.files()):
            try:
                yield from self.rollouts(file)
            except FileNotFoundError:  # pruned meanwhile
                continue
            except (OSError, ValueError) as error:
                on_bad(file.path, error)

    def rollouts(self, file: Found) -> list[Rollout]:
        """A file's. Raises as `decode`, and FileNotFoundError where it is gone."""
        with _raising_os_errors():
            data = self._fs.cat_file(file.path)
        return decode(data, file.problem_id, file.order, self.origin)

    def prune(self, max_bytes: int) -> list[Found]:
        """Delete the oldest files until the others have at most so many bytes.

        What cannot be deleted stays, and others go in its place.

        Returns:
            Those that were deleted. Two processes that prune at once delete the same ones.
        """
        files = sorted(self.files(), reverse=True)
        num_bytes, at_once = sum(file.size for file in files), 1000 if self.is_remote else 1  # S3 takes 1,000 a request
        gone: list[Found] = []
        while files:
            some: list[Found] = []
            while num_bytes > max_bytes and files and len(some) < at_once:
                some.append(files.pop())  # oldest first: if killed here, the newest stay
                num_bytes -= some[-1].size
            if not some:
                break
            try:
                with _raising_os_errors(), contextlib.suppress(FileNotFoundError):  # another process prunes, too
                    self._fs.rm([file.path for file in some])
                gone += some
            except OSError as error:
                self._warn(f"{some[0].path} cannot be deleted", error)
                if not self.is_remote:  # where others of the same request may be gone
                    num_bytes += some[0].size
        if gone and not self.is_remote:
            self._tidy()
        return gone

    def _tidy(self) -> None:
        """Remove what killed processes left half written, and the folders of problems that have no files any more."""
        long_ago = time.time() - SECONDS_UNFINISHED
        for folder in os.scandir(self._root):
            if _PROBLEM.fullmatch(folder.name):
                with contextlib.suppress(OSError):  # it has files, or another process is here, too
                    for entry in os.scandir(folder.path):
                        if re.fullmatch(r"\.[0-9a-f]{16}", entry.name) and entry.stat().st_mtime < long_ago:
                            os.unlink(entry.path)
                    os.rmdir(folder.path)

    def _read(self, file: Found) -> list[Rollout]:
        """A file's rollouts; none where it cannot be used, which is said once for each reason."""
        rollouts: list[Rollout] = []
        try:
            rollouts = self.rollouts(file)
        except FileNotFoundError:  # pruned meanwhile
            return []
        except (OSError, ValueError) as error:
            self._warn(f"{file.path} is left out, as are others for this reason", error)
            if isinstance(error, OSError):  # it may be read another time
                return []
            self.stats.files_refused += 1
        self._seen[file.problem_id].add(hash(file.path))
        self.stats.rollouts_read += len(rollouts)
        return rollouts

    def _warn(self, what: str, error: Exception) -> None:
        """Say once for each reason what cannot be used."""
        if str(error) not in self._said and len(self._said) < MAX_SAID:
            self._said.add(str(error))
            logger.warning("history: %s: %s", what, error)

    def _put(self, path: str, data: bytes) -> None:
        """Write a file, which is there as a whole or not at all."""
        folder = path.rpartition("/")[0]
        with _raising_os_errors():
            if not self.is_remote:
                os.makedirs(folder, exist_ok=True)
                unfinished = f"{folder}/.{secrets.token_hex(8)}"
                try:
                    with open(unfinished, "wb") as file:
                        file.write(data)
                    os.replace(unfinished, path)
                except OSError:
                    with contextlib.suppress(OSError):
                        os.unlink(unfinished)
                    raise
                return
            try:
                self._fs.pipe_file(path, data)
            except FileNotFoundError:
                if "s3" in self._fs.protocol:  # s3fs would make a bucket, perhaps of a misspelt name
                    raise
                self._fs.makedirs(folder, exist_ok=True)
                self._fs.pipe_file(path, data)


def open_folder(url: str) -> tuple[Any, str]:
    """fsspec's file system for a path or a URL, which has "://", and the path on it. Touches no file.

    Raises:
        ValueError: fsspec knows no such file system, or cannot use it.
    """
    import fsspec

    if "://" not in url:  # fsspec would take "::" in a path for its own syntax
        return fsspec.filesystem("file"), os.path.abspath(os.path.expanduser(url))
    try:
        options = {"use_listings_cache": False, **(S3_OPTIONS if url.startswith(("s3://", "s3a://")) else {})}
        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, TypeError, ValueError) as error:
        raise ValueError(f"history_dir {url!r} cannot be used: {error}") from error
    return fs, path.rstrip("/")


@contextlib.contextmanager
def _raising_os_errors() -> Iterator[None]:
    """Raise OSError for whatever a file system's own code raises: each has other exceptions."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
