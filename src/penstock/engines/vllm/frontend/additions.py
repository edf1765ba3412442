"""What Penstock adds to vLLM's application, each capability by itself. Importing this file imports vLLM.

What a capability needs is imported only where it is on: elsewhere the import might fail.
"""

from __future__ import annotations

import functools
from operator import attrgetter
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import TYPE_CHECKING

from fastapi import FastAPI
from prometheus_client import Gauge

from penstock.asgi import ASGIApp
from penstock.engines.vllm.capabilities.state import Capabilities
from penstock.engines.vllm.capabilities.table import CAPABILITIES

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


GAUGE = "penstock_engine_capability"


def add(capabilities: Capabilities, app: FastAPI, llm: AsyncLLM) -> None:
    """Changes the application."""
    given = SimpleNamespace(app=app, llm=llm)
    for name, change, arguments in _CHANGES:
        if capabilities.has(name):
            resolve_name(f"penstock.engines.vllm.{change}")(
                *(attrgetter(one)(given) for one in arguments.split())
            )
    for name in CAPABILITIES:
        _gauge().labels(name).set(capabilities.has(name))


def shorten(capabilities: Capabilities, app: FastAPI) -> ASGIApp:
    """The application behind a short way for our own requests, if that is on."""
    if not capabilities.has("direct_routes"):
        return app
    from penstock.engines.vllm.frontend.direct_routes import DirectRoutes

    return DirectRoutes(app)


@functools.cache
def _gauge() -> Gauge:
    """One for this process, which may have had engines before."""
    return Gauge(GAUGE, "1 for what Penstock adds to vLLM, 0 for what is off.", ["capability"])


_CHANGES = (
    ("fast_stream", "frontend.fast_stream:use_fast_path", "app.state"),
    ("fast_stream_beside_tools", "frontend.fast_stream:use_beside_tools", "app.state"),
    ("stop_strings", "frontend.token_text:hold_stops", "llm.vllm_config"),
    ("single_tokens", "frontend.token_text:cut_for_parsers", "app.state llm"),
    ("response_store", "frontend.response_store:keep_responses", "app.state"),
    ("continued_streams", "continued.answer:name_by_seed", ""),
    ("item_references", "frontend.response_store:name_items", ""),
    ("response_calls", "frontend.response_store:add_calls", "app"),
    ("request_limits", "frontend.limits:hold", "app.state"),
    ("runner_limits", "frontend.limits:hold_to_runner", "llm.vllm_config"),
    ("text_limits", "tokenizing.texts:limit_texts", "llm.renderer"),
    ("text_limits", "tokenizing.texts:limit_scores", "app.state"),
    ("structure_errors", "frontend.structured_output:tell_reasons", ""),
    ("structure_errors", "frontend.structured_output:verify_messages", "app.state"),
    ("strict_tools", "frontend.forced_tools:hold_arguments", "app.state"),
    ("transcript_text", "frontend.transcript_text:answer_texts", "app"),
    ("prepared_prompts", "frontend.prepared_prompts:take_prepared", "llm.renderer llm.model_config"),
)
"""Capability, function, and its arguments, in the order in which they wrap: the last sees a request first."""
