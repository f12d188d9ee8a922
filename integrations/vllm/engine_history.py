"""Joins an engine's drafter to a folder of history: what ends here is written, what ended elsewhere is drafted from."""

from __future__ import annotations

import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from numpy.typing import NDArray

from rollout_spec.config import RolloutSpecConfig
from rollout_spec.history.folder import HistoryFolder, pop_first
from rollout_spec.history.rollout import Rollout, Root
from rollout_spec.history.roots import Roots
from rollout_spec.history.shards import Origin
from rollout_spec.history.text import fingerprint, text_key
from rollout_spec.integrations.vllm.ranks import is_first_rank
from rollout_spec.types import Int32Array

logger = logging.getLogger(__name__)

MAX_TOKENS_PER_STEP = 4096
"""So many tokens of other engines' rollouts are taken in by a step where few wait, but at least one rollout."""
STEPS_TO_TAKE = 64
"""Where many wait, as when a batch of new problems begins, a step takes one part in so many of them."""
SAMPLED_TOKENS = 2_000_000
"""Most tokens of some problems' rollouts that an engine takes in when it starts."""
STEPS_PER_FORGETTING = 1024
"""How often the folder is told of which problems nothing is left."""
STEPS_PER_SHARING = 16
"""Tensor-parallel ranks take over what the first rank has read once in this many steps."""


class HistoryKeeper(Protocol):
    """What a drafter needs for its history to last and to be shared."""

    max_history_tokens: int
    """Most tokens that it keeps."""

    def record_rollouts(self) -> None:
        """From now on remember rollouts that end and stay in the history, for `take_recorded`."""

    def take_recorded(self, *, wait: bool = False) -> list[Rollout]:
        """Those since the last call; `wait`: also those that are still being copied from the device."""

    def add_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """Put rollouts into the history that ended elsewhere or earlier."""

    def knows(self, problem_id: int) -> bool:
        """Whether there is any history of a problem, or a request of it is live."""

    def begin_policy_version(self, version: int) -> None:
        """Announce that requests started from now on are sampled by a new policy."""

    def learned(self) -> dict[str, NDArray]:
        """What outcomes have taught so far, by name."""

    def learn(self, learned: Mapping[str, NDArray]) -> None:
        """Go on from what an earlier drafter has learned."""


