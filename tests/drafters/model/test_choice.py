"""The choice between drafts of history and of a model: host, device, and a reading of the rule in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollout_spec.drafters.host.vote import MAX_TRIALS
from rollout_spec.drafters.model import choice
from rollout_spec.drafters.model.choice import DraftChoice, ModelDrafts, no_model_drafts
from rollout_spec.types import Drafts

pytest.importorskip("triton")

from rollout_spec.drafters.model.choice_device import DeviceChoice

K, M, SLOTS, LENGTH = 4, 3, 3, 200
TOKENS = st.integers(0, 2)
RATES = st.sampled_from([0.05, 0.3, 0.5, 0.9, 1.0])


class Plain:
    """The rule, token by token."""

    def __init__(self):
        self.counts = {}

    def cell(self, is_sampled, position, p):
        return is_sampled, sum(position > edge for edge in choice.POSITION_EDGES), min(int(p * 8), 7)

    def rate(self, cell, p):
        reached, right = self.counts.get(cell, (0, 0))
        return (right + choice.PRIOR * p) / (reached + choice.PRIOR)

    def choose(self, is_sampled, history_survival, model, probabilities):
        survival, expected, cells = 1.0, 0.0, []
        for j, p in enumerate(probabilities):
            cells.append(self.cell(is_sampled, j, p))
            survival *= self.rate(cells[-1], p)
            expected += survival
        self.last = list(zip(model, cells, strict=True))
        return expected - sum(history_survival), self.last

    def observe(self, last, said):
        for (token, cell), target in zip(last, said, strict=False):
            reached, right = self.counts.get(cell, (0, 0))
            self.counts[cell] = reached + 1, right + (token == target)
            if token != target:
                break


STEP = st.fixed_dictionaries(
    {
        "history": st.lists(st.tuples(TOKENS, RATES), max_size=K),
        "model": st.lists(st.tuples(TOKENS, RATES), min_size=M, max_size=M),
        "said": st.lists(TOKENS, min_size=1, max_size=K + 1),
    }
)


@settings(
    max_examples=12,
    derandomize=True,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(st.lists(STEP, min_size=SLOTS, max_size=SLOTS), min_size=1, max_size=4))
def test_host_and_device_follow_the_rule(steps):
    """What is said is anything here, whichever draft was chosen."""
    is_sampled = [True, False, True]
    host, device, plain = DraftChoice(K, M), DeviceChoice(SLOTS, K, M, torch.device("cpu")), Plain()
    rows = np.array([2, 0, 1])
    for row in rows.tolist():
        host.start(row, is_sampled=is_sampled[row])
    texts, total_len = torch.zeros(SLOTS, LENGTH, dtype=torch.int32), torch.ones(SLOTS, dtype=torch.int32)
    temperature = torch.tensor(is_sampled).float()
    num_sampled = torch.ones(SLOTS, dtype=torch.int32)
    for step in steps:
        step = [step[row] for row in rows.tolist()]
        history = _drafts([[token for token, _ in s["history"]] for s in step], [s["history"] for s in step])
        tokens = np.array([[token for token, _ in s["model"]] for s in step], np.int32)
        probabilities = np.array([[p for _, p in s["model"]] for s in step], np.float32)
        expected = [
            plain.choose(is_sampled[row], history.confidence[i], tokens[i].tolist(), probabilities[i].tolist())
            for i, row in enumerate(rows.tolist())
        ]
        drafts = host.choose(rows, history, ModelDrafts(tokens, probabilities), np.full(SLOTS, K))
        rates = np.zeros((SLOTS, K), np.float32)
        for i, s in enumerate(step):
            rates[i, : len(s["history"])] = [rate for _, rate in s["history"]]
        on_device, device_rates, is_model = device.choose(
            torch.from_numpy(rows).int(),
            num_sampled,
            texts,
            total_len,
            temperature,
            (torch.from_numpy(history.token_ids).long(), torch.from_numpy(rates)),
            (torch.from_numpy(tokens).long(), torch.from_numpy(probabilities)),
        )
        for i, (margin, _) in enumerate(expected):
            if abs(margin) < 1e-4:
                continue
            wanted = tokens[i].tolist() if margin > 0 else history.token_ids[i, : history.lengths[i]].tolist()
            assert drafts.token_ids[i, : drafts.lengths[i]].tolist() == wanted
            assert (np.diff(drafts.confidence[i, : drafts.lengths[i]]) <= 1e-6).all()
            assert on_device[i, : len(wanted)].tolist() == wanted
            assert bool(is_model[i]) == (margin > 0)
            n = len(wanted)
            survival = device_rates[i].cumprod(0)[:n].numpy()
            assert survival == pytest.approx(drafts.confidence[i, :n], abs=1e-5)
        said = [s["said"] for s in step]
        starts = np.cumsum([0, *map(len, said)])
        for i, row in enumerate(rows.tolist()):
            plain.observe(expected[i][1], said[i])
            length = int(total_len[row])
            texts[row, length : length + len(said[i])] = torch.tensor(said[i], dtype=torch.int32)
            total_len[row] += len(said[i])
            num_sampled[i] = len(said[i])
        host.observe(rows, np.concatenate(said), starts, np.diff(starts) - 1)
        # Grades the last drafts; the drafts that it makes are those of the next round.
        device_counts = _graded(device, rows, num_sampled, texts, total_len)
        assert _by_cell(host.counts) == _by_cell(device_counts) == plain.counts


def _drafts(tokens, with_rates):
    drafts = Drafts(np.zeros((SLOTS, K), np.int32), np.zeros(SLOTS, np.int64), np.zeros((SLOTS, K), np.float32))
    for i, row in enumerate(tokens):
        drafts.token_ids[i, : len(row)] = row
        drafts.lengths[i] = len(row)
        drafts.confidence[i, : len(row)] = np.cumprod([rate for _, rate in with_rates[i]])
    return drafts


def _graded(device, rows, num_sampled, texts, total_len):
    """The counters as the next step will find them."""
    other = DeviceChoice(SLOTS, K, M, torch.device("cpu"))
    other.counts = device.counts.clone()
    other._last = tuple(tensor.clone() for tensor in device._last)
    nothing = torch.zeros(SLOTS, K)
    other.choose(
        torch.from_numpy(rows).int(), num_sampled, texts, total_len, torch.zeros(SLOTS),
        (nothing.long(), nothing), (nothing.long()[:, :M], nothing),
    )  # fmt: skip
    return other.counts.numpy()


def _by_cell(counts):
    table = counts.reshape(2, choice.NUM_POSITION_BINS, choice.NUM_PROBABILITY_BINS, 2)
    return {
        (bool(s), p, b): tuple(int(n) for n in table[s, p, b])
        for s, p, b in np.ndindex(*table.shape[:3])
        if table[s, p, b, 0]
    }


def _one(history, confidence, model, probabilities):
    h = Drafts(np.array([history], np.int32), np.array([len(history)]), np.array([confidence], np.float32))
    return h, ModelDrafts(np.array([model], np.int32), np.array([probabilities], np.float32))


def test_history_is_told_of_its_own_draft():
    """Its draft was 5 6 7. The model's, 5 8 9, was verified: 5 8 accepted, then 4 instead of 9."""
    chooser, row = DraftChoice(K, M), np.array([0])
    chooser.start(0, is_sampled=True)
    chooser.choose(row, *_one([5, 6, 7], [0.1, 0.1, 0.1], [5, 8, 9], [0.9, 0.9, 0.9]), np.array([K]))
    targets, starts, accepted = chooser.observe(row, np.array([5, 8, 4, 1]), np.array([0, 4]), np.array([2]))
    assert (targets.tolist(), starts.tolist(), accepted.tolist()) == ([5, 8], [0, 2], [1])
    # It agreed with all that was said, and would have gone on: how is not known.
    chooser.choose(row, *_one([5, 8, 4], [0.1, 0.1, 0.1], [5, 8, 9], [0.9, 0.9, 0.9]), np.array([K]))
    targets, starts, accepted = chooser.observe(row, np.array([5, 8]), np.array([0, 2]), np.array([1]))
    assert (targets.tolist(), accepted.tolist()) == ([5, 8], [1])
    # Its own draft was verified: everything is passed on, the target's samples after the first difference, too.
    chooser.choose(row, *_one([5, 6, 7], [0.9, 0.9, 0.9], [5, 8, 9], [0.1, 0.1, 0.1]), np.array([K]))
    targets, starts, accepted = chooser.observe(row, np.array([5, 3, 2, 1]), np.array([0, 4]), np.array([1]))
    assert (targets.tolist(), accepted.tolist()) == ([5, 3, 2, 1], [1])


