"""What the host does in a decode step, from the tokens that it sampled to the drafts for the next one.

Three compiled calls over the requests' arrays (`requests.py`) and what the history drafter knows (`HistoryState`):

1. `learn` reads the step's tokens where the engine keeps them, cuts them where the request ends, grades the last drafts
   by them, and appends them to the request's text.
2. `propose` drafts: the vote of `voting.py`. A drafter of another kind stands in its place.
3. `decide` cuts the drafts to what is worth verifying, by what the budget (`budget.py`) expects of each.

Indexing the tokens can be left for later, when the device computes: `index_documents`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.budget import NUM_BINS, allocate
from rollout_spec.drafters.host import lookahead, voting
from rollout_spec.drafters.host.constants import LOOKAHEAD_WEIGHT, MAX_DEPTH
from rollout_spec.drafters.host.index import DrafterSettings, Index, append_features, gather, index_document
from rollout_spec.drafters.host.lookahead import LOOKAHEAD_ORDER, Pool
from rollout_spec.drafters.host.store import PROBLEM, TextArrays, append_token, last_position, read_back
from rollout_spec.features import Features, no_features
from rollout_spec.jit import njit
from rollout_spec.types import Float32Array, Int32Array

NO_FEATURES = no_features(0)


class HistoryState(NamedTuple):
    """What the history drafter knows, as compiled functions see it."""

    store: TextArrays
    lookup: Index
    pool: Pool
    settings: DrafterSettings
    outcomes: Float32Array  # [CELLS, 2] (trials, hits) of drafted tokens that the target reached, by `voting.cell_of`


class Sampled(NamedTuple):
    """What a step brought to B requests, where the engine keeps it. N rows of logits, W requests of the engine's batch.

    The arrays of the batch may have more entries than W.
    """

    rows: NDArray[np.int64]
    """int64 [B], the requests' rows in the `RequestTable`."""
    batch_rows: NDArray[np.int64]
    """int64 [B], their rows in the engine's batch, by which all arrays below are indexed."""
    token_ids: Int32Array
    """int32 [W, L], a part of each request's text, of prompt and output."""
    first: NDArray[np.int64]
    """int64 [W], where in the text token_ids[:, 0] is: at most the number of tokens that are learned already."""
    lengths: Int32Array
    """int32 [W], tokens of each text. Those that are not learned yet are new."""
    num_verified: NDArray[np.int64]
    """int64 [W], draft tokens of this step. The scheduler may cut a draft further than was asked for."""
    num_accepted: NDArray[np.int64]
    """int64 [W], of these. The last num_accepted + 1 tokens are this step's."""
    starts: NDArray[np.int64]
    """int64 [W + 1], each request's first row of logits."""
    features: Features = NO_FEATURES
    """int64 [N, FEATURE_WORDS], what the target saw at these rows; of length 0 where it is not known."""


class StepOptions(NamedTuple):
    """What is the same in all of an engine's steps."""

    max_draft_tokens: int
    max_model_len: int
    index_now: bool  # whether tokens are indexed as they are learned


class Learned(NamedTuple):
    """What `learn` says of the next step."""

    limits: NDArray[np.int64]
    """int64 [B], how many tokens to draft for each request at most. The last one needs no draft, as a step samples one
    in any case."""
    num_live: int
    """Requests that are not complete."""
    num_verified: int
    """Draft tokens that the step verified."""
    num_sampled: int
    """Tokens that it sampled."""
    num_emitted: int
    """Of these, those that requests keep."""
    expected: float
    """Summed confidence of the draft tokens that were verified."""
    num_accepted: int
    """How many of these were accepted."""


@njit(allocates=False)
def _num_kept(requests, row, tokens, first, num_new):
    """How many of a request's new tokens there are up to where the scheduler will end it. Notes whether it does."""
    num_output = requests.num_tokens[row] - requests.num_prompt_tokens[row]
    kept = 0
    while kept < num_new and not requests.is_complete[row]:
        token = tokens[first + kept]
        kept += 1
        if num_output + kept >= requests.max_tokens[row]:
            requests.is_complete[row] = True
        elif num_output + kept >= requests.min_tokens[row]:
            for stop in range(requests.stop_token_ids.shape[1]):
                if requests.stop_token_ids[row, stop] == token:
                    requests.is_complete[row] = True
    return kept


@njit(allocates=False)
def _grade(drafts, outcomes, row, tokens, first, size):
    """Learn from a draft of history up to its first difference from the request's next tokens."""
    for depth in range(min(drafts.lengths[row], size)):
        target = tokens[first + depth]
        hit = drafts.tokens[row, depth] == target
        voting.count_outcome(outcomes[drafts.cells[row, depth]], hit)
        if not hit:
            break
    drafts.lengths[row] = 0


