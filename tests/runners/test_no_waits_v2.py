"""No step of an engine with the device drafter waits for the device: a wait would undo asynchronous scheduling."""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from tests.integrations.engines import DEVICE, FEW_BLOCKS, build, two_busy_rounds, verify_all
from tests.ptx.streams import is_ours

WAITS = {
    "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "nonzero",
    "argwhere", "masked_select", "unique", "repeat_interleave", "bincount", "allclose", "equal", "synchronize",
    "tensor", "as_tensor",
}  # fmt: skip
"""Functions of tensors that read values on the host, whose result has a size that follows from values, or that copy
from memory that is not pinned."""
MEANT = {
    ("drafter.py", "arrive"): "a rollout's copy, once it has arrived",
    ("compat.py", "apply_sampling_params"): "vLLM has these lengths on the host",
}
"""Where our code reads what is on the host."""


class Watch(TorchFunctionMode):
    """Counts such calls by the function of ours that makes them."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        by_mask = name in ("__getitem__", "__setitem__") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        kwargs = kwargs or {}
        goes_elsewhere = any(isinstance(value, torch.device) for value in (*args[1:], *kwargs.values()))
        waits_for_copy = name == "to" and goes_elsewhere and not kwargs.get("non_blocking")
        if name in WAITS or by_mask or waits_for_copy:
            frame = sys._getframe(1)
            while frame.f_code.co_name.startswith("<"):
                frame = frame.f_back
            if is_ours(frame):
                self.found[Path(frame.f_code.co_filename).name, frame.f_code.co_name, name] += 1
        return func(*args, **kwargs)


def test_no_step_waits(tiny_model):
    """Nor one after a weight update, with ended, preempted and stopped requests among them."""
    llm = build(tiny_model, max_num_seqs=6, **FEW_BLOCKS, **verify_all(num_speculative_tokens=3, **DEVICE))
    with Watch() as watch:
        two_busy_rounds(llm)
    assert {found[:2] for found in watch.found} == set(MEANT)
