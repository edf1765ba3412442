"""Which row goes to whom, and when it comes back."""

import asyncio
import hashlib
import itertools
import json
from collections.abc import Iterable

import pytest

from penstock.data.job.prefix import PendingRow, prompt_prefix
from penstock.data.job.protocol import RowCompleted
from penstock.data.job.queue import LOOK_AHEAD_BYTES, Queue
from penstock.data.rows.request import RowRequest


def waiting(number: int, text: str = "", key: str | None = None, model: str | None = None) -> PendingRow:
    body = json.dumps({"messages": [{"role": "user", "content": text or str(number)}]}).encode()
    request = RowRequest(path="/v1/chat/completions", body=body, model=model)
    return PendingRow(number, request, key, 0, prompt_prefix(request))


async def queue(rows: Iterable[PendingRow], *workers: str, **options) -> Queue:
    """Filled to its end."""
    made = Queue(iter(rows), **options)
    for worker in workers:
        made.register(worker)
    await made.read_ahead()
    return made


def taken(found: Queue, worker: str, room: int) -> list[int]:
    return [item.row for item in found.take(worker, room)]


async def test_rows_go_out_in_the_order_of_the_input():
    found = await queue(map(waiting, range(10)), "a")
    assert taken(found, "a", 4) + taken(found, "a", 99) == list(range(10))


async def test_it_is_over_when_every_row_has_ended():
    found = await queue(map(waiting, range(2)), "a")
    found.take("a", 2)
    assert not found.drained
    found.record_completed("a", [RowCompleted(0, "ok"), RowCompleted(1, "failed")])
    assert found.drained


@pytest.mark.parity("X5")
async def test_rows_of_a_dead_worker_go_first_with_one_death_more():
    found = await queue(map(waiting, range(4)), "a", "b")
    assert taken(found, "a", 2) == [0, 1]
    found.record_completed("a", [RowCompleted(0, "ok")])
    assert [row.number for row in found.requeue_crashed("a")] == [1]
    assert [(item.row, item.deaths) for item in found.take("b", 9)] == [(1, 1), (2, 0), (3, 0)]


async def test_rows_of_a_stopped_worker_come_back_without_a_death():
    found = await queue(map(waiting, range(2)), "a", "b")
    found.take("a", 1)
    found.release("a")
    assert [(item.row, item.deaths) for item in found.take("b", 9)] == [(0, 0), (1, 0)]


async def test_an_end_is_counted_once_whoever_tells_it():
    found = await queue(map(waiting, range(2)), "a", "b")
    found.take("a", 1)
    found.requeue_crashed("a")
    found.take("b", 1)
    assert found.record_completed("a", [RowCompleted(0, "ok")]) == []
    assert len(found.record_completed("b", [RowCompleted(0, "ok")])) == 1
    assert found.record_completed("b", [RowCompleted(0, "ok")]) == []


async def test_the_tail_is_shared_evenly():
    found = await queue(map(waiting, range(100)), "a", "b")
    assert len(taken(found, "a", 1000)) == 50
    assert len(taken(found, "b", 1000)) == 50


async def test_a_faster_worker_takes_over_what_a_slow_one_has_not_begun():
    found = await queue(map(waiting, range(100)), "a", "b")
    found.take("a", 20)
    for row in taken(found, "b", 50):
        found.record_completed("b", [RowCompleted(row, "ok")])
    assert len(taken(found, "b", 1000)) == 25


async def test_reading_stops_when_enough_rows_wait():
    numbers = iter(range(10_000))
    found = Queue(map(waiting, numbers), look_ahead=1000)
    found.register("a")
    filling = asyncio.create_task(found.read_ahead())
    while found.waiting < 1000:
        await found.changed()
    assert next(numbers) < 2000
    found.close()
    await filling


async def test_reading_stops_sooner_when_rows_are_large():
    many = (waiting(number, "x" * (1 << 20)) for number in range(300))
    found = Queue(many)
    found.register("a")
    filling = asyncio.create_task(found.read_ahead())
    read = 0
    async with asyncio.timeout(60):  # a row that is lost would be waited for
        while read < 300:
            while not found.waiting:
                await found.changed()
            await asyncio.sleep(0.01)
            assert found.waiting << 20 < LOOK_AHEAD_BYTES + (16 << 20)
            read += len(taken(found, "a", 20))
        await filling


