"""Real sockets on the event loop that Serve's replicas run."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode lets no test import its neighbour, `served`

from jobs_served import JobsServed
from served import Served


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    yield served
    await served.close()


@pytest.fixture
async def jobs(served: Served, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[JobsServed]:
    """Files and Batches over one model, `m`; `@pytest.mark.parametrize("jobs", [config], indirect=True)`."""
    jobs = JobsServed(served, tmp_path / "jobs", getattr(request, "param", {}))
    await served.replica("m")
    await served.gateway("m")
    await jobs.start()
    yield jobs
    await jobs.stop()
