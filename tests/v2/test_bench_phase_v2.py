"""`experiments/engines/bench_phase.py` makes V2's samplers say what was recorded, too."""

from __future__ import annotations

import numpy as np
import pytest
import vllm
from vllm import SamplingParams

from experiments.engines import bench_phase
from experiments.engines.build import WORDS_ALONE
from rollout_spec import engine_kwargs
from rollout_spec.replay.traces import Rollout
from tests.conftest import VOCAB_SIZE
from tests.integrations.engines import build, runner_of, stats_of, verify_all
from tests.interpreter import run_as_python

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "options",
    [
        verify_all(num_speculative_tokens=3, drafter_options=WORDS_ALONE),
        verify_all(num_speculative_tokens=3, drafter="device", drafter_options=WORDS_ALONE),
        engine_kwargs(speculation=False),
        pytest.param(
            {},
            marks=pytest.mark.skipif(
                vllm.__version_tuple__[:2] < (0, 31) and run_as_python(), reason="its noise cannot be interpreted"
            ),
        ),
    ],
    ids=["host", "device", "off", "stock"],
)
def test_what_was_recorded_is_said(tiny_model, options, monkeypatch):
    rng = np.random.default_rng(0)
    text = rng.integers(3, VOCAB_SIZE, 14).astype(np.int32)
    rollouts = [Rollout(i, 0, text[:3], np.append(text[3:], 2).astype(np.int32)[i:], (12 - i,)) for i in range(4)]
    llm = build(tiny_model, **options)
    runner = runner_of(llm)
    for kind in {type(runner.sampler), type(runner.rejection_sampler or runner.sampler)}:
        monkeypatch.setattr(kind, "__call__", kind.__call__)  # put back what follows
    bench_phase.Scripts(runner, rollouts, end=2)
    for _ in range(2):
        params = [
            SamplingParams(
                temperature=1.0, seed=i, max_tokens=40, stop_token_ids=[2], extra_args={bench_phase.SCRIPT: i}
            )
            for i in range(4)
        ]
        outputs = llm.generate([{"prompt_token_ids": text[:3].tolist()}] * 4, params, use_tqdm=False)
        said = [list(output.outputs[0].token_ids) for output in outputs]
        assert said == [rollout.tokens.tolist() for rollout in rollouts]
    if "speculative_config" in options:
        assert stats_of(llm)["accepted_tokens"] > 10