@pytest.mark.parity("X18")
async def test_rows_with_one_beginning_come_one_after_another():
    rows = [waiting(number, "abc"[number % 3] * 400 + str(number)) for number in range(9)]
    found = await queue(rows, "a")
    assert taken(found, "a", 9) == [0, 3, 6, 1, 4, 7, 2, 5, 8]


@pytest.mark.parity("X18")
async def test_each_beginning_goes_to_one_worker():
    rows = [waiting(number, "ab"[number % 2] * 400 + str(number)) for number in range(8)]
    found = await queue(rows, "one", "two")
    first, second = taken(found, "one", 2), taken(found, "two", 2)
    assert first + taken(found, "one", 2) == [0, 2, 4, 6]
    assert second + taken(found, "two", 2) == [1, 3, 5, 7]


@pytest.mark.parity("X18")
async def test_no_worker_idles_because_of_a_beginning():
    rows = [waiting(number, ("b" if number == 8 else "a") * 400 + str(number)) for number in range(9)]
    found = await queue(rows, "one", "two")
    assert taken(found, "one", 2) == [0, 1]
    assert taken(found, "two", 3) == [8, 7, 6]


async def test_a_system_prompt_of_all_rows_makes_no_group():
    rows = [waiting(number, "s" * 900 + str(number) * 300) for number in range(4)]
    found = await queue(rows, "one", "two")
    assert taken(found, "one", 2) == [0, 1]


async def test_beginnings_can_be_left_alone():
    rows = [waiting(number, "ab"[number % 2] * 400 + str(number)) for number in range(4)]
    found = await queue(rows, "a", group=False)
    assert taken(found, "a", 4) == [0, 1, 2, 3]


def adapters(count: int, rows: int) -> list[PendingRow]:
    """Rows that name `count` adapters in turn and have no common beginning."""
    return [
        waiting(number, hashlib.sha256(bytes([number % 256])).hexdigest() * 8, model=f"m:{number % count}")
        for number in range(rows)
    ]


@pytest.mark.parity("X18")
async def test_a_worker_visits_adapters_one_after_another():
    found = await queue(adapters(8, 80), "a")
    visited = [row % 8 for row in taken(found, "a", 80)]
    assert visited == [adapter for adapter in range(8) for _ in range(10)]


@pytest.mark.parity("X18")
async def test_workers_visit_different_adapters_and_help_each_other_at_the_end():
    found = await queue(adapters(3, 60), "one", "two")
    first, second = ({row % 3 for row in taken(found, name, 20)} for name in ("one", "two"))
    assert (first, second) == ({0}, {1})
    assert sorted(taken(found, "one", 10) + taken(found, "two", 10)) == list(range(2, 60, 3))


@pytest.mark.parity("X18")
async def test_adapters_are_visited_in_order_however_long_the_input_is():
    """More rows than are read ahead: an adapter that is visited goes on while more of its rows come."""
    found = Queue(iter(adapters(4, 4000)), look_ahead=1000)
    found.register("a")
    filling = asyncio.create_task(found.read_ahead())
    visited: list[int] = []
    while not found.drained:
        rows = taken(found, "a", 10)
        visited += [row % 4 for row in rows]
        found.record_completed("a", [RowCompleted(row, "ok") for row in rows])
        await asyncio.sleep(0)
        if not rows and not found.drained:
            await found.changed()
    await filling
    changes = sum(one != other for one, other in itertools.pairwise(visited))
    assert len(visited) == 4000
    assert changes <= 40, "instead of 3999"


async def test_rows_that_begin_alike_are_of_one_group():
    rows = [waiting(number, "ab"[number % 2] * 400 + str(number)) for number in range(6)]
    found = await queue(rows, "a")
    groups = [item.request.group for item in found.take("a", 6)]
    assert groups == [1, 1, 1, 2, 2, 2]


