"""Requests to an engine that is paused or asleep, and facts of a sleep for any engine that has it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from pathlib import Path

import pytest
from enginetest import MODEL_ID, Served
from tests.waiting import until

from penstock.engine import Delta
from penstock.engine_control import EngineControl
from penstock.engines.vllm.engine import VLLMEngine
from penstock.errors import Unsupported

LIMIT_S = 30
QUESTION = "What is Penstock?"
ARGUMENTS = {"collective_rpc": ("x",), "update_weights": (Path("/"), "v1")}
LONG = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}
TURNS = 50
"""More than the steps of a short answer."""
ANSWER_S = 0.3
"""More than a short answer takes, of an engine that cannot be asked between two steps."""


async def answer(served: Served, prompt: str = QUESTION, **params: object) -> list[Delta]:
    params = {"temperature": 0, "max_tokens": 12} | params
    return [delta async for delta in served.engine.generate(prompt, params)]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def begun(served: Served, **params: object) -> tuple[asyncio.Task[list[Delta]], asyncio.Event]:
    """A request that has made tokens, and an event that is set at each further one."""
    more, first = asyncio.Event(), asyncio.Event()

    async def read() -> list[Delta]:
        deltas = []
        async with aclosing(served.engine.generate(QUESTION, LONG | params)) as stream:
            async for delta in stream:
                deltas.append(delta)
                first.set()
                more.set()
        return deltas

    task = asyncio.create_task(read())
    await first.wait()
    return task, more


async def turns(served: Served) -> None:
    """Gives vLLM's core, which answers a call between two steps, the turns of a short answer."""
    for _ in range(TURNS):
        await served.engine.control.collective_rpc("check_health")


async def settled(served: Served, more: asyncio.Event) -> None:
    """Returns when the tokens that were on their way have come. more: set at each."""
    if isinstance(served.engine, VLLMEngine):
        await turns(served)
    else:
        with suppress(TimeoutError):
            while True:
                more.clear()
                await asyncio.wait_for(more.wait(), ANSWER_S)
    more.clear()


async def waits(served: Served, late: asyncio.Task[list[Delta]], unfinished: int) -> bool:
    """Whether a request that has come, one of so many, gets no answer in time for one."""
    if not served.engine.control.is_sleeping():  # asleep, an engine need not count it
        await until(lambda: served.engine.load().running + served.engine.load().waiting == unfinished)
    if isinstance(served.engine, VLLMEngine) and not served.engine.control.is_sleeping():
        await turns(served)
    else:
        await asyncio.wait({late}, timeout=ANSWER_S)
    return not late.done()


async def needs(served: Served, *operations: str) -> None:
    """Skips where the engine has not all of them, which it must say."""
    kind = type(served.engine.control)
    lacking = [name for name in operations if getattr(kind, name) is getattr(EngineControl, name, None)]
    for name in lacking:
        with pytest.raises(Unsupported, match=f"{kind.__name__} has no operation '{name}'"):
            await getattr(served.engine.control, name)(*ARGUMENTS.get(name, ()))
    if lacking:
        pytest.skip(f"{kind.__name__} has no {', '.join(lacking)}, and says so")


async def what_comes_while_it_sleeps_is_answered_when_it_wakes(served: Served) -> None:
    before = text(await answer(served))
    running, _ = await begun(served)
    await served.engine.control.sleep()
    made = await asyncio.wait_for(running, LIMIT_S)
    assert sum(len(delta.token_ids) for delta in made) > 100  # it has finished before
    assert served.engine.control.is_sleeping()
    late = asyncio.create_task(answer(served))
    body = {"model": MODEL_ID, "prompt": QUESTION, "max_tokens": 12, "temperature": 0}
    asked = asyncio.create_task(served.http.post("/v1/completions", json=body))
    assert await waits(served, late, 2)
    assert not asked.done()
    await served.engine.control.wakeup()
    assert not served.engine.control.is_sleeping()
    assert text(await late) == before
    assert (await asked).json()["choices"][0]["text"] == before


async def asleep_and_paused_it_wakes_paused(served: Served) -> None:
    await served.engine.control.pause()
    await served.engine.control.sleep(level=2)
    await served.engine.control.sleep()  # does nothing
    await served.engine.control.wakeup()
    late = asyncio.create_task(answer(served))
    assert await waits(served, late, 1)
    await served.engine.control.resume()
    assert text(await late)
