"""CUDA graphs and room for steps in which every request has drafts."""

import functools
import inspect

import pytest

pytest.importorskip("vllm")

from hypothesis import given
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs

from rollout_spec import RolloutSpecConfig, engine_kwargs
from rollout_spec.integrations.trainers.controller import EngineController
from rollout_spec.integrations.vllm import graphs, hooks
from rollout_spec.schedule import LARGEST_GRAPH


@given(st.integers(1, 9000), st.integers(2, 129), st.sampled_from([512, 1024]))
def test_graphs_cover_every_step_and_are_few(most_tokens, width, usual):
    added = graphs.larger_sizes(usual, most_tokens, width)
    largest = min(most_tokens, LARGEST_GRAPH) // width * width
    if largest <= usual:
        assert added == []
        return
    assert added == sorted(set(added))
    assert len(added) <= 17
    assert added[-1] == largest
    assert not any(size % width for size in added)
    for tokens in range(usual + 1, largest + 1, 7):
        padded = next(size for size in added if size >= tokens)
        assert padded - tokens < tokens / 8 + 2 * width


@pytest.fixture
def remarks(monkeypatch):
    """What is said in vLLM's log."""
    said = []
    monkeypatch.setattr(hooks, "say", said.append)
    return said


def config_as_on_a_gpu(model, options, compilation_config=None, **kwargs):
    """A `VllmConfig` whose graphs are chosen as on a GPU."""
    arguments = EngineArgs(
        model=str(model), dtype="float32", max_model_len=128, compilation_config=compilation_config or {},
        **options, **{"max_num_seqs": 256, "max_num_batched_tokens": 4096, **kwargs},
    )  # fmt: skip
    config = arguments.create_engine_config()
    compilation = config.compilation_config
    # What the CPU platform has changed.
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = (compilation_config or {}).get("cudagraph_capture_sizes")
    compilation.max_cudagraph_capture_size = (compilation_config or {}).get("max_cudagraph_capture_size")
    config._set_cudagraph_sizes()
    return config


@pytest.fixture
def vllm_config(tiny_model):
    """`config_as_on_a_gpu` of a tiny model."""
    return functools.partial(config_as_on_a_gpu, tiny_model)


def test_an_engine_with_drafts_captures_larger_graphs(vllm_config, remarks):
    config = vllm_config(engine_kwargs(num_speculative_tokens=8))
    compilation = config.compilation_config
    assert compilation.max_cudagraph_capture_size == 2043  # the largest multiple of 9 up to 2,048
    assert remarks[-1] == (
        "steps of up to 256 requests with up to 9 tokens each, 2304 in all: "
        "CUDA graphs for up to 2043 tokens instead of 512, 17 sizes more"
    )
    adjust = compilation.adjust_cudagraph_sizes_for_spec_decode  # which V1 does; drops what becomes too large
    adjust(*(9, 1)[: len(inspect.signature(adjust).parameters)])  # older versions want the ranks' number, too
    assert compilation.max_cudagraph_capture_size == 2043
    sizes = compilation.cudagraph_capture_sizes
    assert all(next(size for size in sizes if size >= n * 9) < n * 9 * 1.2 + 18 for n in range(1, 228))


@pytest.mark.parametrize(
    ("options", "compilation_config", "largest"),
    [
        ({}, None, 512),
        (engine_kwargs(speculation=False), None, 512),
        (engine_kwargs(num_speculative_tokens=1), None, 512),
        (engine_kwargs(), {"cudagraph_capture_sizes": [1, 2, 4, 64]}, 64),
        (engine_kwargs(), {"max_cudagraph_capture_size": 64}, 64),
        ({**engine_kwargs(), "enforce_eager": True}, None, 0),
    ],
)
def test_other_engines_and_given_sizes_are_left_alone(vllm_config, remarks, options, compilation_config, largest):
    config = vllm_config(options, compilation_config)
    assert config.compilation_config.max_cudagraph_capture_size == largest
    assert not remarks


def test_steps_without_room_for_all_drafts_are_named(vllm_config, remarks):
    config = vllm_config(engine_kwargs(num_speculative_tokens=8), max_num_batched_tokens=900)
    assert config.compilation_config.max_cudagraph_capture_size == 900
    assert remarks[-1].endswith(
        "max_num_batched_tokens=900 leaves no room for all drafts of 256 requests: raise it if so many run at once"
    )


@pytest.mark.parametrize(
    ("changed", "options", "given", "expected"),
    [
        ({}, {}, {}, 512 * 9),
        ({"max_num_seqs": 8}, {}, {}, 4096),
        ({}, {}, {"max_num_batched_tokens": 2048}, 2048),
        ({}, {"speculation": False}, {}, 4096),
        ({"max_num_batched_tokens": None}, {}, {}, None),
    ],
)
def test_what_the_trainer_gives_is_raised(changed, options, given, expected):
    """TRL gives 4096, whatever K is."""
    trainer = {"max_num_seqs": 512, "max_num_batched_tokens": 4096, **changed}
    trainer = {name: value for name, value in trainer.items() if value is not None or name == "max_num_seqs"}
    found = EngineController(RolloutSpecConfig(**options), llm_kwargs=given).engine_kwargs(trainer)
    assert found.get("max_num_batched_tokens") == expected
