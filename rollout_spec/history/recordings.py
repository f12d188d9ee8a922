"""Files of rollouts that others have recorded.

Read are Parquet files of TRL's `log_completions`, the JSONL that verl writes to `rollout_data_dir`, any JSONL of token
ids or text under the usual names, what `rollout-spec history export` writes, and recordings of `rollout-spec replay`. A
line that cannot be used is left out, with its reason; nothing else depends on it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet

from rollout_spec.checks import first_line
from rollout_spec.features.format import FEATURE_WORDS, Features
from rollout_spec.files import naming
from rollout_spec.history.rollout import CONTEXT_TOKENS, Rollout, Root
from rollout_spec.history.shards import Origin
from rollout_spec.types import Int32Array

MAX_LINE_BYTES = 1 << 28
"""Longer lines are refused, so that a file without line ends does not fill the memory."""
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
"""By the first bytes of a file."""


class _Names(NamedTuple):
    """Names under which a format has its values; the first that is there counts."""

    prompt: Sequence[str]
    completion: Sequence[str]
    reward: Sequence[str] = ("reward", "score")
    version: Sequence[str] = ("version", "policy_version", "step")


_NAMES = {
    "trl": _Names(("prompt",), ("completion",)),
    "verl": _Names(("input",), ("output",)),
    # Token ids first: they are what was sampled. The names of text are TRL's, verl's, OpenRLHF's and SkyRL's.
    "jsonl": _Names(
        ("prompt_token_ids", "prompt_ids", "prompt_tokens", "prompt", "input", "input_prompt"),
        (
            *("token_ids", "completion_ids", "response_ids", "output_token_ids", "output_ids", "completion_tokens"),
            *("completion", "output", "response", "output_response"),
        ),
    ),
}
FORMATS = ("auto", *_NAMES, "traces")

Messages: TypeAlias = "list[dict[str, Any]]"
Content: TypeAlias = "str | Messages | Int32Array"


class Recorded(NamedTuple):
    """A rollout as a file has it."""

    where: int
    """Its line or row, from 1."""
    prompt: Content
    completion: Content
    version: int | None = None
    reward: float | None = None
    features: Features | None = None
    exported: Rollout | None = None
    """The rollout itself, if this is what `history export` wrote."""


class Bad(NamedTuple):
    """A line that cannot be used."""

    where: int
    reason: str


class Recording:
    """A file of recorded rollouts. Iterating reads it from the beginning.

    Args:
        format: One of FORMATS.

    Attributes:
        path: The file.
        format: One of FORMATS, not "auto".
        position: How many of its bytes have been read, for a progress bar.

    Raises:
        ValueError: the file is not of that format.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, format: str = "auto") -> None:
        self.path = path
        self.position = 0
        with naming(path), path.open("rb") as file:
            magic = file.read(4)
        self._is_parquet = magic == b"PAR1"
        if magic[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise ValueError(f"{path}: this is UTF-16; JSONL is UTF-8")
        columns = _columns(path) if self._is_parquet else []
        if format == "auto":
            has_traces = {"prompt_id", "sample_id", "prompt_tokens", "completion_tokens"} <= set(columns)
            format = "jsonl" if not self._is_parquet else "traces" if has_traces else "trl"
        self.format = format
        if self._is_parquet != (format in ("trl", "traces")):
            kind = "a Parquet file" if self._is_parquet else "no Parquet file"
            raise ValueError(f"{path}: this is {kind}, which format {format!r} does not fit")
        if format == "trl" and not {"prompt", "completion"} <= set(columns):
            raise ValueError(f"{path}: no columns prompt and completion; found {', '.join(columns)}")

    @property
    def num_bytes(self) -> int:
        """The file's size."""
        return self.path.stat().st_size

    def writer(self, origin: Origin) -> int:
        """64 bits by which history knows this file again: of its bytes and the tokenizer. Its name does not matter."""
        digest = hashlib.blake2b(str(origin.tokenizer).encode(), digest_size=8)
        with self.path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return int.from_bytes(digest.digest(), "little")

    def __iter__(self) -> Iterator[Recorded | Bad]:
        self.position = 0
        if self.format == "traces":
            return self._traces()
        return self._rows() if self._is_parquet else self._lines()

    def _lines(self) -> Iterator[Recorded | Bad]:
        with self.path.open("rb") as raw:
            magic = raw.read(4)
            raw.seek(0)
            compression = next((name for first, name in _COMPRESSIONS.items() if magic.startswith(first)), None)
            file: Any = io.BufferedReader(arrow.input_stream(raw, compression)) if compression else raw
            number = 0
            while True:
                number += 1
                try:
                    line = file.readline(MAX_LINE_BYTES + 1)
                    is_too_long = len(line) > MAX_LINE_BYTES
                    while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE_BYTES + 1)
                except OSError as error:
                    yield Bad(number, f"the file is damaged from here on: {first_line(error)}")
                    return
                if not line and not is_too_long:
                    return
                self.position = raw.tell()
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if is_too_long:
                    yield Bad(number, f"longer than {MAX_LINE_BYTES:,} bytes")
                elif line.strip():
                    yield self._line(number, line)

    def _line(self, number: int, line: bytes) -> Recorded | Bad:
        try:
            row = json.loads(line.decode())
            if not isinstance(row, dict):
                raise ValueError(f"this must be an object, got {type(row).__name__}")
            return _record(number, row, _NAMES[self.format])
        except (ValueError, RecursionError) as error:
            return Bad(number, first_line(error))

    def _rows(self) -> Iterator[Recorded | Bad]:
        """Rows of a Parquet file by TRL, whose columns are step, prompt, completion, one for each reward function, what
        `log_extra` was given, and advantage. The reward is the sum of all that may be rewards."""
        number = 0
        size = self.num_bytes
        try:
            with parquet.ParquetFile(self.path, page_checksum_verification=True) as file:
                fields = [name for name in file.schema_arrow if arrow.types.is_floating(name.type)]
                rewards = [name.name for name in fields if name.name not in ("step", "advantage")]
                for batch in file.iter_batches(batch_size=256):
                    for row in batch.to_pylist():
                        number += 1
                        if "reward" not in row and rewards:
                            row["reward"] = [row[name] for name in rewards if row[name] is not None] or None
                        try:
                            yield _record(number, row, _NAMES[self.format])
                        except ValueError as error:
                            yield Bad(number, first_line(error))
                    self.position = size * number // file.metadata.num_rows
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            yield Bad(number + 1, f"the file is damaged from here on: {first_line(error)}")

    def _traces(self) -> Iterator[Recorded | Bad]:
        from rollout_spec.history.traces import read_traces  # imports numba

        try:
            rollouts = read_traces(self.path)
        except (ValueError, OSError) as error:
            yield Bad(1, first_line(error).removeprefix(f"{self.path}: "))
            return
        for number, rollout in enumerate(rollouts, 1):
            try:
                version = _version(rollout.policy_version)
                prompt = not_empty(rollout.prompt_token_ids, "prompt")
                tokens = not_empty(rollout.token_ids, "completion")
                yield Recorded(number, prompt, tokens, version, features=rollout.features)
            except ValueError as error:
                yield Bad(number, first_line(error))


