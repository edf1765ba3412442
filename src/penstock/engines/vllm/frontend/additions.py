"""What Penstock adds to vLLM's application, each capability by itself. Importing this file imports vLLM.

What a capability needs is imported only where it is on: elsewhere the import might fail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from prometheus_client import Gauge

from penstock.asgi import ASGIApp
from penstock.engines.vllm.capabilities.state import Capabilities
from penstock.engines.vllm.capabilities.table import CAPABILITIES

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


GAUGE = "penstock_engine_capability"


def prepare(capabilities: Capabilities) -> None:
    """Changes what vLLM's application is built from. Call it before that."""
    if capabilities.has("request_models"):
        from penstock.engines.vllm.frontend.request_models import fail_at_first_item

        fail_at_first_item()


def add(capabilities: Capabilities, app: FastAPI, llm: AsyncLLM) -> None:
    """Changes the application."""
    for name, change in _CHANGES.items():
        if capabilities.has(name):
            change(app, llm)
    _show(capabilities)


def shorten(capabilities: Capabilities, app: FastAPI) -> ASGIApp:
    """The application behind a short way for our own requests, if that is on."""
    if not capabilities.has("direct_routes"):
        return app
    from penstock.engines.vllm.frontend.direct_routes import DirectRoutes

    return DirectRoutes(app)


def _show(capabilities: Capabilities) -> None:
    for name in CAPABILITIES:
        _gauge().labels(name).set(capabilities.has(name))


@functools.cache
def _gauge() -> Gauge:
    """One for this process, which may have had engines before."""
    return Gauge(GAUGE, "1 for what Penstock adds to vLLM, 0 for what is off.", ["capability"])


def _stream(app: FastAPI, llm: AsyncLLM) -> None:
    from penstock.engines.vllm.frontend.fast_stream import use_fast_path

    use_fast_path(app.state)


def _stream_beside_tools(app: FastAPI, llm: AsyncLLM) -> None:
    from penstock.engines.vllm.frontend.fast_stream import use_beside_tools

    use_beside_tools(app.state)


def _limit(app: FastAPI, llm: AsyncLLM) -> None:
    from penstock.engines.vllm.frontend import limits

    limits.hold(app.state)


def _limit_lists(app: FastAPI, llm: AsyncLLM) -> None:
    from penstock.engines.vllm.frontend import limits

    limits.hold_to_runner(llm.vllm_config)


def _limit_texts(app: FastAPI, llm: AsyncLLM) -> None:
    from penstock.engines.vllm.tokenizing import texts

    texts.limit_texts(llm.renderer)
    if scores := getattr(app.state, "serving_scores", None):
        texts.limit_scores(scores)


def _hold_stops(app: FastAPI, llm: AsyncLLM) -> None:
    from penstock.engines.vllm.frontend.token_text import hold_stops

    hold_stops(llm.vllm_config)


def _cut_for_parsers(app: FastAPI, llm: Any) -> None:
    from penstock.engines.vllm.frontend.token_text import cut_for_parsers

    cut_for_parsers(app.state, llm)


def _tell_reasons(app: FastAPI, llm: AsyncLLM) -> None:
    from penstock.engines.vllm.frontend.structured_output import tell_reasons, verify_messages

    tell_reasons()
    verify_messages(app.state)


def _keep_responses(app: FastAPI, llm: AsyncLLM) -> None:
    from penstock.engines.vllm.frontend.response_store import keep_responses

    keep_responses(app.state)


def _name_items(app: FastAPI, llm: AsyncLLM) -> None:
    from penstock.engines.vllm.frontend.response_store import name_items

    name_items()


def _add_calls(app: FastAPI, llm: AsyncLLM) -> None:
    from penstock.engines.vllm.frontend.response_store import add_calls

    add_calls(app)


def _hold_arguments(app: FastAPI, llm: AsyncLLM) -> None:
    from penstock.engines.vllm.frontend.forced_tools import hold_arguments

    hold_arguments(app.state)


def _answer_texts(app: FastAPI, llm: AsyncLLM) -> None:
    from penstock.engines.vllm.frontend.transcript_text import answer_texts

    answer_texts(app)


def _take_prepared(app: FastAPI, llm: AsyncLLM) -> None:
    from penstock.engines.vllm.frontend.prepared_prompts import take_prepared

    take_prepared(llm.renderer, llm.model_config)


_CHANGES: dict[str, Callable[[FastAPI, Any], None]] = {
    "fast_stream": _stream,
    "fast_stream_beside_tools": _stream_beside_tools,
    "stop_strings": _hold_stops,
    "single_tokens": _cut_for_parsers,
    "response_store": _keep_responses,
    "item_references": _name_items,
    "response_calls": _add_calls,
    "request_limits": _limit,
    "runner_limits": _limit_lists,
    "text_limits": _limit_texts,
    "structure_errors": _tell_reasons,
    "strict_tools": _hold_arguments,
    "transcript_text": _answer_texts,
    "prepared_prompts": _take_prepared,
}
"""In the order in which they wrap: the last one sees a request first."""
