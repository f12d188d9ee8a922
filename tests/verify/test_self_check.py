"""The check at start: it passes on sound kernels, emulated here, and planted faults have the right consequence."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from rollout_spec import cli, doctor
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.drafters.device import kernels
from rollout_spec.drafters.device import self_check as drafter_check
from rollout_spec.drafters.device.drafter import DeviceDrafter
from rollout_spec.jit.warm_up import warm_up_kernels
from rollout_spec.types import SamplingBatch
from rollout_spec.verify import agreement, kernel, reference, self_check
from rollout_spec.verify.agreement import Batch, Disagreement
from rollout_spec.verify.self_check import Setting
from tests.interpreter import run_as_python
from tests.launches import recorded_variants

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(run_as_python(), reason="minutes in Triton's interpreter")

VOCAB, K = 1100, 3  # more than two tiles
SETTING = Setting(CPU, VOCAB, torch.bfloat16, K, hidden=(64, torch.bfloat16))
DRAFTER = {"max_requests": 6, "num_speculative_tokens": K, "vocab_size": VOCAB, "use_noise": True, "options": {}}


@pytest.fixture
def plant(monkeypatch):
    """A function that plants a fault in what a function of a module returns."""

    def plant(module, name, change):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **options: change(original(*args, **options), *args))

    return plant


def wrong_token(result, logits, *_):
    result.output_token_ids[0, 0] = (result.output_token_ids[0, 0] + 1) % logits.shape[1]
    return result


def wrong_logprob(result, *_):
    return result if result.logprobs is None else result._replace(logprobs=result.logprobs + 0.01)


def wrong_rank(result, *_):
    return result if result.ranks is None else result._replace(ranks=result.ranks + 3)


def wrong_count(result, *_):
    return result._replace(num_broken_rows=result.num_broken_rows + 1)


def changed_word(word, change):
    def changed(result, *_):
        if result.features is not None:
            result.features[0, word] ^= change
        return result

    return changed


def wrong_draft(result, *_):
    drafts, rates = result
    drafts[0, K - 1] += 1
    return drafts, rates


def drafts_that_change(result, *_):
    """Now and then another token, as a race would give."""
    drafts, rates = result
    drafts[0, 0] = int(torch.randint(VOCAB, ()))
    return drafts, rates


# -- the checks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "mode", "vocab_size", "k"),
    [
        ("sample", "processed_logprobs", VOCAB, K),
        ("rejection", "raw_logprobs", 24, 1),
        ("sample", "processed_logprobs", 2, 0),
    ],
)
def test_sound_kernels_pass(method, mode, vocab_size, k):
    setting = Setting(CPU, vocab_size, torch.bfloat16, k, method, mode, SETTING.hidden)
    verdict = self_check.check(setting)
    assert verdict[1:] == (None, None)
    assert verdict.num_rows > 30


def test_it_covers_all_kinds_of_rows():
    """Accepted and rejected drafts, greedy and sampled, cut, broken and empty rows, of the engine's vocabulary, too."""
    seen = set()
    for case in self_check._cases(SETTING._replace(vocab_size=5000), np.random.default_rng(0)):
        vocab_size = case.batch.logits.shape[1]
        assert vocab_size == 5000 or vocab_size - 2049 < 16
        assert vocab_size % 16 == 5000 % 16
        samples = reference.verify(*case.batch, after_difference=True).target_token_ids
        batch = self_check.with_drafts(case.batch, samples, case.is_right)
        result = reference.verify(*batch)
        lengths = np.diff(batch.cu, prepend=0)
        for found, kind in (
            (lengths[lengths > 0] == result.num_accepted[lengths > 0], "all accepted"),
            (result.num_accepted[lengths > 0] == 0, "none accepted"),
            (batch.rows.temperature == 0, "greedy"),
            (batch.rows.temperature > 0, "sampled"),
            (result.num_broken_rows > 0, "broken"),
            (result.num_invalid_rows > result.num_broken_rows, "empty"),
        ):
            seen |= {(vocab_size == 5000, kind)} if np.any(found) else set()
    kinds = ["all accepted", "none accepted", "greedy", "sampled", "broken"]
    assert seen == {(is_whole, kind) for is_whole in (True, False) for kind in kinds} | {(False, "empty")}


