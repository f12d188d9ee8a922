"""The verifier's kernels against the reference on made-up rows: on an engine's own device, before it serves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from rollout_spec.types import SamplingBatch, VerifyResult
from rollout_spec.verify import kernel, reference
from rollout_spec.verify.agreement import Batch, Disagreement, compare, compare_features
from rollout_spec.verify.reference import LogprobsMode, VerifyMethod

CUT_VOCABULARY = 2049
"""Most rows have about so many tokens, as NumPy takes 10 ms for one of 150,000. Fewer would compile other kernels."""


class Setting(NamedTuple):
    """How an engine calls the verifier."""

    device: torch.device
    vocab_size: int
    dtype: torch.dtype
    """Of the model's logits."""
    num_speculative_tokens: int
    """0: nothing is drafted."""
    method: VerifyMethod = "sample"
    logprobs_mode: str = "processed_logprobs"
    hidden: tuple[int, torch.dtype] | None = None
    """Size and dtype of the model's hidden states, where features are wanted."""


class Verdict(NamedTuple):
    """What a check found."""

    num_rows: int
    verification: str | None
    """Where it differs from the reference; None: nowhere. Nothing is compared after that."""
    features: str | None
    """The same of features."""


class _Case(NamedTuple):
    name: str
    batch: Batch  # without drafts
    is_right: NDArray[np.bool_]  # [D], which drafts are to be what the target samples
    is_processed: bool  # vLLM hands processed logits over in float32, others in a matrix of padded width
    mode: LogprobsMode | None
    num_drafts: int  # at most


def check(setting: Setting) -> Verdict:
    """Compare some three hundred rows, a few dozen of them of the engine's own vocabulary."""
    rng, num_rows, features = np.random.default_rng(0), 0, None
    for name, batch, is_right, is_processed, mode, num_drafts in _cases(setting, rng):
        num_rows += len(batch.logits)
        dtype, multiple = (torch.float32, 1) if is_processed else (setting.dtype, 64)
        logits = on_device(batch.logits, setting.device, dtype, multiple)
        options = {"method": setting.method, "max_draft_tokens": num_drafts}
        wish = run_kernels(batch, logits, after_difference=True, **options).target_token_ids
        batch = with_drafts(batch._replace(logits=logits.float().cpu().numpy()), wish, is_right)
        states = None
        if setting.hidden is not None and batch.logits.shape[1] == setting.vocab_size:
            size, dtype = setting.hidden
            states = torch.from_numpy(rng.standard_normal((len(batch.logits), size), np.float32)).to(dtype)
        hidden = None if states is None else states.to(setting.device)
        got = run_kernels(batch, logits, logprobs_mode=mode, hidden=hidden, **options)
        expected = reference.verify(*batch, method=setting.method, logprobs_mode=mode)
        try:
            compare(got, expected, batch, method=setting.method)
        except Disagreement as error:
            return Verdict(num_rows, f"{name}: {error}", features)
        try:
            if states is not None and features is None:
                compare_features(got, expected, batch, states.float().numpy())
        except Disagreement as error:
            features = f"{name}: {error}"
    return Verdict(num_rows, None, features)


def _cases(setting: Setting, rng: np.random.Generator) -> Iterator[_Case]:
    """All variants of the kernels that `warm_up_kernels` compiles: a few rows of the engine's vocabulary, more of a cut
    one, which 16 divides if it divides the engine's, because kernels are compiled by that."""
    k, whole = setting.num_speculative_tokens, setting.vocab_size
    cut = min(whole, CUT_VOCABULARY + (whole - CUT_VOCABULARY) % 16)
    modes = (None, *(mode for mode in get_args(LogprobsMode) if mode == setting.logprobs_mode))
    shapes: tuple[tuple[int, Sequence[int], Sequence[Any], Sequence[int], Mapping[int, float]], ...] = (
        (whole, (k,), modes[-1:], (2, 1, 0, 0), {3: np.nan}),
        (cut, sorted({0, k}), modes, (k, 0, 1, 2, 3, 1, 2, 3), {1: -np.inf, 5: np.nan, 6: np.inf}),
    )
    for vocab_size, limits, some_modes, lengths, broken in shapes:
        for num_drafts, mode, is_processed in itertools.product(limits, some_modes, (False, True)):
            cut_lengths = np.minimum(lengths, num_drafts)
            batch = random_batch(rng, cut_lengths, vocab_size, has_ties=is_processed)
            for request, value in broken.items():
                tokens = slice(None) if value == -np.inf else rng.integers(vocab_size)
                batch.logits[batch.request_rows(request)[0], tokens] = value
            share_right = np.repeat(np.resize((1.0, 0.0, 0.7), len(lengths)), cut_lengths)
            is_right = rng.random(share_right.size) < share_right
            dtype = "float32" if is_processed else str(setting.dtype).removeprefix("torch.")
            name = f"{vocab_size} {dtype} logits, up to {num_drafts} drafts, {mode or 'no logprobs'}"
            yield _Case(name, batch, is_right, is_processed, mode, num_drafts)


