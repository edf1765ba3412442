"""Who runs when many batches want to: turns, and shares of the replicas' slots."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest
from interleaving import Start, disturbed, ended

from penstock.jobs.turns import Claim, Standing, TurnQueue, share

pytestmark = pytest.mark.parity("X2")

DAY_S = 86_400.0


def standing(name: str, *, left: int = 1000, window_s: float = DAY_S, age_s: float = 0.0) -> Standing:
    created = time.time() - age_s
    return Standing(name, created, created + window_s, left=left)


@dataclass
class Simulated:
    """A batch whose rows take `row_tokens` steps of a slot each."""

    standing: Standing
    row_tokens: int
    in_flight: int = 0
    worked: int = 0

    def step(self) -> None:
        """One step of all its slots."""
        self.worked += self.in_flight
        while self.worked >= self.row_tokens and self.in_flight:
            self.worked -= self.row_tokens
            self.in_flight -= 1
            self.standing.advance(1, self.row_tokens, max(0, self.standing.left - 1))


def run(batches: list[Simulated], slots: int, steps: int) -> None:
    """All want slots all the time."""
    for _ in range(steps):
        for mine in batches:
            free = slots - sum(one.in_flight for one in batches)
            others = [Claim(one.standing, one.in_flight) for one in batches if one is not mine]
            taken = share(free, Claim(mine.standing, mine.in_flight), others, time.time())
            assert 0 <= taken <= max(0, free)
            mine.in_flight += taken
        for one in batches:
            one.step()


def test_slots_are_shared_by_tokens_not_by_rows():
    short, long = Simulated(standing("a"), 10), Simulated(standing("b"), 200)
    run([short, long], slots=32, steps=500)
    before = short.standing.tokens, long.standing.tokens
    run([short, long], slots=32, steps=2000)
    gained = short.standing.tokens - before[0], long.standing.tokens - before[1]
    assert gained[0] == pytest.approx(gained[1], rel=0.1)
    assert short.standing.rows > 10 * long.standing.rows


def test_no_slot_is_left_free_while_batches_want_some():
    batches = [Simulated(standing(str(number)), 10 * (number + 1)) for number in range(5)]
    run(batches, slots=64, steps=20)
    free = 64 - sum(one.in_flight for one in batches)
    for mine in batches:
        others = [Claim(one.standing, one.in_flight) for one in batches if one is not mine]
        taken = share(free, Claim(mine.standing, mine.in_flight), others, time.time())
        mine.in_flight, free = mine.in_flight + taken, free - taken
    assert not free


def test_a_batch_at_risk_goes_first_and_the_others_are_not_stopped():
    late, other = standing("late", window_s=100, age_s=80), standing("other")
    assert late.is_at_risk(time.time())
    assert share(10, Claim(late, 0), [Claim(other, 0)], time.time()) == 9
    assert share(10, Claim(other, 0), [Claim(late, 0)], time.time()) == 1
    assert share(10, Claim(other, 1), [Claim(late, 0)], time.time()) == 0


def test_of_batches_at_risk_the_earliest_deadline_goes_first():
    sooner, later = standing("z", window_s=100, age_s=80), standing("a", window_s=200, age_s=150)
    assert share(10, Claim(sooner, 1), [Claim(later, 1)], time.time()) == 10
    assert share(10, Claim(later, 1), [Claim(sooner, 1)], time.time()) == 0


def test_a_batch_is_at_risk_when_its_speed_is_too_low_for_the_time_left():
    batch = standing("a", window_s=1000)
    batch.advance(100, 1000, left=900)
    batch.ran_s = 10.0
    assert not batch.is_at_risk(time.time())  # 90 s of work
    batch.ran_s = 100.0
    assert batch.is_at_risk(time.time())  # 900 s of work


async def test_every_batch_makes_progress_however_many_are_large():
    """Eight large batches, four at a time, and a small one that comes later."""
    clock = [0.0]
    queue = TurnQueue(4, slice_s=30, clock=lambda: clock[0])
    large = [standing(f"large-{number}", left=15_000) for number in range(8)]
    small = standing("small", left=10)
    turns = {one.id: 0 for one in [*large, small]}
    running: dict[str, tuple[Standing, asyncio.Event]] = {}

    async def run_batch(mine: Standing) -> None:
        queue.add(mine)
        while mine.left:
            over = asyncio.Event()
            async with queue.turn(mine, over.set, stopped=False):
                turns[mine.id] += 1
                running[mine.id] = mine, over
                await over.wait()
                del running[mine.id]
        queue.remove(mine.id)

    async def second(count: int) -> None:
        for _ in range(count):
            clock[0] += 1
            for one, over in list(running.values()):
                one.advance(5, 100, left=max(0, one.left - 5))
                if not one.left:
                    over.set()
            queue.look()
            for _ in range(10):
                await asyncio.sleep(0)
            assert len(running) <= 4

    tasks = [asyncio.create_task(run_batch(one)) for one in large]
    await asyncio.sleep(0)
    await second(300)
    assert all(turns[one.id] > 1 for one in large)
    tokens = [one.tokens for one in large]
    assert max(tokens) - min(tokens) <= 2 * 30 * 100, "no more than two turns apart"
    tasks.append(asyncio.create_task(run_batch(small)))
    await second(65)
    assert not small.left, "the four that wait have a turn first, then it has one"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_stopped_batch_does_not_wait_for_its_turn():
    queue = TurnQueue(1)
    first, second, third = (standing(name) for name in "abc")
    async with queue.turn(first, lambda: None, stopped=False):
        waits = asyncio.create_task(_enter(queue, second))
        await asyncio.sleep(0)
        assert not waits.done()
        queue.skip("b")
        await waits
        await _enter(queue, third, stopped=True)
    await _enter(queue, third)


async def _enter(queue: TurnQueue, mine: Standing, *, stopped: bool = False) -> None:
    async with queue.turn(mine, lambda: None, stopped=stopped):
        return


def test_a_turn_is_given_back_wherever_its_batch_ends():
    async def batches(start: Start) -> None:
        queue, running = TurnQueue(1, slice_s=1.0, clock=asyncio.get_running_loop().time), list[str]()

        async def batch(name: str) -> None:
            async with queue.turn(standing(name), lambda: None, stopped=False):
                running.append(name)
                assert len(running) == 1
                try:
                    await asyncio.sleep(2)
                    queue.look()
                finally:
                    running.remove(name)

        tasks = [start(batch(name)) for name in "abc"]
        _, open_ = await asyncio.wait(tasks, timeout=1000)
        assert not open_
        assert sum(isinstance(ended()(task), asyncio.CancelledError) for task in tasks) <= 1
        assert (queue._turns, running) == ({}, [])
        await asyncio.wait_for(batch("d"), 5)

    assert disturbed(batches) >= 5
