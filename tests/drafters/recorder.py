"""What the drafter tests share: a drafter next to a plain record of the texts that it should hold."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numba
import numpy as np
from hypothesis import settings

from rollout_spec.drafters.host import ngram, step, suffix
from rollout_spec.drafters.host.constants import ENOUGH_CANDIDATES, MAX_CANDIDATES, MAX_DEPTH
from rollout_spec.drafters.host.drafter import HistoryDrafter
from rollout_spec.drafters.host.lookahead import LOOKAHEAD_ORDER
from rollout_spec.drafters.host.ngram import LONG_ORDER, SHORT_ORDER
from rollout_spec.drafters.host.step import NO_FEATURES, Sampled
from rollout_spec.drafters.host.store import DOCUMENT, PAGE_BITS, PAGE_MASK, PAGE_TOKENS, START
from rollout_spec.drafters.host.suffix import MAX_VISITS
from rollout_spec.features import SIGNATURE_WORDS, TOP_TOKENS, Features, pack
from rollout_spec.history.problems import problem_of_prompt
from rollout_spec.history.store import Rollout
from rollout_spec.types import Draft
from tests import naive
from tests.naive import Place, Text

SLOW = bool(numba.config.DISABLE_JIT)
FUZZING = int(os.environ.get("FUZZING", "1"))
"""How many times the usual number of examples: `make test-all` sets it."""
SENTINEL = -9


def examples(count: int, **others) -> settings:
    """Settings of one test; far fewer examples where numba is switched off."""
    count = max(4, count // 15) if SLOW else count * FUZZING
    return settings(max_examples=count, deadline=None, derandomize=True, **others)


def sampled(table, rows, tokens, num_accepted=None, *, num_verified=None, features=NO_FEATURES) -> Sampled:
    """A step that brought tokens to the requests in these rows.

    Args:
        num_accepted: Per request, so many draft tokens were right; the tokens before these and one more are of earlier
            steps. Left out: there are none before.
        num_verified: Left out: no draft was longer.
    """
    rows = np.array(rows, np.int64)
    lengths = np.array([len(some) for some in tokens], np.int64)
    num_accepted = lengths - 1 if num_accepted is None else np.array(num_accepted, np.int64)
    num_verified = num_accepted if num_verified is None else np.array(num_verified, np.int64)
    token_ids = np.full((rows.size, lengths.max(initial=0)), SENTINEL, np.int32)
    for row, some in zip(token_ids, tokens, strict=True):
        row[: len(some)] = some
    first, starts = table.arrays.num_tokens[rows], np.cumsum([0, *(num_verified + 1)])
    ends = (first + lengths).astype(np.int32)
    return Sampled(rows, np.arange(rows.size), token_ids, first, ends, num_verified, num_accepted, starts, features)


def signature(num_bits):
    """A signature that differs from that of 0 in `num_bits` bits; none of them is unknown."""
    words = ((1 << 127) | ((1 << num_bits) - 1)).to_bytes(8 * SIGNATURE_WORDS, "little")
    return np.frombuffer(words, np.uint64)


def features_of(states, distributions):
    """Features of tokens that came from states so many bits apart, each with {token: probability}."""
    size = len(states)
    signatures = np.zeros((size, SIGNATURE_WORDS), np.uint64)
    ids, logprobs = np.zeros((size, TOP_TOKENS), np.int32), np.full((size, TOP_TOKENS), -np.inf)
    for at, (state, distribution) in enumerate(zip(states, distributions, strict=True)):
        if state is not None:
            signatures[at] = signature(state)
        for rank, (token, probability) in enumerate(sorted(distribution.items(), key=lambda pair: -pair[1])):
            ids[at, rank], logprobs[at, rank] = token, np.log(probability)
    return pack(signatures, ids, logprobs)


def random_features(rng, tokens):
    """Of each token: now and then nothing, or a few likely tokens, and a state not far from the others."""
    states = [None if rng.random() < 0.1 else int(rng.integers(0, 24)) for _ in tokens]
    distributions = []
    for _ in tokens:
        size = int(rng.integers(0, TOP_TOKENS + 1))
        shares = rng.dirichlet(np.ones(size + 1))[:size] if size else []
        distributions.append(dict(zip(rng.permutation(5)[:size].tolist(), np.maximum(shares, 1e-4), strict=True)))
    return features_of(states, distributions)


def reject(drafter, req_ids, targets):
    """Tell the lookahead pool what the target said in place of the last drafts, of which no token was right."""
    rows, verified = np.array([drafter.row_of(req_id) for req_id in req_ids]), [len(some) - 1 for some in targets]
    outcome = sampled(drafter.table, rows, [some[:1] for some in targets], num_verified=verified)
    text = np.empty(LOOKAHEAD_ORDER + drafter._max_draft_tokens, np.int32)
    step.remember_rejected(drafter.table.arrays, drafter._state(), outcome, np.concatenate(targets), text)


class Recorder:
    """Passes calls on to a drafter and remembers prompts and rollouts by their document."""

    def __init__(self, index: str = "suffix", **options) -> None:
        self.drafter = HistoryDrafter(index, **{"min_survival": 0.0, **options})
        self._texts: dict[int, Text] = {}
        self._contexts: dict[int, list[int]] = {}  # the texts that are context only
        self._live: dict[str, Text] = {}

    def start(
        self, req_id: str, prompt: Sequence[int], tokens: Sequence[int] = (), *, num_known: int = 0, **kwargs
    ) -> None:
        problem_id = kwargs.get("problem_id")
        problem_id = problem_of_prompt(prompt) if problem_id is None else problem_id
        is_gone = self.drafter._own_only or problem_id not in self.drafter._problems
        self.drafter.start_request(req_id, prompt, num_known=num_known, **kwargs)
        num_known = 0 if is_gone else num_known
        request = self.drafter._live[req_id]
        prompt = self._note_prompt(request, prompt, num_known)
        self._texts[request.document] = self._live[req_id] = Text(
            self.drafter._problems[request.problem_id], prompt, []
        )
        self.extend(req_id, tokens)

    def add(self, rollout: Rollout) -> None:
        """Add a rollout that ended elsewhere."""
        before = list(self.drafter.rollouts.by_age)
        self.drafter.add_rollouts([rollout])
        for request in self.drafter.rollouts.by_age:
            if not any(request is other for other in before):
                prompt = self._note_prompt(request, rollout.context, len(rollout.context))
                self._texts[request.document] = Text(
                    self.drafter._problems[request.problem_id], prompt, list(rollout.tokens)
                )

    def _note_prompt(self, request, prompt: Sequence[int], num_known: int) -> list[int]:
        """Remember a request's prompt. Returns what is kept of it."""
        prompt = list(prompt)
        context = prompt[:num_known][-MAX_DEPTH:]
        documents = list(request.prompt.documents) if request.prompt is not None else []
        for document in (request.document, *documents):  # numbers are used again
            self._texts.pop(document, None)
            self._contexts.pop(document, None)
        if context:
            self._contexts[documents.pop(0)] = context
        if prompt[num_known:]:
            self._texts[documents.pop(0)] = Text(
                self.drafter._problems[request.problem_id], context, prompt[num_known:]
            )
        assert not documents
        return context + prompt[num_known:]

    def extend(self, req_id: str, tokens: Sequence[int], features: Features | None = None) -> None:
        self.drafter.extend(req_id, tokens, features)
        self._live[req_id].tokens.extend(int(token) for token in tokens)

    def propose(self, *req_ids: str, limit: int = 100) -> list[Draft]:
        return self.drafter.propose(list(req_ids), np.full(len(req_ids), limit, np.int32))

    def draft(self, req_id: str, limit: int = 100) -> list[int]:
        return self.propose(req_id, limit=limit)[0].token_ids.tolist()

    def stop(self, req_id: str, keep: bool = True) -> None:
        self.drafter.stop_request(req_id, keep=keep)
        del self._live[req_id]

    def texts(self) -> dict[int, Text]:
        """The texts of live requests and of those that the drafter says it keeps, by document, where indexed."""
        return {document: self._texts[document] for document in self._documents() if document in self._texts}

    def _documents(self) -> set[int]:
        requests = [*self.drafter._live.values(), *self.drafter.rollouts.by_age]
        prompts = [request.prompt.documents for request in requests if request.prompt is not None]
        documents = {request.document for request in requests}.union(*prompts)
        self._texts = {document: text for document, text in self._texts.items() if document in documents}
        self._contexts = {document: text for document, text in self._contexts.items() if document in documents}
        return documents

    def context(self, req_id: str) -> list[int]:
        text = self._live[req_id]
        return [*text.before, *text.tokens]

    def problem(self, req_id: str) -> int:
        return self._live[req_id].problem

    def check(self) -> None:
        """Integrity, and the store holds the texts on record."""
        self.drafter.check_integrity()
        documents, store = self._documents(), self.drafter._store
        expected = {document: text.tokens for document, text in self._texts.items()} | self._contexts
        assert {document: store.text(document).tolist() for document in documents} == expected
        assert store.num_tokens == sum(map(len, expected.values()))
        assert store.num_used_pages == sum(-(-len(tokens) // PAGE_TOKENS) for tokens in expected.values())

    def place(self, position: int) -> Place:
        store = self.drafter._store.arrays
        page = position >> PAGE_BITS
        return int(store.pages[page, DOCUMENT]), int(store.pages[page, START]) + (position & PAGE_MASK)

    def tree_candidates(self, problem: int, context: Sequence[int], *, shared: bool = False) -> list[tuple[Place, int]]:
        """What the problem's suffix tree, or that of all others, finds for a context, in order."""
        text = np.array(context[-MAX_DEPTH:], np.int32)
        positions, lengths = np.full((2, MAX_CANDIDATES), SENTINEL, np.int32)
        index = self.drafter._index
        tree, key, other_than = (index.shared, -1, problem) if shared else (index.tree, problem, -2)
        store, path = self.drafter._store.arrays, suffix.new_path()
        count = suffix.gather(
            store, tree, key, other_than, text, text.size, 0, MAX_CANDIDATES, positions, lengths, path
        )
        return self._places(positions, lengths, count)

    def table_candidates(self, problem: int, context: Sequence[int], order: int) -> list[tuple[Place, int]]:
        """What the n-gram table finds for a context, in order."""
        text = np.array(context[-MAX_DEPTH:], np.int32)
        positions, lengths = np.full((2, MAX_CANDIDATES), SENTINEL, np.int32)
        store, buckets = self.drafter._store.arrays, self.drafter._index.buckets
        count = ngram.gather(store, buckets, problem, text, text.size, order, positions, lengths, 0)
        return self._places(positions, lengths, count)

    def check_tree(self, problem: int, context: Sequence[int]) -> None:
        """The trees' candidates are true, where there are few all of them are found, where there are many enough.

        The longest match in a problem's own tree is found, too. In the tree of all others the requests' own problem
        can be in its way: what lies beside its positions is added as it is found, until there are enough.
        """
        texts = self.texts()
        own = naive.matches(texts, problem, context, MAX_DEPTH)
        candidates = self._check_candidates(self.tree_candidates(problem, context), own)
        assert max(candidates.values(), default=0) == max(own.values(), default=0)
        if self.drafter._settings.use_shared:
            others: dict[Place, int] = {}
            for other in {text.problem for text in texts.values()} - {problem}:
                others |= naive.matches(texts, other, context, MAX_DEPTH)
            if len(own) + len(others) <= MAX_VISITS:
                self._check_candidates(self.tree_candidates(problem, context, shared=True), others)

    def _check_candidates(
        self, found: list[tuple[Place, int]], expected: dict[Place, int], enough: int = ENOUGH_CANDIDATES
    ) -> dict[Place, int]:
        places = dict(found)
        assert len(places) == len(found), "a candidate came twice"
        assert places == {place: expected.get(place) for place in places}
        assert len(places) >= min(len(expected), enough)
        return places

    def check_table(self, problem: int, context: Sequence[int]) -> None:
        """The table's candidates are true and match at least as far as they should."""
        texts = self.texts()
        expected = naive.matches(texts, problem, context, MAX_DEPTH)
        for order in (LONG_ORDER, SHORT_ORDER):
            places = self._check_candidates(self.table_candidates(problem, context, order), expected, 0)
            assert all(length >= order for length in places.values())

    def _places(self, positions, lengths, count: int) -> list[tuple[Place, int]]:
        assert (positions[count:] == SENTINEL).all()
        assert (lengths[count:] == SENTINEL).all()
        found = list(zip(positions[:count].tolist(), lengths[:count].tolist(), strict=True))
        return [(self.place(position), length) for position, length in found]
