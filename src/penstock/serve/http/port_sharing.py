"""Gateways of one group listen on copies of one socket, which each passes on to those that start later.

A connection waits in that socket until a gateway accepts it: one that hangs gets none, and none is lost when
a gateway leaves or dies while another one listens. Each gateway holds a claim under its group's name, an
abstract Unix socket, which ends with its process and hands out copies. A program that finds the port taken,
and no peer that holds it, is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import selectors
import socket
import time
from pathlib import Path
from typing import cast

from penstock.errors import ConfigError
from penstock.serve.http.sockets import bind, is_own

_TRIES, _AGAIN_S = 20, 0.05
"""For a second: a peer may have the port and no claim yet. For 40 s where all peers hang: they are ended."""
_ANSWER_S = 2.0  # for peers, whose event loops may be busy


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
