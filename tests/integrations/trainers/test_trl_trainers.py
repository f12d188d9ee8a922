"""Every TRL trainer that builds an engine: the same rollouts with and without drafts, some accepted, metrics logged."""

import string

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.chat_template_utils import supports_tool_calling
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer

from rollout_spec.cli import main
from rollout_spec.history import command
from tests.conftest import VOCAB_SIZE
from tests.history.made_up import rollouts_in
from tests.integrations.engines import rollouts_of
from tests.integrations.trainers import Compared, make_trainer

pytestmark = pytest.mark.engine

PROMPTS = Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(8)]})
CHATS = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in ("w1 w2 w3", "w4 w5 w6")]})
EVALUATION = Dataset.from_dict({"prompt": ["w7 w8", "w9 w1 w2"]})


def check(trainer, generator, num_rollouts):
    """`Compared` has compared the rollouts. Drafts were accepted, and each training log has what is new since the last.

    Returns:
        The trainer's logs of training steps.
    """
    assert len(generator.rollouts) == num_rollouts
    stats = generator.stats()
    assert stats["accepted_tokens"] > 0
    assert stats["drafter_errors"] == 0
    logs = [entry for entry in trainer.state.log_history if "rollout_spec/tokens" in entry]
    assert sum(entry["rollout_spec/accepted_tokens"] for entry in logs) > 0
    assert all(entry["rollout_spec/generation_seconds"] > 0 for entry in logs)
    return logs


def test_grpo_with_evaluation(tiny_model, tmp_path):
    """Several updates per generation, and evaluations whose rollouts are drafted for but do not stay."""
    generator = Compared()
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        [generator],
        arguments={"train_dataset": PROMPTS, "eval_dataset": EVALUATION},
        max_steps=8,
        steps_per_generation=2,
        num_iterations=2,
        eval_strategy="steps",
        eval_steps=4,
        per_device_eval_batch_size=4,
    )
    trainer.train()
    evaluated = [
        params.extra_args is not None and params.extra_args["rollout_spec"]["keep_in_history"] is False
        for params_of, _ in generator.generations
        for params in params_of
    ]
    check(trainer, generator, len(evaluated))
    assert evaluated.count(True) == 2 * 8
    assert evaluated.count(False) == 2 * 16
    evaluations = [entry for entry in trainer.state.log_history if "eval_rollout_spec/tokens" in entry]
    assert len(evaluations) == 2
    assert all(entry["eval_rollout_spec/draft_tokens"] > 0 for entry in evaluations)
    # Neither prompt nor rollout of an evaluation is in the history, and every rollout of the training is.
    evaluation_prompts = [trainer.processing_class(p)["input_ids"] for p in EVALUATION["prompt"]]
    prompts = [prompt.tolist() for prompt, _, _ in rollouts_of(generator.llm)]
    assert not [prompt for prompt in prompts if prompt in evaluation_prompts]
    assert len(prompts) >= 32


TEMPLATE = """{% for m in messages %}{% if m.tool_calls %}{% for call in m.tool_calls %}w7 {{ call.function.name }}
{{ call.function.arguments }} {% endfor %}{% endif %}{{ m.content }}{% if m.role == 'assistant' %} <eos>{% endif %}
{% endfor %}"""


def add_tools(tokenizer):
    """A model that says w7 calls the tool. The tiny model does so often enough."""

    def parse_response(ids, **_):
        said = tokenizer.decode(ids, skip_special_tokens=True)
        message = {"role": "assistant", "content": said}
        if "w7" in said.split():
            call = {"name": "look_up", "arguments": {"word": said.split()[0]}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        return message

    tokenizer.chat_template = TEMPLATE
    tokenizer.response_schema = tokenizer.response_template = {"type": "object"}
    tokenizer.parse_response = parse_response
    assert supports_tool_calling(tokenizer)
    return tokenizer


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return f"w3 {word} w4"


def test_grpo_with_tools_over_several_turns(tiny_model, tmp_path):
    generator = Compared()
    tokenizer = add_tools(AutoTokenizer.from_pretrained(tiny_model, padding_side="left"))
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        [generator],
        arguments={
            "tools": [look_up],
            "processing_class": tokenizer,
            "train_dataset": CHATS,
            "reward_funcs": lambda completions, **_: [float(len(messages)) for messages in completions],
        },
        max_completion_length=48,
        vllm_max_model_length=128,
        max_tool_calling_iterations=3,
        learning_rate=1e-4,
    )
    trainer.train()
    logs = check(trainer, generator, len(generator.rollouts))
    assert len(generator.generations) > 3, "tools were called, so a step has several generations"
    assert sum(entry["tools/call_frequency"] for entry in logs) > 0
    assert sum(entry["tools/failure_frequency"] for entry in logs) == 0


