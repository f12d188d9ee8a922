"""`rollout-spec replay` from end to end, and synthetic policies."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from scipy import stats

from rollout_spec.cli import main
from rollout_spec.drafters import build_drafter
from rollout_spec.noise.host import derive_seed, gumbel
from rollout_spec.replay.simulate import REGIMES, Request, replay, replay_steadily
from rollout_spec.replay.synthetic import SyntheticPolicy
from rollout_spec.replay.traces import Problem, Rollout, num_tokens, read_traces
from rollout_spec.types import Draft
from tests.adversaries import Adversary


@pytest.fixture
def traces(tmp_path):
    """Two prompts with two epochs of three noisy copies of a text each; the second has environment runs."""
    rng = np.random.default_rng(0)
    rows = []
    for prompt in range(2):
        base = rng.integers(0, 20, 60)
        for epoch in range(2):
            for sample in range(3):
                text = np.where(rng.random(60) < 0.1, rng.integers(0, 20, 60), base)
                rows.append(
                    {
                        "prompt_id": f"p{prompt}",
                        "sample_id": sample,
                        "epoch": epoch,
                        "prompt_tokens": [prompt, 1, 2],
                        "completion_tokens": text.tolist(),
                        "gen_runs": [20, 15, 25] if prompt else [],
                    }
                )
    path = tmp_path / "rollouts.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


class Oracle(Adversary):
    """Knows the recording: each request's completion by the order in which requests start."""

    def __init__(self, texts):
        super().__init__()
        self._texts, self._started = texts, {}

    def start_request(self, req_id, prompt_token_ids, *, problem_id=None, seed=None):
        super().start_request(req_id, prompt_token_ids, problem_id=problem_id, seed=seed)
        self._started[req_id] = self._texts[len(self._started)]

    def propose(self, req_ids, max_tokens):
        drafts = []
        for req_id, limit in zip(req_ids, max_tokens, strict=True):
            at = len(self._outputs[req_id])
            tokens = self._started[req_id][at : at + limit]
            drafts.append(Draft(np.asarray(tokens, np.int32), np.ones(len(tokens), np.float32)))
        return drafts


@pytest.mark.parametrize("regime", REGIMES)
def test_any_drafter_emits_the_recording(traces, regime):
    problems = read_traces(traces)
    given = sum(sum(r.runs[1::2]) for p in problems for r in p.rollouts if r.epoch == 1)
    live = [Problem(p.prompt_id, [r for r in p.rollouts if r.epoch == 1]) for p in problems]
    adversary = Adversary()
    result = replay(problems, lambda: adversary, regime, num_speculative_tokens=5)
    assert result.stats.emitted_tokens == num_tokens(live) - given - 6  # the prefill gives each rollout's first token
    expected = sorted(r.tokens.tolist() for p in live for r in p.rollouts)
    assert sorted(adversary.finished[-6:]) == expected


def test_an_oracle_gets_every_draft_accepted(traces):
    problems = read_traces(traces, max_prompts=1)
    texts = [r.tokens for r in problems[0].rollouts if r.epoch == 1]
    result = replay(problems, lambda: Oracle(texts), "own", num_speculative_tokens=5)
    assert result.stats.accepted_tokens == result.stats.draft_tokens
    assert result.stats.tokens_per_step == pytest.approx(59 / 10)  # 59 tokens after the first, 6 at a time
    assert result.stats.accepted_per_position == [3 * 10] * 5


def test_recorded_seeds_are_the_noise(tmp_path):
    """A policy that says one of two tokens at each position, each with probability 1/2, as its noise decides."""
    rows = []
    for sample in range(48):
        seed = 1000 + sample
        pairs = [[10 + 2 * j, 11 + 2 * j] for j in range(60)]
        text = [pair[int(np.argmax(gumbel(seed, 1 + j, pair)))] for j, pair in enumerate(pairs)]
        epoch = int(sample >= 40)
        rows.append({"prompt_id": "p", "sample_id": sample, "epoch": epoch, "prompt_tokens": [1, 2], "seed": seed})
        rows[-1]["completion_tokens"] = text
    found = {}
    for name, columns in (("with", rows), ("without", [{k: v for k, v in row.items() if k != "seed"} for row in rows])):
        path, out = tmp_path / f"{name}.parquet", tmp_path / f"{name}.json"
        parquet.write_table(arrow.Table.from_pylist(columns), path)
        assert main(["replay", str(path), "--regime", "epoch", "--json", str(out)]) == 0
        found[name] = {row["noise"]: row["tokens_per_step"] for row in json.loads(out.read_text())}
    assert set(found["without"]) == {False}
    assert found["with"][False] == found["without"][False]
    assert found["with"][True] > 1.3 * found["with"][False]
    parquet.write_table(arrow.Table.from_pylist([rows[0] | {"seed": None}, *rows[1:]]), path)
    with pytest.raises(ValueError, match="seed is null in row 0"):
        read_traces(path)


