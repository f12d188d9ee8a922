"""Rollouts that others have recorded: what their files say, and how it becomes history.

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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet

from rollout_spec.drafters.base import problem_of_prompt
from rollout_spec.features import FEATURE_WORDS, Features
from rollout_spec.history.rollout import CONTEXT_TOKENS, Rollout, Root
from rollout_spec.history.shards import Entry, Origin, ShardError, read_bytes, read_info, write_shard
from rollout_spec.history.storage import Storage
from rollout_spec.history.text import encode_text, text_key
from rollout_spec.replay.traces import REQUIRED_COLUMNS, read_traces
from rollout_spec.types import Int32Array

BATCH_TOKENS = 1_000_000
"""About so many tokens are a batch, and go into one shard."""
MAX_LINE_BYTES = 1 << 28
"""Longer lines are refused, so that a file without line ends does not fill the memory."""
CHARACTERS_PER_TOKEN = 4
"""Of text, to tell how large a batch is before it is tokenized."""
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
        with path.open("rb") as file:
            magic = file.read(4)
        self._is_parquet = magic == b"PAR1"
        if magic[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise ValueError(f"{path}: this is UTF-16; JSONL is UTF-8")
        columns = _columns(path) if self._is_parquet else []
        if format == "auto":
            has_traces = all(name in columns for name in REQUIRED_COLUMNS)
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
                    yield Bad(number, f"the file is damaged from here on: {_first_line(error)}")
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
            return Bad(number, _first_line(error))

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
                            yield Bad(number, _first_line(error))
                    self.position = size * number // file.metadata.num_rows
        except (arrow.ArrowException, OSError) as error:
            yield Bad(number + 1, f"the file is damaged from here on: {_first_line(error)}")

    def _traces(self) -> Iterator[Recorded | Bad]:
        number = 0
        try:
            problems = read_traces(self.path)
        except (ValueError, OSError) as error:
            yield Bad(1, _first_line(error).removeprefix(f"{self.path}: "))
            return
        for problem in problems:
            for rollout in problem.rollouts:
                number += 1
                try:
                    version = _version(rollout.epoch)
                    prompt, tokens = _not_empty(rollout.prompt, "prompt"), _not_empty(rollout.tokens, "completion")
                    yield Recorded(number, prompt, tokens, version, features=rollout.features)
                except ValueError as error:
                    yield Bad(number, f"{_first_line(error)} (prompt {problem.prompt_id!r})")


def _columns(path: Path) -> list[str]:
    try:
        return list(parquet.read_schema(path).names)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: this is no whole Parquet file: {_first_line(error)}") from error


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
        return _not_empty(value, what)
    if value and all(isinstance(message, dict) for message in value):
        return value
    return _not_empty(_tokens(value, what), what)


def _not_empty(content: Any, what: str) -> Any:
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
    _not_empty(tokens, "completion")
    if context.size > CONTEXT_TOKENS:
        raise ValueError(f"context must be at most {CONTEXT_TOKENS} tokens, got {context.size}")
    if not isinstance(by_text, bool):
        raise ValueError(f"by_text must be true or false, got {by_text!r:.40}")
    if root is not None:
        if not isinstance(root, list) or len(root) != 3 or not all(map(_is_unsigned, root)) or root[0] >= 2**31:
            raise ValueError(f"root must be a length and two numbers of 64 bits, got {root!r:.80}")
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
    return Rollout(problem_id, version, context, tokens, features, root, by_text, reward)


def _is_unsigned(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def exported_line(rollout: Rollout) -> str:
    """A rollout as a line of JSON from which importing makes the same again."""
    row = {
        "problem_id": rollout.problem_id,
        "by_text": rollout.by_text,
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


# -- from records to rollouts ----------------------------------------------------------------------------------------

_Prompts: TypeAlias = "dict[str | bytes, tuple[int, Int32Array, Root | None]]"
"""Problem id, prompt and root, by text or by the bytes of token ids."""


class Converter:
    """Makes rollouts of records.

    Args:
        tokenizer: As for `text_key`; None if there is no text.
        version: Of all rollouts, whatever the file says; None: the file's, otherwise 0.
    """

    def __init__(self, tokenizer: Any = None, version: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = 2**31 if tokenizer is None else len(tokenizer)
        self._version = version

    def check(self, recording: Recording) -> None:
        """Raise ValueError if a recording needs a tokenizer and there is none, by its first record."""
        if self._tokenizer is None and recording.format != "traces":
            first = next((record for record in recording if isinstance(record, Recorded)), None)
            if first is not None and not all(isinstance(c, np.ndarray) for c in (first.prompt, first.completion)):
                raise ValueError(f"{recording.path}:{first.where}: text needs --tokenizer NAME_OR_PATH")

    def convert(self, records: Sequence[Recorded]) -> Iterator[Rollout | Bad]:
        """The rollouts of some records, in their order. O(tokens); texts are tokenized together."""
        prompts: _Prompts = {}
        texts: list[str | None] = []
        reasons: list[str | None] = []
        for record in records:
            text = reason = None
            try:
                text = self._text_of(record)
                if isinstance(record.prompt, np.ndarray):
                    self._check_vocabulary(record.prompt)
            except ValueError as error:
                reason = _first_line(error)
            texts.append(text)
            reasons.append(reason)
        token_ids = iter(self._encode([text for text in texts if text is not None]))
        for record, text, reason in zip(records, texts, reasons, strict=True):
            try:
                tokens = record.completion if text is None else np.array(next(token_ids), np.int32)
                if reason is not None:
                    raise ValueError(reason)
                assert isinstance(tokens, np.ndarray)
                yield self._rollout(record, _not_empty(tokens, "completion"), prompts)
            except ValueError as error:
                yield Bad(record.where, _first_line(error))

    def _rollout(self, record: Recorded, tokens: Int32Array, prompts: _Prompts) -> Rollout:
        self._check_vocabulary(tokens)
        version = record.version or 0 if self._version is None else self._version
        if record.exported is not None:
            return record.exported._replace(version=version)
        if isinstance(record.prompt, np.ndarray):
            from rollout_spec.history.roots import root_of_prompt  # imports numba, which other commands do without

            key = record.prompt.tobytes()
            if key not in prompts:
                prompts[key] = problem_of_prompt(record.prompt), record.prompt, root_of_prompt(record.prompt)
            (problem_id, context, root), by_text = prompts[key], False
        else:
            prompt = self._prompt_text(record.prompt)
            if prompt not in prompts:
                token_ids = encode_text(self._tokenizer, prompt)
                prompts[prompt] = text_key(self._tokenizer, token_ids), np.array(token_ids, np.int32), None
            (problem_id, context, root), by_text = prompts[prompt], True
        context = context[-CONTEXT_TOKENS:].copy()
        return Rollout(problem_id, version, context, tokens, record.features, root, by_text, record.reward)

    def _check_vocabulary(self, tokens: Int32Array) -> None:
        if tokens.max(initial=0) >= self._vocab_size:
            raise ValueError(f"token {tokens.max()} is none of the tokenizer's {self._vocab_size}")

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return encoded

    def _prompt_text(self, prompt: str | Messages) -> str:
        return prompt if isinstance(prompt, str) else self._render(prompt, add_generation_prompt=True)

    def _text_of(self, record: Recorded) -> str | None:
        """The text of a completion; None if there are token ids. Raises ValueError."""
        is_text = not isinstance(record.prompt, np.ndarray) or not isinstance(record.completion, np.ndarray)
        if is_text and self._tokenizer is None:
            raise ValueError("text needs --tokenizer NAME_OR_PATH")
        if isinstance(record.completion, np.ndarray):
            return None
        if isinstance(record.completion, str):
            return record.completion
        text = self._text_of_messages(record.prompt, record.completion)
        text.encode()  # as in `_content`
        return text

    def _text_of_messages(self, prompt: Content, completion: Messages) -> str:
        message = {name: value for name, value in completion[0].items() if value is not None}
        if len(completion) == 1 and message.keys() == {"role", "content"} and isinstance(message["content"], str):
            return str(_not_empty(message["content"], "completion"))
        # Tool calls, thoughts and answers of tools: what the chat template makes of them.
        if not isinstance(prompt, list):
            raise ValueError("a completion of several messages, or with more than content, needs a prompt of messages")
        before, whole = self._prompt_text(prompt), self._render([*prompt, *completion])
        if not whole.startswith(before):
            raise ValueError("the tokenizer's chat template renders the prompt in another way before its completion")
        return whole.removeprefix(before)

    def _render(self, messages: Messages, **options: Any) -> str:
        # Parquet gives every message the fields of all.
        messages = [{name: value for name, value in m.items() if value is not None} for m in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
            text.encode()
            return text
        except Exception as error:  # whatever a template raises
            raise ValueError(f"the tokenizer's chat template cannot render it: {_first_line(error)}") from error


# -- into history ----------------------------------------------------------------------------------------------------


@dataclass
class ImportReport:
    """What an import did.

    Attributes:
        rollouts: That have been written.
        problems: Their ids.
        tokens: Sampled tokens of these rollouts.
        num_bytes: Of the shards.
        bad: Lines that were left out.
        known: Files of which history had everything.
        seconds: How long it took.
    """

    rollouts: int = 0
    problems: set[int] = field(default_factory=set)
    tokens: int = 0
    num_bytes: int = 0
    bad: int = 0
    known: list[Path] = field(default_factory=list)
    seconds: float = 0.0


def import_recordings(
    recordings: Iterable[Recording],
    converter: Converter,
    storage: Storage | None,
    origin: Origin,
    *,
    on_bad: Callable[[Path, Bad], None] = lambda path, bad: None,
    on_batch: Callable[[Recording], None] = lambda recording: None,
) -> ImportReport:
    """Write recordings to a history. Each batch is written at once, so an import that was interrupted can be repeated.

    Args:
        storage: None: nothing is written, to see what cannot be used.
        origin: What the rollouts come from.
        on_bad: Called for each line that is left out.
        on_batch: Called after each batch of a recording.

    Raises:
        OSError: history cannot be written, or a file can no longer be read.
    """
    started = time.perf_counter()
    report = ImportReport()
    last_batches = {} if storage is None else _last_batches(storage)
    waiting: list[Entry] = []  # batches of small files, which go into a shard together

    def write() -> None:
        if storage is not None and waiting:
            report.num_bytes += write_shard(storage, waiting, origin)[1]
        report.rollouts += len(waiting)
        report.tokens += sum(entry.rollout.tokens.size for entry in waiting)
        report.problems.update(entry.rollout.problem_id for entry in waiting)
        waiting.clear()

    for recording in recordings:
        writer = recording.writer(origin)
        last, batch = last_batches.get(writer, -1), -1
        for batch, records in enumerate(_batches(recording)):
            if batch <= last:
                continue
            good = [record for record in records if isinstance(record, Recorded)]
            converted = [record for record in records if isinstance(record, Bad)]
            for rollout in converter.convert(good):
                if isinstance(rollout, Bad):
                    converted.append(rollout)
                else:
                    waiting.append(Entry(writer, batch, rollout))
            for bad in sorted(converted):
                report.bad += 1
                on_bad(recording.path, bad)
            if sum(entry.rollout.num_tokens for entry in waiting) >= BATCH_TOKENS:
                write()
            on_batch(recording)
        if 0 <= batch <= last:
            report.known.append(recording.path)
        last_batches[writer] = max(batch, last)
    write()
    report.seconds = time.perf_counter() - started
    return report


def _batches(recording: Recording) -> Iterator[list[Recorded | Bad]]:
    """A recording's records in batches, always the same ones."""
    records: list[Recorded | Bad] = []
    size = 0
    for record in recording:
        records.append(record)
        size += _num_tokens(record.completion) if isinstance(record, Recorded) else 1
        if size >= BATCH_TOKENS:
            yield records
            records, size = [], 0
    if records:
        yield records


def _num_tokens(content: Content) -> int:
    """About how many tokens a completion has."""
    if isinstance(content, np.ndarray):
        return content.size
    text = content if isinstance(content, str) else json.dumps(content, default=str)
    return len(text) // CHARACTERS_PER_TOKEN + 1


def _last_batches(storage: Storage) -> dict[int, int]:
    """The last batch that a history has of each writer."""
    found: dict[int, int] = {}
    for name in storage.sizes():
        try:
            info = read_info(read_bytes(storage, name))
        except (ShardError, FileNotFoundError):  # nothing is had of it
            continue
        for writer, (_, last) in info.batches.items():
            found[writer] = max(last, found.get(writer, -1))
    return found


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
