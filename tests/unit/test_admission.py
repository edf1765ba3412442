"""The admission queue under random arrivals, departures and room: order, limits, and nobody forgotten."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Overloaded, Unavailable
from penstock.metrics import GatewayMetrics
from penstock.serve.fleet.candidates import Candidates
from penstock.serve.fleet.replica import Lease, Replica, Tried
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.admission import AdmissionQueue
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.gateway.telemetry.timing import Timing
from penstock.serve.routing import RoutingRequest, policy
from penstock.serve.routing.policy import Pick
from penstock.serve.tenancy.fairness import Charge
from penstock.serve.tenancy.limits import Periods
from penstock.serve.tenancy.reporting import UsageReporter
from penstock.serve.tenancy.usage import Settlement, Totals
from penstock.tiers import DEFAULT, FLEX, PRIORITY, Tier
from penstock.transport.address import Address
from penstock.transport.link import Hello, LoadReport, State

ORDER = (PRIORITY, DEFAULT, FLEX)
SLOTS, MOST, MOST_BATCH = 3, 3, 2


class Desk:
    """A queue before one replica, and the requests that have come."""

    def __init__(self, most: int = MOST) -> None:
        self.table = Table("n")
        self.woken = 0
        self.replica = self.join("a")
        self.model = ServedModel(
            "m",
            1,
            max_ongoing_requests=SLOTS,
            max_queued_requests=most,
            max_queued_batch=MOST_BATCH,
        )
        self.policy, self.metrics = policy("power_of_two"), GatewayMetrics()
        self.queue = AdmissionQueue(
            self.model, self.table, self.policy, self.metrics.model("m"), 30.0, self._wake
        )
        self.arrived: list[tuple[Tier, asyncio.Task[Lease]]] = []
        self.held: list[Lease] = []
        self.granted: list[int] = []

    def _wake(self) -> None:
        self.woken += 1

    def join(self, name: str, state: State = "ready") -> Replica:
        known = {replica.id: replica.address for replica in self.table.members("m")}
        self.table.set_members("m", known | {name: Address(name, "n", None, None, None, "")})
        replica = self.table.members("m")[-1]
        self.table.hello(replica, Hello("m"))
        self.table.report(replica, LoadReport(state=state))
        return replica

    def error(self, number: int) -> str:
        """What has ended the wait of a request; "" where nothing has."""
        task = self.arrived[number][1]
        return str(task.exception() or "") if task.done() else ""

    async def arrive(self, tier: Tier = DEFAULT, failed: Replica | None = None, **more: Any) -> int:
        tried = Tried()
        if failed is not None:
            tried.add(failed)
        asked, times = more.pop("asked", RoutingRequest()), more.pop("times", None) or Timing()
        acquiring = self.queue.acquire(asked, tried, times, tier=tier, **more)
        number = len(self.arrived)
        self.arrived.append((tier, asyncio.create_task(acquiring)))
        await self.settle()
        return number

    async def leave(self, number: int) -> None:
        self.arrived[number % len(self.arrived)][1].cancel()
        await self.settle()

    async def finish(self) -> None:
        self.queue.release(self.held.pop(0))
        await self.settle()

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        for number, (_, task) in enumerate(self.arrived):
            if task.done() and not task.cancelled() and not task.exception() and number not in self.granted:
                self.granted.append(number)
                self.held.append(task.result())

    def waiting(self) -> Counter[Tier]:
        return Counter(tier for tier, task in self.arrived if not task.done())


MOVES = st.tuples(
    st.sampled_from([*["arrive"] * 4, "leave", "finish"]), st.sampled_from(ORDER), st.integers(0, 40)
)


def test_order_limits_and_counts_hold_whatever_comes_and_goes():
    reached = Counter[str]()

    @settings(max_examples=150, deadline=None)
    @given(st.lists(MOVES, min_size=10, max_size=40))
    def play(moves: list[tuple[str, Tier, int]]) -> None:
        asyncio.run(_play(moves, reached))

    play()
    assert min(reached[end] for end in ("granted", "left", "gave way")) > 20, reached


async def _play(moves: list[tuple[str, Tier, int]], reached: Counter[str]) -> None:
    desk = Desk()
    for move, tier, number in moves:
        before, granted = [task.done() for _, task in desk.arrived], len(desk.granted)
        if move == "arrive":
            await desk.arrive(tier)
        elif move == "leave" and desk.arrived:
            await desk.leave(number)
        elif move == "finish" and desk.held:
            await desk.finish()
        check(desk, desk.granted[granted:], before)
        for was_done, (_, task) in zip(before, desk.arrived, strict=False):
            if task.done() and not was_done:
                reached["left" if task.cancelled() else "gave way" if task.exception() else "granted"] += 1
    while desk.held:
        await desk.finish()
    assert desk.waiting().total() == len(desk.queue) == 0
    assert desk.replica.in_flight == desk.replica.batch == 0


def check(desk: Desk, granted: list[int], done_before: list[bool]) -> None:
    waiting = desk.waiting()
    assert len(desk.queue) == waiting.total()
    assert waiting[PRIORITY] + waiting[DEFAULT] <= MOST
    assert waiting[FLEX] <= MOST_BATCH
    assert len(desk.held) == desk.replica.in_flight <= SLOTS
    if waiting[PRIORITY] + waiting[DEFAULT]:
        assert len(desk.held) == SLOTS  # nobody waits beside a free slot
    for number in granted:
        tier = desk.arrived[number][0]
        for other, (other_tier, task) in enumerate(desk.arrived[: len(done_before)]):
            older = other_tier == tier and other < number
            if not task.done() and not done_before[other]:
                assert not older
                assert ORDER.index(other_tier) >= ORDER.index(tier)
    for _, task in desk.arrived:
        if task.done() and not task.cancelled() and task.exception():
            assert isinstance(task.exception(), Overloaded)


async def test_a_priority_request_takes_the_place_of_the_youngest_default_one():
    desk = Desk()
    for _ in range(SLOTS):
        await desk.arrive(DEFAULT)
    waiting = [await desk.arrive(DEFAULT) for _ in range(MOST)]
    first = await desk.arrive(PRIORITY)
    assert isinstance(desk.arrived[waiting[-1]][1].exception(), Overloaded)
    assert desk.waiting() == {DEFAULT: MOST - 1, PRIORITY: 1}
    await desk.finish()
    assert desk.granted[-1] == first
    for _ in range(MOST - desk.waiting()[PRIORITY]):
        await desk.arrive(PRIORITY)
    refused = await desk.arrive(PRIORITY)  # all that wait are of its own class
    with pytest.raises(Overloaded):
        desk.arrived[refused][1].result()
    while desk.held:
        await desk.finish()


async def test_batch_makes_no_room_for_itself_among_online_requests():
    desk = Desk()
    for _ in range(SLOTS + MOST):
        await desk.arrive(DEFAULT)
    batch = [await desk.arrive(FLEX) for _ in range(MOST_BATCH + 1)]
    assert isinstance(desk.arrived[batch[-1]][1].exception(), Overloaded)
    assert desk.waiting() == {DEFAULT: MOST, FLEX: MOST_BATCH}
    while desk.held:
        await desk.finish()


@pytest.mark.parametrize("granted", [False, True], ids=["before", "after"])
async def test_one_that_leaves_as_room_comes_leaves_it_to_the_next(granted: bool):
    desk = Desk()
    for _ in range(SLOTS + 2):
        await desk.arrive(DEFAULT)
    if granted:
        desk.queue.release(desk.held.pop(0))
    desk.arrived[SLOTS][1].cancel()
    await (desk.settle() if granted else desk.finish())
    assert desk.granted[-1] == SLOTS + 1


async def test_one_that_leaves_as_its_wait_ends_has_left():
    desk = Desk()
    for _ in range(SLOTS + 1):
        await desk.arrive()
    desk.queue.remove()
    desk.arrived[-1][1].cancel()
    await desk.settle()
    assert desk.arrived[-1][1].cancelled()


async def test_two_that_come_at_once_take_two_places():
    desk = Desk()
    for _ in range(SLOTS + MOST):
        await desk.arrive()
    await asyncio.gather(desk.arrive(PRIORITY), desk.arrive(PRIORITY))
    assert desk.waiting() == {DEFAULT: MOST - 2, PRIORITY: 2}


async def test_what_a_request_spends_in_the_queue_is_told_apart():
    desk = Desk()
    times = [Timing() for _ in range(SLOTS + 1)]
    for each in times:
        await desk.arrive(times=each)
    assert [[part for part, _ in each.laps[1:]] for each in times] == [["pick"]] * SLOTS + [["pick", "queue"]]


async def test_batch_in_a_replica_is_told_apart():
    desk = Desk()
    for tier, batch in ((FLEX, 1), (DEFAULT, 1)):
        await desk.arrive(tier)
        assert desk.replica.batch == batch


async def test_where_a_policy_lets_one_wait_those_of_its_class_wait_behind_it():
    desk = Desk()
    desk.queue.follow(desk.model, Learning(), 30.0)
    first, second = await desk.arrive(asked=WAITS), await desk.arrive()
    assert desk.granted == []
    desk.queue.offer(desk.replica)
    await desk.settle()
    assert desk.granted == [first, second]


async def test_a_request_that_a_replica_failed_waits_where_new_ones_may_not():
    desk = Desk(most=0)
    for _ in range(SLOTS):
        await desk.arrive(DEFAULT)
    other = Replica("m", Address("b", "n", None, None, None, ""))
    again, new = await desk.arrive(DEFAULT, other), await desk.arrive(DEFAULT)
    with pytest.raises(Overloaded):
        desk.arrived[new][1].result()
    await desk.finish()
    assert desk.granted[-1] == again


@pytest.fixture
async def timers(patched) -> list[asyncio.TimerHandle]:
    """All that the loop is given."""
    loop, found = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    later = loop.call_later

    def call_later(*args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        found.append(later(*args, **kwargs))
        return found[-1]

    patched(loop, "call_later", call_later)
    return found


async def test_the_end_of_a_wait_ends_its_timer(timers: list[asyncio.TimerHandle]):
    desk = Desk()
    for _ in range(SLOTS + 2):
        await desk.arrive(DEFAULT)
    await desk.leave(SLOTS)
    await desk.finish()
    assert [timer.cancelled() for timer in timers] == [True, True]


async def test_a_gateway_that_stops_ends_waits_for_a_replica_and_none_for_room(
    timers: list[asyncio.TimerHandle],
):
    desk = Desk()
    for _ in range(SLOTS + 1):
        await desk.arrive(DEFAULT)
    desk.queue.drain()
    await desk.settle()
    assert desk.waiting() == {DEFAULT: 1}
    assert [timer.cancelled() for timer in timers] == [True, False]  # the latter looks again
    assert timers[-1].when() <= asyncio.get_running_loop().time() + 1
    desk.table.lost(desk.replica)
    desk.queue.drain()
    await desk.settle()
    with pytest.raises(Unavailable, match="1 starting or restarting"):
        desk.arrived[-1][1].result()


async def test_a_tenant_that_fills_the_queue_gives_a_place_to_another_which_goes_next():
    desk = Desk(most=4)
    flood = [await desk.arrive(DEFAULT, charge=Charge("flood", 1.0, 10.0)) for _ in range(SLOTS + 4)]
    late = await desk.arrive(DEFAULT, charge=Charge("late", 1.0, 10.0))
    assert desk.waiting() == {DEFAULT: 4}
    assert desk.arrived[flood[-1]][1].exception() is not None
    refused = await desk.arrive(DEFAULT, charge=Charge("flood", 1.0, 10.0))
    assert desk.arrived[refused][1].exception() is not None
    for number in (late, flood[SLOTS], flood[SLOTS + 1], flood[SLOTS + 2]):
        await desk.finish()
        assert desk.granted[-1] == number
    await asyncio.gather(*(desk.finish() for _ in range(SLOTS)))
    assert desk.queue.waiting(DEFAULT) == 0


async def test_what_control_says_others_have_served_delays_a_tenants_turn():
    desk = Desk(most=9)

    async def settle(settlement: Settlement) -> Totals:
        return Totals(Periods.at(0.0), {}, served=[("m", FLEX, "a", 99.0), ("m", DEFAULT, "a", 15.0)])

    def served(model: str, tier: str, tenant: str, price: float) -> None:
        desk.queue.served_elsewhere(tier, tenant, price)

    for tenant in "zzzaabb":
        await desk.arrive(DEFAULT, charge=Charge(tenant, 1.0, 10.0))
    reporter = UsageReporter(settle, dict, served=served)
    await reporter.start()
    await reporter.close()
    for number in (5, 6, 3, 4):
        await desk.finish()
        assert desk.granted[-1] == number


async def test_one_that_a_single_replica_can_answer_waits_for_that_one_before_all_others():
    desk = Desk()
    for _ in range(SLOTS):
        await desk.arrive()
    waits = await desk.arrive()
    kept = await desk.arrive(only=desk.replica)
    desk.queue.offer(desk.join("b"))
    await desk.settle()
    assert (desk.granted[SLOTS:], desk.woken) == ([waits], 0)
    other = await desk.arrive(only=desk.table.members("m")[1])
    await desk.finish()
    assert desk.granted[SLOTS:] == [waits, other, kept]
    assert [lease.replica.id for lease in desk.held[-2:]] == ["b", "a"]
    again = await desk.arrive(only=desk.replica)
    desk.table.set_members("m", {})
    desk.queue.offer(desk.replica)
    await desk.settle()
    assert "the replica that kept it has ended" in desk.error(again)


async def test_one_that_a_single_replica_can_answer_takes_no_place_from_others():
    desk = Desk(most=1)
    for _ in range(SLOTS):
        await desk.arrive()
    waits = await desk.arrive()
    refused = [await desk.arrive(tier, only=desk.replica) for tier in (PRIORITY, DEFAULT)]
    assert ["max_queued_requests is 1" in desk.error(number) for number in refused] == [True, True]
    assert desk.error(waits) == ""


async def test_a_removed_model_ends_all_waits_and_later_ones():
    desk = Desk()
    for _ in range(SLOTS):
        await desk.arrive()
    waits = [await desk.arrive(), await desk.arrive(failed=Replica("m", desk.replica.address))]
    desk.queue.remove()
    await desk.settle()
    waits.append(await desk.arrive())
    assert ["has just been removed" in desk.error(number) for number in waits] == [True] * 3
    assert len(desk.queue) == 0


async def test_a_changed_model_lets_those_go_that_have_room_now_and_waits_as_long_as_it_says(
    timers: list[asyncio.TimerHandle],
):
    desk = Desk()
    for _ in range(SLOTS + 2):
        await desk.arrive()
    model = replace(desk.model, max_ongoing_requests=SLOTS + 1)
    desk.queue.follow(model, desk.policy, 0.5)
    await desk.settle()
    assert (len(desk.held), len(desk.queue)) == (SLOTS + 1, 1)
    for start_s, seconds in ((None, 0.5), (7.0, 7)):
        desk.queue.follow(replace(model, start_s=start_s), desk.policy, 0.5)
        await desk.arrive()
        assert timers[-1].when() - asyncio.get_running_loop().time() == pytest.approx(seconds, abs=0.4)


async def test_a_wait_without_a_ready_replica_wakes_the_model_and_says_what_there_is():
    desk = Desk()
    await desk.arrive()
    assert desk.woken == 0
    for name, state in (("b", "asleep"), ("c", "paused"), ("d", "paused")):
        desk.join(name, state)
    desk.table.lost(desk.replica)
    waits = await desk.arrive()
    assert desk.woken == 1
    desk.queue.release(desk.held.pop())
    assert desk.woken == 2
    at_once = [await desk.arrive(patient=False), await desk.arrive(patient=False, failed=desk.replica)]
    assert "(1 asleep, 2 paused, 1 starting or restarting). Try again" in desk.error(at_once[0])
    assert [bool(desk.error(number)) for number in (*at_once, waits)] == [True, True, False]
    desk.table.set_members("m", {})
    assert "(none running)" in desk.error(await desk.arrive(patient=False))
    desk.queue.drain()
    await desk.settle()
    assert "(none running)" in desk.error(waits)


async def test_a_request_that_all_ready_replicas_failed_does_not_wait_where_it_may_not():
    desk = Desk()
    failed, other = await desk.arrive(patient=False, failed=desk.replica), desk.join("b")
    assert "is ready" in desk.error(failed)
    for _ in range(2 * SLOTS):
        await desk.arrive()
    waits = await desk.arrive(patient=False, failed=desk.replica)
    assert desk.error(waits) == ""
    desk.table.report(other, LoadReport())
    while desk.held:
        await desk.finish()
    assert waits in desk.granted


@pytest.mark.parametrize(
    ("most", "ready", "said"), [(0, True, "is at its limit"), (0, False, "is ready"), (-1, True, "")]
)
async def test_a_queue_without_places_and_one_without_an_end(most: int, ready: bool, said: str):
    desk = Desk(most)
    for _ in range(SLOTS):
        await desk.arrive()
    if not ready:
        desk.table.lost(desk.replica)
    errors = [desk.error(await desk.arrive()) for _ in range(MOST + 1)]
    assert all(said in error if said else not error for error in errors)
    for _, task in desk.arrived:
        task.cancel()


WAITS = RoutingRequest(tokens=1)


class Learning:
    """A policy that lets `WAITS` wait, says what it saves, and notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        picked = len(candidates) and asked is not WAITS
        return Pick(candidates[0], "prefix", saved_tokens=30) if picked else None

    def sent(self, asked: RoutingRequest, replica: Replica, now: float) -> None:
        self.told.append((asked.tokens, replica.id))


async def test_policies_hear_where_requests_went_and_replicas_are_charged_for_what_is_not_cached():
    desk = Desk()
    desk.queue.follow(desk.model, learning := Learning(), 30.0)
    for tokens in (100, 20, 50, 40):
        await desk.arrive(asked=RoutingRequest(tokens=tokens))
    assert (learning.told, desk.replica.sent_tokens) == ([(100, "a"), (20, "a"), (50, "a")], 70 + 0 + 20)
    await desk.finish()  # what waited is charged in full
    assert (learning.told[3:], desk.replica.sent_tokens) == ([(40, "a")], 20 + 40)
    for why, count in (("prefix", SLOTS), ("queue", 1)):
        assert f'penstock_picks_total{{model="m",outcome="{why}"}} {count}.0' in desk.metrics.text().decode()
