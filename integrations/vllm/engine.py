"""What engines in vLLM's two model runners have in common."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollout_spec.config import RolloutSpecConfig
from rollout_spec.integrations.vllm.config import say
from rollout_spec.integrations.vllm.ranks import broadcasting_from_first_rank, is_true_on_any_rank
from rollout_spec.integrations.vllm.session import Session
from rollout_spec.integrations.vllm.warm_up import warm_up_kernels
from rollout_spec.stats import SpeculationStats
from rollout_spec.verify.reference import prepare


class Engine:
    """Stands between one of vLLM's model runners, whose hooks call it, and the engine's session.

    Attributes:
        session: None for an engine that samples with our noise only.
        stats: This engine's counters.
        config: The engine's options.

    Args:
        runner: vLLM's `GPUModelRunner`.
    """

    scheduled: Any = None  # vLLM's `SchedulerOutput` of this step
    warming_up = False  # whether vLLM is running made-up requests to compile its kernels, which are ignored
    may_cut = True  # whether drafts may be cut on the device: False once vLLM has refused it
    is_cutting = False  # whether they are, to those that pay
    most_passes = 1  # forward passes of a step

    def __init__(self, runner: Any, config: RolloutSpecConfig, session: Session | None) -> None:
        self.session = session
        self.stats = SpeculationStats() if session is None else session.stats
        self.config = config
        self._runner = runner
        # Read once: a user's own drafter could answer otherwise later, and on one rank only.
        drafter = None if session is None else session.drafter
        self._drafter_wants_features = bool(getattr(drafter, "wants_features", False))
        if self._drafter_wants_features:
            model = runner.vllm_config.model_config
            prepare(model.get_hidden_size(), model.dtype, runner.device)
            # Ranks round sums differently.
            self._from_first_rank = broadcasting_from_first_rank(runner.vllm_config, runner.device)

    def finish_counting(self) -> Any:
        """Count outcomes that are still on their way to the host: reading them at once would have made it wait."""

    @property
    def wants_features(self) -> bool:
        """Whether what the target sees is of use to the drafter."""
        return self._drafter_wants_features and self.session is not None and self.session.is_drafter_alive

    def compile_kernels(self, **buffers: Any) -> None:
        """Called before vLLM's own warm-up. buffers: Those of `kernel.verify_rows`."""
        model = self._runner.vllm_config.model_config
        warm_up_kernels(
            self.config,
            vocab_size=int(model.get_vocab_size()),
            dtype=model.head_dtype,
            device=self._runner.device,
            logprobs_mode=str(model.logprobs_mode),
            hidden=(model.get_hidden_size(), model.dtype) if self._drafter_wants_features else None,
            **buffers,
        )

    def on_load(self) -> None:
        """Called when the model is loaded."""

    def check_kernels(self) -> None:
        """Called once they are compiled. On a CPU nothing is checked.

        Raises:
            RuntimeError: verification disagrees with its reference, on any tensor-parallel rank.
        """
        device, vllm_config, started = self._runner.device, self._runner.vllm_config, time.perf_counter()
        if device.type == "cpu":
            return
        from rollout_spec.verify import self_check  # imports triton

        model = vllm_config.model_config
        fault = self_check.find_fault(
            device,
            vocab_size=int(model.get_vocab_size()),
            dtype=model.head_dtype,
            num_speculative_tokens=self.config.max_draft_tokens if self.config.speculation else 0,
            method=self.config.verify,
            logprobs_mode=str(model.logprobs_mode),
            for_v2=vllm_config.use_v2_model_runner,
        )
        if is_true_on_any_rank(vllm_config, fault is not None):
            raise RuntimeError(
                f"rollout_spec: verification on {device} differs from its reference: "
                f"{fault or 'another tensor-parallel rank says how'}. This engine would sample wrongly and does not "
                "start. Please report this line, with the output of `rollout-spec doctor --device`, in the "
                "repository's issues"
            )
        say(f"rollout_spec: the verifier agrees with its reference ({time.perf_counter() - started:.1f} s)")

    @contextmanager
    def ignoring_requests(self) -> Iterator[None]:
        """Wrap what vLLM does with made-up requests, which have no seeds and are ignored."""
        before, self.warming_up = self.warming_up, True
        try:
            yield
        finally:
            self.warming_up = before

    def begin_step(self, scheduled: Any) -> Any:
        """Called before every step with vLLM's `SchedulerOutput`. Returns what the runner is to take for it."""
        self.scheduled = scheduled
        if self.session is not None and not self.warming_up:
            self.session.finish_requests(scheduled.finished_req_ids, scheduled.preempted_req_ids or ())
        return scheduled

    def on_forward(self) -> None:
        """Called when the model has been launched, before anything is sampled: the device computes."""
        if self.session is not None and not self.warming_up:
            self.session.start_requests(self.scheduled.scheduled_new_reqs)
            self.session.exchange_history()

    def end_step(self, output: Any) -> None:
        """Called when the runner has sampled, with what it returns."""

    def on_error(self) -> None:
        """Called when a step has raised."""

    def load_history(self) -> None:
        """Take in the history of earlier runs. Called once the engine is built, before its first request."""
        if self.session is not None and self.session.engine_history is not None:
            self.session.engine_history.load()

    def close(self) -> None:
        """Called when the worker shuts down."""
        if self.session is not None:
            self.session.close()
