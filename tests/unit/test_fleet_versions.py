"""What control keeps of the versions of a fleet, without Ray."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.client.fleet import FleetChange, _followed
from penstock.config.fleet.plan import FleetPlan
from penstock.errors import Conflict, NotFound, reasons, sentence
from penstock.serve.control.desired import DesiredStates
from penstock.serve.control.fleet import APPLIED, APPLYING, SUPERSEDED, FleetVersions

START = {"gateway": {"api_key": "a-secret-of-the-command"}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "control.sqlite"


async def test_the_next_control_has_them_and_no_other_user(file: Path):
    first = FleetVersions(DesiredStates(file).connection, "app")
    with pytest.raises(Conflict, match="a program has deployed it"):
        await first.show()
    first.record(START, {"llm_configs": [], "gateway": {"admin_key": "secret"}}, "penstock serve")
    shown = await FleetVersions(DesiredStates(file).connection, "app").show()
    assert (shown["version"], shown["who"], shown["outcome"]) == (1, "penstock serve", APPLIED)
    assert "secret" not in repr(shown)
    assert os.stat(file).st_mode & 0o077 == 0


async def test_the_last_50_are_kept(file: Path):
    fleet = FleetVersions(DesiredStates(file).connection, "app")
    for number in range(60):
        fleet.record(START, {"llm_configs": [number]}, "ci")
    assert [one.version for one in fleet.history()] == list(range(60, 10, -1))
    with pytest.raises(NotFound, match="no version 10 "):
        await fleet.rollback(10, "me")


def test_only_an_apply_that_goes_on_ends(file: Path, patched):
    notes: list[str] = []
    patched("penstock.progress.note", notes.append)
    fleet = FleetVersions(DesiredStates(file).connection, "app")
    version = fleet._add("ci", "a live", APPLYING, {}, {"a": 100})
    fleet._end(version, SUPERSEDED)
    fleet._end(version, APPLIED)
    assert [one.outcome for one in fleet.history()] == [SUPERSEDED]
    (note,) = notes
    assert note.startswith("Version 1 of the fleet, by ci (a live): superseded. ")


class WithoutRay(FleetVersions):
    async def _planned(self, *_: object) -> FleetPlan:
        return FleetPlan([], is_complete=False)

    async def _apply(self, version: int) -> None:
        self._end(version, APPLIED)


async def test_a_save_by_a_command_that_applied_it_undoes_no_rollback(file: Path):
    def fleet(name: str) -> Any:
        return {"llm_configs": [{"model_loading_config": {"model_id": name}, "llm_engine": "sim"}]}

    versions = WithoutRay(DesiredStates(file).connection, "app")
    versions.record(START, fleet("a"), "penstock serve")
    await versions.apply(fleet("b"), "ada")
    await asyncio.sleep(0)
    await versions.rollback(1, "ben")
    await asyncio.sleep(0)
    said = await versions.save(fleet("b"), "watch")
    assert isinstance(said, str)
    assert "version 2, by ada, and version 3, by ben" in said
    again = await WithoutRay(DesiredStates(file).connection, "app").save(fleet("b"), "watch")
    assert not isinstance(again, str)
    assert again["version"] == 4
    await versions.save(fleet("a"), "watch")
    await versions.apply(fleet("b"), "eve", take_over=True)
    assert versions.history()[1].outcome == "superseded by version 6, by eve"


def test_the_same_reason_is_said_once():
    assert reasons(["No such weights.", "a: No such weights", "", "No such weights"]) == "a: No such weights"
    assert [sentence(one) for one in ("applied", "failed: no.")] == ["applied.", "failed: no."]


def test_an_apply_whose_version_the_history_has_lost_ends_with_a_sentence(capsys: pytest.CaptureFixture[str]):
    class Ahead(FleetChange):
        def ask(self, *_words: Any, **_options: Any) -> dict[str, Any]:
            return {"held_up": [], "data": [{"version": 60, "outcome": "applied"}]}

    assert _followed(Ahead("", None, wait=5.0), 9) == 1
    assert "Version 9: later versions have taken its place" in capsys.readouterr().out
