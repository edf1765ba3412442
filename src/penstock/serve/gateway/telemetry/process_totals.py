"""The figures of all gateway processes of one application on a node, added up: a scrape of the port that they
share reaches any of them.

Each process writes its figures to a file, once a second and before it answers a scrape; what it answers is
the sum over the files. The file of a process that has died counts on, and the next process to start continues
it: a counter of the sum never goes back. Knows neither Ray nor HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import count
from pathlib import Path

import msgspec

from penstock.metrics import GatewayFigures

log = logging.getLogger(__name__)

_WRITE_S = 1.0  # the most that a process which is killed can have counted and not written

_decode = msgspec.msgpack.Decoder(GatewayFigures).decode


def folder_of(*names: str) -> Path:
    """The same in all processes of this user on this machine that give the same names."""
    together = sha256("/".join(names).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"penstock-gateways-{os.getuid()}-{together}"


class ProcessTotals:
    """This process among the others of `folder`, from `join` until `close`."""

    def __init__(self, folder: Path, figures: Callable[[], GatewayFigures]) -> None:
        """figures: of this process, now."""
        self._folder = folder
        self._figures = figures
        self._before = GatewayFigures()
        self._written = b""
        self._lock: int | None = None
        self._slot = 0
        self._writing: asyncio.Task[None] | None = None

    def join(self) -> None:
        """Where the folder cannot be used, `total` is this process' own."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if self._folder.stat().st_uid != os.getuid():
                raise PermissionError(f"{self._folder} is another user's")
            self._slot, self._lock = next(
                (slot, lock) for slot in count() if (lock := self._locked(slot)) is not None
            )
        except OSError as error:
            log.warning("/metrics shows one of several gateway processes: %s", error)
            return
        self._before = _of_ended(self._read(self._slot))
        self._writing = asyncio.create_task(self._write_often())

    def total(self) -> GatewayFigures:
        """Of all processes; of those that have ended, without what they had open."""
        if self._lock is None:
            return self._figures()
        found = self._write()
        for slot in self._slots():
            if slot != self._slot:
                other = self._read(slot)
                found.add(_of_ended(other) if self._has_ended(slot) else other)
        return found

    def close(self) -> None:
        """Writes a last time. The last process to leave removes the folder."""
        if self._lock is None or self._writing is None:
            return
        self._writing.cancel()
        self._write()
        held = {slot: self._locked(slot) for slot in self._slots() if slot != self._slot}
        if None not in held.values():
            for slot in (self._slot, *held):
                for kind in ("figures", "lock"):
                    self._file(slot, kind).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # one has just joined
                self._folder.rmdir()
        for lock in (self._lock, *held.values()):
            if lock is not None:
                os.close(lock)
        self._lock = None

    async def _write_often(self) -> None:
        while True:
            await asyncio.sleep(_WRITE_S)
            self._write()

    def _write(self) -> GatewayFigures:
        """Returns what it wrote. A disk that is full costs the others this process' latest figures only."""
        found = self._figures()
        found.add(self._before)
        content = msgspec.msgpack.encode(found)
        if content != self._written:
            draft = self._file(self._slot, "draft")
            try:
                draft.write_bytes(content)
                draft.replace(self._file(self._slot, "figures"))
                self._written = content
            except OSError as error:
                log.info("other gateways do not see the latest figures of this one: %s", error)
        return found

    def _has_ended(self, slot: int) -> bool:
        lock = self._locked(slot, fcntl.LOCK_SH)  # two processes that look do not see each other
        if lock is not None:
            os.close(lock)
        return lock is not None

    def _locked(self, slot: int, kind: int = fcntl.LOCK_EX) -> int | None:
        """A descriptor that holds the slot until it is closed or its process ends; None while another process
        holds it, or has just removed it.
        """
        file = self._file(slot, "lock")
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            if file.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return None

    def _read(self, slot: int) -> GatewayFigures:
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            return _decode(self._file(slot, "figures").read_bytes())
        return GatewayFigures()

    def _slots(self) -> Iterator[int]:
        return (int(file.stem) for file in self._folder.glob("*.lock"))

    def _file(self, slot: int, kind: str) -> Path:
        return self._folder / f"{slot}.{kind}"


def _of_ended(figures: GatewayFigures) -> GatewayFigures:
    return GatewayFigures(counters=figures.counters, latencies=figures.latencies)
