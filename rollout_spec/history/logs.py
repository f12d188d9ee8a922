"""Logs of rollouts that others have written: JSONL of token ids, TRL's `log_completions`, verl's `rollout_data_dir`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.checks import first_line, shown
from rollout_spec.history.problems import problem_of_prompt, root_of_prompt
from rollout_spec.history.store import CONTEXT_TOKENS, FIRST_TIME, Rollout
from rollout_spec.types import Int32Array

COLUMNS = (
    ("prompt_token_ids", "token_ids"),  # vLLM's names
    ("prompt_ids", "completion_ids"),  # TRL's
    ("prompt_tokens", "completion_tokens"),
    ("prompt", "completion"),  # TRL's log_completions: text, or messages
    ("input", "output"),  # verl's rollout_data_dir: text
)
"""Names of prompt and completion. The first pair that a line has counts, so token ids before text."""
REPLACEMENT = "\ufffd"
"""What tokenizers decode bytes to that are no UTF-8."""
STEP_COLUMNS = ("version", "policy_version", "step", "epoch")
KNOWN_COLUMNS = {"problem_id", *STEP_COLUMNS, *(name for names in COLUMNS for name in names)}


def read(
    path: Path, tokenizer: Any, on_bad: Callable[[int, str], object], *, step: int | None = None
) -> Iterator[tuple[Rollout, Int32Array]]:
    """The rollouts of a log with their whole prompts, int32, in its order, a line or row at a time.

    Prompts that are messages are rendered by the tokenizer's chat template, and text is tokenized as it is. Where that
    gives other tokens than the engine's, a rollout serves other problems only.

    Args:
        path: Parquet or JSONL; JSONL may be a pipe.
        tokenizer: Of transformers. None: only token ids can be read, and are not checked.
        on_bad: Called with the number, from 1, of each line that cannot be used, and the reason. It is left out.
        step: Of all rollouts. None: each line's own, otherwise 0.

    Raises:
        OSError: the file cannot be read.
    """
    vocab_size = 2**31 if tokenizer is None else len(tokenizer)
    for number, row in _rows(path, on_bad):
        try:
            prompt, tokens = _tokens(row, tokenizer)
            for what, ids in (("prompt", prompt), ("completion", tokens)):
                if not ids.size:
                    raise ValueError(f"the {what} is empty")
                if not 0 <= ids.min() <= ids.max() < vocab_size:
                    raise ValueError(f"the {what} has tokens {ids.min()} to {ids.max()}, and there are {vocab_size}")
            given, order = row.get("problem_id"), _step(row) if step is None else step
            if given is not None and not (type(given) is int and 0 <= given < 2**64):
                raise ValueError(f"problem_id must be an integer of 64 bits, got {shown(given)}")
            problem_id, root = (problem_of_prompt(prompt), root_of_prompt(prompt)) if given is None else (given, None)
            context, order = prompt[-CONTEXT_TOKENS:].copy(), min(order, FIRST_TIME - 1)
            yield Rollout(problem_id, context, tokens, root=root, order=order), prompt
        except ValueError as error:
            on_bad(number, first_line(error))


def _rows(path: Path, on_bad: Callable[[int, str], object]) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        if file.peek(4)[:4] == b"PAR1":  # which, unlike `seek`, a pipe has
            if not file.seekable():
                raise OSError(f"{path} is a pipe, and Parquet is only read from a file")
            yield from _parquet_rows(path, on_bad)
            return
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line.decode("utf-8-sig")) if line.strip() else None
                if row is not None and not isinstance(row, dict):
                    raise ValueError(f"it must be an object, got {type(row).__name__}")
            except (ValueError, RecursionError) as error:
                on_bad(number, first_line(error))
                continue
            if row is not None:
                yield number, row


def _parquet_rows(path: Path, on_bad: Callable[[int, str], object]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The columns that count, of rows that can be read. A page that is damaged costs its row group."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    number = 0
    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        on_bad(1, f"this is no whole Parquet file: {first_line(error)}")
        return
    with file:
        columns = [name for name in file.schema_arrow.names if name in KNOWN_COLUMNS]
        for group in range(file.num_row_groups):
            end = number + file.metadata.row_group(group).num_rows
            try:
                for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=columns):
                    values = dict(zip(batch.schema.names, batch.columns, strict=True))
                    for row in range(batch.num_rows):
                        number += 1
                        try:
                            yield number, {name: column[row].as_py() for name, column in values.items()}
                        except (arrow.ArrowException, ArithmeticError, ValueError) as error:  # no text, or no date
                            on_bad(number, first_line(error))
            except (arrow.ArrowException, OSError) as error:
                on_bad(number + 1, f"rows {number + 1:,} to {end:,} are damaged: {first_line(error)}")
                number = end


def _tokens(row: dict[str, Any], tokenizer: Any) -> tuple[Int32Array, Int32Array]:
    """(prompt, completion) of a row. Raises ValueError."""
    names = next((names for names in COLUMNS if all(row.get(name) is not None for name in names)), None)
    if names is None:
        known = ", ".join(" and ".join(names) for names in COLUMNS)
        raise ValueError(f"no prompt and completion under one of these pairs of names: {known}")
    prompt, completion = (row[name] for name in names)
    if _is_messages(completion):
        completion = _text_of_answer(completion)
    if tokenizer is None and not all(map(_is_token_ids, (prompt, completion))):
        raise ValueError("text needs --tokenizer NAME_OR_PATH")
    if _is_messages(prompt):
        messages = [{k: v for k, v in message.items() if v is not None} for message in prompt]  # Parquet adds fields
        try:
            prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # whatever a template raises
            raise ValueError(f"the tokenizer's chat template cannot render it: {first_line(error)}") from error
    if isinstance(completion, str):
        completion = completion.rstrip(REPLACEMENT)  # of a rollout that ended within a character
        if REPLACEMENT in completion:
            raise ValueError("the completion's text has U+FFFD for tokens that are no text, so they are not known")
    return _encode(tokenizer, names[0], prompt), _encode(tokenizer, names[1], completion)


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _text_of_answer(messages: list[dict[str, Any]]) -> str:
    """What was sampled, of TRL's completion in messages. Raises ValueError where it is not just an answer's text."""
    if len(messages) > 1:
        raise ValueError(f"the completion has {len(messages)} messages, as with tools; one can be read")
    (message,) = messages
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        raise ValueError(f"the completion must be an assistant's text, got {shown(message)}")
    if more := sorted({name for name, value in message.items() if value} - {"role", "content"}):
        raise ValueError(f"the completion is more than text: it has {', '.join(more)}, parsed from what was sampled")
    return content


def _encode(tokenizer: Any, name: str, text: Any) -> Int32Array:
    """Token ids as an array, or text's. Raises ValueError."""
    if isinstance(text, str):
        try:
            text = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # whatever a tokenizer raises, as for half a surrogate pair
            raise ValueError(f"the tokenizer cannot encode {name}: {first_line(error)}") from error
    if not _is_token_ids(text):
        raise ValueError(f"{name} must be text or a list of token ids, got {shown(text)}")
    try:
        return np.array(text, np.int32)
    except OverflowError as error:
        raise ValueError(f"token ids have 31 bits, got {min(text)} to {max(text)}") from error


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)  # a bool is an int


