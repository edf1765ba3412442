"""A bounded store for vLLM's Responses endpoint, with ids that name the replica.

vLLM's own store is off unless an environment variable is set, and then grows without limit. Here it is on, as
OpenAI's clients expect, and the oldest responses are evicted. A response's status, its last item and the last
event of its streams and replays say alike how it ended: vLLM ends all streams with `response.completed`.
Importing this file imports vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse
from openai.types.responses import ResponseOutputItemDoneEvent
from vllm.entrypoints.openai.responses.protocol import (
    ResponseCompletedEvent,
    ResponsesRequest,
)
from vllm.exceptions import VLLMValidationError

from penstock.engines.vllm.continued import answer
from penstock.engines.vllm.frontend import structured_output
from penstock.openai import response_items
from penstock.openai.response_items import item_number, new_id, response_of
from penstock.request_context import current_replica, response_id

MOST_RESPONSES = 1000
MOST_BYTES = 256 << 20
"""Of request bodies: most of a stored response is its conversation, images included."""


_ITEMS = 100  # of one page, as OpenAI's
_UNIQUE = 8  # hexadecimal digits of an item's id, beside those of its response
_UNKNOWN: tuple[str | None, list[response_items.Item], int] = (None, [], 0)


def name_items() -> None:
    """Makes the ids of output items name their response, by which references to them are resolved."""
    from vllm.entrypoints.openai.responses import harmony, streaming_events, utils

    modules: tuple[Any, ...] = (harmony, streaming_events, utils)
    for module in modules:
        module.random_uuid = _item_number


def _item_number() -> str:
    of, unique = response_id.get(), answer.unique()
    return item_number(of, unique[:_UNIQUE]) if of else unique


_STATUSES: dict[str, Any] = {"length": "incomplete", "repetition": "incomplete", "abort": "cancelled"}
"""Status of a response by vLLM's reason for the end of its generation; all others complete it."""

_EVENTS = {"completed": "response.completed", "incomplete": "response.incomplete"}
"""Last event of a stream by the response's status; `response.failed` for all others."""


class _Ended(ResponseCompletedEvent):
    type: Any  # one of three


def keep_responses(state: Any) -> None:
    """Installs the store in the Responses endpoint of vLLM's app, when the model has that endpoint."""
    serving = getattr(state, "openai_serving_responses", None)
    state.penstock_responses = store = BoundedStore(serving) if serving is not None else None
    if store is not None:
        _tell_ends(serving, store)


def add_calls(app: FastAPI) -> None:
    """Adds the calls of OpenAI's API that vLLM lacks: delete, list input items, count tokens."""
    store: BoundedStore | None = app.state.penstock_responses
    if store is None:
        return

    async def count_input_tokens(request: ResponsesRequest) -> JSONResponse:
        found = await store.count(request)
        if not isinstance(found, int):
            return _error(found)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": found})

    async def delete_response(response_id: str) -> JSONResponse:
        if (error := await store.delete(response_id)) is not None:
            return _error(error)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def list_input_items(
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=_ITEMS)] = 20,
        order: response_items.Order = "desc",
    ) -> JSONResponse:
        found = store.input_items(response_id, after, limit, order)
        return JSONResponse(found) if isinstance(found, dict) else _error(found)

    app.post("/v1/responses/input_tokens")(count_input_tokens)
    app.delete("/v1/responses/{response_id}")(delete_response)
    app.get("/v1/responses/{response_id}/input_items")(list_input_items)


def _error(found: Any) -> JSONResponse:
    """vLLM's own error response."""
    return JSONResponse(found.model_dump(mode="json", by_alias=True), status_code=found.error.code)


