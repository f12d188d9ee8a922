"""The choice between drafts of history and of a model: host, device, and a reading of the rule in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollout_spec.drafters.model import choice
from rollout_spec.drafters.model.choice import ModelDrafts
from rollout_spec.drafting import Drafting
from rollout_spec.types import Draft
from tests.adversaries import NoDrafter
from tests.drafters.recorder import sampled

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
    said_by_history = {}
    host, device, plain = a_host(said_by_history), DeviceChoice(SLOTS, K, M, torch.device("cpu")), Plain()
    rows, table = np.array([2, 0, 1]), host.drafter.table
    for row in range(SLOTS):
        host.drafter.start_request(str(row), [], seed=0 if is_sampled[row] else None)
    learned = host.learn(sampled(table, rows, [[0]] * SLOTS))
    texts, total_len = torch.zeros(SLOTS, LENGTH, dtype=torch.int32), torch.ones(SLOTS, dtype=torch.int32)
    temperature = torch.tensor(is_sampled).float()
    num_sampled = torch.ones(SLOTS, dtype=torch.int32)
    for step in steps:
        step = [step[row] for row in rows.tolist()]
        tokens = np.array([[token for token, _ in s["model"]] for s in step], np.int32)
        probabilities = np.array([[p for _, p in s["model"]] for s in step], np.float32)
        for row, s in zip(rows, step, strict=True):
            said_by_history[str(row)] = drafted(s["history"])
        by_history = [said_by_history[str(row)] for row in rows]
        expected = [
            plain.choose(is_sampled[row], by_history[i].confidence, tokens[i].tolist(), probabilities[i].tolist())
            for i, row in enumerate(rows.tolist())
        ]
        drafts = host.draft(rows, learned.room, num_tokens=SLOTS, model=ModelDrafts(tokens, probabilities))
        confidence = table.arrays.confidence[rows]
        rates = np.zeros((SLOTS, K), np.float32)
        for i, s in enumerate(step):
            rates[i, : len(s["history"])] = [rate for _, rate in s["history"]]
        history_tokens = np.zeros((SLOTS, K), np.int64)
        for row, draft in zip(history_tokens, by_history, strict=True):
            row[: draft.token_ids.size] = draft.token_ids
        on_device, device_rates, is_model = device.choose(
            torch.from_numpy(rows).int(),
            num_sampled,
            texts,
            total_len,
            temperature,
            (torch.from_numpy(history_tokens), torch.from_numpy(rates)),
            (torch.from_numpy(tokens).long(), torch.from_numpy(probabilities)),
        )
        for i, (margin, _) in enumerate(expected):
            if abs(margin) < 1e-4:
                continue
            wanted = tokens[i].tolist() if margin > 0 else by_history[i].token_ids.tolist()
            assert drafts.token_ids[i, : drafts.lengths[i]].tolist() == wanted
            assert (np.diff(confidence[i, : drafts.lengths[i]]) <= 1e-6).all()
            assert on_device[i, : len(wanted)].tolist() == wanted
            assert bool(is_model[i]) == (margin > 0)
            n = len(wanted)
            survival = device_rates[i].cumprod(0)[:n].numpy()
            assert survival == pytest.approx(confidence[i, :n], abs=1e-5)
        said = [s["said"] for s in step]
        for i, row in enumerate(rows.tolist()):
            plain.observe(expected[i][1], said[i])
            length = int(total_len[row])
            texts[row, length : length + len(said[i])] = torch.tensor(said[i], dtype=torch.int32)
            total_len[row] += len(said[i])
            num_sampled[i] = len(said[i])
        learned = host.learn(sampled(table, rows, said))
        # Grades the last drafts; the drafts that it makes are those of the next round.
        device_counts = _graded(device, rows, num_sampled, texts, total_len)
        assert _by_cell(host.choice.counts) == _by_cell(device_counts) == plain.counts


class Saying(NoDrafter):
    """Drafts what it is told to, by request."""

    def __init__(self, drafts):
        self.drafts = drafts

    def propose(self, req_ids, max_tokens):
        drafts = [self.drafts[req_id] for req_id in req_ids]
        return [Draft(*(part[:n] for part in draft)) for draft, n in zip(drafts, max_tokens, strict=True)]

    def extend(self, req_id, new_token_ids):
        pass


def a_host(drafts):
    return Drafting(Saying(drafts), K, max_model_len=10_000, vocab_size=10, has_model=True)


def drafted(tokens_and_rates):
    tokens, rates = [token for token, _ in tokens_and_rates], [rate for _, rate in tokens_and_rates]
    return Draft(np.array(tokens, np.int32), np.cumprod(rates).astype(np.float32))


def test_what_the_model_did_not_draft_is_not_graded():
    """On the device: nothing in the middle of a prompt, and of a shorter draft only what there is."""
    device, slots = DeviceChoice(1, K, M, torch.device("cpu")), torch.zeros(1, dtype=torch.int32)
    texts, temperature, length = torch.full((1, LENGTH), 5, dtype=torch.int32), torch.zeros(1), 9
    history = torch.zeros(1, K, dtype=torch.int64), torch.zeros(1, K)
    # Within a prompt the model drafts M tokens, after it one less, which the next step says, and then none.
    for num_sampled, num_drafted, graded in ((0, M, (0, 0)), (1, M - 1, (0, 0)), (M, 0, (M - 1, M - 1))):
        length += num_sampled
        model = torch.full((1, num_drafted), 5), torch.ones(1, num_drafted)
        is_model = device.choose(slots, slots + num_sampled, texts, slots + length, temperature, history, model)[2]
        assert device.model_counts() == graded
        assert bool(is_model) == (num_sampled > 0 and num_drafted > 0)


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


class One:
    """A request for which a model drafts 6 7 8, and history its own."""

    def __init__(self, *history, seed=0):
        self.drafts = {"a": drafted(history)}
        self.host = a_host(self.drafts)
        self.host.drafter.start_request("a", [], seed=seed)
        self.table, self.row = self.host.drafter.table, np.array([0])
        self.learned = self.host.learn(sampled(self.table, self.row, [[0]]))

    def step(self, *said, model=(6, 7, 8), p=0.9):
        """What is drafted; then these tokens follow."""
        drafts = ModelDrafts(np.array([model], np.int32), np.full((1, len(model)), p, np.float32))
        chosen = self.host.draft(self.row, self.learned.room, num_tokens=1, model=drafts if model else None)
        self.learned = self.host.learn(sampled(self.table, self.row, [said], num_verified=chosen.lengths))
        return chosen.token_ids[0, : chosen.lengths[0]].tolist()


def test_a_model_that_is_never_right_is_no_longer_chosen_until_it_is_right_again():
    one = One((5, 0.6))
    chosen = [one.step(5) for _ in range(40)]
    assert (chosen[0], chosen[-1]) == ([6, 7, 8], [5])
    assert one.host.choice.model_counts() == (40, 0)
    assert [6, 7, 8] in [one.step(6, 7, 8) for _ in range(400)]
    before = one.host.choice.model_counts()
    one.host.choice.counts *= 0.9
    between = one.host.choice.model_counts()
    assert between < before
    for _ in range(4):
        one.step(6, 7, 8)
    assert one.host.choice.model_counts() > between, "outcomes still count"
    assert One().step(1, model=(1, 2, 3, 4, 5, 6), p=1.0) == [1, 2, 3, 4], "of a longer draft the first K tokens"


def test_room_and_steps_without_the_model():
    one, p = One((5, 0.2), (5, 0.5)), 1.0
    for left, expected in ((3, [6, 7]), (2, [6])):
        one.table.limit(0, max_tokens=one.table.arrays.num_tokens[0] + left, min_tokens=0, stop_token_ids=[])
        one.learned = one.host.learn(sampled(one.table, one.row, [[]], [0]))
        assert one.step(p=p) == expected
    one.table.arrays.max_tokens[0] = 100
    one.learned = one.host.learn(sampled(one.table, one.row, [[]], [0]))
    assert one.step(6, model=()) == [5, 5]
    assert one.host.choice.model_counts() == (0, 0), "nothing of a model was left to grade"
    assert one.step(p=p) == [6, 7, 8]
