"""Rollouts that logs have more than once.

TRL's `log_completions` writes the last generation again at each logged step, so with `num_iterations=2` each rollout
stands in two files, under two steps. Logs may also overlap, or be named twice. A copy would pass for an earlier epoch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from rollout_spec.types import Int32Array


class Copies:
    """Finds the groups of a step that are copies of an earlier step's.

    A group is what one step of one log has of a prompt. It is a copy if an earlier step has all of its texts, and the
    same holds for every other prompt that both have: more than half of those that the smaller of the two has. Less is
    no sign of a copy: short answers repeat in truth, alone or as whole groups, and there drafts gain most.

    Attributes:
        num_dropped: Rollouts that were copies, so far.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._steps: list[dict[int, Counter[int]]] = []  # of each prompt how often it has a text, by the text's hash
        self._steps_with: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # by prompt and one of its texts

    def find(self, step: Mapping[int, Sequence[Int32Array]]) -> set[int]:
        """Whose groups are copies, by problem_id. Called for the earliest step first. O(tokens).

        Args:
            step: int32 [n] of each rollout, by problem_id.
        """
        groups = {problem: Counter(hash(text.tobytes()) for text in group) for problem, group in step.items()}
        copied: set[int] = set()
        for number in {n for problem, group in groups.items() for n in self._steps_with[problem, min(group)]}:
            earlier = self._steps[number]
            common = groups.keys() & earlier.keys()
            is_most = 2 * len(common) > min(len(groups), len(earlier))
            if is_most and all(groups[problem] <= earlier[problem] for problem in common):
                copied |= common
        for problem in groups.keys() - copied:
            for text in groups[problem]:
                self._steps_with[problem, text].append(len(self._steps))
        self._steps.append({problem: groups[problem] for problem in groups.keys() - copied})
        self.num_dropped += sum(len(step[problem]) for problem in copied)
        return copied
