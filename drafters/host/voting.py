"""The vote's parts, and counters of what became of drafts. `drafter.py` says how, `constants.py` has the numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters.host import constants
from rollout_spec.drafters.host.constants import MAX_CANDIDATES, MAX_DEPTH
from rollout_spec.drafters.host.store import (
    DOCUMENT,
    KIND,
    LAST,
    PAGE_BITS,
    PROBLEM,
    ROLLOUT,
    after,
    last_position,
    step_back,
)
from rollout_spec.drafters.host.suffix import Path, new_path
from rollout_spec.features import FEATURE_WORDS, MAX_CODE, SIGNATURE_BITS, SIGNATURE_WORDS, TOP_TOKENS
from rollout_spec.jit import njit
from rollout_spec.noise.host import DOMAIN_TARGET, gumbel_from_hash, hash_words
from rollout_spec.types import Int32Array

MAX_FOUND = (TOP_TOKENS + 1) * MAX_CANDIDATES + 1
"""Most distinct tokens of one position: each candidate's own and those remembered with it, and the lookahead pool's."""


class Scratch(NamedTuple):
    """Buffers of one lookup and of the draft that is made from it."""

    text: Int32Array  # [MAX_DEPTH + K]
    path: Path
    positions: Int32Array  # [MAX_CANDIDATES]
    lengths: Int32Array  # [MAX_CANDIDATES] how far they match
    weights: NDArray[np.float64]  # [MAX_CANDIDATES]
    differing: Int32Array  # [MAX_CANDIDATES] bits of the signatures that differ
    found: Int32Array  # [MAX_FOUND] distinct next tokens
    mass: NDArray[np.float64]  # [MAX_FOUND] their probabilities, or the logarithms with noise
    by_length: NDArray[np.float64]  # [MAX_DEPTH + 1] weight of the candidates that match so far
    share: NDArray[np.float64]  # [MAX_DEPTH + 1] weight of a candidate that matches so far


def new_scratch(max_tokens):
    """Buffers for drafts of at most `max_tokens` tokens."""
    text, weights = np.empty(MAX_DEPTH + max_tokens, np.int32), np.empty(MAX_CANDIDATES)
    positions, lengths, differing = np.empty((3, MAX_CANDIDATES), np.int32)
    found, mass = np.empty(MAX_FOUND, np.int32), np.empty(MAX_FOUND)
    by_length, share = np.zeros((2, MAX_DEPTH + 1))
    return Scratch(text, new_path(), positions, lengths, weights, differing, found, mass, by_length, share)


@njit(allocates=False)
def cell_of(coupled, expected, length):
    """Where outcomes are counted: by whether noise chose, the expected probability, and the match's length."""
    distance = max(1.0 - expected, constants.MIN_DISTANCE_FROM_ONE)
    probability_bin = min(int(-constants.BINS_PER_HALVING * np.log2(distance)), constants.NUM_PROBABILITY_BINS - 1)
    length_bin = 0
    for edge in constants.LENGTH_EDGES:
        length_bin += length > edge
    return (coupled * constants.NUM_PROBABILITY_BINS + probability_bin) * constants.NUM_LENGTH_BINS + length_bin


@njit(allocates=False)
def rate(outcomes, expected):
    """Probability that a drafted token is accepted: the rate of its cell, whose prior is the expected probability."""
    return (outcomes[1] + constants.PRIOR * expected) / (outcomes[0] + constants.PRIOR)


@njit(allocates=False)
def weigh(store, document, count, positions, weights):
    """Give each candidate the weight of where it comes from."""
    problem = store.documents[document, PROBLEM]
    for i in range(count):
        theirs = store.pages[positions[i] >> PAGE_BITS, DOCUMENT]
        if theirs == document:
            weights[i] = constants.OWN_WEIGHT
        elif store.documents[theirs, PROBLEM] != problem:
            weights[i] = constants.SHARED_WEIGHT
        elif store.documents[theirs, KIND] == ROLLOUT:
            weights[i] = constants.SIBLING_WEIGHT
        else:
            weights[i] = constants.PROMPT_WEIGHT