def test_it_launches_what_is_compiled_anyway():
    config = RolloutSpecConfig(num_speculative_tokens=K)
    size = 2600
    arguments = {"dtype": torch.bfloat16, "device": CPU, "logprobs_mode": SETTING.logprobs_mode}
    with recorded_variants() as compiled:
        warm_up_kernels(config, vocab_size=size, hidden=SETTING.hidden, **arguments)
    with recorded_variants() as launched:
        assert self_check.check(SETTING._replace(vocab_size=size))[1:] == (None, None)
    assert launched <= compiled

    drafter = DeviceDrafter(max_requests=6, max_model_len=512, device=CPU, max_draft_tokens=K, max_resident_tokens=512)
    zeros = torch.zeros(6, dtype=torch.int32)
    with recorded_variants() as compiled:
        drafter.warm_up(torch.int32, torch.zeros(6, 512, dtype=torch.int32), zeros, zeros.long(), zeros.float())
    with recorded_variants() as launched:
        assert drafter_check.check(CPU, **DRAFTER) is None
    assert launched <= compiled


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (wrong_token, "whose score differs by"),
        (wrong_logprob, "the log-probability is off by 0.01"),
        (wrong_rank, "the rank is"),
        (wrong_count, "num_broken_rows is 1 for 0"),
    ],
)
def test_a_fault_in_verification_is_found(plant, change, said):
    plant(kernel, "verify_rows", change)
    verdict = self_check.check(SETTING)
    assert said in verdict.verification
    assert verdict.verification.startswith(f"{VOCAB} bfloat16 logits, up to {K} drafts")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed_word(0, -1), "of a signature's 128 bits differ"),
        (changed_word(2, 1), "the most probable tokens are"),
        (changed_word(3, 2 << 32), "of the most probable tokens is off by"),
    ],
)
def test_a_fault_in_features_is_found(plant, change, said):
    plant(kernel, "verify_rows", change)
    verdict = self_check.check(SETTING)
    assert verdict.verification is None
    assert said in verdict.features


@pytest.mark.parametrize("method", ["sample", "rejection"])
def test_what_is_too_close_to_tell_is_no_fault(method):
    """Two tokens of nearly equal score; others, and tokens that do not exist, are faults."""
    logits = np.array([[0.0, 0.0, -1.0, -np.inf]], np.float32)
    rows = SamplingBatch(np.ones(1, np.float32), np.array([3]), np.array([7]))
    batch = Batch(logits, np.zeros(0, np.int32), np.zeros(1, np.int32), rows)
    domain = agreement.noise.DOMAIN_TARGET if method == "sample" else agreement.noise.DOMAIN_RESIDUAL
    noise = agreement.noise.gumbel(3, 7, np.arange(4), domain)
    logits[0, :2] = -noise[:2] + 2
    logits[0, 1] -= 2e-5
    expected = reference.verify(*batch, method=method)
    assert expected.output_token_ids.tolist() == [[0]]
    for token, is_close in ((1, True), (2, False), (3, False), (4, False), (-1, False)):
        got = expected._replace(output_token_ids=np.array([[token]], np.int32))
        if is_close:
            assert agreement.compare(got, expected, batch, method=method) == (1, 0.0)
        else:
            with pytest.raises(Disagreement, match="score differs"):
                agreement.compare(got, expected, batch, method=method)
        with pytest.raises(Disagreement, match="score differs"):
            agreement.compare(got, expected, batch, method=method, has_probs=True)


def test_ranks_may_differ_where_sums_decide_or_logits_are_nearly_equal():
    logits = np.zeros((1, 1000), np.float32)
    logits[0, :3] = 1.0, 1.000001, 1.000001
    rows = SamplingBatch(np.zeros(1, np.float32), np.zeros(1, np.int64), np.zeros(1, np.int64))
    for top_p, slack in ((None, 0), (np.full(1, 0.9, np.float32), 1)):
        limited = SamplingBatch(rows.temperature, rows.seeds, rows.positions, top_p=top_p)
        batch = Batch(logits, np.zeros(0, np.int32), np.zeros(1, np.int32), limited)
        expected = reference.verify(*batch, logprobs_mode="raw_logprobs")
        assert expected.ranks.tolist() == [2]
        for difference in range(4):
            got = expected._replace(ranks=expected.ranks + difference)
            if difference <= slack + 1:  # token 0 is that close to tokens 1 and 2
                agreement.compare(got, expected, batch)
            else:
                with pytest.raises(Disagreement, match="the rank is"):
                    agreement.compare(got, expected, batch)


@pytest.mark.parametrize("options", [{}, {"features": False, "inverse_temperature": 1.0}])
def test_a_sound_device_drafter_passes(options):
    assert drafter_check.check(CPU, **{**DRAFTER, "options": options}) is None


@pytest.mark.parametrize(("vocab_size", "use_noise"), [(1, True), (40, False)])
def test_small_vocabularies(vocab_size, use_noise):
    changed = {"vocab_size": vocab_size, "use_noise": use_noise, "max_requests": 1}
    assert drafter_check.check(CPU, **{**DRAFTER, **changed}) is None


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("draft", wrong_draft, "for 5 requests, request 0: "),
        ("draft", drafts_that_change, "two equal calls draft differently"),
        ("draft", lambda result, *_: (result[0], result[1] + 1), "some confidences are wrong"),
        ("retire", lambda result, rows, stops, text, *_: text.zero_(), "a rollout that ended is not"),
    ],
)
def test_a_fault_of_the_device_drafter_is_found(plant, name, change, said):
    plant(kernels, name, change)
    assert said in drafter_check.check(CPU, **DRAFTER)


# -- the consequences in an engine -----------------------------------------------------------------------------------


class OnDevice:
    """Stands in for a GPU of which tensors may be asked for: they are the CPU's."""

    type = "cuda"


