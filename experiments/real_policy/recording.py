"""Rollouts with their noise, and with what the policy saw at each token, as Parquet files.

One row per rollout, in the columns that `experiments/traces.py` reads and these:

    step              number of weight updates before it was sampled
    seed              of its noise: token j was sampled with `gumbel(seed, len(prompt_tokens) - 1 + j, token)`
    temperature       that its logits were divided by
    reward
    top_ids           for every token of the completion, the TOP_TOKENS most probable ones, flattened, best first
    top_logprobs      their log-probabilities at that temperature
    signatures        SIGNATURE_BYTES bytes for every token of the completion: the signs of the last hidden state (after
                      the final norm, which the logits are computed from) times a fixed Gaussian matrix. The share of
                      bits that differ estimates the angle between two states (SimHash: Charikar, STOC 2002). As in
                      an engine the lowest bit of a byte comes first; in the files under results/, which are older, the
                      highest one does, which changes no comparison within a file

The last three are those of a float32 forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import torch

from examples.demo.policy import pad
from rollout_spec.features import SIGNATURE_WORDS
from rollout_spec.verify.reference import pack_signatures

TOP_TOKENS = 4
SIGNATURE_BYTES = 8 * SIGNATURE_WORDS
ROLLOUTS_PER_FORWARD = 8


class Features(NamedTuple):
    """What the policy saw at each of a completion's T tokens."""

    top_ids: np.ndarray
    """int32 [T, TOP_TOKENS]"""
    top_logprobs: np.ndarray
    """float16 [T, TOP_TOKENS]"""
    signatures: np.ndarray
    """uint8 [T, SIGNATURE_BYTES]"""
    logprobs: np.ndarray
    """float32 [T]: of the tokens themselves."""


@torch.no_grad()
def compute_features(
    model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float
) -> list[Features]:
    """Forward passes over rollouts, in the model's dtype.

    Args:
        model: A Llama of transformers. Left in the mode (training or not) that it was in.
    """
    was_training = model.training
    model.eval()
    found: list[Features] = []
    rollouts = list(zip(prompts, completions, strict=True))
    for start in range(0, len(rollouts), ROLLOUTS_PER_FORWARD):
        chunk = rollouts[start : start + ROLLOUTS_PER_FORWARD]
        input_ids, _ = pad([([*prompt, *completion], len(prompt)) for prompt, completion in chunk], 0)
        states = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        for row, (prompt, completion) in enumerate(chunk):
            hidden = states[row, len(prompt) - 1 : len(prompt) - 1 + len(completion)]
            logprobs = (model.lm_head(hidden).float() / temperature).log_softmax(-1)
            top = logprobs.topk(TOP_TOKENS)
            chosen = logprobs.gather(1, torch.tensor(completion, dtype=torch.int64)[:, None])[:, 0]
            found.append(
                Features(
                    top.indices.numpy().astype(np.int32), top.values.numpy().astype(np.float16),
                    pack_signatures(hidden).numpy().view(np.uint8), chosen.numpy(),
                )
            )  # fmt: skip
    model.train(was_training)
    return found


def write_rows(rows: Sequence[dict[str, Any]], features: Sequence[Features], path: Path) -> None:
    """Write a Parquet file of rollouts; it is complete or absent.

    Args:
        rows: All columns but those of `features`.
    """
    seen = [
        {"top_ids": f.top_ids.ravel(), "top_logprobs": f.top_logprobs.ravel(), "signatures": f.signatures.tobytes()}
        for f in features
    ]
    schema = arrow.schema(
        {
            "prompt_id": arrow.string(), "sample_id": arrow.int32(), "epoch": arrow.int32(), "step": arrow.int32(),
            "seed": arrow.int64(), "temperature": arrow.float32(), "reward": arrow.float32(),
            "prompt_tokens": arrow.list_(arrow.int32()), "completion_tokens": arrow.list_(arrow.int32()),
            "top_ids": arrow.list_(arrow.int32()), "top_logprobs": arrow.list_(arrow.float16()),
            "signatures": arrow.binary(),
        }
    )  # fmt: skip
    write_table(arrow.Table.from_pylist([row | f for row, f in zip(rows, seen, strict=True)], schema), path)


def write_table(table: Any, path: Path) -> None:
    """Write a Parquet file; it is complete or absent."""
    unfinished = path.with_suffix(".tmp")
    parquet.write_table(table, unfinished, compression="zstd", compression_level=19)
    unfinished.replace(path)
