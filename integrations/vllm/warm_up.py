"""Compiles, while an engine is built, what it will call: otherwise its first generation would wait for that."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import torch
from numba.core import event

from rollout_spec.budget import Budget
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters import DRAFTERS, build_drafter
from rollout_spec.installation import REMEDY, find_folder
from rollout_spec.loop import Decoder, RequestState, Targets
from rollout_spec.types import LogprobsMode, SamplingBatch
from rollout_spec.verify.api import verify_rows
from rollout_spec.verify.reference import lay_out

logger = logging.getLogger(__name__)


def warm_up(
    config: RolloutSpecConfig, *, device: torch.device | str = "cpu", log: Callable[[str], object] = logger.info
) -> None:
    """Compile what an engine with this configuration calls on the host, or load it from the cache.

    Runs a built-in drafter, a budget and a verifier on made-up tokens.

    Args:
        device: Where the engine's logits are; the verifier's compiled loop is for the CPU only.
        log: Called with one line of text after something was compiled; not at all if everything is in the cache.

    Raises:
        ValueError: the drafter does not take its options.
    """

    def report(seconds: float) -> None:
        how_often = "once per installation" if find_folder() else f"in every process ({REMEDY})"
        log(f"rollout_spec: compiled drafter and verifier in {seconds:.0f} s, {how_often}")

    with event.install_timer("numba:compile", report):
        if config.drafts_on_host and config.drafter in DRAFTERS:
            _draft(config)
        if torch.device(device).type == "cpu":
            _verify(config)


def _draft(config: RolloutSpecConfig) -> None:
    """Two requests from start to stop, of a target that says one token; one rollout is kept, the other removed."""
    drafter: Any = build_drafter(config.drafter, max_draft_tokens=config.max_draft_tokens, **config.drafter_options)

    def sample(requests: Sequence[RequestState], drafts: list[list[int]]) -> Targets:
        return Targets(np.zeros(len(requests) + sum(map(len, drafts)), np.int64))

    decoder = Decoder(drafter, sample, config.max_draft_tokens, budget=Budget() if config.budget else None)
    prompt = [i % 300 for i in range(1200)]  # long enough for the tables to grow
    requests = [
        RequestState(name, list(prompt), len(prompt), seed=0, temperature=temperature, problem_id=0)
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0))
    ]
    for request in requests:
        decoder.start(request)
    for _ in range(17):  # until the budget knows what steps cost
        decoder.observe_step(decoder.step(), seconds=1e-3, draft_seconds=1e-5)
    drafter.output_of("greedy")
    drafter.update_index()
    for request in requests:
        decoder.stop(request, keep=request.temperature == 0)


def warm_up_kernels(
    config: RolloutSpecConfig,
    *,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    logprobs_mode: str,
    hidden: tuple[int, torch.dtype] | None = None,
    step: Any = None,
    memory: Any = None,
) -> None:
    """Compile every variant of the verifier's kernels that an engine may launch, or load them from Triton's cache.

    With and without drafts and log-probabilities, for logits as the model gives them and for those that vLLM has
    processed: a second or so for each variant the first time.

    Args:
        dtype: Of the model's logits.
        logprobs_mode: The engine's.
        hidden: Size and dtype of the model's hidden states, where features are wanted.
        step, memory: Where V2's steps are written; see `kernel.verify_rows`. None: V1's.
    """
    from rollout_spec.verify import kernel

    zeros, starts = (torch.arange(size, dtype=torch.int32, device=device) for size in (1, 2))
    if step is not None:
        kernel.gather_layout(zeros, zeros.long(), zeros, starts, zeros, zeros, zeros.float(), zeros.long(), memory)
    # Triton tells strides and sizes apart that 16 divides. vLLM cuts logits off a matrix of padded width.
    padded_size = -(-vocab_size // 64) * 64
    drafted = (0, config.max_draft_tokens) if config.speculation else (0,)
    modes = (None, *(mode for mode in get_args(LogprobsMode) if mode == logprobs_mode))
    for num_drafts, mode, is_processed in itertools.product(drafted, modes, (False, True)):
        if is_processed and mode == "raw_logprobs":
            continue  # vLLM's code scores the raw logits
        rows = num_drafts + 1
        if is_processed:
            logits = torch.zeros(rows, vocab_size, dtype=torch.float32, device=device)
        else:
            logits = torch.zeros(rows, padded_size, dtype=dtype, device=device)[:, :vocab_size]
        one = torch.ones(1, dtype=torch.int32, device=device)
        batch = SamplingBatch(temperature=one.float(), seeds=one.long(), positions=one.long())
        drafts = torch.zeros(num_drafts, dtype=torch.int32, device=device)
        kernel.verify_rows(
            logits,
            lay_out(num_drafts * one, drafts, batch),
            method=config.verify,
            logprobs_mode=mode,
            hidden=None if hidden is None else torch.zeros(rows, hidden[0], dtype=hidden[1], device=device),
            max_draft_tokens=num_drafts,
            step=step,
            memory=memory,
        )


def _verify(config: RolloutSpecConfig) -> None:
    """Two requests with a draft for the first. Sampling parameters and log-probabilities change no compiled type."""
    with torch.device("cpu"):  # devices and dtypes are named: vLLM changes the defaults while it builds an engine
        zeros = torch.zeros(2, dtype=torch.int64)
        rows = SamplingBatch(temperature=torch.ones(2, dtype=torch.float32), seeds=zeros, positions=zeros)
        drafted, lengths = torch.zeros(1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
        logits = torch.zeros(3, 8, dtype=torch.float32)
        layout = lay_out(lengths, drafted, rows)
        hidden = torch.zeros(3, 8, dtype=torch.float32)
        verify_rows(
            logits, layout, method=config.verify, logprobs_mode="raw_logprobs", hidden=hidden, max_draft_tokens=1
        )
