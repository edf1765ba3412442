"""Turns of tenants by tokens served: nobody gets more than the share, nobody waits beside a free place."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.serve.tenancy.fairness import Charge, FairLine, StartTag, StartTags, price
from penstock.serve.tenancy.store import UsageStore
from penstock.serve.tenancy.usage import Settlement, UsageRow

pytestmark = pytest.mark.parity("X6")

MOST, ERROR = 100.0, 30.0  # prices of one request: the highest, and how wrong an estimate may be


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 12), st.sampled_from([(1.0, 1.0), (1.0, 3.0), (0.5, 1.0)]))
def test_what_two_get_that_always_wait_differs_by_a_request_and_the_errors_of_open_ones(
    seed: int, slots: int, weights: tuple[float, float]
):
    """With long requests of one against short ones of the other, by weights."""
    draw, line = random.Random(seed), FairLine[Charge]()
    weight, longest = dict(zip("ab", weights, strict=True)), {"a": MOST, "b": draw.choice([2.0, MOST])}
    served, open_, truth = Counter[str](), list[Charge](), dict[Charge, float]()

    def come(tenant: str) -> None:
        true = draw.uniform(1, longest[tenant])
        charge = Charge(tenant, weight[tenant], max(0.0, true + draw.uniform(-ERROR, ERROR)))
        truth[charge] = true
        line.put(charge, charge)

    for _ in range(3):
        come("a")
        come("b")
    bound = MOST / min(weights) + slots * ERROR / min(weights)
    for _ in range(1500):
        while len(open_) < slots:
            turn = line.first()
            line.take(turn)
            line.discard(turn, turn)
            open_.append(turn)
            served[turn.tenant] += truth[turn] / turn.weight
            come(turn.tenant)
            assert abs(served["a"] - served["b"]) <= bound
        ended = open_.pop(draw.randrange(slots))
        ended.settle(truth[ended])
    assert min(served.values()) > 3 * bound or slots > 4


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("pppptttdse"), st.integers(0, 9)), max_size=120))
def test_one_that_waits_is_always_found_and_it_is_the_least_served_tenants_oldest(
    moves: list[tuple[str, int]],
):
    line, waiting, open_ = FairLine[Charge](), list[Charge](), list[Charge]()
    served, turns = Counter[str](), Counter[str]()

    def lift(tenant: str) -> None:
        others = [served[one.tenant] for one in waiting] or [served[last] for last in lasts[-1:]]
        if tenant not in {one.tenant for one in waiting}:
            served[tenant] = max(served[tenant], min(others, default=0))

    def ended(charge: Charge, cost: float) -> None:
        served[charge.tenant] += cost - charge.price
        charge.settle(cost)

    lasts = list[str]()
    for move, number in moves:
        if move == "p":
            charge = Charge("abcde"[number % 5], 1.0, float(number * number))
            lift(charge.tenant)
            waiting.append(charge)
            line.put(charge, charge)
        elif move == "t" and waiting:
            first = line.first()
            line.take(first)
            line.discard(first, first)
            least, own = min((served[one.tenant], turns[one.tenant]) for one in waiting), first.tenant
            assert (served[own], turns[own]) == least
            assert first is next(one for one in waiting if one.tenant == own)
            waiting.remove(first)
            lasts.append(own)
            served[own], turns[own] = served[own] + first.price, len(lasts)
            open_.append(first)
        elif move == "d" and waiting:
            gone = waiting.pop(number % len(waiting))
            line.discard(gone, gone)
        elif move in "se" and open_:
            ended(open_.pop(number % len(open_)), 0.0 if move == "e" else 50.0)
        assert len(line) == len(waiting)
        assert set(line) == set(waiting)


def test_one_that_comes_goes_next_but_has_saved_nothing_up():
    line = FairLine[Charge]()
    for _ in range(50):
        line.put(flood := Charge("flood", 1.0, 10.0), flood)
    order = ""
    for turn in range(40):
        if turn in (20, 30):  # it comes when the other has had 20 turns, with 5 requests at once
            for _ in range(5):
                line.put(late := Charge("late", 1.0, 10.0), late)
        first = line.first()
        line.take(first)
        line.discard(first, first)
        order += first.tenant[0]
    assert order == "f" * 20 + "lf" * 10


def test_requests_that_need_not_wait_count_too_and_others_cost_their_model_alone():
    line, other = FairLine[Charge](), FairLine[Charge]()
    at_once = Charge("a", 1.0, 10.0)
    for charge in (Charge("a", 1.0, 10.0), Charge("a", 1.0, 10.0), at_once):
        line.take(charge)
    for tenant in "aabb":
        line.put(one := Charge(tenant, 1.0, 1.0), one)
    assert line.first().tenant == "b"  # lifted to the other one, which has had the last turn
    other.take(at_once)  # which did not answer: another model does
    other.take(at_once)
    assert other._accounts["a"].served == 10
    assert line._accounts["a"].served == 20


def test_a_list_of_places_stays_short_whoever_comes_and_leaves():
    line = FairLine[Charge]()
    line.put(stays := Charge("a", 1.0, 1.0), stays)
    for number in range(5_000):
        line.put(goes := Charge(f"t{number % 3}", 1.0, 1.0), goes)
        line.discard(goes, goes)
    assert len(line._heap) < 100
    assert line.first() is stays


def test_an_engine_that_takes_lower_numbers_first_serves_tenants_alike():
    """It has eight seats. One tenant sends 200 requests at once; another, later, one at a time."""
    tags, waiting, order = StartTags(), list[tuple[int, int, StartTag]](), ""
    running = deque[StartTag]()

    def come(tenant: str, count: int) -> None:
        for _ in range(count):
            tag = tags.tag(tenant, 10.0)
            heapq.heappush(waiting, (tag.number, next(numbers), tag))

    numbers = itertools.count()
    come("flood", 200)
    for turn in range(100):
        while len(running) < 8:
            tag = heapq.heappop(waiting)[-1]
            running.append(tag)
            tag.began()
            order += tag.tenant[0]
            if tag.tenant == "light":
                come("light", 1)
        running.popleft()
        if turn == 20:
            come("light", 1)
        if turn == 30:
            come("other", 100)
    start = order.index("l")
    assert order.index("l") <= 30
    assert order.index("o") <= order.index("l", start) + 14
    rest = Counter(order[order.index("o") :])
    assert max(rest.values()) - min(rest.values()) <= 2
    assert tags.now == waiting[0][0]


def test_requests_that_an_engine_never_began_cost_nothing_and_hold_up_nobody():
    tags = StartTags()
    flood = [tags.tag("flood", 10.0) for _ in range(50)]
    for tag in flood[20:]:
        tag.ended(lambda: False)
        tag.ended(lambda: False)
    assert tags.tag("light", 10.0).number == 0  # not behind those that are still there
    assert tags.tag("flood", 10.0).number == 200
    flood[0].began()
    flood[0].ended(lambda: False)
    flood[1].ended(lambda: True)
    assert tags.tag("flood", 10.0).number == 210


def test_cached_tokens_cost_less_and_an_answers_more():
    assert price(1000, 900, 50) == pytest.approx(100 + 90 + 100)


def test_what_another_gateway_serves_counts_while_a_tenant_waits_here_too():
    line, order = FairLine[Charge](), ""
    line.add("b", 1000.0)  # it does not wait here, so it owes nothing when it comes
    for tenant in "ab" * 20:
        line.put(one := Charge(tenant, 1.0, 10.0), one)
    for turn in range(20):
        if turn == 10:
            line.add("b", 40.0)
        first = line.first()
        line.take(first)
        line.discard(first, first)
        order += first.tenant
    assert order == "ab" * 5 + "aaaa" + "ba" * 3


def test_control_tells_each_gateway_once_what_the_others_have_served(tmp_path: Path):
    store, found = UsageStore(tmp_path / "a.sqlite"), Counter[str]()
    key = (500_000, "a", "k", "m", "", "default")
    for number in range(1, 4):
        for source in ("p", "q", "r"):
            row = UsageRow(1, 100, 50, 10)
            for _ in range(2):  # its answer was lost
                told = store.settle(Settlement(source, number, [(key, row)])).served
                assert all(one[:3] == ("m", "default", "a") for one in told)
                found[source] += round(sum(one[3] for one in told) / price(100, 50, 10))
    assert found == {"p": 4, "q": 4, "r": 4}  # of the last round they hear later
    store.settle(Settlement("batch", 1, [(key, UsageRow(1, 100))], is_gateway=False))
    store.close()
