"""Ports for servers of tests."""

import socket


def unused() -> int:
    """One of 127.0.0.1 that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
