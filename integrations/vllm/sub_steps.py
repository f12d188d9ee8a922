"""Several forward passes for one step of vLLM's scheduler, for which the host schedules once: the scheduler's part.

V2's model runner keeps all that changes from step to step on the device: how far requests are, their last tokens, their
drafts. So where nothing but decoding happens a step can be repeated there before the host hears of its tokens
(`further_passes.py`). Here such a step is lengthened: each request gets blocks and placeholders for n passes of K + 1
tokens. The scheduler takes back what was not sampled, as it does with rejected drafts, so its accounts stay right. It
is done after the step has been scheduled, so n passes need no token budget and preempt nobody.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rollout_spec.integrations.vllm import compat
from rollout_spec.num_passes import NumPasses
from rollout_spec.schedule import Schedule

STEP, COUNTS = "rollout_spec_step", "rollout_spec_counts"
"""What we add to vLLM's `SchedulerOutput`, a `Step`, and to the `ModelRunnerOutput` of several passes: integer [n, B],
how many tokens each pass has sampled."""


class Step(NamedTuple):
    """A step of the scheduler."""

    num_passes: int
    num_draft_tokens: int
    """K, of each request in each pass; the most if they differ."""
    num_next_drafts: int
    """K of the drafts that its last pass makes."""
    began: float
    """When it was scheduled, seconds of this process's clock."""
    is_trial: bool
    """Whether its number of passes is being tried."""


def num_passes(scheduled: Any) -> int:
    """n of vLLM's `SchedulerOutput`."""
    step = getattr(scheduled, STEP, None)
    return 1 if step is None else step.num_passes


def first_pass(scheduled: Any) -> Any:
    """What vLLM's scheduler would say of a step's first pass if that were the step: `scheduled` itself if it is."""
    n, tokens = num_passes(scheduled), scheduled.num_scheduled_tokens
    if n == 1:
        return scheduled
    width = scheduled.total_num_scheduled_tokens // (n * len(tokens))
    return dataclasses.replace(
        scheduled,
        num_scheduled_tokens=dict.fromkeys(tokens, width),
        total_num_scheduled_tokens=len(tokens) * width,
        scheduled_spec_decode_tokens=dict.fromkeys(tokens, [-1] * (width - 1)) if width > 1 else {},
        num_spec_tokens_to_schedule=width - 1,  # what is drafted for the next pass
    )


