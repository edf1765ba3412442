"""Sockets for listening: bound with the options that a gateway needs, and errors that say what to do.

Gateways of one group listen on copies of one socket, which each passes on to those that start later. A
connection waits in that socket until a gateway accepts it: one that hangs gets none, and none is lost when
a gateway leaves or dies while another one listens. Each gateway holds a claim under its group's name, an
abstract Unix socket, which ends with its process and hands out copies. A program that finds the port taken,
and no peer that holds it, is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import resource
import secrets
import selectors
import socket
import struct
import time
from pathlib import Path
from typing import cast

from penstock.errors import ConfigError

log = logging.getLogger(__name__)

UNSENT_BYTES = 64 * 1024
"""In the kernel, for one connection; by itself it buffers up to 4 MiB for a slow client."""

BACKLOG = 4096  # more than the kernel's own limit, `net.core.somaxconn`, has no effect
"""Connections that may wait in a listening socket."""

_FEW_FILES, _MANY_FILES = 4096, 65_536

_TRIES, _AGAIN_S = 20, 0.05
"""For a second: a peer may have the port and no claim yet. For 40 s where all peers hang: they are ended."""
_ANSWER_S = 2.0  # for peers, whose event loops may be busy


def raise_file_limit() -> None:
    """Allows as many open files as the hard limit does: an open request takes one, and one to its replica."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < _FEW_FILES:
        log.warning(
            "The limit on open files is %d: at most %d requests can be open at once. Raise it: ulimit -n %d.",
            hard,
            hard // 2,
            _MANY_FILES,
        )


def bind(host: str, port: int, *, listens: bool = False) -> socket.socket:
    """A TCP socket bound to `host` and `port`. It does not listen yet, unless `listens`.

    Raises: ConfigError that says what is wrong with them.
    """
    try:
        family, kind, protocol, _, name = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on host {host!r}: {error}. Give an address of this machine."
        ) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Holds for every connection that it accepts; what is on its way to a fast client is not limited.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        sock.bind(name)
        if listens:  # until then, another program could bind the same port
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror}. "
            "Stop the program that uses it, or choose another port."
        ) from error
    return sock


def is_own(connection: socket.socket) -> bool:
    """Whether the other end of a Unix connection is a process of this user, or of root.

    Abstract Unix sockets have no permissions: any process of the network namespace can connect.
    """
    credentials = struct.Struct("3i")  # process, user, group
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return credentials.unpack(found)[1] in (0, os.geteuid())


class PortClaim:
    """Gives peers copies of a listening socket, on the running loop, until `close`."""

    def __init__(self, prefix: str, sock: socket.socket) -> None:
        self._copy = sock.dup()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{prefix}{secrets.token_hex(8)}")
        self._socket.setblocking(False)
        self._socket.listen()
        self._loop = asyncio.get_running_loop()
        self._listen()

    def _listen(self) -> None:
        if self._socket.fileno() != -1:
            self._loop.add_reader(self._socket, self._give)

    def _give(self) -> None:
        try:
            peer, _ = self._socket.accept()
        except OSError:  # no files left, or the peer has ended meanwhile
            self._loop.remove_reader(self._socket)
            self._loop.call_later(_AGAIN_S, self._listen)
            return
        with peer, contextlib.suppress(OSError):  # it has ended meanwhile
            if is_own(peer):
                socket.send_fds(peer, [b"."], [self._copy.fileno()])

    def close(self) -> None:
        """Gives no more copies. Safe to call twice."""
        if self._socket.fileno() != -1:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._copy.close()


async def claim(host: str, port: int, group: str) -> tuple[socket.socket, PortClaim]:
    """The group's listening socket, or a new one, and the claim to hold with it.

    Raises: ConfigError when others have the port.
    """
    for tries_left in reversed(range(_TRIES)):
        sock = await asyncio.to_thread(_copy, _prefix(group, host, port)) if port else None
        try:
            sock = sock or bind(host, port, listens=True)
        except ConfigError:
            if not tries_left:
                raise
            await asyncio.sleep(_AGAIN_S)
        else:
            return sock, PortClaim(_prefix(group, host, sock.getsockname()[1]), sock)
    raise AssertionError("unreachable")


def _copy(prefix: str) -> socket.socket | None:
    """A copy from the peer that answers first; None where none does. Blocks."""
    deadline = time.monotonic() + _ANSWER_S
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as answers:
        for name in re.findall(rf"@({prefix}\w+)$", Path("/proc/net/unix").read_text(), re.MULTILINE):
            peer = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            peer.setblocking(False)
            with contextlib.suppress(OSError):  # it has ended meanwhile, or hangs
                peer.connect(f"\0{name}")
                if is_own(peer):
                    answers.register(peer, selectors.EVENT_READ)
        while answers.get_map() and (answered := answers.select(deadline - time.monotonic())):
            for key, _ in answered:
                peer = cast(socket.socket, key.fileobj)
                answers.unregister(peer)
                with contextlib.suppress(OSError):
                    _, files, _, _ = socket.recv_fds(peer, 1, 1)
                    if files:
                        os.set_inheritable(files[0], False)
                        return socket.socket(fileno=files[0])
    return None


def _prefix(group: str, host: str, port: int) -> str:
    return f"penstock-port-{port}-{hashlib.sha256(f'{group} {host}'.encode()).hexdigest()[:16]}-"
