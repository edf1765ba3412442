"""Each policy over a real table: who is picked, and what bounds it."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.config.schema.routing import POLICIES
from penstock.serve.fleet.replica import Lease, Replica, Tried
from penstock.serve.fleet.table import Table
from penstock.serve.routing import Pick, RoutingRequest, policy
from penstock.serve.routing.load_bounds import ALWAYS, OVER_SHARE
from penstock.serve.routing.policy import Learns
from penstock.serve.routing.prefix_hashes import blocks, home
from penstock.serve.routing.simple import ServeRouter
from penstock.transport.address import Address
from penstock.transport.link import Hello, LoadReport

pytestmark = pytest.mark.parity("S20")


@pytest.fixture(autouse=True)
def same_dice() -> None:
    random.seed(1)


class Gateway:
    """A table and a policy, used as the gateway's line uses them."""

    def __init__(self, name: str, *replicas: str, limit: int = 1000, **options: Any) -> None:
        self.policy: Any = policy(name, options)
        self.table = Table("node")
        self.table.limit("m", limit)
        self.now = 0.0
        self.members(*replicas)

    def members(self, *names: str) -> None:
        self.table.set_members("m", {n: Address(n, "node", None, None, None, "") for n in names})
        for replica in self.table.members("m"):
            if replica.state == "unknown":
                self.report(replica.id)

    def report(self, name: str, **said: Any) -> None:
        replica = self.replica(name)
        if replica.state == "unknown":
            self.table.hello(replica, Hello("m"))
        self.table.report(replica, LoadReport(**said))

    def replica(self, name: str) -> Replica:
        return next(replica for replica in self.table.members("m") if replica.id == name)

    def pick(self, asked: RoutingRequest, tried: Tried | None = None) -> Pick | None:
        return self.policy.pick(asked, self.table.candidates("m", tried), self.now)

    def picks(self, asked: RoutingRequest) -> set[tuple[str, str]]:
        """Where a request may go, and why, whatever the dice say."""
        found = [self.pick(asked) for _ in range(30)]
        return {(pick.replica.id, pick.why) for pick in found if pick}

    def send(self, asked: RoutingRequest) -> Lease:
        pick = self.pick(asked)
        assert pick is not None
        if isinstance(self.policy, Learns):
            self.policy.sent(asked, pick.replica, self.now)
        return self.table.acquire(pick.replica, max(0, asked.tokens - pick.saved_tokens))

    def went_to(self, asked: RoutingRequest) -> str:
        """Where a request goes that ends at once."""
        place = self.send(asked)
        self.table.release(place)
        return place.replica.id


def names(count: int) -> list[str]:
    return [f"replica-{i}" for i in range(count)]


