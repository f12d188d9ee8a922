"""RolloutSpecGenerator in real TRL trainers with a tiny random policy."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

from datasets import Dataset
from trl import GRPOTrainer, RLOOConfig, RLOOTrainer
from vllm import SamplingParams

from rollout_spec import RolloutSpecGenerator
from rollout_spec.doctor import explain, read_report
from tests.integrations.engines import build
from tests.integrations.trainers import FP32, make_trainer
from tests.test_doctor import a_report

pytestmark = pytest.mark.engine


def test_grpo_with_speculation(tiny_model, tmp_path, monkeypatch):
    """Rollouts, metrics, policy versions, the log-probability check and switching, in one run."""
    seen, lines = [], []
    monkeypatch.setattr("rollout_spec.integrations.trainers.trl.tell", lines.append)

    class Recording(RolloutSpecGenerator):
        def generate(self, prompts, sampling_params, *args, **kwargs):
            outputs = super().generate(prompts, sampling_params, *args, **kwargs)
            self.enabled = False
            again = super().generate(prompts, sampling_params, *args, **kwargs)
            self.enabled = True
            seen.append((sampling_params, outputs, again))
            return outputs

    generator = Recording(
        llm_kwargs=FP32, num_speculative_tokens=4, budget=False, drafter_options={"min_survival": 0.0}
    )
    trainer = make_trainer(tiny_model, tmp_path, [generator])
    trainer.train()

    assert len(seen) == 3
    for _, outputs, again in seen:
        for a, b in zip(outputs, again, strict=True):
            assert list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids)
    seeds = [params.seed for sampling_params, _, _ in seen for params in sampling_params]
    assert len(set(seeds)) == len(seeds) == 24
    assert generator.policy_version == 3
    drafter = generator.llm.llm_engine.model_executor.driver_worker.model_runner.drafter.session.drafter
    assert drafter._version == 2, "the engine has the first weights already"
    assert generator.logprob_error[1] < 1e-4
    logs = [entry for entry in trainer.state.log_history if "rollout_spec/tokens" in entry]
    assert len(logs) == 3
    assert logs[-1]["rollout_spec/policy_version"] == 2
    stats = generator.stats()
    for name in ("draft_tokens", "accepted_tokens"):  # each log tells what is new since the last one
        assert sum(entry[f"rollout_spec/{name}"] for entry in logs) == stats[name] > 0
    said = [sum(len(output.outputs[0].token_ids) for output in outputs) for _, outputs, _ in seen]
    assert [entry["rollout_spec/tokens"] for entry in logs] == said, "what was sampled past an end does not count"
    assert all(entry["rollout_spec/generation_seconds"] > 0 for entry in logs)
    assert all(entry["rollout_spec/drafter_errors"] == 0 for entry in logs)
    report = read_report(tmp_path / "rollout_spec.json")
    assert "Where the time of a step goes" in explain(report)
    assert len(lines) == 2
    assert "is on: up to 4 draft tokens per request and step, drafted by 'history'" in lines[0]
    assert f"after 3 training steps {stats['tokens_per_step']:.2f} tokens per request and step" in lines[1]
    # What TRL itself sees: log-probabilities that its own forward pass confirms.
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in logs)
    drafter.check_integrity()


def test_rloo_with_truncated_sampling(tiny_model, tmp_path):
    """RLOO asks for no log-probabilities: the engine gives them for the check, and the trainer sees none."""
    seen = []

    class Recording(RolloutSpecGenerator):
        def generate(self, prompts, sampling_params, *args, **kwargs):
            outputs = super().generate(prompts, sampling_params, *args, **kwargs)
            seen.append(outputs)
            return outputs

    generator = Recording(llm_kwargs=FP32, num_speculative_tokens=4)
    trainer = make_trainer(
        tiny_model, tmp_path, [generator], RLOOTrainer, RLOOConfig, max_steps=2, top_p=0.9, top_k=8, min_p=0.02
    )
    trainer.train()
    assert generator.stats()["emitted_tokens"] > 0
    assert 0 < generator.logprob_error[1] < 1e-4
    assert len(seen) == 2
    for outputs in seen:
        for output in outputs:
            assert output.outputs[0].logprobs is None
            assert output.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize(
    "changed",
    [
        {"repetition_penalty": 1.3},
        {"generation_kwargs": {"frequency_penalty": 0.5, "min_tokens": 4, "bad_words": ["w3"]}},
        {"vllm_structured_outputs_regex": "(w1|w2)(w3|w4)+"},
    ],
    ids=str,
)
def test_logits_that_the_engine_changes_are_no_alarm(tiny_model, tmp_path, changed, caplog):
    """Penalties, masks and grammars change log-probabilities, and the trainer's forward pass knows nothing of them."""
    generator = RolloutSpecGenerator(llm_kwargs=FP32, num_speculative_tokens=4)
    trainer = make_trainer(tiny_model, tmp_path, [generator], max_steps=2, **changed)
    trainer.train()
    assert math.isnan(generator.logprob_error[0])
    said = [record.getMessage() for record in caplog.records if "were not compared" in record.getMessage()]
    assert len(said) == 1
    assert "penalties, masks or grammars" in said[0]