@njit
def learn(requests, history, options, sampled, window, limits):
    """Learn what a step sampled, for which the caller has made room. Returns what follows `Learned.limits`.

    Args:
        requests, history: By reference; history None: the drafter is of another kind.
        window: int32 [WINDOW], scratch.
        limits: int64 [B], filled: `Learned.limits`.
    """
    if history is None:
        return _learn(requests.values, None, options, sampled, window, limits)
    return _learn(requests.values, history.values, options, sampled, window, limits)


@njit(allocates=False)
def _learn(requests, history, options, sampled, window, limits):
    rows, batch_rows = sampled.rows, sampled.batch_rows
    num_live = num_verified = num_sampled = num_emitted = num_right = 0
    expected = 0.0
    for i in range(rows.size):
        row, batch_row = rows[i], batch_rows[i]
        tokens = sampled.token_ids[batch_row]
        first = requests.num_tokens[row] - sampled.first[batch_row]
        num_new = max(sampled.lengths[batch_row] - requests.num_tokens[row], 0)
        num_accepted = sampled.num_accepted[batch_row]
        num_earlier = num_new - num_accepted - 1  # tokens of earlier steps, which had not been seen
        num_judged = min(sampled.num_verified[batch_row], requests.num_offered[row])  # vLLM may verify padding
        least = 1.0
        for j in range(num_judged):
            least = min(least, requests.confidence[row, j])
            expected += least
        num_right += max(min(num_accepted, num_judged), 0)
        size = _num_kept(requests, row, tokens, first, num_new)
        if history is not None and size > 0:
            _grade(requests.history, history.outcomes, row, tokens, first, size)
            document = requests.document[row]
            for j in range(size):
                position = append_token(history.store, document, tokens[first + j])
                feature_row = sampled.starts[batch_row] + j - num_earlier if j >= num_earlier else -1
                append_features(history.store, position, sampled.features, feature_row)
            if options.index_now:
                index_document(history, np.int64(document), window)
        requests.num_offered[row] = 0
        requests.num_tokens[row] += size
        num_verified += sampled.num_verified[batch_row]
        num_sampled += num_accepted + 1
        num_emitted += max(size - max(num_earlier, 0), 0)
        limits[i] = 0
        if not requests.is_complete[row]:
            num_live += 1
            to_come = requests.max_tokens[row] - requests.num_tokens[row] + requests.num_prompt_tokens[row]
            in_model = options.max_model_len - requests.num_tokens[row]
            limits[i] = max(min(options.max_draft_tokens, to_come - 1, in_model - 1), 0)
    return num_live, num_verified, num_sampled, num_emitted, expected, num_right


@njit(allocates=False)
def remember_rejected(requests, history, sampled, targets, text):
    """Put what the target sampled after the first difference from a request's draft into the lookahead pool.

    Called before the step's tokens are learned.

    Args:
        targets: int64 [N], what it sampled at the step's rows.
        text: int32, scratch, longer than a draft by LOOKAHEAD_ORDER.
    """
    store = history.store
    for i in range(sampled.rows.size):
        row, batch_row = sampled.rows[i], sampled.batch_rows[i]
        start, accepted, drafts = sampled.starts[batch_row], sampled.num_accepted[batch_row], requests.history
        num_targets = min(sampled.starts[batch_row + 1] - start, drafts.lengths[row] + 1)
        if num_targets <= accepted + 1:
            continue
        document = requests.document[row]
        problem = np.int64(store.documents[document, PROBLEM])
        end = read_back(store, last_position(store, document), text, np.int64(LOOKAHEAD_ORDER))
        context = text[LOOKAHEAD_ORDER - end :]
        for depth in range(drafts.lengths[row]):
            context[end + depth] = drafts.tokens[row, depth]
        for depth in range(accepted + 1, num_targets):
            if targets[start + depth] < 0:
                break  # nothing after a position without a sample is known
            lookahead.insert(history.pool, problem, context, end + depth, targets[start + depth])


@njit(allocates=False)
def index_documents(history, documents, window):
    """Index each document's tokens that are not indexed so far, each as its context's continuation."""
    for i in range(documents.size):
        index_document(history, documents[i], window)


@njit
def propose(requests, history, rows, limits, scratch):
    """Draft for requests, at most limits[i] tokens each, and K: fills `requests.history`.

    Requests, history and scratch are passed by reference. O(log n + MAX_CANDIDATES) for a draft's first token and
    O(candidates left) for each later one.
    """
    _propose(requests.values, history.values, rows, limits, scratch.values)


