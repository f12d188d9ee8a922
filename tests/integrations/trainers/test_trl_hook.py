"""RolloutSpecGenerator in real TRL trainers with a tiny random policy."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

from trl import GRPOConfig, GRPOTrainer
from vllm import SamplingParams

from rollout_spec import RolloutSpecGenerator
from rollout_spec.integrations.trainers.trl import _warn_of_truncation
from rollout_spec.report import explain, read_report
from tests.integrations.engines import build, session_of
from tests.integrations.trainers import FP32, Compared, make_trainer

pytestmark = pytest.mark.engine


def test_grpo_with_speculation(tiny_model, tmp_path, monkeypatch):
    """Rollouts, metrics, the log-probability check and switching, in one run."""
    lines = []
    monkeypatch.setattr("rollout_spec.integrations.trainers.trl.tell", lines.append)
    generator = Compared()
    trainer = make_trainer(tiny_model, tmp_path, [generator])
    trainer.train()

    seeds = [params.seed for sampling_params, _ in generator.generations for params in sampling_params]
    assert len(set(seeds)) == len(seeds) == 24
    assert not any(params.detokenize for sampling_params, _ in generator.generations for params in sampling_params)
    assert generator.logprob_error[1] < 1e-4
    logs = [entry for entry in trainer.state.log_history if "rollout_spec/tokens" in entry]
    assert len(logs) == 3
    stats = generator.stats()
    for name in ("draft_tokens", "accepted_tokens"):  # each log tells what is new since the last one
        assert sum(entry[f"rollout_spec/{name}"] for entry in logs) == stats[name] > 0
    said = [sum(len(output.outputs[0].token_ids) for output in outputs) for _, outputs in generator.generations]
    assert [entry["rollout_spec/tokens"] for entry in logs] == said, "what was sampled past an end does not count"
    assert all(entry["rollout_spec/generation_seconds"] > 0 for entry in logs)
    assert all(entry["rollout_spec/drafter_errors"] == 0 for entry in logs)
    report = read_report(tmp_path / "rollout_spec.json")
    assert "What to do" in explain(report)
    assert len(lines) == 2
    assert "rollout_spec: after 3 training steps" in lines[1]
    assert "is on: up to 4 draft tokens per request and step, drafted by" in lines[0]
    # What TRL itself sees: log-probabilities that its own forward pass confirms.
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in logs)
    session_of(generator.llm).drafter.check_integrity()


def test_the_engine_as_a_rollout_function_uses_it(tiny_model, tmp_path):
    """Distinct seeds of the caller's own, no parameters at all, and chats."""
    generator = RolloutSpecGenerator(llm_kwargs=FP32, num_speculative_tokens=4)
    make_trainer(tiny_model, tmp_path, [generator])
    llm = generator.llm
    prompts = [{"prompt_token_ids": [1, 4, 9]}] * 3
    first, again = (
        llm.generate(prompts, [SamplingParams(seed=seed, max_tokens=8) for seed in (1, 2, 3)], use_tqdm=False)
        for _ in range(2)
    )
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in again]
    assert all(o.outputs[0].text for o in first), "its own requests are as it made them"
    assert generator.logprob_error[1] < 1e-4
    assert len(llm.generate(prompts, use_tqdm=False)) == 3

    chats, params = [[{"role": "user", "content": "w5 w6"}]] * 4, SamplingParams(max_tokens=16)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    before = generator._num_tokens
    outputs = llm.chat(chats, params, use_tqdm=False, chat_template=template)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 1
    assert generator._num_tokens - before == sum(len(output.outputs[0].token_ids) for output in outputs)
    assert len(llm.chat(chats[0], params, use_tqdm=False, chat_template=template)) == 1