class BoundedStore:
    """Wraps one handler's `create_responses`. Errors are vLLM's `ErrorResponse`."""

    def __init__(self, serving: Any) -> None:
        self._serving = serving
        self._create, self._retrieve = serving.create_responses, serving.retrieve_responses
        self._sizes: dict[str, int] = {}  # of stored responses
        self._inputs: dict[str, tuple[str | None, list[response_items.Item], int]] = {}
        """Of each response that is stored, or will be: the one before it, its own input items, its size."""
        self._bytes = 0
        serving.enable_store = True
        serving.create_responses, serving.retrieve_responses = self.create, self.retrieve

    async def create(self, request: Any, raw_request: Any = None) -> Any:
        """Always sets our own id: a client's could overwrite another's response."""
        if request.stream or request.background:
            # vLLM checks it only after the response has begun.
            structured_output.verify(self._serving, request)
        if request.background or request.previous_response_id or self._serving.tool_server is not None:
            answer.count()
        request.request_id = response_id.get() or new_id(current_replica.get())
        if (error := self._resolve(request)) is not None:
            return error
        if request.store:
            sent = response_items.items(request.input, request.request_id)
            self._inputs[request.request_id] = request.previous_response_id, sent, _size(raw_request)
        self._recall(request)
        made = None
        try:
            made = await self._create(request, raw_request)
            return made
        finally:
            if not isinstance(made, AsyncGenerator):
                self._settle(request.request_id)

    @contextmanager
    def making(self, request: Any) -> Generator[None]:
        """Around the making of a response: sets the status of a stored one where that raises."""
        try:
            yield
        except Exception:
            stored = self._serving.response_store.get(request.request_id)
            if stored is not None and stored.status in ("queued", "in_progress"):
                stored.status = "failed"
            raise
        finally:
            self._settle(request.request_id)

    async def retrieve(self, response_id: str, starting_after: int | None, stream: bool | None) -> Any:
        """vLLM notices that a response has no stored events only after its replay has begun."""
        serving = self._serving
        if stream and response_id in serving.response_store and response_id not in serving.event_store:
            return serving.create_error_response(
                "Only a response that was made with `stream` and `background` can be streamed again.",
                param="stream",
            )
        return await self._retrieve(response_id, starting_after, stream)

    async def delete(self, response_id: str) -> Any:
        """Forgets a response, and ends it where it is under way. Returns the error when it is not stored."""
        if response_id not in self._serving.response_store:
            return self._serving._make_not_found_error(response_id)
        if (task := self._serving.background_tasks.get(response_id)) is not None:
            task.cancel()
            await asyncio.wait({task})
        self._forget(response_id)
        return None

    def input_items(
        self, response_id: str, after: str | None, limit: int, order: response_items.Order
    ) -> Any:
        """A page of the items that a response was made from: earlier turns first, as far as they are stored.

        Or the error when it is not stored, or `after` is no item of it.
        """
        if response_id not in self._serving.response_store:
            return self._serving._make_not_found_error(response_id)
        found = response_items.page(self._turns(response_id), after, limit, order)
        if found is None:
            return self._serving.create_error_response(
                f"'{after}' is not the id of an input item of this response.", param="after"
            )
        return found

    def _turns(self, response_id: str) -> list[response_items.Item]:
        turns: list[list[response_items.Item]] = []
        while True:
            before, own, _ = self._inputs.get(response_id, _UNKNOWN)
            turns.append(own)
            previous = self._serving.response_store.get(before)
            if before is None or previous is None:
                return [item for turn in reversed(turns) for item in turn]
            turns.append([*map(response_items.plain, previous.output)])
            response_id = before

    async def count(self, request: Any) -> Any:
        """The number of tokens of a request's prompt, or the error that the request would get."""
        serving = self._serving
        if (error := await serving._check_model(request)) is not None:
            return error
        before = request.previous_response_id
        previous = serving.response_store.get(before)
        if before is not None and previous is None:
            return serving._make_not_found_error(before)
        if (error := self._resolve(request)) is not None:
            return error
        self._recall(request)
        found = await serving._render_resolved_response_inputs(request, previous)
        return len(found.engine_input["prompt_token_ids"]) if hasattr(found, "engine_input") else found

    def _resolve(self, request: Any) -> Any:
        """Puts stored items in place of references to them. Returns the error for one that is not stored."""
        if isinstance(request.input, str):
            return None
        for i, item in enumerate(request.input):
            if _field(item, "type") != response_items.REFERENCE:
                continue
            found = self._item(item["id"])
            if found is None:
                return self._serving.create_error_response(
                    f"Item '{item['id'][:200]}' is not stored here, or not any more. Send the items "
                    "themselves instead of references to them; clients do so with `store: false`.",
                    status_code=HTTPStatus.NOT_FOUND,
                    param="input",
                )
            request.input[i] = found
        return None

    def _item(self, item_id: str) -> Any:
        """An item of a stored response, or of what it was made from, as the endpoint reads items.

        None for another tenant's, too: there are forms of a reference that the gateway does not see.
        """
        of = response_of(item_id)
        if of is None or not response_items.is_of(of, current_replica.get()):
            return None
        response = self._serving.response_store.get(of)
        for item in response.output if response is not None else ():
            if item.id == item_id:
                return item
        for item in self._inputs.get(of, _UNKNOWN)[1]:
            if item["id"] == item_id:
                return ResponsesRequest.model_validate({"input": [item]}).input[0]
        return None

    def _recall(self, request: Any) -> None:
        """Puts the previous response's tool calls before their results: vLLM passes on only its text."""
        before = self._serving.response_store.get(request.previous_response_id)
        if before is None or self._serving.use_harmony or isinstance(request.input, str):
            return
        sent = {_field(item, "call_id") for item in request.input if _field(item, "type") == "function_call"}
        calls = [item for item in before.output if item.type == "function_call"]
        request.input = [*(call for call in calls if call.call_id not in sent), *request.input]

    def _settle(self, response_id: str) -> None:
        """Makes room for a response that is stored by now; forgets what was to become one that is not."""
        if response_id not in self._serving.response_store:
            self._forget(response_id)
        elif response_id not in self._sizes:
            self._sizes[response_id] = size = self._inputs.get(response_id, _UNKNOWN)[2]
            self._bytes += size
            while len(self._sizes) > MOST_RESPONSES or (self._bytes > MOST_BYTES and len(self._sizes) > 1):
                self._forget(next(iter(self._sizes)))

    def _forget(self, response_id: str) -> None:
        self._bytes -= self._sizes.pop(response_id, 0)
        self._inputs.pop(response_id, None)
        for store in (self._serving.response_store, self._serving.msg_store, self._serving.event_store):
            store.pop(response_id, None)


