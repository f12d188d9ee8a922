"""RolloutSpecGenerator in PPOTrainer with a tiny random policy. TRL had it up to 1.12.0: `make test-ppo`."""

import functools

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl.experimental.ppo")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer
from trl.trainer.utils import selective_log_softmax

from rollout_spec import RolloutSpecGenerator
from rollout_spec.integrations.trainers.ppo import logits_from
from rollout_spec.integrations.vllm.requests import request_options
from rollout_spec.noise.host import derive_seed
from rollout_spec.report import explain, read_report
from tests.conftest import VOCAB_SIZE
from tests.integrations import trainers
from tests.integrations.trainers import Compared

pytestmark = pytest.mark.engine

FP32 = {"enforce_eager": True, "num_gpu_blocks_override": 300, "max_model_len": 64}
QUERIES = ["w1 w2 w3", "w4 w5 w6 w7 w8", "w9", "w1 w2 w3 w4"]  # of different lengths, so that some are padded
PAD = 0


FIELDS = {
    "per_device_eval_batch_size": 4,
    "total_episodes": 24,
    "num_ppo_epochs": 1,
    "num_sample_generations": 0,
    "response_length": 24,
    **dict.fromkeys(("max_steps", "num_generations", "max_completion_length", "use_vllm", "vllm_mode")),
    **dict.fromkeys(("vllm_gpu_memory_utilization", "vllm_max_model_length")),
}


def make_trainer(model_path, tmp_path, callbacks, trainer=PPOTrainer, **kwargs):
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    critic, judge = (
        AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1, dtype=torch.float32)
        for _ in range(2)
    )
    queries = Dataset.from_dict({"input_ids": [tokenizer(query)["input_ids"] for query in QUERIES]})
    arguments = {"reward_funcs": None, "reward_model": judge, "value_model": critic, "eval_dataset": queries}
    arguments["train_dataset"] = queries.select([0, 1, 2, 3] * 4)
    trainer = functools.partial(trainer, ref_model=None)
    return trainers.make_trainer(model_path, tmp_path, callbacks, trainer, PPOConfig, arguments, **{**FIELDS, **kwargs})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ppo_with_speculation(tiny_model, tmp_path, temperature):
    """One epoch per update and one minibatch, so that every update is on-policy if the engine has its weights."""
    generator = Compared(llm_kwargs=FP32)
    trainer = make_trainer(tiny_model, tmp_path, [generator], temperature=temperature)
    before = trainer.policy_model.lm_head.weight.detach().clone()
    trainer.train()

    assert (trainer.policy_model.lm_head.weight - before).abs().max() > 1e-3, "the updates must change the policy"
    logs = [entry for entry in trainer.state.log_history if "val/ratio" in entry]
    stats = generator.stats()
    ratios = [(entry["val/ratio"], entry["policy/approxkl_avg"]) for entry in logs]
    assert len(logs) == len(generator.generations) == 3
    assert len(generator.rollouts) == 24
    for ratio, approxkl in ratios:
        assert ratio == pytest.approx(1.0, abs=1e-5)
        assert approxkl < 1e-9
    assert stats["accepted_tokens"] > 0
    for name in ("draft_tokens", "accepted_tokens"):
        assert sum(entry[f"rollout_spec/{name}"] for entry in logs) == stats[name]
    assert all(entry["rollout_spec/tokens"] == 8 * 24 for entry in logs), "without a stop token none ends early"
    assert generator.logprob_error[1] < 1e-4
    sent = [params for sampling_params, _ in generator.generations for params in sampling_params]
    assert len({params.seed for params in sent}) == len(sent) == 24
    assert sent[16].seed == derive_seed(3, 1, 2, 0, 0, 0), "of the run, its first training and the third step"
    assert "What to do" in explain(read_report(tmp_path / "rollout_spec.json"))


def test_stop_token_and_evaluation(tiny_model, tmp_path):
    """Rollouts end at the stop token, evaluations use the engine, and the policy's weights are loaded once per step."""
    generator = Compared(llm_kwargs=FP32)
    trainer = make_trainer(tiny_model, tmp_path, [generator], stop_token="eos", num_sample_generations=3)
    trainer.generate_completions()
    assert len(generator.generations) == 1, "also before a training"
    trainer.train()
    trainer.train()
    lengths = [len(output.outputs[0].token_ids) for _, outputs in generator.generations for output in outputs]
    assert len(set(lengths)) > 1
    assert generator.generations[0][0][0].temperature == pytest.approx(0.01, abs=1e-6)
    for sampling_params, _ in generator.generations:
        is_evaluation = sampling_params[0].temperature < 0.1
        keeps = request_options(sampling_params[0].extra_args).keep_in_history
        assert keeps is not is_evaluation, "evaluations leave no history, and everything else does"
    assert len(generator.generations) == 1 + 2 * (3 + 3)
    seeds = [params.seed for sampling_params, _ in generator.generations for params in sampling_params]
    assert len(set(seeds)) == len(seeds)
    for entry in trainer.state.log_history:
        assert entry["val/ratio"] == pytest.approx(1.0, abs=1e-5)


