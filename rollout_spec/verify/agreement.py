"""What it means that kernels agree with the reference: `self_check.py` and `experiments/check_gpu.py` ask it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.features.format import LOGPROB_STEP, SIGNATURE_BITS, TOP_TOKENS, signature_matrix, unpack
from rollout_spec.noise import host as noise
from rollout_spec.types import Float32Array, Int32Array, SamplingBatch, VerifyResult
from rollout_spec.verify import reference

SCORE_TOLERANCE = 1e-4
"""Of two tokens' scores, relative where they exceed 1: below it either token may be sampled. The device's noise is
within 1e-5 of NumPy's; the rest allows for the rounding of logit / T."""
LOGPROB_TOLERANCE = 1e-4
LOGIT_TOLERANCE = 1e-5
"""Of unequal logits, relative where they exceed 1: closer ones may have equal log-probabilities, and another rank."""
NUCLEUS_TOLERANCE = 1e-5
"""Where many equal logits straddle the cut of top-p, this share of the kept tokens, and one more: each has so little
mass that the rounding of sums decides where the nucleus ends. Ranks count them."""
MAX_WRONG_BITS, MAX_WRONG_SHARE = 8, 0.01
"""Of one signature, and of all: in bfloat16 rounding changes six signs in ten thousand."""


class Disagreement(Exception):
    """What the kernels computed is not what the reference computes. The message says where."""


class Batch(NamedTuple):
    """Rows to verify, as the reference takes them."""

    logits: Float32Array  # [N, V]
    drafts: Int32Array  # [D]
    cu: Int32Array  # [B], inclusive sums of draft lengths
    rows: SamplingBatch

    def request_rows(self, request: int) -> range:
        """A request's rows of logits."""
        first = int(self.cu[request - 1]) if request else 0
        return range(first + request, int(self.cu[request]) + request + 1)

    def place(self, request: int, row: int) -> reference._Row:
        """How a row is sampled."""
        rows = self.request_rows(request)
        return reference._place(request, row - rows.start, row, len(rows) - 1, self.drafts, self.rows)


def compare(
    got: VerifyResult, expected: VerifyResult, batch: Batch, *, method: str = "sample", has_probs: bool = False
) -> tuple[int, float]:
    """Compare what a request emits, its counts, and log-probabilities and ranks where they were asked for.

    Args:
        got, expected: NumPy arrays.
        has_probs: Whether drafts came with probabilities; then every token must be the reference's.

    Returns:
        (tokens that differ because they were too close to tell, largest error of a log-probability).

    Raises:
        Disagreement: anything else differs.
    """
    num_close, largest = 0, 0.0
    for request in range(len(batch.cu)):
        ours, theirs = got.output_token_ids[request], expected.output_token_ids[request]
        for j, row in enumerate(batch.request_rows(request)):
            where = f"request {request}, token {j}"
            if ours[j] != theirs[j]:
                tokens = int(ours[j]), int(theirs[j])
                gap = np.inf if has_probs else _gap(batch.logits[row], batch.place(request, row), tokens, method)
                if not gap <= SCORE_TOLERANCE:
                    raise Disagreement(f"{where}: {ours} for {theirs[: ours.size]}, whose score differs by {gap:.2g}")
                num_close += 1
                break
            if theirs[j] < 0:
                _check_end(got, expected, request, j)
                break
            if expected.logprobs is not None:
                error = abs(float(got.logprobs[row]) - float(expected.logprobs[row]))
                if not error <= LOGPROB_TOLERANCE:
                    raise Disagreement(f"{where}: the log-probability is off by {error:.2g}")
                largest = max(largest, error)
                _check_rank(got, expected, row, batch, request, where)
        else:
            _check_end(got, expected, request, len(batch.request_rows(request)))
    return num_close, largest


def _gap(logits: Float32Array, place: reference._Row, tokens: tuple[int, int], method: str) -> float:
    """By how much the scores of the sampled token and of the reference's differ; infinite for what is no token."""
    if min(tokens) < 0 or max(tokens) >= logits.size:
        return np.inf
    scores = reference.process_row(logits, place).astype(np.float64)
    ours, theirs = tokens
    if not place.greedy and method == "sample":
        scores = scores + noise.gumbel(place.seed, place.position, np.arange(logits.size))
    elif not place.greedy:
        scores = reference.log_softmax(scores.astype(np.float32)).astype(np.float64)
        if place.draft in tokens:  # accepted by one of them only
            bound = float(noise.uniform32(place.seed, place.position, 0, noise.DOMAIN_ACCEPT))
            return float(abs(np.exp(scores[place.draft]) / bound - 1.0))
        scores = scores + noise.gumbel(place.seed, place.position, np.arange(logits.size), noise.DOMAIN_RESIDUAL)
    return float(abs(scores[ours] - scores[theirs]) / max(1.0, abs(scores[theirs])))