def test_a_model_that_is_never_right_is_no_longer_chosen():
    chooser, row, room = DraftChoice(K, M), np.array([0]), np.array([K])
    chooser.start(0, is_sampled=True)
    chosen = []
    for _ in range(40):
        drafts = chooser.choose(row, *_one([5], [0.6], [6, 7, 8], [0.9, 0.9, 0.9]), room)
        chosen.append(int(drafts.token_ids[0, 0]))
        chooser.observe(row, np.array([5]), np.array([0, 1]), np.array([0]))
    assert chosen[0] == 6
    assert chosen[-1] == 5
    assert chooser.model_counts() == (40, 0)


def test_room_and_steps_without_the_model():
    chooser, row = DraftChoice(K, M), np.array([20])  # more rows than there were at first
    chooser.start(20, is_sampled=False)
    history, model = _one([5, 6], [0.2, 0.1], [7, 8, 9], [1.0, 1.0, 1.0])
    assert chooser.choose(row, history, model, np.array([2])).lengths.tolist() == [2]
    empty = Drafts(np.zeros((1, K), np.int32), np.zeros(1, np.int64), np.zeros((1, K), np.float32))
    assert chooser.choose(row, empty, model, np.array([0])).lengths.tolist() == [0]
    drafts = chooser.choose(row, history, no_model_drafts(1), np.array([K]))
    assert drafts.token_ids[0, :2].tolist() == [5, 6]
    chooser.forget()
    chooser.observe(row, np.array([7]), np.array([0, 1]), np.array([0]))
    assert chooser.model_counts() == (0, 0)


def test_full_counters_are_halved():
    chooser, row = DraftChoice(K, M), np.array([0])
    chooser.start(0, is_sampled=True)
    chooser.counts[:, 0], chooser.counts[:, 1] = MAX_TRIALS, 4.0
    chooser.choose(row, *_one([], [], [6, 7, 8], [0.9, 0.9, 0.9]), np.array([K]))
    chooser.observe(row, np.array([6]), np.array([0, 1]), np.array([0]))
    assert chooser.counts.min(0).tolist() == [MAX_TRIALS / 2 + 1, 3.0]
    before = chooser.counts.copy()
    chooser.begin_policy_version()
    assert (chooser.counts < before).all()
