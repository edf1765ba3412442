"""The certificate of the gateway's own port, for HTTPS; read again when its files change. HTTP/1.1 only."""

from __future__ import annotations

import logging
import os
import ssl
from contextlib import suppress
from pathlib import Path

from penstock.errors import ConfigError

log = logging.getLogger(__name__)


class Certificate:
    """A certificate with its key. context: for new connections; open ones keep the one they began with."""

    def __init__(self, cert: str, key: str) -> None:
        """Raises: ConfigError that says what is wrong with which file."""
        self._files = cert, key
        self._state = _state(self._files)
        self.context = _context(cert, key)

    def refresh(self) -> None:
        """Reads the files again if they have changed. A pair that does not fit, as between the writing of
        one and of the other, is logged, and the last good one stays.
        """
        state = _state(self._files)
        if state == self._state:
            return
        self._state = state
        try:
            self.context = _context(*self._files)
        except ConfigError as error:
            log.warning("The certificate stays as it was: %s", error)
        else:
            log.info("The certificate %s has been read again.", self._files[0])


def _state(files: tuple[str, ...]) -> list[tuple[int, int, int]]:
    """What changes when one of the files does, or the link to it."""
    found: list[tuple[int, int, int]] = []
    for file in files:
        with suppress(OSError):
            stat = os.stat(file)
            found.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
    return found


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
    except OSError as error:  # they have just been replaced
        raise ConfigError(f"gateway.tls: '{cert}' and '{key}' cannot be read: {error.strerror}.") from error
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
