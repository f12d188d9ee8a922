"""The replay of conversations gives a drafter each turn's prompt and output as they were recorded."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.drafting import bench_turns
from rollout_spec.history.roots import Roots
from rollout_spec.replay.traces import Problem, Rollout
from rollout_spec.types import Draft

PROMPT = np.arange(100, 120, dtype=np.int32)


class Listener:
    """Keeps what requests are made of, and drafts two tokens that are right or wrong."""

    def __init__(self):
        self.ended, self._live = [], {}

    def start_request(self, req_id, prompt_token_ids, *, problem_id):
        self._live[req_id] = (problem_id, prompt_token_ids.tolist(), [])

    def extend(self, req_id, new_token_ids):
        self._live[req_id][2].extend(new_token_ids.tolist())

    def propose(self, req_ids, max_tokens):
        drafts = [np.array([self._live[req_id][2][-1] + 1, 0], np.int32) for req_id in req_ids]
        return [Draft(tokens, np.ones(2, np.float32)) for tokens in drafts]

    def observe(self, req_ids, target_token_ids, num_accepted):
        pass

    def stop_request(self, req_id):
        self.ended.append(self._live.pop(req_id))


def a_problem(runs):
    return Problem("a", [Rollout(0, 0, PROMPT, np.arange(1, sum(runs) + 1, dtype=np.int32), runs)])


def run(problem, way):
    """(the drafter, what was counted)."""
    drafter = Listener()
    counts = bench_turns.speak(bench_turns.samples_of(problem), drafter, way, Roots(), 0)
    return drafter, counts.tolist()


@pytest.mark.parametrize("runs", [(3, 2, 4, 1, 5), (1, 2, 1, 3, 1), (6,), (3, 2, 0, 4, 2, 7)])
def test_every_turn_is_a_request_of_its_own(runs):
    problem = a_problem(runs)
    tokens = problem.rollouts[0].tokens.tolist()
    said, at = [], 0
    for i, size in enumerate(runs):
        if i % 2 == 0 and size:
            said.append((at, at + size))
        at += size
    counted = []
    for way in bench_turns.WAYS:
        drafter, counts = run(problem, way)
        counted.append(counts)
        requests = [(prompt, output) for _, prompt, output in drafter.ended]
        if way == "one request":
            assert requests == [(PROMPT.tolist(), tokens[: said[-1][1]])]
        else:
            assert requests == [([*PROMPT.tolist(), *tokens[:a]], tokens[a:b]) for a, b in said]
            problems = {problem_id for problem_id, _, _ in drafter.ended}
            assert len(problems) == (1 if way == "roots" else len(said))
    assert counted[0] == counted[1] == counted[2]
    assert counted[0][0] == sum(b - a - 1 for a, b in said)  # the first token of each comes with its prompt
