"""How recorded rollouts become history: their prompts' problems, their tokens, and shards that hold them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rollout_spec.checks import first_line
from rollout_spec.drafters.base import problem_of_prompt
from rollout_spec.history.contents import Contents, plan_pruning, prune
from rollout_spec.history.partitions import IMPORTS, write_rollouts
from rollout_spec.history.recordings import Bad, Content, Messages, Recorded, Recording, not_empty
from rollout_spec.history.rollout import CONTEXT_TOKENS, Rollout, Root
from rollout_spec.history.shards import Entry, Origin
from rollout_spec.history.storage import ShardStorage
from rollout_spec.history.text import encode_text, text_key
from rollout_spec.types import Int32Array

BATCH_TOKENS = 1_000_000
"""About so many tokens are a batch, and are written together."""
CHARACTERS_PER_TOKEN = 4
"""Of text, to tell how large a batch is before it is tokenized."""
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
                reason = first_line(error)
            texts.append(text)
            reasons.append(reason)
        token_ids = iter(self._encode([text for text in texts if text is not None]))
        for record, text, reason in zip(records, texts, reasons, strict=True):
            try:
                tokens = record.completion if text is None else np.array(next(token_ids), np.int32)
                if reason is not None:
                    raise ValueError(reason)
                assert isinstance(tokens, np.ndarray)
                yield self._rollout(record, not_empty(tokens, "completion"), prompts)
            except ValueError as error:
                yield Bad(record.where, first_line(error))

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
            return str(not_empty(message["content"], "completion"))
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
            raise ValueError(f"the tokenizer's chat template cannot render it: {first_line(error)}") from error


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
    storage: ShardStorage | None,
    origin: Origin,
    *,
    again: bool = False,
    on_bad: Callable[[Path, Bad], None] = lambda path, bad: None,
    on_batch: Callable[[Recording], None] = lambda recording: None,
) -> ImportReport:
    """Write recordings to a history. Each batch is written at once, so an import that was interrupted can be repeated.

    Args:
        storage: None: nothing is written, to see what cannot be used.
        origin: What the rollouts come from.
        again: Write also what was imported before, in place of what is left of it: readers take each batch once, and
            from one shard. Where it is interrupted, the same without `again` goes on.
        on_bad: Called for each line that is left out.
        on_batch: Called after each batch of a recording.

    Raises:
        OSError: history cannot be written, or a file can no longer be read.
        ValueError: with `again`, another process removes shards.
    """
    started = time.perf_counter()
    report = ImportReport()
    done: dict[int, int] = {}  # the last batch that is or will be written, by writer
    waiting: list[Entry] = []  # batches of small files, which are written together
    met: set[int] = set()
    replaced: set[int] = set()  # writers of which earlier imports may be there

    def write() -> None:
        if storage is not None and waiting:
            old = replaced & {entry.writer for entry in waiting}
            if old:
                _remove(storage, old)
                replaced.difference_update(old)
            report.num_bytes += write_rollouts(storage, waiting, origin)
            for writer, batch in done.items():
                storage.folder(IMPORTS).write(f"{writer:016x}", str(batch).encode())
            done.clear()
        report.rollouts += len(waiting)
        report.tokens += sum(entry.rollout.tokens.size for entry in waiting)
        report.problems.update(entry.rollout.problem_id for entry in waiting)
        waiting.clear()

    for recording in recordings:
        writer = recording.writer(origin)
        if again and storage is not None and writer not in met:
            replaced.add(writer)
        met.add(writer)
        last, batch = done.get(writer, -1), -1
        if storage is not None and writer not in replaced:
            last = max(last, _last_batch(storage, writer))
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
            done[writer] = batch
            if sum(entry.rollout.num_tokens for entry in waiting) >= BATCH_TOKENS:
                write()
            on_batch(recording)
        if 0 <= batch <= last:
            report.known.append(recording.path)
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


def _remove(storage: ShardStorage, writers: Collection[int]) -> None:
    """Remove what these writers have imported. From then on nothing is known of them."""
    with storage.tidying() as is_ours:
        if not is_ours:
            raise ValueError("another process removes shards; try again")
        for writer in writers:
            storage.folder(IMPORTS).write(f"{writer:016x}", b"-1")
        # More than once where engines merge meanwhile: shards that they have replaced are not there to be pruned.
        while (pruning := plan_pruning(Contents(storage), writers=writers)).rollouts:
            prune(storage, pruning)


def _last_batch(storage: ShardStorage, writer: int) -> int:
    """The last batch of a recording that a history has; -1 if it has none."""
    try:
        return int(storage.folder(IMPORTS).read(f"{writer:016x}"))
    except (FileNotFoundError, ValueError):  # nothing is known of it
        return -1
