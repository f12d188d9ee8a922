"""Ended rollouts: what is kept of one, which of them a drafter's history holds, and which its folder has yet to get."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from rollout_spec.features import Features, check_features
from rollout_spec.types import Int32Array

CONTEXT_TOKENS = 32
"""Last tokens of a prompt that are kept with its rollouts: drafters compare contexts of at most so many tokens."""
FIRST_TIME = 10**9
"""Of `Rollout.order`: no Unix time is lower, and no step of a log as high, so what is imported is the oldest."""


class Root(NamedTuple):
    """By what a prompt is recognised at the beginning of a later one; see `rollout_spec.history.problems`."""

    length: int
    """Its tokens."""
    whole: int
    """Hash of all of them, 64 bits."""


class Rollout(NamedTuple):
    """An ended rollout."""

    problem_id: int
    """Rollouts of the same problem have the same number, 64 bits."""
    context: Int32Array
    """int32 [at most CONTEXT_TOKENS]: the end of its prompt."""
    tokens: Int32Array
    """int32 [n]: what was sampled."""
    features: Features | None = None
    """int64 [n, FEATURE_WORDS], what the target saw at each token; None: not known."""
    root: Root | None = None
    """The prompt that its conversation begins with; None: the caller has named the problem, or it is not known."""
    order: int = 0
    """Rollouts of a higher one are newer. Of an engine: the Unix time at which its generation began. Below FIRST_TIME:
    of an import, the log's step; or of rollout_spec 0.3, which counted policy versions."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it takes in a history."""
        return self.context.size + self.tokens.size


class EndedRollout(Protocol):
    """A drafter's entry for an ended rollout, whose text is where the drafter keeps it, or on its way to the host."""

    problem_id: int

    @property
    def num_sampled(self) -> int:
        """Tokens without those of the prompt; 0 until it has arrived."""

    def arrive(self, *, wait: bool) -> bool:
        """Whether its text is on the host, after waiting for it if `wait`."""

    def read(self) -> Rollout:
        """The rollout, from its arrival until the entry is dropped."""


Entry = TypeVar("Entry", bound=EndedRollout)


class RolloutStore(Generic[Entry]):
    """The ended rollouts of a drafter's history, by age and by problem, and what is recorded of them.

    Attributes:
        by_age: The rollouts, the oldest first.
        is_recording: Whether copies of rollouts that arrive are kept for `take_recorded`.
        num_held: By problem, the live requests, and the rollouts that a device has beside their entries here.
    """

    def __init__(self) -> None:
        self.by_age: deque[Entry] = deque()
        self.is_recording = False
        self.num_held: Counter[int] = Counter()
        self._by_problem: dict[int, deque[Entry]] = {}
        self._arriving: deque[Entry] = deque()
        self._recorded: list[Rollout] = []
        self._num_requests = self._num_known_requests = 0

    def begin_request(self, problem_id: int) -> None:
        """A request of a problem begins."""
        self._num_requests += 1
        self._num_known_requests += self.knows(problem_id)
        self.hold(problem_id)

    def hold(self, problem_id: int) -> None:
        """A request begins, or the device gets a rollout: the problem is known until `release`, if not longer."""
        self.num_held[problem_id] += 1

    def release(self, problem_id: int) -> None:
        """The request has ended, or the rollout has left the device."""
        self.num_held[problem_id] -= 1
        if not self.num_held[problem_id]:
            del self.num_held[problem_id]

    def knows(self, problem_id: int) -> bool:
        """Whether there is any history of a problem, or a request of it is live."""
        return problem_id in self._by_problem or problem_id in self.num_held

    def of_problem(self, problem_id: int) -> Iterable[Entry]:
        """A problem's rollouts, the oldest first."""
        return self._by_problem.get(problem_id, ())

    def add(self, rollout: Entry, *, record: bool) -> None:
        """Keep a rollout as the newest. `record`: it did not come from elsewhere, and others may have it."""
        self.by_age.append(rollout)
        self._by_problem.setdefault(rollout.problem_id, deque()).append(rollout)
        if record:
            self._arriving.append(rollout)
            self.take_arrived()

    def drop_oldest(self) -> Entry:
        """Take out the oldest rollout. If it is still arriving, it will be recorded all the same."""
        oldest = self.by_age.popleft()
        of_problem = self._by_problem[oldest.problem_id]
        of_problem.popleft()
        if not of_problem:
            del self._by_problem[oldest.problem_id]
        return oldest

    def take_arrived(self, *, wait: bool = False) -> None:
        """Record the rollouts that have arrived, in the order in which they ended. `wait`: all of them."""
        while self._arriving and self._arriving[0].arrive(wait=wait):
            rollout = self._arriving.popleft()
            if self.is_recording and rollout.num_sampled:
                self._recorded.append(rollout.read())

    def take_recorded(self, *, wait: bool = False) -> list[Rollout]:
        """What has been recorded since the last call. `wait`: also the rollouts that are still arriving."""
        self.take_arrived(wait=wait)
        recorded, self._recorded = self._recorded, []
        return recorded

    def summary(self) -> dict[str, int]:
        """What it holds, and how many requests found their problem known when they began. Waits for arrivals."""
        self.take_arrived(wait=True)
        return {
            "problems": len(self._by_problem),
            "rollouts": len(self.by_age),
            "tokens": sum(rollout.num_sampled for rollout in self.by_age),
            "requests": self._num_requests,
            "requests_with_history": self._num_known_requests,
        }


def check_rollouts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Those that say anything of rollouts that come from elsewhere.

    Raises:
        ValueError: a token is negative, or features have another shape than their tokens need.
    """
    for rollout in rollouts:
        if min(rollout.context.min(initial=0), rollout.tokens.min(initial=0)) < 0:
            raise ValueError(f"tokens of a rollout of problem {rollout.problem_id} must not be negative")
        if rollout.features is not None:
            check_features(rollout.features, rollout.tokens.size)
    return [rollout for rollout in rollouts if rollout.tokens.size]
