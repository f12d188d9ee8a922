"""Checks and conversions that our samplers in vLLM's two model runners share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from rollout_spec.integrations.vllm import compat
from rollout_spec.types import VerifyResult
from rollout_spec.verify.reference import divisors, scaled


def needs_processing(params: Any) -> bool:
    """Whether a request's logits always go through vLLM's own processors, apart from `min_tokens`."""
    return bool(
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
        or params.bad_words
        or params.allowed_token_ids
        or params.logit_bias
        or params.thinking_token_budget is not None
        or params.top_k > 0  # vLLM has reset these of greedy requests
        or params.top_p < 1
        or params.min_p > 0
    )


class Asked(NamedTuple):
    """What the requests of a step of the V2 runner ask of sampling."""

    slots: NDArray[np.integer]
    """integer [B]"""
    is_below_min_tokens: bool
    is_processed: bool
    """vLLM's own processors come before the verifier."""
    num_logprobs: int
    """Most probable tokens besides the sampled one; -1: nothing is scored."""
    num_custom_ids: int
    """Tokens that requests name to be scored, at most."""
    scored_here: bool
    """Whether the verifier computes them; otherwise vLLM's code does."""


class AskedOfSlots:
    """What the requests in the slots of a V2 runner ask of sampling.

    Args:
        sampler: vLLM's `Sampler`.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._own_processors = not all(map(_is_vllms, compat.logits_processors_of(sampler)))
        self._needs_vllm: NDArray[np.bool_] = np.zeros(sampler.sampling_states.max_num_reqs, bool)
        self._min_tokens: NDArray[np.int64] = np.zeros(self._needs_vllm.size, np.int64)
        self._num_steps: NDArray[np.int64] = np.zeros(self._needs_vllm.size, np.int64)
        """A lower bound on each request's output tokens: counted only in steps in which a request is below its
        `min_tokens`, and from 0 again after a preemption."""
        self._last: Asked | None = None  # for another step of the same requests

    def add(self, slot: int, params: Any) -> None:
        """A request begins."""
        self._needs_vllm[slot] = self._own_processors or needs_processing(params)
        self._min_tokens[slot], self._num_steps[slot] = params.min_tokens, 0
        self._last = None

    def of(self, slots: NDArray[np.integer]) -> Asked:
        """What a batch asks. slots: integer [B]."""
        if self._last is not None and np.array_equal(self._last.slots, slots):
            return self._last
        is_below = self._num_steps[slots] < self._min_tokens[slots]
        is_processed = bool((self._needs_vllm[slots] | is_below).any())
        num_logprobs = self._sampler.sampling_states.max_num_logprobs(slots)
        num_custom_ids = self._sampler.logprob_token_ids_state.max_num_token_ids(slots)
        scored_here = not num_custom_ids and verifier_scores(self._sampler.logprobs_mode, num_logprobs, is_processed)
        asked = Asked(slots.copy(), bool(is_below.any()), is_processed, num_logprobs, num_custom_ids, scored_here)
        self._last = None if asked.is_below_min_tokens else asked  # who is no longer below stays so
        return asked

    def sampled(self, asked: Asked, batch: Any) -> None:
        """A step of `asked` has sampled, but for prompts that it has not read to their end."""
        if asked.is_below_min_tokens:
            num_read = batch.num_computed_tokens_np + batch.num_scheduled_tokens
            self._num_steps[asked.slots] += num_read >= batch.prefill_len_np


def truncate(
    logits: Tensor,
    temperature: Tensor,
    request: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Temperature, min-p, top-k and top-p as V2's sampler applies them, whose code for the latter two is V1's.

    Args:
        logits: float32 [N, V], may be changed.
        temperature: float32 [B].
        request: integer [N], each row's request.
        top_k, top_p, min_p: int32, float32 and float32 [B]; None: nobody asks for it.
    """
    request = request.long()
    logits.div_(divisors(temperature[request]))
    if min_p is not None:
        least = logits.amax(-1, keepdim=True) + min_p[request, None].log()
        logits.masked_fill_(logits < least, -torch.inf)
    top_k, top_p = (None if limits is None else limits[request] for limits in (top_k, top_p))
    truncated: Tensor = apply_top_k_top_p(logits, top_k, top_p)
    return truncated


