"""A model runner, V1 or V2, that samples recorded rollouts and says what its steps took: for `bench_phase`."""

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
LIKELY = 16.0
"""Of a raised logit that leaves the choice to the noise in some places, where others have mean 0 and deviation 2."""
SCRIPT = "recorded_rollout"
"""Key of `SamplingParams.extra_args` under which a request says which rollout it is."""
ENOUGH_STEPS = 5
"""For a median."""
LEFT_IN_TAIL = 0.25
"""A phase's tail has less than this share of its requests."""


def install(worker: Any, texts: list[list[int]], end: int, raised: float) -> Steps:
    """Make a worker in this process sample these texts, as `Scripts` does, and watch its steps."""
    if raised == LIKELY:
        spread_logits(worker.model_runner.model)
    Scripts(worker.model_runner, texts, end, raised)
    return Steps(worker.model_runner)


@torch.inference_mode()
def spread_logits(model: Any) -> None:
    """Give made-up weights logits of deviation 2, in which attention counts: vLLM makes all of them tiny."""
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.fill_(1)
    head = model.lm_head.weight
    head.mul_(2 / (head.float().std() * head.shape[1] ** 0.5))


class Scripts:
    """Makes a vLLM model runner sample recorded rollouts.

    Args:
        texts: Tokens of the prompt and the rollout of all that will be asked for.
        end: The token that ends a sequence, which also follows everything that is recorded.
        raised: The logit of the recorded token.
    """

    def __init__(self, runner: Any, texts: list[list[int]], end: int, raised: float) -> None:
        self._runner, self._raised = runner, raised
        table = np.full((len(texts) + 1, max(map(len, texts)) + 256), end, np.int64)
        for row, text in enumerate(texts):
            table[row, : len(text)] = np.asarray(text)
        self._table = torch.from_numpy(table).to(runner.device)
        self._of_request = torch.full((runner.max_num_reqs,), len(texts), dtype=torch.int64, device=runner.device)
        if not hasattr(runner, "add_requests"):
            runner._sample = self._forcing_v1(runner._sample)
            return
        self._add_requests, runner.add_requests = runner.add_requests, self._note_requests
        engine = getattr(runner, "rollout_spec", None)
        if hasattr(engine, "_sample_in"):  # further forward passes of a step do not call vLLM's sampler
            engine._sample_in = self._forcing(engine._sample_in, 2)
            return
        for kind in {type(runner.sampler), type(runner.rejection_sampler or runner.sampler)}:
            kind.__call__ = self._forcing(kind.__call__, 1)

    def _note_requests(self, scheduler_output: Any) -> None:
        self._add_requests(scheduler_output)
        new, device = scheduler_output.scheduled_new_reqs, self._of_request.device
        if new:
            rows = [self._runner.req_states.req_id_to_index[request.req_id] for request in new]
            scripts = [request.sampling_params.extra_args[SCRIPT] for request in new]
            self._of_request[upload(np.array(rows, np.int64), device)] = upload(np.array(scripts, np.int64), device)

    def _forcing(self, call: Any, place: int) -> Any:
        """The sampler's call, after the logit of each row's recorded token is raised.

        Args:
            place: Of the logits among its arguments; the batch comes next.
        """

        def sample(*args: Any, **options: Any) -> Any:
            logits, batch = args[place : place + 2]
            self._force(
                logits, self._of_request[batch.expanded_idx_mapping.long()], batch.positions[batch.logits_indices]
            )
            return call(*args, **options)

        return sample

    def _forcing_v1(self, call: Any) -> Any:
        """As `_forcing`, of V1's runner."""
        runner = self._runner

        def sample(logits: torch.Tensor, drafts: Any) -> Any:
            ids = runner.input_batch.req_ids
            scripts = [runner.requests[req_id].sampling_params.extra_args[SCRIPT] for req_id in ids]
            rows = runner.query_start_loc.gpu[1 : len(ids) + 1] - 1 if drafts is None else drafts.logits_indices
            counts = 1 if drafts is None else 1 + np.array(drafts.num_draft_tokens)
            self._force(logits, upload(np.repeat(scripts, counts), logits.device), runner.positions[rows])
            return call(logits, drafts)

        return sample

    def _force(self, logits: torch.Tensor, script: torch.Tensor, position: torch.Tensor) -> None:
        wanted = self._table[script, (position + 1).clamp(max=self._table.shape[1] - 1)]
        logits.scatter_(1, wanted[:, None], self._raised)


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
    """What a runner's steps are. Requests and tokens are those of each of a step's forward passes."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.runner = runner, "V2" if hasattr(runner, "add_requests") else "V1"
        self.requests: list[int] = []
        self.tokens: list[int] = []
        self.passes: list[int] = []
        self.begun: list[Any] = []
        mark = marks()
        execute_model = runner.execute_model

        def watched_execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler_output.total_num_scheduled_tokens:
                step = getattr(scheduler_output, "rollout_spec_step", None)
                self.passes.append(1 if step is None else step.num_passes)
                self.requests.append(len(scheduler_output.num_scheduled_tokens))
                self.tokens.append(scheduler_output.total_num_scheduled_tokens // self.passes[-1])
                self.begun.append(mark())
            return execute_model(scheduler_output, *args, **kwargs)

        runner.execute_model = watched_execute_model
        cuts_drafts = getattr(runner, "adaptive_verification", None)
        self.cuts_drafts = cuts_drafts is not None
        if cuts_drafts is not None:  # which is after they were scheduled
            get_num_tokens = cuts_drafts.get_num_tokens

            def watched_get_num_tokens(*args: Any, **kwargs: Any) -> int:
                self.tokens[-1] = get_num_tokens(*args, **kwargs)
                return self.tokens[-1]

            cuts_drafts.get_num_tokens = watched_get_num_tokens
        self._largest_graph = max(runner.vllm_config.compilation_config.cudagraph_capture_sizes or [0])

    def clear(self) -> None:
        """Begin a phase."""
        for values in (self.requests, self.tokens, self.passes, self.begun):
            values.clear()

    def forget_other_problems(self) -> None:
        """Other batch sizes have the same texts, as other problems, in which the device drafter would find them."""
        engine = getattr(self._runner, "rollout_spec", None)
        if engine is not None and engine.session is not None:
            engine.session.drafter._texts.index.zero_()

    def summary(self, num_tokens: int) -> dict[str, Any]:
        """Of the phase, in which rollouts got `num_tokens` tokens."""
        requests, tokens, passes = map(np.array, (self.requests, self.tokens, self.passes))
        request_passes, is_large = passes @ requests, tokens > self._largest_graph
        ms = milliseconds_between(self.begun)
        is_tail = requests[: ms.size] < LEFT_IN_TAIL * requests.max()
        return {
            "steps": int(passes.sum()),
            "passes_per_step": round(float(passes.mean()), 2),
            "tokens_per_step": round(float(num_tokens / request_passes), 3),
            "verified_per_step": round(float(passes @ tokens / request_passes), 3),
            "steps_without_graph": round(float(np.average(is_large, weights=passes)), 3),
            "tail_seconds": round(float(ms[is_tail].sum()) / 1e3, 4),
            "by_size": self._by_size(ms),
        }

    def _by_size(self, milliseconds: np.ndarray) -> list[tuple[int, int, int, float]]:
        """(requests, tokens, steps, a pass's median in ms) of every size of a step that occurred often enough."""
        times: dict[tuple[int, int], list[float]] = {}
        sizes = zip(self.requests, self.tokens, strict=True)
        for size, ms, n in zip(sizes, milliseconds, self.passes, strict=False):
            times.setdefault(size, []).append(ms / n)
        return [
            (*size, len(ms), round(float(np.median(ms)), 3))
            for size, ms in sorted(times.items())
            if len(ms) >= ENOUGH_STEPS
        ]
