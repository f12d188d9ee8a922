"""A model runner that samples recorded rollouts and says what its steps took: what `bench_phase` does in a worker.

Its functions are called by `llm.collective_rpc(function, args=...)`, with the worker first, as the worker may live in
another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rollout_spec.transfers import upload

ABOVE_ALL = 1e4
"""Of a raised logit: other logits and the noise stay below 100."""
SCRIPT = "recorded_rollout"
"""Key of `SamplingParams.extra_args` under which a request says which rollout it is."""
ENOUGH_STEPS = 5
"""For a median."""


def install(worker: Any, texts: list[list[int]], end: int) -> str:
    """Make a worker sample these texts, as `Scripts` does, and watch its steps. Returns its model runner's module."""
    runner = worker.model_runner
    Scripts(runner, texts, end)
    runner.watched_steps = Steps(runner)
    return type(runner).__module__


def begin_phase(worker: Any) -> None:
    """Forget the steps before."""
    worker.model_runner.watched_steps.clear()


def end_phase(worker: Any, num_tokens: int) -> dict[str, Any]:
    """What the steps were since `begin_phase`, in which rollouts got `num_tokens` tokens."""
    return worker.model_runner.watched_steps.summary(num_tokens)


def forget_other_problems(worker: Any) -> None:
    """Other batch sizes have the same texts, as other problems, in which the device drafter would find them."""
    texts = getattr(getattr(getattr(worker.model_runner, "speculator", None), "drafter", None), "_texts", None)
    if texts is not None:
        texts.index.zero_()


class Scripts:
    """Makes a vLLM model runner sample recorded rollouts.

    Args:
        texts: Tokens of the prompt and the rollout of all that will be asked for.
        end: The token that ends a sequence, which also follows everything that is recorded.
    """

    def __init__(self, runner: Any, texts: list[list[int]], end: int) -> None:
        self._runner = runner
        table = np.full((len(texts) + 1, max(map(len, texts)) + 256), end, np.int64)
        for row, text in enumerate(texts):
            table[row, : len(text)] = np.asarray(text)
        self._table = torch.from_numpy(table).to(runner.device)
        self._scheduled: list[str] = []
        self._of_request = torch.full((1,), len(texts), dtype=torch.int64, device=runner.device)
        if hasattr(runner, "input_batch"):
            self._sample, runner._sample = runner._sample, self._sample_v1
        else:
            self._of_request = self._of_request.repeat(runner.max_num_reqs)
            self._add_requests, runner.add_requests = runner.add_requests, self._add_requests_v2
            for kind in {type(runner.sampler), type(runner.rejection_sampler or runner.sampler)}:
                kind.__call__ = self._forcing(kind.__call__)

    def _force(self, logits: torch.Tensor, script: torch.Tensor, position: torch.Tensor) -> None:
        """Raise the logit of the recorded token in every row. `script` and `position`: integer [N]."""
        wanted = self._table[script, (position + 1).clamp(max=self._table.shape[1] - 1)]
        logits.scatter_(1, wanted[:, None], ABOVE_ALL)

    def _sample_v1(self, logits: torch.Tensor, metadata: Any) -> Any:
        runner = self._runner
        req_ids = runner.input_batch.req_ids
        if req_ids != self._scheduled:
            self._scheduled = list(req_ids)
            scripts = [runner.requests[req_id].sampling_params.extra_args[SCRIPT] for req_id in req_ids]
            self._of_request = upload(np.array(scripts, np.int64), logits.device)
        if metadata is None:
            rows, script = runner.query_start_loc.gpu[1 : len(req_ids) + 1] - 1, self._of_request
        else:
            rows = metadata.logits_indices
            script = torch.repeat_interleave(
                self._of_request,
                upload(np.array(metadata.num_draft_tokens, np.int64) + 1, logits.device),
                output_size=len(rows),
            )
        self._force(logits, script, runner.positions.index_select(0, rows))
        return self._sample(logits, metadata)

    def _add_requests_v2(self, scheduler_output: Any) -> None:
        self._add_requests(scheduler_output)
        new, device = scheduler_output.scheduled_new_reqs, self._of_request.device
        if new:
            rows = [self._runner.req_states.req_id_to_index[request.req_id] for request in new]
            scripts = [request.sampling_params.extra_args[SCRIPT] for request in new]
            self._of_request[upload(np.array(rows, np.int64), device)] = upload(np.array(scripts, np.int64), device)

    def _forcing(self, call: Any) -> Any:
        def sample(sampler: Any, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            script = self._of_request[input_batch.expanded_idx_mapping.long()]
            self._force(logits, script, input_batch.positions[input_batch.logits_indices])
            return call(sampler, logits, input_batch, *args, **kwargs)

        return sample


def marks() -> Callable[[], Any]:
    """What marks the present moment: an event in the device's stream, or the host's time without a GPU."""
    if not torch.cuda.is_available():
        return time.perf_counter

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return mark


def milliseconds_between(marked: Sequence[Any]) -> np.ndarray:
    """Of each pair of neighbours, float64."""
    if not marked or isinstance(marked[0], float):
        return np.diff(np.array(marked, dtype=float)) * 1e3
    torch.cuda.synchronize()
    return np.array([first.elapsed_time(second) for first, second in pairwise(marked)])


class Steps:
    """What a runner's steps are."""

    def __init__(self, runner: Any) -> None:
        self.requests: list[int] = []
        self.tokens: list[int] = []
        self.begun: list[Any] = []
        mark = marks()
        execute_model = runner.execute_model

        def watched_execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler_output.total_num_scheduled_tokens:
                self.requests.append(len(scheduler_output.num_scheduled_tokens))
                self.tokens.append(scheduler_output.total_num_scheduled_tokens)
                self.begun.append(mark())
            return execute_model(scheduler_output, *args, **kwargs)

        runner.execute_model = watched_execute_model
        cuts_drafts = getattr(runner, "adaptive_verification", None)
        if cuts_drafts is not None:  # which is after they were scheduled
            get_num_tokens = cuts_drafts.get_num_tokens

            def watched_get_num_tokens(*args: Any, **kwargs: Any) -> int:
                self.tokens[-1] = get_num_tokens(*args, **kwargs)
                return self.tokens[-1]

            cuts_drafts.get_num_tokens = watched_get_num_tokens
        self._largest_graph = max(runner.vllm_config.compilation_config.cudagraph_capture_sizes or [0])

    def clear(self) -> None:
        """Begin a phase."""
        for values in (self.requests, self.tokens, self.begun):
            values.clear()

    def summary(self, num_tokens: int) -> dict[str, Any]:
        """Of the phase, in which rollouts got `num_tokens` tokens."""
        return {
            "steps": len(self.tokens),
            "tokens_per_step": round(num_tokens / sum(self.requests), 3),
            "verified_per_step": round(sum(self.tokens) / sum(self.requests), 3),
            "steps_without_graph": round(float(np.mean(np.array(self.tokens) > self._largest_graph)), 3),
            "by_size": self._by_size(),
        }

    def _by_size(self) -> list[tuple[int, int, int, float]]:
        """(requests, tokens, steps, their median in ms) of every size of a step that occurred often enough."""
        times: dict[tuple[int, int], list[float]] = {}
        for size, ms in zip(
            zip(self.requests, self.tokens, strict=True), milliseconds_between(self.begun), strict=False
        ):
            times.setdefault(size, []).append(ms)
        return [
            (*size, len(ms), round(float(np.median(ms)), 3))
            for size, ms in sorted(times.items())
            if len(ms) >= ENOUGH_STEPS
        ]