@njit(allocates=False)
def _count_bits(word):
    """How many bits of a uint64 are set."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@njit(allocates=False)
def _num_differing(features, a, b):
    """Bits in which the signatures at two positions differ, -1 where either is not known."""
    set_a, set_b, differing = np.int64(0), np.int64(0), np.int64(0)
    for word in range(SIGNATURE_WORDS):
        set_a |= features[a, word]
        set_b |= features[b, word]
        differing += _count_bits(np.uint64(features[a, word] ^ features[b, word]))
    return differing if set_a != 0 and set_b != 0 else np.int64(-1)


@njit(allocates=False)
def compare_states(store, settings, document, depth, count, positions, lengths, weights, differing):
    """Weigh candidates by how similar the target's state was to its last known one in this document.

    That one predicted the document's last token, which lies `depth` + 1 before the one to be drafted. A candidate is
    compared by the state that predicted the token `depth` + 1 before it. Returns the number of candidates that are
    left: see MAX_DISAGREEMENT. Candidates whose state is not known stay: see UNKNOWN_DISAGREEMENT.
    """
    if store.features.shape[0] == 0 or count == 0:
        return count
    last = last_position(store, document)
    fewest, is_known = SIGNATURE_BITS, False
    for i in range(count):
        position = step_back(store.pages, np.int64(positions[i]), np.int64(depth + 1))
        differing[i] = _num_differing(store.features, position, last) if position >= 0 else -1
        if differing[i] >= 0:
            fewest, is_known = min(fewest, differing[i]), True
    if not is_known:
        return count
    kept = 0
    for i in range(count):
        more = differing[i] - fewest if differing[i] >= 0 else constants.UNKNOWN_DISAGREEMENT
        if more <= constants.MAX_DISAGREEMENT:
            positions[kept], lengths[kept] = positions[i], lengths[i]
            weights[kept] = weights[i] * settings.by_disagreement[more]
            kept += 1
    return kept


@njit(allocates=False)
def blend(store, settings, count, positions, lengths, weights, by_length, share, found, mass):
    """Probability of each next token: q_l = (c_l + BLEND q_{l-1}) / (n_l + BLEND) over match lengths l.

    Unrolled from the longest: a candidate that matches l tokens counts at every length up to l, and share[l] is what it
    gets for all of them together.

    Returns:
        (number of tokens found, longest match, probability that none of them follows).
    """
    longest, shortest = 0, MAX_DEPTH
    for i in range(count):
        by_length[lengths[i]] += weights[i]
        longest = max(longest, lengths[i])
        shortest = min(shortest, lengths[i])
    left, total = 1.0, 0.0
    for length in range(longest, shortest - 1, -1):
        share[length] = 0.0
        if by_length[length] > 0.0:
            total += by_length[length]
            share[length] = left / (total + constants.BLEND)
            left *= constants.BLEND / (total + constants.BLEND)
            by_length[length] = 0.0
    for length in range(shortest + 1, longest + 1):
        share[length] += share[length - 1]
    num_found = 0
    use_features = store.features.shape[0] > 0
    for i in range(count):
        position, weight = positions[i], weights[i] * share[lengths[i]]
        rest, said = weight, store.tokens[position]
        if use_features:
            for rank in range(TOP_TOKENS):
                token, code = _remembered(store.features, position, rank)
                probability = settings.probability[code]
                if probability < constants.MIN_REMEMBERED:
                    break
                rest -= weight * probability
                if token == said:
                    said = np.int32(-1)
                num_found = _add(token, weight * probability, num_found, found, mass)
        if said >= 0:
            num_found = _add(said, max(rest, 0.0), num_found, found, mass)
        else:
            left += max(rest, 0.0)
    return num_found, longest, min(left, 1.0)


@njit(allocates=False)
def _remembered(features, position, rank):
    """(token, code of its log-probability) of the rank-th most probable token at a position; see `features`."""
    word = features[position, SIGNATURE_WORDS + (rank >> 1)]
    codes = features[position, FEATURE_WORDS - 1] >> 32
    return np.int32((word >> 32 * (rank & 1)) & 0x7FFFFFFF), (codes >> 8 * rank) & MAX_CODE


@njit(allocates=False)
def _add(token, weight, num_found, found, mass):
    """Add to a token's probability. Returns the number of tokens found."""
    at = 0
    while at < num_found and found[at] != token:
        at += 1
    if at == num_found:
        found[at], mass[at] = token, 0.0
        num_found += 1
    mass[at] += weight
    return num_found


@njit(allocates=False)
def blend_in(token, weight, num_found, found, mass):
    """Give `token` this much of the probability and the others the rest. Returns the number of tokens found."""
    for i in range(num_found):
        mass[i] *= 1.0 - weight
    return _add(token, weight, num_found, found, mass)


@njit(allocates=False)
def add_noise(seed, position, num_found, found, mass):
    """Replace `mass` by its logarithm and the target's noise."""
    for i in range(num_found):
        noise = gumbel_from_hash(hash_words(int(seed), int(position), int(found[i]), DOMAIN_TARGET))
        mass[i] = np.log(mass[i]) + noise


@njit(allocates=False)
def choose(num_found, mass):
    """(index of the largest, its lead over the next one)."""
    best, largest, second = 0, -np.inf, -np.inf
    for i in range(num_found):
        if mass[i] > largest:
            best, largest, second = i, mass[i], largest
        elif mass[i] > second:
            second = mass[i]
    return best, largest - second


@njit(allocates=False)
def advance(store, token, count, positions, lengths, weights):
    """Keep the candidates whose token is `token`, moved on by one. Returns their number."""
    tokens, alive = store.tokens, 0
    for i in range(count):
        position = positions[i]
        page = position >> PAGE_BITS
        if tokens[position] != token or position == store.documents[store.pages[page, DOCUMENT], LAST]:
            continue
        positions[alive] = after(store.pages, position)
        lengths[alive] = min(lengths[i] + 1, MAX_DEPTH)
        weights[alive] = weights[i]
        alive += 1
    return alive


@njit(allocates=False)
def count_outcome(cell, hit):
    """Count an outcome."""
    if cell[0] >= constants.MAX_TRIALS:
        cell[0] *= 0.5
        cell[1] *= 0.5
    cell[0] += 1.0
    cell[1] += hit
