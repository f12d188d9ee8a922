"""The device drafter in NumPy: the reference that `drafters/device/kernels.py` must match, and a drafter for replays.

A problem's texts are documents: those of its live requests and of its earlier rollouts. A lookup scans all of them, and
finds a few places in other problems' texts by an index.

1. A position is a match if the token before it is the request's last one. The match's length is the number of tokens
   before it that agree with the end of the request's text, at most MAX_DEPTH. Positions within prompts count in the
   request's own document only.
2. The index holds places in the outputs of all problems, by a hash of the ORDER tokens before them: for each hash and
   column, of which each problem has one, the latest position of the text with the latest stamp. A text is stamped when
   its request starts, when it ends, and when it comes back to the device. Where all ORDER tokens agree with the end of
   the request's text, a place of another problem is a match, too.
3. The ENOUGH_CANDIDATES longest matches are kept, and further ones as long as the last of these, up to MAX_CANDIDATES;
   among equals the request's own document comes first, then newer documents, then other problems by column, then later
   positions.
4. The candidates vote for the next token, with the host drafter's weights, remembered distributions, blend, coupled
   choice and calibration (see `drafters/host/drafter.py`); those with another token drop out, and the others move on. A
   candidate in the request's own document continues into the draft itself. The draft ends where no candidate is left.

Differences from the host drafter: of other problems only the index's places are seen; of the request's own problem all
matches are, where the host visits a part of them; and the host searches again where no candidate is left, which gains
0 to 0.5 % from words alone, with features 1 to 3 % (SmolLM2) to 13 % (the demo's policy), and costs a second scan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters.base import Tokens
from rollout_spec.drafters.host import constants
from rollout_spec.features import Features, check_features, decoded_probabilities, no_features, unpack
from rollout_spec.history.problems import problem_of_prompt
from rollout_spec.noise import host as noise
from rollout_spec.types import Draft, Int32Array

PROBABILITY = decoded_probabilities()
ORDER, COLUMNS = 3, 8
"""Tokens by which the index finds places, and places that it holds for them, each of other problems."""


class Document(NamedTuple):
    """A text of a problem."""

    tokens: Int32Array
    prompt_length: int
    """How many of the tokens are the prompt or its end."""
    features: Features
    """Of the tokens; those of the prompt have none. Zero where they are not to be used."""


class Match(NamedTuple):
    """An earlier position whose context agrees with the request's."""

    document: int
    """Index among the problem's documents; 0 is the request's own."""
    position: int
    length: int


def find_matches(
    documents: Sequence[Document], context: Int32Array, places: Sequence[tuple[Document, int]] = ()
) -> list[Match]:
    """The candidates of one lookup, best first. O(tokens of the documents).

    Args:
        documents: The request's own first, the others newest first.
        context: int32, the request's text, drafted tokens included.
        places: Of other problems, by column: (document, position). They are numbered after `documents`.
    """
    context = context[-constants.MAX_DEPTH :]
    found: list[Match] = []
    for number, (document, position) in enumerate(places, len(documents)):
        before = document.tokens[max(position - context.size, 0) : position]
        same = before[::-1] == context[::-1][: before.size]
        length = same.size if same.all() else int(np.argmin(same))
        if length >= ORDER:
            found.append(Match(number, position, length))
    for number, document in enumerate(documents):
        tokens = document.tokens
        first = max(1, 0 if number == 0 else document.prompt_length)
        ends = np.arange(first, tokens.size)
        alive = ends = ends[tokens[ends - 1] == context[-1]]
        lengths = np.ones(tokens.size, np.int64)
        for depth in range(1, context.size):
            alive = alive[alive - 1 - depth >= 0]
            alive = alive[tokens[alive - 1 - depth] == context[-1 - depth]]
            lengths[alive] = depth + 1
        found += [Match(number, int(position), int(lengths[position])) for position in ends]
    found.sort(key=lambda match: (-match.length, match.document, -match.position))
    kept = found[: constants.MAX_CANDIDATES]
    while len(kept) > constants.ENOUGH_CANDIDATES and kept[-1].length < kept[constants.ENOUGH_CANDIDATES - 1].length:
        kept.pop()
    return kept


