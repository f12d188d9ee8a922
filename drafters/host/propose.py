"""Drafting by vote, and learning from what became of the drafts. `history.py` says how, `vote.py` holds the numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters.host import lookahead
from rollout_spec.drafters.host.index import gather
from rollout_spec.drafters.host.lookahead import LOOKAHEAD_ORDER
from rollout_spec.drafters.host.store import (
    DOCUMENT,
    KIND,
    LAST,
    LENGTH,
    PAGE_BITS,
    PAGE_MASK,
    PROBLEM,
    ROLLOUT,
    START,
    VERSION,
    after,
    last_position,
    read_back,
    step_back,
)
from rollout_spec.drafters.host.suffix import Path, new_path
from rollout_spec.drafters.host.vote import (
    BINS_PER_HALVING,
    BLEND,
    COARSE_PRIOR,
    DISTANCE_EDGES,
    FINE_PRIOR,
    HEAD_START,
    INVERSE_TEMPERATURES,
    LENGTH_EDGES,
    LOOKAHEAD,
    LOOKAHEAD_WEIGHT,
    MAX_CANDIDATES,
    MAX_DEPTH,
    MAX_DISAGREEMENT,
    MAX_TRIALS,
    MIN_DISTANCE_FROM_ONE,
    MIN_REMEMBERED,
    NUM_DISTANCE_BINS,
    NUM_PROBABILITY_BINS,
    OUTCOME_DECAY,
    OWN,
    PROMPT_TEXT,
    SHARED,
    SIBLING,
    UNKNOWN_DISAGREEMENT,
)
from rollout_spec.features.format import FEATURE_WORDS, MAX_CODE, SIGNATURE_BITS, SIGNATURE_WORDS, TOP_TOKENS
from rollout_spec.jit.compiler import inlined, njit
from rollout_spec.noise.host import gumbel_nb
from rollout_spec.types import Float32Array, Int32Array

DECAY = np.float32(OUTCOME_DECAY)
MAX_FOUND = (TOP_TOKENS + 1) * MAX_CANDIDATES + 1
"""Most distinct tokens of one position: each candidate's own and those remembered with it, and the lookahead pool's."""


class Rows(NamedTuple):
    """State of the live requests, one entry each."""

    document: NDArray[np.int64]
    prompt_length: NDArray[np.int64]
    seed: NDArray[np.int64]
    has_seed: NDArray[np.bool_]  # whether the target's noise is known


class Calibration(NamedTuple):
    """Outcomes of drafted tokens that the target reached. The last axis is (trials, hits)."""

    coarse: Float32Array  # [coupled?, probability bin, length bin, 2]
    fine: Float32Array  # [coupled?, probability bin, length bin, origin bin, 2]
    by_source: NDArray[np.int64]  # [source, 2]
    by_inverse_temperature: NDArray[np.float64]  # [inverse temperature, 2]; of coupled choices, made or not


class Proposals(NamedTuple):
    """The last proposal of each live row, kept for `learn_outcomes` and returned to the caller."""

    lengths: NDArray[np.int64]  # [rows]
    num_given: NDArray[np.int64]  # [rows] tokens at its beginning that another drafter has chosen
    tokens: Int32Array  # [rows, K]
    confidence: Float32Array  # [rows, K]
    cells: Int32Array  # [rows, K, 4] index into `fine` of the calibration, and without the last one into `coarse`
    is_cut: NDArray[np.bool_]  # [rows] whether one token more had too low a rate; its cell is the one after the last
    alternatives: Int32Array  # [rows, K, inverse temperature] what each would have drafted; -1: there was no choice


class Scratch(NamedTuple):
    """Buffers of one lookup and of the draft that is made from it."""

    text: Int32Array  # [MAX_DEPTH + K]
    path: Path
    positions: Int32Array  # [MAX_CANDIDATES]
    lengths: Int32Array  # [MAX_CANDIDATES] how far they match
    weights: NDArray[np.float64]  # [MAX_CANDIDATES]
    origin_bins: Int32Array  # [MAX_CANDIDATES] source and distance bin in one number
    differing: Int32Array  # [MAX_CANDIDATES] bits of the signatures that differ
    found: Int32Array  # [MAX_FOUND] distinct next tokens
    mass: NDArray[np.float64]  # [MAX_FOUND] their probabilities, or the logarithms
    noise: NDArray[np.float64]  # [MAX_FOUND]
    by_length: NDArray[np.float64]  # [MAX_DEPTH + 1] weight of the candidates that match so far
    share: NDArray[np.float64]  # [MAX_DEPTH + 1] weight of a candidate that matches so far


def new_scratch(max_tokens):
    """Buffers for drafts of at most `max_tokens` tokens."""
    return Scratch(
        np.empty(MAX_DEPTH + max_tokens, np.int32),
        new_path(),
        np.empty(MAX_CANDIDATES, np.int32),
        np.empty(MAX_CANDIDATES, np.int32),
        np.empty(MAX_CANDIDATES, np.float64),
        np.empty(MAX_CANDIDATES, np.int32),
        np.empty(MAX_CANDIDATES, np.int32),
        np.empty(MAX_FOUND, np.int32),
        np.empty(MAX_FOUND, np.float64),
        np.empty(MAX_FOUND, np.float64),
        np.zeros(MAX_DEPTH + 1, np.float64),
        np.empty(MAX_DEPTH + 1, np.float64),
    )


@inlined(allocates=False)
def _length_bin(length):
    length_bin = 0
    for edge in LENGTH_EDGES:
        length_bin += length > edge
    return length_bin


@inlined(allocates=False)
def _probability_bin(probability):
    distance = max(1.0 - probability, MIN_DISTANCE_FROM_ONE)
    return min(int(-BINS_PER_HALVING * np.log2(distance)), NUM_PROBABILITY_BINS - 1)


@inlined(allocates=False)
def _distance_bin(distance):
    distance_bin = 0
    for edge in DISTANCE_EDGES:
        distance_bin += abs(distance) > edge
    return distance_bin


@inlined(allocates=False)
def _rate(calibration, coupled, probability_bin, length_bin, origin_bin, expected):
    """Probability that a drafted token is accepted: its fine cell's rate, whose prior is the coarse cell's."""
    coarse = calibration.coarse[coupled, probability_bin, length_bin]
    fine = calibration.fine[coupled, probability_bin, length_bin, origin_bin]
    rate = (coarse[1] + COARSE_PRIOR * expected) / (coarse[0] + COARSE_PRIOR)
    return (fine[1] + FINE_PRIOR * rate) / (fine[0] + FINE_PRIOR)


@inlined(allocates=False)
def _decay(cell):
    """Let the outcomes so far count for less, so that the cell is tried again."""
    cell[0] *= DECAY
    cell[1] *= DECAY


@inlined(allocates=False)
def _best_inverse_temperature(by_inverse_temperature):
    """The exponent that would have been right most often."""
    best, most = 1.0, -1.0
    for a in range(len(INVERSE_TEMPERATURES)):
        hits = by_inverse_temperature[a, 1] + (HEAD_START if INVERSE_TEMPERATURES[a] == 1.0 else 0.0)
        if hits > most:
            best, most = INVERSE_TEMPERATURES[a], hits
    return best


@inlined(allocates=False)
def _weigh(store, settings, document, offset, count, positions, weights, origin_bins):
    """Give each candidate its weight, and its origin bin: where it comes from and how far from `offset` it lies."""
    problem = store.documents[document, PROBLEM]
    for i in range(count):
        page = positions[i] >> PAGE_BITS
        theirs = store.pages[page, DOCUMENT]
        if theirs == document:
            source = OWN
        elif store.documents[theirs, PROBLEM] != problem:
            source = SHARED
        elif store.documents[theirs, KIND] == ROLLOUT:
            source = SIBLING
        else:
            source = PROMPT_TEXT
        distance_bin = _distance_bin(store.pages[page, START] + (positions[i] & PAGE_MASK) - offset)
        age = min(settings.version - store.documents[theirs, VERSION], settings.decay.size - 1)
        if source == PROMPT_TEXT:  # a prompt has no policy that it could be older than
            age = 0
        origin_bins[i] = source * NUM_DISTANCE_BINS + distance_bin
        weights[i] = settings.decay[age] * settings.preference[source, distance_bin]


@inlined(allocates=False)
def _count_bits(word):
    """How many bits of a uint64 are set."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@inlined(allocates=False)