def random_batch(
    rng: np.random.Generator, lengths: Sequence[int] | NDArray[Any], vocab_size: int, *, has_ties: bool
) -> Batch:
    """Requests with so many drafted tokens, all of them 0, of mixed temperatures."""
    size = len(lengths)
    logits = rng.standard_normal((int(np.sum(lengths)) + size, vocab_size), np.float32)
    logits *= np.float32(rng.choice([0.1, 2.0, 5.0]))
    if has_ties:  # and removed tokens
        np.round(logits, out=logits)
        logits[rng.random(logits.shape, np.float32) < 0.3] = -np.inf
        logits[:, 0] = 0
    rows = SamplingBatch(
        temperature=rng.choice([0.0, 0.6, 1.0, 1.5], size).astype(np.float32),
        seeds=rng.integers(-(2**63), 2**63 - 1, size),
        positions=rng.integers(0, 40_000, size),
    )
    cu = np.cumsum(lengths).astype(np.int32)
    return Batch(logits, np.zeros(int(cu[-1]), np.int32), cu, rows)


def with_drafts(batch: Batch, samples: NDArray[np.int64], is_right: NDArray[np.bool_]) -> Batch:
    """The batch with samples, int64 [N], as drafts, and with other tokens where `is_right`, bool [D], is False."""
    wish = np.delete(samples, batch.cu + np.arange(len(batch.cu)))  # the last row of a request has no draft
    return batch._replace(drafts=np.where(is_right, wish, (wish + 1) % batch.logits.shape[1]).astype(np.int32))


def on_device(logits: NDArray[np.float32], device: torch.device, dtype: torch.dtype, multiple: int = 1) -> torch.Tensor:
    """The logits as part of a matrix of padded width: vLLM cuts them off one."""
    width = -(-logits.shape[1] // multiple) * multiple
    padded = torch.zeros(len(logits), width, dtype=dtype, device=device)
    return padded[:, : logits.shape[1]].copy_(torch.from_numpy(logits))


def run_kernels(batch: Batch, logits: torch.Tensor, **options: Any) -> VerifyResult:
    """The kernels' result as NumPy arrays.

    Args:
        logits: Those of the batch, on the device.
        **options: Of `rollout_spec.verify.api.verify_rows`.
    """
    return on_host(verify(logits, *inputs_on(batch, logits.device), **options))


def inputs_on(batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, SamplingBatch]:
    """Drafts, their sums and rows of a batch on a device."""
    fields = (getattr(batch.rows, name) for name in SamplingBatch.__slots__)
    rows = SamplingBatch(*(None if values is None else torch.from_numpy(values).to(device) for values in fields))
    return torch.from_numpy(batch.drafts).to(device), torch.from_numpy(batch.cu).to(device), rows


def on_host(result: VerifyResult) -> VerifyResult:
    """A result as NumPy arrays."""
    return VerifyResult(*(None if values is None else values.cpu().numpy() for values in result))


def verify(
    logits: torch.Tensor, drafts: torch.Tensor, cu: torch.Tensor, rows: SamplingBatch, **options: Any
) -> VerifyResult:
    """The kernels, on whatever device."""
    return kernel.verify_rows(logits, kernel.lay_out(cu, drafts, rows), **options)


def device_name(device: torch.device) -> str:
    """What to call a device in a message."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def describe(device: torch.device) -> str:
    """A device and what compiles for it."""
    return f"{device_name(device)}, Triton {triton.__version__}, torch {torch.__version__}"
