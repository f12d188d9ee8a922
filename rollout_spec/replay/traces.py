"""Recorded rollouts: several sampled completions of each prompt, as token ids in a Parquet file.

One row per rollout: `prompt_id` string, `sample_id` int32, `epoch` int8 (0 when absent), `prompt_tokens` list<int32>,
`completion_tokens` list<int32>, and optionally `gen_runs` list<int32>: lengths of runs of the completion, alternately
generated and given by an environment, starting with a generated one. Empty or absent: all of it was generated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollout_spec.types import Int32Array

REQUIRED_COLUMNS = ("prompt_id", "sample_id", "prompt_tokens", "completion_tokens")


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
        ValueError: a column is missing, or a rollout's runs do not sum to its length.
        OSError: the file cannot be read.
    """
    import pyarrow.parquet as parquet

    table = parquet.read_table(path)
    missing = [name for name in REQUIRED_COLUMNS if name not in table.column_names]
    if missing:
        raise ValueError(f"{path}: no column {', '.join(missing)}; found {', '.join(table.column_names)}")
    num_rows = table.num_rows
    epochs = table["epoch"].to_pylist() if "epoch" in table.column_names else [0] * num_rows
    all_runs = table["gen_runs"].to_pylist() if "gen_runs" in table.column_names else [None] * num_rows
    prompts, completions = table["prompt_tokens"].combine_chunks(), table["completion_tokens"].combine_chunks()
    problems: dict[str, Problem] = {}
    for row, (prompt_id, sample_id) in enumerate(
        zip(table["prompt_id"].to_pylist(), table["sample_id"].to_pylist(), strict=True)
    ):
        if prompt_id not in problems:
            if max_prompts is not None and len(problems) == max_prompts:
                continue
            problems[prompt_id] = Problem(prompt_id, [])
        tokens = np.asarray(completions[row].values, np.int32)
        runs = tuple(all_runs[row] or (tokens.size,))
        if sum(runs) != tokens.size:
            raise ValueError(f"{path}: gen_runs of {prompt_id!r} sample {sample_id} do not sum to {tokens.size} tokens")
        prompt = np.asarray(prompts[row].values, np.int32)
        problems[prompt_id].rollouts.append(Rollout(sample_id, epochs[row], prompt, tokens, runs))
    for problem in problems.values():
        problem.rollouts.sort(key=lambda rollout: (rollout.epoch, rollout.sample_id))
    return list(problems.values())


def num_tokens(problems: Sequence[Problem]) -> int:
    """Recorded completion tokens."""
    return sum(rollout.tokens.size for problem in problems for rollout in problem.rollouts)