def test_what_the_function_returns(tiny_model, tmp_path):
    """Queries as they came, responses padded on the right, and logits with the log-probabilities of a forward pass."""
    generator = Compared(llm_kwargs=FP32)
    trainer = make_trainer(tiny_model, tmp_path, [generator], stop_token="eos")
    policy, tokenizer = trainer.policy_model, trainer.processing_class
    queries = tokenizer(QUERIES, padding=True, return_tensors="pt")["input_ids"]
    config = ppo_trainer.GenerationConfig(max_new_tokens=24, temperature=0.8, top_k=0.0, top_p=1.0, do_sample=True)
    found, logits = ppo_trainer.batch_generation(policy, queries, 2, PAD, config)
    responses = found[:, queries.shape[1] :]
    assert torch.equal(found[:, : queries.shape[1]], queries)
    assert logits.shape == (*responses.shape, VOCAB_SIZE)
    assert logits.dtype == torch.float32
    logprobs = selective_log_softmax(logits, responses)
    with torch.no_grad():
        forward = ppo_trainer.forward(policy, found, PAD).logits[:, queries.shape[1] - 1 : -1]
    expected = selective_log_softmax(forward / (0.8 + 1e-7), responses)
    for row, output in enumerate(generator.generations[0][1]):
        tokens = list(output.outputs[0].token_ids)
        assert responses[row].tolist() == tokens + [PAD] * (responses.shape[1] - len(tokens))
        until = tokens.index(PAD) if PAD in tokens else len(tokens)  # PPOTrainer masks what comes after it
        assert logprobs[row, :until].tolist() == pytest.approx(expected[row, :until].tolist(), abs=1e-5)
    assert torch.isfinite(logprobs).all()

    others = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ppo_trainer.batch_generation(others, queries, 2, PAD, config)
    assert len(generator.generations) == 1, "other models generate as before"
    config.max_new_tokens = 60
    with pytest.raises(ValueError, match="max_model_len leaves 4 tokens"):
        ppo_trainer.batch_generation(policy, queries, 2, PAD, config)


def test_logits_give_back_the_logprobs():
    torch.manual_seed(0)
    logprobs = torch.cat([torch.randn(1000, 6) * 3, torch.linspace(-60, 8, 6000).reshape(1000, 6)])
    logprobs = torch.nn.functional.logsigmoid(logprobs.reshape(2, -1))
    logprobs[0, :3] = torch.tensor([0.0, -1e-8, 1e-8])
    tokens = torch.randint(0, 5, logprobs.shape)
    assert (selective_log_softmax(logits_from(logprobs, tokens, 5), tokens) - logprobs).abs().max() < 1e-6


def test_a_trainer_without_the_callback_is_not_changed(tiny_model, tmp_path):
    make_trainer(tiny_model, tmp_path, [RolloutSpecGenerator(llm_kwargs=FP32)])
    with_engine = torch.get_rng_state()
    trainer = make_trainer(tiny_model, tmp_path, [], total_episodes=8, response_length=4)
    assert torch.equal(torch.get_rng_state(), with_engine), "an engine does not change the order of the queries"
    trainer.train()
    assert not any(name.startswith("rollout_spec/") for entry in trainer.state.log_history for name in entry)


def test_what_would_not_speculate_is_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        make_trainer(tiny_model, tmp_path, [RolloutSpecGenerator(llm_kwargs={**FP32, "tensor_parallel_size": 2})])

    class Elsewhere(PPOTrainer):
        """Generates with a model that is not its policy."""

        def train(self):
            self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)

    with pytest.raises(RuntimeError, match="did not come from the engine"):
        make_trainer(tiny_model, tmp_path, [Compared(llm_kwargs=FP32)], Elsewhere).train()


@pytest.mark.parametrize(("attribute", "message"), [("is_peft_model", "PEFT"), ("is_fsdp_enabled", "FSDP")])
def test_weights_that_an_engine_cannot_take(tiny_model, tmp_path, attribute, message):
    class Sharded(PPOTrainer):
        def __setattr__(self, name, value):
            super().__setattr__(name, True if name == attribute else value)

    with pytest.raises(ValueError, match=message):
        make_trainer(tiny_model, tmp_path, [RolloutSpecGenerator(llm_kwargs=FP32)], Sharded)
