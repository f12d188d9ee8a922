"""Which model runner and drafter engines get, and what an engine with the device drafter asks of vLLM."""

import pickle
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor import UniProcExecutor
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from rollout_spec import engine_kwargs
from rollout_spec.config import PROPOSER_PATH
from rollout_spec.integrations.vllm import compat, graphs, hooks
from rollout_spec.integrations.vllm import config as engine_config
from rollout_spec.integrations.vllm.config import check_engine, config_of
from rollout_spec.schedule import CHEAP_TOKENS, affordable_ranges
from tests.integrations.engines import V2_OF_0_31


@pytest.fixture
def make(tiny_model, monkeypatch):
    """A function that gives the configuration of an engine on a GPU, as vLLM's platform would report one.

    `variable` is what VLLM_USE_V2_MODEL_RUNNER says.
    """

    def make(options=None, *, gpu=True, variable=None, is_a100=False, **arguments):
        monkeypatch.setattr(engine_config, "has_gpu", lambda: gpu)
        monkeypatch.setattr(hooks, "is_a100", lambda: is_a100)
        monkeypatch.setattr(envs, "VLLM_USE_V2_MODEL_RUNNER", variable and variable == "1")
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        if variable is not None:
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", variable)
        arguments = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 256, **arguments}
        return EngineArgs(
            model=str(tiny_model), **{**engine_kwargs(**(options or {})), **arguments}
        ).create_engine_config()

    return make


class Synchronous(UniProcExecutor):
    """Waits for each step's tokens."""

    @classmethod
    def supports_async_scheduling(cls):
        return False


CAN = "V2 model runner (vLLM can run the model in it)"
SCHEDULES = "drafts with synchronous scheduling"


@pytest.mark.parametrize(
    ("situation", "drafter", "reason"),
    [
        ({}, "device", CAN),
        ({"options": {"budget": False}}, "device", CAN),
        ({"data_parallel_size": 2}, "device", CAN),
        ({"async_scheduling": False}, "history", SCHEDULES),
        ({"distributed_executor_backend": Synchronous}, "history", SCHEDULES),
        ({"compilation_config": {"mode": 1}}, "history", "V2 does not have stock torch.compile)"),
        ({"gpu": False}, "history", "V1 model runner (V2 does not have drafts without an NVIDIA GPU)"),
        ({"options": {"drafter": "ngram"}}, "ngram", "drafter='ngram', which is on the host"),
        ({"options": {"drafter_options": {"max_history_tokens": 9}}}, "history", "which drafters on the host have"),
        ({"options": {"drafter": "device"}, "gpu": False}, "device", CAN),
        ({"options": {"drafter": "device"}, "async_scheduling": False}, "device", CAN),
        ({"variable": "0"}, "history", "V1 model runner (VLLM_USE_V2_MODEL_RUNNER=0)"),
        ({"variable": "1", "gpu": False}, "device", "V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1)"),
    ],
)
def test_the_drafter_of_an_engine(make, situation, drafter, reason):
    vllm_config = make(**situation)
    config = config_of(vllm_config)
    is_device = drafter == "device"
    assert (config.drafter, vllm_config.use_v2_model_runner) == (drafter, is_device)
    check_engine(vllm_config, config)
    line = engine_config.describe_engine(vllm_config, config)
    assert f"drafted by {drafter!r} on the {'device' if is_device else 'host'}" in line
    assert reason in line
    assert vllm_config.scheduler_config.async_scheduling is (is_device and "async_scheduling" not in situation)
    has_schedule = is_device and not situation.keys() & {"data_parallel_size"} and "budget" not in str(situation)
    assert (vllm_config.speculative_config.num_speculative_tokens_per_batch_size is not None) is has_schedule


@pytest.mark.skipif(not compat.is_before(0, 29), reason="vLLM chooses V2 for all models")
def test_a_model_for_which_vllm_chooses_v1(make, monkeypatch):
    monkeypatch.setattr(VllmConfig, "_is_default_v2_model_runner_model", lambda self: False)
    for variable, line in ((None, "vLLM's choice; VLLM_USE_V2_MODEL_RUNNER=1 drafts on the device"), ("1", "V2 model")):
        vllm_config = make(variable=variable)
        config = config_of(vllm_config)
        assert config.drafter == ("device" if variable else "history")
        assert line in engine_config.describe_engine(vllm_config, config)


@pytest.mark.skipif(not V2_OF_0_31, reason="no model drafts beside history")
def test_history_joins_a_frameworks_own_drafter_with_a_model(tiny_model, monkeypatch):
    said = []
    monkeypatch.setattr(engine_config, "say", said.append)
    monkeypatch.setenv(engine_config.VARIABLE, '{"num_speculative_tokens": 6}')
    theirs = {"method": "draft_model", "model": str(tiny_model), "num_speculative_tokens": 2}
    arguments = EngineArgs(model=str(tiny_model), dtype="float32", enforce_eager=True, speculative_config=theirs)
    vllm_config = arguments.create_engine_config()
    assert said[0].endswith("a drafter from history beside its 'draft_model'")
    assert vllm_config.speculative_config.num_speculative_tokens == 6
    config = config_of(vllm_config)
    assert (config.drafter, config.num_model_draft_tokens) == ("device", 2)
    line = engine_config.describe_engine(vllm_config, config)
    assert "drafted by 'device' and the model of 'draft_model' on the device" in line