def test_rows_of_two_models_never_begin_alike():
    body = b'{"messages": []}'
    one, other = (RowRequest(path="/v1/chat/completions", body=body, model=name) for name in ("m:a", "m:b"))
    assert prompt_prefix(one) != prompt_prefix(other)


@pytest.mark.parity("X20")
async def test_an_identical_request_waits_for_the_first_ones_answer():
    reused: list[tuple[int, int]] = []
    rows = [waiting(0, key="k"), waiting(1, key="k"), waiting(2, key="other")]
    found = await queue(rows, "a", on_reused=lambda *pair: reused.append(pair))
    assert taken(found, "a", 9) == [0, 2]
    found.record_completed("a", [RowCompleted(0, "ok"), RowCompleted(2, "ok")])
    assert reused == [(1, 0)]
    assert found.drained


@pytest.mark.parity("X20")
async def test_after_a_failure_the_next_identical_row_tries_itself():
    reused: list[tuple[int, int]] = []
    rows = [waiting(number, key="k") for number in range(3)]
    found = await queue(rows, "a", on_reused=lambda *pair: reused.append(pair))
    assert taken(found, "a", 9) == [0]
    found.record_completed("a", [RowCompleted(0, "failed")])
    assert taken(found, "a", 9) == [1]
    found.record_completed("a", [RowCompleted(1, "ok")])
    assert reused == [(2, 1)]


async def test_a_queue_that_was_closed_early_is_not_complete():
    found = Queue(map(waiting, range(10_000)))
    found.close()
    await found.read_ahead()
    assert (found.drained, found.complete) == (True, False)


async def test_what_reading_raises_is_kept():
    def rows():
        yield waiting(0)
        raise OSError("gone")

    found = await queue(rows(), "a")
    assert isinstance(found.error, OSError)


async def test_rows_that_wait_for_an_answer_bound_the_reading():
    """As when the first of many identical ones is asked of an engine that still starts."""
    read = 0

    def rows():
        nonlocal read
        for number in range(20_000):
            read += 1
            yield waiting(number, "same", key="same")

    found = Queue(rows(), look_ahead=64)
    found.register("a")
    filling = asyncio.create_task(found.read_ahead())
    found_first = []
    while not found_first:
        found_first = taken(found, "a", 1)
        await asyncio.sleep(0)
    await asyncio.wait({filling}, timeout=0.1)
    assert read < 3000
    found.record_completed("a", [RowCompleted(0, "ok")])
    await filling
    assert (found.complete, read) == (True, 20_000)


async def test_prompts_for_an_engine_count_by_their_bytes():
    rows = [
        PendingRow(n, RowRequest(path="/v1/completions", body=b"{}", prompt=b"x" * (1 << 20)))
        for n in range(200)
    ]
    found = Queue(iter(rows))
    filling = asyncio.create_task(found.read_ahead())
    await asyncio.wait({filling}, timeout=0.1)
    assert found.waiting <= 80
    found.close()
    await filling


async def test_a_row_that_died_with_an_engine_goes_to_another_one():
    """An engine that only dies would make poison of rows that nothing is wrong with."""
    found = await queue(map(waiting, range(4)))
    found.register("a-1", "a")
    found.register("b-1", "b")
    assert taken(found, "a-1", 1) == [0]
    found.requeue_crashed("a-1")
    found.register("a-2", "a")
    assert taken(found, "a-2", 1) == [1]
    assert taken(found, "b-1", 1) == [0]
    found.requeue_crashed("b-1")
    assert sorted(taken(found, "a-2", 9)) == [0, 2, 3]


async def test_rows_that_are_read_no_more_are_let_go():
    """Their files and threads end with the reading, not when somebody forgets them."""
    let_go = []

    def rows():
        try:
            yield from map(waiting, range(10_000))
        finally:
            let_go.append(True)

    queue = Queue(rows(), look_ahead=10)
    filling = asyncio.create_task(queue.read_ahead())
    await queue.changed()
    queue.close()
    await filling
    assert let_go