@dataclass(slots=True)
class Counters:
    """Outcomes of drafted tokens that the target reached: (trials, hits) in the last axis."""

    counts: NDArray[np.int32] = field(default_factory=lambda: np.zeros((constants.CELLS, 2), np.int32))

    def halve_full(self) -> None:
        """Halve the counters with MAX_TRIALS trials. `DeviceDrafter` does the same when requests end."""
        self.counts[self.counts[:, 0] >= constants.MAX_TRIALS] //= 2

    def rate(self, cell: int, expected: float) -> float:
        """Probability that a token of this cell is accepted, where the vote says `expected`."""
        trials, hits = self.counts[cell]
        return float((hits + constants.PRIOR * expected) / (trials + constants.PRIOR))


class DraftedToken(NamedTuple):
    """One drafted token."""

    token: int
    rate: float
    """Estimated probability of acceptance once it is reached."""
    cell: int


def draft_tokens(
    documents: Sequence[Document],
    places: Sequence[tuple[Document, int]],
    *,
    max_tokens: int,
    seed: int | None,
    counters: Counters,
) -> list[DraftedToken]:
    """The draft of one request.

    Args:
        documents, places: See `find_matches`.
        max_tokens: Longest draft.
        seed: Of the request's noise; None: draft without it.
        counters: Outcomes so far; not changed.
    """
    own = documents[0]
    text = own.tokens.tolist()
    candidates = []
    matches = find_matches(documents, own.tokens, places)
    num_of_problem, documents = len(documents), [*documents, *(document for document, _ in places)]
    differing = [_num_differing(own.features, documents[m.document].features, m.position - 1) for m in matches]
    fewest = min((bits for bits in differing if bits is not None), default=None)
    for match, bits in zip(matches, differing, strict=True):
        more = 0
        if fewest is not None:
            more = constants.UNKNOWN_DISAGREEMENT if bits is None else bits - fewest
        if more > constants.MAX_DISAGREEMENT:
            continue
        weight = constants.SIBLING_WEIGHT if match.document < num_of_problem else constants.SHARED_WEIGHT
        if match.document == 0:
            weight = constants.OWN_WEIGHT if match.position >= own.prompt_length else constants.PROMPT_WEIGHT
        candidates.append((match, weight * math.exp(-constants.SIMILARITY * more)))
    drafted: list[DraftedToken] = []
    while candidates and len(drafted) < max_tokens:
        chosen = _choose(candidates, documents, text, seed, counters)
        drafted.append(chosen)
        text.append(chosen.token)
        alive = []
        for match, weight in candidates:
            tokens = text if match.document == 0 else documents[match.document].tokens
            if tokens[match.position] == chosen.token and match.position + 1 < len(tokens):
                moved = Match(match.document, match.position + 1, min(match.length + 1, constants.MAX_DEPTH))
                alive.append((moved, weight))
        candidates = alive
    return drafted


def _num_differing(own: Features, others: Features, position: int) -> int | None:
    """Bits in which the signature at a position differs from the last one of `own`; None where either is not known."""
    a, b = unpack(own)[0][-1], unpack(others)[0][position]
    return sum(int(word).bit_count() for word in a ^ b) if a.any() and b.any() else None


def _distribution(document: Document, position: int, token: int) -> dict[int, float]:
    """What a candidate votes for: the remembered tokens, and `token`, which was sampled there, for the rest."""
    found: dict[int, float] = {}
    if position < len(document.features):  # not in the draft itself
        _, ids, codes = unpack(document.features[position : position + 1])
        tops = zip(ids[0].tolist(), PROBABILITY[codes[0]].tolist(), strict=True)
        found = {top: probability for top, probability in tops if probability >= constants.MIN_REMEMBERED}
    if token not in found:
        found[token] = max(1.0 - sum(found.values()), 0.0)
    return found