def test_no_two_rollouts_have_the_same_seed(tiny_model, tmp_path):
    """Evaluation, training and training once more, in one process: every rollout has a seed of its own."""
    seeds = []

    class Recording(RolloutSpecGenerator):
        def generate(self, prompts, sampling_params, *args, **kwargs):
            seeds.extend(params.seed for params in sampling_params)
            return super().generate(prompts, sampling_params, *args, **kwargs)

    generator = Recording(llm_kwargs=FP32, num_speculative_tokens=4)
    trainer = make_trainer(tiny_model, tmp_path, [generator], max_steps=1, max_completion_length=4)
    trainer.evaluate(Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5 w6"]}))
    assert seeds
    for _ in range(2):
        before = len(seeds)
        trainer.train()
        assert len(seeds) > before
    assert len(set(seeds)) == len(seeds)


def test_the_engine_as_a_rollout_function_uses_it(tiny_model, tmp_path):
    """Distinct seeds of the caller's own, no parameters at all, one prompt alone, and chats."""
    generator = RolloutSpecGenerator(llm_kwargs=FP32, num_speculative_tokens=4)
    make_trainer(tiny_model, tmp_path, [generator])
    llm = generator.llm
    prompts = [{"prompt_token_ids": [1, 4, 9]}] * 3
    first, again = (
        llm.generate(prompts, [SamplingParams(seed=seed, max_tokens=8) for seed in (1, 2, 3)], use_tqdm=False)
        for _ in range(2)
    )
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in again]
    assert generator.logprob_error[1] < 1e-4
    assert len(llm.generate(prompts, use_tqdm=False)) == 3
    assert len(llm.generate("w1 w2", use_tqdm=False)) == 1
    with pytest.raises(ValueError, match="copies"):
        llm.generate(prompts, SamplingParams(seed=1), use_tqdm=False)
    different = [{"prompt_token_ids": [1, 4 + i]} for i in range(3)]
    assert len(llm.generate(different, SamplingParams(seed=1, max_tokens=2), use_tqdm=False)) == 3

    chats, params = [[{"role": "user", "content": "w5 w6"}]] * 4, SamplingParams(max_tokens=16)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    before = generator._interval.tokens
    outputs = llm.chat(chats, params, use_tqdm=False, chat_template=template)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 1
    assert generator._interval.tokens - before == sum(len(output.outputs[0].token_ids) for output in outputs)
    generator._num_generations -= 1
    repeated = llm.chat(chats, params, use_tqdm=False, chat_template=template)
    assert [o.outputs[0].token_ids for o in repeated] == [o.outputs[0].token_ids for o in outputs]
    assert len(llm.chat(chats[0], params, use_tqdm=False, chat_template=template)) == 1


def test_one_generator_serves_one_trainer(tiny_model, tmp_path):
    generator = RolloutSpecGenerator(llm_kwargs=FP32)
    make_trainer(tiny_model, tmp_path, [generator])
    with pytest.raises(ValueError, match="has an engine already"):
        make_trainer(tiny_model, tmp_path, [generator])