def test_what_grpo_logs_of_messages_becomes_history(tiny_model, tmp_path, monkeypatch, capfd):
    """Each generation stands in the logs of two steps, as it has two updates."""
    generator = Compared()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    tokenizer.chat_template = TEMPLATE
    arguments = {"processing_class": tokenizer, "train_dataset": CHATS}
    fields = {"max_steps": 4, "num_iterations": 2, "log_completions": True, "num_completions_to_print": 0}
    make_trainer(tiny_model, tmp_path, [generator], arguments=arguments, **fields).train()
    logs = sorted(map(str, (tmp_path / "completions").glob("*.parquet")))
    assert len(logs) == 4
    monkeypatch.setattr(command, "load_tokenizer", lambda name: tokenizer)
    assert main(["history", "import", *logs, "--into", str(tmp_path / "history"), "--tokenizer", "x"]) == 0
    special = set(tokenizer.all_special_ids)
    sampled = [[token for token in rollout if token not in special] for rollout in generator.rollouts]
    sampled = sorted(filter(None, sampled))  # an empty answer is left out
    assert len(sampled) > 8
    assert sorted(rollout.tokens.tolist() for rollout in rollouts_in(tmp_path / "history")) == sampled
    assert f"{len(sampled)} rollouts of 2 problems" in (said := capfd.readouterr().out)
    assert f"{len(sampled)} are copies, {2 * (16 - len(sampled))} lines left out" in said


def test_grpo_resumed_from_a_checkpoint(tiny_model, tmp_path, monkeypatch):
    """The steps after a checkpoint give the rollouts that the uninterrupted run gave.

    Within an epoch: at the next one TRL would shuffle the prompts in another way than without the interruption.
    """
    lines = []
    monkeypatch.setattr("rollout_spec.integrations.trainers.trl.tell", lines.append)
    whole, resumed, data = Compared(), Compared(), {"train_dataset": PROMPTS}
    trainer = make_trainer(
        tiny_model, tmp_path, [whole], arguments=data, max_steps=4, save_strategy="steps", save_steps=2
    )
    trainer.train()
    check(trainer, whole, 32)
    trainer = make_trainer(tiny_model, tmp_path, [resumed], arguments=data, max_steps=4)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    check(trainer, resumed, 16)
    assert resumed.rollouts == whole.rollouts[16:]
    assert ["after 3 training" in lines[1], "after 2 training" in lines[3]] == [True, True], "this training's own steps"


def byte_tokenizer():
    """For the same token ids, of which each but the special ones is a letter."""
    specials = ["<pad>", "<bos>", "<eos>", "<unk>"]
    names = [*specials, *string.ascii_lowercase[: VOCAB_SIZE - len(specials)]]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


PAIRS = {"num_generations": None, "max_completion_length": None, "vllm_max_model_length": None, "max_new_tokens": 24}
TRAINERS = {
    "GRPO with LoRA": (GRPOTrainer, GRPOConfig, 24, {}),
    "RLOO": (RLOOTrainer, RLOOConfig, 24, {}),
    "online DPO": (
        OnlineDPOTrainer,
        OnlineDPOConfig,
        12,
        {**PAIRS, "max_length": 48, "per_device_train_batch_size": 2},
    ),
    "distillation": (DistillationTrainer, DistillationConfig, 24, {"num_generations": None}),
    "GOLD": (GOLDTrainer, GOLDConfig, 24, {"num_generations": None, "lmbda": 1.0, "max_length": 64}),
    "SDFT": (SDFTTrainer, SDFTConfig, 24, {"num_generations": None, "distillation_topk": 8}),
}
"""(trainer, its configuration, rollouts, fields of the configuration)."""


def arguments_of(name, model_path):
    """What a trainer takes besides."""
    if name == "GRPO with LoRA":  # TRL merges the adapter before it hands the weights to the engine
        peft = pytest.importorskip("peft")
        return {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)}
    if name not in ("distillation", "GOLD", "SDFT"):
        return {}
    dataset, arguments = {"prompt": ["w1 w2 w3", "w4 w5 w6", "w3 w2", "w5 w5"] * 2}, {"reward_funcs": None}
    if name == "SDFT":  # its teacher is the model itself that sees more
        dataset["privileged_context"] = ["w7"] * 8
    else:
        arguments["teacher_model"] = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    if name == "GOLD":  # it takes tokenizers of bytes only
        dataset = {"prompt": ["abc", "def", "cb", "ee"] * 2, "completion": ["aa"] * 8}
        arguments["processing_class"] = byte_tokenizer()
    return {**arguments, "train_dataset": Dataset.from_dict(dataset)}


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer(tiny_model, tmp_path, name):
    trainer_class, config_class, num_rollouts, fields = TRAINERS[name]
    generator, arguments = Compared(), arguments_of(name, tiny_model)
    trainer = make_trainer(tiny_model, tmp_path, [generator], trainer_class, config_class, arguments, **fields)
    trainer.train()
    check(trainer, generator, num_rollouts)
    if trainer_class is GRPOTrainer:
        assert generator.logprob_error[1] < 1e-4