@pytest.fixture
def adapter(monkeypatch):
    """A function that makes an adapter whose kernels run as on a GPU, with a device drafter if asked for."""
    pytest.importorskip("vllm")
    from rollout_spec.integrations.vllm import start_check
    from rollout_spec.integrations.vllm.runner import RunnerAdapter
    from rollout_spec.integrations.vllm.speculation import Speculation

    for name in ("self_check", "drafter_check"):
        module = globals()[name]
        check = module.check
        replaced = (lambda setting, check=check: check(setting._replace(device=CPU))) if name == "self_check" else (
            lambda device, check=check, **options: check(CPU, **options)
        )  # fmt: skip
        monkeypatch.setattr(module, "check", replaced)
    monkeypatch.setattr(start_check, "describe", lambda device: "a GPU, Triton 3, torch 2")
    monkeypatch.setattr(start_check, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(start_check, "agreeing_on_any", lambda vllm_config: vllm_config.is_true_on_any)

    class Made(Speculation):
        gave_up = False

        def give_up(self):
            self.gave_up = True

    def make(drafter="device", is_true_on_any=None, **options):
        model = SimpleNamespace(
            get_vocab_size=lambda: VOCAB,
            dtype=torch.bfloat16,
            logprobs_mode="processed_logprobs",
            get_hidden_size=lambda: 64,
        )
        vllm_config = SimpleNamespace(
            model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=6), is_true_on_any=is_true_on_any
        )
        made = object.__new__(RunnerAdapter)
        made._runner = SimpleNamespace(device=OnDevice(), vllm_config=vllm_config)
        made._config = RolloutSpecConfig(num_speculative_tokens=K, drafter=drafter, **options)
        made._speculation, made._drafter_wants_features = Made(), True
        return made

    return make


def state_of(adapter):
    return adapter._drafter_wants_features, adapter._speculation.gave_up


@pytest.fixture
def said(caplog):
    """Lines of the log, those of vLLM's loggers among them."""
    logger = logging.getLogger("vllm.plugins.rollout_spec")
    before, logger.propagate = (logger.level, logger.propagate), False
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    yield lambda: [record.getMessage() for record in caplog.records]
    logger.removeHandler(caplog.handler)
    logger.level, logger.propagate = before


def test_an_engine_says_in_one_line_that_its_kernels_agree(adapter, said):
    made = adapter()
    made.check_kernels()
    assert state_of(made) == (True, False)
    (line,) = said()
    assert line.startswith("rollout_spec: kernels agree with the references on a GPU: ")
    assert " rows, " in line


def test_it_does_not_start_where_verification_errs(adapter, plant):
    plant(kernel, "verify_rows", wrong_token)
    with pytest.raises(RuntimeError) as raised:
        adapter("history").check_kernels()
    for part in ("a GPU, Triton 3, torch 2", f"{VOCAB} bfloat16 logits", "request 0, token 0", "doctor --device"):
        assert part in str(raised.value)


def test_wrong_features_are_switched_off(adapter, plant, said):
    plant(kernel, "verify_rows", changed_word(0, -1))
    made = adapter("history")
    made.check_kernels()
    assert state_of(made) == (False, False)
    (line,) = said()
    assert "features differ" in line
    assert "doctor --device" in line


def test_a_wrong_device_drafter_is_switched_off(adapter, plant, said):
    plant(kernels, "draft", wrong_draft)
    made = adapter()
    made.check_kernels()
    assert state_of(made) == (True, True)
    (line,) = said()
    assert 'drafter="history"' in line


def test_ranks_decide_alike(adapter, said):
    """Each rank votes on every part, and takes part in the others' decisions."""
    votes = []

    def on_any(found):
        votes.append(found)
        return len(votes) > 1  # another rank's features and drafter err

    made = adapter(is_true_on_any=on_any)
    made.check_kernels()
    assert votes == [False] * 3
    assert state_of(made) == (False, True)
    assert all("another tensor-parallel rank says how" in line for line in said())
    with pytest.raises(RuntimeError, match="another tensor-parallel rank"):
        adapter(is_true_on_any=lambda found: True).check_kernels()


def test_without_speculation_only_verification_is_checked(adapter, plant, said):
    plant(kernels, "draft", wrong_draft)
    made = adapter("history", speculation=False)
    made._speculation, made._drafter_wants_features = None, False
    made.check_kernels()
    assert len(said()) == 1


def test_on_a_cpu_nothing_is_checked(adapter, monkeypatch):
    monkeypatch.setattr(self_check, "check", None)
    made = adapter()
    made._runner.device = CPU
    made.check_kernels()
    assert state_of(made) == (True, False)


# -- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_doctor_says_that_there_is_no_gpu(capsys):
    assert cli.main(["doctor", "--device"]) == 2
    assert "no GPU on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("is_sound", [True, False])
def test_the_doctor_prints_verdicts(is_sound, capsys, plant):
    if not is_sound:
        plant(kernels, "draft", wrong_draft)
    assert doctor.check_device(SETTING, max_requests=3) == int(not is_sound)
    printed = capsys.readouterr().out
    assert printed.count("ok ") == 2 + is_sound
    assert ("problem  the device drafter: for 2 requests, request 0" in printed) != is_sound
