"""What Ray Serve passes on to a gateway that runs is taken over: the newest, once it can be."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from interleaving import Start, disturbed, failing, held
from ray import serve
from ray.serve.handle import DeploymentHandle
from tests.waiting import until

from penstock.config import GatewayConfig
from penstock.config.schema.versions import VersionConfig
from penstock.errors import ConfigError, ModelNotFound
from penstock.serve.control.updates import Updates
from penstock.serve.gateway.catalogue import LiveState, ServedModel
from penstock.serve.gateway.tenants.registry import Tenants
from penstock.serve.jobs.deployment import LLMJobs
from penstock.serve.router.router import new_handle
from penstock.serve.routing.split import Splits
from penstock.serve.tenancy.limits import Periods
from penstock.serve.tenancy.usage import Settlement, Totals

pytestmark = pytest.mark.parity("X27")


class Gateway:
    """Takes over an update, which takes a while. broken: updates that cannot be taken over now."""

    def __init__(self) -> None:
        self.state = 0
        self.broken = set[int]()
        self.tries = 0
        self.reports = list[str]()
        self.updates = Updates(self.take_over, self.reports.append)

    async def take_over(self, update: Any) -> None:
        self.tries += 1
        await self.prepare()
        if update in self.broken:
            raise ConfigError(f"{update} is broken.")
        self.state = update

    async def prepare(self) -> None:
        await asyncio.sleep(0.01)


def test_the_newest_is_taken_over_wherever_one_is_held_or_fails():
    async def updates(start: Start) -> None:
        gateway = Gateway()
        for number in (1, 2, 3):
            start(gateway.updates.receive(number))
        await asyncio.sleep(200)
        assert gateway.state == gateway.updates._newest
        await start(gateway.updates.receive(4))
        await asyncio.sleep(200)
        assert gateway.state == 4

    failed = failing(OSError("no handle"), "prepare")
    assert disturbed(updates, (held, failed), also=("_keep_trying",)) >= 5


async def test_a_broken_update_is_told_once_and_tried_until_a_newer_one_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("penstock.serve.control.updates._AGAIN_S", 0.01)
    gateway = Gateway()
    gateway.state, gateway.broken = 1, {2}
    await gateway.updates.receive(2)
    assert gateway.state == 1
    await until(lambda: gateway.tries > 2)
    (record,) = caplog.records
    assert (record.levelname, "stays as it was: 2 is broken." in record.message) == ("ERROR", True)
    await gateway.updates.receive(3)
    gateway.broken.clear()
    tried = gateway.tries
    await asyncio.sleep(0.1)
    assert (gateway.state, gateway.tries) == (3, tried)


async def test_an_update_that_could_not_be_taken_over_is_once_it_can(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.serve.control.updates._AGAIN_S", 0.01)
    gateway = Gateway()
    gateway.broken = {1}
    await gateway.updates.receive(1)
    gateway.broken.clear()
    await until(lambda: gateway.state == 1)
    assert (gateway.reports[0], gateway.reports[-1]) == ("1 is broken.", "")


class Jobs(LLMJobs):
    """Files and batches without their service."""

    def __init__(self, live: LiveState, tenants: Tenants | None, settle: Any = None) -> None:
        self._live, self._tenants, self._splits = live, tenants, Splits()
        self._control: Any = SimpleNamespace(settle=settle)
        self._updates = Updates(self._take_over, lambda why: None)
        self._service, self._fleet = SimpleNamespace(), SimpleNamespace(follow=lambda deployments: None)

    def __del__(self) -> None:
        """Nothing was opened."""


async def test_files_and_batches_take_keys_over_once_their_file_can_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("penstock.serve.control.updates._AGAIN_S", 0.01)
    key, file = {"tenant": "t", "name": "n", "key": "the-first-key-of-tenant-t"}, tmp_path / "keys.yaml"
    live = LiveState((ServedModel("m", 1),), GatewayConfig(keys=[key]))
    tenants = Tenants(live.gateway, None)
    await tenants.start()
    jobs = Jobs(live, tenants)
    gateway = GatewayConfig(keys=[key], keys_file=str(file), max_body_bytes=7)
    await jobs.reconfigure(replace(live, gateway=gateway).dump())
    assert (jobs._live, len(tenants.keys)) == (live, 1)
    file.write_text("keys: [{tenant: t, name: o, key: the-other-key-of-tenant-t}]")
    await until(lambda: len(tenants.keys) == 2)
    assert jobs._service.line_bytes == 7
    await tenants.close()


async def test_files_and_batches_that_are_disturbed_while_tenants_begin_have_them_after_the_next_try():
    asked, answer = asyncio.Event(), asyncio.Event()

    async def settle(settlement: Settlement) -> Totals:
        asked.set()
        await answer.wait()
        return Totals(Periods.at(0.0), {})

    live = LiveState((ServedModel("m", 1),), GatewayConfig())
    key = {"tenant": "t", "name": "n", "key": "the-only-key-of-tenant-t"}
    keyed = replace(live, gateway=GatewayConfig(keys=[key])).dump()
    jobs = Jobs(live, None, settle)
    trying = asyncio.create_task(jobs._take_over(keyed))
    await asked.wait()
    trying.cancel()
    answer.set()
    with pytest.raises(asyncio.CancelledError):
        await trying
    assert (jobs._live, jobs._tenants) == (live, None)
    await jobs.reconfigure(keyed)
    assert jobs._tenants is not None
    assert len(jobs._tenants.keys) == 1
    await jobs.reconfigure(live.dump())
    assert jobs._tenants is None


async def test_a_row_of_a_key_for_one_version_goes_to_that_one():
    versions = (
        ServedModel("q", 1, version=VersionConfig(of="q", name="a", weight=1)),
        ServedModel("q@b", 1, version=VersionConfig(of="q", name="b", weight=0)),
    )
    jobs = Jobs(LiveState(versions, GatewayConfig()), None)
    jobs._find_models(jobs._live)
    only_b = jobs._resolve_only(["q@b"])
    assert [only_b(name, b"{}") for name in ("q", "q@b", None)] == [("q@b", "")] * 3
    assert jobs._resolve("q", b"{}") == ("q", "")
    jobs._find_models(replace(jobs._live, cards=versions[:1]))
    with pytest.raises(ModelNotFound, match="Served are none"):
        only_b("q", b"{}")


def test_a_handle_is_a_new_one_each_time(patched):
    """Ray Serve's own has a router already, of the class that the deployment had when that was made."""
    known = DeploymentHandle("LLMServer:m", "app")
    patched(serve, "get_deployment_handle", lambda name, application: known)
    first, second = (new_handle("LLMServer:m") for _ in range(2))
    assert first is not second
    assert first.deployment_id == second.deployment_id == known.deployment_id
    assert not first.is_initialized
