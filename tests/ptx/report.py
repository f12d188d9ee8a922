"""A table of what tests launch, kernel by kernel, where the plugin is named.

    python -m pytest -p tests.ptx.report tests/verify tests/drafters/device tests/drafters/model

With KERNELS=interpret it has seconds only. It counts one process: leave out `-n`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from tests.ptx.machine import Counts, Loaded


@dataclass
class _Kernel:
    variants: set[Loaded] = field(default_factory=set)
    tests: set[str] = field(default_factory=set)
    seconds: float = 0.0
    counts: Counts = field(default_factory=Counts)


_kernels: defaultdict[tuple[str, str], _Kernel] = defaultdict(_Kernel)
_running: list[str] = []


def pytest_sessionstart() -> None:
    """Watch launches from now on, which tests/conftest.py has decided where to run."""
    from tests.interpreter import run_as_python
    from tests.launches import Kernel

    run, launch = Kernel.run, Loaded.launch
    current: list[_Kernel] = []

    def watched_run(self, *args, **kwargs):
        module = self.fn.__module__
        if not module.startswith("rollout_spec"):  # vLLM's, and those of the emulator's own tests
            return run(self, *args, **kwargs)
        kernel = _kernels[module.removeprefix("rollout_spec."), self.fn.__name__]
        kernel.tests.update(_running)
        current.append(kernel)
        started = time.perf_counter()
        try:
            return run(self, *args, **kwargs)
        finally:
            current.pop()
            if run_as_python():
                kernel.seconds += time.perf_counter() - started

    def watched_launch(self, *args):
        started = time.perf_counter()
        counts = launch(self, *args)
        if current:
            current[-1].seconds += time.perf_counter() - started
            current[-1].variants.add(self)
            current[-1].counts.add(counts)
        return counts

    Kernel.run, Loaded.launch = watched_run, watched_launch


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Launches of fixtures count as the test's."""
    _running[:] = [item.nodeid]
    return (yield)


def pytest_terminal_summary(terminalreporter) -> None:
    """Print a row per kernel."""
    write = terminalreporter.write_line
    write("| Kernel | variants | tests | seconds | million instructions | MB read, written |")
    write("| --- | --- | --- | --- | --- | --- |")
    for (module, name), kernel in sorted(_kernels.items()):
        counts = kernel.counts
        row = f"{len(kernel.variants)} | {len(kernel.tests)} | {kernel.seconds:.1f} | {counts.instructions / 1e6:.1f}"
        moved = f"{counts.bytes_read / 1e6:.1f}, {counts.bytes_written / 1e6:.1f}"
        write(f"| `{module}`: `{name}` | {row} | {moved} |")