def test_regimes_see_what_they_may():
    """Every sample is the same text of distinct tokens: a request can draft it only from another sample."""
    text = np.arange(100, 140, dtype=np.int32)
    prompt = np.array([1, 2], np.int32)
    rollouts = [Rollout(k, 0, prompt, text, (text.size,)) for k in range(4)]
    steps = {}
    for regime in REGIMES:
        drafter = build_drafter("suffix", max_draft_tokens=4, min_survival=0.0)
        result = replay([Problem("p", rollouts)], lambda drafter=drafter: drafter, regime, num_speculative_tokens=4)
        steps[regime] = result.stats.request_steps
        drafter.check_integrity()
    assert steps["own"] == 4 * 39  # nothing to draft from
    assert steps["inflight"] == 4 * 39  # siblings say the same at the same time
    assert steps["finished"] == 39 + 3 * 8  # the first sample is alone
    assert steps["epoch"] == 2 * 8  # half of the samples are history


def test_an_epoch_does_not_see_itself():
    """Two samples of the second epoch are the same text, which does not occur in the first epoch."""
    prompt = np.array([1, 2], np.int32)
    texts = [np.arange(100 * n, 100 * n + 40, dtype=np.int32) for n in (1, 1, 2, 2)]
    rollouts = [Rollout(k, 0, prompt, text, (text.size,)) for k, text in enumerate(texts)]
    drafter = build_drafter("suffix", max_draft_tokens=4, min_survival=0.0)
    result = replay([Problem("p", rollouts)], lambda: drafter, "epoch", num_speculative_tokens=4)
    assert result.stats.request_steps == 2 * 39
    assert result.indexed_tokens == result.history_tokens == 2 * 40 + 2
    drafter.start_request("next", prompt, problem_id=Problem("p", rollouts).problem_id)
    drafter.extend("next", [200])
    (draft,) = drafter.propose(["next"], np.array([4], np.int32))
    assert not draft.token_ids.size


