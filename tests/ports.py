"""Ports for servers of tests."""

import socket
from contextlib import suppress
from random import SystemRandom

_PORTS = range(20_000, 32_000)
"""Neither of those of Ray's workers nor of those that Linux gives to connections, which are soon taken."""


def unused() -> int:
    """One of 127.0.0.1 that nothing uses now."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", SystemRandom().choice(_PORTS)))
            return probe.getsockname()[1]