def _choose(
    candidates: list[tuple[Match, float]],
    documents: Sequence[Document],
    text: list[int],
    seed: int | None,
    counters: Counters,
) -> DraftedToken:
    next_tokens = [(text if m.document == 0 else documents[m.document].tokens)[m.position] for m, _ in candidates]
    share, left, total = {}, 1.0, 0.0
    for length in sorted({m.length for m, _ in candidates}, reverse=True):
        total += sum(w for m, w in candidates if m.length == length)
        share[length] = left / (total + constants.BLEND)
        left *= constants.BLEND / (total + constants.BLEND)
    mass: dict[int, float] = {}
    for token, (match, weight) in zip(next_tokens, candidates, strict=True):
        votes = weight * sum(s for length, s in share.items() if length <= match.length)
        distribution = _distribution(documents[match.document], match.position, int(token))
        for t, probability in distribution.items():
            mass[t] = mass.get(t, 0.0) + votes * probability
        left += votes * max(1.0 - sum(distribution.values()), 0.0)
    left = min(left, 1.0)
    coupled = seed is not None
    if seed is not None and len(mass) > 1:
        tokens = list(mass)
        logs = np.log([mass[token] for token in tokens])
        noises = noise.gumbel(seed, len(text) - 1, np.array(tokens))
        scores = logs + noises
        best, second = np.sort(scores)[::-1][:2]
        token = tokens[int(np.argmax(scores))]
        expected = (1.0 - left) / (1.0 + math.exp(second - best))
    else:
        token = max(mass, key=lambda t: mass[t])
        expected = 1.0 - left if coupled else mass[token]
    distance = max(1.0 - expected, constants.MIN_DISTANCE_FROM_ONE)
    probability_bin = min(int(-constants.BINS_PER_HALVING * math.log2(distance)), constants.NUM_PROBABILITY_BINS - 1)
    longest = max(m.length for m, _ in candidates)
    row = int(coupled) * constants.NUM_PROBABILITY_BINS + probability_bin
    length_bin = sum(longest > edge for edge in constants.LENGTH_EDGES)
    cell = row * constants.NUM_LENGTH_BINS + length_bin
    return DraftedToken(token, counters.rate(cell, expected), cell)


@dataclass(slots=True)
class _Live:
    problem: int
    tokens: list[int]
    prompt_length: int
    seed: int | None
    order: int
    features: list[Features]
    """Of the tokens, in pieces."""
    stamp: int = 0
    """0: it is not in the index."""
    drafted: list[DraftedToken] = field(default_factory=list)


def _hash(tokens: Sequence[int]) -> int:
    """murmur3_32 of some tokens, the last one first, without a seed and with the length of four words."""
    state = 0
    for token in reversed(tokens):
        state = noise._mix(state, token) ^ noise.LENGTH
        state = (state ^ state >> 16) * noise.FMIX1 & noise.MASK
        state = (state ^ state >> 13) * noise.FMIX2 & noise.MASK
    return state ^ state >> 16


