"""Sockets for listening: bound with the options that a gateway needs, and errors that say what to do."""

from __future__ import annotations

import logging
import os
import resource
import socket
import struct

from penstock.errors import ConfigError

log = logging.getLogger(__name__)

UNSENT_BYTES = 64 * 1024
"""In the kernel, for one connection; by itself it buffers up to 4 MiB for a slow client."""

BACKLOG = 4096  # more than the kernel's own limit, `net.core.somaxconn`, has no effect
"""Connections that may wait in a listening socket."""

_FEW_FILES, _MANY_FILES = 4096, 65_536


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
