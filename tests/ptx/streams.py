"""Streams that run late: whether results depend on when a device does what it was given.

Work runs at once, in the host's order, which is one of the orders that a device may choose. That another one gives the
same is checked: of two pieces of work in different streams, or of the host, that touch the same bytes, one of them
writing, one must happen before the other, by launches, events and waits. Values follow it: a copy to pinned memory
arrives when the host has waited for it, or by chance when the host asks for its event, and until then the memory is
full of `POISON`. NumPy's writes are not seen; a NumPy read that comes too early sees poison.

Tensors of an emulated device are the CPU's. As host memory count those that are pinned.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_spec import transfers
from rollout_spec.drafters.device import drafter
from tests.ptx import driver
from tests.ptx.machine import Fault

POISON = 0xA5
ROOT = Path(__file__).parents[2]
NO_ACCESS = {"empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "detach", "set_", "resize_"}
"""Torch's operations that touch no values, beside views."""


class Stream:
    """A stream, or the host, whose work is numbered.

    Attributes:
        seen: A vector clock: of each stream, the number of the last work that happens before what comes next here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")
        self.seen: defaultdict[Stream, int] = defaultdict(int)

    def see(self, seen: dict[Stream, int]) -> None:
        for stream, number in seen.items():
            self.seen[stream] = max(self.seen[stream], number)

    def wait_stream(self, other: Stream) -> None:
        self.see(other.seen)

    def wait_event(self, event: Event) -> None:
        self.see(event.seen)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _now.wait(self.seen)

    def __enter__(self) -> Stream:
        self._outer = _now.current
        _now.current = self
        return self

    def __exit__(self, *args: object) -> None:
        _now.current = self._outer


class Event:
    """What its stream had been given when it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.seen = dict((stream or _now.current).seen)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _now.current).see(self.seen)

    def synchronize(self) -> None:
        _now.wait(self.seen)

    def query(self) -> bool:
        """Passes by chance, unless the host knows that it has passed."""
        is_over = all(number <= _now.host.seen[stream] for stream, number in self.seen.items())
        if not is_over and _now.chance.random() < 0.5:
            self.synchronize()
            return True
        return is_over

    def elapsed_time(self, later: Event) -> float:
        return 1.0


class _Access(NamedTuple):
    start: int
    end: int
    is_write: bool
    stream: Stream
    number: int
    what: str


class _Storage:
    """Memory, while it is allocated.

    Attributes:
        reference: Tells when it is freed.
        owner: The stream that it was allocated in; None: the host, pinned.
        accesses: Those that a later one may have to wait for.
    """

    def __init__(self, storage: torch.UntypedStorage, owner: Stream | None) -> None:
        self.reference = StorageWeakRef(storage)
        self.owner = owner
        self.accesses: list[_Access] = []


class _Copy(NamedTuple):
    """A copy to or from pinned memory, which the host has not waited for."""

    stream: Stream
    number: int
    pinned: torch.Tensor
    value: torch.Tensor
    """What is copied."""
    is_upload: bool


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


