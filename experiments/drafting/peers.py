"""Other drafters behind this project's `Drafter` protocol, so that one replay measures all of them.

- Chain: the plain rules, by brute force over every position of the problem's texts (slow, and exact). `recent` and
  `freq` follow the longest match: its newest or its most frequent continuation. `ppm` blends counts over match lengths,
  q_l = (c_l + KAPPA q_{l-1}) / (n_l + KAPPA). All search again for every drafted token.
- VllmNgram: vLLM's own proposer (n from 2 to 5), which sees the request alone.
- ArcticSuffix: Arctic Inference's suffix decoding, which vLLM's `suffix` method calls (arXiv:2411.04975), with vLLM's
  defaults. `find_arctic` says where it comes from.

None of them learns from outcomes or knows the noise.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numba as nb
import numpy as np

from rollout_spec.drafters.base import Tokens
from rollout_spec.types import Draft, Int32Array

MAX_DEPTH = 32
KAPPA = 0.3
RECENT, FREQ, PPM = range(3)
RULES = ("recent", "freq", "ppm")


class _Request(NamedTuple):
    problem: int
    prompt: Int32Array
    tokens: list[int]
    serial: int


class StatelessDrafter:
    """No-op methods for a drafter that learns nothing from outcomes and keeps no index."""

    def observe(self, req_ids: Sequence[str], target_token_ids: Sequence[Tokens], num_accepted: Int32Array) -> None:
        pass

    def begin_policy_version(self, version: int) -> None:
        pass

    def memory_bytes(self) -> int:
        return 0

    def check_integrity(self) -> None:
        pass


class _Peer(StatelessDrafter):
    """Keeps the texts of live requests."""

    def __init__(self) -> None:
        self._live: dict[str, _Request] = {}
        self._serial = 0

    def start_request(
        self, req_id: str, prompt_token_ids: Tokens, *, problem_id: int | None = None, seed: int | None = None
    ) -> None:
        prompt = np.array(prompt_token_ids, np.int32)
        problem = hash(prompt.tobytes()) if problem_id is None else problem_id
        self._live[req_id] = _Request(problem, prompt, [], self._serial)
        self._serial += 1

    def extend(self, req_id: str, new_token_ids: Tokens) -> None:
        self._live[req_id].tokens.extend(np.asarray(new_token_ids).tolist())


# -- the plain rules -------------------------------------------------------------------------------------------------


class Chain(_Peer):
    """A plain rule by brute force. O(K n) per request and step for n tokens of the problem.

    Args:
        rule: "recent", "freq" or "ppm".
        min_survival: The draft ends where the product of the rule's own probabilities falls below this: a token's
            share among the longest matches (freq) or its blended probability (ppm). `recent` has none.
    """

    def __init__(self, rule: Literal["recent", "freq", "ppm"], min_survival: float = 0.0) -> None:
        super().__init__()
        self._rule = RULES.index(rule)
        self._min_survival = min_survival
        self._kept: dict[int, list[Int32Array]] = {}
        self._prompts: dict[int, list[Int32Array]] = {}

    def propose(self, req_ids: Sequence[str], max_tokens: Int32Array) -> list[Draft]:
        texts: dict[int, tuple[np.ndarray, np.ndarray, dict[str, tuple[int, int]]]] = {}
        drafts = []
        for req_id, limit in zip(req_ids, max_tokens, strict=True):
            request = self._live[req_id]
            if request.problem not in texts:
                texts[request.problem] = self._text(request.problem)
            text, order, places = texts[request.problem]
            start, end = places[req_id]
            tokens, confidence = _chain(text, order, start, end, int(limit), self._rule, self._min_survival)
            drafts.append(Draft(tokens, confidence))
        return drafts

    def stop_request(self, req_id: str, *, keep: bool = True) -> None:
        request = self._live.pop(req_id)
        if keep:
            own = np.concatenate((request.prompt, np.array(request.tokens, np.int32)))
            first = not self._kept.get(request.problem)
            self._kept.setdefault(request.problem, []).append(_document(own, 0 if first else request.prompt.size))

    def _text(self, problem: int) -> tuple[np.ndarray, np.ndarray, dict[str, tuple[int, int]]]:
        """The problem's texts, concatenated: (tokens [n], age order [n], (start, end) of each live request).

        Order -1 marks tokens that do not count as continuations: separators, and a shared prompt's repetitions.
        """
        pieces = list(self._kept.get(problem, []))
        live = [(req_id, request) for req_id, request in self._live.items() if request.problem == problem]
        places, at = {}, sum(piece.shape[1] for piece in pieces)
        for req_id, request in live:
            own = np.concatenate((request.prompt, np.array(request.tokens, np.int32)))
            pieces.append(_document(own, 0 if not pieces else request.prompt.size))
            places[req_id] = at, at + own.size
            at += pieces[-1].shape[1]
        text, counts = np.concatenate(pieces, axis=1)
        return text, np.where(counts > 0, np.arange(text.size), -1), places


def _document(text: Int32Array, num_hidden: int) -> Int32Array:
    """int32 [2, n + 1]: the text and a separator, and which tokens count as continuations."""
    counts = np.ones(text.size + 1, np.int32)
    counts[:num_hidden] = 0
    counts[-1] = 0
    return np.stack((np.append(text, -1).astype(np.int32), counts))


@nb.njit(cache=True)
def _chain(text, order, start, end, limit, rule, min_survival):
    """Draft for the request at text[start:end], whose own text counts as the newest: (tokens, confidence)."""
    n = text.size
    lengths = np.zeros(n, np.int64)  # how far the text before and at i agrees with the context
    for i in range(n):
        while (
            lengths[i] < MAX_DEPTH
            and lengths[i] <= i
            and end - 1 - lengths[i] >= start
            and text[i - lengths[i]] == text[end - 1 - lengths[i]]
        ):
            lengths[i] += 1
    tokens, confidence = np.empty(limit, np.int32), np.empty(limit, np.float32)
    matches, found, newest = np.empty(n, np.int64), np.empty(n, np.int32), np.empty(n, np.int64)
    mass = np.empty(n)
    survival = 1.0
    for depth in range(limit):
        longest, num_matches = 0, 0
        for i in range(n - 1):
            if lengths[i] > 0 and order[i + 1] >= 0 and i + 1 != end:
                longest = max(longest, lengths[i])
                matches[num_matches] = i
                num_matches += 1
        if longest == 0:
            return tokens[:depth], confidence[:depth]
        num_found = 0
        for length in range(1 if rule == PPM else longest, longest + 1):
            total = 0
            for i in range(num_found):
                mass[i] *= KAPPA
            for i in matches[:num_matches]:
                if lengths[i] < length:
                    continue
                total += 1
                at = 0
                while at < num_found and found[at] != text[i + 1]:
                    at += 1
                if at == num_found:
                    found[at], mass[at], newest[at] = text[i + 1], 0.0, -1
                    num_found += 1
                mass[at] += 1.0
                newest[at] = max(newest[at], order[i + 1] + (n if start < i + 1 < end else 0))
            for i in range(num_found):
                mass[i] /= total + (KAPPA if rule == PPM and length > 1 else 0.0)
        best = 0
        for i in range(1, num_found):
            if rule == RECENT:
                better = newest[i] > newest[best]
            else:
                better = mass[i] > mass[best] or (mass[i] == mass[best] and newest[i] > newest[best])
            if better:
                best = i
        survival *= 1.0 if rule == RECENT else mass[best]
        if survival < min_survival:
            return tokens[:depth], confidence[:depth]
        tokens[depth], confidence[depth] = found[best], survival
        for i in range(n - 1, 0, -1):
            lengths[i] = min(lengths[i - 1] + 1, MAX_DEPTH) if text[i] == found[best] else 0
        lengths[0] = 1 if text[0] == found[best] else 0
    return tokens, confidence


# -- vLLM's n-gram proposer ------------------------------------------------------------------------------------------


class VllmNgram(_Peer):
    """vLLM's numba n-gram proposer on a token buffer like the engine's."""

    def __init__(self, k: int, max_requests: int = 512, max_model_len: int = 32_768) -> None:
        super().__init__()
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        config = types.SimpleNamespace(
            speculative_config=types.SimpleNamespace(
                prompt_lookup_min=2, prompt_lookup_max=5, num_speculative_tokens=k
            ),
            model_config=types.SimpleNamespace(max_model_len=max_model_len),
            scheduler_config=types.SimpleNamespace(max_num_seqs=max_requests),
            parallel_config=types.SimpleNamespace(tensor_parallel_size=1),
        )
        self._proposer = NgramProposer(config)
        self._tokens = np.zeros((max_requests, max_model_len), np.int32)
        self._sizes = np.zeros(max_requests, np.int32)
        self._free = list(range(max_requests - 1, -1, -1))
        self._rows: dict[str, int] = {}

    def start_request(
        self, req_id: str, prompt_token_ids: Tokens, *, problem_id: int | None = None, seed: int | None = None
    ) -> None:
        self._rows[req_id] = row = self._free.pop()
        self._sizes[row] = 0
        self.extend(req_id, prompt_token_ids)

    def extend(self, req_id: str, new_token_ids: Tokens) -> None:
        row = self._rows[req_id]
        size = int(self._sizes[row])
        self._tokens[row, size : size + len(new_token_ids)] = new_token_ids
        self._sizes[row] = size + len(new_token_ids)

    def propose(self, req_ids: Sequence[str], max_tokens: Int32Array) -> list[Draft]:
        rows = [self._rows[req_id] for req_id in req_ids]
        sampled: list[list[int]] = [[] for _ in range(max(rows) + 1)]
        for row in rows:
            sampled[row] = [0]
        drafts = self._proposer.propose(self._proposer.k, sampled, self._sizes, self._tokens)
        return [_with_full_confidence(drafts[row][:limit]) for row, limit in zip(rows, max_tokens, strict=True)]

    def stop_request(self, req_id: str, *, keep: bool = True) -> None:
        self._free.append(self._rows.pop(req_id))


def _with_full_confidence(tokens: Sequence[int]) -> Draft:
    return Draft(np.array(tokens, np.int32), np.ones(len(tokens), np.float32))


# -- Arctic ----------------------------------------------------------------------------------------------------------


def find_arctic() -> Any | None:
    """The module `arctic_inference.suffix_decoding.cache`; None if it cannot be imported.

    Either the package is installed, or ARCTIC_INFERENCE names an unpacked source distribution in which the extension
    has been built (the whole package pins old versions of vLLM and CUDA; the extension alone needs CMake and nanobind):

        cmake -S csrc/suffix_decoding -B build -Dnanobind_DIR=$(python -m nanobind --cmake_dir)
        cmake --build build && cp build/_C*.so arctic_inference/suffix_decoding/
    """
    root = os.environ.get("ARCTIC_INFERENCE")
    if root and "arctic_inference" not in sys.modules:
        package = types.ModuleType("arctic_inference")  # its own __init__ patches vLLM
        package.__path__ = [str(Path(root) / "arctic_inference")]
        sys.modules["arctic_inference"] = package
    try:
        return importlib.import_module("arctic_inference.suffix_decoding.cache")
    except ImportError:
        return None


class ArcticSuffix(_Peer):
    """Arctic's suffix decoding, called as vLLM calls it.

    Args:
        per_problem: A cache for each problem, as histories are kept here. False: one for all, as in vLLM.
        factor, offset, min_probability: Its parameters; draft length is at most factor * match length + offset.
    """

    def __init__(
        self,
        *,
        per_problem: bool = True,
        factor: float = 1.0,
        offset: float = 0.0,
        min_probability: float = 0.1,
        max_depth: int = 24,
    ) -> None:
        super().__init__()
        module = find_arctic()
        if module is None:
            raise ImportError("Arctic Inference cannot be imported: see find_arctic")
        self._new_cache: Callable[[], Any] = lambda: module.SuffixDecodingCache(max_depth, 10_000)
        self._per_problem, self._max_depth = per_problem, max_depth
        self._knobs = {"max_spec_factor": factor, "max_spec_offset": offset, "min_token_prob": min_probability}
        self._caches: dict[int, Any] = {}
        self._requests: dict[str, tuple[Any, str, Int32Array, int]] = {}

    def start_request(
        self, req_id: str, prompt_token_ids: Tokens, *, problem_id: int | None = None, seed: int | None = None
    ) -> None:
        prompt = np.array(prompt_token_ids, np.int32)
        key = (hash(prompt.tobytes()) if problem_id is None else problem_id) if self._per_problem else 0
        if key not in self._caches:
            self._caches[key] = self._new_cache()
        self._serial += 1
        unique = f"{req_id}/{self._serial}"
        self._caches[key].start_request(unique, prompt)
        buffer = np.empty(max(2 * prompt.size, 1024), np.int32)
        buffer[: prompt.size] = prompt
        self._requests[req_id] = self._caches[key], unique, buffer, prompt.size

    def extend(self, req_id: str, new_token_ids: Tokens) -> None:
        cache, unique, buffer, size = self._requests[req_id]
        new = np.array(new_token_ids, np.int32)
        if size + new.size > buffer.size:
            buffer = np.resize(buffer, 2 * (size + new.size))
        buffer[size : size + new.size] = new
        cache.add_active_response(unique, new)
        self._requests[req_id] = cache, unique, buffer, size + new.size

    def propose(self, req_ids: Sequence[str], max_tokens: Int32Array) -> list[Draft]:
        drafts = []
        for req_id, limit in zip(req_ids, max_tokens.tolist(), strict=True):
            cache, unique, buffer, size = self._requests[req_id]
            pattern = buffer[max(0, size - self._max_depth) : size]
            draft = cache.speculate(unique, pattern, max_spec_tokens=limit, **self._knobs)
            drafts.append(_with_full_confidence(draft.token_ids))
        return drafts

    def stop_request(self, req_id: str, *, keep: bool = True) -> None:
        cache, unique, _, _ = self._requests.pop(req_id)
        cache.stop_request(unique)
        if not keep:
            cache.evict_cached_response(unique)

    def memory_bytes(self) -> int:
        """Bytes of the history's trees, without those of live requests."""
        return sum(cache._global_tree.estimate_memory() for cache in self._caches.values())
