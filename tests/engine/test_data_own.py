"""Rows asked of an engine in this process, a real vLLM that they keep full."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from backend_contract import CHAT, COMPLETIONS, EMBEDDINGS, FACTS, row
from borrowed import lent
from enginetest import SEATS, Served, vllm_config

from penstock.data.backends.in_process import InProcessEngine
from penstock.data.backends.protocol import Response
from penstock.data.execution.window import Window
from penstock.data.rows.request import RowRequest

if TYPE_CHECKING:
    from pooling import Pooled

    from penstock.serve import LLMServer

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.parity("D2"),
]


async def over(served: Served | LLMServer) -> InProcessEngine:
    """One whose engine is the started one."""
    with lent(served.engine):
        own = InProcessEngine(vllm_config())
        await own.start()
    return own


@pytest_asyncio.fixture(loop_scope="session")
async def own(demo: Served) -> AsyncIterator[InProcessEngine]:
    own = await over(demo)
    yield own
    await own.stop()


class Watched:
    """The backend of a window, noting what the window does.

    running: requests in the engine's batch, at each look of the window.
    ahead: rows in flight, at each row that is sent, less one for each answer that came when nothing ran: such
    an answer lets the window send one more ahead.
    """

    def __init__(self, backend: InProcessEngine) -> None:
        self._backend = backend
        self._dry = 0
        self.window = Window(self)
        self.running: list[int] = []
        self.ahead: list[int] = []

    def available_slots(self, in_flight: int) -> int:
        self.running.append(self._running())
        return self._backend.available_slots(in_flight)

    async def send(self, request: RowRequest) -> Response:
        self.ahead.append(self.window.in_flight - self._dry)
        answer = await self._backend.send(request)
        self._dry += not self._running()
        return answer

    def _running(self) -> int:
        load = self._backend.load()
        return load.running - load.unseen

    async def start(self) -> None:
        await self._backend.start()

    async def stop(self) -> None:
        await self._backend.stop()


async def test_a_window_fills_every_seat_and_never_sends_much_more(own: InProcessEngine):
    watched = Watched(own)
    rows = [row(prompt=f"{i}", max_tokens=60, ignore_eos=True) for i in range(200)]
    outcomes = await asyncio.gather(*map(watched.window.run, rows))
    assert max(watched.running) == SEATS
    assert max(watched.ahead) <= 2 * SEATS
    assert {outcome.state for outcome in outcomes} == {"ok"}


@pytest.mark.parametrize("fact", [fact for fact in FACTS if fact != "many_rows_get_each_its_own_answer"])
async def test_of_every_backend(own: InProcessEngine, fact: str):
    await FACTS[fact](own, lambda: own.load().running)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_prompt_for_the_engine_stands_in_for_the_bodys(own: InProcessEngine, path: str):
    prompt = pickle.dumps({"prompt_token_ids": [1, 2, 3]})
    answer = await own.send(RowRequest(path=path, body=b'{"max_tokens": 1}', prompt=prompt))
    assert answer.status == 200, answer.body
    assert json.loads(answer.body)["usage"]["prompt_tokens"] == 3


async def test_rows_at_once_keep_their_own_prompts(own: InProcessEngine):
    prompts = [[1 + i] * (3 + i) for i in range(20)]
    requests = [
        RowRequest(
            path=COMPLETIONS, body=b'{"max_tokens": 1}', prompt=pickle.dumps({"prompt_token_ids": prompt})
        )
        for prompt in prompts
    ]
    answers = await asyncio.gather(*map(own.send, requests))
    counts = [json.loads(answer.body)["usage"]["prompt_tokens"] for answer in answers]
    assert counts == [len(prompt) for prompt in prompts]


async def test_a_pooling_model_is_given_more_than_it_is_seen_to_run(embedder: Pooled):
    """What ends within a step is never in its load."""
    watched = Watched(await over(embedder.server))
    most = 0

    async def run(number: int) -> str:
        nonlocal most
        outcome = await watched.window.run(row(EMBEDDINGS, input=f"row {number}"))
        most = max(most, watched.window.in_flight)
        return outcome.state

    async with asyncio.timeout(60):
        while most <= 32:  # until the engine has run dry once
            assert set(await asyncio.gather(*map(run, range(500)))) == {"ok"}