class _Machine:
    """Who has touched what, and what is still on its way."""

    def __init__(self, seed: int) -> None:
        self.chance, self._thread = random.Random(seed), threading.get_ident()
        self.host, self.main = Stream(), Stream()
        self.current = self.main
        self._streams = {self.main}
        self.num_copies = self.num_borrowed = 0
        self._is_busy = False
        self._storages: dict[int, _Storage] = {}  # by address
        self._borrowed: dict[tuple[_Storage, Stream], tuple[int, str]] = {}  # the last use in another stream
        self._copies: list[_Copy] = []

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._storage(tensor).owner is None

    def _storage(self, tensor: torch.Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        known = self._storages.get(storage.data_ptr())
        if known is None or known.reference.expired():
            known = self._storages[storage.data_ptr()] = _Storage(storage, self.current)
        return known

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Torch's operations here are the machine's own."""
        before, self._is_busy = self._is_busy, True
        with torch.inference_mode():
            yield
        self._is_busy = before

    def pin(self, tensor: torch.Tensor, *, is_empty: bool = False) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = _Storage(storage, None)
        if is_empty:
            storage.fill_(POISON)
        return tensor

    def wait(self, seen: dict[Stream, int]) -> None:
        """The host waits."""
        assert threading.get_ident() == self._thread, "the order of several threads is not known"
        self.host.see(seen)
        over = [copy for copy in self._copies if copy.number <= self.host.seen[copy.stream]]
        self._copies = [copy for copy in self._copies if copy.number > self.host.seen[copy.stream]]
        with self.unseen():
            for copy in over:
                if not copy.is_upload:
                    copy.pinned.copy_(copy.value)
                elif not torch.equal(_bytes_of(copy.pinned), _bytes_of(copy.value)):
                    raise Fault("pinned memory was overwritten on the host while it was copied to the device")

    def finish(self) -> None:
        """All is over."""
        for stream in self._streams:
            self.wait(stream.seen)

    def upload(self, source: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """From pinned memory to the device."""
        with self.unseen():
            value = source.clone()
            result = source.to(dtype or source.dtype, copy=True)
        number = self._begin(self.current)
        self._allocate(result)
        self._touch(source, self.current, number, False, "upload")
        self._touch(result, self.current, number, True, "upload")
        self._copies.append(_Copy(self.current, number, source, value, is_upload=True))
        return result

    def download(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """From the device to pinned memory."""
        number = self._begin(self.current)
        self.num_copies += 1
        self._touch(source, self.current, number, False, "download")
        self._touch(destination, self.current, number, True, "download")
        with self.unseen():
            value = source.to(destination.dtype, copy=True)
            self._copies.append(_Copy(self.current, number, destination, value, is_upload=False))
            _bytes_of(destination).fill_(POISON)

    def launch(self, name: str, tensors: list[torch.Tensor]) -> list[tuple[int, int, bool]]:
        """A kernel, which may write all of its tensors. Returns which bytes it must not touch, or not write."""
        stream, number = self.current, self._begin(self.current)
        self._storages = {key: value for key, value in self._storages.items() if not value.reference.expired()}
        others = (a for storage in self._storages.values() for a in storage.accesses if a.stream is not stream)
        claims = [(a.start, a.end, a.is_write) for a in others if a.number > stream.seen[a.stream]]
        for tensor in tensors:
            self._touch(tensor, stream, number, True, name, is_checked=False)
        return claims

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """One of torch's operations."""
        is_access = not (self._is_busy or func.is_view or func._schema.name.partition("::")[2] in NO_ACCESS)
        given: list[tuple[torch.Tensor, bool]] = []
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            values = value if isinstance(value, (list, tuple)) else (value,)
            given += [(tensor, is_written) for tensor in values if isinstance(tensor, torch.Tensor)]
        known = {tensor.untyped_storage().data_ptr() for tensor, _ in given}
        results = result if isinstance(result, (list, tuple)) else (result,)
        for tensor in results:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self._allocate(tensor)
                given.append((tensor, True))
        if not is_access:
            return
        is_host = any(self.is_pinned(tensor) for tensor, _ in given)
        stream = self.host if is_host else self.current
        number = self._begin(stream)
        for tensor, is_written in given:
            self._touch(tensor, stream, number, is_written, str(func))

    def _begin(self, stream: Stream) -> int:
        """The number of the next work of a stream, which comes after all that the host has done and waited for."""
        stream.see(self.host.seen)
        stream.seen[stream] += 1
        self._streams.add(stream)
        self._find_freed()
        return stream.seen[stream]

    def _allocate(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = _Storage(storage, self.current)

    def _find_freed(self) -> None:
        """The allocator gives memory that is freed to the next work of the stream it was allocated in."""
        for (storage, user), (number, what) in list(self._borrowed.items()):
            assert storage.owner is not None
            if number <= max(storage.owner.seen[user], self.host.seen[user]):
                del self._borrowed[storage, user]
            elif storage.reference.expired():
                raise Fault(f"{what}: its memory was freed while another stream uses it")

    def _touch(
        self, tensor: torch.Tensor, stream: Stream, number: int, is_write: bool, what: str, *, is_checked: bool = True
    ) -> None:
        if not tensor.numel():
            return
        start, end = driver.extent(tensor)
        storage = self._storage(tensor)
        for a in storage.accesses if is_checked else ():
            is_overlapping = a.start < end and start < a.end and (is_write or a.is_write)
            if is_overlapping and a.stream is not stream and a.number > stream.seen[a.stream]:
                raise Fault(f"{what} and {a.what} of another stream use the same bytes, and nothing orders the two")
        storage.accesses = [
            a for a in storage.accesses
            if a.stream is not stream or a.start < start or a.end > end or (a.is_write and not is_write)
        ]  # fmt: skip
        storage.accesses.append(_Access(start, end, is_write, stream, number, what))
        if storage.owner not in (None, stream, self.host) and stream is not self.host:
            self.num_borrowed += 1
            self._borrowed[storage, stream] = number, what


class _Copies(TorchFunctionMode):
    """Copies that do not wait, and pinned memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            return _now.pin(func(*args, **kwargs), is_empty="empty" in func.__name__)
        if func is torch.Tensor.to and kwargs.get("non_blocking"):
            source, device = args[0], kwargs.get("device", args[1] if len(args) > 1 else None)
            if _now.is_pinned(source):
                return _now.upload(source, kwargs.get("dtype"))
            if device == "cpu":  # others give a torch.device, which is the emulated device
                with _now.unseen():
                    destination = _now.pin(torch.empty_like(source))
                _now.download(destination, source)
                return destination
            _refuse_ours(sys._getframe(1))
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking", len(args) > 2 and args[2]):
            if _now.is_pinned(args[0]):
                _now.download(*args[:2])
                return args[0]
            _refuse_ours(sys._getframe(1))
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        _now.operation(func, args, kwargs or {}, result)
        return result


_now: Any = None
"""The `_Machine` of `late_streams`."""


def is_ours(frame: Any) -> bool:
    """Whether a frame runs code of the package."""
    path = Path(frame.f_code.co_filename)
    return path.is_relative_to(ROOT) and not {"tests", "site-packages"} & set(path.relative_to(ROOT).parts)


def _refuse_ours(frame: Any) -> None:
    if is_ours(frame):
        raise Fault("a copy from or to memory that is not pinned waits for the device")


def _pin_memory(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    with _now.unseen():
        copy = tensor.clone()
    return _now.pin(copy)


def _set_stream(stream: Stream) -> None:
    _now.current = stream


@contextmanager
def late_streams(seed: int) -> Iterator[_Machine]:
    """What is built and run here believes that its tensors are on a device whose streams run late. Raises `Fault`."""
    global _now
    _now = _Machine(seed)
    with pytest.MonkeyPatch.context() as patch:
        replaced = {"Stream": Stream, "Event": Event, "stream": lambda stream: stream, "set_stream": _set_stream}
        replaced["default_stream"] = lambda device=None: _now.main
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: _now.current)
        patch.setattr(torch.Tensor, "pin_memory", _pin_memory)
        patch.setattr(driver, "on_launch", _now.launch)
        for module in (transfers, drafter):
            patch.setattr(module, "runs_later", lambda device: True)
        with _Copies(), _Operations():
            yield _now
            _now.finish()
