"""What control keeps of the versions of a fleet, without Ray."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.client.fleet import FleetChange, _followed
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


def test_the_same_reason_is_said_once():
    assert reasons(["No such weights.", "a: No such weights", "", "No such weights"]) == "a: No such weights"
    assert [sentence(one) for one in ("applied", "failed: no.")] == ["applied.", "failed: no."]


def test_an_apply_whose_version_the_history_has_lost_ends_with_a_sentence(capsys: pytest.CaptureFixture[str]):
    class Ahead(FleetChange):
        def ask(self, *_words: Any, **_options: Any) -> dict[str, Any]:
            return {"held_up": [], "data": [{"version": 60, "outcome": "applied"}]}

    assert _followed(Ahead("", None, wait=5.0), 9) == 1
    assert "Version 9: later versions have taken its place" in capsys.readouterr().out
