"""HTTPS on the gateway's own port: the certificate, read again when its files change, and handshakes.

Stands between the listening socket and `protocol`, which sees no difference. A connection counts at its
address from the moment it is accepted, not only when its handshake is over. A handshake takes some 100 kB
and a millisecond: it begins when the client's first message is there, and few are under way. HTTP/1.1 only.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from penstock.errors import ConfigError
from penstock.serve.http import limits
from penstock.serve.http.connection_limits import Connections, WorkLimiter

log = logging.getLogger(__name__)

_HANDSHAKE = 22  # the type of a record. RFC 8446, 5.1
_RECORD_BYTES = 5 + 2**14  # with its header
_AGAIN_S, _MOST_AGAIN_S = 0.01, 1.0  # between looks whether the rest of the first message has come
_NO_FILES_S = 0.2  # before the next try to accept a connection when this process has no files left

_State = tuple[tuple[int, int, int], ...]


class Certificate:
    """A certificate with its key. context: for new connections; open ones keep the one they began with."""

    def __init__(self, cert: str, key: str) -> None:
        """Raises: ConfigError that says what is wrong with which file."""
        self._files = cert, key
        self._state = self._read_state()
        self.context = _context(cert, key)

    def refresh(self) -> None:
        """Reads the files again if they have changed. A pair that does not fit, as between the writing of
        one and of the other, is logged, and the last good one stays.
        """
        state = self._read_state()
        if state == self._state:
            return
        self._state = state
        try:
            self.context = _context(*self._files)
        except ConfigError as error:
            log.warning("The certificate stays as it was: %s", error)
        else:
            log.info("The certificate %s has been read again.", self._files[0])

    def _read_state(self) -> _State:
        """What changes when a file does, or the link to it."""
        found: list[tuple[int, int, int]] = []
        for file in self._files:
            try:
                stat = os.stat(file)
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
        return tuple(found)


class TlsListener:
    """Accepts connections of a bound socket and hands them over when their handshake is complete.

    It has the methods of asyncio's `Server` that uvicorn's server uses.
    """

    def __init__(
        self,
        sock: socket.socket,
        certificate: Certificate,
        protocol: Callable[[], asyncio.Protocol],
        connections: Connections,
        work: WorkLimiter,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._certificate = certificate
        self._protocol = protocol
        self._connections = connections
        self._work = work
        self._under_way = Connections(limits.HANDSHAKES_PER_ADDRESS, limits.HANDSHAKES)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Stops accepting. Safe to call twice."""
        self._accepting.cancel()
        self._socket.close()

    async def wait_closed(self) -> None:
        """Returns when no handshake is under way; those that are end here."""
        for handshake in self._handshakes:
            handshake.cancel()
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._work.room()
            try:
                client, address = await loop.sock_accept(self._socket)
            except OSError as error:
                if self._socket.fileno() == -1:
                    return
                log.warning("No connection can be accepted: %s", error)
                await asyncio.sleep(_NO_FILES_S)
                continue
            task = asyncio.create_task(self._shake(client, address[0]))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake(self, client: socket.socket, address: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        handshake = _Handshake(task, self._connections)
        peer = self._connections.join(address, handshake)
        try:
            try:
                async with asyncio.timeout(limits.HEAD_S):
                    await _first_message(client)
                    await self._work.room()
            except BaseException:
                client.close()
                raise
            await self._protect(client, address, handshake)
        except ssl.SSLError:
            self._connections.counts["tls"] += 1
        except (TimeoutError, ConnectionAbortedError):  # asyncio's, when the handshake's time is over
            self._connections.counts["timeout"] += 1
        except OSError:
            pass  # the client has gone, as probes of load balancers do
        finally:
            self._connections.leave(peer, handshake)

    async def _protect(self, client: socket.socket, address: str, handshake: _Handshake) -> None:
        """Performs the handshake. Raises: OSError, ssl.SSLError among them."""
        peer = self._under_way.join(address, handshake)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                client,
                ssl=self._certificate.context,
                ssl_handshake_timeout=limits.HEAD_S,
                ssl_shutdown_timeout=limits.HEAD_S,
            )
        finally:
            self._under_way.leave(peer, handshake)


class _Handshake:
    """A connection on which nothing has been asked yet, as its address is charged for it."""

    since = math.inf  # the event loop limits its time

    def __init__(self, task: asyncio.Task[None], connections: Connections) -> None:
        self._task = task
        self._connections = connections

    def cut(self, reason: str) -> None:
        self._connections.counts[reason] += 1
        self._task.cancel()


async def _first_message(client: socket.socket) -> None:
    """Returns when it is there, and stays to be read. Raises: OSError when the client has gone."""
    loop, again_s = asyncio.get_running_loop(), _AGAIN_S
    while True:
        readable = asyncio.Event()
        loop.add_reader(client, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(client)
        seen = client.recv(_RECORD_BYTES, socket.MSG_PEEK)
        if not seen:
            raise ConnectionResetError
        whole = 5 + int.from_bytes(seen[3:5]) if len(seen) >= 5 else _RECORD_BYTES
        if seen[0] != _HANDSHAKE or len(seen) >= min(whole, _RECORD_BYTES):
            return
        await asyncio.sleep(again_s)
        again_s = min(2 * again_s, _MOST_AGAIN_S)


class _Passphrase(Exception):
    """The key asks for one."""


def _no_passphrase() -> str:
    raise _Passphrase


def _context(cert: str, key: str) -> ssl.SSLContext:
    """Raises: ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and newer, Python's choice of ciphers
    context.set_alpn_protocols(["http/1.1"])
    _check_holds("cert", cert, b"-----BEGIN CERTIFICATE-----")
    _check_holds("key", key, b"PRIVATE KEY-----")
    try:
        context.load_cert_chain(cert, key, _no_passphrase)
    except _Passphrase:
        raise ConfigError(
            f"gateway.tls.key: '{key}' asks for a passphrase; give a key without one."
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"gateway.tls: the key '{key}' does not belong to the certificate '{cert}'."
            ) from error
        raise ConfigError(
            f"gateway.tls: '{cert}' and '{key}' cannot be used: {error.reason or error}."
        ) from error
    return context


def _check_holds(name: str, file: str, mark: bytes) -> None:
    """Raises: ConfigError when `file` cannot be read, or is not a PEM file of this kind."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"gateway.tls.{name}: '{file}' cannot be read: {error.strerror}.") from error
    if mark not in content:
        what = "certificate" if name == "cert" else "private key"
        raise ConfigError(f"gateway.tls.{name}: '{file}' holds no {what} in PEM form.")
