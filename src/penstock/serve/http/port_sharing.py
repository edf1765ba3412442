"""Several gateways of one group share a port on one node, and successors take it over without a lost
connection.

With SO_REUSEPORT Linux lets any two programs of a user share a port silently, and resets the connections that
wait in a listening socket when its last copy is closed. So each gateway claims a slot under its group's name:
an abstract Unix socket, which ends with its process and hands out copies of the listening socket to peers.
The successor in a slot listens on that copy, so that no connection is lost when its predecessor goes. A
program that finds the port taken, and no peer that holds it, is refused.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

_TRIES, _AGAIN_S = 20, 0.05
"""For a second: a peer may be testing whether the port is free, or hold it and not share it yet."""
_ANSWER_S = 2.0  # for a peer, whose event loop may be busy

Bind = Callable[[bool], socket.socket]


@dataclass(frozen=True, slots=True)
class PortGroup:
    """Gateways that may share a port. size: how many at a time, without successors."""

    name: str
    size: int = 1


@dataclass(frozen=True, slots=True)
class _Slot:
    """index: below the group's size. number: of its holder; the successor has the next one."""

    index: int
    number: int


class PortClaim:
    """A gateway's claim to a slot, held until `close`."""

    def __init__(self, prefix: str, slot: _Slot) -> None:
        """Raises: OSError with EADDRINUSE when a peer was first."""
        self.slot = slot
        self._prefix = prefix
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_address(prefix, slot))
        except OSError:
            self._socket.close()
            raise
        self._copy: socket.socket | None = None

    def share(self, sock: socket.socket) -> None:
        """From now on, gives peers copies of `sock`, answered on the running loop."""
        self._copy = sock.dup()
        self._socket.setblocking(False)
        self._socket.listen()
        asyncio.get_running_loop().add_reader(self._socket, self._give, self._copy)

    def _give(self, copy: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the peer has ended meanwhile
            peer, _ = self._socket.accept()
            with peer:
                if _user(peer) == os.getuid():
                    socket.send_fds(peer, [b"."], [copy.fileno()])

    def peers(self) -> list[_Slot]:
        """All other claims; the predecessor in this slot comes first."""
        others = [slot for slot in _taken(self._prefix) if slot != self.slot]
        return sorted(others, key=lambda one: (one.index == self.slot.index, one.number), reverse=True)

    def copy_of(self, slot: _Slot) -> socket.socket | None:
        """A copy of a peer's listening socket; None when it has none yet, or has ended. Blocks."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer, contextlib.suppress(OSError):
            peer.settimeout(_ANSWER_S)
            peer.connect(_address(self._prefix, slot))
            if _user(peer) == os.getuid():
                _, files, _, _ = socket.recv_fds(peer, 1, 1)
                return _received(files[0]) if files else None
        return None

    def close(self) -> None:
        """Gives up the slot, and the copy of the socket. Safe to call twice."""
        if self._copy is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._copy.close()
            self._copy = None
        self._socket.close()


async def claim(port: int, group: PortGroup, bind: Bind) -> tuple[socket.socket, PortClaim]:
    """The socket to listen on, shared with the group, and the claim to hold with it.

    bind: called with whether the port may be shared; raises ConfigError when it is taken.
    Raises: ConfigError when others have it.
    """
    free = bind(True) if port == 0 else None
    held = _take(free.getsockname()[1] if free else port, group)
    try:
        sock = free or await _claimed(held, bind)
    except BaseException:
        held.close()
        raise
    held.share(sock)
    return sock, held


def _take(port: int, group: PortGroup) -> PortClaim:
    """A claim to an empty slot; else to succeed the holder that came first."""
    prefix = f"penstock-port-{port}-{hashlib.sha256(group.name.encode()).hexdigest()[:16]}-"
    while True:
        newest = dict.fromkeys(range(group.size), -1)
        for slot in _taken(prefix):
            newest[slot.index] = max(slot.number, newest.get(slot.index, -1))
        slot = min(range(group.size), key=lambda slot: newest[slot])
        try:
            return PortClaim(prefix, _Slot(slot, newest[slot] + 1))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise


async def _claimed(held: PortClaim, bind: Bind) -> socket.socket:
    for _ in range(_TRIES):
        with contextlib.suppress(ConfigError):
            return await asyncio.to_thread(_socket, held, bind)
        await asyncio.sleep(_AGAIN_S)
    return await asyncio.to_thread(_socket, held, bind)


def _socket(held: PortClaim, bind: Bind) -> socket.socket:
    for peer in held.peers():
        if (copy := held.copy_of(peer)) is not None:
            try:
                own = bind(True)
            except BaseException:
                copy.close()
                raise
            follows = peer.index == held.slot.index and copy.getsockname() == own.getsockname()
            (own if follows else copy).close()
            return copy if follows else own
    bind(False).close()
    return bind(True)


def _taken(prefix: str) -> Iterator[_Slot]:
    found = re.findall(rf"@{prefix}(\d+)-(\d+)$", Path("/proc/net/unix").read_text(), re.MULTILINE)
    return (_Slot(int(slot), int(number)) for slot, number in found)


def _received(file: int) -> socket.socket:
    os.set_inheritable(file, False)
    return socket.socket(fileno=file)


def _address(prefix: str, slot: _Slot) -> str:
    return f"\0{prefix}{slot.index}-{slot.number}"


def _user(peer: socket.socket) -> int:
    """Anyone on the machine may connect to an abstract socket, or have bound it."""
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user
