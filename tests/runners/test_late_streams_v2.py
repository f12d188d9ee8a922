"""Engines with the device drafter whose streams run late: the same rollouts, and what streams share is ordered."""

import contextlib

import pytest
import vllm.v1.worker.cpu.shm  # noqa: F401  puts its own in the place of torch's streams

from rollout_spec import engine_kwargs
from tests.integrations.engines import FEW_BLOCKS, V2_OF_0_31, build, rollouts_of, runner_of, stats_of, two_busy_rounds
from tests.ptx.streams import late_streams
from tests.runners.adaptive import always_draft, as_on_a_gpu, rising, set_costs

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not V2_OF_0_31, reason="vLLM uploads otherwise, which streams.py does not know"),
]


def life(model, folder, *, is_adaptive, sub_steps):
    """Rollouts, with preemptions, stop strings, a weight update and a folder of history; what is kept and drafted."""
    options = {
        "sub_steps": sub_steps,
        "drafter": "device",
        "drafter_options": {"max_resident_tokens": 600},
        "history_dir": str(folder),
    }
    with as_on_a_gpu() if is_adaptive else contextlib.nullcontext():
        arguments = engine_kwargs(num_speculative_tokens=3, budget=is_adaptive, **options)
        llm = build(model, max_num_seqs=6, **FEW_BLOCKS, **arguments)
    if is_adaptive:
        always_draft(llm)
        set_costs(runner_of(llm), rising)
    said = [list(output.token_ids) for output in two_busy_rounds(llm)]
    kept = [[part.tolist() for part in rollout] for rollout in rollouts_of(llm)]
    stats = stats_of(llm)
    return said, kept, None if is_adaptive else (stats["draft_tokens"], stats["accepted_tokens"])


@pytest.mark.parametrize("sub_steps", [1, 3])
@pytest.mark.parametrize("is_adaptive", [False, True])
def test_rollouts_do_not_depend_on_when_the_device_works(tiny_model, tmp_path, is_adaptive, sub_steps):
    options = {"is_adaptive": is_adaptive, "sub_steps": sub_steps}
    expected = life(tiny_model, tmp_path / "plain", **options)
    with late_streams(seed=1) as machine:
        found = life(tiny_model, tmp_path / "late", **options)
    assert found == expected
    assert machine.num_copies > 100 / sub_steps
    assert machine.num_borrowed > 100 / sub_steps
