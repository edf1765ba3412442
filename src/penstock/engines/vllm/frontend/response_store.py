"""A bounded store for vLLM's Responses endpoint, with ids that name the replica.

vLLM's own store is off unless an environment variable is set, and then grows without limit. Here it is on, as
OpenAI's clients expect, and the oldest responses are evicted.
"""

from __future__ import annotations

from typing import Any

from penstock.engines.vllm.frontend import structured_output
from penstock.openai.response_ids import new_id
from penstock.request_context import current_replica

MOST_RESPONSES = 1000
MOST_BYTES = 256 << 20
"""Of request bodies: most of a stored response is its conversation, images included."""


def keep_responses(state: Any) -> None:
    """Installs the store in the Responses endpoint of vLLM's app, when the model has that endpoint."""
    serving = getattr(state, "openai_serving_responses", None)
    if serving is not None:
        BoundedStore(serving)


class BoundedStore:
    """Wraps one handler's `create_responses`."""

    def __init__(self, serving: Any) -> None:
        self._serving = serving
        self._create = serving.create_responses
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        serving.enable_store = True
        serving.create_responses = self.create

    async def create(self, request: Any, raw_request: Any = None) -> Any:
        """Always sets our own id: a client's could overwrite another's response."""
        if request.stream or request.background:
            # vLLM checks it only after the response has begun.
            structured_output.verify(self._serving, request)
        self._recall(request)
        request.request_id = new_id(current_replica.get())
        if request.store:
            self._make_room(request.request_id, _size(raw_request))
        return await self._create(request, raw_request)

    def _recall(self, request: Any) -> None:
        """Puts the previous response's tool calls before their results: vLLM passes on only its text."""
        before = self._serving.response_store.get(request.previous_response_id)
        if before is None or self._serving.use_harmony or isinstance(request.input, str):
            return
        sent = {_call_id(item) for item in request.input if _kind(item) == "function_call"}
        calls = [item for item in before.output if item.type == "function_call"]
        request.input = [*(call for call in calls if call.call_id not in sent), *request.input]

    def _make_room(self, response_id: str, size: int) -> None:
        self._sizes[response_id] = size
        self._bytes += size
        while len(self._sizes) > MOST_RESPONSES or (self._bytes > MOST_BYTES and len(self._sizes) > 1):
            self._forget(next(iter(self._sizes)))

    def _forget(self, response_id: str) -> None:
        self._bytes -= self._sizes.pop(response_id)
        for store in (self._serving.response_store, self._serving.msg_store, self._serving.event_store):
            store.pop(response_id, None)


def _kind(item: Any) -> Any:
    return item.get("type") if isinstance(item, dict) else getattr(item, "type", None)


def _call_id(item: Any) -> Any:
    return item.get("call_id") if isinstance(item, dict) else item.call_id


def _size(raw_request: Any) -> int:
    length = raw_request.headers.get("content-length", "") if raw_request is not None else ""
    return int(length) if length.isdigit() else 0
