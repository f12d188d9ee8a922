"""A kernel's PTX, parsed for the machine: registers get places, operands types, labels numbers."""

from __future__ import annotations

import linecache
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.ptx.opcodes import BITS, SPECIAL_REGISTERS, Form, Unsupported, form

ROOT = Path(__file__).parents[2]
CONTROL = {"bra": 1, "ret": 2, "exit": 2, "bar.sync": 3, "barrier.sync": 3, "bar.warp.sync": 4}
"""Instructions that `machine.c` runs itself, by its numbers."""
COLLECTIVES = ("redux", "shfl")
"""Their last operand names the lanes that take part."""


@dataclass
class Instruction:
    """Registers are offsets into a warp's registers."""

    op: str
    destinations: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    guard: int = -1
    negated: bool = False
    target: str | int = -1
    lanes: int = -1
    offset: int = 0
    line: int = 0


def _split(text: str) -> Iterator[str]:
    """Operands, at commas outside of braces and brackets."""
    for operand in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text):
        if operand.strip():
            yield operand.strip()


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.strip("{} ").split(",")]


class Program:
    """The one kernel of a PTX text.

    Attributes:
        name: the kernel's.
        num_parameters: how many values a launch passes.
        num_warps: per block.
        code: its instructions.
        initial_registers: a warp's registers when it starts, constants included: arbitrary values otherwise.
    """

    def __init__(self, ptx: str) -> None:
        self.lines = ptx.splitlines()
        self.name = re.search(r"\.visible \.entry (\w+)\(", ptx)[1]
        self.num_parameters = len(re.findall(r"^\s*\.param .*_param_\d+,?$", ptx, re.MULTILINE))
        self.num_warps = int(re.search(r"\.reqntid (\d+)", ptx)[1]) // 32
        self.code: list[Instruction] = []
        self._kinds: dict[str, str] = {}  # by register's prefix, or name
        self._places: dict[str, int] = {}
        self._constants: dict[bytes, int] = {}
        self._size = 0
        self._sources: dict[int, tuple[str, int]] = {}  # (file, line) by the PTX's line
        labels = self._parse()
        for instruction in self.code:
            if isinstance(instruction.target, str):
                instruction.target = labels[instruction.target]
        registers = bytearray(b"\xa7" * self._size)
        for data, place in self._constants.items():
            registers[place : place + len(data)] = data
        self.initial_registers = bytes(registers)

    def source(self, line: int) -> str:
        """The line of Python from which a line of the PTX comes."""
        return linecache.getline(*self._sources.get(line, ("", 0))).strip()

    def where(self, line: int) -> str:
        """A line of the PTX, and the place in Python from which it comes."""
        file, number = self._sources.get(line, ("?", 0))
        return f"{Path(file).name}:{number} `{self.source(line)}` [{' '.join(self.lines[line - 1].split())}]"

    @cached_property
    def contracted_exchanges(self) -> list[int]:
        """Lines of fused multiply-adds that add what another lane sent.

        In a butterfly each lane adds its own product to another lane's, which was rounded before it was sent, while its
        own one is not: lanes get different sums, though each has added the same two products.
        """
        received: set[int] = set()
        found = []
        for i in self.code:
            if i.op.startswith("shfl.sync.bfly") or (i.op.startswith("mov") and i.sources[0] in received):
                received.update(i.destinations)
                continue
            if i.op.startswith("fma") and i.sources[2] in received:
                found.append(i.line)
            received.difference_update(i.destinations)
        return found

    def _parse(self) -> dict[str, int]:
        labels: dict[str, int] = {}
        files = re.findall(r'^\s*\.file\s+(\d+)\s+"(.*?)"', "\n".join(self.lines), re.MULTILINE)
        files = {number: _in_this_checkout(file) for number, file in files}
        source, in_body, line_of_asm = ("?", 0), False, None
        for number, line in enumerate(self.lines, 1):
            if "inline asm" in line:  # LLVM counts its lines as if they were Python's
                line_of_asm = source if "begin" in line else None
            if location := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
                if location[2] != "0" and line_of_asm is None:
                    source = files[location[1]], int(location[2])
                continue
            text = line.partition("//")[0].strip()
            if not in_body:
                in_body = text == "{"
                continue
            if text.startswith((".section", ".file")):
                break
            self._sources[number] = source
            if label := re.match(r"(\$\w+):\s*(.*)$", text):
                labels[label[1]] = len(self.code)
                text = label[2]
            for statement in text.split(";"):
                # Braces around a statement open a scope, whose registers Triton names apart.
                statement = re.sub(r"^[{}\s]*(?=[.@a-z]|$)", "", statement).strip()
                if statement.startswith(".reg"):
                    self._declare(statement)
                elif statement and statement != "}" and not statement.startswith("."):
                    self._add(statement, number)
        return labels

    def _declare(self, statement: str) -> None:
        _, kind, names = statement.split(None, 2)
        for name in _names(names):
            self._kinds[name.partition("<")[0]] = kind[1:]

    def _kind(self, register: str) -> str:
        return self._kinds.get(register) or self._kinds[register.rstrip("0123456789")]

    def _allocate(self, bits: int) -> int:
        """A register's place: 32 values, or one word of 32 predicates, aligned for the CPU's vector instructions."""
        size = max(64, bits // 8 * 32)
        self._size += size
        return self._size - size

    def _register(self, name: str) -> int:
        if name not in self._places:
            self._places[name] = self._allocate(BITS[self._kind(name)])
        return self._places[name]

    def _constant(self, text: str, kind: str) -> int:
        if kind == "pred":
            data = struct.pack("<I", 0xFFFFFFFF if int(text, 0) else 0)
        else:
            size = BITS[kind] // 8
            if text[:2] in ("0f", "0d"):
                value = int(text[2:], 16)
            else:  # shared memory starts at 0
                value = 0 if text == "global_smem" else int(text.rstrip("U"), 0)
            data = (value & (1 << 8 * size) - 1).to_bytes(size, "little") * 32
        if data not in self._constants:
            self._constants[data] = self._allocate(BITS[kind])
        return self._constants[data]

    def _add(self, statement: str, line: int) -> None:
        guard, negated = -1, False
        if guarded := re.match(r"@(!?)(%\w+)\s+(.*)", statement):
            negated, statement = bool(guarded[1]), guarded[3]
            guard = self._register(guarded[2])
        op, _, rest = statement.replace("\t", " ").partition(" ")
        operands = list(_split(rest))
        common = {"guard": guard, "negated": negated, "line": line}
        if (control := re.sub(r"\.(uni|aligned|cta)\b", "", op)) in CONTROL:
            if CONTROL[control] == CONTROL["bar.sync"] and operands != ["0"]:
                raise Unsupported(statement)
            lanes = self._operand(operands[0], "b32", common) if control == "bar.warp.sync" else -1
            target = operands[0] if control == "bra" else -1
            self.code.append(Instruction(control, lanes=lanes, target=target, **common))
        elif op.partition(".")[0] not in ("membar", "fence"):  # memory is sequentially consistent here
            self._add_ordinary(*_respelled(op, operands), common)

    def _add_ordinary(self, op: str, operands: list[str], offset: int, common: dict) -> None:
        known: Form = form(op)
        num_destinations = len(known.destinations)
        if len(operands) != num_destinations + len(known.sources):
            raise Unsupported(f"{op} {operands}")
        sources = []
        for text, kind in zip(operands[num_destinations:], known.sources, strict=True):
            if kind.startswith("address"):
                found = re.fullmatch(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
                offset = int(found[2] or "0", 0)
                sources.append(-1 if found[1] == "global_smem" else self._register(found[1]))
                if sources[-1] >= 0 and BITS[self._kind(found[1])] != int(kind[7:]):
                    raise Unsupported(f"{op} {operands}")
            else:
                sources.append(self._operand(text, kind, common))
        destinations, widened = [], []
        for text, kind in zip(operands, known.destinations, strict=False):
            bits = BITS[kind]
            held = bits if text == "_" else BITS[self._kind(text)]
            place = self._allocate(bits) if text == "_" or held != bits else self._register(text)
            destinations.append(place)
            if held < bits:
                raise Unsupported(f"{op} {operands}")
            if held > bits:
                sign = "s" if kind[0] == "s" else "u"
                widen = Instruction(f"cvt.{sign}{held}.{sign}{bits}", [self._register(text)], [place])
                widened.append(widen)
        lanes = sources[-1] if op.startswith(COLLECTIVES) else -1
        self.code.append(Instruction(op, destinations, sources, lanes=lanes, offset=offset, **common))
        for instruction in widened:
            self.code.append(instruction)
            instruction.guard, instruction.negated, instruction.line = (common[k] for k in ("guard", "negated", "line"))

    def _operand(self, text: str, kind: str, common: dict) -> int:
        """A source's register. Wider ones are read in part."""
        if not text.startswith("%"):
            return self._constant(text, kind)
        held, bits = BITS[self._kind(text)], BITS[kind]
        if held < bits:
            raise Unsupported(f"{text} as .{kind}")
        if held == bits:
            return self._register(text)
        place = self._allocate(bits)
        narrow = Instruction(f"cvt.u{bits}.u{held}", [place], [self._register(text)], **common)
        self.code.append(narrow)
        return place


def _respelled(op: str, operands: list[str]) -> tuple[str, list[str], int]:
    """An instruction in the spelling of `opcodes.py`: (opcode, operands, number of the parameter that it reads)."""
    words = op.split(".")
    name, kind = words[0], words[-1]
    if name == "mov" and operands[1][1:] in SPECIAL_REGISTERS:
        return f"sreg.{operands[1][1:]}", operands[:1], 0
    if name == "mov" and operands[0][0] == "{":
        parts = _names(operands[0])
        return f"unpack.{len(parts)}.{kind}", [*parts, operands[1]], 0
    if name == "mov" and operands[1][0] == "{":
        parts = _names(operands[1])
        return f"pack.{len(parts)}.{kind}", [operands[0], *parts], 0
    if name == "ld" and words[1] == "param":
        return f"ldparam.b{BITS[kind]}", operands[:1], int(re.search(r"_param_(\d+)\]", operands[1])[1])
    if name in ("ld", "st", "atom", "red"):
        space = "shared" if "shared" in op else "global"
        if ".global" not in op and ".shared" not in op:
            raise Unsupported(op)
        if name in ("ld", "st"):
            vector = next((f"{word}." for word in words if re.fullmatch(r"v\d", word)), "")
            operands = [*_names(operands[0]), *operands[1:]] if name == "ld" else [operands[0], *_names(operands[1])]
            return f"{name}.{space}.{vector}b{BITS[kind]}", operands, 0
        return (
            f"{name}.{space}.{words[-2]}.{kind.replace('b', 'u') if words[-2] in ('add', 'min', 'max') else kind}",
            operands,
            0,
        )
    if name in ("ldmatrix", "stmatrix"):
        which = 0 if name == "ldmatrix" else 1
        return op, [*operands[:which], *_names(operands[which]), *operands[which + 1 :]], 0
    return op, operands, 0


def _in_this_checkout(file: str) -> str:
    """The file of this checkout: Triton's cache may hold code that another one has compiled."""
    parts = Path(file).parts[1:]
    ours = (ROOT.joinpath(*parts[i:]) for i in range(len(parts)))
    return next((str(path) for path in ours if path.is_file()), file)
