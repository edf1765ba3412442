"""Batch over replicas of Ray Serve: asked at their own listeners, killed under their rows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from backend_contract import COMPLETIONS, FACTS, REQUESTS, config, expected, long, meaning, row
from ray import serve
from tests.ray.zoo import APP, FAST, LATE, Zoo
from tests.waiting import until

from penstock.data.backends.protocol import Response
from penstock.data.backends.replica_set import ReplicaSet
from penstock.data.execution.window import Window
from penstock.data.rows.request import RowRequest
from penstock.errors import ConfigError, EngineDead
from penstock.serve import build_llm_deployment

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.parity("D4")]


def deploy(replicas: int) -> None:
    """The application `mortal`: its replicas come and go."""
    counted = {"num_replicas": replicas}
    model = config(step_base_ms=5.0).model_copy(update={"deployment_config": counted})
    serve.run(build_llm_deployment(model), name="mortal", route_prefix=None)


def running(fleet: ReplicaSet) -> int:
    """Requests in its engines, as last reported."""
    return sum(member.load().running for member in fleet._replicas.values())


def pids(fleet: ReplicaSet) -> list[int]:
    return [member.hello.pid for member in fleet._replicas.values() if member.ready]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(zoo: Zoo) -> AsyncIterator[ReplicaSet]:
    fleet = ReplicaSet(APP, f"LLMServer:{FAST}")
    await fleet.start()
    yield fleet
    await fleet.stop()


@pytest.mark.parametrize("fact", FACTS)
async def test_of_every_backend(fleet: ReplicaSet, fact: str):
    await FACTS[fact](fleet, lambda: running(fleet))


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_fleet_answers_as_an_own_engine(fleet: ReplicaSet, name: str):
    request = REQUESTS[name]
    assert meaning(await fleet.send(request)) == await expected(request, config())


async def test_a_prompt_for_the_engine_stays_in_its_process(fleet: ReplicaSet):
    assert (await fleet.send(RowRequest(path=COMPLETIONS, body=b"{}", prompt=b"pickled"))).status == 400


async def test_calls_of_start_share_one_look_for_replicas(zoo: Zoo):
    fleet = ReplicaSet(APP, f"LLMServer:{FAST}")
    before = asyncio.all_tasks()
    await asyncio.gather(*(fleet.start() for _ in range(5)))
    looking = [task for task in asyncio.all_tasks() - before if "keep_refreshing" in repr(task.get_coro())]
    await fleet.stop()
    assert len(looking) == 1


async def test_a_window_keeps_a_fleet_full(fleet: ReplicaSet):
    window = Window(fleet, exclusive=False)
    outcomes = await asyncio.gather(*(window.run(row(prompt=f"{i}", max_tokens=20)) for i in range(1000)))
    assert [json.loads(bytes(outcome.body))["choices"][0]["text"] for outcome in outcomes] == [
        str(i) for i in range(1000)
    ]


async def test_what_is_not_there_is_told_with_what_there_is(fleet: ReplicaSet):
    with pytest.raises(ConfigError, match=r"No application 'other' runs on Ray Serve; there are .*'zoo'"):
        await ReplicaSet("other").start()
    with pytest.raises(ConfigError, match=r"has no deployment 'other'; it has .*'LLMServer:m'"):
        await ReplicaSet(APP, "other").start()


async def test_a_deployment_that_is_none_of_ours_is_told(fleet: ReplicaSet):
    with pytest.raises(ConfigError, match="not one of Penstock's"):
        await ReplicaSet(APP, "LLMRouter").start()


async def test_of_several_models_one_must_be_named_and_is_woken_where_it_sleeps(zoo: Zoo):
    with pytest.raises(ConfigError, match="serves 3 models; say with deployment_name"):
        await ReplicaSet(APP).start()
    named = ReplicaSet(APP, f"LLMServer:{LATE}")
    await named.start()
    answer = await named.send(row(prompt="hello"))
    await named.stop()
    assert (answer.status, json.loads(answer.body)["model"]) == (200, LATE)


async def ended(fleet: ReplicaSet, request: RowRequest) -> Response | EngineDead:
    try:
        return await fleet.send(request)
    except EngineDead as error:
        return error


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(serve_url: str) -> AsyncIterator[ReplicaSet]:
    await asyncio.to_thread(deploy, 2)
    two = ReplicaSet("mortal")
    await two.start()
    yield two
    await two.stop()
    await asyncio.to_thread(serve.delete, "mortal")


@pytest_asyncio.fixture(loop_scope="module")
async def mortals(two: ReplicaSet) -> ReplicaSet:
    """Both are there, also when a test before has killed them."""
    await until(lambda: len(pids(two)) == 2, limit_s=60)  # Serve starts those anew that tests have killed
    return two


async def test_rows_are_shared_between_replicas_and_a_killed_one_costs_none(mortals: ReplicaSet):
    asking = [asyncio.create_task(ended(mortals, long())) for _ in range(200)]
    await until(lambda: running(mortals) > 100)
    in_flight = {member.id: member.in_flight for member in mortals._replicas.values()}
    assert min(in_flight.values()) > 50
    killed = pids(mortals)[0]
    os.kill(killed, signal.SIGKILL)
    dead, _ = await asyncio.wait(asking, timeout=60)
    ends = [task.result() for task in dead]
    assert len(ends) == 200
    deaths = [end for end in ends if isinstance(end, EngineDead)]
    assert 50 < len(deaths) < 150
    assert all(end.status == 200 for end in ends if isinstance(end, Response))
    await mortals.start()
    assert killed not in pids(mortals)
    assert {(await mortals.send(row(prompt="x"))).status for _ in deaths} == {200}


async def test_a_window_outlives_the_death_of_all_replicas(mortals: ReplicaSet):
    window = Window(mortals, exclusive=False)
    asked = (row(prompt="x", max_tokens=200, ignore_eos=True, seed=i) for i in range(100))
    rows = [asyncio.create_task(window.run(request)) for request in asked]
    await until(lambda: running(mortals) > 50)
    for pid in pids(mortals):
        os.kill(pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*rows)
    assert {outcome.state for outcome in outcomes} == {"ok"}
    assert max(outcome.deaths for outcome in outcomes) >= 1


async def test_a_replica_that_leaves_ends_its_rows_and_gets_no_more(mortals: ReplicaSet):
    before: set[Any] = set(mortals._replicas)
    asking = [asyncio.create_task(mortals.send(long())) for _ in range(100)]
    await until(lambda: running(mortals) == 100)
    await asyncio.to_thread(deploy, 1)
    assert {(await task).status for task in asking} == {200}
    await until(lambda: len(mortals._ready()) == 1)
    assert (await mortals.send(row(prompt="x"))).status == 200
    assert before
