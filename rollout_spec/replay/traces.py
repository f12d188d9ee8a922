"""Recorded rollouts: several sampled completions of each prompt, as token ids in a Parquet file.

One row per rollout: `prompt_id` string or integer, `sample_id` integer, `epoch` integer (0 when absent),
`prompt_tokens` and `completion_tokens` lists of integers, and optionally

- `gen_runs` list of integers: lengths of runs of the completion, alternately generated and given by an environment,
  starting with a generated one. Empty or absent: all of it was generated.
- `seed` integer: of the noise that token j was sampled with, `gumbel(seed, len(prompt_tokens) - 1 + j, token)`;
- `top_ids` and `top_logprobs` lists of numbers, and `signatures` binary, all three together: for every completion token
  the most probable tokens when it was sampled, TOP_TOKENS or more of them, best first, their log-probabilities, and the
  16 bytes of the signature (see `rollout_spec.features`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.checks import first_line
from rollout_spec.features.format import SIGNATURE_WORDS, TOP_TOKENS, Features, pack, take
from rollout_spec.imports import install
from rollout_spec.types import Int32Array

REQUIRED_COLUMNS = ("prompt_id", "sample_id", "prompt_tokens", "completion_tokens")
FEATURE_COLUMNS = ("top_ids", "top_logprobs", "signatures")


class Rollout(NamedTuple):
    """One recorded completion."""

    sample_id: int
    epoch: int
    prompt: Int32Array
    """int32: the prompt. Recordings of several models may differ in it (chat templates)."""
    tokens: Int32Array
    """int32 [n]: the completion."""
    runs: tuple[int, ...]
    """Lengths of its runs, alternately generated and given, starting with a generated one; they sum to n."""
    seed: int | None = None
    """Of its noise, where that is known."""
    features: Features | None = None
    """What the target saw at each of `tokens`, where that is recorded; not known of given tokens."""


class Problem(NamedTuple):
    """A prompt's recorded completions, in the order of (epoch, sample_id)."""

    prompt_id: str
    rollouts: list[Rollout]

    @property
    def problem_id(self) -> int:
        """A stable 63-bit number for `prompt_id`: prompts may be missing from a recording, so they are not hashed."""
        digest = hashlib.blake2b(self.prompt_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def read_traces(path: str | Path, *, max_prompts: int | None = None) -> list[Problem]:
    """Read a Parquet file of rollouts, prompts in the order of their first appearance.

    Raises:
        ValueError: the file is not Parquet or holds no rollouts, a column is missing or of another type, a token is
            missing, negative or beyond 31 bits, or a rollout's runs do not sum to its length.
        OSError: the file cannot be read.
        ImportError: pyarrow is missing.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f"recordings are read with pyarrow ({error}): {install('replay')}") from error
    if Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir():
        raise ValueError(f"{path}: not a regular file")
    with Path(path).open("rb"):  # pyarrow's errors are of other types, and some do not name the file
        pass
    try:
        table = parquet.ParquetFile(path).read()
        names = table.column_names
        table.validate(full=True)  # of damaged files: text that is none, lists that end elsewhere
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a Parquet file, or damaged: {first_line(error)}") from error
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{path}: several columns are named {', '.join(repeated)}")
    missing = [name for name in REQUIRED_COLUMNS if name not in table.column_names]
    if missing:
        raise ValueError(f"{path}: no column {', '.join(missing)}; found {', '.join(table.column_names)}")
    if not table.num_rows:
        raise ValueError(f"{path}: no rollouts")
    prompts, completions = _token_lists(table, "prompt_tokens", path), _token_lists(table, "completion_tokens", path)
    kind = table["prompt_id"].type
    types = arrow.types
    if not any(
        is_type(kind) for is_type in (types.is_string, types.is_large_string, types.is_integer, types.is_dictionary)
    ):
        raise ValueError(f"{path}: column prompt_id must hold strings or integers, got {kind}")
    _refuse_nulls(table["prompt_id"], "prompt_id", path)
    sample_ids = _integers(table, "sample_id", path)
    epochs = _integers(table, "epoch", path) if "epoch" in table.column_names else [0] * table.num_rows
    seeds = _integers(table, "seed", path) if "seed" in table.column_names else [None] * table.num_rows
    if any(seed is not None and not -(2**63) <= seed < 2**63 for seed in seeds):
        raise ValueError(f"{path}: column seed must hold integers of 64 bits with a sign")
    if "gen_runs" in table.column_names:
        _check_lists(table["gen_runs"].type, "gen_runs", path, of_integers=True)
    all_runs = table["gen_runs"].to_pylist() if "gen_runs" in table.column_names else [None] * table.num_rows
    features = None
    if any(name in table.column_names for name in FEATURE_COLUMNS):
        features = _read_features(table, completions, path)
    problems: dict[str, Problem] = {}
    for row, prompt_id in enumerate(map(str, table["prompt_id"].to_pylist())):
        if prompt_id not in problems:
            if max_prompts is not None and len(problems) == max_prompts:
                continue
            problems[prompt_id] = Problem(prompt_id, [])
        tokens = completions[row]
        runs = tuple(all_runs[row] or (tokens.size,))
        if not all(isinstance(run, int) and run >= 0 for run in runs) or sum(runs) != tokens.size:
            raise ValueError(
                f"{path}: gen_runs of prompt {prompt_id!r}, sample {sample_ids[row]} are not lengths that sum to its "
                f"{tokens.size} tokens: {list(runs)}"
            )
        known = None
        if features is not None:  # the engine has none of the tokens that an environment gives
            is_given = np.repeat(np.arange(len(runs)) % 2, runs)
            known = take(features[row], np.where(is_given, -1, np.arange(tokens.size)))
        problems[prompt_id].rollouts.append(
            Rollout(sample_ids[row], epochs[row], prompts[row], tokens, runs, seeds[row], known)
        )
    for problem in problems.values():
        problem.rollouts.sort(key=lambda rollout: (rollout.epoch, rollout.sample_id))
    return list(problems.values())


def _integers(table: Any, name: str, path: str | Path) -> list[int]:
    """A column of integers without gaps."""
    import pyarrow as arrow

    column = table[name]
    if not arrow.types.is_integer(column.type):
        raise ValueError(f"{path}: column {name} must hold integers, got {column.type}")
    _refuse_nulls(column, name, path)
    values: list[int] = column.to_pylist()
    return values


def _token_lists(table: Any, name: str, path: str | Path) -> list[Int32Array]:
    """A column of token lists as int32 arrays, one per row."""
    lists = _lists(table, name, path, of_integers=True)
    values = np.concatenate(lists)
    if values.size and not 0 <= values.min() <= values.max() < 2**31:
        raise ValueError(f"{path}: column {name} must hold tokens in [0, 2**31), got {values.min()} to {values.max()}")
    return [tokens.astype(np.int32) for tokens in lists]


def _lists(table: Any, name: str, path: str | Path, *, of_integers: bool) -> list[NDArray]:
    """A column of lists of integers or floats as arrays, one per row."""
    import pyarrow.compute as compute

    column = table[name]
    _check_lists(column.type, name, path, of_integers=of_integers)
    _refuse_nulls(column, name, path)
    ends = np.cumsum(compute.list_value_length(column).to_numpy())
    flat = compute.list_flatten(column).combine_chunks()
    if flat.null_count:
        first = int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False)))
        row = int(np.searchsorted(ends, first, "right"))
        raise ValueError(f"{path}: column {name} holds a null among the values of row {row}, counted from 0")
    return np.split(flat.to_numpy(zero_copy_only=False), ends[:-1])


def _check_lists(kind: Any, name: str, path: str | Path, *, of_integers: bool) -> None:
    import pyarrow as arrow

    is_list = arrow.types.is_list(kind) or arrow.types.is_large_list(kind)
    is_wanted = arrow.types.is_integer if of_integers else arrow.types.is_floating
    if not is_list or not is_wanted(kind.value_type):
        wanted = "integers" if of_integers else "floating-point numbers"
        raise ValueError(f"{path}: column {name} must hold lists of {wanted}, got {kind}")


def _read_features(table: Any, completions: Sequence[Int32Array], path: str | Path) -> list[Features]:
    """The features of every row's completion."""
    import pyarrow as arrow

    missing = [name for name in FEATURE_COLUMNS if name not in table.column_names]
    if missing:
        raise ValueError(f"{path}: {', '.join(FEATURE_COLUMNS)} belong together, and {', '.join(missing)} is missing")
    kind = table["signatures"].type
    if not arrow.types.is_binary(kind) and not arrow.types.is_large_binary(kind):
        raise ValueError(f"{path}: column signatures must hold bytes, got {kind}")
    _refuse_nulls(table["signatures"], "signatures", path)
    columns = (
        _token_lists(table, "top_ids", path),
        _lists(table, "top_logprobs", path, of_integers=False),
        table["signatures"].to_pylist(),
    )
    if any(np.isnan(logprobs).any() for logprobs in columns[1]):
        raise ValueError(f"{path}: column top_logprobs holds NaN")
    found = []
    for row, (tokens, ids, logprobs, signatures) in enumerate(zip(completions, *columns, strict=True)):
        size = tokens.size
        width = ids.size // size if size else TOP_TOKENS
        is_whole = ids.size == logprobs.size == size * width and width >= TOP_TOKENS
        if not is_whole or len(signatures) != 8 * SIGNATURE_WORDS * size:
            raise ValueError(f"{path}: features of row {row}, counted from 0, do not fit its {size} tokens")
        found.append(
            pack(
                np.frombuffer(signatures, np.uint64).reshape(size, SIGNATURE_WORDS),
                ids.reshape(size, width)[:, :TOP_TOKENS],
                logprobs.reshape(size, width)[:, :TOP_TOKENS],
            )
        )
    return found


def _refuse_nulls(column: Any, name: str, path: str | Path) -> None:
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy()))
        raise ValueError(f"{path}: column {name} is null in row {row}, counted from 0")


def num_tokens(problems: Sequence[Problem]) -> int:
    """Recorded completion tokens."""
    return sum(rollout.tokens.size for problem in problems for rollout in problem.rollouts)