def _columns(path: Path) -> list[str]:
    try:
        return list(parquet.read_schema(path).names)
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: this is no whole Parquet file: {first_line(error)}") from error


def _record(where: int, row: dict[str, Any], names: _Names) -> Recorded:
    """A row as a record. Raises ValueError."""
    if row.keys() >= {"problem_id", "by_text", "context", "token_ids"}:
        rollout = _exported(row)
        return Recorded(where, rollout.context, rollout.tokens, rollout.version, exported=rollout)
    prompt, completion = _content(row, names.prompt, "prompt"), _content(row, names.completion, "completion")
    version = next((_version(row[name]) for name in names.version if row.get(name) is not None), None)
    reward = next((_reward(row[name]) for name in names.reward if row.get(name) is not None), None)
    return Recorded(where, prompt, completion, version, reward)


def _content(row: dict[str, Any], names: Sequence[str], what: str) -> Content:
    """The prompt or completion of a row."""
    value = next((row[name] for name in names if isinstance(row.get(name), str | list)), None)
    if value is None:
        raise ValueError(f"no {what}, which is text or a list under one of: {', '.join(names)}")
    if isinstance(value, str):
        value.encode()  # raises for half a surrogate pair, which no tokenizer takes
        return not_empty(value, what)
    if value and all(isinstance(message, dict) for message in value):
        return value
    return not_empty(_tokens(value, what), what)


