"""How many calls towards a GPU one decode step of vLLM's V2 model runner takes the host, with and without drafts.

    python -m tests.runners.calls stock|adaptive|further NUMBER_OF_REQUESTS...

prints them as JSON, by kind and number of requests, with the names of the kernels; `further` is what a further forward
pass of a step takes. A CPU does what a GPU would be given: kernels are emulated, streams and events are stand-ins, and
nothing is counted of the model's own layers, which a CUDA graph replays in one call.
"""

import contextlib
import functools
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.emulation import launch_few_programs, run_kernels, schedule_as_on_gpus, show_vllm_a_backend

K, STEPS, GROUP = 8, 4, 4
VIEWS = {
    "slice", "select", "view", "_unsafe_view", "as_strided", "unsqueeze", "squeeze", "expand", "t", "transpose",
    "permute", "detach", "alias", "split", "split_with_sizes", "unbind", "lift_fresh", "empty", "empty_like",
    "new_empty", "empty_strided", "reshape", "resolve_conj", "resolve_neg",
}  # fmt: skip
"""ATen operations that launch nothing."""


class Count(TorchDispatchMode):
    """Counts what is called while it is on, but in functions that are `muted`."""

    def __init__(self):
        super().__init__()
        self.calls, self.is_on, self.num_muting = Counter(), False, 0

    def add(self, kind):
        if self.is_on and not self.num_muting:
            self.calls[kind] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, result = func.__name__.partition(".")[0], func(*args, **(kwargs or {}))
        is_copy = name == "copy_" and args[2:3] == (True,)  # to the host, without waiting for it
        is_view = name in VIEWS or (name == "to" and result is args[0])
        self.add("copies" if is_copy else "views" if is_view else "ops")
        return result

    def switched_on(self, function):
        """`function`, in which calls are counted."""

        def call(*args):
            self.is_on = True
            function(*args)
            self.is_on = False

        return call

    def muted(self, function, kind=None):
        """`function`, counted as one call of a kind, or not at all."""

        @functools.wraps(function)
        def call(*args, **kwargs):
            if kind is not None:
                self.add(kind)
            self.num_muting += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.num_muting -= 1

        return call


COUNT = Count()


class Event:
    """In place of a CUDA event, which has always passed."""

    def __init__(self, *args, **kwargs):
        self.query = COUNT.muted(lambda *args: True, "events")
        self.record = self.wait = self.synchronize = COUNT.muted(lambda *args: None, "events")


class Stream:
    """In place of a CUDA stream."""

    def __init__(self, *args, **kwargs):
        self.wait_stream = COUNT.muted(lambda other: None, "events")


def as_on_a_gpu():
    """Make everything take the ways that it takes on a GPU. Before engines are built."""
    run_kernels()
    show_vllm_a_backend()
    schedule_as_on_gpus()
    launch_few_programs()
    import vllm.v1.worker.cpu.shm  # noqa: F401  # replaces torch.cuda's events and streams
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.utils import CpuGpuBuffer
    from vllm.v1.worker.gpu import async_utils, buffer_utils, model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    from rollout_spec import transfers
    from tests.ptx import driver

    torch.cuda.Event, torch.cuda.Stream = Event, Stream
    torch.cuda.current_stream = lambda *args: Stream()
    torch.cuda.set_stream = COUNT.muted(lambda *args: None, "events")
    transfers.runs_later = lambda device: True
    transfers.upload = COUNT.muted(lambda values, device: torch.from_numpy(values), "uploads")
    transfers.host_buffer = lambda num_bytes, device: torch.zeros(num_bytes, dtype=torch.uint8)
    transfers.copy_to_host = COUNT.muted(lambda tensor: tensor.clone(), "copies")
    for module in (model_runner, adaptive_verification):
        module.async_tensor_h2d = COUNT.muted(module.async_tensor_h2d, "uploads")
    async_utils.async_copy_to_np = COUNT.muted(async_utils.async_copy_to_np, "copies")
    CpuGpuBuffer.copy_to_cpu = COUNT.muted(CpuGpuBuffer.copy_to_cpu, "copies")
    cut = adaptive_verification._assign_draft_token_budget_compiled
    adaptive_verification._assign_draft_token_budget_compiled = COUNT.muted(cut, "compiled")
    launch = COUNT.muted(driver._Launcher.__call__, "triton")

    def launch_and_name(self, *args):
        COUNT.add(args[4].program.name)
        launch(self, *args)

    driver._Launcher.__call__ = launch_and_name

    def init_shared(self, size, dtype):  # what the host writes the device reads
        self.cpu = self._uva = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    buffer_utils.NonUvaBuffer.__init__ = init_shared
    buffer_utils.NonUvaBuffer.uva = lambda self, n=None: self._uva if n is None else self._uva[:n]

    def to_cpu_nonblocking(self):
        for tensor in self:
            if isinstance(tensor, torch.Tensor):
                COUNT.add("copies")
        return self

    LogprobsTensors.to_cpu_nonblocking = to_cpu_nonblocking


def build(kind, model, num_requests, sub_steps):
    from rollout_spec import engine_kwargs
    from tests.integrations.engines import build as build_engine
    from tests.integrations.engines import runner_of
    from tests.runners import adaptive

    options = {} if kind == "stock" else engine_kwargs(num_speculative_tokens=K, drafter="device", sub_steps=sub_steps)
    room = {"max_model_len": 512, "num_gpu_blocks_override": num_requests * 40}
    with adaptive.as_on_a_gpu() if options else contextlib.nullcontext():
        llm = build_engine(model, max_num_seqs=num_requests, **room, **options)
    runner = runner_of(llm)
    if options:
        adaptive.always_draft(llm)
        adaptive.set_costs(runner, adaptive.rising)
    type(runner.model).forward = COUNT.muted(type(runner.model).forward)
    runner.model_state.prepare_attn = COUNT.muted(runner.model_state.prepare_attn)  # differs between backends
    return llm, runner


def count(kind, model, num_requests):
    """Calls of one step, by kind, in which all requests are decoded."""
    from vllm import SamplingParams

    llm, runner = build(kind, model, num_requests, sub_steps=2 if kind == "further" else 1)
    engine = llm.llm_engine
    for i in range(num_requests):
        params = SamplingParams(seed=i, max_tokens=480, ignore_eos=True, logprobs=0, detokenize=False)
        engine.add_request(str(i), {"prompt_token_ids": [1, 4 + i // GROUP, 9]}, params)
    for _ in range(8):
        engine.step()
    if kind == "further":
        run = runner.rollout_spec._run_further_pass
        runner.rollout_spec._run_further_pass = COUNT.switched_on(run)
    COUNT.calls.clear()
    with COUNT:
        COUNT.is_on = kind != "further"
        for _ in range(STEPS):
            engine.step()
        COUNT.is_on = False
    assert engine.get_num_unfinished_requests() == num_requests
    return {name: number / STEPS for name, number in COUNT.calls.items()}


def main():
    kind, *numbers = sys.argv[1:]
    as_on_a_gpu()
    from tests.conftest import write_tiny_model

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write_tiny_model(Path(folder))
        counts = {number: count(kind, Path(folder), int(number)) for number in numbers}
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
