"""The table: who may be picked, and who is."""

import random

from penstock.serve.fleet.replica import REQUEST_TOKENS, Replica, Tried
from penstock.serve.fleet.table import Table
from penstock.serve.routing.policy import RoutingRequest
from penstock.serve.routing.simple import PowerOfTwo
from penstock.transport.address import Address
from penstock.transport.link import AdapterReport, Hello, LoadReport

HELLO = Hello("m", 64)


def address(name: str) -> Address:
    return Address(name, "node", f"\0{name}", None, None, "secret")


def table(*names: str, model_id: str = "m") -> Table:
    made = Table("node")
    made.set_members(model_id, {name: address(name) for name in names})
    return made


def speaking(*names: str) -> tuple[Table, list[Replica]]:
    made = table(*names)
    replicas = list(made.members("m"))
    for replica in replicas:
        made.hello(replica, HELLO)
        made.report(replica, LoadReport())
    return made, replicas


def pick(table: Table, tried: Tried | None = None, model_id: str = "m") -> Replica | None:
    picked = PowerOfTwo().pick(RoutingRequest(), table.candidates(model_id, tried), 0.0)
    return picked and picked.replica


def test_a_member_is_picked_only_after_it_has_spoken():
    made = table("a")
    assert pick(made) is None
    [replica] = made.members("m")
    made.hello(replica, HELLO)
    made.report(replica, LoadReport())
    assert pick(made) is replica


def test_hello_tells_the_context_window():
    made, _ = speaking("a")
    assert made.max_model_len("m") == 64


def test_draining_lost_and_removed_replicas_are_not_picked():
    made, (a, b, c) = speaking("a", "b", "c")
    made.report(a, LoadReport(state="draining"))
    made.lost(b)
    made.set_members("m", {"a": a.address, "b": b.address})
    assert pick(made) is None
    assert c.state == "gone"


def test_a_lost_replica_is_back_after_its_next_report():
    made, (a,) = speaking("a")
    made.lost(a)
    made.hello(a, HELLO)
    made.report(a, LoadReport())
    assert pick(made) is a


def test_news_of_a_removed_replica_does_not_bring_it_back():
    made, (a,) = speaking("a")
    made.set_members("m", {})
    made.report(a, LoadReport())
    assert pick(made) is None


def test_the_same_member_named_again_stays_as_it_was():
    made, (a,) = speaking("a")
    made.set_members("m", {"a": address("a")})
    assert pick(made) is a


def test_of_two_the_less_busy_is_picked():
    made, (a, b) = speaking("a", "b")
    made.report(a, LoadReport(running=5, waiting=2))
    made.report(b, LoadReport(running=6))
    assert {pick(made) for _ in range(20)} == {b}


def test_a_full_replica_is_never_picked():
    made, (a, b) = speaking("a", "b")
    made.limit("m", 2)
    taken = [made.acquire(a), made.acquire(a)]
    assert {pick(made) for _ in range(20)} == {b}
    taken += [made.acquire(b), made.acquire(b)]
    assert pick(made) is None
    made.release(taken[0])
    assert pick(made) is a


def test_other_gateways_requests_take_room():
    made, (a,) = speaking("a")
    made.report(a, LoadReport(elsewhere=2))
    made.limit("m", 2)
    assert pick(made) is None
    made.limit("m", 3)
    assert pick(made) is a


def test_what_was_started_since_the_last_report_counts():
    made, (a, b) = speaking("a", "b")
    made.report(a, LoadReport(running=2))
    made.report(b, LoadReport(running=3))
    taken = [made.acquire(a), made.acquire(a)]
    assert (a.busy, b.busy, made.candidates("m").busy) == (4, 3, 7)
    made.report(a, LoadReport(running=4))
    assert a.busy == 4
    for place in taken:
        made.release(place)
    assert (a.busy, made.candidates("m").busy) == (2, 5)


def test_a_replica_that_failed_the_request_is_tried_again_only_after_its_next_report():
    made, (a,) = speaking("a")
    tried = Tried()
    tried.add(a)
    assert pick(made, tried) is None
    made.report(a, LoadReport())
    assert pick(made, tried) is a
    tried.add(a)
    made.lost(a)
    made.hello(a, HELLO)
    assert pick(made, tried) is None
    made.report(a, LoadReport())
    assert pick(made, tried) is a


def test_models_do_not_share_replicas():
    made, _ = speaking("a")
    assert pick(made, model_id="other") is None


def test_watchers_hear_of_members_before_and_after_they_watch():
    made = table("a")
    heard: list[tuple[str, str]] = []
    made.watch(
        lambda r: heard.append(("joined", r.id)),
        lambda r: heard.append(("left", r.id)),
        lambda r: heard.append(("spoke", r.id)),
    )
    made.set_members("m", {"b": address("b")})
    made.report(made.members("m")[0], LoadReport())
    made.lost(made.members("m")[0])
    left = [("joined", "a"), ("left", "a"), ("spoke", "a")]
    assert heard == [*left, ("joined", "b"), ("spoke", "b"), ("spoke", "b")]


