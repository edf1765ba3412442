"""A user's own policy: the one in the docs, and such as go wrong."""

from __future__ import annotations

import importlib
import logging
import re
from pathlib import Path

import pytest

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.fleet.replica import Replica
from penstock.serve.fleet.table import Table
from penstock.serve.routing import Pick, RoutingRequest, policy
from penstock.serve.routing.registry import UserPolicy
from penstock.transport.address import Address
from penstock.transport.link import LoadReport

PAGE = Path(__file__).parents[2] / "docs/serve/routing.md"


@pytest.fixture
def table() -> Table:
    made = Table("node")
    made.set_members("m", {name: Address(name, "node", None, None, None, "") for name in "abcd"})
    for replica in made.members("m"):
        made.report(replica, LoadReport())
    return made


def test_the_class_in_the_docs_does_what_it_says(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "of_the_docs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    own = policy("of_the_docs:ShortOnesApart")
    picks = [own.pick(RoutingRequest(tokens=t), table.candidates("m"), 0.0) for t in (10, 10, 5000, 5000)]
    assert [pick and pick.replica.id in "bd" for pick in picks] == [True, True, False, False]
    assert {pick and pick.why for pick in picks} == {"mine"}


@pytest.mark.parametrize("wrong", [{"saved_tokens": None}, {"saved_tokens": "9"}, {"why": None}])
def test_a_pick_of_wrong_types_is_a_fault(table: Table, wrong: dict[str, object]):
    class Sloppy:
        def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
            return Pick(next(iter(candidates)), **wrong)

    pick = UserPolicy(Sloppy()).pick(RoutingRequest(tokens=10), table.candidates("m"), 0.0)
    assert pick is not None
    assert pick.why == "fault"


class Fails:
    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        raise RuntimeError("a fault")

    def sent(self, asked: RoutingRequest, replica: Replica, now: float) -> None:
        raise KeyError("another")


class Stubborn:
    """Always the same, whether it may or not."""

    reads = ("session",)

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        return Pick(self._replica)


def test_a_fault_in_it_costs_no_request_and_is_logged_once(table: Table, caplog: pytest.LogCaptureFixture):
    own = UserPolicy(Fails())
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            pick = own.pick(RoutingRequest(), table.candidates("m"), 0.0)
            assert pick is not None
            assert pick.why == "fault"
            own.sent(RoutingRequest(), pick.replica, 0.0)
    assert [record.getMessage() for record in caplog.records] == [
        "The routing policy Fails failed with RuntimeError.",
        "The routing policy Fails failed in `sent` with KeyError.",
    ]


def test_it_cannot_pick_a_replica_without_room(table: Table):
    table.limit("m", 1)
    full = table.members("m")[0]
    own = UserPolicy(Stubborn(full))
    assert own.pick(RoutingRequest(), table.candidates("m"), 0.0) == Pick(full)
    table.acquire(full)
    pick = own.pick(RoutingRequest(), table.candidates("m"), 0.0)
    assert pick is not None
    assert (pick.replica is full, pick.why) == (False, "fault")


def test_what_it_reads_is_read_for_it(table: Table):
    assert UserPolicy(Stubborn(table.members("m")[0])).reads == ("session",)