class ReferenceDrafter:
    """Implements `rollout_spec.drafters.base.Drafter` as the device does. For tests and replays: slow.

    Args:
        max_draft_tokens: Longest draft, K.
        features: Whether they are used.
        num_buckets: Hashes that the index tells apart, a power of two.
    """

    def __init__(self, *, max_draft_tokens: int = 8, features: bool = True, num_buckets: int = 1 << 20) -> None:
        self.counters = Counters()
        self._max_draft_tokens = max_draft_tokens
        self.wants_features = features
        self._live: dict[str, _Live] = {}
        self._finished: dict[int, list[_Live]] = {}
        self._num_started = 0
        self._num_buckets = num_buckets
        self._index: dict[tuple[int, int], tuple[int, int, _Live]] = {}  # (stamp, position, text) by hash and column
        self._last_stamp = 0
        self._resident: set[int] = set()

    def start_request(
        self, req_id: str, prompt_token_ids: Tokens, *, problem_id: int | None = None, seed: int | None = None
    ) -> None:
        prompt = [int(token) for token in prompt_token_ids]
        self._num_started += 1
        if problem_id is None and prompt:
            problem_id = problem_of_prompt(prompt)
        is_shared = problem_id is not None
        if problem_id is None:
            problem_id = -self._num_started
        live = _Live(problem_id, prompt, len(prompt), seed, self._num_started, [no_features(len(prompt))])
        self._live[req_id] = live
        if problem_id not in self._resident:
            self._resident.add(problem_id)
            for text in sorted(self._finished.get(problem_id, []), key=lambda text: text.order):
                self._stamp(text)
        if is_shared:
            self._stamp(live)

    def extend(self, req_id: str, new_token_ids: Tokens, features: Features | None = None) -> None:
        live = self._live[req_id]
        if features is None:
            features = no_features(len(new_token_ids))
        check_features(features, len(new_token_ids))
        live.features.append(features)
        new = [int(token) for token in new_token_ids]
        for chosen, token in zip(live.drafted, new, strict=False):
            hit = chosen.token == token
            self.counters.counts[chosen.cell] += (1, hit)
            if not hit:  # what was said after it was verified for another drafter
                break
        live.drafted = []
        live.tokens += new
        self._enter(live, len(live.tokens) - len(new))

    def propose(self, req_ids: Sequence[str], max_tokens: Int32Array) -> list[Draft]:
        drafts = []
        for req_id, limit in zip(req_ids, max_tokens, strict=True):
            live = self._live[req_id]
            live.drafted = draft_tokens(
                [self._document(live), *map(self._document, self._others(live))],
                self._places(live),
                max_tokens=min(int(limit), self._max_draft_tokens),
                seed=live.seed,
                counters=self.counters,
            )
            rates = np.array([chosen.rate for chosen in live.drafted], np.float32)
            drafts.append(Draft(np.array([chosen.token for chosen in live.drafted], np.int32), np.cumprod(rates)))
        return drafts

    def stop_request(self, req_id: str, *, keep: bool = True) -> None:
        live = self._live.pop(req_id)
        self.counters.halve_full()
        if keep:
            self._finished.setdefault(live.problem, []).append(live)
        if keep and live.stamp and len(live.tokens) > live.prompt_length:
            self._stamp(live)
        else:
            live.stamp = 0

    def add_rollout(
        self, problem_id: int, context: Sequence[int], tokens: Sequence[int], features: Features | None
    ) -> None:
        """A rollout that ended elsewhere."""
        self._num_started += 1
        known = [no_features(len(context)), no_features(len(tokens)) if features is None else features]
        text = _Live(problem_id, [*context, *tokens], len(context), None, self._num_started, known)
        if problem_id not in self._finished:
            self._resident.add(problem_id)
        self._finished.setdefault(problem_id, []).append(text)
        if problem_id in self._resident:
            self._stamp(text)

    def evict(self, problem_id: int) -> None:
        """A problem without live requests leaves the device."""
        self._resident.discard(problem_id)
        for text in self._finished.get(problem_id, []):
            text.stamp = 0

    def texts(self) -> list[_Live]:
        """Of live requests and of rollouts that have ended."""
        return [*self._live.values(), *(text for texts in self._finished.values() for text in texts)]

    def check_integrity(self) -> None:
        """Does nothing: there are no invariants."""

    def _stamp(self, text: _Live) -> None:
        self._last_stamp += 1
        text.stamp = self._last_stamp
        self._enter(text, 0)

    def _enter(self, text: _Live, start: int) -> None:
        """Enter a text's tokens from `start` on."""
        for position in range(max(start, text.prompt_length, ORDER), len(text.tokens) if text.stamp else 0):
            bucket = _hash(text.tokens[position - ORDER : position]) % self._num_buckets
            entry, key = (text.stamp, position, text), (bucket, text.problem % COLUMNS)
            self._index[key] = max(self._index.get(key, entry), entry, key=lambda entry: entry[:2])

    def _places(self, live: _Live) -> list[tuple[Document, int]]:
        """What the index holds of other problems for a request."""
        places = []
        if live.stamp and len(live.tokens) >= ORDER:
            bucket = _hash(live.tokens[-ORDER:]) % self._num_buckets
            entries = (self._index.get((bucket, column)) for column in range(COLUMNS))
            for stamp, position, text in filter(None, entries):
                if text.stamp == stamp and text.problem != live.problem:
                    places.append((self._document(text), position))
        return places

    def _others(self, live: _Live) -> list[_Live]:
        """The problem's other texts, newest request first."""
        texts = [other for other in self._live.values() if other.problem == live.problem and other is not live]
        texts += self._finished.get(live.problem, [])
        return sorted(texts, key=lambda other: -other.order)

    def _document(self, live: _Live) -> Document:
        features = np.concatenate(live.features) if self.wants_features else no_features(len(live.tokens))
        return Document(np.array(live.tokens, np.int32), live.prompt_length, features)