def _step(row: dict[str, Any]) -> int:
    value = next((row[name] for name in STEP_COLUMNS if row.get(name) is not None), 0)
    if type(value) not in (int, float) or not 0 <= value < 2**31 or value != int(value):
        raise ValueError(f"the step must be an integer of 31 bits, got {shown(value)}")
    return int(value)


class Copies:
    """Finds the groups of a step that are copies of an earlier step's, which would pass for an earlier epoch.

    TRL's `log_completions` writes the last generation again at each logged step, so with `num_iterations=2` each
    rollout stands in two files, under two steps. Logs may also overlap, or be named twice.

    A group is what one step of one log has of a prompt. It is a copy if an earlier step has all of its texts, and the
    same holds for every other prompt that both have: more than half of those that the smaller of the two has. Less is
    no sign of a copy: short answers repeat in truth, alone or as whole groups, and there drafts gain most.

    Attributes:
        num_dropped: Rollouts that were copies, so far.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._steps: list[dict[int, Counter[int]]] = []  # of each prompt how often it has a text, by the text's hash
        self._steps_with: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # by prompt and one of its texts

    def find(self, step: Mapping[int, Sequence[Int32Array]]) -> set[int]:
        """Whose groups are copies, by problem_id. Called for the earliest step first. O(tokens).

        Args:
            step: int32 [n] of each rollout, by problem_id.
        """
        groups = {problem: Counter(hash(text.tobytes()) for text in group) for problem, group in step.items()}
        copied: set[int] = set()
        for number in {n for problem, group in groups.items() for n in self._steps_with[problem, min(group)]}:
            earlier = self._steps[number]
            common = groups.keys() & earlier.keys()
            is_most = 2 * len(common) > min(len(groups), len(earlier))
            if is_most and all(groups[problem] <= earlier[problem] for problem in common):
                copied |= common
        for problem in groups.keys() - copied:
            for text in groups[problem]:
                self._steps_with[problem, text].append(len(self._steps))
        self._steps.append({problem: groups[problem] for problem in groups.keys() - copied})
        self.num_dropped += sum(len(step[problem]) for problem in copied)
        return copied