def test_another_engine_of_the_same_model_in_the_same_constructor_is_not_ours(tiny_model, tmp_path):
    """A judge, for example. The policy's rollouts still come from the policy's engine."""

    class Judged(GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.judge = build(tiny_model)

    generator = RolloutSpecGenerator(llm_kwargs=FP32)
    trainer = make_trainer(tiny_model, tmp_path, [generator], Judged)
    assert generator.llm is trainer.vllm_generation.llm
    assert trainer.judge.llm_engine.vllm_config.speculative_config is None


def test_one_trainer_takes_one_generator(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="takes one RolloutSpecGenerator and has 2"):
        make_trainer(tiny_model, tmp_path, [RolloutSpecGenerator(), RolloutSpecGenerator()])


def test_a_trainer_whose_construction_fails_leaves_nothing_behind(tiny_model, tmp_path, monkeypatch):
    """The next engine of that model is not ours, and the next trainer's is, with the same callback or a new one."""
    generator = RolloutSpecGenerator(llm_kwargs=FP32, num_speculative_tokens=4)
    with monkeypatch.context() as patch:
        patch.setattr("trl.generation.vllm_generation.is_vllm_available", lambda: False)
        with pytest.raises(ImportError):
            make_trainer(tiny_model, tmp_path, [generator])
    assert generator.llm is None
    others = build(tiny_model)
    assert others.llm_engine.vllm_config.speculative_config is None
    for retry in (RolloutSpecGenerator(llm_kwargs=FP32, num_speculative_tokens=4), generator):
        make_trainer(tiny_model, tmp_path, [retry])
        assert retry.stats()["steps"] == 0
    assert build(tiny_model).llm_engine.vllm_config.speculative_config is None


def test_engine_in_another_precision_is_refused(tiny_model, tmp_path):
    generator = RolloutSpecGenerator(
        llm_kwargs={**FP32, "dtype": "bfloat16"}, num_speculative_tokens=4, logprob_tolerance=1e-4
    )
    trainer = make_trainer(tiny_model, tmp_path, [generator])
    with pytest.raises(RuntimeError, match="computes in bfloat16 and the trainer in float32"):
        trainer.train()


def test_shared_seed_is_refused(tiny_model, tmp_path):
    generator = RolloutSpecGenerator(llm_kwargs=FP32)
    trainer = make_trainer(tiny_model, tmp_path, [generator], generation_kwargs={"seed": 1})
    with pytest.raises(ValueError, match="copies"):
        trainer.train()


def test_trainer_that_does_not_use_vllm(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="use_vllm=True"):
        make_trainer(tiny_model, tmp_path, [RolloutSpecGenerator()], use_vllm=False)


def test_second_speculative_config(tiny_model, tmp_path):
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    generator = RolloutSpecGenerator(llm_kwargs={**FP32, "speculative_config": ngram})
    with pytest.raises(ValueError, match="speculative_config is set by llm_kwargs"):
        make_trainer(tiny_model, tmp_path, [generator])


def test_engine_that_was_built_elsewhere():
    """A trainer whose engine did not pass through us must not train as if it had."""
    with pytest.raises(RuntimeError, match="was not built through"):
        RolloutSpecGenerator().on_train_begin(None, None, None)


@pytest.mark.parametrize("ranks_per_engine", [1, 2])
def test_each_engine_of_a_data_parallel_trainer_has_seeds_of_its_own(ranks_per_engine, monkeypatch):
    """The ranks that share an engine have the same; otherwise all would train on copies of one rank's rollouts."""
    monkeypatch.setattr("rollout_spec.integrations.trainers.trl._hook_engines", lambda: None)
    seeds = []
    for rank in range(4):
        generator = RolloutSpecGenerator()
        args = SimpleNamespace(use_vllm=True, process_index=rank, vllm_tensor_parallel_size=ranks_per_engine, seed=3)
        generator.on_init_end(args, None, None)
        generator.begin_step(0)
        seeds.append([params.seed for params in generator._with_seeds(["a"] * 3, SamplingParams())])
    engines = [seeds[first : first + ranks_per_engine] for first in range(0, 4, ranks_per_engine)]
    assert all(seeds_of_ranks == [seeds_of_ranks[0]] * ranks_per_engine for seeds_of_ranks in engines)
    assert len({seed for first, *_ in engines for seed in first}) == 3 * len(engines)


@pytest.mark.parametrize(("max_steps", "said_at"), [(9, [4, 4]), (1, [1, 1])])
def test_each_training_says_once_what_speculation_does(tmp_path, monkeypatch, max_steps, said_at):
    """Not in its first steps, unless it has no others, and not in evaluations."""
    said = []
    monkeypatch.setattr("rollout_spec.integrations.trainers.trl.tell", said.append)
    monkeypatch.setattr(RolloutSpecGenerator, "describe_engine", lambda self: "it is on")
    generator = RolloutSpecGenerator()
    generator.llm = SimpleNamespace(collective_rpc=lambda *_, **__: [a_report()])
    args = SimpleNamespace(output_dir=str(tmp_path), world_size=1)
    for _ in range(2):
        state = SimpleNamespace(global_step=0, max_steps=max_steps, is_world_process_zero=True)
        generator.on_train_begin(args, state, None)
        for state.global_step in range(1, max_steps + 1):
            generator.evaluating = state.global_step == 3
            generator.on_log(args, state, None)
    assert said[::2] == ["it is on"] * 2
    assert [line[: line.index(" tokens per")] for line in said[1::2]] == [
        f"rollout_spec: after {step} training steps 1.14" for step in said_at
    ]


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"top_p": 0.9}, "top_p=0.9:"),
        ({"top_k": 50, "generation_kwargs": {"min_p": 0.1}}, "top_k=50 and min_p=0.1:"),
        ({"top_k": 50, "vllm_importance_sampling_correction": False}, None),
        ({"top_p": 0.9, "generation_kwargs": {"top_p": 1.0}}, None),
        ({}, None),
    ],
)
def test_log_probabilities_of_a_truncated_distribution_are_warned_of(tiny_model, tmp_path, settings, warns):
    """Once, when the trainer is made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(tiny_model, tmp_path, [RolloutSpecGenerator(llm_kwargs=FP32)], **settings)
    said = [str(warning.message) for warning in caught if "importance ratios are biased" in str(warning.message)]
    assert len(said) == (warns is not None)
    assert warns is None or said[0].startswith(warns)


@pytest.mark.parametrize("fault", ["no step_seconds", "no draft_tokens"])
def test_a_report_that_cannot_be_summarised_does_not_end_a_training(tmp_path, monkeypatch, caplog, fault):
    said, report = [], a_report()
    monkeypatch.setattr("rollout_spec.integrations.trainers.trl.tell", said.append)
    if fault == "no step_seconds":
        report["stats"]["step_seconds"] = 0
    else:
        del report["stats"]["draft_tokens"]
    generator = RolloutSpecGenerator()
    generator.llm = SimpleNamespace(collective_rpc=lambda *_, **__: [report])
    args = SimpleNamespace(output_dir=str(tmp_path), world_size=1)
    for step in (3, 4):
        state = SimpleNamespace(global_step=step, max_steps=9, is_world_process_zero=True)
        generator.on_log(args, state, None)
    assert not said
    assert caplog.text.count("has no summary") == 1, "said once"
    assert (tmp_path / "rollout_spec.json").exists()


def test_unknown_option():
    with pytest.raises(ValueError, match="did you mean 'num_speculative_tokens'"):
        RolloutSpecGenerator(num_speculative_token=4)


def test_split_groups_warn():
    from rollout_spec.integrations.trainers.trl import _warn_of_split_groups

    args = SimpleNamespace(num_generations=8, per_device_train_batch_size=4, steps_per_generation=1)
    with pytest.warns(UserWarning, match="groups are split"):
        _warn_of_split_groups(args)


def test_generating_without_an_engine():
    with pytest.raises(RuntimeError, match="RolloutSpecGenerator has no engine"):
        RolloutSpecGenerator().generate([], [])
