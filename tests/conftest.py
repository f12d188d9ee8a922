"""Settings that must stand before vllm is imported, and the tiny model that the engine tests share."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import wrapt

from tests.emulation import run_kernels

run_kernels()

ROOT = Path(__file__).parents[1]
GPU_STAND_IN = os.pathsep.join((str(ROOT / "tests" / "gpu_stand_in"), str(ROOT)))
"""PYTHONPATH of processes in which a GPU is emulated."""

for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(name, value)


# What takes the most time starts first, so that all processes end at about the same time. `--durations` says what does.
LONGEST = (
    "runners/test_every_request",
    "runners/test_every_parameter",
    "vllm/test_engine.py",
    "vllm/test_vllm_config",
    "test_jit",
    "test_loop",
    "runners/",
    "integrations/",
    "drafters/",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next((i for i, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)))


def free_port() -> int:
    """A port for a server, of a range that no client gets: the server may ask for it minutes later."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port


def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for what another thread or process does, but not forever."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def environment_for_a_process(**variables: str) -> dict[str, str]:
    """This process's environment without what a trainer in it has set there for its engine.

    A trainer in another process would take itself for a rank of that one.
    """
    of_this_process = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in of_this_process} | variables


# TRL looks for a free port before it is needed, always in the same order: two trainers that start at once, here in two
# processes of the tests, would choose the same.
os.environ["MASTER_PORT"] = str(free_port())


def _complete_a_kernel_of_vllm_0_24(module):
    """Its CPU build starts no engine with drafts: a kernel's stand-in lacks an argument that its caller passes."""
    kernel = module.sample_recovered_tokens_kernel
    original = kernel.func
    kernel.func = lambda *args, USE_FP64_GUMBEL=False, **kwargs: original(*args, **kwargs)


with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    if importlib.metadata.version("vllm-cpu").startswith("0.24."):
        wrapt.register_post_import_hook(_complete_a_kernel_of_vllm_0_24, "vllm.utils.cpu_triton_utils")

VOCAB_SIZE = 24


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Each token is a word: four special ones, then w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{i}" for i in range(vocab_size - len(special)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special).save_pretrained(path)


def sharpen(model, kept: tuple[str, ...] = ()) -> None:
    """Make random weights larger, so that drafts are accepted and rejected, but for those with such names."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not any(part in name for part in kept):
                parameter.mul_(3.0)


def write_tiny_model(path: Path) -> None:
    """A random Llama with a small vocabulary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(path, VOCAB_SIZE)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            dtype="float32",
        )
    )
    sharpen(model)
    model.save_pretrained(path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model that `write_tiny_model` writes."""
    pytest.importorskip("vllm")
    path = tmp_path_factory.mktemp("tiny-model")
    write_tiny_model(path)
    return path


@pytest.fixture(scope="session")
def off(tiny_model: Path):
    """An engine that drafts nothing and has the same noise. No test changes it."""
    from rollout_spec import engine_kwargs
    from tests.integrations.engines import build  # brings vLLM

    return build(tiny_model, **engine_kwargs(speculation=False))


@pytest.fixture(scope="session")
def reference_model(tiny_model: Path):
    """The tiny model in transformers, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
