"""One port for several gateways of one family on one node, and for nobody else.

Linux lets any two programs of a user share a port with SO_REUSEPORT, and says nothing. So each gateway, once
it has the port, leaves a mark with its family's name: an abstract Unix socket, which ends with its process.
Who finds the port taken and no mark of the family is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.errors import ConfigError

_TRIES, _AGAIN_S = 20, 0.05
"""For a second: a relative may just be looking whether the port is free, or have it and not yet its mark."""


class Mark:
    """A family's claim to a port, held until `close`."""

    def __init__(self, port: int, family: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{_name(port, family)}{secrets.token_hex(4)}")

    def close(self) -> None:
        self._socket.close()


async def claim(port: int, family: str, bind: Callable[[bool], socket.socket]) -> tuple[socket.socket, Mark]:
    """The socket that `bind` gives for the port, shared with the family, and the mark to keep with it.

    bind: called with whether the port may be shared; raises ConfigError when it is taken.
    Raises: ConfigError when others have it.
    """
    if sys.platform != "linux":
        raise ConfigError("Several gateway processes on one port need Linux; set gateway.processes to 1.")
    for _ in range(_TRIES):
        with contextlib.suppress(ConfigError):
            return _claim(port, family, bind)
        await asyncio.sleep(_AGAIN_S)
    return _claim(port, family, bind)


def _claim(port: int, family: str, bind: Callable[[bool], socket.socket]) -> tuple[socket.socket, Mark]:
    if not _is_marked(port, family):
        bind(False).close()
    sock = bind(True)
    return sock, Mark(sock.getsockname()[1], family)


def _name(port: int, family: str) -> str:
    return f"penstock-port-{port}-{hashlib.sha256(family.encode()).hexdigest()[:16]}-"


def _is_marked(port: int, family: str) -> bool:
    return f"@{_name(port, family)}" in Path("/proc/net/unix").read_text()