class EngineHistory:
    """The history that an engine has in common with others and with earlier runs.

    The first rank alone reads and writes; the others get from it what it has read, so that all ranks draft alike.

    Args:
        roots: By what the engine recognises problems; learns those of rollouts that are taken in.
        share_from_first_rank: As for `DraftingSession`.
    """

    def __init__(
        self,
        config: RolloutSpecConfig,
        vllm_config: Any,
        drafter: HistoryKeeper,
        roots: Roots,
        share_from_first_rank: Callable[[Any], Any] | None,
    ) -> None:
        assert config.history_dir is not None
        self._version = 0
        self._drafter = drafter
        self._roots = roots
        self._model_config = vllm_config.model_config
        self._known_by_text: set[int] = set()  # ids of problems
        self._recorded: list[Rollout] = []
        self._share = share_from_first_rank
        self._queue: deque[Rollout] = deque()  # to be taken in by the next steps
        self._live: Counter[int] = Counter()  # requests by problem
        self._per_step = 0  # tokens of it that the next steps take in
        self._num_steps = 0
        self._is_closed = False
        self._folder: HistoryFolder | None = None
        self._loading: Future[list[Rollout]] | None = None
        if is_first_rank(vllm_config):
            origin = origin_of(vllm_config.model_config)
            self._folder = HistoryFolder(
                config.history_dir,
                origin,
                max_bytes=config.max_history_dir_bytes,
                features=config.history_dir_features,
            )
            executor = ThreadPoolExecutor(1, "rollout_spec history")
            max_tokens = min(drafter.max_history_tokens, SAMPLED_TOKENS)
            self._loading = executor.submit(self._folder.load, max_tokens)
            executor.shutdown(wait=False)

    def load(self) -> int:
        """Take in some of what the folder holds. Called on all ranks once the engine is built; waits for the files.

        Returns:
            The policy version to go on from.
        """
        rollouts: list[Rollout] = []
        learned: dict[str, NDArray] = {}
        if self._folder is not None and self._loading is not None:
            try:
                rollouts, learned = self._loading.result(), self._folder.load_learned()
            except Exception:  # must not keep an engine from starting
                logger.exception("history: what the folder holds could not be loaded; this run begins without it")
            self._version, self._known_by_text = self._folder.newest_version, self._folder.by_text
            self._loading = None
        if self._share is not None:
            shared = self._share((rollouts, learned, self._version, self._known_by_text))
            rollouts, learned, self._version, self._known_by_text = shared
        self._drafter.begin_policy_version(self._version)
        self._add(rollouts)
        self._drafter.learn(learned)
        self._drafter.record_rollouts()
        if self._folder is not None:
            self._folder.start()
            weakref.finalize(self, self._folder.close)  # where nobody calls `close`, as at the end of a script
        return self._version

    def begin_policy_version(self, version: int) -> None:
        """The drafter has been told of a new version."""
        self._version = version
        if self._folder is not None:
            self._folder.keep_learned(self._drafter.learned(), version)

    def begin_request(self, problem_id: int | None) -> None:
        """A request begins: what others have said of its problem is read now. Called before the drafter is told."""
        if self._folder is None or problem_id is None:
            return
        self._live[problem_id] += 1
        if self._live[problem_id] == 1:
            self._folder.watch(problem_id, is_known=self._drafter.knows(problem_id))

    def end_request(self, problem_id: int | None) -> None:
        """A request has ended."""
        if self._folder is None or problem_id is None:
            return
        self._live[problem_id] -= 1
        if self._live[problem_id] <= 0:
            del self._live[problem_id]
            self._folder.unwatch(problem_id)

    def end_requests(self) -> None:
        """No more is wanted: the drafter has raised."""
        self._live.clear()
        if self._folder is not None:
            self._folder.unwatch_all()

    def exchange(self) -> None:
        """Hand over what has ended, and take in some of what has come. Called once per step; reads no file."""
        self._hand_over()
        self._num_steps += 1
        if self._share is None:
            steps = 1
        else:
            steps = STEPS_PER_SHARING if self._num_steps % STEPS_PER_SHARING == 0 else 0
        if steps and not self._queue:
            received: list[Rollout] = []
            if self._folder is not None:
                per_step = max(MAX_TOKENS_PER_STEP, self._folder.num_waiting_tokens // STEPS_TO_TAKE)
                received = self._folder.take(steps * per_step)
            if self._share is not None:
                received = self._share(received)
            self._queue.extend(received)
            self._per_step = -(-sum(rollout.num_tokens for rollout in received) // steps)
        if self._queue:
            self._add(pop_first(self._queue, max(self._per_step, MAX_TOKENS_PER_STEP)))
        if self._folder is not None and self._num_steps % STEPS_PER_FORGETTING == 0:
            self._folder.keep_only(self._drafter.knows)

    def record(self, root: Root | None) -> None:
        """Note the prompt of what has been recorded since the last call. Others get the root of their problem."""
        self._recorded += [rollout._replace(root=root) for rollout in self._drafter.take_recorded()]

    def _hand_over(self, *, wait: bool = False) -> None:
        try:
            for rollout in self._drafter.take_recorded(wait=wait):
                self._recorded.append(rollout._replace(root=self._roots.root_of(rollout.problem_id)))
        finally:  # the drafter may be a user's own
            recorded, self._recorded = self._recorded, []
            if self._folder is not None and recorded:
                self._folder.add(recorded)

    def _add(self, rollouts: Sequence[Rollout]) -> None:
        self._drafter.add_rollouts(rollouts)
        for rollout in rollouts:
            if rollout.root is not None:
                self._roots.add_root(rollout.problem_id, rollout.root)

    def problem_by_text(self, prompt_token_ids: Int32Array) -> int | None:
        """The problem of a prompt of which history has recordings as text; None if it has none. O(prompt).

        Raises:
            Exception: what the tokenizer's own code raises, under tensor parallelism: the ranks must agree.
        """
        if not self._known_by_text:
            return None
        try:
            problem_id = text_key(_tokenizer(self._model_config), prompt_token_ids)
        except Exception as error:
            if self._share is not None:
                raise
            logger.warning("history: recordings of text are not used, as there is no tokenizer here: %s", error)
            self._known_by_text = set()
            return None
        return problem_id if problem_id in self._known_by_text else None

    def stats(self) -> dict[str, float]:
        """`FolderStats` of the first rank; empty elsewhere."""
        return self._folder.stats.to_dict() if self._folder is not None else {}

    def close(self) -> None:
        """Write what has ended, and stop. Called when the worker shuts down; a second call does nothing."""
        if self._folder is not None and not self._is_closed:
            self._is_closed = True
            try:
                self._hand_over(wait=True)
                self._folder.keep_learned(self._drafter.learned(), self._version)
            finally:
                self._folder.close()


def origin_of(model_config: Any) -> Origin:
    """What an engine's rollouts come from, by vLLM's `ModelConfig`."""
    text = model_config.hf_text_config
    size, layers = model_config.get_hidden_size(), getattr(text, "num_hidden_layers", None)
    states = f"{text.model_type}, {layers} layers of {size}"
    return Origin(_fingerprint(model_config), model_config.get_vocab_size(), model_config.model, states)


def _fingerprint(model_config: Any) -> str | None:
    """Of the tokenizer's vocabulary; None where this process cannot load one."""
    if model_config.skip_tokenizer_init:
        return None
    try:
        vocabulary = _tokenizer(model_config).get_vocab()
    except Exception as error:  # whatever a tokenizer's own code raises
        logger.warning("history: the tokenizer cannot be loaded here, so shards are not checked for it: %s", error)
        return None
    return fingerprint(vocabulary)


def _tokenizer(model_config: Any) -> Any:
    """The engine's. Raises whatever its own code raises."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config)
