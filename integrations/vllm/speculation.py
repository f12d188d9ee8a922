"""What an engine's adapter and commands ask of whatever drafts from history, on the host or on the device."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rollout_spec.budget.decide import Budget
from rollout_spec.history.problems import Conversation, Problems
from rollout_spec.integrations.vllm.engine_history import EngineHistory
from rollout_spec.integrations.vllm.request_options import request_options
from rollout_spec.types import Int32Array

logger = logging.getLogger(__name__)

MODEL = "model"
"""The model's drafts, among the sources of drafted tokens."""
WRONG_TOKENS = 200
"""A model drafter of whose last tokens so many were judged, and none was right, has not the weights that it should."""


class Speculation:
    """A drafter from history, what chooses between its drafts and a model's, and the folder that keeps its history.

    Attributes:
        drafter: From history.
        choice: Chooses between its drafts and those of a model; None where there is no model.
        problems: By what the problems of requests are recognised.
        engine_history: Keeps history beyond this engine; None without `history_dir`.
        budget: Decides how much of each draft is verified. None: all of it.
        num_speculative_tokens: K, the most tokens drafted per request and step.
        enabled: Whether anything is drafted.
    """

    drafter: Any
    choice: Any = None
    problems: Problems
    engine_history: EngineHistory | None = None
    budget: Budget | None = None
    num_speculative_tokens: int
    enabled: bool = True
    _has_lost_model = False

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Call the drafter; None if it cannot answer."""
        return call()

    def set_enabled(self, enabled: bool) -> None:
        """Draft from now on, or no longer."""
        self.enabled = bool(enabled)

    def begin_policy_version(self, version: int) -> None:
        """Tell whatever learns that weights have changed."""
        if self.choice is not None:
            self.check_model()
            self.choice.begin_policy_version()
        self._ask(lambda: self.drafter.begin_policy_version(version))

    def check_model(self) -> None:
        """Say once if nothing is right that a model drafts: its drafts cost time, and no rollout shows it.

        What was right long ago counts less and less, so a loss in the middle of a run is said many policy versions
        later. Waits for the device.
        """
        if self.choice is None or self._has_lost_model:
            return
        reached, right = self.choice.model_counts()
        if reached >= WRONG_TOKENS and right == 0:
            self._has_lost_model = True
            logger.error(
                "no token that the model drafter drafts is right, so it has lost its weights, or has those of another "
                "model: vLLM discards them at sleep level 2 and does not load them again (vllm-project/vllm#52479). "
                "Use llm.sleep(level=1), load the drafter's weights after waking up, or leave speculative_config out"
            )

    def end_missing(self, requests: Mapping[str, Any]) -> None:
        """End the requests that vLLM no longer has; of some ends only the next step would tell.

        Args:
            requests: vLLM's, by id.
        """

    def num_live_requests(self) -> int:
        """Requests that have not ended, as far as is known."""
        raise NotImplementedError

    def memory_bytes(self) -> int:
        """Bytes that the drafter holds; 0 if it does not say."""
        memory_bytes = getattr(self.drafter, "memory_bytes", lambda: 0)
        return self._ask(lambda: int(memory_bytes() or 0)) or 0

    def source_counts(self) -> dict[str, list[int]]:
        """By source, [drafted tokens that the target reached, those that were right]; empty if it has no sources."""

        def counts() -> dict[str, list[int]]:
            named = self.drafter.source_counts() if hasattr(self.drafter, "source_counts") else {}
            return {str(key): [int(value) for value in values] for key, values in (named or {}).items()}

        model = {} if self.choice is None else {MODEL: list(self.choice.model_counts())}
        return {**(self._ask(counts) or {}), **model}

    def history_summary(self) -> dict[str, int]:
        """What the drafter's history holds; empty if it does not say."""

        def summary() -> dict[str, int]:
            named = self.drafter.history_summary() if hasattr(self.drafter, "history_summary") else {}
            return {str(key): int(value) for key, value in named.items()}

        return self._ask(summary) or {}

    def begin_conversation(self, request: Any, prompt_token_ids: Int32Array) -> Conversation:
        """Find a new request's problem; what others have said of it is read from now on.

        Conversations with different LoRA adapters or images are different. An adapter's versions are one adapter, as
        those of a policy are one policy. A request that is drafted from its own text alone has no problem.

        Args:
            prompt_token_ids: int32 [n], the request's.

        Raises:
            ValueError: the request's own options are wrong.
        """
        extra_args = request.sampling_params.extra_args
        options = request_options(extra_args)
        if options.own_only:
            return Conversation(None, length=len(prompt_token_ids))
        given = options.problem_id
        # TRL's AsyncGRPO publishes each version of its adapter under a name of its own, which ends in -v and a number.
        adapter = "" if request.lora_request is None else re.sub(r"-v\d+$", "", request.lora_request.lora_name)
        told_apart = given, adapter if given is None else ""
        images = [(int(image.mm_position.offset), str(image.identifier)) for image in request.mm_features or ()]
        model = "" if told_apart == (None, "") else repr(told_apart)
        conversation = self.problems.start(prompt_token_ids, model=model, images=images)
        if given is not None:
            conversation = conversation._replace(problem_id=given)
        if self.engine_history is not None:
            self.engine_history.begin_request(conversation.problem_id)
        return conversation

    def expect(self, requests: Iterable[Any]) -> None:
        """Requests are scheduled for the first time: their prompts are read now, and their problems' history can be.

        Args:
            requests: vLLM's `NewRequestData`.
        """

    def exchange_history(self) -> None:
        """Hand over what has ended and take in what ended elsewhere. Called while the device computes."""
        if self.engine_history is not None:
            self._ask(self.engine_history.exchange)

    def close(self) -> None:
        """The engine ends: write what has ended."""
        if self.engine_history is not None:
            self.engine_history.close()