def _num_differing(features, a, b):
    """Bits in which the signatures at two positions differ, -1 where either is not known."""
    known_a, known_b, differing = np.int64(0), np.int64(0), np.int64(0)
    for word in range(SIGNATURE_WORDS):
        known_a |= features[a, word]
        known_b |= features[b, word]
        differing += _count_bits(np.uint64(features[a, word] ^ features[b, word]))
    return differing if known_a != 0 and known_b != 0 else np.int64(-1)


@inlined(allocates=False)
def _compare_states(store, settings, document, depth, count, positions, lengths, weights, origin_bins, differing):
    """Weigh candidates by how similar the target's state was to its last known one in this document.

    That one predicted the document's last token. It is compared with the state that predicted the token which lies as
    far before the candidate as the last token lies before the one to be drafted. Returns the number of candidates that
    are left: see MAX_DISAGREEMENT. Candidates whose state is not known stay: see UNKNOWN_DISAGREEMENT.
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
        more = differing[i] - fewest if differing[i] >= 0 else UNKNOWN_DISAGREEMENT
        if more <= MAX_DISAGREEMENT:
            positions[kept], lengths[kept], origin_bins[kept] = positions[i], lengths[i], origin_bins[i]
            weights[kept] = weights[i] * settings.by_disagreement[more]
            kept += 1
    return kept


@inlined(allocates=False)
def _blend(store, settings, count, positions, lengths, weights, by_length, share, found, mass):
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
            share[length] = left / (total + BLEND)
            left *= BLEND / (total + BLEND)
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
                if probability < MIN_REMEMBERED:
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


@inlined(allocates=False)
def _remembered(features, position, rank):
    """(token, code of its log-probability) of the rank-th most probable token at a position; see `features`."""
    word = features[position, SIGNATURE_WORDS + (rank >> 1)]
    codes = features[position, FEATURE_WORDS - 1] >> 32
    return np.int32((word >> 32 * (rank & 1)) & 0x7FFFFFFF), (codes >> 8 * rank) & MAX_CODE


@inlined(allocates=False)
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


@inlined(allocates=False)
def _blend_in(token, weight, num_found, found, mass):
    """Give `token` this much of the probability and the others the rest. Returns the number of tokens found."""
    at = num_found
    for i in range(num_found):
        mass[i] *= 1.0 - weight
        if found[i] == token:
            at = i
    if at == num_found:
        found[at], mass[at] = token, 0.0
        num_found += 1
    mass[at] += weight
    return num_found


@inlined(allocates=False)
def _draw_noise(seed, position, num_found, found, mass, noise, alternatives):
    """Replace `mass` by its logarithm, fill `noise`, and note what each exponent would choose."""
    for i in range(num_found):
        mass[i] = np.log(mass[i])
        noise[i] = gumbel_nb(seed, position, np.int64(found[i]))
    for a in range(len(INVERSE_TEMPERATURES)):
        best = 0
        for i in range(1, num_found):
            if INVERSE_TEMPERATURES[a] * (mass[i] - mass[best]) + noise[i] - noise[best] > 0.0:
                best = i
        alternatives[a] = found[best]


@inlined(allocates=False)
def _choose(num_found, mass, inverse_temperature, noise):
    """(index of the best token, lead of its score over the next one's). inverse_temperature 0: the most probable."""
    best, best_score, second_score = 0, -np.inf, -np.inf
    for i in range(num_found):
        score = inverse_temperature * mass[i] + noise[i] if inverse_temperature > 0.0 else mass[i]
        if score > best_score:
            best, best_score, second_score = i, score, best_score
        elif score > second_score:
            second_score = score
    return best, best_score - second_score


@inlined(allocates=False)
def _advance(store, token, count, positions, lengths, weights, origin_bins):
    """Keep the candidates whose token is `token`, moved on by one. Returns their number."""
    tokens, alive = store.tokens, 0
    for i in range(count):
        position = positions[i]
        page = position >> PAGE_BITS
        if tokens[position] != token or position == store.documents[store.pages[page, DOCUMENT], LAST]:
            continue
        positions[alive] = after(store.pages, position)
        lengths[alive] = min(lengths[i] + 1, MAX_DEPTH)
        weights[alive], origin_bins[alive] = weights[i], origin_bins[i]
        alive += 1
    return alive


@njit(allocates=False, nogil=True)
def propose(store, index, pool, rows, batch, max_tokens, given, reached, settings, calibration, scratch, out):
    """Fill `out` for the rows in `batch`, at most max_tokens[i] tokens each, and K.

    Drafts begin with the tokens `given` (int32 [B, M]), all of which are accepted with probability `reached` (float64
    [B]). Nothing else is written but `scratch`: several threads may draft for parts of a batch. O(log n +
    MAX_CANDIDATES) for the first token of a draft and O(candidates left) for each later one.
    """
    positions, lengths, weights, origin_bins = scratch.positions, scratch.lengths, scratch.weights, scratch.origin_bins
    found, mass, noise = scratch.found, scratch.mass, scratch.noise
    inverse_temperature = (
        settings.inverse_temperature
        if settings.inverse_temperature > 0.0
        else _best_inverse_temperature(calibration.by_inverse_temperature)
    )
    for i in range(batch.size):
        row = batch[i]
        document = rows.document[row]
        generated = store.documents[document, LENGTH]
        known = rows.prompt_length[row] + generated
        coupled = 1 if rows.has_seed[row] else 0
        kept = read_back(store, last_position(store, document), scratch.text, np.int64(MAX_DEPTH))
        text = scratch.text[MAX_DEPTH - kept :]
        survival, count = reached[i], 0
        num_given = given.shape[1]
        for depth in range(num_given):
            out.tokens[row, depth] = text[kept + depth] = given[i, depth]
            out.confidence[row, depth] = reached[i]
        out.lengths[row], out.num_given[row], out.is_cut[row] = num_given, num_given, False
        for depth in range(num_given, min(max_tokens[i], out.tokens.shape[1])):
            end = kept + depth
            if count == 0:
                start = max(0, end - MAX_DEPTH)
                count = gather(
                    store, index, settings, document, text[start:end], end - start, positions, lengths, scratch.path
                )
                _weigh(store, settings, document, generated + depth, count, positions, weights, origin_bins)
                count = _compare_states(
                    store,
                    settings,
                    document,
                    depth,
                    count,
                    positions,
                    lengths,
                    weights,
                    origin_bins,
                    scratch.differing,
                )
            num_found, longest, left = _blend(
                store, settings, count, positions, lengths, weights, scratch.by_length, scratch.share, found, mass
            )
            guess = -1
            if settings.use_lookahead:
                guess = lookahead.find(pool, np.int64(store.documents[document, PROBLEM]), text, end)
            if guess >= 0:
                num_found = _blend_in(guess, LOOKAHEAD_WEIGHT, num_found, found, mass)
                left *= 1.0 - LOOKAHEAD_WEIGHT
                longest = max(longest, LOOKAHEAD_ORDER)
            elif num_found == 0:
                break
            out.alternatives[row, depth, 0] = -1
            if coupled and num_found > 1:
                _draw_noise(
                    rows.seed[row],
                    np.int64(known - 1 + depth),
                    num_found,
                    found,
                    mass,
                    noise,
                    out.alternatives[row, depth],
                )
                best, lead = _choose(num_found, mass, inverse_temperature, noise)
                likely, expected = np.exp(mass[best]), (1.0 - left) / (1.0 + np.exp(-lead))
            else:
                best, lead = _choose(num_found, mass, 0.0, noise)
                likely = mass[best]
                expected = 1.0 - left if coupled else likely
            token = found[best]
            heaviest, origin = -1.0, -1
            for j in range(count):
                if store.tokens[positions[j]] == token and weights[j] > heaviest:
                    heaviest, origin = weights[j], j
            if heaviest < 0.0 and token != guess:  # it was remembered there, but another one was sampled
                for j in range(count):
                    if weights[j] > heaviest:
                        heaviest, origin = weights[j], j
            origin_bin = origin_bins[origin] if origin >= 0 else LOOKAHEAD * NUM_DISTANCE_BINS
            if coupled:  # what bins mean under noise: see NUM_ORIGIN_BINS
                origin_bin = origin_bin // NUM_DISTANCE_BINS * NUM_DISTANCE_BINS + min(
                    int(NUM_DISTANCE_BINS * likely), NUM_DISTANCE_BINS - 1
                )
            probability_bin, length_bin = _probability_bin(expected), _length_bin(longest)
            out.cells[row, depth, 0], out.cells[row, depth, 1] = coupled, probability_bin
            out.cells[row, depth, 2], out.cells[row, depth, 3] = length_bin, origin_bin
            survival *= _rate(calibration, coupled, probability_bin, length_bin, origin_bin, expected)
            if survival < settings.min_survival:
                out.is_cut[row] = True
                break
            out.tokens[row, depth] = token
            out.confidence[row, depth] = survival
            out.lengths[row] = depth + 1
            text[end] = token
            count = _advance(store, token, count, positions, lengths, weights, origin_bins)