def _check_end(got: VerifyResult, expected: VerifyResult, request: int, length: int) -> None:
    """What follows a request's last token, and its counts."""
    if (got.output_token_ids[request, length:] >= 0).any():
        raise Disagreement(f"request {request}: {got.output_token_ids[request]} go on after {length} tokens")
    for name in ("num_accepted", "num_invalid_rows", "num_broken_rows"):
        ours, theirs = getattr(got, name)[request], getattr(expected, name)[request]
        if ours != theirs:
            raise Disagreement(f"request {request}: {name} is {ours} for {theirs}")


def _check_rank(got: VerifyResult, expected: VerifyResult, row: int, batch: Batch, request: int, where: str) -> None:
    ours, theirs = int(got.ranks[row]), int(expected.ranks[row])
    if ours == theirs:
        return
    logits, slack = batch.logits[row], 0
    if batch.place(request, row).top_p < 1:
        slack = 1 + int(NUCLEUS_TOLERANCE * theirs)
    logit = logits[expected.target_token_ids[row]]
    gaps = np.abs(logits - logit) / max(1.0, abs(float(logit)))
    slack += np.count_nonzero((gaps > 0) & (gaps <= LOGIT_TOLERANCE))
    if abs(ours - theirs) > slack:
        raise Disagreement(f"{where}: the rank is {ours} for {theirs}")


def compare_features(got: VerifyResult, expected: VerifyResult, batch: Batch, hidden: Float32Array) -> int:
    """Compare the features of emitted tokens with plain arithmetic, where the tokens are the reference's.

    Args:
        hidden: [N, H], as the device had it.

    Returns:
        Rows that were compared.

    Raises:
        Disagreement: a kept token is not among the most probable ones, a probability is off by more than its code's
            resolution, or more signs of projections differ than rounding explains.
    """
    signatures, ids, codes = unpack(got.features)
    signs = np.packbits(hidden @ signature_matrix(hidden.shape[1]) > 0, axis=1, bitorder="little").view(np.uint64)
    num_wrong = num_rows = 0
    for request in range(len(batch.cu)):
        for row in list(batch.request_rows(request))[: expected.num_accepted[request] + 1]:
            if expected.target_token_ids[row] < 0 or got.target_token_ids[row] != expected.target_token_ids[row]:
                break
            where = f"request {request}, row {row}"
            num_bits = sum(int(word).bit_count() for word in signatures[row] ^ signs[row])
            num_wrong, num_rows = num_wrong + num_bits, num_rows + 1
            if num_bits > MAX_WRONG_BITS:
                raise Disagreement(f"{where}: {num_bits} of a signature's {SIGNATURE_BITS} bits differ")
            _check_top(reference.process_row(batch.logits[row], batch.place(request, row)), ids[row], codes[row], where)
    if num_wrong > MAX_WRONG_SHARE * SIGNATURE_BITS * num_rows:
        raise Disagreement(f"{num_wrong} bits of {num_rows} signatures differ")
    return num_rows


def _check_top(processed: Float32Array, ids: Int32Array, codes: NDArray[np.uint8], where: str) -> None:
    x = processed.astype(np.float64)
    top = -np.sort(np.partition(-x, min(TOP_TOKENS, x.size) - 1)[:TOP_TOKENS])
    top = top[np.isfinite(top)]
    if (ids >= x.size).any() or (x[ids[: top.size]] != top).any() or codes[top.size :].any():
        raise Disagreement(f"{where}: the most probable tokens are {ids} with codes {codes}")
    logprobs = np.maximum(top - top[0] - np.log(np.exp(x - top[0]).sum()), -15.9)
    error = np.abs(LOGPROB_STEP * (1.0 - codes[: top.size].astype(np.float64)) - logprobs).max()
    if not error <= 0.6 * LOGPROB_STEP:
        raise Disagreement(f"{where}: a log-probability of the most probable tokens is off by {error:.2g}")
