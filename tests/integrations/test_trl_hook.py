"""RolloutSpecGenerator in real TRL trainers with a tiny random policy."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from rollout_spec import RolloutSpecGenerator, doctor

pytestmark = pytest.mark.engine

ENGINES = []
FP32 = {"dtype": "float32", "enforce_eager": True, "num_gpu_blocks_override": 300}


def make_trainer(model_path, tmp_path, callbacks, trainer=GRPOTrainer, config=GRPOConfig, **kwargs):
    defaults = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 24,
        "learning_rate": 1e-2,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 64,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return trainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model_path, padding_side="left"),
        reward_funcs=lambda completions, **_: [float(len(c.split())) / 24 + ("w1" in c) for c in completions],
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5 w6"]}),
        args=config(**{**defaults, **kwargs}),
        callbacks=callbacks,
    )


def test_grpo_with_speculation(tiny_model, tmp_path):
    """Rollouts, metrics, policy versions, the log-probability check and switching, in one run."""
    seen = []

    class Recording(RolloutSpecGenerator):
        def generate(self, prompts, sampling_params, *args, **kwargs):
            outputs = super().generate(prompts, sampling_params, *args, **kwargs)
            self.enabled = False
            again = super().generate(prompts, sampling_params, *args, **kwargs)
            self.enabled = True
            seen.append((sampling_params, outputs, again))
            return outputs

    generator = Recording(llm_kwargs=FP32, num_speculative_tokens=4, drafter_options={"min_survival": 0.0})
    trainer = make_trainer(tiny_model, tmp_path, [generator])
    ENGINES.append(generator.llm)
    trainer.train()

    assert len(seen) == 3
    for _, outputs, again in seen:
        for a, b in zip(outputs, again, strict=True):
            assert list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids)
    seeds = [params.seed for sampling_params, _, _ in seen for params in sampling_params]
    assert len(set(seeds)) == len(seeds) == 24
    assert generator.policy_version == 3
    assert generator.logprob_error[1] < 1e-4
    logs = [entry for entry in trainer.state.log_history if "rollout_spec/tokens" in entry]
    assert len(logs) == 3
    assert logs[-1]["rollout_spec/policy_version"] == 3
    assert sum(entry["rollout_spec/draft_tokens"] for entry in logs) > 0
    assert all(entry["rollout_spec/generation_seconds"] > 0 for entry in logs)
    assert all(entry["rollout_spec/drafter_errors"] == 0 for entry in logs)
    report = doctor.read_report(tmp_path / "rollout_spec.json")
    assert "Where the time of a step goes" in doctor.explain(report)
    # What TRL itself sees: log-probabilities that its own forward pass confirms.
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in logs)
    drafter = generator.llm.llm_engine.model_executor.driver_worker.model_runner.drafter.session.drafter
    drafter.check_integrity()


def test_rloo_with_truncated_sampling(tiny_model, tmp_path):
    generator = RolloutSpecGenerator(llm_kwargs=FP32, num_speculative_tokens=4)
    trainer = make_trainer(
        tiny_model, tmp_path, [generator], RLOOTrainer, RLOOConfig, max_steps=2, top_p=0.9, top_k=8, min_p=0.02
    )
    ENGINES.append(generator.llm)
    trainer.train()
    assert generator.stats()["emitted_tokens"] > 0
    assert math.isnan(generator.logprob_error[0]), "RLOO asks for no log-probabilities, so there is nothing to check"


def test_engine_in_another_precision_is_refused(tiny_model, tmp_path):
    generator = RolloutSpecGenerator(
        llm_kwargs={**FP32, "dtype": "bfloat16"}, num_speculative_tokens=4, logprob_tolerance=1e-4
    )
    trainer = make_trainer(tiny_model, tmp_path, [generator])
    ENGINES.append(generator.llm)
    with pytest.raises(RuntimeError, match="log-probabilities differ"):
        trainer.train()


def test_shared_seed_is_refused(tiny_model, tmp_path):
    generator = RolloutSpecGenerator(llm_kwargs=FP32)
    trainer = make_trainer(tiny_model, tmp_path, [generator], generation_kwargs={"seed": 1})
    ENGINES.append(generator.llm)
    with pytest.raises(ValueError, match="copies"):
        trainer.train()


@pytest.mark.parametrize(
    ("changed", "message"), [({"use_vllm": False}, "use_vllm=True"), ({"vllm_mode": "server"}, "colocate")]
)
def test_trainer_without_a_colocated_engine(tiny_model, tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tiny_model, tmp_path, [RolloutSpecGenerator()], **changed)


def test_second_speculative_config(tiny_model, tmp_path):
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    generator = RolloutSpecGenerator(llm_kwargs={**FP32, "speculative_config": ngram})
    with pytest.raises(ValueError, match="speculative_config is set by llm_kwargs"):
        make_trainer(tiny_model, tmp_path, [generator])


def test_engine_that_was_built_elsewhere():
    """A trainer whose engine did not pass through us must not train as if it had."""
    with pytest.raises(RuntimeError, match="was not built through"):
        RolloutSpecGenerator().on_train_begin(None, None, None)


def test_engine_without_the_plugin(tiny_model):
    """VLLM_PLUGINS may leave us out: the engine would verify nothing."""

    class Engine:
        def collective_rpc(self, *args, **kwargs):
            raise AttributeError("'CPUWorker' object has no attribute 'rollout_spec'")

    with pytest.raises(RuntimeError, match="VLLM_PLUGINS"):
        RolloutSpecGenerator()._attach(Engine())


def test_unknown_option():
    with pytest.raises(ValueError, match="did you mean 'num_speculative_tokens'"):
        RolloutSpecGenerator(num_speculative_token=4)


def test_generating_without_an_engine():
    with pytest.raises(RuntimeError, match="no engine"):
        RolloutSpecGenerator().generate([], [])


def test_split_groups_warn():
    from rollout_spec.integrations.trl_hook import _warn_of_split_groups

    args = SimpleNamespace(num_generations=8, per_device_train_batch_size=4, steps_per_generation=1)
    with pytest.warns(UserWarning, match="groups are split"):
        _warn_of_split_groups(args)


def test_seeds_are_unique_and_repeatable():
    """Over steps, calls in a step, data-parallel replicas; the same again after a restart."""

    def seeds(replica):
        generator = RolloutSpecGenerator()
        generator._replica = replica
        found = []
        for step in range(3):
            generator.on_step_begin(None, SimpleNamespace(global_step=step), None)
            for _ in range(2):
                params = SimpleNamespace(seed=None)
                params.clone = lambda: SimpleNamespace(seed=None)
                found += [p.seed for p in generator._with_seeds([0] * 8, params)]
        return found

    both = seeds(0) + seeds(1)
    assert len(set(both)) == len(both) == 96
    assert seeds(1) == both[48:]
    assert all(0 <= seed < 2**63 for seed in both)


def test_infinite_tolerance_skips_the_check():
    generator = RolloutSpecGenerator(logprob_tolerance=math.inf)
    config = SimpleNamespace(model_config=SimpleNamespace(dtype="torch.float32"))
    generator.llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
    generator._check_logprobs([], [SimpleNamespace(logprobs=0)])
    assert math.isnan(generator.logprob_error[0])