class Steps:
    """Lengthens the steps of one scheduler, and learns from what they take and sample.

    Args:
        scheduler: vLLM's `AsyncScheduler`.
        most: Most passes that the workers can run; 1 where steps are only learned from.
        sub_steps: Of the configuration: the number of passes, or None.
        has_clock: False where the ranks of an engine have a scheduler each and no common clock.
        chooses_k: Whether we choose K. It is the most where drafts are cut and steps have several passes, otherwise
            as `Schedule` says.

    Attributes:
        may_repeat: Whether steps may have several passes now.
    """

    def __init__(self, scheduler: Any, most: int, sub_steps: int | None, *, has_clock: bool, chooses_k: bool) -> None:
        self.may_repeat, self._chooses_k, self._is_enabled = True, chooses_k, True
        self._schedule: Schedule | None = None
        speculative = scheduler.vllm_config.speculative_config
        if chooses_k and (most == 1 or not compat.verifies_adaptively(speculative)):
            self._schedule = Schedule(speculative.num_speculative_tokens)
        self._scheduler, self._most, self._sub_steps, self._has_clock = scheduler, most, sub_steps, has_clock
        self._chooser = NumPasses(most)
        # Steps that were scheduled and have not been heard of. Some never are, after a fault.
        self._ahead: deque[Step] = deque(maxlen=4)
        self._last: Step | None = None  # that was heard of
        self._last_update = 0.0
        self._outcome: tuple[int, list[list[int]], dict[str, int]] | None = None
        """Of a step of several passes whose output is read: K, tokens by request and pass, the requests' places."""

    def set_enabled(self, enabled: bool, may_repeat: bool = True) -> None:
        """As the command of this name."""
        self.may_repeat, self._is_enabled = may_repeat, enabled

    def lengthen(self, scheduled: Any) -> None:
        """Give a step the passes, and the drafts for the next one, that it shall have. Called before vLLM counts them.

        Args:
            scheduled: vLLM's `SchedulerOutput`, changed.
        """
        tokens, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        if not tokens:
            return
        scheduled.num_spec_tokens_to_schedule = self._num_next_drafts(len(tokens), scheduled)
        k, n, is_trial = max(map(len, drafts.values()), default=0), 1, False
        if self.may_repeat and self._most > 1 and self._only_decodes(scheduled, k):
            requests = [self._scheduler.requests[req_id] for req_id in tokens]
            n = min(self._choose(len(tokens), k > 0), self._most_useful(requests, k + 1))
            is_trial = self._chooser.is_trial
            if n > 1 and not self._give_blocks(requests, scheduled.scheduled_cached_reqs, n, k + 1):
                n = 1
        if n > 1:
            tokens.update(dict.fromkeys(tokens, n * (k + 1)))
            drafts.update(dict.fromkeys(tokens, [-1] * (n * (k + 1) - 1)))
            scheduled.total_num_scheduled_tokens *= n
        step = Step(n, k, scheduled.num_spec_tokens_to_schedule, time.perf_counter(), is_trial)
        self._ahead.append(step)
        setattr(scheduled, STEP, step)

    def _num_next_drafts(self, num_requests: int, scheduled: Any) -> int:
        """K of the drafts that the step makes, of which vLLM has put in the most."""
        most = int(scheduled.num_spec_tokens_to_schedule)
        if self._chooses_k and not self._is_enabled:
            return 0
        return most if self._schedule is None else self._schedule.choose(num_requests, most)

    def _choose(self, num_requests: int, has_drafts: bool) -> int:
        if self._sub_steps is not None:
            return min(self._sub_steps, self._most)
        if not self._has_clock:
            return 2 if has_drafts else 1
        return self._chooser.choose(num_requests, has_drafts)

    def _only_decodes(self, scheduled: Any, k: int) -> bool:
        """Whether each request of a step has one token and K draft tokens, and is of a kind that can be repeated."""
        tokens, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        if scheduled.scheduled_new_reqs or scheduled.scheduled_cached_reqs.resumed_req_ids:
            return False
        if set(tokens.values()) != {k + 1} or (k > 0 and {len(drafts.get(req_id, ())) for req_id in tokens} != {k}):
            return False
        requests = map(self._scheduler.requests.__getitem__, tokens)
        return not any(r.is_prefill_chunk or r.use_structured_output or r.resumable for r in requests)

    def _most_useful(self, requests: list[Any], width: int) -> int:
        """Passes until each request has reached its `max_tokens`, or one of them `max_model_len`.

        A request in flight has got at least one token in each pass of the step before.
        """
        before = self._ahead[-1].num_passes if self._ahead else 1
        left = max(r.max_tokens - r.num_output_tokens - before * (r.num_output_placeholders > 0) for r in requests)
        longest = max(r.num_computed_tokens for r in requests)
        return max(1, min(left, (self._scheduler.max_model_len - 1 - longest) // width))

    def _give_blocks(self, requests: list[Any], cached: Any, n: int, width: int) -> bool:
        """Give each request blocks for n passes, and say so; nobody gets any if there is no room.

        Nor if none is left for one pass of the step that is scheduled while this one runs: vLLM takes all of this one's
        drafts for accepted until it hears of them, and would preempt a request.

        Args:
            cached: vLLM's `CachedRequestData` of these requests, in their order; changed.
            width: Tokens of a request in a pass.
        """
        manager, ahead = self._scheduler.kv_cache_manager, self._scheduler.num_lookahead_tokens
        short, num_missing = set(), 0
        for group in manager.coordinator.single_type_managers:
            for i, request in enumerate(requests):
                num_tokens, held = request.num_computed_tokens + ahead, len(group.req_to_blocks[request.request_id])
                num_missing += max(0, -(-(num_tokens + (n + 1) * width) // group.block_size) - held)
                if num_tokens + n * width > held * group.block_size:
                    short.add(i)
        if num_missing > manager.block_pool.get_num_free_blocks():
            return False
        for i in sorted(short):
            more = manager.allocate_slots(requests[i], n * width, num_lookahead_tokens=ahead)
            if more is None:
                return False
            if (ids := more.get_block_ids(allow_none=True)) is not None:
                known = cached.new_block_ids[i]
                both = ids if known is None else tuple(a + b for a, b in zip(known, ids, strict=True))
                cached.new_block_ids[i] = both
        return True

    def observe(self, scheduled: Any, output: Any) -> None:
        """Learn from a step. Called before vLLM's scheduler hears of it.

        Args:
            scheduled, output: vLLM's `SchedulerOutput` and `ModelRunnerOutput`.
        """
        self._outcome, step = None, getattr(scheduled, STEP, None)
        if step is None:
            return
        n, k = step.num_passes, step.num_draft_tokens
        if n > 1:
            self._outcome = k, getattr(output, COUNTS).T.tolist(), output.req_id_to_index
        seconds = self._seconds_of(step)
        if seconds is None:
            return
        names = output.req_id_to_index if output.sampled_token_ids else {}  # in the order of the batch
        if n > 1:
            drafted, counts = np.full((n, len(names)), k), getattr(output, COUNTS)
        else:
            drafts = scheduled.scheduled_spec_decode_tokens
            drafted = np.array([[len(drafts.get(name, ())) for name in names]], np.int64)
            counts = np.array([list(map(len, output.sampled_token_ids or ()))], np.int64)
        has_prompts = scheduled.total_num_scheduled_tokens != drafted.size + int(drafted.sum())
        if self._schedule is not None:
            of_pass = None if has_prompts or step.is_trial else seconds / n
            for drafted_in, sampled in zip(drafted, counts, strict=True):
                self._schedule.observe(drafted_in[sampled > 0], sampled[sampled > 0] - 1, of_pass)
        if not has_prompts:
            self._chooser.observe(len(names), k > 0, n, seconds)

    def _seconds_of(self, step: Step) -> float | None:
        """Seconds of an ended step; None unless its neighbours have as many passes and drafts.

        The host works on them meanwhile. Right after a pause vLLM still cuts drafts by what paid before it.
        """
        while self._ahead and self._ahead.popleft() is not step:
            pass
        now, last = time.perf_counter(), self._last
        seconds, self._last_update, self._last = now - max(step.began, self._last_update), now, step
        if last is None:
            return None
        later = step, *self._ahead
        ks = {last.num_draft_tokens, *(other.num_next_drafts for other in later)}
        is_steady = ks == {step.num_draft_tokens}
        return seconds if is_steady and {other.num_passes for other in (last, *later)} == {step.num_passes} else None

    def count_drafts(self, count: Callable[..., Any], stats: Any, **of_request: Any) -> Any:
        """Call vLLM's `make_spec_decoding_stats` once per pass: its statistics by position are those of one."""
        if self._outcome is None or not self._scheduler.log_stats:
            return count(stats, **of_request)
        k, counts, places = self._outcome
        if k:
            for num_sampled in counts[places[of_request["request_id"]]]:
                of_request["num_draft_tokens"], of_request["num_accepted_tokens"] = k, num_sampled - 1
                stats = count(stats, **of_request)
        return stats
