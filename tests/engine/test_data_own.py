"""An engine in this process, asked by rows: a real vLLM, kept full, killed, made anew."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from importlib.util import find_spec

import psutil
import pytest
import pytest_asyncio
from backend_contract import CHAT, COMPLETIONS, EMBEDDINGS, FACTS, row, until
from enginetest import vllm_config
from models import model

from penstock.data.backends.own import OwnEngine
from penstock.data.request import Request
from penstock.data.window import Window
from penstock.errors import EngineDead

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.parity("D2"),
]

SEATS = 32


def long(**more: object) -> Request:
    return row(prompt="water", max_tokens=1500, ignore_eos=True, **more)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def own() -> AsyncIterator[OwnEngine]:
    own = OwnEngine(vllm_config(max_num_seqs=SEATS, kv_cache_memory_bytes=1 << 27))
    await own.start()
    yield own
    await own.stop()


async def test_a_window_fills_every_seat_and_never_sends_much_more(own: OwnEngine):
    """The first of all, for others teach it of its load."""
    window = Window(own)
    rows = [
        asyncio.create_task(window.run(row(prompt=f"{i}", max_tokens=60, ignore_eos=True)))
        for i in range(200)
    ]
    seen: list[tuple[int, int]] = []
    while not all(task.done() for task in rows):
        load = own.load()
        seen.append((load.running - load.unseen, window.in_flight))
        await asyncio.sleep(0.005)
    assert max(running for running, _ in seen) == SEATS
    assert max(in_flight for _, in_flight in seen) <= 2 * SEATS
    assert {task.result().state for task in rows} == {"ok"}


@pytest.mark.parametrize("fact", [fact for fact in FACTS if fact != "many_rows_get_each_its_own_answer"])
async def test_of_every_backend(own: OwnEngine, fact: str):
    await FACTS[fact](own)


async def test_a_row_is_answered_with_counts_of_cached_tokens(own: OwnEngine):
    answer = await own.ask(row(CHAT, messages=[{"role": "user", "content": "What is Penstock?"}]))
    assert answer.status == 200
    assert json.loads(answer.body)["usage"]["prompt_tokens_details"] is not None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_prompt_for_the_engine_stands_in_for_the_bodys(own: OwnEngine, path: str):
    prompt = pickle.dumps({"prompt_token_ids": [1, 2, 3]})
    answer = await own.ask(Request(path=path, body=b'{"max_tokens": 1}', prompt=prompt))
    assert answer.status == 200, answer.body
    assert json.loads(answer.body)["usage"]["prompt_tokens"] == 3


async def test_rows_at_once_keep_their_own_prompts(own: OwnEngine):
    prompts = [[1 + i] * (3 + i) for i in range(20)]
    requests = [
        Request(
            path=COMPLETIONS, body=b'{"max_tokens": 1}', prompt=pickle.dumps({"prompt_token_ids": prompt})
        )
        for prompt in prompts
    ]
    answers = await asyncio.gather(*map(own.ask, requests))
    counts = [json.loads(answer.body)["usage"]["prompt_tokens"] for answer in answers]
    assert counts == [len(prompt) for prompt in prompts]


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"prompt": 5}', b'{"prompt": "x", "temperature": "hot"}'])
async def test_a_bad_row_is_an_answer_with_400(own: OwnEngine, body: bytes):
    answer = await own.ask(Request(path=COMPLETIONS, body=body))
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["message"]


def cores() -> Iterator[psutil.Process]:
    for child in psutil.Process().children():
        with suppress(psutil.ZombieProcess):  # one that another test has killed
            if "penstock.engines.vllm.core" in child.cmdline():
                yield child


async def test_a_killed_core_ends_its_rows_and_start_makes_another(own: OwnEngine):
    asking = [asyncio.create_task(own.ask(long())) for _ in range(20)]
    await until(lambda: own.load().running - own.load().unseen == 20)
    max(cores(), key=psutil.Process.create_time).kill()  # engines of other files are older
    ended, open_ = await asyncio.wait(asking, timeout=10)
    assert not open_
    assert {type(task.exception()) for task in ended} == {EngineDead}
    await own.start()
    assert (await own.ask(row(prompt="water", max_tokens=2))).status == 200


async def test_a_pooling_model_is_given_more_than_it_is_seen_to_run():
    """What ends within a step is never in its load."""
    own = OwnEngine(vllm_config(str(model("embedder")), max_model_len=128))
    await own.start()
    window = Window(own)
    most = 0

    async def ask(number: int) -> str:
        nonlocal most
        outcome = await window.run(row(EMBEDDINGS, input=f"row {number}"))
        most = max(most, window.in_flight)
        return outcome.state

    states = await asyncio.gather(*map(ask, range(2000)))
    await own.stop()
    assert set(states) == {"ok"}
    assert most > 32
