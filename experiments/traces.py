"""Parquet files of rollouts with all that is known of their sampling, as benchmarks read and write them.

A row's columns are

- `prompt_id`, `sample_id`, `prompt_tokens`, `completion_tokens`, and where they are known `epoch`, the policy's
  version; `gen_runs`, the lengths of runs of tokens, alternately sampled and given by an environment; `seed`: token j's
  noise is `gumbel(seed, len(prompt_tokens) - 1 + j, id)`;
- together or not at all, `top_ids` and `top_logprobs`: for each token of the completion the most probable ones,
  TOP_TOKENS or more, best first; `signatures`: its 8 * SIGNATURE_WORDS bytes (see `rollout_spec.features`).
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.compute
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from rollout_spec.estimate.phases import RecordedRollout
from rollout_spec.features import SIGNATURE_WORDS, TOP_TOKENS, Features, pack
from rollout_spec.types import Int32Array


def read_traces(path: str | Path) -> list[RecordedRollout]:
    """Read such a file: by problem in the order of their first rows, then by epoch and sample.

    What was sampled after an environment's answer is a rollout of its own, as it is a request of its own to an engine.
    """
    table = parquet.read_table(path)
    table.validate(full=True)
    size, names = table.num_rows, table.column_names
    prompt_ids, sample_ids = table["prompt_id"].cast(arrow.string()).to_pylist(), table["sample_id"].to_pylist()
    epochs = table["epoch"].to_pylist() if "epoch" in names else [0] * size
    seeds = table["seed"].to_pylist() if "seed" in names else [None] * size
    runs = table["gen_runs"].to_pylist() if "gen_runs" in names else [()] * size
    prompts, completions = (_lists(table, name, arrow.int32()) for name in ("prompt_tokens", "completion_tokens"))
    features: list[Features | None] = [None] * size
    if "signatures" in names:
        ids, logprobs = _lists(table, "top_ids", arrow.int32()), _lists(table, "top_logprobs", arrow.float64())
        seen = zip(completions, table["signatures"].to_pylist(), ids, logprobs, strict=True)
        features = [_features(*row) for row in seen]
    problems: dict[str, list[int]] = {}
    for row, prompt_id in enumerate(prompt_ids):
        problems.setdefault(prompt_id, []).append(row)
    rollouts = []
    for prompt_id, rows in problems.items():
        for i in sorted(rows, key=lambda i: (epochs[i], sample_ids[i])):
            ends = [0, *np.cumsum(runs[i] or (completions[i].size,)).tolist()]
            for start, end in list(pairwise(ends))[::2]:
                prompt, seen = np.concatenate([prompts[i], completions[i][:start]]), features[i]
                tokens, seen = completions[i][start:end], None if seen is None else seen[start:end]
                rollouts.append(RecordedRollout(_number(prompt_id), prompt, tokens, epochs[i], seeds[i], seen))
    return rollouts


def _number(prompt_id: str) -> int:
    """A problem's id, 63 bits: prompts may be missing from a recording, so they are not hashed."""
    return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "little") >> 1


def _lists(table: Any, name: str, kind: Any) -> list[NDArray[Any]]:
    """A column of lists as arrays, one per row."""
    column = table[name].cast(arrow.list_(kind))
    lengths, flat = arrow.compute.list_value_length(column), arrow.compute.list_flatten(column).combine_chunks()
    return np.split(flat.to_numpy(zero_copy_only=False), np.cumsum(lengths.to_numpy())[:-1])


def _features(tokens: Int32Array, signatures: bytes, ids: Int32Array, logprobs: NDArray[np.float64]) -> Features:
    shape = tokens.size, max(ids.size // max(tokens.size, 1), TOP_TOKENS)
    return pack(
        np.frombuffer(signatures, np.uint64).reshape(tokens.size, SIGNATURE_WORDS),
        ids.reshape(shape)[:, :TOP_TOKENS],
        logprobs.reshape(shape)[:, :TOP_TOKENS],
    )