@pytest.mark.parametrize(("max_num_seqs", "k"), [(1, 7), (16, 7), (64, 3), (256, 1), (1024, 1)])
@pytest.mark.parametrize(("is_moe", "schedule"), [(False, None), (True, None), (False, [(1, 9, 8)])])
def test_data_parallel_engines_have_one_k(make, monkeypatch, max_num_seqs, k, is_moe, schedule):
    """Those of a dense model are told that they are alone, those of a mixture of experts wait for each other.

    vLLM drops a schedule that it is given.
    """
    lines = []
    monkeypatch.setattr(hooks, "say", lines.append)
    proposer = {"model": PROPOSER_PATH, "num_speculative_tokens": 8, "num_speculative_tokens_per_batch_size": schedule}
    given = {} if schedule is None else {"speculative_config": proposer}
    front_end = make(data_parallel_size=2, max_num_seqs=max_num_seqs, **given)
    for rank in range(2):
        vllm_config = pickle.loads(pickle.dumps(front_end))
        vllm_config.parallel_config.data_parallel_index = rank
        if not is_moe:
            parallel = vllm_config.parallel_config
            if hasattr(parallel, "reconfigure_for_independent_dp_rank"):
                parallel.reconfigure_for_independent_dp_rank()
            else:  # as an engine's core does, up to 0.27
                parallel.data_parallel_size = parallel.data_parallel_size_local = 1
                parallel.data_parallel_rank = 0
        vllm_config.__post_init__()
        config = config_of(vllm_config)
        assert (config.drafter, config.num_speculative_tokens, config.budget) == ("device", k, False)
        assert vllm_config.speculative_config.num_speculative_tokens == k
        assert vllm_config.speculative_config.num_speculative_tokens_per_batch_size is None
    assert sum("as data-parallel engines need one K" in line for line in lines) == 1
    every = make({"budget": False}, data_parallel_size=2, max_num_seqs=max_num_seqs)
    assert every.speculative_config.num_speculative_tokens == 8


@pytest.mark.parametrize("expected", ["device", "history"])
def test_all_processes_of_an_engine_have_the_same_drafter(make, monkeypatch, expected):
    vllm_config = pickle.loads(pickle.dumps(make(gpu=expected == "device")))
    monkeypatch.setattr(engine_config, "has_gpu", lambda: expected == "history")
    assert config_of(vllm_config).drafter == expected


@pytest.mark.parametrize(("is_a100", "sizes"), [(False, (24, 48, 96)), (True, (18, 36, 72))])
def test_draft_tokens_follow_the_batch_size(make, is_a100, sizes):
    ranges = make(max_num_seqs=256, is_a100=is_a100).speculative_config.num_speculative_tokens_per_batch_size
    of_batch = build_dynamic_sd_schedule_lookup(ranges, 256, 8)
    assert [of_batch[size + more] for size in sizes for more in (0, 1)] == [7, 3, 3, 1, 1, 0]
    assert (of_batch[1], of_batch[256]) == (7, 0)


@pytest.mark.parametrize("ranges", [None, [[1, 9, 8]]])
def test_a_schedule_of_the_users_own_is_left_alone(make, ranges):
    """And ours stays ours when vLLM completes a configuration once more, in whatever process."""
    proposer = {"model": PROPOSER_PATH, "num_speculative_tokens": 8, "num_speculative_tokens_per_batch_size": ranges}
    vllm_config = make({"drafter": "device"}, speculative_config=proposer)
    for _ in range(2):
        expected = affordable_ranges(8) if ranges is None else [(1, 9, 8)]
        assert vllm_config.speculative_config.num_speculative_tokens_per_batch_size == expected
        assert engine_config.chooses_k(vllm_config) is (ranges is None)
        vllm_config = pickle.loads(pickle.dumps(vllm_config))
        vllm_config.__post_init__()


@given(st.integers(1, 128), st.integers(1, 1024), st.sampled_from([1.0, 2 / 8, 4 / 32, 8 / 128, 4 / 128, 8 / 256]))
def test_steps_with_drafts_are_affordable(k, max_num_seqs, share):
    ranges = affordable_ranges(k, share_of_experts=share)
    of_batch = build_dynamic_sd_schedule_lookup(ranges, max_num_seqs, k)
    sizes = range(1, max_num_seqs + 1)
    tokens = [size * (of_batch[size] + 1) for size in sizes]
    most = CHEAP_TOKENS * max(1, 0.5 / share)
    counts = [n for n in (127, 63, 31, 15, 7, 3, 1) if n <= k]
    assert of_batch[1:] == [next((n for n in counts if size * (n + 1) <= most), 0) for size in sizes]
    assert graphs.most_tokens(max_num_seqs, ranges) == max(tokens)
    assert graphs.most_tokens(max_num_seqs, [(1, 1, k)]) == max_num_seqs * (k + 1)


@pytest.mark.parametrize(
    ("num_experts", "used", "share"),
    [(0, None, 1.0), (128, 8, 1 / 16), (64, [4, 8], 1.0), (64, None, 1.0), (4, 4, 1.0)],
)
def test_a_schedule_for_a_mixture_of_experts(make, monkeypatch, num_experts, used, share):
    model = SimpleNamespace(
        is_moe=num_experts > 0, get_num_experts=lambda: num_experts, get_num_experts_per_tok=lambda: used
    )
    assert engine_config.share_of_experts(SimpleNamespace(model_config=model)) == share
    monkeypatch.setattr(hooks, "share_of_experts", lambda vllm_config: share)
    ranges = make().speculative_config.num_speculative_tokens_per_batch_size
    assert ranges == affordable_ranges(8, share_of_experts=share)
