"""What the target saw when it sampled a token, in 32 bytes: with it drafters choose better among continuations.

Of the last hidden state, from which the logits are computed, the signs of random projections are kept: its signature.
The share of signs that differ estimates the angle between two states (SimHash: Charikar, STOC 2002), so comparing two
states means counting bits. Of the distribution the few most probable tokens are kept.

Features of T tokens are int64 [T, FEATURE_WORDS]:

- the first SIGNATURE_WORDS words hold the signature, all zero where it is not known;
- the others hold TOP_TOKENS token ids of 32 bits, the most probable first, and in the last 32 bits a byte for each,
  the lowest for the first: the code of its log-probability (`encode_logprobs`), 0 where no token is kept.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from rollout_spec.checks import shown_array
from rollout_spec.types import Float32Array, Int32Array

Features = NDArray[np.int64]

SIGNATURE_WORDS = 2
SIGNATURE_BITS = 64 * SIGNATURE_WORDS
TOP_TOKENS = 3
"""With the codes they fill two words; the device's kernel needs TOP_TOKENS + 1 to be a power of two."""
FEATURE_WORDS = SIGNATURE_WORDS + 2
LOGPROB_STEP = 1 / 16
"""Resolution of log-probabilities, in nats."""
MAX_CODE = 255
"""Code of e^-15.9 and all that is less probable."""


def no_features(size: int) -> Features:
    """Features of `size` tokens of which nothing is known."""
    return np.zeros((size, FEATURE_WORDS), np.int64)


def check_features(features: Features, size: int) -> None:
    """Raise ValueError if these are not the features of `size` tokens."""
    if not isinstance(features, np.ndarray) or features.dtype != np.int64 or features.shape != (size, FEATURE_WORDS):
        raise ValueError(
            f"features of {size} tokens must be int64 [{size}, {FEATURE_WORDS}], got {shown_array(features)}"
        )


def pack(signatures: NDArray[np.uint64], top_ids: Int32Array, top_logprobs: NDArray[np.floating]) -> Features:
    """Features of T tokens.

    Args:
        signatures: uint64 [T, SIGNATURE_WORDS].
        top_ids: int32 [T, TOP_TOKENS], best first.
        top_logprobs: [T, TOP_TOKENS], at the temperature that was sampled at.
    """
    features = no_features(len(signatures))
    features[:, :SIGNATURE_WORDS] = signatures.view(np.int64)
    halves = features[:, SIGNATURE_WORDS:].view(np.int32)
    halves[:, :TOP_TOKENS] = top_ids
    halves[:, TOP_TOKENS] = encode_logprobs(top_logprobs).astype(np.int32) @ (1 << 8 * np.arange(TOP_TOKENS))
    return features


def unpack(features: Features) -> tuple[NDArray[np.uint64], Int32Array, NDArray[np.uint8]]:
    """Of T tokens: signatures uint64 [T, SIGNATURE_WORDS], the most probable tokens int32 [T, TOP_TOKENS], and the
    codes of their log-probabilities uint8 [T, TOP_TOKENS]."""
    features = np.ascontiguousarray(features)
    halves = features[:, SIGNATURE_WORDS:].view(np.int32)
    codes = np.ascontiguousarray(halves[:, TOP_TOKENS:]).view(np.uint8)
    return features[:, :SIGNATURE_WORDS].view(np.uint64), halves[:, :TOP_TOKENS], codes[:, :TOP_TOKENS]


def encode_logprobs(logprobs: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Log-probabilities as a byte each: 1 - logprob / LOGPROB_STEP, rounded, at most MAX_CODE."""
    return np.clip(np.rint(1 - logprobs.astype(np.float64) / LOGPROB_STEP), 1, MAX_CODE).astype(np.uint8)


def decoded_probabilities() -> Float32Array:
    """float32 [MAX_CODE + 1]: the probability of each code, 0 of code 0."""
    codes = np.arange(MAX_CODE + 1)
    return np.where(codes == 0, 0.0, np.exp(LOGPROB_STEP * (1 - codes))).astype(np.float32)


@functools.lru_cache
def signature_matrix(hidden_size: int) -> Float32Array:
    """float32 [hidden_size, SIGNATURE_BITS], standard normal, the same in every process."""
    return np.random.default_rng(0).standard_normal((hidden_size, SIGNATURE_BITS), np.float32)
