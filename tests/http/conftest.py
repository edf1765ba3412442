"""Real sockets on the event loop that Serve's replicas run."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode lets no test import its neighbour, `served`

from served import Served


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    yield served
    await served.close()
