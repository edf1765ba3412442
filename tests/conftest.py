"""What tests of every tier need, and in which order the tiers run."""

import signal
import socket
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; its children would, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

TIERS = ("unit", "http", "engine", "mission", "ray")
"""Fast ones first; from the third on they ask made models. The last share one Ray cluster until the end."""


@pytest.fixture
def free_port() -> int:
    """A port of 127.0.0.1 that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _tier(item: pytest.Item) -> int:
    return TIERS.index(item.path.relative_to(HERE).parts[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_tier)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    """Tests of one group run in one process: those of a file, and those that share the engines under test."""
    shared = "under_test" in getattr(item, "fixturenames", ())
    return "under_test" if shared else str(item.path)
