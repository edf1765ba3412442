"""Requests go where their adapter is, and an adapter spreads only as far as its work needs."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from penstock.serve.fleet.replica import REQUEST_TOKENS, Lease, Replica
from penstock.serve.fleet.table import Table
from penstock.serve.routing import RoutingRequest, policy
from penstock.serve.routing.hash_ring import LOAD_TOKENS
from penstock.transport.address import Address
from penstock.transport.link import AdapterReport, Hello, LoadReport

pytestmark = pytest.mark.parity("S21", "X14")

POLICIES = ("prefix_affinity", "adapter_affinity", "least_loaded")
WORTH_A_LOAD = LOAD_TOKENS // REQUEST_TOKENS
"""Requests that weigh as much as a load."""


@pytest.fixture(autouse=True)
def same_dice() -> None:
    random.seed(1)


class Gateway:
    """A table and a policy of its own."""

    def __init__(self, name: str, replicas: int = 8, slots: int = 8) -> None:
        self.policy = policy(name)
        self.table = Table("node")
        self.table.limit("m", 1000, slots)
        names = [f"replica-{i}" for i in range(replicas)]
        self.table.set_members("m", {n: Address(n, "node", None, None, None, "") for n in names})
        for replica in self.replicas:
            self.table.hello(replica, Hello("m"))
            self.table.report(replica, LoadReport())

    @property
    def replicas(self) -> list[Replica]:
        return list(self.table.members("m"))

    def send(self, adapter: str) -> Lease:
        pick = self.policy.pick(RoutingRequest(adapter), self.table.candidates("m"), 0.0)
        assert pick is not None
        return self.table.acquire(pick.replica, 0, adapter)

    def went_to(self, adapter: str) -> Replica:
        """Where a request goes that ends at once."""
        taken = self.send(adapter)
        self.table.release(taken)
        return taken.replica

    def load(self, replica: Replica, *adapters: str) -> None:
        self.table.adapters(replica, AdapterReport(adapters))


@pytest.mark.parametrize("name", POLICIES)
def test_gateways_send_a_cold_adapter_to_the_same_replica(name: str):
    one, other = Gateway(name), Gateway(name)
    adapters = [f"a{i}" for i in range(50)]
    first = [one.went_to(adapter).id for adapter in adapters]
    assert first == [other.went_to(adapter).id for adapter in adapters]
    assert len(set(first)) == 8


@pytest.mark.parametrize("name", POLICIES)
def test_requests_go_where_the_adapter_is_loaded(name: str):
    gateway = Gateway(name)
    home = gateway.went_to("poet")
    elsewhere = next(replica for replica in gateway.replicas if replica is not home)
    gateway.load(elsewhere, "poet", "clerk")
    assert {gateway.went_to("poet") for _ in range(20)} == {elsewhere}


@pytest.mark.parametrize("name", POLICIES)
def test_requests_that_come_together_load_a_cold_adapter_once(name: str):
    gateway = Gateway(name)
    assert len({gateway.send("poet").replica for _ in range(WORTH_A_LOAD)}) == 1


@pytest.mark.parametrize("name", POLICIES)
def test_an_adapter_with_more_work_than_a_load_is_worth_spreads_to_a_second_and_no_further(name: str):
    gateway = Gateway(name)
    where = Counter(gateway.send("poet").replica.id for _ in range(2 * WORTH_A_LOAD))
    assert len(where) == 2
    assert min(where.values()) > WORTH_A_LOAD / 2


@pytest.mark.parametrize("name", POLICIES)
def test_the_second_replica_is_the_same_for_all_gateways(name: str):
    def second(gateway: Gateway) -> str:
        return list(dict.fromkeys(gateway.send("poet").replica.id for _ in range(2 * WORTH_A_LOAD)))[1]

    assert second(Gateway(name)) == second(Gateway(name))


@pytest.mark.parametrize("name", POLICIES)
def test_of_two_that_have_it_the_less_loaded_is_taken(name: str):
    gateway = Gateway(name)
    busy, idle = gateway.replicas[:2]
    gateway.load(busy, "poet")
    gateway.load(idle, "poet")
    gateway.table.report(busy, LoadReport(running=3))
    assert {gateway.went_to("poet") for _ in range(20)} == {idle}


@pytest.mark.parametrize("name", POLICIES)
def test_a_cold_adapter_goes_where_a_slot_is_free(name: str):
    gateway = Gateway(name, slots=2)
    for replica in gateway.replicas[1:]:
        gateway.load(replica, "clerk", "judge")
    assert {gateway.went_to(f"a{i}") for i in range(20)} == {gateway.replicas[0]}


@pytest.mark.parametrize("name", POLICIES)
def test_a_cold_adapter_is_loaded_although_all_slots_are_taken(name: str):
    gateway = Gateway(name, slots=1)
    for replica in gateway.replicas:
        gateway.load(replica, "clerk")
    assert len({gateway.went_to("poet") for _ in range(5)}) == 1


@pytest.mark.parametrize("name", POLICIES)
def test_a_request_waits_for_no_replica_that_has_its_adapter_but_no_room(name: str):
    gateway = Gateway(name)
    full = gateway.replicas[0]
    gateway.load(full, "poet")
    gateway.table.report(full, LoadReport(elsewhere=1000))
    assert gateway.went_to("poet") is not full


@pytest.mark.parametrize(
    ("busy", "waiting_tokens", "picked", "saved_tokens"),
    [(3, 0, 0, 1024), (4, 0, 1, 0), (0, 4096, 0, 1024), (0, 4097, 1, 0)],
)
def test_of_those_with_the_adapter_the_one_with_the_prompts_beginning_is_picked_within_bounds(
    busy: int, waiting_tokens: int, picked: int, saved_tokens: int
):
    """Up to its share, and until four times as many tokens wait there as its cache saves."""
    gateway = Gateway("prefix_affinity", replicas=2)
    for replica in gateway.replicas:
        gateway.load(replica, "poet")
    asked = RoutingRequest("poet", tokens=1100, blocks=tuple(range(1, 17)), home=7)
    gateway.policy.sent(asked, gateway.replicas[0], 0.0)  # type: ignore[attr-defined]
    gateway.table.report(gateway.replicas[0], LoadReport(running=busy, waiting_tokens=waiting_tokens))
    picks = [gateway.policy.pick(asked, gateway.table.candidates("m"), 0.0) for _ in range(20)]
    found = {(pick.replica, pick.saved_tokens) for pick in picks if pick}
    assert found == {(gateway.replicas[picked], saved_tokens)}


# -- what the table knows of adapters


def test_an_evicted_adapter_is_nowhere():
    gateway = Gateway("prefix_affinity")
    holders = gateway.table.candidates("m").holders
    gateway.load(gateway.replicas[0], "poet", "clerk")
    gateway.load(gateway.replicas[0], "clerk")
    assert not holders.of("poet")
    assert list(holders.of("clerk")) == [gateway.replicas[0]]
    assert holders.count(gateway.replicas[0]) == 1


def test_an_adapter_that_is_asked_for_counts_as_there_until_all_its_requests_have_ended():
    gateway = Gateway("prefix_affinity")
    holders = gateway.table.candidates("m").holders
    taken = [gateway.send("poet") for _ in range(2)]
    gateway.load(taken[0].replica, "clerk")  # another one is loaded meanwhile
    gateway.table.release(taken[0])
    assert taken[0].replica in holders.of("poet")
    gateway.table.release(taken[1])
    assert not holders.of("poet")


def test_a_replica_that_is_gone_has_no_adapters():
    gateway = Gateway("prefix_affinity")
    holders = gateway.table.candidates("m").holders
    taken = gateway.send("poet")
    gateway.load(taken.replica, "clerk")
    gateway.table.set_members("m", {})
    gateway.table.release(taken)
    assert not holders.of("poet")
    assert not holders.of("clerk")


def test_a_new_hello_forgets_what_was_loaded_before():
    gateway = Gateway("prefix_affinity")
    replica = gateway.replicas[0]
    gateway.load(replica, "poet")
    gateway.table.lost(replica)
    gateway.table.hello(replica, Hello("m"))
    assert not gateway.table.candidates("m").holders.of("poet")