def prompt(text: str, tokens: int = 1000) -> RoutingRequest:
    said = (text + " ") * (4 * tokens // (len(text) + 1) + 1)
    content = said[: 4 * tokens].encode()
    return RoutingRequest(tokens=tokens, blocks=blocks(content), home=home(content))


def turn(of: str, number: int) -> RoutingRequest:
    """Of a conversation that grows by 250 tokens each time."""
    content = "".join(f"{of} says {i:06} ".ljust(1000, "-") for i in range(number + 4)).encode()
    return RoutingRequest(tokens=len(content) // 4, blocks=blocks(content), home=home(content[:4000]))


# -- all of them


@pytest.mark.parametrize("name", POLICIES)
def test_nobody_is_picked_where_nobody_has_room(name):
    gateway = Gateway(name, "a", "b", limit=1)
    taken = [gateway.send(prompt("hot")) for _ in range(2)]
    assert gateway.pick(prompt("hot")) is None
    gateway.table.release(taken[0])
    assert gateway.went_to(prompt("hot")) == taken[0].replica.id


@pytest.mark.parametrize("name", POLICIES)
def test_a_replica_that_failed_the_request_is_not_picked_for_it_again(name):
    gateway = Gateway(name, "a", "b", "c")
    asked = RoutingRequest("poet", "ann", 1000, prompt("hot").blocks, prompt("hot").home)
    tried = Tried()
    for _ in range(2):
        pick = gateway.pick(asked, tried)
        assert pick is not None
        assert pick.replica not in tried
        tried.add(pick.replica)
    tried.add(next(r for r in gateway.table.members("m") if r not in tried))
    assert gateway.pick(asked, tried) is None


@pytest.mark.parametrize("name", POLICIES)
def test_a_draining_replica_gets_nothing_new(name):
    gateway = Gateway(name, "a", "b")
    asked = prompt("hot")
    first = gateway.went_to(asked)
    gateway.report(first, state="draining")
    assert {gateway.went_to(asked) for _ in range(10)} == {"a", "b"} - {first}


@pytest.mark.parametrize("name", POLICIES)
def test_the_only_one_with_room_is_found_among_a_thousand(name):
    gateway = Gateway(name, *names(1000), limit=1)
    free = gateway.replica("replica-700")
    for replica in gateway.table.members("m"):
        if replica is not free:
            gateway.table.acquire(replica)
    assert gateway.went_to(RoutingRequest("poet", "ann", 100)) == free.id


@pytest.mark.parametrize("name", POLICIES)
def test_requests_that_share_nothing_spread_evenly(name):
    gateway = Gateway(name, *names(16))
    for i in range(1600):
        gateway.send(prompt(f"{i} is a prompt of its own"))
    counts = [replica.in_flight for replica in gateway.table.members("m")]
    assert max(counts) <= 1.15 * 100


# -- round robin, power of two, least loaded


def test_round_robin_takes_each_in_turn_and_passes_over_who_has_no_room():
    gateway = Gateway("round_robin", "a", "b", "c", limit=2)
    order = "".join(gateway.went_to(RoutingRequest()) for _ in range(9))
    assert order in "abcabcabcabc"
    gateway.report("b", elsewhere=2)
    assert Counter(gateway.went_to(RoutingRequest()) for _ in range(8)) == {"a": 4, "c": 4}


def test_least_loaded_looks_at_tokens_that_wait_not_at_requests():
    gateway = Gateway("least_loaded", "a", "b", "c")
    gateway.report("a", waiting=1, waiting_tokens=30_000)
    gateway.report("b", running=8)
    gateway.report("c", running=9, waiting_tokens=10)
    assert {gateway.went_to(RoutingRequest(tokens=10)) for _ in range(10)} == {"b"}


def test_least_loaded_counts_what_was_sent_since_the_last_report():
    gateway = Gateway("least_loaded", "a", "b")
    first = gateway.send(RoutingRequest(tokens=20_000)).replica.id
    assert {gateway.send(RoutingRequest(tokens=10)).replica.id for _ in range(10)} == {"a", "b"} - {first}


# -- session and adapter affinity

KEYED = [
    ("session_affinity", lambda key: RoutingRequest(session=key)),
    ("adapter_affinity", lambda key: RoutingRequest(adapter=key)),
]


@pytest.mark.parametrize(("name", "asked"), KEYED)
def test_a_key_goes_to_the_same_replica_in_every_gateway(name, asked):
    gateways = [Gateway(name, *names(10)), Gateway(name, *names(10)[::-1])]
    for i in range(50):
        assert len({gateway.went_to(asked(f"key {i}")) for gateway in gateways for _ in range(3)}) == 1


@pytest.mark.parametrize(("name", "asked"), KEYED)
def test_when_a_replica_leaves_only_its_keys_move(name, asked):
    gateway = Gateway(name, *names(10))
    keys = [asked(f"key {i}") for i in range(1000)]
    before = [gateway.went_to(key) for key in keys]
    gateway.members(*names(9))
    after = [gateway.went_to(key) for key in keys]
    assert {old for old, new in zip(before, after, strict=True) if old != new} == {"replica-9"}


@pytest.mark.parametrize(("name", "asked"), KEYED)
def test_a_hot_key_never_brings_a_replica_over_its_share(name, asked):
    gateway = Gateway(name, *names(8))
    for sent in range(400):
        gateway.send(asked("hot"))
        most = max(replica.in_flight for replica in gateway.table.members("m"))
        assert most <= max(ALWAYS, OVER_SHARE * (sent + 1) / 8)


@pytest.mark.parametrize(("name", "asked"), KEYED)
def test_what_a_full_home_passes_on_always_goes_to_the_same_next_one(name, asked):
    gateway = Gateway(name, *names(10))
    first = gateway.went_to(asked("key"))
    gateway.report(first, running=50)
    second = {gateway.went_to(asked("key")) for _ in range(20)}
    assert len(second) == 1
    assert first not in second
    gateway.report(first)
    assert gateway.went_to(asked("key")) == first


def test_a_session_stays_with_one_of_two_up_to_its_share():
    gateway = Gateway("session_affinity", "a", "b")
    home = gateway.went_to(RoutingRequest(session="key"))
    other = {"a": "b", "b": "a"}[home]
    for busy in range(ALWAYS):
        gateway.report(home, running=busy)
        pick = gateway.pick(RoutingRequest(session="key"))
        assert pick is not None
        assert (pick.replica.id, pick.why) == (home, "affinity")
    gateway.report(home, running=ALWAYS)
    assert gateway.went_to(RoutingRequest(session="key")) == other


def test_the_replica_that_a_router_chose_is_taken_where_it_can_be():
    gateway = Gateway("round_robin", "a", "b", "c", limit=1)
    gateway.policy = ServeRouter()
    gateway.report("a", running=0)
    pick = gateway.pick(RoutingRequest(chosen="b"))
    assert pick is not None
    assert (pick.replica.id, pick.why) == ("b", "router")
    gateway.report("b", elsewhere=1)
    assert {gateway.went_to(RoutingRequest(chosen="b")) for _ in range(20)} == {"a", "c"}
    assert {gateway.went_to(RoutingRequest(chosen="gone")) for _ in range(20)} == {"a", "c"}


@pytest.mark.parametrize(("name", "asked"), KEYED)
def test_requests_without_a_key_go_by_load(name, asked):
    gateway = Gateway(name, "a", "b")
    gateway.report("a", running=9)
    pick = gateway.pick(asked(""))
    assert pick is not None
    assert (pick.replica.id, pick.why) == ("b", "balance")


# -- prefix affinity


def test_a_conversations_turns_go_to_the_same_replica():
    gateway = Gateway("prefix_affinity", *names(10))
    for talk in ("ann", "bob", "eve"):
        first = gateway.went_to(turn(talk, 0))
        assert {gateway.went_to(turn(talk, number)) for number in range(1, 20)} == {first}


def test_the_replica_with_the_longest_part_of_the_prompt_is_picked():
    gateway = Gateway("prefix_affinity", "a", "b")
    short, long = turn("ann", 0), turn("ann", 8)
    gateway.policy.sent(short, gateway.replica("a"), 0.0)
    gateway.policy.sent(long, gateway.replica("b"), 0.0)
    pick = gateway.pick(turn("ann", 9))
    assert pick is not None
    assert (pick.replica.id, pick.why) == ("b", "affinity")
    assert 8 / 9 * long.tokens <= pick.saved_tokens <= long.tokens


def paced_conversations(gateway: Gateway, count: int, system: str) -> Iterator[str]:
    """Where the turns of conversations go that are held one after another."""
    for number in range(count):
        said = system
        for turns in range(3):
            said += f" conversation {number} turn {turns} " * 12
            content = said.encode()
            asked = RoutingRequest(
                tokens=len(content) // 4, blocks=blocks(content), home=home(content[:2048])
            )
            yield gateway.went_to(asked)
            gateway.now += 2.0


@pytest.mark.parametrize("count", [2, 4])
def test_paced_conversations_with_one_system_prompt_use_all_caches(count: int):
    gateway = Gateway("prefix_affinity", *names(count))
    went = Counter(paced_conversations(gateway, 40 * count, "system " * 471))
    assert len(went) == count
    assert max(went.values()) <= 0.6 * went.total() * 2 / count


def begins(number: int, common_bytes: int = 4096) -> RoutingRequest:
    """A new prompt that has its beginning in common with others, and 256 tokens of its own."""
    content = b"popular " * (common_bytes // 8) + b"%08d" % number * 128
    return RoutingRequest(tokens=len(content) // 4, blocks=blocks(content), home=home(content[:common_bytes]))


@pytest.mark.parametrize(
    ("sent", "common_bytes", "others_new", "others_wait", "picked"),
    [
        (7, 4096, 0, 0, ("a", "affinity")),
        (8, 4096, 0, 0, ("b", "spread")),
        (8, 256, 0, 0, ("b", "spread")),
        (8, 4096, 1089, 0, ("b", "spread")),  # and the 1,024 in common, twice: one less than 1380 + 8 * 356
        (8, 4096, 1090, 0, ("a", "affinity")),
        (15, 4096, 0, 104, ("b", "spread")),
        (15, 4096, 0, 105, ("a", "affinity")),  # (1380 + 15 * 356) / 64
    ],
)
def test_a_popular_prefix_is_computed_again_where_less_is_new_and_less_waits(
    sent: int, common_bytes: int, others_new: int, others_wait: int, picked: tuple[str, str]
):
    gateway = Gateway("prefix_affinity", "a", "b")
    for number in range(1 + sent):
        gateway.policy.sent(begins(number, common_bytes), gateway.replica("a"), 0.0)
    if others_new:  # an answer's 100 tokens among them
        gateway.policy.sent(prompt("other", others_new - 100), gateway.replica("b"), 0.0)
    gateway.report("b", waiting_tokens=others_wait)
    assert gateway.picks(begins(99, common_bytes)) == {picked}


@pytest.mark.parametrize(
    ("sent", "others_new", "leaves", "spreads"),
    [(15, 4000, "", False), (16, 4000, "", True), (16, 500, "", False), (8, 500, "a", True)],
)
def test_all_that_have_a_popular_prefix_count_until_they_leave(
    sent: int, others_new: int, leaves: str, spreads: bool
):
    gateway = Gateway("prefix_affinity", "a", "b", "c")
    gateway.policy.sent(prompt("other", others_new), gateway.replica("a"), 0.0)
    gateway.policy.sent(begins(-1), gateway.replica("a"), 0.0)
    for number in range(1 + sent):
        gateway.policy.sent(begins(number), gateway.replica("b"), 0.0)
    gateway.members(*{"a", "b", "c"} - {leaves})
    assert (("c", "spread") in gateway.picks(begins(99))) is spreads


def test_the_turns_of_a_conversation_stay_together_when_its_first_goes_elsewhere():
    gateway = Gateway("prefix_affinity", "a", "b")
    went = list(paced_conversations(gateway, 40, "system " * 471))
    apart = [went[at : at + 3] for at in range(0, len(went), 3) if len(set(went[at : at + 3])) > 1]
    assert apart == []


def test_a_hot_prefix_never_brings_a_replica_over_its_share():
    gateway = Gateway("prefix_affinity", *names(8))
    for sent in range(400):
        gateway.send(prompt("hot"))
        most = max(replica.in_flight for replica in gateway.table.members("m"))
        assert most <= max(ALWAYS, OVER_SHARE * (sent + 1) / 8) + 1


def test_a_hot_prefix_leaves_no_replica_idle_while_others_are_full():
    gateway = Gateway("prefix_affinity", *names(8))
    for _ in range(80):
        gateway.send(prompt("hot"))
    assert min(replica.in_flight for replica in gateway.table.members("m")) >= 1


def test_affinity_brings_no_replica_over_twice_what_another_has():
    gateway = Gateway("prefix_affinity", "a", "b")
    gateway.policy.sent(prompt("hot"), gateway.replica("a"), 0.0)
    gateway.report("a", running=ALWAYS + 20)
    for others, picked in ((10, "b"), (11, "a")):
        gateway.report("b", running=others)
        pick = gateway.pick(prompt("hot"))
        assert pick is not None
        assert pick.replica.id == picked


def test_work_that_waits_outweighs_a_short_prefix_but_not_a_long_one():
    gateway = Gateway("prefix_affinity", "a", "b")
    short, long = prompt("short", 128), prompt("long", 8000)
    for asked in (short, long):
        gateway.policy.sent(asked, gateway.replica("a"), 0.0)
    gateway.report("a", waiting_tokens=4000)
    assert gateway.went_to(long) == "a"
    assert gateway.went_to(short) == "b"


def test_a_prefix_is_not_looked_for_in_a_replica_that_has_gone():
    gateway = Gateway("prefix_affinity", "a", "b")
    first = gateway.went_to(prompt("hot"))
    gateway.members(*({"a", "b"} - {first}))
    assert gateway.went_to(prompt("hot")) != first


def test_gateways_that_do_not_talk_send_a_prompt_to_the_same_home():
    """Each knows of the other only what replicas report: that requests come from elsewhere."""
    first, second = Gateway("prefix_affinity", *names(16)), Gateway("prefix_affinity", *names(16))
    same = 0
    for i in range(200):
        for gateway in (first, second):
            for name in names(16):
                gateway.report(name, running=4, elsewhere=4)
        same += first.went_to(prompt(f"prompt {i}")) == second.went_to(prompt(f"prompt {i}"))
    assert same >= 190


def test_prompts_without_a_whole_block_go_by_load():
    gateway = Gateway("prefix_affinity", "a", "b")
    gateway.report("a", running=9)
    assert {gateway.went_to(RoutingRequest(tokens=5)) for _ in range(10)} == {"b"}


@pytest.mark.parametrize(
    ("holders", "why"),
    [([1, 1, 1], "affinity"), ([1, 1, 1, 1], "balance"), ([7, 1], "affinity"), ([8, 1], "balance")],
)
def test_the_longest_matches_are_weighed_of_three_lengths_or_eight_replicas(holders: list[int], why: str):
    """The last one is the only one that is not beyond its share."""
    gateway = Gateway("prefix_affinity", *names(20))
    members = iter(names(sum(holders)))
    for length, count in enumerate(holders):
        for name in itertools.islice(members, count):
            gateway.policy.sent(prompt("hot", 4096 >> length), gateway.replica(name), 0.0)
            if length < len(holders) - 1:
                gateway.report(name, running=50)
    assert {why for _, why in gateway.picks(prompt("hot", 4096))} == {why}


def test_the_more_requests_come_from_other_gateways_the_more_of_a_prompt_its_home_has():
    gateway = Gateway("prefix_affinity", *names(16))
    for name in names(16):
        gateway.report(name, running=4, elsewhere=1)
    pick = gateway.pick(prompt("hot", 1000))
    assert pick is not None
    assert (pick.why, pick.saved_tokens) == ("home", 250)


def test_a_home_passes_on_what_is_beyond_its_share_to_the_same_next_one():
    gateway = Gateway("prefix_affinity", *names(4))
    for name in names(4):
        gateway.report(name, running=1, elsewhere=1)
    [(home, why)] = gateway.picks(prompt("hot"))
    assert why == "home"
    gateway.report(home, running=ALWAYS - 1, elsewhere=ALWAYS - 1)
    assert gateway.picks(prompt("hot")) == {(home, "home")}
    gateway.report(home, running=ALWAYS, elsewhere=ALWAYS)
    [(other, why)] = gateway.picks(prompt("hot"))
    assert (why, other == home) == ("home", False)


@pytest.mark.parity("S34")
@pytest.mark.parametrize(("busier", "picked"), [(0, "one"), (2, "one"), (3, "two")])
def test_a_replica_with_the_prefix_is_left_when_it_is_busier_than_allowed(busier: int, picked: str):
    gateway = Gateway("prefix_affinity", "one", "two", imbalanced_threshold=2)
    gateway.policy.sent(prompt("hot"), gateway.replica("one"), 0.0)
    gateway.report("one", running=busier)
    assert {name for name, _ in gateway.picks(prompt("hot"))} == {picked}


@pytest.mark.parity("S34")
@pytest.mark.parametrize(("least_match", "why"), [(0.0, "affinity"), (0.5, "affinity"), (0.51, "balance")])
def test_a_match_of_too_small_a_share_of_the_prompt_does_not_count(least_match: float, why: str):
    gateway = Gateway("prefix_affinity", "one", "two", match_rate_threshold=least_match)
    gateway.policy.sent(prompt("hot", 1024), gateway.replica("one"), 0.0)
    assert {why for _, why in gateway.picks(prompt("hot", 2048))} == {why}


@pytest.mark.parity("S34")
@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({}, 11_000, 12_000),
        ({"do_eviction": True, "eviction_threshold_chars": 20_000}, 4000, 5000),
        (
            {"do_eviction": True, "eviction_threshold_chars": 20_000, "eviction_target_chars": 8_000},
            1000,
            4000,
        ),
    ],
)
def test_no_more_than_so_many_characters_are_remembered(options: dict[str, int], least: int, most: int):
    gateway = Gateway("prefix_affinity", "one", **options)
    for number in range(12):
        gateway.policy.sent(prompt(f"{number} "), gateway.replica("one"), 0.0)
    picks = [gateway.pick(prompt(f"{number} ")) for number in range(12)]
    assert least <= sum(pick.saved_tokens for pick in picks if pick) <= most