def test_command_writes_every_figure(traces, tmp_path, capsys):
    out = tmp_path / "rows.json"
    assert main(["replay", str(traces), "-k", "4", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [row["regime"] for row in rows] == list(REGIMES)
    for row in rows:
        assert row["tokens_per_step"] >= 1
        assert sum(row["accepted_per_position"]) == row["accepted_tokens"] <= row["draft_tokens"]
        assert sum(source["accepted"] for source in row["by_source"].values()) >= row["accepted_tokens"]
        assert sum(cell["drafted"] for cell in row["calibration"]) <= row["draft_tokens"]
    assert rows[3]["history_tokens"] == 2 * 3 * 60 + 2 * 3
    assert "tokens/step" in capsys.readouterr().out


def test_command_draws_the_frontier_and_knows_synthetic_noise(traces, tmp_path):
    out = tmp_path / "rows.json"
    assert main(["replay", str(traces), "--regime", "epoch", "--frontier", "--json", str(out)]) == 0
    drafted = [row["draft_tokens"] for row in json.loads(out.read_text())]
    assert drafted == sorted(drafted, reverse=True)
    assert main(["replay", str(traces), "--regime", "epoch", "--policy", "synthetic", "--json", str(out)]) == 0
    assert [row["noise"] for row in json.loads(out.read_text())] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafter", "histori"], "unknown drafter 'histori'"),
        (["--drafter", "tests.adversaries.Advrsary"], "'tests.adversaries.Advrsary' cannot be imported"),
        (["--option", "min_survival=2"], "min_survival must be in [0, 1)"),
        (["--option", "nonsense"], "--option must be NAME=JSON"),
        (["--option", "index=suffix"], "--option must be NAME=JSON"),
        (["--option", "depth=3"], "unexpected keyword argument 'depth'"),
        (["-k", "0"], "-k must be between 1 and 128 (vLLM's limit), got 0"),
        (["-k", "9999"], "-k must be between 1 and 128 (vLLM's limit), got 9999"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--prompts", "0"], "--prompts must be at least 1"),
        (["--samples", "-1"], "--samples must be at least 1"),
        (["--frontier", "--drafter", "tests.adversaries.Adversary"], "--frontier varies min_survival"),
    ],
)
def test_command_refuses_bad_input(traces, arguments, said, capsys):
    assert main(["replay", str(traces), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("what", [[], ["--engine-cost", "cost.json"]])
def test_command_looks_first_whether_its_figures_can_be_written(traces, tmp_path, capsys, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cost.json").write_text('{"name": "x", "tokens": [1, 2], "seconds": [1, 2]}')
    assert main(["replay", str(traces), "--json", str(tmp_path / "none" / "rows.json"), *what]) == 2
    output = capsys.readouterr()
    assert "none/rows.json" in output.err
    assert output.out == "", "nothing was replayed"


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("prompt_tokens", [1, None], "column prompt_tokens holds a null among the values of row 2"),
        ("completion_tokens", [None], "column completion_tokens holds a null among the values of row 2"),
        ("prompt_tokens", None, "column prompt_tokens is null in row 2"),
        ("prompt_id", None, "column prompt_id is null in row 2"),
        ("sample_id", None, "column sample_id is null in row 2"),
        ("gen_runs", [20, None, 40], "are not lengths that sum to its 60 tokens"),
    ],
)
def test_command_says_where_a_recording_has_a_gap(traces, column, value, said, capsys):
    rows = parquet.read_table(traces).to_pylist()
    rows[2][column] = value
    parquet.write_table(arrow.Table.from_pylist(rows), traces)
    assert main(["replay", str(traces)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_command_refuses_missing_files(tmp_path, capsys):
    assert main(["replay", str(tmp_path / "none.parquet")]) == 2
    assert "none.parquet" in capsys.readouterr().err


def test_synthetic_samples_follow_their_distribution(traces):
    policy = SyntheticPolicy(read_traces(traces)[0])
    context = [*policy.prompt.tolist(), *policy.sample(1, 5).tolist()]
    tokens, probabilities = policy.probabilities(context)
    assert probabilities.sum() == pytest.approx(1.0)
    draws = [policy.next_token(context, derive_seed(i), 7) for i in range(4000)]
    counts = np.array([draws.count(int(token)) for token in tokens])
    assert counts.sum() == 4000
    common = probabilities > 5 / 4000
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(probabilities[common], probabilities[~common].sum()) * 4000
    assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_synthetic_rollouts_end_and_repeat(traces):
    policy = SyntheticPolicy(read_traces(traces)[0])
    text = policy.sample(3, 500)
    assert np.array_equal(text, policy.sample(3, 500))
    assert text[-1] == policy.end_token
    assert not (text[:-1] == policy.end_token).any()
    assert len(policy.sample(3, 4)) == 4
    with pytest.raises(ValueError, match="no recorded tokens"):
        SyntheticPolicy(Problem("p", []))


class ObservationRecorder(Adversary):
    """Drafts three tokens of its own each time and keeps what it is told about them."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def start_request(self, req_id, prompt_token_ids, *, problem_id=None, seed=None):
        super().start_request(req_id, prompt_token_ids, problem_id=problem_id, seed=seed)
        self._prompt = list(prompt_token_ids)

    def propose(self, req_ids, max_tokens):
        self._drafts = [[1, 2, 3][:limit] for limit in max_tokens]
        return [Draft(np.array(draft, np.int32), np.ones(len(draft), np.float32)) for draft in self._drafts]

    def observe(self, req_ids, target_token_ids, num_accepted):
        for req_id, draft, targets in zip(req_ids, self._drafts, target_token_ids, strict=True):
            self.heard.append(([*self._prompt, *self._outputs[req_id]], draft, list(targets)))
        super().observe(req_ids, target_token_ids, num_accepted)


class BatchSizeRecorder(Adversary):
    """Counts the requests of every batch."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def propose(self, req_ids, max_tokens):
        self.sizes.append(len(req_ids))
        return super().propose(req_ids, max_tokens)


def test_a_steady_replay_has_a_full_batch_up_to_where_requests_run_out(traces):
    requests = [Request(p, r) for p in read_traces(traces) for r in p.rollouts]
    drafter = BatchSizeRecorder()
    result = replay_steadily(requests, drafter, num_speculative_tokens=3, batch=5)
    assert set(drafter.sizes) == {5}
    assert result.stats.request_steps == 5 * len(drafter.sizes)
    assert not drafter._outputs, "those that are cut off are stopped too"
    whole = {tuple(r.tokens.tolist()) for _, r in requests}
    assert sum(tuple(text) in whole for text in drafter.finished) >= len(requests) - 5


def test_a_target_that_can_be_asked_is_observed_after_rejected_drafts_too(traces):
    (problem,) = read_traces(traces, max_prompts=1)
    policy, seed = SyntheticPolicy(problem), 5
    fresh = Problem(problem.prompt_id, policy.rollouts([seed], 40, num_earlier=0))
    drafter = ObservationRecorder()

    def next_token(_problem, _rollout, text):
        return policy.next_token(text, seed, len(text) - 1)

    replay([fresh], lambda: drafter, "own", num_speculative_tokens=3, next_token=next_token)
    assert len(drafter.heard) > 3
    for text, draft, targets in drafter.heard:
        expected = [next_token(None, None, [*text, *draft[:i]]) for i in range(4)]
        assert targets == expected[: len(targets)]
        assert len(targets) == 4 or len(text) + len(targets) == 3 + fresh.rollouts[0].tokens.size
