"""A replica's Unix socket is abstract, without permissions: other users are refused as they connect."""

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator

import pytest

from penstock.serve.http.server import Port

ASK = """
import os, socket, sys
os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(chr(0) + sys.argv[1])
    try:
        connection.sendall(b"GET / HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n")
        print(connection.recv(100).partition(b"\\r\\n")[0].decode())
    except ConnectionError:
        print()
"""


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


@pytest.fixture
async def name() -> AsyncIterator[str]:
    """Of a listening socket like a replica's."""
    unix = socket.socket(socket.AF_UNIX)
    name = f"penstock-{secrets.token_hex(8)}"
    unix.bind(f"\0{name}")
    port = Port(hello, unix)
    yield name
    await port.close(grace_s=0.0)


async def answer(name: str, user: int) -> str:
    """The status line that a process of this user gets; empty when its connection is closed."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ASK, name, str(user), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    assert child.returncode == 0
    return out.decode().strip()


async def test_this_user_is_answered(name: str):
    assert await answer(name, os.geteuid()) == "HTTP/1.1 200 OK"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_is_not(name: str):
    assert await answer(name, 65534) == ""
