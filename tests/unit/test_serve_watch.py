"""What control makes of Serve's status."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

from penstock.serve.control import gateways
from penstock.serve.control.desired import DesiredStates
from penstock.serve.control.gateways import Gateways
from penstock.serve.control.operations import Shift
from penstock.serve.control.state import GatewayStatus, RouteStatus

pytestmark = pytest.mark.parity("S24")


def application(status: str = "RUNNING", health: str = "HEALTHY", **states: int) -> ApplicationStatusOverview:
    deployment = DeploymentStatusOverview(
        status=health, status_trigger="UNSPECIFIED", replica_states=states, message=""
    )
    return ApplicationStatusOverview(
        status=status, message="", last_deployed_time_s=0.0, deployments={"LLMServer:m": deployment}
    )


@pytest.fixture
def desired(tmp_path: Path) -> DesiredStates:
    return DesiredStates(tmp_path / "x.sqlite")


def watching(desired: DesiredStates) -> Gateways:
    watch = Gateways(desired, "own")
    watch.hear(GatewayStatus("g", {"m": RouteStatus(""), "unknown": RouteStatus("")}))
    return watch


def test_a_lost_replica_stays_wanted_until_serve_is_content_with_fewer(desired: DesiredStates):
    watch = watching(desired)
    for found, wanted in [
        (application(RUNNING=2), 2),
        (application(RUNNING=1, STARTING=1, STOPPING=1), 2),
        (application(health="UNHEALTHY", RUNNING=1, STOPPING=1), 2),  # before its successor is begun
        (application(RUNNING=1), 1),
    ]:
        watch.see({"own": found}, {})
        assert watch.wanted == {"m": wanted}


def test_a_model_whose_other_application_is_deleted_comes_home(
    desired: DesiredStates, caplog: pytest.LogCaptureFixture
):
    watch = watching(desired)
    desired.change("m", "", "shift", Shift("next"))
    found = {"own": application(RUNNING=1), "next": application(RUNNING=3)}
    watch.see(found, desired.routes())
    assert (watch.wanted, desired.routes()) == ({"m": 3}, {"m": "next"})
    watch.see({"own": application()}, {})  # a status from before the shift
    assert desired.routes() == {"m": "next"}
    for _ in range(3):
        watch.see({"own": application(RUNNING=1)}, desired.routes())
    assert (watch.wanted, desired.routes()) == ({"m": 1}, {})
    assert caplog.text.count("has been deleted") == 1


async def test_an_application_is_ending_only_when_serve_says_so(desired: DesiredStates, monkeypatch, patched):
    watch = watching(desired)

    def fails() -> None:
        raise RuntimeError("Serve's controller is busy")

    patched(gateways, "known", fails)
    assert not await watch.is_app_ending()
    for found, ending in [
        ({"own": application()}, False),
        ({"own": application("DELETING")}, True),
        ({}, True),
    ]:
        monkeypatch.setattr(gateways, "known", lambda found=found: found)
        assert await watch.is_app_ending() is ending


async def test_a_change_while_serve_is_asked_has_it_asked_again(desired: DesiredStates, monkeypatch, patched):
    asked, loop = asyncio.Queue[None](), asyncio.get_running_loop()

    def known() -> dict[str, ApplicationStatusOverview]:
        loop.call_soon_threadsafe(desired.changed.send)
        loop.call_soon_threadsafe(asked.put_nowait, None)
        return {}

    patched(gateways, "known", known)
    monkeypatch.setattr(gateways, "_LOOK_S", 3600.0)
    monkeypatch.setattr(gateways, "_GAP_S", 0.0)
    task = asyncio.create_task(watching(desired).watch(lambda names: None))
    async with asyncio.timeout(10):
        for _ in range(2):
            await asked.get()
    task.cancel()