def test_engines_that_are_refused(tiny_model, tmp_path):
    generator = RolloutSpecGenerator(llm_kwargs=FP32)
    make_trainer(tiny_model, tmp_path, [generator])
    for callbacks, fields, message in (
        ([generator], {}, "has an engine already"),
        ([RolloutSpecGenerator(), RolloutSpecGenerator()], {}, "takes one RolloutSpecGenerator and has 2"),
        ([RolloutSpecGenerator()], {"use_vllm": False}, "use_vllm=True"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(tiny_model, tmp_path, callbacks, **fields)
    # A trainer whose engine did not pass through us must not train as if it had.
    with pytest.raises(RuntimeError, match="was not built through"):
        RolloutSpecGenerator().on_train_begin(None, None, None)


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


def test_a_trainer_whose_construction_fails_leaves_nothing_behind(tiny_model, tmp_path, monkeypatch):
    """The next trainer's engine is the next trainer's, with the same callback, a new one or none."""
    generator = RolloutSpecGenerator(llm_kwargs=FP32, num_speculative_tokens=4)
    with monkeypatch.context() as patch:
        patch.setattr("trl.generation.vllm_generation.is_vllm_available", lambda: False)
        with pytest.raises(ImportError):
            make_trainer(tiny_model, tmp_path, [generator])
    assert generator.llm is None
    make_trainer(tiny_model, tmp_path, [], use_vllm=False)
    assert build(tiny_model).llm_engine.vllm_config.speculative_config is None
    for retry in (RolloutSpecGenerator(llm_kwargs=FP32, num_speculative_tokens=4), generator):
        make_trainer(tiny_model, tmp_path, [retry])
        assert retry.stats()["steps"] == 0
    assert build(tiny_model).llm_engine.vllm_config.speculative_config is None


def initialised(**settings):
    """A callback whose trainer is about to build its engine, and the trainer's arguments."""
    args = SimpleNamespace(**{"use_vllm": True, "seed": 3, "process_index": 0, "world_size": 1, **settings})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout_spec.integrations.trainers.trl._hook_engines", lambda: None)
        generator = RolloutSpecGenerator()
        generator.on_init_end(args, None, None)
    return generator, args


@pytest.mark.parametrize("ranks_per_engine", [1, 2])
def test_each_engine_of_a_data_parallel_trainer_has_seeds_of_its_own(ranks_per_engine):
    """The ranks that share an engine have the same; otherwise all would train on copies of one rank's rollouts."""
    seeds = []
    for rank in range(4):
        generator, _ = initialised(process_index=rank, world_size=4, vllm_tensor_parallel_size=ranks_per_engine)
        generator.begin_step(0)
        seeds.append([params.seed for params in generator._with_seeds(["a"] * 3, SamplingParams())])
    engines = [seeds[first : first + ranks_per_engine] for first in range(0, 4, ranks_per_engine)]
    assert all(seeds_of_ranks == [seeds_of_ranks[0]] * ranks_per_engine for seeds_of_ranks in engines)
    assert len({seed for first, *_ in engines for seed in first}) == 3 * len(engines)


@pytest.mark.parametrize(
    ("settings", "dtype"), [({}, None), ({"bf16": True}, "bfloat16"), ({"bf16": False, "fp16": True}, "float16")]
)
def test_log_probabilities_are_compared_with_those_of_the_trainers_mixed_precision(settings, dtype):
    assert initialised(**settings)[0]._autocast == dtype


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (None, {"detokenize": False}), ({"seed": None}, {"detokenize": False, "seed": None}),
        ({"detokenize": True}, {"detokenize": True}), ({"stop": ["w5"]}, {"stop": ["w5"]}),
    ],
)  # fmt: skip
def test_text_that_nobody_reads_is_not_asked_for(given, asked):
    assert initialised(generation_kwargs=given)[1].generation_kwargs == asked


@pytest.mark.parametrize("is_first", [True, False])
def test_of_several_processes_the_first_writes_the_report(tmp_path, is_first):
    generator = RolloutSpecGenerator()
    generator.llm, generator.report = object(), dict
    state = SimpleNamespace(is_world_process_zero=is_first, global_step=0, max_steps=9)
    generator.on_log(SimpleNamespace(output_dir=str(tmp_path), world_size=2), state, None)
    assert (tmp_path / "rollout_spec.json").exists() == is_first


def test_a_server_may_have_more_ranks_than_the_trainer():
    server = {"vllm_mode": "server", "vllm_server_base_url": "http://there:8000"}
    generator, _ = initialised(vllm_tensor_parallel_size=2, **server)
    assert generator._server_url == "http://there:8000"


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
def test_log_probabilities_of_a_truncated_distribution_are_warned_of(tmp_path, settings, warns):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, **settings)
    with nullcontext() if warns is None else pytest.warns(UserWarning, match=f"^{warns}.*ratios are biased"):
        _warn_of_truncation(args)
