"""Parquet files of rollouts with all that is known of their sampling, as benchmarks write them.

A row's columns are

- `prompt_id`, `sample_id`, `prompt_tokens`, `completion_tokens`, and where they are known `epoch`, the policy's
  version; `gen_runs`, see `Rollout.runs`; `seed`: token j's noise is `gumbel(seed, len(prompt_tokens) - 1 + j, id)`;
- together or not at all, `top_ids` and `top_logprobs`: for each token of the completion the most probable ones,
  TOP_TOKENS or more, best first; `signatures`: its 8 * SIGNATURE_WORDS bytes (see `rollout_spec.features`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.compute
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from rollout_spec.checks import first_line
from rollout_spec.features.format import SIGNATURE_WORDS, TOP_TOKENS, Features, pack, take
from rollout_spec.replay import Rollout
from rollout_spec.types import Int32Array


def has_trace_columns(path: str | Path) -> bool:
    """Whether a file is Parquet with the columns above. Raises OSError where it cannot be read."""
    with Path(path).open("rb") as file:
        if file.read(4) != b"PAR1":
            return False
    try:
        return {"prompt_id", "sample_id"} <= set(parquet.read_schema(path).names)
    except (arrow.ArrowException, UnicodeDecodeError):
        return False


def read_traces(path: str | Path) -> list[Rollout]:
    """Read such a file: by problem in the order of their first rows, then by epoch and sample.

    Raises:
        ValueError: a column is missing, has gaps or another type, or does not fit the completions.
        OSError: the file cannot be read.
    """
    Path(path).open("rb").close()  # whose errors name the file
    try:
        return _rollouts(parquet.ParquetFile(path).read())
    except (arrow.ArrowException, KeyError, OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: {first_line(error)}") from error


def _rollouts(table: Any) -> list[Rollout]:
    table.validate(full=True)  # of damaged files: text that is none, lists that end elsewhere
    size, names = table.num_rows, table.column_names
    if not size:
        raise ValueError("no rollouts")
    prompt_ids, sample_ids = _values(table, "prompt_id", arrow.string()), _values(table, "sample_id", arrow.int64())
    epochs = _values(table, "epoch", arrow.int64()) if "epoch" in names else [0] * size
    seeds = _values(table, "seed", arrow.int64()) if "seed" in names else [None] * size
    prompts, completions = (_tokens(table, name) for name in ("prompt_tokens", "completion_tokens"))
    runs = [tuple(row or ()) for row in table["gen_runs"].to_pylist()] if "gen_runs" in names else [()] * size
    for of_row, tokens in zip(runs, completions, strict=True):
        if of_row and (None in of_row or min(of_row) < 0 or sum(of_row) != tokens.size):
            raise ValueError(f"gen_runs must be lengths that sum to the {tokens.size} tokens of a row, got {of_row}")
    features: list[Features | None] = [None] * size
    if "signatures" in names:
        ids, logprobs = _tokens(table, "top_ids"), _lists(table, "top_logprobs", arrow.float64())
        seen = zip(completions, runs, _values(table, "signatures", arrow.binary()), ids, logprobs, strict=True)
        features = [_features(*row) for row in seen]
    problems: dict[str, list[int]] = {}
    for row, prompt_id in enumerate(prompt_ids):
        problems.setdefault(prompt_id, []).append(row)
    return [
        Rollout(_number(prompt_id), prompts[i], completions[i], epochs[i], runs[i], seeds[i], features[i])
        for prompt_id, rows in problems.items()
        for i in sorted(rows, key=lambda i: (epochs[i], sample_ids[i]))
    ]


def _number(prompt_id: str) -> int:
    """A problem's id, 63 bits: prompts may be missing from a recording, so they are not hashed."""
    return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "little") >> 1


def _values(table: Any, name: str, kind: Any) -> list[Any]:
    values: list[Any] = table[name].cast(kind).to_pylist()
    if None in values:
        raise ValueError(f"column {name} is null in row {values.index(None)}, counted from 0")
    return values


def _lists(table: Any, name: str, kind: Any) -> list[NDArray[Any]]:
    """A column of lists as arrays, one per row."""
    column = table[name].cast(arrow.list_(kind))
    lengths, flat = arrow.compute.list_value_length(column), arrow.compute.list_flatten(column).combine_chunks()
    if column.null_count or flat.null_count:
        raise ValueError(f"column {name} holds a null")
    return np.split(flat.to_numpy(zero_copy_only=False), np.cumsum(lengths.to_numpy())[:-1])


def _tokens(table: Any, name: str) -> list[Int32Array]:
    lists = _lists(table, name, arrow.int32())
    if any(tokens.min(initial=0) < 0 for tokens in lists):
        raise ValueError(f"column {name} must hold token ids from 0 on")
    return lists


def _features(
    tokens: Int32Array, runs: tuple[int, ...], signatures: bytes, ids: Int32Array, logprobs: NDArray[np.float64]
) -> Features:
    shape = tokens.size, max(ids.size // max(tokens.size, 1), TOP_TOKENS)
    if np.isnan(logprobs).any():
        raise ValueError("column top_logprobs holds NaN")
    packed = pack(
        np.frombuffer(signatures, np.uint64).reshape(tokens.size, SIGNATURE_WORDS),
        ids.reshape(shape)[:, :TOP_TOKENS],
        logprobs.reshape(shape)[:, :TOP_TOKENS],
    )
    is_given = np.repeat(np.arange(max(len(runs), 1)) % 2, runs or tokens.size)
    return take(packed, np.where(is_given, -1, np.arange(tokens.size)))  # an engine has none of given tokens