def _field(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)


def _size(raw_request: Any) -> int:
    length = raw_request.headers.get("content-length", "") if raw_request is not None else ""
    return int(length) if length.isdigit() else 0


def _tell_ends(serving: Any, store: BoundedStore) -> None:
    """Has responses tell how they ended. serving: vLLM's OpenAIServingResponses."""
    complete, stream = serving.responses_full_generator, serving.responses_stream_generator

    async def responses_full_generator(
        request: Any, params: Any, results: Any, context: Any, *more: Any, **named: Any
    ) -> Any:
        with store.making(request):
            response = await complete(request, params, results, context, *more, **named)
        status = _STATUSES.get(_reason(context) or "")
        if status is not None and hasattr(response, "output"):
            response.status = status
            last: list[Any] = response.output[-1:]
            for item in last:
                item.status = "incomplete"
        return response

    async def responses_stream_generator(
        request: Any, params: Any, results: Any, context: Any, *more: Any, **named: Any
    ) -> AsyncGenerator[Any, None]:
        last = None  # item, whose status is known once the response is made
        if (continued := getattr(serving.engine_client, "continued", None)) is not None:
            continued.announce(params)
        with store.making(request):
            async with aclosing(stream(request, params, results, context, *more, **named)) as events:
                async for event in events:
                    if last is not None:
                        yield last
                        last = None
                    if isinstance(event, ResponseCompletedEvent):
                        kind = _EVENTS.get(event.response.status, "response.failed")
                        event = _Ended(
                            type=kind, sequence_number=event.sequence_number, response=event.response
                        )
                    if isinstance(event, ResponseOutputItemDoneEvent) and _reason(context):
                        last = event
                    else:
                        yield event

    async def responses_background_stream_generator(
        response_id: str, starting_after: int | None = None
    ) -> AsyncGenerator[Any, None]:
        if response_id not in serving.event_store:
            raise VLLMValidationError(f"Unknown response_id: {response_id}", parameter="response_id")
        events, more = serving.event_store[response_id]
        sent = 0 if starting_after is None else max(0, starting_after + 1)
        while True:
            more.clear()
            task = serving.background_tasks.get(response_id)
            ended = task is None or task.done()
            while sent < len(events):
                yield events[sent]
                sent += 1
            if ended:
                return
            await more.wait()

    serving.responses_full_generator = responses_full_generator
    serving.responses_stream_generator = responses_stream_generator
    serving.responses_background_stream_generator = responses_background_stream_generator


def _reason(context: Any) -> str | None:
    """Why generation ended; None while it runs."""
    output = getattr(context, "last_output", None)
    return getattr(output.outputs[0] if output and output.outputs else context, "finish_reason", None)
