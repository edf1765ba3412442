"""The ledger of `benchmarks.chaos`: each request has one outcome, whatever happens to the service."""

from __future__ import annotations

from benchmarks.fleet import Gateway, Replica
from benchmarks.ledger import Clients
from tests.waiting import wait_until

LIMIT_S = 30


def test_every_request_has_one_outcome():
    with Replica("sim", step_base_ms=5) as replica, Gateway(replica) as gateway:
        clients = Clients(gateway.port, streams=4, unary=20.0, tokens=32, repeats=True)
        wait_until(lambda: clients.ledger.outcomes["good"] > 10)
        assert not clients.ledger.failed
        gateway.stop()
        wait_until(lambda: clients.ledger.outcomes["unary: refused"] > 0)
        assert clients.stop() == ""
    assert clients.ledger.total == clients.ledger.outcomes.total() == clients.ledger.sent


def test_another_requests_text_is_found():
    with Replica("sim", reply="r0 of another") as replica, Gateway(replica) as gateway:
        clients = Clients(gateway.port, streams=1, unary=20.0, tokens=4, repeats=True)
        wait_until(lambda: len(clients.ledger.failed) == 2)
        assert clients.stop() == ""
    assert set(clients.ledger.outcomes) == {"unary: another's text", "stream: another's text"}