def keep_broken(processed: Tensor, logits: Tensor) -> Tensor:
    """`processed` with a NaN in each row whose `logits` hold NaN or +inf: vLLM's processors on a GPU remove those."""
    processed[:, 0].masked_fill_(~(logits.amax(-1) < torch.inf), torch.nan)
    return processed


def _is_vllms(processor: Any) -> bool:
    return type(processor).__module__.startswith("vllm.")


def refuse_own_processors(processors: Iterable[Any]) -> None:
    """Raise ValueError if a logits processor is not vLLM's own: on drafted positions vLLM applies none of them."""
    for processor in processors:
        if not _is_vllms(processor):
            raise ValueError(
                f"the logits processor {type(processor).__name__} would be ignored by rollout_spec's sampler in the V1 "
                "model runner: remove it"
            )


def require_seed(params: Any, request: str) -> None:
    """Raise RuntimeError if a request, which `request` names, has no seed."""
    if params.seed is None:
        raise RuntimeError(
            f"{request} has no seed: it did not pass through vLLM's input processor with the rollout_spec plugin "
            "loaded. Give it one in SamplingParams(seed=...)"
        )


def verifier_scores(mode: str, num_logprobs: int | None, is_processed: bool) -> bool:
    """Whether the verifier computes the log-probabilities that a batch asks for; otherwise vLLM's code does.

    RL frameworks ask for the sampled token's alone, or for the most probable token's besides.

    Args:
        mode: The engine's `logprobs_mode`.
        num_logprobs: Most probable tokens per position besides the sampled one; None, or negative: nothing is scored.
        is_processed: Whether the verifier gets logits that vLLM has processed, and so not the raw ones.
    """
    return num_logprobs in (0, 1) and mode.endswith("_logprobs") and not (is_processed and mode == "raw_logprobs")


def scored_tokens(
    result: VerifyResult, logits: Tensor, temperature: Tensor | None, num_logprobs: int
) -> tuple[Tensor, Tensor]:
    """Token ids, int64 [N, 1 + num_logprobs], and their log-probabilities, float32, of N rows that the verifier scored.

    The most probable token's log-probability differs from the sampled one's as their logits do. To find it is one
    reduction over the logits; vLLM's code makes float32 copies of them.

    Args:
        result: The verifier's.
        logits: float [N, V], those that it got.
        temperature: float32 [N], each row's, below `GREEDY_TEMPERATURE` where it is greedy; None: log-probabilities are
            those of the raw logits.
        num_logprobs: 0, or 1 for the most probable token besides.
    """
    tokens, logprobs = result.target_token_ids.clamp(min=0).unsqueeze(1), result.logprobs.unsqueeze(1)
    if num_logprobs == 0:
        return tokens, logprobs
    highest, likeliest = logits.max(1, keepdim=True)
    excess = highest.float() - logits.gather(1, tokens).float()
    if temperature is not None:
        excess = scaled(excess, temperature)
    return torch.cat((tokens, likeliest), 1), torch.cat((logprobs, (logprobs + excess).clamp(max=0.0)), 1)


def raise_if_broken(num_broken_rows: NDArray[Any], req_ids: Sequence[str]) -> None:
    """Raise FloatingPointError if the model's logits are broken.

    Rows that masks have left empty (a grammar at its end, allowed tokens that min_tokens forbids) do not count: vLLM
    emits token 0 there.

    Args:
        num_broken_rows: Integer [B], each request's rows without a sample because a logit is NaN or +inf.
    """
    if not np.count_nonzero(num_broken_rows):  # a fraction of what `any` costs
        return
    first = req_ids[int(np.flatnonzero(num_broken_rows)[0])]
    raise FloatingPointError(
        f"{int(num_broken_rows.sum())} rows of logits hold NaN or +inf (first in request {first}), and nothing can be "
        "sampled from them: check the weights that were last loaded into the engine"
    )
