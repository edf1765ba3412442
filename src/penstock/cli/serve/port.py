"""Two checks before anything that takes seconds is imported or started.

Whether the public port is free: the gateway asks again when it opens it (`serve.port`; that room brings Ray).
Whether a Ray cluster answers: Ray itself would try for ever.
"""

import errno
import socket
from typing import Any

import psutil

from penstock.errors import Unavailable

_ANSWER_S = 5.0


def refuse_taken(host: str, port: int) -> None:
    """Binds the address once.

    Raises: Unavailable when nothing can listen there, with the reason.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", error)
        raise Unavailable(f"--host {host} is not an address of this machine: {why}.") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports of closed connections are free
        try:
            probe.bind(address)
        except OSError as error:
            raise Unavailable(_sentence(host, port, error)) from error


def refuse_silent(address: str) -> None:
    """Raises: Unavailable when no Ray cluster can be at `address`: host:port, or `auto`, where Ray looks."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "//" in address or not host or not port.isdigit():
        raise Unavailable(
            f"--address {address!r} is not a Ray cluster's own address. "
            "Give host:port (6379 by default), or auto."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, UnicodeError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise Unavailable(f"No Ray cluster answers at {address!r}: {why}.") from error


def _sentence(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is taken{_holder(port)}. Stop that, or choose another with --port."
    if error.errno == errno.EACCES:
        return f"Port {port} needs more rights than this user has. Choose one above 1023 with --port."
    return f"Cannot listen on {host}:{port}: {error.strerror}."


def _holder(port: int) -> str:
    """` by process 123 (name)`, as far as this user may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            listens: Any = connection.status == psutil.CONN_LISTEN and connection.laddr
            if listens and listens.port == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        return ""
    return ""
