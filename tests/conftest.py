"""What tests of every tier need, in which order the tiers run, and what runs together."""

import functools
import signal
import socket
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; its children would, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

TIERS = ("unit", "http", "engine", "mission", "ray")
"""Fast ones first; from the third on they ask made models. The last share one Ray cluster until the end."""

SHARED = ("under_test", "assistant")
"""Fixtures that are engines which many files ask."""


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


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """What runs in one process: tests of a file, and all files that ask the same engines.

    xdist's own "loadgroup" does nothing with pytest 9.2, which gives nodes their ids in another way.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _together(nodeid.partition("::")[0])

    return Together(config, log)


@functools.cache
def _together(file: str) -> str:
    """The shared fixture that tests of the file name among their arguments, else the file itself."""
    text = (HERE.parent / file).read_text()
    return next((fixture for fixture in SHARED if f"{fixture}: " in text), file)