def not_empty(content: Any, what: str) -> Any:
    """A prompt or completion. Raises ValueError if it is empty."""
    if not len(content) or (what == "prompt" and isinstance(content, str) and not content.strip()):
        raise ValueError(f"the {what} is empty")
    return content


def _tokens(value: Any, what: str) -> Int32Array:
    if not isinstance(value, list) or not all(type(token) is int for token in value):  # bool is an int
        raise ValueError(f"the {what} must be a list of token ids")
    if value and not 0 <= min(value) <= max(value) < 2**31:
        raise ValueError(f"the {what} must hold token ids in [0, 2**31), got {min(value)} to {max(value)}")
    return np.array(value, np.int32)


def _version(value: Any) -> int:
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not is_whole or not 0 <= value < 2**31:
        raise ValueError(f"the policy version must be an integer in [0, 2**31), got {value!r:.40}")
    return int(value)


def _reward(value: Any) -> float | None:
    """A reward, or the sum of several; None for what is no finite number in float32."""
    try:
        total = sum(map(float, value)) if isinstance(value, list) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return total if abs(total) <= float(np.finfo(np.float32).max) else None


def _exported(row: dict[str, Any]) -> Rollout:
    """A line of `exported_line` as what it was. Raises ValueError."""
    context, tokens = (_tokens(row.get(name), name) for name in ("context", "token_ids"))
    problem_id, root, features, by_text = (row.get(name) for name in ("problem_id", "root", "features", "by_text"))
    not_empty(tokens, "completion")
    if context.size > CONTEXT_TOKENS:
        raise ValueError(f"context must be at most {CONTEXT_TOKENS} tokens, got {context.size}")
    if not isinstance(by_text, bool):
        raise ValueError(f"by_text must be true or false, got {by_text!r:.40}")
    isolated = row.get("isolated", False)  # older versions do not write it
    if not isinstance(isolated, bool):
        raise ValueError(f"isolated must be true or false, got {isolated!r:.40}")
    if root is not None:
        if not isinstance(root, list) or len(root) != 2 or not all(map(_is_unsigned, root)) or root[0] >= 2**31:
            raise ValueError(f"root must be a length and a number of 64 bits, got {root!r:.80}")
        root = Root(*root)
    if problem_id is None or not _is_unsigned(problem_id):
        raise ValueError(f"problem_id must be a number of 64 bits, got {problem_id!r:.40}")
    if features is not None:
        try:
            features = np.frombuffer(base64.b64decode(features, validate=True), "<i8").astype(np.int64)
            features = features.reshape(tokens.size, FEATURE_WORDS)
        except (binascii.Error, TypeError, ValueError) as error:
            raise ValueError(f"features do not fit {tokens.size} tokens: {error}") from error
    version, reward = _version(row.get("version")), row.get("reward")
    reward = None if reward is None else _reward(reward)
    return Rollout(problem_id, version, context, tokens, features, root, by_text, reward, isolated)


def _is_unsigned(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def exported_line(rollout: Rollout) -> str:
    """A rollout as a line of JSON from which importing makes the same again."""
    row = {
        "problem_id": rollout.problem_id,
        "by_text": rollout.by_text,
        "isolated": rollout.isolated,
        "version": rollout.version,
        "context": rollout.context.tolist(),
        "token_ids": rollout.tokens.tolist(),
        "reward": rollout.reward,
        "root": rollout.root,
        "features": None
        if rollout.features is None
        else base64.b64encode(rollout.features.astype("<i8").tobytes()).decode(),
    }
    return json.dumps({name: value for name, value in row.items() if value is not None})
