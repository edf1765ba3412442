"""A disk and a bucket that break at a chosen operation: a kill, a full disk, a server that fails.

A kill leaves what the system calls before it have done, perhaps with a torn line, and nothing that the
process does afterwards: its clean-up runs, as Python unwinds, but changes nothing. A kill costs no process.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import tempfile
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

SCHEME = "breaking"
URL = f"{SCHEME}://bucket"
"""A bucket in memory, through Penstock's own code for URLs of fsspec."""


class Killed(BaseException):
    """The process is dead. No `except Exception` may notice."""


@dataclass(frozen=True)
class Fault:
    """From operation `at` on, for `lasts` of them. bug: any exception. torn: share of the bytes of the write
    that is killed which are there afterwards.
    """

    kind: Literal["killed", "full", "fails", "bug"]
    at: int
    lasts: int = 10**9
    torn: float = 0.0


class Storage:
    """Counts operations below `root`, and in the bucket; breaks as `fault` says. on_kill: called once, at a
    kill, on the thread that meets it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.on_kill: Callable[[], object] = lambda: None
        self.breaks(None)

    def breaks(self, fault: Fault | None) -> None:
        """From now on, for the next process; None: it works."""
        self.operations, self.fault, self.killed, self.broke = 0, fault, False, False

    @contextmanager
    def untouched(self) -> Generator[None]:
        """What somebody else does neither counts nor breaks."""
        before = self.operations, self.fault
        self.fault = None
        yield
        self.operations, self.fault = before

    def kill(self) -> None:
        if not self.killed:
            self.killed = True
            self.on_kill()

    def operate(
        self,
        torn: Callable[[float], object] = lambda share: None,
        *,
        writes: bool = True,
        grows: bool = False,
    ) -> None:
        """Called before each operation. Raises: Killed, OSError."""
        if self.killed:
            raise Killed
        self.operations += 1
        fault = self.fault
        lasts = fault is not None and (10**9 if fault.kind == "killed" else fault.lasts)  # until a write
        if fault is None or not fault.at <= self.operations < fault.at + lasts:
            return
        if fault.kind == "killed":
            if writes:
                torn(fault.torn)
                self.kill()
                raise Killed
        elif fault.kind != "full" or grows:
            self.broke = True
            if fault.kind == "bug":
                raise RuntimeError("a bug")
            number = errno.ENOSPC if fault.kind == "full" else errno.EIO
            raise OSError(number, os.strerror(number))

    def holds(self, path: Any, folder: int | None = None) -> bool:
        if isinstance(path, int):
            return self._named(path).startswith(f"{self.root}/")
        text = os.fsdecode(path)
        if folder is not None:
            text = os.path.join(self._named(folder), text)
        return os.path.abspath(text).startswith(f"{self.root}/")

    def _named(self, descriptor: int) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            return ""


class Bucket(MemoryFileSystem):
    """Objects in this process's memory. One that is written is there when its stream is closed."""

    protocol = SCHEME
    store: dict[str, Any] = {}  # noqa: RUF012, of the base class
    pseudo_dirs = [""]  # noqa: RUF012
    storage: Storage | None = None
    cachable = False

    def _operate(self, *, writes: bool, grows: bool = False) -> None:
        if self.storage is not None:
            self.storage.operate(writes=writes, grows=grows)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._operate(writes=mode == "wb", grows=mode == "wb")  # the object appears whole, or not at all
        if mode == "rb" and path in self.store:
            return io.BytesIO(self.store[path].getvalue())  # the base class has one position for all readers
        return super()._open(path, mode, **options)

    def info(self, path: str, **options: Any) -> Any:
        self._operate(writes=False)
        return self._timed(super().info(path, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        self._operate(writes=False)
        return [self._timed(one) if detail else one for one in super().ls(path, detail, **options)]

    def _timed(self, found: dict[str, Any]) -> dict[str, Any]:
        at = found["name"]
        return {**found, "mtime": self.store[at].modified} if at in self.store else found

    def rm_file(self, path: str) -> None:
        self._operate(writes=True)
        super().rm_file(path)


@contextmanager
def breaking(folder: Path) -> Generator[Storage]:
    """Everything in a folder below `folder`, and the bucket; temporary files are elsewhere, and safe."""
    storage, temporary = Storage(folder / "histories"), folder / "temporary"
    for path in (storage.root, temporary):
        path.mkdir()
    fsspec.register_implementation(SCHEME, Bucket, clobber=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "storage", storage)
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setattr(threading, "excepthook", _without_kills(threading.excepthook))
        for name in ("replace", "rename", "unlink", "rmdir", "ftruncate"):
            patch.setattr(os, name, _counted(storage, getattr(os, name), grows=False))
        calls = {"mkdir": os.mkdir, "pwrite": os.pwrite, "fsync": lambda file: None}  # no machine is lost
        for name, call in calls.items():
            patch.setattr(os, name, _counted(storage, call, grows=True))
        patch.setattr(os, "write", _write(storage, os.write))
        patch.setattr(os, "open", _os_open(storage, os.open))
        opened = _open(storage, io.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        yield storage


def _without_kills(report: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda seen: None if seen.exc_type is Killed else report(seen)


def _counted(storage: Storage, call: Callable[..., Any], *, grows: bool) -> Callable[..., Any]:
    def counted(path: Any, *more: Any, **options: Any) -> Any:
        if storage.holds(path, options.get("dir_fd")):
            storage.operate(grows=grows)
        return call(path, *more, **options)

    return counted


def _write(storage: Storage, call: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    def write(descriptor: int, data: bytes) -> int:
        if storage.holds(descriptor):
            storage.operate(lambda share: call(descriptor, bytes(data)[: int(share * len(data))]), grows=True)
        return call(descriptor, data)

    return write


def _os_open(storage: Storage, call: Callable[..., int]) -> Callable[..., int]:
    def opening(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if storage.holds(path, options.get("dir_fd")) and not flags & os.O_DIRECTORY:
            creates = bool(flags & os.O_CREAT)
            storage.operate(writes=creates, grows=creates)
        return call(path, flags, *more, **options)

    return opening


def _open(storage: Storage, call: Callable[..., Any]) -> Callable[..., Any]:
    def opening(path: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        if not isinstance(path, int) and storage.holds(path):
            writes = mode[0] in "wax+"
            storage.operate(writes=writes, grows=writes)
        return call(path, mode, *more, **options)

    return opening


def run_histories(machine: Callable[[], RuleBasedStateMachine], examples: int, steps: int) -> None:
    """Raises: what a step raises, with the shortest history that does, and the line that replays it."""
    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    chosen = settings(max_examples=examples, stateful_step_count=steps, phases=phases, print_blob=True)
    run_state_machine_as_test(machine, settings=chosen)
