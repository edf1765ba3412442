"""Batch's share of a replica, on a clock of its own: who runs, who waits, who gives way."""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.config import LLMConfig
from penstock.engine import Load, p99_lately
from penstock.errors import ConfigError
from penstock.serve.replica.tiers.controller import TICK_S, Controller, Sample, Targets, targets
from penstock.serve.replica.tiers.share import BatchRequest, BatchShare

pytestmark = pytest.mark.parity("X1")


@dataclass
class Engine:
    """A replica's engine by its figures, and the requests that its share has started."""

    load: Load = field(default_factory=lambda: Load(seats=64, step_s=0.01))
    now: float = 100.0
    started: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def share(self, given: Targets | None = None) -> BatchShare:
        return BatchShare(lambda: self.load, given or Targets(itl_s=0.02), lambda: self.now)

    def row(self, name: str) -> BatchRequest:
        def abort() -> bool:
            self.aborted.append(name)
            return True

        return BatchRequest(lambda: self.started.append(name), abort)

    def ticks(self, share: BatchShare, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            share.tick()


def full(engine: Engine, share: BatchShare, rows: int = 200) -> list[BatchRequest]:
    """A share that has run batch alone for a minute."""
    made = [engine.row(f"r{number}") for number in range(rows)]
    for row in made:
        share.enter(row)
    engine.ticks(share, 60)
    return made


def test_alone_batch_fills_the_engine_and_a_few_more_wait_in_it():
    engine = Engine()
    share = engine.share()
    full(engine, share)
    assert 64 < share.running <= 64 + 4
    assert engine.started[:3] == ["r0", "r1", "r2"]
    assert share.running + share.waiting == 200


def test_what_waits_does_so_outside_the_engine():
    engine = Engine(Load(seats=2, running=2))
    share = engine.share()
    full(engine, share, 10)
    assert (share.running, share.waiting) == (4, 6)


def test_online_finds_free_seats_while_it_is_there():
    engine = Engine()
    share = engine.share()
    full(engine, share, 500)
    for _ in range(20):
        share.online_began()
    for row in list(share._running):
        share.leave(row)
    engine.ticks(share, 60)
    assert 30 < share.running <= 64 - 20 - 4


def test_an_online_request_that_finds_no_seat_takes_that_of_the_youngest():
    engine = Engine()
    share = engine.share()
    made = full(engine, share)
    for row in made[:30]:
        share.leave(row)
    assert share.running > 64
    share.online_began()
    assert engine.aborted == engine.started[-1:]
    assert share.requeued == 1


def beside_online(engine: Engine) -> BatchShare:
    """A share in which the first of many rows has just started beside an online request."""
    share = engine.share()
    share.online_began()
    share.tick()
    for number in range(50):
        share.enter(engine.row(f"r{number}"))
    assert engine.started == ["r0"]
    return share


def test_an_online_request_that_has_come_is_prefilled_without_a_row():
    engine = Engine()
    share = beside_online(engine)
    engine.now += 0.003  # a long step takes 10 ms
    share.online_began()
    share.tick()
    assert engine.started == ["r0"]
    engine.now += 0.0051
    share.tick()
    assert engine.started == ["r0", "r1"]


def test_rows_start_however_many_online_requests_come():
    engine = Engine()
    share = beside_online(engine)
    for _ in range(100):
        engine.now += 0.001
        share.online_began()
        for row in [*share._running]:
            share.leave(row)
        share.tick()
        share.online_ended()
    assert len(engine.started) >= 9  # one in each long step


def test_nothing_is_aborted_before_enough_was_done():
    engine = Engine()
    share = engine.share()
    full(engine, share)
    share.online_began()
    engine.ticks(share, 1)
    assert engine.aborted == []


def test_all_lost_work_stays_below_a_twentieth_of_what_was_done():
    engine = Engine()
    share = engine.share()
    done_s = 0.0
    made = {f"r{number}": engine.row(f"r{number}") for number in range(3000)}
    for row in made.values():
        share.enter(row)
    for second in range(200):
        engine.load = replace(engine.load, step_s=0.01 if second % 4 else 0.05)
        if second % 8 == 4:
            share.online_began()
        if second % 8 == 6:
            share.online_ended()
        for name in [name for name, row in made.items() if row in share._running][: share.running // 4]:
            done_s += engine.now - made[name].since
            share.leave(made.pop(name))
        engine.ticks(share, 1)
    assert share.requeued > 0
    assert share._lost_s <= 0.05 * share._done_s
    assert share._done_s == pytest.approx(done_s)


def test_an_aborted_row_goes_before_those_that_wait():
    engine = Engine()
    share = engine.share()
    full(engine, share)
    again = engine.row("again")
    share.enter(again, again=True)
    assert share._waiting[0] is again


def tick(controller: Controller, now: float, **seen: object) -> None:
    sample = Sample(1, controller.limit, True, 0.0, Load(seats=256, step_s=0.01))
    controller.tick(replace(sample, **seen), now)


def grown(controller: Controller, until: int = 50) -> float:
    now = 0.0
    while controller.limit < until:
        assert now < 100
        now += TICK_S
        tick(controller, now)
    return now


def test_the_limit_grows_while_online_is_well_and_is_cut_when_it_is_not():
    controller = Controller(Targets(ttft_s=0.1, itl_s=0.02))
    now = grown(controller)
    tick(controller, now + 1, load=Load(seats=256, step_s=0.03))
    assert controller.limit == 40
    assert controller.gives_way


def test_one_cut_is_seen_before_the_next():
    controller = Controller(Targets(ttft_s=0.1))
    now = grown(controller)
    tick(controller, now + 1, ttft_s=0.2)
    tick(controller, now + 1.1, ttft_s=0.2, batch=40)
    assert controller.limit == 40
    tick(controller, now + 1.6, ttft_s=0.2, batch=40)
    assert controller.limit == 32


def test_the_limit_does_not_grow_for_nobody():
    controller = Controller(Targets(ttft_s=0.1))
    now = grown(controller)
    for _ in range(100):
        tick(controller, now, batch=10)
    assert controller.limit == 50


def test_a_full_cache_is_not_well():
    controller = Controller(Targets())
    now = grown(controller)
    tick(controller, now + 1, load=Load(seats=256, kv_usage=0.95))
    assert controller.limit == 40


def test_without_targets_online_is_held_to_what_it_takes_alone():
    controller = Controller(Targets())
    for _ in range(10):
        controller.learn(0.05, 0.01)
    now = grown(controller, 20)  # steps of 10 ms are those that it takes alone
    tick(controller, now + 1, load=Load(seats=256, step_s=0.0106))
    assert (controller.limit, controller.gives_way) == (20, False)
    tick(controller, now + 2, load=Load(seats=256, step_s=0.0111))
    assert (controller.limit, controller.gives_way) == (16, True)


def test_the_least_share_stays_whatever_online_takes():
    controller = Controller(Targets(ttft_s=0.1, min_share=0.25))
    for at in range(100):
        tick(controller, float(at), ttft_s=9.0)
    assert controller.limit == 64


def test_when_online_comes_back_its_old_limit_does_too():
    controller = Controller(Targets(ttft_s=0.1))
    now = grown(controller)
    for _ in range(250):
        now += TICK_S
        tick(controller, now, online=0)
    known = controller.limit
    for _ in range(250):
        now += TICK_S
        tick(controller, now, online=0)
    assert controller.limit > 200
    tick(controller, now + TICK_S)
    assert controller.limit <= known + 1
    assert controller.gives_way


def test_targets_are_those_of_the_config():
    config = LLMConfig(
        model_loading_config={"model_id": "m"},
        llm_engine="sim",
        slo={"ttft_ms": 200, "itl_ms": 25},
        batch={"min_share": 0.1},
    )
    assert targets(config) == Targets(0.2, 0.025, 0.1)


@pytest.mark.parametrize("field", [{"slo": {"itl_ms": 25}}, {"batch": {"min_share": 0.1}}])
def test_limits_of_what_an_engine_does_not_report_are_refused(field: dict[str, Any]):
    with pytest.raises(ConfigError, match="has no effect with the engine 'sglang'"):
        LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sglang", **field)
    LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sglang", slo={"ttft_ms": 200})


@pytest.mark.parametrize(("often", "reported"), [(50, 0.03), (200, 0.01)])
def test_what_is_reported_of_steps_is_longer_than_ninety_nine_of_a_hundred(often: int, reported: float):
    known = 0.0
    for number in range(20_000):
        known = p99_lately(known, 0.03 if number % often == 0 else 0.01)
    assert known == pytest.approx(reported, rel=0.1)


class AnyOrder(RuleBasedStateMachine):
    """Online requests and rows that come, end, give way and go again, in any order and under any load."""

    gave_way = 0
    """Rows of all runs."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.load = Load(seats=16, step_s=0.01)
        self.share = BatchShare(lambda: self.load, Targets(0.1, 0.02), lambda: self.now)
        self.online = 0
        self.waiting: deque[BatchRequest] = deque()
        self.running: dict[BatchRequest, float] = {}
        self.aborted: list[BatchRequest] = []
        self.begun: set[BatchRequest] = set()
        self.done_s = self.lost_s = 0.0

    def enters(self, again: bool) -> None:
        def start() -> None:
            assert self.waiting.popleft() is row  # each once, in their order
            self.running[row] = self.now
            assert len(self.running) <= self.share.limit
            assert not self.online or self.online + len(self.running) <= self.load.seats

        def abort() -> bool:
            if row in self.begun:
                return False
            self.lost_s += self.now - self.running.pop(row)
            assert self.lost_s <= 0.05 * self.done_s + 1e-9
            self.aborted.append(row)
            AnyOrder.gave_way += 1
            return True

        row = BatchRequest(start, abort)
        (self.waiting.appendleft if again else self.waiting.append)(row)
        self.share.enter(row, again)

    def leaves(self, row: BatchRequest) -> None:
        if row in self.running:
            self.done_s += self.now - self.running.pop(row)
        elif row in self.waiting:
            self.waiting.remove(row)
        self.share.leave(row)

    @initialize()
    def batch_has_run_alone(self) -> None:
        self.rows_come(60)
        self.time_passes(100, 0.01, 0.1, 0)
        for row in [*self.running]:
            self.leaves(row)

    @rule(rows=st.integers(1, 30))
    def rows_come(self, rows: int) -> None:
        for _ in range(rows):
            self.enters(again=False)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def rows_end(self, data: st.DataObject) -> None:
        for row in data.draw(st.lists(st.sampled_from([*self.running]), min_size=1, unique=True)):
            self.leaves(row)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_client_goes(self, data: st.DataObject) -> None:
        self.leaves(data.draw(st.sampled_from([*self.waiting])))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_stream_begins(self, data: st.DataObject) -> None:
        self.begun.add(data.draw(st.sampled_from([*self.running])))

    @precondition(lambda self: self.aborted)
    @rule()
    def aborted_rows_go_again(self) -> None:
        while self.aborted:
            self.leaves(self.aborted.pop())
            self.enters(again=True)

    @rule()
    def online_comes(self) -> None:
        self.online += 1
        self.share.online_began()

    @precondition(lambda self: self.online)
    @rule(ttft_s=st.floats(0.001, 1.0))
    def online_ends(self, ttft_s: float) -> None:
        self.share.first_token(ttft_s)
        self.online -= 1
        self.share.online_ended()

    @rule(
        ticks=st.sampled_from([1, 10, 50, 100, 1000]),
        step_s=st.sampled_from([0.005, 0.01, 0.01, 0.03]),
        kv_usage=st.sampled_from([0.1, 0.1, 0.95]),
        over=st.integers(0, 8),
    )
    def time_passes(self, ticks: int, step_s: float, kv_usage: float, over: int) -> None:
        for _ in range(ticks):
            self.now += TICK_S
            running = min(16, self.online + len(self.running))
            self.load = Load(running, over, 0, kv_usage, 0, step_s, 16)
            self.share.tick()

    @invariant()
    def nobody_is_lost(self) -> None:
        assert (self.share.waiting, self.share.running) == (len(self.waiting), len(self.running))

    def teardown(self) -> None:
        """Without online requests, all that wait get their turn."""
        while self.online:
            self.online_ends(0.01)
        self.begun.clear()
        for _ in range(3000):
            if self.share.idle and not self.aborted:
                return
            if self.aborted:
                self.aborted_rows_go_again()
            for row in [*self.running][:1]:
                self.leaves(row)
            self.time_passes(1, 0.01, 0.1, 0)
        raise AssertionError("rows wait for ever")


def test_in_any_order_each_row_starts_once_within_the_limit_and_little_work_is_lost():
    run_state_machine_as_test(AnyOrder, settings=settings(stateful_step_count=80))
    assert AnyOrder.gave_way > 50
