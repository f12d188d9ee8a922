"""After `warm_up` a session compiles nothing more."""

import gc
import os
import subprocess
import sys

import numba
import pytest
import torch
from numba.core.registry import CPUDispatcher

from rollout_spec import RolloutSpecConfig
from rollout_spec.integrations.vllm.warm_up import warm_up
from tests.conftest import ROOT, environment_for_a_process

CONFIGS = {
    "history": {"drafter": "history"},
    "options": {"drafter": "history", "drafter_options": {"lookahead": True}},
    "suffix": {"drafter": "suffix", "num_speculative_tokens": 3},
    "ngram": {"drafter": "ngram", "budget": False},
    "lookahead": {"drafter": "lookahead"},
    "rejection": {"drafter": "suffix", "verify": "rejection"},
    "off": {"speculation": False},
}


def run_a_session(config):
    """What an engine on a CPU calls: requests of several kinds, drafted for, verified, kept and dropped."""
    import numpy as np

    from rollout_spec.types import SamplingBatch
    from tests.integrations.vllm.test_session import Outcome, a_request, a_session, advance
    from tests.verify.batches import verify_on_host

    if config.speculation:
        session = a_session(
            drafter=config.drafter, num_speculative_tokens=config.num_speculative_tokens, verify=config.verify,
            budget=config.budget, drafter_options=config.drafter_options,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        drafted = {}
        for turn in range(3):
            requests = {str(i): a_request(rng.integers(0, 50, 40 * (turn + 1)).tolist()) for i in range(4)}
            requests["3"].sampling_params.temperature = 0.0
            requests = {f"{turn}{name}": request for name, request in requests.items()}
            ended = [name for name in session.live if not name.startswith(str(turn))]
            for _ in range(40):
                outcomes = {
                    name: Outcome(tokens[:1] + [1] * len(tokens), min(1, len(tokens)), len(tokens))
                    for name, tokens in drafted.items()
                    if tokens and name in requests
                }
                tokens = {name: rng.integers(0, 6, rng.integers(1, 3)).tolist() for name in requests}
                drafted = advance(session, tokens, outcomes, ended=ended, requests=requests, has_features=turn > 0)
                ended = []
        session.drafter.stop_request(next(iter(session.live)), keep=False)
        assert session.is_drafter_alive
    for temperature in (0.0, 1.0):
        for dtype in (torch.float32, torch.bfloat16):
            for lengths in ([0], [2, 0, 3]):
                size = len(lengths)
                rows = SamplingBatch(torch.full((size,), temperature), torch.arange(size), torch.arange(size))
                cu = torch.tensor(np.cumsum(lengths), dtype=torch.int32)
                logits = torch.randn(sum(lengths) + size, 50, dtype=dtype)
                for mode in (None, "raw_logprobs", "processed_logprobs"):
                    drafts = torch.arange(sum(lengths), dtype=torch.int32)
                    verify_on_host(logits, drafts, cu, rows, method=config.verify, logprobs_mode=mode)


def our_dispatchers():
    found = [x for x in gc.get_objects() if issubclass(type(x), CPUDispatcher)]  # some are dead weak proxies
    return [dispatcher for dispatcher in found if (dispatcher.py_func.__module__ or "").startswith("rollout_spec.")]


def check(name):
    """In a process that has compiled nothing yet."""
    config, lines = RolloutSpecConfig(**CONFIGS[name]), []
    warm_up(config, log=lines.append)
    known = {function: list(function.signatures) for function in our_dispatchers()}
    assert any(known.values())
    run_a_session(config)
    more = {
        function.py_func.__qualname__: [sig for sig in function.signatures if sig not in known.get(function, ())]
        for function in our_dispatchers()
    }
    assert not any(more.values()), {function: sigs for function, sigs in more.items() if sigs}
    assert len(lines) in (0, 1), lines


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")
def test_after_it_a_session_compiles_nothing():
    """Each configuration in a process of its own, in which all modules are imported and nothing was called."""
    code = f"""
import os, traceback
import rollout_spec.loop, rollout_spec.integrations.vllm.session
from tests.integrations.vllm import test_warm_up
failed = []
for name in {list(CONFIGS)}:
    child = os.fork()
    if child == 0:
        try:
            test_warm_up.check(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
assert not failed, failed
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ENGINE = """
import gc, sys
from torch._dynamo.utils import counters
from vllm import SamplingParams
from rollout_spec import engine_kwargs
from tests.integrations.engines import build
from tests.integrations.vllm.test_warm_up import our_dispatchers
llm = build(sys.argv[1], **engine_kwargs(num_speculative_tokens=4))
compiled = lambda: (counters["stats"]["unique_graphs"], sum(len(d.signatures) for d in our_dispatchers()))
gc.unfreeze()  # what vLLM has frozen is not found
before = compiled()
assert before[1] > 0
for number in (1, 3, 8):
    params = SamplingParams(top_p=0.9, logprobs=1, prompt_logprobs=1, max_tokens=20)
    llm.generate([{"prompt_token_ids": [1, 4, 9]}] * number, params, use_tqdm=False)
assert compiled() == before, (before, compiled())
"""


@pytest.mark.engine
@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")
def test_an_engine_that_has_started_compiles_nothing(tiny_model):
    """Torch neither, which compiles vLLM's ranks of tokens."""
    environment = environment_for_a_process(TORCHDYNAMO_DISABLE="0", VLLM_USE_V2_MODEL_RUNNER="0", PYTHONPATH=str(ROOT))
    command = [sys.executable, "-c", ENGINE, str(tiny_model)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_torchs_defaults_do_not_matter():
    """vLLM sets them while it builds an engine."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            for verify in ("sample", "rejection"):
                warm_up(RolloutSpecConfig(speculation=False, verify=verify))
    finally:
        torch.set_default_dtype(before)


def test_drafters_that_are_not_built_in_are_left_alone():
    warm_up(RolloutSpecConfig(drafter="tests.no_such.Drafter", budget=False), device="cuda")
