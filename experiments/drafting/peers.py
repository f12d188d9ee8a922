"""Other drafters behind this project's `Drafter` protocol, so that one replay measures all of them.

- VllmNgram: vLLM's own proposer (n from 2 to 5), which sees the request alone.
- ArcticSuffix: Arctic Inference's suffix decoding, which vLLM's `suffix` method calls (arXiv:2411.04975), with vLLM's
  defaults. `find_arctic` says where it comes from.

Neither learns from outcomes or knows the noise.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.drafters.base import Tokens
from rollout_spec.types import Draft, Int32Array


class StatelessDrafter:
    """No-op methods for a drafter that keeps no index."""

    def check_integrity(self) -> None:
        pass


# -- vLLM's n-gram proposer ------------------------------------------------------------------------------------------


class VllmNgram(StatelessDrafter):
    """vLLM's numba n-gram proposer on a token buffer like the engine's."""

    def __init__(self, k: int, max_requests: int = 512, max_model_len: int = 32_768) -> None:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        own, lookup = types.SimpleNamespace, {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        config = own(
            speculative_config=own(num_speculative_tokens=k, **lookup), model_config=own(max_model_len=max_model_len),
            scheduler_config=own(max_num_seqs=max_requests), parallel_config=own(tensor_parallel_size=1),
        )  # fmt: skip
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
        package.__spec__ = importlib.machinery.ModuleSpec("arctic_inference", None, is_package=True)
        sys.modules["arctic_inference"] = package
    try:
        return importlib.import_module("arctic_inference.suffix_decoding.cache")
    except ImportError:
        return None


ARCTIC_DEPTH = 24
ARCTIC_OPTIONS = {"max_spec_factor": 1.0, "max_spec_offset": 0.0, "min_token_prob": 0.1}
"""vLLM's defaults: a draft is at most as long as its match."""


class ArcticSuffix(StatelessDrafter):
    """Arctic's suffix decoding, called as vLLM calls it, but with a cache for each problem, as our histories are."""

    def __init__(self) -> None:
        module = find_arctic()
        if module is None:
            raise ImportError("Arctic Inference cannot be imported: see find_arctic")
        self._new_cache: Callable[[], Any] = lambda: module.SuffixDecodingCache(ARCTIC_DEPTH, 10_000)
        self._caches: dict[int, Any] = {}
        self._requests: dict[str, tuple[Any, str, Int32Array, int]] = {}
        self._serial = 0

    def start_request(
        self, req_id: str, prompt_token_ids: Tokens, *, problem_id: int | None = None, seed: int | None = None
    ) -> None:
        prompt = np.array(prompt_token_ids, np.int32)
        key = hash(prompt.tobytes()) if problem_id is None else problem_id
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
            pattern = buffer[max(0, size - ARCTIC_DEPTH) : size]
            draft = cache.speculate(unique, pattern, max_spec_tokens=limit, **ARCTIC_OPTIONS)
            drafts.append(_with_full_confidence(draft.token_ids))
        return drafts

    def stop_request(self, req_id: str, *, keep: bool = True) -> None:
        cache, unique, _, _ = self._requests.pop(req_id)
        cache.stop_request(unique)
        if not keep:
            cache.evict_cached_response(unique)