@inlined(allocates=False)
def count_outcome(cell, hit):
    """Count an outcome."""
    if cell[0] >= MAX_TRIALS:
        cell[0] *= 0.5
        cell[1] *= 0.5
    cell[0] += 1.0
    if hit:
        cell[1] += 1.0


@inlined(allocates=False)
def _num_sampled(targets, start, end, accepted):
    """How many of targets[start:end] are known: all up to a position behind the accepted ones without a sample."""
    at = start + accepted + 1
    while at < end and targets[at] >= 0:
        at += 1
    return min(at, end) - start


@njit(allocates=False)
def learn_outcomes(store, pool, rows, batch, targets, starts, num_accepted, settings, calibration, text, out):
    """Learn from drafts up to the first difference; the target's tokens after it go to the lookahead pool."""
    for i in range(batch.size):
        row = batch[i]
        num_targets = _num_sampled(targets, starts[i], starts[i + 1], num_accepted[i])
        if settings.use_lookahead and num_targets > num_accepted[i] + 1:
            document = rows.document[row]
            problem = np.int64(store.documents[document, PROBLEM])
            kept = read_back(store, last_position(store, document), text, np.int64(LOOKAHEAD_ORDER))
            context = text[LOOKAHEAD_ORDER - kept :]
            length = out.lengths[row]
            for depth in range(length):
                context[kept + depth] = out.tokens[row, depth]
            for depth in range(num_accepted[i] + 1, min(num_targets, length + 1)):
                lookahead.insert(pool, problem, context, kept + depth, targets[starts[i] + depth])
        if out.is_cut[row]:
            coupled, probability_bin, length_bin, origin_bin = out.cells[row, out.lengths[row]]
            _decay(calibration.coarse[coupled, probability_bin, length_bin])
            _decay(calibration.fine[coupled, probability_bin, length_bin, origin_bin])
        reached = min(out.lengths[row], num_accepted[i] + 1, num_targets)
        for depth in range(out.num_given[row], reached):
            coupled, probability_bin, length_bin, origin_bin = out.cells[row, depth]
            target = max(targets[starts[i] + depth], 0)  # the engine emits 0 where the target has no sample
            hit = out.tokens[row, depth] == target
            count_outcome(calibration.coarse[coupled, probability_bin, length_bin], hit)
            count_outcome(calibration.fine[coupled, probability_bin, length_bin, origin_bin], hit)
            if out.alternatives[row, depth, 0] >= 0:
                for a in range(len(INVERSE_TEMPERATURES)):
                    count_outcome(calibration.by_inverse_temperature[a], out.alternatives[row, depth, a] == target)
            source = origin_bin // NUM_DISTANCE_BINS
            calibration.by_source[source, 0] += 1
            calibration.by_source[source, 1] += hit
        out.lengths[row], out.is_cut[row] = 0, False
