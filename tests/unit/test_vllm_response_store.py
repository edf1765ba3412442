"""The store of Responses, in front of a handler that stores as vLLM's does. Nothing is generated."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from penstock.engines.vllm.frontend import response_store
from penstock.engines.vllm.frontend.response_store import BoundedStore, keep_responses


class Serving:
    """vLLM's handler, as far as the store knows it. Inputs name what becomes of their requests."""

    tool_server = None
    use_harmony = False

    def __init__(self) -> None:
        self.response_store: dict[str, Any] = {}
        self.msg_store: dict[str, Any] = {}
        self.event_store: dict[str, Any] = {}
        self.background_tasks: dict[str, Any] = {}
        self.slow = asyncio.Event()

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        if request.input == "refused":
            return "an error"
        self.msg_store[request.request_id] = request.input
        return await self.responses_full_generator(request, None, None, None)

    async def responses_full_generator(self, request: Any, *args: Any) -> Any:
        if request.input == "slow":
            await self.slow.wait()
        if request.input == "failing":
            raise RuntimeError("failed")
        item = SimpleNamespace(type="message", model_dump=lambda **_: {"id": "a", "type": "message"})
        made = SimpleNamespace(id=request.request_id, output=[item], status="completed")
        self.response_store[request.request_id] = made
        return made

    responses_stream_generator = responses_background_stream_generator = retrieve_responses = None


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(response_store, "MOST_RESPONSES", 3)
    return Serving()


def kept(serving: Any) -> BoundedStore:
    state = SimpleNamespace(openai_serving_responses=serving)
    keep_responses(state)
    return state.penstock_responses


async def create(serving: Any, text: str, before: str | None = None) -> Any:
    return await serving.create_responses(ResponsesRequest(input=text, previous_response_id=before))


async def test_requests_that_fail_make_none_of_the_stored_responses_go(serving: Any):
    kept(serving)
    stored = [(await create(serving, "good")).id for _ in range(3)]
    for _ in range(3):
        assert await create(serving, "refused") == "an error"
        with pytest.raises(RuntimeError, match="failed"):
            await create(serving, "failing")
        given_up = asyncio.create_task(create(serving, "slow"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait({given_up})
    assert list(serving.response_store) == list(serving.msg_store) == stored


async def test_a_response_that_had_to_make_room_before_it_was_there_is_not_kept_for_ever(serving: Any):
    kept(serving)
    slow = asyncio.create_task(create(serving, "slow"))
    await asyncio.sleep(0)
    stored = [(await create(serving, "good")).id for _ in range(3)]
    serving.slow.set()
    assert (await slow).status == "completed"
    assert set(serving.response_store) == set(serving.msg_store) == {*stored[1:], (await slow).id}


async def test_a_conversation_of_many_turns_has_its_input_items(
    serving: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(response_store, "MOST_RESPONSES", 2000)
    monkeypatch.setattr(response_store.response_items, "plain", lambda item: {"id": "answer"})
    store, before = kept(serving), None
    for _ in range(1500):
        before = (await create(serving, "good", before)).id
    assert before is not None
    assert len(store.input_items(before, None, 100, "asc")["data"]) == 100
