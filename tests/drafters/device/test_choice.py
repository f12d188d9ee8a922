"""The choice between drafts of history and of a model, against a reading of the rule in plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from rollout_spec.drafters.device import choice
from rollout_spec.drafters.device.choice import DeviceChoice
from rollout_spec.drafters.device.kernels import EngineSlots

K, M, SLOTS, LENGTH = 4, 3, 3, 200
TOKENS = st.integers(0, 2)
RATES = st.sampled_from([0.05, 0.3, 0.5, 0.9, 1.0])


class Plain:
    """The rule, token by token."""

    def __init__(self):
        self.counts = {}

    def cell(self, is_sampled, position, p):
        return is_sampled, sum(position > edge for edge in choice.POSITION_EDGES.value), min(int(p * 8), 7)

    def rate(self, cell, p):
        reached, right = self.counts.get(cell, (0, 0))
        return (right + choice.PRIOR.value * p) / (reached + choice.PRIOR.value)

    def choose(self, is_sampled, history_rates, model, probabilities):
        """(how much more is expected of the model's draft, its rates, what is graded of it later)."""
        cells = [self.cell(is_sampled, j, p) for j, p in enumerate(probabilities)]
        rates = [self.rate(cell, p) for cell, p in zip(cells, probabilities, strict=True)]
        margin = np.cumprod(rates).sum() - np.cumprod(history_rates).sum()
        return margin, rates, list(zip(model, cells, strict=True))

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
@given(st.lists(st.lists(STEP, min_size=SLOTS, max_size=SLOTS), min_size=2, max_size=5))
def test_the_choice_follows_the_rule(steps):
    """What is said is anything here, whichever draft was chosen."""
    is_sampled = [True, False, True]
    device, plain, rows = DeviceChoice(SLOTS, K, M, torch.device("cpu")), Plain(), np.array([2, 0, 1])
    texts, total_len = torch.zeros(SLOTS, LENGTH, dtype=torch.int32), torch.ones(SLOTS, dtype=torch.int32)
    temperature = torch.tensor(is_sampled).float()
    num_sampled, engine = torch.ones(SLOTS, dtype=torch.int32), EngineSlots(texts, total_len, total_len, temperature)
    for step in steps:
        step = [step[row] for row in rows.tolist()]
        tokens = np.array([[token for token, _ in s["model"]] for s in step])
        probabilities = np.array([[p for _, p in s["model"]] for s in step], np.float32)
        history_tokens, rates = np.zeros((SLOTS, K), np.int64), np.zeros((SLOTS, K), np.float32)
        for i, s in enumerate(step):
            history_tokens[i, : len(s["history"])] = [token for token, _ in s["history"]]
            rates[i, : len(s["history"])] = [rate for _, rate in s["history"]]
        expected = [
            plain.choose(is_sampled[row], rates[i], tokens[i].tolist(), probabilities[i].tolist())
            for i, row in enumerate(rows.tolist())
        ]
        drafts, found_rates, is_model = device.choose(
            torch.from_numpy(rows).int(),
            num_sampled,
            engine,
            (torch.from_numpy(history_tokens), torch.from_numpy(rates)),
            (torch.from_numpy(tokens), torch.from_numpy(probabilities)),
        )
        assert _by_cell(device.counts.numpy()) == plain.counts, "the last drafts are graded"
        for i, (margin, model_rates, _) in enumerate(expected):
            if abs(margin) < 1e-4:
                continue
            assert bool(is_model[i]) == (margin > 0)
            of_draft = (tokens[i], model_rates) if margin > 0 else (history_tokens[i], rates[i])
            size = M if margin > 0 else K
            assert drafts[i, :size].tolist() == of_draft[0].tolist()
            assert found_rates[i, :size].numpy() == pytest.approx(np.array(of_draft[1]), abs=1e-5)
            assert not found_rates[i, size:].any()
        said = [s["said"] for s in step]
        for i, row in enumerate(rows.tolist()):
            plain.observe(expected[i][2], said[i])
            length = int(total_len[row])
            texts[row, length : length + len(said[i])] = torch.tensor(said[i], dtype=torch.int32)
            total_len[row] += len(said[i])
            num_sampled[i] = len(said[i])


def test_what_the_model_did_not_draft_is_not_graded():
    """On the device: nothing in the middle of a prompt, and of a shorter draft only what there is."""
    device, slots = DeviceChoice(1, K, M, torch.device("cpu")), torch.zeros(1, dtype=torch.int32)
    texts, temperature, length = torch.full((1, LENGTH), 5, dtype=torch.int32), torch.zeros(1), 9
    history = torch.zeros(1, K, dtype=torch.int64), torch.zeros(1, K)
    # Within a prompt the model drafts M tokens, after it one less, which the next step says, and then none.
    for num_sampled, num_drafted, graded in ((0, M, (0, 0)), (1, M - 1, (0, 0)), (M, 0, (M - 1, M - 1))):
        length += num_sampled
        engine = EngineSlots(texts, slots + length, slots, temperature)
        model = torch.full((1, num_drafted), 5), torch.ones(1, num_drafted)
        is_model = device.choose(slots, slots + num_sampled, engine, history, model)[2]
        assert device.model_counts() == graded
        assert bool(is_model) == (num_sampled > 0 and num_drafted > 0)


def _by_cell(counts):
    table = counts.reshape(2, choice.NUM_POSITION_BINS.value, choice.NUM_PROBABILITY_BINS.value, 2)
    return {
        (bool(s), p, b): tuple(int(n) for n in table[s, p, b])
        for s, p, b in np.ndindex(*table.shape[:3])
        if table[s, p, b, 0]
    }
