"""What tests of every tier need."""

import socket

import pytest


@pytest.fixture
def free_port() -> int:
    """A port of 127.0.0.1 that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
