"""What finds earlier positions: the suffix trees or the n-gram table, kept up to date with the text store."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.drafters.host import ngram, suffix
from rollout_spec.drafters.host.constants import MAX_CANDIDATES, MAX_DEPTH
from rollout_spec.drafters.host.store import (
    INDEXED,
    LENGTH,
    PROBLEM,
    after,
    append_token,
    before,
    clear_document,
    is_private,
    last_position,
    read_back,
    step_back,
)
from rollout_spec.drafters.host.suffix import Tree
from rollout_spec.jit import njit
from rollout_spec.types import Float32Array

MAX_OWN_CANDIDATES = 24
"""How many of MAX_CANDIDATES may come from the problem's own tree where other problems are asked too."""
WINDOW = 8 * MAX_DEPTH
"""Tokens of a document that are looked at together while it is indexed."""
LONG_MATCH = 4
"""Tokens of a match among the problem's own texts from which on other problems are not searched."""
ALL_PROBLEMS, NONE = np.int64(-1), np.int64(-2)
"""In place of a problem's number."""


class Index(NamedTuple):
    """What finds positions in the store. Unused parts have size 0."""

    tree: Tree  # of each problem apart
    shared: Tree  # of all problems together, without private ones
    buckets: NDArray[np.uint32]  # [power of two, WAYS] n-gram table, newest first


class DrafterSettings(NamedTuple):
    """Scalars and small tables that the compiled functions read."""

    use_tree: bool  # suffix trees, or else the n-gram table
    use_shared: bool
    min_survival: float
    by_disagreement: Float32Array  # [SIGNATURE_BITS + 1] weight by differing bits more than in the most similar state
    probability: Float32Array  # [MAX_CODE + 1] see `features.decoded_probabilities`


@njit(allocates=False)
def _uses_shared(store, settings, document):
    """Whether a document is drafted from in other problems, and they in it."""
    return settings.use_shared and not is_private(store.documents[document, PROBLEM])


@njit(allocates=False)
def append_features(store, position, features, row):
    """Keep what the target saw at a token, features[row]; row -1, or no features: it is not known."""
    is_known = row >= 0 and features.shape[0] > 0
    if store.features.shape[0] > 0:
        for word in range(store.features.shape[1]):
            store.features[position, word] = features[row, word] if is_known else 0


@njit(allocates=False)
def append_tokens(history, document, tokens, features):
    """Append tokens to a document, with their features, or none of them."""
    for at in range(tokens.size):
        position = append_token(history.store, document, tokens[at])
        append_features(history.store, position, features, at)


@njit(allocates=False)
def index_document(history, document, window):
    """Index a document's tokens that are not indexed so far, each as its context's continuation.

    Args:
        window: int32 [WINDOW], scratch.
    """
    store, index, settings = history.store, history.lookup, history.settings
    problem = np.int64(store.documents[document, PROBLEM])
    left = np.int64(store.documents[document, LENGTH] - store.documents[document, INDEXED])
    if left == 0:
        return
    use_shared = _uses_shared(store, settings, document)
    position = step_back(store.pages, last_position(store, document), left - 1)
    first = MAX_DEPTH - read_back(store, before(store.pages, position), window, np.int64(MAX_DEPTH))
    end = MAX_DEPTH
    while True:
        first = max(first, end - MAX_DEPTH)
        context, size = window[first:end], end - first
        if not settings.use_tree:
            for order in (ngram.SHORT_ORDER, ngram.LONG_ORDER):
                if size >= order:
                    ngram.insert(index.buckets, problem, position, context, size, order)
        elif size > 0:
            suffix.insert(store, index.tree, problem, position, context, size)
            if use_shared:
                suffix.insert(store, index.shared, ALL_PROBLEMS, position, context, size)
        left -= 1
        if left == 0:
            break
        if end == window.size:
            for j in range(MAX_DEPTH):
                window[j] = window[end - MAX_DEPTH + j]
            first, end = 0, MAX_DEPTH
        window[end] = store.tokens[position]
        end += 1
        position = after(store.pages, position)
    store.documents[document, INDEXED] = store.documents[document, LENGTH]


@njit(allocates=False)
def remove_document(history, document, text):
    """Take a document, all or none of whose tokens are indexed, out of the index and free its pages.

    Args:
        text: int32 [MAX_DEPTH], scratch.
    """
    store, index, settings = history.store, history.lookup, history.settings
    if settings.use_tree:
        problem = np.int64(store.documents[document, PROBLEM])
        use_shared = _uses_shared(store, settings, document)
        position = last_position(store, document)
        for _ in range(store.documents[document, INDEXED]):
            previous = before(store.pages, position)
            if previous >= 0:
                suffix.remove(store, index.tree, problem, position, text)
                if use_shared:
                    suffix.remove(store, index.shared, ALL_PROBLEMS, position, text)
            position = previous
    clear_document(store, document)


@njit(allocates=False)
def gather(store, index, settings, document, text, end, positions, lengths, path):
    """Fill `positions` and `lengths` with earlier continuations of text[:end]. Returns their number."""
    problem, count = np.int64(store.documents[document, PROBLEM]), np.int64(0)
    if settings.use_tree and end > 0:
        use_shared, most = _uses_shared(store, settings, document), np.int64(MAX_CANDIDATES)
        limit = np.int64(MAX_OWN_CANDIDATES) if use_shared else most
        count = suffix.gather(store, index.tree, problem, NONE, text, end, count, limit, positions, lengths, path)
        if use_shared and (count == 0 or lengths[0] < LONG_MATCH):
            found = text, end, count, most, positions, lengths, path
            count = suffix.gather(store, index.shared, ALL_PROBLEMS, problem, *found)
    if not settings.use_tree:
        for order in (ngram.LONG_ORDER, ngram.SHORT_ORDER):
            count = ngram.gather(store, index.buckets, problem, text, end, order, positions, lengths, count)
    return count