@njit(allocates=False)
def _propose(requests, history, rows, limits, scratch):
    store, settings, out = history.store, history.settings, requests.history
    positions, lengths, weights = scratch.positions, scratch.lengths, scratch.weights
    found, mass = scratch.found, scratch.mass
    for i in range(rows.size):
        row = rows[i]
        document = requests.document[row]
        last = requests.num_tokens[row] - 1
        coupled = 1 if requests.has_seed[row] else 0
        kept = read_back(store, last_position(store, document), scratch.text, np.int64(MAX_DEPTH))
        text = scratch.text[MAX_DEPTH - kept :]
        survival, count = 1.0, 0
        out.lengths[row] = 0
        for depth in range(min(limits[i], out.tokens.shape[1])):
            end = kept + depth
            if count == 0:
                start = max(0, end - MAX_DEPTH)
                count = gather(
                    store, history.lookup, settings, document, text[start:end], end - start, positions, lengths,
                    scratch.path,
                )  # fmt: skip
                voting.weigh(store, document, count, positions, weights)
                count = voting.compare_states(
                    store, settings, document, depth, count, positions, lengths, weights, scratch.differing
                )
            num_found, longest, left = voting.blend(
                store, settings, count, positions, lengths, weights, scratch.by_length, scratch.share, found, mass
            )
            guess = lookahead.find(history.pool, np.int64(store.documents[document, PROBLEM]), text, end)
            if guess >= 0:
                num_found = voting.blend_in(guess, LOOKAHEAD_WEIGHT, num_found, found, mass)
                left *= 1.0 - LOOKAHEAD_WEIGHT
                longest = max(longest, LOOKAHEAD_ORDER)
            elif num_found == 0:
                break
            if coupled and num_found > 1:
                voting.add_noise(requests.seed[row], np.int64(last + depth), num_found, found, mass)
                best, lead = voting.choose(num_found, mass)
                expected = (1.0 - left) / (1.0 + np.exp(-lead))
            else:
                best, _ = voting.choose(num_found, mass)
                expected = 1.0 - left if coupled else mass[best]
            token = found[best]
            cell = voting.cell_of(coupled, expected, longest)
            out.cells[row, depth] = cell
            survival *= voting.rate(history.outcomes[cell], expected)
            if survival < settings.min_survival and depth > 0:  # a first token keeps its cell up to date
                break
            out.tokens[row, depth] = token
            out.confidence[row, depth] = survival
            out.lengths[row] = depth + 1
            text[end] = token
            count = voting.advance(store, token, count, positions, lengths, weights)


@njit
def decide(requests, rows, limits, chosen, vocab_size, trust, value, cost, token_ids, lengths):
    """Choose how much of each draft to verify, after a look whether the drafts can be verified.

    Args:
        requests: By reference.
        rows, limits: int64 [C].
        chosen: int64 [C], where each draft belongs in `token_ids` and `lengths`.
        trust: See `Budget`.
        value, cost: See `allocate`; `cost` of length 0: all of each draft is verified.
        token_ids: int32 [B, K], filled with the drafts.
        lengths: int64 [B], filled with how many of their tokens to verify.

    Returns:
        (whether all drafts can be verified, seconds that are expected to be gained).
    """
    survival = np.empty(rows.size * token_ids.shape[1])  # each token's probability to be reached and accepted
    starts, taken = np.empty(rows.size + 1, np.int64), np.empty(rows.size, np.int64)
    table, at = requests.values, 0
    drafts, confidence = table.history, table.confidence
    for i in range(rows.size):
        row, out = rows[i], token_ids[chosen[i]]
        length = drafts.lengths[row]
        if not 0 <= length <= min(limits[i], out.size, drafts.tokens.shape[1]):
            return False, 0.0
        starts[i], least = at, 1.0
        for j in range(length):
            out[j] = drafts.tokens[row, j]
            confidence[row, j] = drafts.confidence[row, j]
            if not (0 <= out[j] < vocab_size and 0.0 <= confidence[row, j] <= 1.0):  # NaN fails, too
                return False, 0.0
            least = min(least, confidence[row, j])  # a user's drafter may say more of a later token
            survival[at] = min(trust * least, 1.0)
            at += 1
        table.num_offered[row] = lengths[chosen[i]] = length
    starts[rows.size] = at
    if cost.size == 0:
        return True, 0.0
    gain = allocate(survival[:at], starts, value, cost[: at + 1], np.empty((2, NUM_BINS)), taken)
    for i in range(rows.size):
        lengths[chosen[i]] = taken[i]
    return True, gain
