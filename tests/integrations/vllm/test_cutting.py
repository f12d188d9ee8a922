"""How drafts are cut: by the same decisions as vLLM's, in one kernel."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("vllm")
from rollout_spec.integrations.vllm import compat

if compat.is_v2_old():
    pytest.skip("vLLM cuts no drafts of ours", allow_module_level=True)
import vllm.v1.worker.cpu.shm  # noqa: F401  # gives torch events and streams on a CPU
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from rollout_spec.integrations.vllm import cutting
from rollout_spec.integrations.vllm.cutting import Cut, Cutting

SLOTS, K = 11, 5
RNG = np.random.default_rng(0)


def cut_by_loops(confidences, slots, scheduled, budget):
    """(draft tokens that stay, of each request) by the definition."""
    keys = []
    for request, (slot, drafts) in enumerate(zip(slots, scheduled[0], strict=True)):
        survival = np.cumprod(confidences[slot, :drafts], dtype=np.float32)
        keys += [(-value, request, place) for place, value in enumerate(survival)]
    kept = [0] * len(slots)
    for _, request, _ in sorted(keys)[:budget]:
        kept[request] += 1
    return kept


@pytest.mark.parametrize("kind", ["random", "equal", "zero", "sure"])
def test_the_likeliest_drafts_stay(kind):
    """Whatever is scheduled; of equal ones the first requests'. Rows and tokens begin where they then do."""
    for num_requests, seed in itertools.product((1, 2, SLOTS), range(3)):
        rng = np.random.default_rng(seed)
        confidences = {
            "random": rng.random((SLOTS, K)), "equal": np.full((SLOTS, K), 0.5), "zero": np.zeros((SLOTS, K)),
            "sure": np.ones((SLOTS, K)),
        }[kind].astype(np.float32)  # fmt: skip
        slots = rng.permutation(SLOTS)[:num_requests]
        scheduled = np.stack([rng.integers(0, K + 1, num_requests), rng.integers(1, 4, num_requests)]).astype(np.int32)
        for budget in {0, int(scheduled[0].sum()) // 2, int(scheduled[0].sum())}:
            query_start = torch.full((SLOTS + 1,), -1, dtype=torch.int32)
            cut = Cut(torch.from_numpy(confidences), query_start)
            starts = cut(torch.from_numpy(slots).int(), scheduled, budget)
            kept = np.array(cut_by_loops(confidences, slots, scheduled, budget))
            rows, tokens = kept + 1, kept + scheduled[1]
            assert starts.tolist() == [0, *np.cumsum(rows)]
            expected = [0, *np.cumsum(tokens)]
            assert query_start.tolist() == [*expected, *[expected[-1]] * (SLOTS - num_requests)]
            assert cut.request[: rows.sum()].tolist() == np.repeat(slots, rows).tolist()
            assert cut.place[: rows.sum()].tolist() == [j for n in rows for j in range(n)]


def managers(*, is_drafting=lambda: True):
    """vLLM's and ours, over the same requests, with rising costs."""
    states = SimpleNamespace(
        num_speculative_steps=K, device=torch.device("cpu"), max_num_reqs=SLOTS, max_num_batched_tokens=200,
        req_id_to_index={str(i): SLOTS - 1 - i for i in range(SLOTS)}, num_computed_tokens_np=np.full(SLOTS, 9),
        prefill_len=SimpleNamespace(np=np.full(SLOTS, 4)),
    )  # fmt: skip
    theirs = AdaptiveVerificationManager(states, torch.zeros(SLOTS + 1, dtype=torch.int32), 1, 60)
    theirs.cost_tables = np.full(SLOTS + 1, 0.5), 3.0 + 0.4 * np.arange(200.0)
    ours = Cutting(theirs, is_drafting, lambda: True)
    ours.cost_tables = theirs.cost_tables
    return theirs, ours


@pytest.fixture(autouse=True)
def ended_step(monkeypatch):
    monkeypatch.setattr(cutting, "_cutting", None)


def test_the_decisions_are_vllms():
    """With whole drafts, which take our way, and with others, with prompts and more rows than there is room for."""
    theirs, ours = managers()
    for n, whole in itertools.product(range(1, SLOTS + 1), (True, False)):
        names = [str(i) for i in RNG.permutation(SLOTS)[:n]]
        drafts = {name: [0] * (K if whole else int(RNG.integers(0, K + 1))) for name in names}
        tokens = {name: len(drafts[name]) + 1 + (0 if whole else int(RNG.integers(0, 3))) for name in names}
        drafts = {name: draft for name, draft in drafts.items() if draft}
        confidences = RNG.random((SLOTS, K)).astype(np.float32)
        for manager in (theirs, ours):
            manager._stale_confidences[manager._stale_idx].np[:] = confidences
        assert ours.get_num_tokens(tokens, drafts) == theirs.get_num_tokens(tokens, drafts)
        assert ours._batch_budget[2] == theirs._batch_budget[2]
        assert (ours._batch_budget[0] is None) == (whole and len(drafts) == n)


def test_a_request_in_another_slot_has_that_slots_confidences():
    _, ours = managers()
    ours._stale_confidences[0].np[:] = 0.0
    ours._stale_confidences[0].np[3] = 1.0
    tokens, drafts = {"0": K + 1}, {"0": [0] * K}
    assert ours.get_num_tokens(tokens, drafts) == 1
    ours.req_states.req_id_to_index["0"] = 3  # it was preempted
    ours.add_request(3)
    assert ours.get_num_tokens(tokens, drafts) == 1 + K


def test_steps_without_drafts_leave_confidences_as_they_are():
    """Those of others are copied to the host, one step behind, whoever wrote them."""
    drafting = [True]
    _, ours = managers(is_drafting=lambda: drafting[0])
    batch = SimpleNamespace(idx_mapping=torch.tensor([4, 2]), num_reqs=2)
    for value in (0.25, 0.5):
        ours.record_confidences(torch.full((SLOTS, K), value), batch)
    known = ours._stale_confidences[ours._stale_idx].np
    assert known[[2, 4]].tolist() == [[0.25] * K] * 2
    drafting[0] = False
    ours.record_confidences(torch.full((SLOTS, K), 0.9), batch)
    assert ours._stale_confidences[ours._stale_idx].np is known
    drafting[0] = True
    ours.confidences[4] = 0.75
    ours.record_confidences(ours.confidences, batch)
    ours.record_confidences(ours.confidences, batch)
    assert ours._stale_confidences[ours._stale_idx].np[4].tolist() == [0.75] * K


def test_of_a_step_that_is_cut_only_the_slots_are_uploaded_when_they_change():
    _, ours = managers()
    uploaded, given = [], torch.zeros(3)

    def upload(data, **options):
        uploaded.append(data.tolist())
        return torch.from_numpy(data)

    slots = np.array([1, 2])
    assert cutting.upload_input(upload, slots, dtype=torch.int32).tolist() == [1, 2], "a step that is not cut"
    for _ in range(2):
        ours.get_num_tokens({"0": K + 1}, {"0": [0] * K})
        assert cutting.upload_input(upload, slots, device="cpu", dtype=torch.int32).tolist() == [1, 2]
        assert cutting.upload_input(upload, np.arange(3), device="cpu") is None
        assert cutting.upload_input(upload, np.arange(3), out=given) is given
        ours.reallocate_drafts(["0"], torch.tensor([SLOTS - 1], dtype=torch.int32))
    assert uploaded == [[1, 2], [1, 2]]


def test_the_last_row_that_fits_is_verified():
    theirs, ours = managers()
    names = [str(i) for i in range(SLOTS)]
    theirs.cost_tables = ours.cost_tables = np.zeros(SLOTS + 1), np.full(200, 1.0)
    for manager in (theirs, ours):
        manager._stale_confidences[manager._stale_idx].np[:] = 1.0
    step = dict.fromkeys(names, K + 1), {name: [0] * K for name in names}
    assert ours.get_num_tokens(*step) == theirs.get_num_tokens(*step) == 60, "rows for which there is room"


def test_other_requests_have_their_own_confidences():
    """As many as before, in other slots."""
    _, ours = managers()
    ours._stale_confidences[0].np[:] = 0.0
    ours._stale_confidences[0].np[SLOTS - 1 - 3] = 1.0  # of request 3
    for name, expected in (("0", 1), ("3", 1 + K), ("0", 1)):
        assert ours.get_num_tokens({name: K + 1}, {name: [0] * K}) == expected
