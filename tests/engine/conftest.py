"""Every engine is started once for the session, on the event loop that Serve's replicas run."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode lets no test import its neighbour
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: engines would fight for the cores

from enginetest import CONFIGS, Served, serve


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, object]:
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=list(CONFIGS))
async def under_test(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    async with serve(CONFIGS[request.param]()) as served:
        yield served