def test_tokens_sent_since_the_last_report_count_and_are_taken_back_only_from_what_they_were_added_to():
    made, (a,) = speaking("a")
    made.report(a, LoadReport(waiting_tokens=500))
    first, second = made.acquire(a, 100), made.acquire(a, 10)
    assert a.load_tokens == 610 + 2 * REQUEST_TOKENS
    made.release(second)
    assert a.load_tokens == 600 + REQUEST_TOKENS
    made.report(a, LoadReport(running=1, waiting_tokens=0))
    made.release(first)
    assert a.load_tokens == 0


def test_of_what_failed_only_what_has_not_reported_since_is_left_out():
    made, (a, b) = speaking("a", "b")
    tried = Tried()
    tried.add(a)
    assert list(made.candidates("m", tried)) == [b]
    made.report(a, LoadReport())
    assert set(made.candidates("m", tried)) == {a, b}


def test_hello_tells_the_size_of_the_cache():
    made, (a,) = speaking("a")
    made.hello(a, Hello("m", 128, kv_tokens=9))
    assert (made.max_model_len("m"), a.kv_tokens, a.hellos) == (128, 9, 2)


def test_batch_is_what_a_replica_reported_and_what_was_sent_and_has_ended_since():
    made, (a,) = speaking("a")
    report = LoadReport(batch_limit=9, batch_running=3, batch_waiting=2, batch_requeued=7, serves="v")
    made.report(a, report)
    assert (a.batch_limit, a.batch, a.batch_requeued, a.serves) == (9, 5, 7, "v")
    online, batch = made.acquire(a), made.acquire(a, batch=True)
    assert a.batch == 6
    made.release(online)
    assert a.batch == 6
    made.release(batch)
    assert a.batch == 5
    made.report(a, LoadReport())
    made.release(made.acquire(a, batch=True))
    assert a.batch == 0


def test_adapters_are_where_they_were_loaded_or_sent():
    made, (a, b) = speaking("a", "b")
    made.limit("m", 8, adapter_slots=3)
    found = made.candidates("m")
    assert found.adapter_slots == 3
    made.adapters(a, AdapterReport(("french",)))
    sent = made.acquire(b, adapter="french")
    assert set(found.holders.of("french")) == {a, b}
    made.release(sent)
    assert list(found.holders.of("french")) == [a]
    made.hello(a, HELLO)
    assert list(found.holders.of("french")) == []
    made.adapters(a, AdapterReport(("french",)))
    made.set_members("m", {"b": b.address})
    assert list(found.holders.of("french")) == []


def test_a_member_is_found_by_its_id():
    made, (a, b) = speaking("a", "b")
    made.set_members("other", {"c": address("c")})
    assert (made.node_id, made.find("a"), made.find("b"), made.find("no")) == ("node", a, b, None)
    assert made.find("c") is made.members("other")[0]
    assert [replica.id for replica in made] == ["a", "b", "c"]


def test_all_that_is_summed_is_what_the_replicas_have_after_any_events():
    """Also: batch may go where seats are free for it, and some slots stay for online requests."""
    for limit in (1, 3, 16):
        made, replicas = speaking(*(f"r{i}" for i in range(5)))
        made.limit("m", limit)
        random.seed(2)
        held = []
        for _ in range(2_000):
            replica, move = random.choice(replicas), random.random()
            if move < 0.5:
                held.append(made.acquire(replica, batch=random.random() < 0.5))
            elif move < 0.9 and held:
                made.release(held.pop(random.randrange(len(held))))
            elif move < 0.98:
                running, elsewhere = random.randrange(6), random.randrange(3)
                report = LoadReport(
                    running=running,
                    elsewhere=elsewhere,
                    batch_limit=random.choice((None, 0, 3)),
                    batch_running=running,
                )
                made.report(replica, report)
            else:
                made.lost(replica)
            ready, found = made.ready("m"), made.candidates("m")
            assert set(ready) == {one for one in replicas if one.state == "ready"}
            taken = {one: one.in_flight + one.elsewhere for one in ready}
            assert set(found) == {one for one in ready if taken[one] < limit}
            sums = len(ready), sum(one.busy for one in ready), sum(one.elsewhere for one in ready)
            assert (found.ready, found.busy, found.elsewhere) == sums
            assert made.leases("m") == len(held) == sum(one.in_flight for one in replicas)
            most = {1: 1, 3: 2, 16: 14}[limit]
            for_batch = made.candidates("m", batch=True)
            assert set(for_batch) == {one for one in ready if one.takes_batch and taken[one] < most}
            assert (for_batch.busy, for_batch.members) == (found.busy, found.members)
