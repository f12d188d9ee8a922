"""Writes what files and the slowest tests take, in seconds of CPU and of wall clock, to the file `--timings` names.

`tests/TIMINGS.txt` is from such files (`make timings`).
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--timings", type=Path, metavar="PATH", help="where to write what tests take")


def configure(config: pytest.Config) -> None:
    if config.getoption("--timings") is None:
        return
    config.pluginmanager.register(_Clock())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Table(config.getoption("--timings")))


RECORDED = Path(__file__).with_name("TIMINGS.txt")


def longest_first(items: list[pytest.Item]) -> None:
    """Sort by what the tests' files took when it was recorded, so that all processes end at about the same time."""
    rows = re.findall(r"^ *([\d.]+) +[\d.]+ +(tests/\S+\.py)$", RECORDED.read_text(), re.MULTILINE)
    seconds: dict[str, float] = defaultdict(float)  # of all tables: whichever tests run, the order is about right
    for cpu, file in rows:
        seconds[file] += float(cpu)
    items.sort(key=lambda item: -seconds[item.nodeid.split("::")[0]])


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class _Clock:
    """In each process that runs tests: adds the CPU seconds since the last report to each report."""

    def pytest_runtest_logstart(self) -> None:
        self._last = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = _cpu_seconds()
        report.cpu_seconds, self._last = now - self._last, now
        return report


class _Table:
    """In the process that reports: sums what setup, call and teardown took, and writes the file at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self._started, self._outcomes = time.perf_counter(), ""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        counts = {name: len(terminalreporter.stats.get(name, ())) for name in ("failed", "error", "passed", "skipped")}
        self._outcomes = ", ".join(f"{count} {name}" for name, count in counts.items() if count)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cpu, wall = self._seconds[report.nodeid]
        self._seconds[report.nodeid] = cpu + getattr(report, "cpu_seconds", 0.0), wall + report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        by_file: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for name, (cpu, wall) in self._seconds.items():
            file = name.split("::")[0]
            by_file[file] = by_file[file][0] + cpu, by_file[file][1] + wall
        cpu, wall = (sum(column) for column in zip((0.0, 0.0), *self._seconds.values(), strict=True))
        lines = [
            f"{self._outcomes} in {time.perf_counter() - self._started:.0f} s; {_cpu_seconds():.0f} CPU s with imports "
            f"and collection; {datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()})",
            "   CPU s   wall s  of files, then of tests",
            *_rows([("all", (cpu, wall)), *_slowest(by_file)]),
            *_rows(_slowest(self._seconds)[:20]),
        ]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("\n".join(lines) + "\n")


def _slowest(seconds: dict[str, tuple[float, float]]) -> list[tuple[str, tuple[float, float]]]:
    return sorted(seconds.items(), key=lambda item: max(item[1]), reverse=True)


def _rows(items: Iterable[tuple[str, tuple[float, float]]]) -> list[str]:
    return [f"{cpu:8.2f} {wall:8.2f}  {name}" for name, (cpu, wall) in items]
