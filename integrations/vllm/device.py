"""Which requests the device drafter of a V2 engine serves, the history that it shares, and where its drafts go.

Nothing here waits for the device. A step is scheduled before the last one's tokens are known, so every request has the
same number of draft tokens, which `sub_steps.Steps` chooses. vLLM's adaptive verification cuts them by their
confidences where it can (`cutting.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.platforms import current_platform

from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters.device.drafter import DeviceDrafter, EndedRequest, token_bytes
from rollout_spec.history.problems import Problems
from rollout_spec.integrations.vllm.engine_history import EngineHistory
from rollout_spec.integrations.vllm.ranks import sharing_from_first_rank
from rollout_spec.integrations.vllm.requests import request_options
from rollout_spec.integrations.vllm.session import Session, end_of
from rollout_spec.stats import SpeculationStats

MAX_LIVE_SHARE = 0.005
"""Most of the device's memory that live requests' texts get, with features: some 12 million tokens on an H100, whose KV
cache holds little more than one million of a 7B model."""


class _LiveRequest(NamedTuple):
    """A request that has a place in the runner."""

    req_idx: int
    problem_id: int | None
    params: Any
    """Its `SamplingParams`."""


class DeviceSession(Session):
    """A `DeviceDrafter` and the requests that it serves.

    There is no budget of ours, as the host does not know the drafts. A request that ends while it is preempted leaves
    no rollout, as the runner has freed its text.

    Attributes: those of `Session`, and
        drafter: A `DeviceDrafter`. Its memory is allocated here, so level-2 sleep does not discard it, and vLLM counts
            it when it measures what is left for the KV cache.
        problems: Knows prompts only: outputs stay on the device.

    Args:
        runner: vLLM's V2 `GPUModelRunner`, whose slots the drafter's are.
    """

    def __init__(self, config: RolloutSpecConfig, runner: Any) -> None:
        vllm_config = runner.vllm_config
        self.stats, self._width = SpeculationStats(), config.max_draft_tokens + 1
        share = sharing_from_first_rank(vllm_config)
        memory = current_platform.get_device_total_memory()
        max_live_tokens = int(MAX_LIVE_SHARE * memory) // token_bytes(features=True)
        self.drafter = DeviceDrafter(
            max_requests=vllm_config.scheduler_config.max_num_seqs,
            max_model_len=vllm_config.model_config.max_model_len,
            device=runner.device,
            max_draft_tokens=config.max_draft_tokens,
            use_noise=config.verify == "sample",
            max_live_tokens=share(max_live_tokens) if share else max_live_tokens,
            **config.drafter_options,
        )
        self.problems = Problems(self.drafter.max_history_tokens)
        if config.history_dir is not None:
            self.engine_history = EngineHistory(config, vllm_config, self.drafter, self.problems, share)
        self.live = {}  # values are `_LiveRequest`
        self._runner = runner
        max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self._most_tokens: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        """By slot, an upper bound on how many tokens its request has once the last step's output is counted."""

    def close(self) -> None:
        """Waits for the device."""
        if self.engine_history is not None:
            try:
                self.finish_requests(list(self.live), ())  # the last step may have ended some
            finally:  # also after an error of the device
                super().close()

    def start_requests(self, requests: Iterable[Any]) -> None:
        requests = list(requests)
        self.finish_requests((), [request.req_id for request in requests])  # streaming sessions: prompts grow
        for request in requests:
            req_id, params = request.req_id, request.sampling_params
            prompt, problem_id = np.array(request.prompt_token_ids or (), np.int32), None
            if request.prompt_token_ids is not None:  # a prompt of embeddings has no history
                problem_id = self.begin_conversation(request, prompt).problem_id
            req_idx = self._runner.req_states.req_id_to_index[req_id]
            self.live[req_id] = _LiveRequest(req_idx, problem_id, params)
            self._most_tokens[req_idx] = self._runner.req_states.prefill_len.np[req_idx] + 1
            own_only = request_options(params.extra_args).own_only
            self.drafter.start_request(req_idx, prompt, problem_id=problem_id, own_only=own_only)

    def finish_requests(self, finished: Iterable[str], preempted: Iterable[str]) -> None:
        """Called before the runner frees their slots."""
        ended = []
        for req_ids, may_keep in ((finished, True), (preempted, False)):
            for req_id in sorted(self.live.keys() & req_ids):  # all ranks in the same order
                req_idx, problem_id, params = self.live.pop(req_id)
                keep = may_keep and request_options(params.extra_args).keep_in_history
                ended.append(EndedRequest(req_idx, int(self._most_tokens[req_idx]), keep=keep, **end_of(params)))
                if self.engine_history is not None:
                    self.engine_history.end_request(problem_id)
        if ended:
            self.drafter.stop_requests(ended)

    def reserve(self, slots: NDArray[np.integer], num_passes: int) -> None:
        """Give the requests of a batch room for what its step may sample, and for drafts.

        Args:
            slots: integer [B].
            num_passes: Forward passes of the step.
        """
        states, width = self._runner.req_states, self._width
        # vLLM's count on the host takes all drafts of the step before for accepted.
        computed = states.num_computed_tokens_np[slots] + num_passes * width
        self._most_tokens[slots] = most = np.maximum(computed, states.prefill_len.np[slots]) + 1
        self.drafter.reserve(slots, most + width)


class DraftTable(torch.Tensor):
    """vLLM's table of drafts by slot, int64 [R, K], which the device drafter's kernel writes, in the same memory.

    Each step vLLM writes the drafts that `propose` returns by the batch's slots, and gathers them again for grammars to
    check. Here the first does nothing for `WRITTEN`, and the second only what a step with grammars needs.

    Attributes:
        plain: The table as a tensor.
        is_checked: Whether a grammar will check this step's drafts.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    plain: torch.Tensor
    is_checked: Callable[[], bool]

    @classmethod
    def around(cls, table: torch.Tensor, is_checked: Callable[[], bool]) -> DraftTable:
        """The table of vLLM."""
        made: DraftTable = table.as_subclass(cls)
        made.plain, made.is_checked = table, is_checked
        return made

    def __setitem__(self, index: Any, value: Any) -> None:
        if value is not WRITTEN:
            self.plain[index] = value

    def __getitem__(self, index: Any) -> Any:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        if isinstance(rows, torch.Tensor) and not self.is_checked():
            return _Shape(rows.shape[0], self.plain.shape[1])[:, columns]
        return self.plain[index]


class _Shape:
    """In place of rows of drafts that nobody reads."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __getitem__(self, index: tuple[slice, slice]) -> _Shape:
        """Of some columns. From vLLM 0.33 on they are taken later than the rows."""
        return _Shape(self.shape[0], len(range(self.shape[1])[index[1]]))


WRITTEN = torch.empty(0, 0, dtype=torch.int64)
"""Stands for drafts that are in the table."""
