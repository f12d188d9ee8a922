"""The emulator's machine: builds it from C, holds its settings, and runs launches."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

import numpy as np

from tests.ptx.opcodes import common_forms, form
from tests.ptx.program import CONTROL, Program

HERE = Path(__file__).parent
BUILD = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rollout_spec" / "ptx-emulator"
COMPILER = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
# Contracting a * b + c, or what -ffast-math allows, would change results; NaNs and wrapping integers are meant.
FLAGS = (
    *("-O2", "-ftree-vectorize", "-march=native", "-std=gnu11", "-fno-strict-aliasing", "-ffp-contract=off", "-fwrapv"),
    *("-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-w"),
)
KINDS = (
    "address outside of every tensor of the launch",
    "misaligned address",
    "address outside of shared memory",
    "barrier that not all lanes of the warp reach",
    "lanes synchronise at different instructions, which PTX leaves undefined",
    "shuffle from a lane that does not take part",
    "too many instructions",
    "bytes that another stream uses, and nothing orders the two",
    "shared memory read before it was written",
    "race between blocks",
    "race within a block",
    "race within a warp",
)
_OF_LENGTH = ("length = tl.load(documents_ptr + LENGTH)", "tl.store(documents_ptr + LENGTH")
_OF_NUM_DRAFTED = ("num_drafted = tl.where(length > 0, tl.load(num_drafted_ptr", "tl.store(num_drafted_ptr")
BENIGN = {"_extend_kernel": (_OF_LENGTH, _OF_NUM_DRAFTED), "_lengthen_kernel": (_OF_LENGTH,)}
"""Races within a warp that change nothing, by kernel and by how the lines of Python begin: every lane loads the value,
and lane 0 stores the new one after collectives that need what the lanes loaded."""
MAX_EVENTS = 64
INSTRUCTION = np.dtype(
    [("run", "u8"), *((name, "i4") for name in ("control", "guard", "negated", "target", "line", "lanes")),
     ("offset", "i8"), ("destinations", "i4", 4), ("sources", "i4", 6)], align=True,
)  # fmt: skip


class Fault(RuntimeError):
    """A launch that would go wrong on a GPU, or could."""


@dataclass
class Settings:
    """How launches run."""

    check_races: bool = False
    seed: int = 0
    """0: blocks and warps in order. Otherwise in random order, with random interruptions."""
    num_resident: int = 4
    """Blocks that run at once in random order."""
    limit: int = 2_000_000_000
    """Instructions of a launch."""


settings = Settings()


@contextmanager
def changed_settings(**values) -> Iterator[None]:
    """Launches run with these settings meanwhile."""
    before = replace(settings)
    for name, value in values.items():
        setattr(settings, name, value)
    try:
        yield
    finally:
        for entry in fields(settings):
            setattr(settings, entry.name, getattr(before, entry.name))


class _Event(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "line", "other_line", "block", "thread", "other_thread")),
        ("address", ctypes.c_uint64),
    ]


class _Counters(ctypes.Structure):
    _fields_ = [("sectors_read", ctypes.c_uint64), ("sectors_written", ctypes.c_uint64)]


class _Machine(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_void_p), ("initial_registers", ctypes.c_char_p), ("num_register_bytes", ctypes.c_int32),
        ("grid", ctypes.c_int32 * 3), ("num_warps", ctypes.c_int32), ("num_shared_bytes", ctypes.c_int32),
        ("parameters", ctypes.c_void_p), ("spans", ctypes.c_void_p), ("num_spans", ctypes.c_int32),
        ("last_span", ctypes.c_int32), ("check_races", ctypes.c_int32), ("claims", ctypes.c_void_p),
        ("num_claims", ctypes.c_uint64), ("events", ctypes.c_void_p),
        ("num_events", ctypes.c_int32), ("max_events", ctypes.c_int32), ("counters", ctypes.c_void_p),
        ("limit", ctypes.c_uint64), ("random", ctypes.c_uint64), ("pages", ctypes.c_void_p),
        ("num_page_slots", ctypes.c_uint64), ("num_pages", ctypes.c_uint64), ("last_page", ctypes.c_void_p),
    ]  # fmt: skip


@dataclass
class Counts:
    """What launches did."""

    launches: int = 0
    sectors_read: int = 0
    """Of 32 aligned bytes of global memory, once for each access of a warp."""
    sectors_written: int = 0


def _compile(sources: dict[str, str], stem: str) -> Path:
    """A shared library of C files, named for what they contain; made once, also if several processes want it."""
    header = (HERE / "machine.h").read_text()
    digest = hashlib.sha256("\0".join((header, *sources.values(), *FLAGS)).encode()).hexdigest()[:16]
    library = BUILD / f"{stem}-{digest}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            for name, text in sources.items():
                (Path(folder) / name).write_text(text)
            output = Path(folder) / library.name
            if COMPILER is None:
                raise RuntimeError("the tests of kernels need a C compiler: cc, gcc or clang")
            command = [COMPILER, *FLAGS, f"-I{HERE}", *(str(Path(folder) / name) for name in sources)]
            subprocess.run([*command, "-o", str(output), "-lm"], check=True)
            output.replace(library)
    return library


def _functions(ops: Sequence[str]) -> str:
    """C functions of opcodes, op_0, op_1, ... in order."""
    text = '#include "machine.h"\n'
    for number, op in enumerate(ops):
        text += (
            f"// {op}\nint op_{number}(Warp *w, const Instruction *i, uint32_t m) {{ {form(op).body} return GO_ON; }}\n"
        )
    return text


@cache
def _core() -> ctypes.CDLL:
    core = ctypes.CDLL(str(_compile({"machine.c": (HERE / "machine.c").read_text()}, "machine")), ctypes.RTLD_GLOBAL)
    core.launch.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return core


_addresses: dict[str, int] = {}
_libraries: list[ctypes.CDLL] = []


def _load(ops: Sequence[str]) -> None:
    _core()  # whose functions the opcodes call
    library = ctypes.CDLL(str(_compile({"opcodes.c": _functions(ops)}, "opcodes")))
    _libraries.append(library)
    for number, op in enumerate(ops):
        _addresses[op] = ctypes.cast(library[f"op_{number}"], ctypes.c_void_p).value


def addresses(ops: Iterable[str]) -> dict[str, int]:
    """Where the machine code of opcodes is, which is compiled where it is missing."""
    if not _addresses:
        _load(common_forms())
    if missing := sorted(set(ops) - set(_addresses)):
        _load(missing)
    return _addresses


class Loaded:
    """A program in the form in which the machine runs it.

    Attributes:
        program: what it came from.
        code: its instructions, which tests may change.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        known = addresses(i.op for i in program.code if i.op not in CONTROL)
        self.code = np.zeros(len(program.code), INSTRUCTION)
        for entry, i in zip(self.code, program.code, strict=True):
            entry["run"], entry["control"] = known.get(i.op, 0), CONTROL.get(i.op, 0)
            entry["guard"], entry["negated"], entry["target"] = i.guard, i.negated, i.target
            entry["line"], entry["lanes"], entry["offset"] = i.line, i.lanes, i.offset
            entry["destinations"] = (i.destinations + [-1] * 4)[:4]
            entry["sources"] = (i.sources + [-1] * 6)[:6]

    def launch(
        self,
        grid: tuple[int, int, int],
        num_shared_bytes: int,
        parameters: Sequence[int],
        spans: Sequence[tuple[int, int]],
        claims: Sequence[tuple[int, int, bool]] = (),
    ) -> None:
        """Run a grid of blocks. Raises `Fault` with all that went wrong.

        Args:
            grid: blocks in each direction.
            num_shared_bytes: of each block.
            parameters: values as unsigned integers.
            spans: (start, end) addresses that may be accessed; none: any.
            claims: (start, end, is written) addresses that another stream uses: what it reads may be read.
        """
        program = self.program
        if len(parameters) > program.num_parameters:
            raise ValueError(f"{program.name} takes {program.num_parameters} parameters, not {len(parameters)}")
        values = np.zeros(program.num_parameters + 1, np.uint64)
        values[: len(parameters)] = parameters
        allowed = np.array(spans, np.uint64).reshape(-1, 2)
        claimed = np.array(claims, np.uint64).reshape(-1, 3)
        events, counters = (_Event * MAX_EVENTS)(), _Counters()
        machine = _Machine(
            code=self.code.ctypes.data, initial_registers=program.initial_registers,
            num_register_bytes=len(program.initial_registers), grid=grid, num_warps=program.num_warps,
            num_shared_bytes=num_shared_bytes, parameters=values.ctypes.data, spans=allowed.ctypes.data,
            num_spans=len(allowed), claims=claimed.ctypes.data, num_claims=len(claimed),
            check_races=settings.check_races, events=ctypes.addressof(events), max_events=MAX_EVENTS,
            counters=ctypes.addressof(counters), limit=settings.limit, random=settings.seed,
        )  # fmt: skip
        finished = _core().launch(ctypes.byref(machine), settings.num_resident)
        found = [event for event in events[: machine.num_events] if not _is_benign(program, event)]
        if found or not finished:
            raise Fault("\n".join(_describe(program, event) for event in found))
        total = totals.setdefault(program.name, Counts())
        total.launches += 1
        total.sectors_read += counters.sectors_read
        total.sectors_written += counters.sectors_written


totals: dict[str, Counts] = {}
"""What the launches of each kernel did so far."""


def _is_benign(program: Program, event: _Event) -> bool:
    lines = [program.source(line) for line in (event.line, event.other_line) if line > 0]
    races = BENIGN.get(program.name, ()) if KINDS[event.kind] == "race within a warp" else ()
    return any(all(line.startswith(race) for line in lines) for race in races)


def _describe(program: Program, event: _Event) -> str:
    other = f" against {program.where(event.other_line)}" if event.other_line > 0 else ""
    thread = f"{event.thread}" + (f" and {event.other_thread}" if event.other_thread >= 0 else "")
    return (
        f"{program.name}: {KINDS[event.kind]}: {program.where(event.line)}{other}, "
        f"block {event.block}, thread {thread}, address {event.address:#x}"
    )
