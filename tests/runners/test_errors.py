"""What is wrong is said before anything is generated, by its name, whatever the model runner."""

import pytest
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import MinPLogitsProcessor

from rollout_spec import engine_kwargs
from rollout_spec.config import PROPOSER_PATH
from rollout_spec.integrations.vllm import compat
from tests.integrations.draft_models import write_draft_model
from tests.integrations.engines import IS_V2, build, generate

OPTIONS, OFF = engine_kwargs(num_speculative_tokens=4), engine_kwargs(speculation=False)
PROPOSER = OPTIONS["speculative_config"]


def unchecked(**options):
    """Arguments as those write them who do not call `engine_kwargs`, which would refuse these options."""
    proposer = {**PROPOSER, "num_speculative_tokens": 8}
    return {"speculative_config": proposer, "additional_config": {"rollout_spec": options}}


class OwnProcessor(MinPLogitsProcessor):
    """A user's, to which V1's sampler would not apply drafts."""


OF_V1 = [
    (unchecked(drafter_options={"min_survival": 0.1}), "'history' does not take 'min_survival'"),
    (unchecked(drafter_options={"max_history_tokens": 0}), "max_history_tokens must be at least 1"),
    (unchecked(drafter="tests.adversaries.SameToken", drafter_options={"size": 2}), "'size'"),
    (unchecked(drafter="tests.adversaries.NoDrafter"), "has no attribute .extend"),
    (unchecked(drafter="no.such.module.Drafter"), "cannot be imported"),
    (unchecked(drafter="device", drafter_options={"min_survival": 0.1}), "needs vLLM's V2 model runner"),
    (engine_kwargs(drafter="tests.adversaries.RaisesWhenBuilt"), "has no len"),
    ({**OFF, "logits_processors": [f"{__name__}:OwnProcessor"]}, "OwnProcessor would be ignored by rollout_spec's"),
    ({**OPTIONS, "async_scheduling": True}, 'leave async_scheduling .* out, or use drafter="device"'),
]
ON_HOST = "is on the host and needs vLLM's V1 .*: unset VLLM_USE_V2_MODEL_RUNNER, or leave drafter out"
OF_V2 = [
    (unchecked(drafter_options={"max_history_tokens": 9}), "'device' does not take 'max_history_tokens'"),
    (unchecked(drafter_options={"max_resident_tokens": 0}), "max_resident_tokens must be at least 1"),
    (engine_kwargs(drafter="ngram"), f"drafter='ngram' {ON_HOST}"),
    (engine_kwargs(drafter="tests.adversaries.Adversary"), f"drafter='tests.adversaries.Adversary' {ON_HOST}"),
    ({**OPTIONS, "use_fp64_gumbel": True}, "use_fp64_gumbel"),  # V1 has its noise from elsewhere
]
ERRORS = [
    *(OF_V2 if IS_V2 else OF_V1),
    (unchecked(drafter="suffixx"), "unknown drafter 'suffixx'.*did you mean 'suffix'"),
    (unchecked(num_speculativ_tokens=4), "did you mean 'num_speculative_tokens'"),
    (unchecked(num_speculative_tokens=4), "make them equal"),
    (unchecked(speculation=False), "speculation=False"),
    ({**OPTIONS, "additional_config": {"rollout_spec": True}}, "must be a dict"),
    ({"additional_config": {"rolout_spec": {}}}, "did you mean 'rollout_spec'"),
    ({"additional_config": {"rollout_spec": {}}}, "speculative_config is missing"),
    ({**OPTIONS, "speculative_config": {**PROPOSER, "model": PROPOSER_PATH + "s"}}, f"did you mean '{PROPOSER_PATH}'"),
    ({**OPTIONS, "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}, "can draft beside history"),
    ({**OPTIONS, "runner": "pooling"}, "this one pools"),
]


@pytest.mark.parametrize(("kwargs", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors_name_their_cause(tiny_model, kwargs, message):
    with pytest.raises((AttributeError, TypeError, ValueError), match=message):
        build(tiny_model, **kwargs)


OLD = "beside history in the V2 model runner of vLLM 0.31 or newer, and this is 0.*: leave out speculative_config, and"


@pytest.mark.parametrize(
    ("settings", "message"),
    [({}, OLD), ({"drafter": "history"}, OLD)]
    if compat.is_v2_old()
    else [
        ({"rejection_sample_method": "block"}, "rejection_sample_method"),
        ({"drafter": "history"}, "drafter='history' is on the host and needs vLLM's V1"),
    ]
    if IS_V2
    else [
        ({}, "beside history in the V2 model runner .* this engine has V1 .*: leave out speculative_config, and"),
        ({"drafter": "suffix"}, "V1 .V2 does not have drafter='suffix', which is on the host.: leave out speculative_"),
    ],
)
def test_what_cannot_draft_beside_a_model(tiny_model, tmp_path, settings, message):
    beside = {name: value for name, value in settings.items() if name == "drafter"}
    draft_model = {"method": "draft_model", "model": str(write_draft_model(tiny_model, tmp_path / "draft"))}
    draft_model |= {"num_speculative_tokens": 3, **{k: v for k, v in settings.items() if k not in beside}}
    with pytest.raises(ValueError, match=message):
        build(tiny_model, **engine_kwargs(speculative_config=draft_model, **beside))


@pytest.mark.skipif(IS_V2, reason="V2 has them")
@pytest.mark.parametrize("options", [OPTIONS, OFF])
def test_scores_of_chosen_tokens_are_refused(tiny_model, options):
    with pytest.raises(ValueError, match="logprob_token_ids"):
        generate(build(tiny_model, **options), [SamplingParams(logprob_token_ids=[5])])


def test_vllm_that_will_not_load_the_plugin(monkeypatch):
    """The engine would run without speculation, or with drafts that are not verified, without a word."""
    for value, remedy in (("other", "add rollout_spec to it"), ("other, rollout_spec", "remove the spaces")):
        monkeypatch.setenv("VLLM_PLUGINS", value)
        with pytest.raises(ValueError, match=f"VLLM_PLUGINS='{value}' keeps vLLM from loading .*: {remedy}"):
            engine_kwargs()
    monkeypatch.setenv("VLLM_PLUGINS", "other,rollout_spec")
    assert engine_kwargs(num_speculative_tokens=4)["additional_config"] == OPTIONS["additional_config"]


@pytest.mark.parametrize("options", [OPTIONS, OFF])
def test_a_front_end_without_our_checks_is_refused(tiny_model, monkeypatch, options):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ValueError, match=r"VLLM_USE_RUST_FRONTEND.*: unset it"):
        build(tiny_model, **options)
