"""Replays: what a request drafts from, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.drafting.regimes import REGIMES, replay
from rollout_spec.drafters import build_drafter
from rollout_spec.estimate.recorded import Rollout
from rollout_spec.features.format import unpack
from rollout_spec.noise.host import gumbel
from rollout_spec.types import Draft
from tests.adversaries import Adversary

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

PROMPT = np.array([1, 2], np.int32)
ROW = {"prompt_id": "a", "sample_id": 0, "prompt_tokens": [1, 2], "completion_tokens": [3, 4]}


def a_problem(number=0, samples=3, versions=1, size=40):
    """Every rollout says the same fresh tokens."""
    text = np.arange(100, 100 + size, dtype=np.int32)
    return [Rollout(number, PROMPT, text, version, seed=k) for version in range(versions) for k in range(samples)]


class Recorder(Adversary):
    """Drafts the next token, a wrong one and a third one, and keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.seeds, self.versions = [], []

    def start_request(self, req_id, prompt_token_ids, *, problem_id=None, seed=None):
        super().start_request(req_id, prompt_token_ids, problem_id=problem_id, seed=seed)
        self.seeds.append(seed)

    def propose(self, req_ids, max_tokens):
        confidence = np.array([0.95, 0.55, 0.15], np.float32)
        said = [len(self._outputs[req_id]) for req_id in req_ids]
        return [Draft(np.array([100 + n, 3, 102 + n], np.int32), confidence) for n in said]

    def begin_policy_version(self, version):
        self.versions.append(version)


def test_regimes_see_what_they_may():
    """All say the same distinct tokens: a request can draft them only from another rollout."""
    steps = {}
    for regime in REGIMES:
        drafter = build_drafter("suffix", max_draft_tokens=4, min_survival=0.0)
        steps[regime] = replay([a_problem(samples=4)], drafter, regime, num_speculative_tokens=4).request_steps
        drafter.check_integrity()
    assert steps["own"] == steps["inflight"] == 4 * 39  # nothing to draft from; siblings say the same at the same time
    assert steps["finished"] == 39 + 3 * 8  # the first sample is alone
    assert steps["epoch"] == 2 * 8  # half of the samples are history
    other = [r._replace(token_ids=r.token_ids + 100) for r in a_problem(samples=2)]
    unseen = replay([a_problem(samples=2) + other], build_drafter("suffix"), "epoch")
    assert unseen.request_steps == 2 * 39, "an epoch does not see itself"


@pytest.mark.parametrize("drafter", ["adversary", "history"])
@pytest.mark.parametrize("regime", REGIMES)
def test_any_drafter_emits_the_recording(regime, drafter):
    """An environment gives some tokens: at once, after the run before them."""
    rng = np.random.default_rng(0)
    runs = [(20, 15, 5), (40,), (), (1, 2, 0, 3, 30, 4)]
    problems = [
        [Rollout(n, PROMPT, rng.integers(0, 9, 40).astype(np.int32), version, runs[k]) for version in (0, 1)]
        for n in range(3)
        for k in range(4)
    ]
    made = Adversary(9) if drafter == "adversary" else build_drafter("history", max_draft_tokens=5)
    result = replay(problems, made, regime, num_speculative_tokens=5)
    assert result.emitted_tokens == 12 * 39 - 3 * (15 + 2 + 3 + 4)
    if drafter == "adversary":
        assert sorted(made.finished[-12:]) == sorted(problem[1].token_ids.tolist() for problem in problems)


def test_what_was_accepted_is_counted_by_confidence():
    """After the first token, 8 more in steps of two: three are drafted, and two where the recording ends."""
    result = replay([a_problem(samples=1, size=9)], Recorder(), "own", num_speculative_tokens=3)
    assert (result.request_steps, result.accepted_tokens, result.emitted_tokens) == (4, 4, 8)
    expected = np.zeros((10, 3))
    expected[9], expected[5], expected[1] = (4, 3.8, 4), (4, 2.2, 0), (3, 0.45, 0)
    np.testing.assert_allclose(result.reliability, expected, rtol=1e-6)
    # A recording that ends with an accepted token: that one is then the target's own.
    result = replay([a_problem(samples=1, size=8)], Recorder(), "own", num_speculative_tokens=3)
    assert (result.accepted_tokens, result.emitted_tokens) == (4, 7)


def test_the_drafter_is_told_seeds_versions_and_features(tmp_path):
    from experiments.traces import read_traces

    replay([a_problem(versions=2)], drafter := Recorder(), "epoch", num_speculative_tokens=3, knows_noise=True)
    assert drafter.seeds == [None] * 3 + [0, 1, 2]  # earlier rollouts are text
    assert drafter.versions == [1]
    signatures = np.array([[10, 0], [11, 0], [100, 0], [101, 0], [102, 0]], np.uint64).tobytes()
    row = {**ROW, "completion_tokens": [10, 11, 100, 101, 102], "gen_runs": [2, 1, 2], "signatures": signatures}
    row |= {"top_ids": [7] * 20, "top_logprobs": [-2.0] * 20}
    parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / "x.parquet")
    (rollout,) = read_traces(tmp_path / "x.parquet")
    assert unpack(rollout.features)[0][:, 0].tolist() == [10, 11, 0, 101, 102], "the target saw no given tokens"
    replay([[rollout]], drafter := build_drafter("suffix"), "finished")
    tokens, features = drafter._store.read(drafter._finished[-1].document)
    assert tokens.tolist() == [10, 11, 100, 101, 102]
    assert unpack(features)[0][:, 0].tolist() == [10, 11, 0, 101, 102]
    later = rollout._replace(policy_version=1)
    replay([[rollout, later]], drafter := build_drafter("suffix"), "epoch")
    _, features = drafter._store.read(drafter._finished[0].document)
    assert unpack(features)[0][:, 0].tolist() == [10, 11, 0, 101, 102], "of an earlier epoch, too"


def test_recorded_seeds_are_the_noise():
    """A policy that says one of two tokens at each position, each with probability 1/2, as its noise decides."""
    pairs = [[10 + 2 * j, 11 + 2 * j] for j in range(60)]
    texts = [[pair[int(np.argmax(gumbel(k, 1 + j, pair)))] for j, pair in enumerate(pairs)] for k in range(48)]
    problem = [Rollout(0, PROMPT, np.array(text, np.int32), int(k >= 40), seed=k) for k, text in enumerate(texts)]
    known, unknown = (
        replay([problem], build_drafter("history", max_draft_tokens=8), "epoch", knows_noise=knows_noise)
        for knows_noise in (True, False)
    )
    assert known.request_steps * 1.25 < unknown.request_steps
