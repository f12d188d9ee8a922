"""The history that an engine has in common with other engines and with earlier runs, in a folder.

A thread reads and writes the folder's files, so that no decode step waits for one. The first tensor-parallel rank alone
has it; the others get from that rank what it has read, so that all ranks draft alike.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

from rollout_spec.config import RolloutSpecConfig
from rollout_spec.history.exchange import FolderThread
from rollout_spec.history.folder import HistoryFolder, Origin, fingerprint
from rollout_spec.history.problems import Problems
from rollout_spec.history.store import Rollout
from rollout_spec.integrations.vllm.ranks import is_first_rank

logger = logging.getLogger(__name__)

MAX_TOKENS_PER_STEP = 16_384
"""Take in at most this many tokens of other engines' rollouts per step, but at least one rollout: more would stall."""
STEPS_PER_SHARING = 16
"""Tensor-parallel ranks take over what the first rank has read once in this many steps."""
MAX_TOKENS_PER_SHARING = 65_536
LOADED_TOKENS = 2_000_000
"""Most tokens of the newest rollouts that an engine takes in when it starts."""
LONGEST_GENERATION = 600
"""Seconds after which a new request begins another generation, where an engine is never without any."""


class EngineHistory:
    """See the module's docstring.

    Args:
        drafter: Has `max_history_tokens`, its ended `rollouts`, and `add_rollouts`, as our drafters.
        problems: By what the engine recognises problems; learns the roots of rollouts that are taken in.
        share_from_first_rank: As for `HostSession`.
    """

    def __init__(
        self,
        config: RolloutSpecConfig,
        vllm_config: Any,
        drafter: Any,
        problems: Problems,
        share_from_first_rank: Callable[[Any], Any] | None,
    ) -> None:
        assert config.history_dir is not None
        self._drafter, self._problems, self._share = drafter, problems, share_from_first_rank
        self._live: Counter[int] = Counter()  # requests by problem
        self._num_steps = 0
        self._began = 0  # the generation that is under way, Unix time
        self._began_of: dict[int, int] = {}  # a problem's last generation, of this one and the one before
        self._thread: FolderThread | None = None
        if is_first_rank(vllm_config):
            origin = origin_of(vllm_config.model_config)
            folder = HistoryFolder(config.history_dir, origin, max_bytes=int(config.max_history_dir_bytes))
            self._thread = FolderThread(folder)
            self._pool = ThreadPool(1)  # whose thread does not keep a process from ending
            self._loading = self._pool.apply_async(folder.load, [min(drafter.max_history_tokens, LOADED_TOKENS)])

    def load(self) -> None:
        """Take in the newest rollouts. Called on all ranks once the engine is built; waits for the files."""
        rollouts: list[Rollout] = []
        if self._thread is not None:
            try:
                rollouts = self._loading.get()
            except Exception:  # must not keep an engine from starting
                logger.exception("history: what the folder holds could not be loaded; this run begins without it")
            self._pool.close()
        if self._share is not None:
            rollouts = self._share(rollouts)
        self._add(rollouts)
        self._drafter.rollouts.is_recording = True
        if self._thread is not None:
            self._thread.start()
            weakref.finalize(self, self._thread.close)  # where nobody calls `close`, as at the end of a script

    def begin_request(self, problem_id: int | None) -> None:
        """A request begins: what others have said of its problem is read now. Called before the drafter is told."""
        if self._thread is None or problem_id is None:
            return
        if not self._live or time.time() - self._began > LONGEST_GENERATION:
            last, self._began = self._began, int(time.time())
            self._began_of = {problem: began for problem, began in self._began_of.items() if began >= last}
        self._began_of[problem_id] = self._began
        self._live[problem_id] += 1
        if self._live[problem_id] == 1:
            self._thread.watch(problem_id, is_known=self._drafter.rollouts.knows(problem_id))

    def end_request(self, problem_id: int | None) -> None:
        """A request has ended."""
        if self._thread is None or problem_id is None:
            return
        self._live[problem_id] -= 1
        if self._live[problem_id] <= 0:
            del self._live[problem_id]
            self._thread.unwatch(problem_id)

    def end_requests(self) -> None:
        """No more is wanted: the drafter has raised."""
        for problem_id in list(self._live):
            self._live[problem_id] = 1
            self.end_request(problem_id)

    def exchange(self) -> None:
        """Hand over what has ended, and take in some of what has come. Called once per step; reads no file."""
        self._hand_over()
        self._num_steps += 1
        if self._share is None:
            self._add([] if self._thread is None else self._thread.take(MAX_TOKENS_PER_STEP))
        elif self._num_steps % STEPS_PER_SHARING == 0:
            self._add(self._share([] if self._thread is None else self._thread.take(MAX_TOKENS_PER_SHARING)))

    def stats(self) -> dict[str, float]:
        """What went through the folder, on the first rank; empty elsewhere."""
        return self._thread.stats() if self._thread is not None else {}

    def close(self) -> None:
        """Write what has ended, and stop. Called when the worker shuts down; a second call does nothing."""
        if self._thread is not None and not self._thread.is_closed:
            try:
                self._hand_over(wait=True)
            finally:
                self._thread.close()

    def _hand_over(self, *, wait: bool = False) -> None:
        recorded = self._drafter.rollouts.take_recorded(wait=wait)
        if self._thread is not None and recorded:
            self._thread.add(list(map(self._described, recorded)))  # at once, or the thread writes a part of a group

    def _described(self, rollout: Rollout) -> Rollout:
        """A rollout with its conversation's root and the time at which its generation began."""
        order = self._began_of.get(rollout.problem_id, self._began)
        return rollout._replace(root=self._problems.root_of(rollout.problem_id), order=order)

    def _add(self, rollouts: Sequence[Rollout]) -> None:
        if rollouts:
            self._drafter.add_rollouts(rollouts)
        for rollout in rollouts:
            if rollout.root is not None:
                self._problems.add_root(rollout.problem_id, rollout.root)


def origin_of(model_config: Any) -> Origin:
    """What an engine's rollouts come from, by vLLM's `ModelConfig`."""
    text = model_config.hf_text_config
    size, layers = model_config.get_hidden_size(), getattr(text, "num_hidden_layers", None)
    states = f"{text.model_type}, {layers} layers of {size}"
    tokenizer = None
    if not model_config.skip_tokenizer_init:
        from vllm.tokenizers import cached_tokenizer_from_config

        try:
            tokenizer = fingerprint(cached_tokenizer_from_config(model_config).get_vocab())
        except Exception as error:  # whatever a tokenizer's own code raises
            logger.warning("history: without the tokenizer files are not checked for it: %s", error)
    return Origin(tokenizer, model_config.get_vocab_size(), model_config.model, states)
