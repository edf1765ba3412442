"""One port for several gateways of one family on one node, and for nobody else; who leaves hands it on.

Linux lets any two programs of a user share a port with SO_REUSEPORT and says nothing, and resets what waits
in a listening socket when its last copy is closed. So each gateway takes a place under its family's name: an
abstract Unix socket, which ends with its process and at which relatives get a copy of its listening socket.
The next one in a place listens on that copy, and no connection is lost when the first one goes. Who finds the
port taken and no relative that has it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

_TRIES, _AGAIN_S = 20, 0.05
"""For a second: a relative may just be looking whether the port is free, or have it and not yet say so."""
_ANSWER_S = 2.0  # for a relative, whose event loop may be busy

SUPPORTED = sys.platform == "linux"
Bind = Callable[[bool], socket.socket]


@dataclass(frozen=True, slots=True)
class Family:
    """Gateways that may share a port. size: how many of them at a time, successors apart."""

    name: str
    size: int = 1


@dataclass(frozen=True, slots=True)
class _Place:
    """slot: below the family's size. number: of its holder; who follows it has the next one."""

    slot: int
    number: int


class Mark:
    """A gateway's claim to its place, held until `close`."""

    def __init__(self, prefix: str, place: _Place) -> None:
        """Raises: OSError with EADDRINUSE when a relative was faster."""
        self.place = place
        self._prefix = prefix
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_address(prefix, place))
        except OSError:
            self._socket.close()
            raise
        self._copy: socket.socket | None = None

    def share(self, sock: socket.socket) -> None:
        """From now on relatives get copies of `sock`, answered on the running loop."""
        self._copy = sock.dup()
        self._socket.setblocking(False)
        self._socket.listen()
        asyncio.get_running_loop().add_reader(self._socket, self._give, self._copy)

    def _give(self, copy: socket.socket) -> None:
        with contextlib.suppress(OSError):  # a relative that has gone meanwhile
            relative, _ = self._socket.accept()
            with relative:
                if _user(relative) == os.getuid():
                    socket.send_fds(relative, [b"."], [copy.fileno()])

    def relatives(self) -> list[_Place]:
        """All others; before them, the one that this one follows."""
        others = [place for place in _taken(self._prefix) if place != self.place]
        return sorted(others, key=lambda one: (one.slot == self.place.slot, one.number), reverse=True)

    def copy_of(self, place: _Place) -> socket.socket | None:
        """A relative's listening socket; None when it has none yet, or has gone. Blocks."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked, contextlib.suppress(OSError):
            asked.settimeout(_ANSWER_S)
            asked.connect(_address(self._prefix, place))
            if _user(asked) == os.getuid():
                _, files, _, _ = socket.recv_fds(asked, 1, 1)
                return _own(files[0]) if files else None
        return None

    def close(self) -> None:
        """Gives up the place, and the copy of the socket. Safe to call twice."""
        if self._copy is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._copy.close()
            self._copy = None
        self._socket.close()


async def claim(port: int, family: Family, bind: Bind) -> tuple[socket.socket, Mark]:
    """The socket to listen on, shared with the family, and the mark to keep with it.

    bind: called with whether the port may be shared; raises ConfigError when it is taken.
    Raises: ConfigError when others have it.
    """
    if not SUPPORTED:
        raise ConfigError("Several gateway processes on one port need Linux; set gateway.processes to 1.")
    free = bind(True) if port == 0 else None
    mark = _take(free.getsockname()[1] if free else port, family)
    try:
        sock = free or await _claimed(mark, bind)
    except BaseException:
        mark.close()
        raise
    mark.share(sock)
    return sock, mark


def _take(port: int, family: Family) -> Mark:
    """An empty slot's place; else the next one of the slot whose holder came first."""
    prefix = f"penstock-port-{port}-{hashlib.sha256(family.name.encode()).hexdigest()[:16]}-"
    while True:
        newest = dict.fromkeys(range(family.size), -1)
        for place in _taken(prefix):
            newest[place.slot] = max(place.number, newest.get(place.slot, -1))
        slot = min(range(family.size), key=lambda slot: newest[slot])
        try:
            return Mark(prefix, _Place(slot, newest[slot] + 1))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise


async def _claimed(mark: Mark, bind: Bind) -> socket.socket:
    for _ in range(_TRIES):
        with contextlib.suppress(ConfigError):
            return await asyncio.to_thread(_socket, mark, bind)
        await asyncio.sleep(_AGAIN_S)
    return await asyncio.to_thread(_socket, mark, bind)


def _socket(mark: Mark, bind: Bind) -> socket.socket:
    for relative in mark.relatives():
        if (copy := mark.copy_of(relative)) is not None:
            own = bind(True)
            follows = relative.slot == mark.place.slot and copy.getsockname() == own.getsockname()
            (own if follows else copy).close()
            return copy if follows else own
    bind(False).close()
    return bind(True)


def _taken(prefix: str) -> Iterator[_Place]:
    found = re.findall(rf"@{prefix}(\d+)-(\d+)$", Path("/proc/net/unix").read_text(), re.MULTILINE)
    return (_Place(int(slot), int(number)) for slot, number in found)


def _own(file: int) -> socket.socket:
    os.set_inheritable(file, False)
    return socket.socket(fileno=file)


def _address(prefix: str, place: _Place) -> str:
    return f"\0{prefix}{place.slot}-{place.number}"


def _user(peer: socket.socket) -> int:
    """Anyone on the machine may connect to an abstract socket, or have bound it."""
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user
