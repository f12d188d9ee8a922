"""The check at start: kernels against their references, on the engine's own device and before it serves."""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters import runs_on_device
from rollout_spec.integrations.vllm.log import say
from rollout_spec.integrations.vllm.ranks import agreeing_on_any
from rollout_spec.verify import self_check
from rollout_spec.verify.self_check import describe, device_name

logger = logging.getLogger(__name__)

REPORT = "Please report this line, with the output of `rollout-spec doctor --device`, in the repository's issues"


class Usable(NamedTuple):
    """Which parts agree with their references on all tensor-parallel ranks."""

    features: bool
    device_drafter: bool


def check_kernels(config: RolloutSpecConfig, runner: Any, *, features: bool) -> Usable:
    """Compare the kernels that an engine will launch with their references.

    Args:
        runner: vLLM's `GPUModelRunner`. On a CPU nothing is checked.
        features: Whether the drafter wants them.

    Raises:
        RuntimeError: verification disagrees, on any rank.
    """
    if runner.device.type == "cpu":
        return Usable(True, True)
    started, vllm_config = time.perf_counter(), runner.vllm_config
    model = vllm_config.model_config
    vocab_size, k = int(model.get_vocab_size()), config.max_draft_tokens if config.speculation else 0
    verdict = self_check.check(
        self_check.Setting(
            device=runner.device,
            vocab_size=vocab_size,
            dtype=getattr(model, "head_dtype", model.dtype),
            num_speculative_tokens=k,
            method=config.verify,
            logprobs_mode=str(model.logprobs_mode),
            hidden=(model.get_hidden_size(), model.dtype) if features else None,
        )
    )
    drafts = None
    if config.speculation and runs_on_device(config.drafter):
        from rollout_spec.drafters.device import self_check as drafter_check

        drafts = drafter_check.check(
            runner.device,
            max_requests=vllm_config.scheduler_config.max_num_seqs,
            num_speculative_tokens=k,
            vocab_size=vocab_size,
            use_noise=config.verify == "sample",
            options=config.drafter_options,
        )
    is_true_on_any = agreeing_on_any(vllm_config) or bool  # every rank votes on all three, whatever it found itself
    faults = [fault is not None for fault in (verdict.verification, verdict.features, drafts)]
    verification_fails, features_fail, drafter_fails = map(is_true_on_any, faults)
    on_other_rank, where = "another tensor-parallel rank says how", describe(runner.device)
    if verification_fails:
        raise RuntimeError(
            f"rollout_spec: verification differs from its reference on {where}: "
            f"{verdict.verification or on_other_rank}. This engine would sample wrongly and does not start. {REPORT}"
        )
    if features_fail:
        logger.warning(
            "rollout_spec: features differ from their reference on %s: %s. They are switched off; drafts are worse, "
            "rollouts the same. %s", where, verdict.features or on_other_rank, REPORT,
        )  # fmt: skip
    if drafter_fails:
        logger.warning(
            "rollout_spec: the device drafter errs on %s: %s. It is switched off: this engine drafts nothing and still "
            'verifies up to %d tokens per request and step. Use drafter="history", or speculation=False. %s',
            where, drafts or on_other_rank, k, REPORT,
        )  # fmt: skip
    if not features_fail and not drafter_fails:
        seconds = time.perf_counter() - started
        name, count = device_name(runner.device), verdict.num_rows
        say(f"rollout_spec: kernels agree with the references on {name}: {count} rows, {seconds:.1f} s")
    return Usable(not features_fail, not drafter_fails)
