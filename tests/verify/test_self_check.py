"""The check at start: sound kernels, emulated here, pass it; planted faults are found, and then no engine starts."""

import logging
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from rollout_spec import doctor
from rollout_spec.config import RolloutSpecConfig
from rollout_spec.types import SamplingBatch
from rollout_spec.verify import kernel, reference, self_check

CPU = torch.device("cpu")

VOCAB, K = 600, 3  # more than a tile
SETTING = {"vocab_size": VOCAB, "dtype": torch.bfloat16, "num_speculative_tokens": K}


@pytest.fixture
def plant(monkeypatch):
    """A function that plants a fault in what the kernels return."""

    def plant(change):
        original = kernel.verify_rows
        monkeypatch.setattr(kernel, "verify_rows", lambda *args, **options: change(original(*args, **options)))

    return plant


def with_first(name, change):
    """A fault: the first number of what a result has under this name becomes another one."""

    def changed(result):
        values = getattr(result, name)
        if values is not None:
            first = (0,) * values.ndim
            values[first] = change(values[first])
        return result

    return changed


@pytest.mark.parametrize(
    ("method", "mode", "vocab_size", "k"),
    [("sample", "processed_logprobs", VOCAB, K), ("rejection", "raw_logprobs", 24, 1), ("sample", "raw_logits", 2, 0)],
)
def test_sound_kernels_pass(method, mode, vocab_size, k):
    setting = {"vocab_size": vocab_size, "dtype": torch.float16, "num_speculative_tokens": k}
    assert self_check.find_fault(CPU, **setting, method=method, logprobs_mode=mode, for_v2=True) is None


@pytest.mark.parametrize(
    "name", ["output", "targets", "num_broken", "num_sampled", "num_rows", "num_rejected", "logprobs", "ranks"]
)
def test_a_fault_in_what_v2s_runner_gets_is_found(monkeypatch, name):
    original = kernel.verify_rows

    def verify_rows(*args, step=None, **options):
        result = original(*args, step=step, **options)
        if step is not None:
            getattr(step, name)[0] += 1
        return result

    monkeypatch.setattr(kernel, "verify_rows", verify_rows)
    assert self_check.find_fault(CPU, **SETTING) is None
    assert f"{name} of V2's runner" in self_check.find_fault(CPU, **SETTING, for_v2=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_first("target_token_ids", lambda token: (token + 1) % VOCAB), "token of row 0"),
        (with_first("output_token_ids", lambda token: token + 1), "output_token_ids is"),
        (with_first("logprobs", lambda logprob: logprob + 0.01), "log-probability of row 0"),
        (with_first("ranks", lambda rank: rank + 300), "rank of row 0"),
        (
            lambda result: result._replace(num_accepted=result.num_accepted.clamp(max=0)),
            "output_token_ids is|num_accepted is",
        ),
        (with_first("num_broken_rows", lambda count: count + 1), "num_broken_rows is"),
    ],
)
@pytest.mark.parametrize("method", ["sample", "rejection"])
def test_a_fault_is_found(plant, method, change, said):
    plant(change)
    fault = self_check.find_fault(CPU, **SETTING, method=method)
    assert any(words in fault for words in said.split("|"))
    assert fault.startswith(f"{VOCAB} torch.bfloat16 logits, up to ")


@pytest.mark.parametrize(("token", "is_close"), [(0, True), (1, True), (2, False), (3, False), (4, False), (-1, False)])
@pytest.mark.parametrize("method", ["sample", "rejection"])
def test_what_is_too_close_to_tell_is_no_fault(plant, method, token, is_close):
    """Two tokens of nearly equal score; others, and tokens that do not exist, are faults."""
    rows = SamplingBatch(torch.ones(1), torch.tensor([3]), torch.tensor([7]))
    nothing, cu = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    layout = reference.lay_out(cu, nothing, rows)
    domain = reference.DOMAIN_TARGET if method == "sample" else reference.DOMAIN_RESIDUAL
    logits = 2 - reference.with_noise(torch.zeros(1, 4), layout, domain)
    logits[0, 1:] += torch.tensor([-2e-5, -3.0, -torch.inf])

    def change(result):
        changed = torch.full_like(result.target_token_ids, token)
        return result._replace(target_token_ids=changed, output_token_ids=changed[:, None].int())

    plant(change)
    fault = self_check.fault_of((logits, nothing, cu, rows), method=method, logprobs_mode=None, max_draft_tokens=0)
    assert (fault is None) == is_close


@pytest.mark.parametrize(("is_sound", "on_another_rank"), [(True, False), (False, False), (True, True)])
def test_an_engine_with_a_fault_does_not_start(is_sound, on_another_rank, monkeypatch, caplog):
    pytest.importorskip("vllm")
    from rollout_spec.integrations.vllm import engine as runner

    model = SimpleNamespace(get_vocab_size=lambda: VOCAB, head_dtype=torch.bfloat16, logprobs_mode="processed_logprobs")
    adapter = object.__new__(runner.Engine)
    adapter._runner = SimpleNamespace(
        device=torch.device("cuda"), vllm_config=SimpleNamespace(model_config=model, use_v2_model_runner=True)
    )
    adapter.config = RolloutSpecConfig(num_speculative_tokens=K)
    monkeypatch.setattr(self_check, "find_fault", lambda device, **_: None if is_sound else "token of row 0")
    monkeypatch.setattr(runner, "is_true_on_any_rank", lambda _, is_true: is_true or on_another_rank)
    monkeypatch.setattr(runner, "say", logging.getLogger().warning)
    if is_sound and not on_another_rank:
        adapter.check_kernels()
        assert "the verifier agrees with its reference" in caplog.text
        return
    said = "another tensor-parallel rank" if on_another_rank else "token of row 0.*doctor --device"
    with pytest.raises(RuntimeError, match=said):
        adapter.check_kernels()


@pytest.mark.parametrize("is_sound", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_the_doctor_prints_verdicts(is_sound, capsys, plant):
    if not is_sound:
        plant(with_first("num_broken_rows", lambda count: count + 1))
    assert doctor.check_device(CPU, 64) == int(not is_sound)
    printed = capsys.readouterr().out
    assert printed.count("ok ") == 6 * is_sound
    assert printed.count("problem  ") == 6 * (not is_sound)
