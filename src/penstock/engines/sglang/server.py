"""What SGLang's server reports: its version, its load, the fields of its requests, its errors and metrics."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from penstock.engines import foreign
from penstock.engines.process.gauges import Gauges
from penstock.engines.process.readiness import NotReady
from penstock.engines.process.relay import ModelNames
from penstock.engines.process.wire import BROKEN, Wire
from penstock.errors import BadRequest, Error

log = logging.getLogger(__name__)

KNOWN = "0.5.23"

_LIMIT_S = 5.0
_FIELDS_LIMIT_S = 60.0  # SGLang makes it when it is first asked

_ODD = (ValueError, KeyError, TypeError, AttributeError)
"""What reading an answer raises that is not of the form of `KNOWN`, or no JSON."""

_FAULT = re.compile(r"""'loc': \(([^)]*)\), 'msg': (?:'([^']*)'|"([^"]*)")""")
_WORD = re.compile(r"'([^']*)'")

_COUNTERS = {
    "vllm:prompt_tokens_total": "sglang:prompt_tokens_total",
    "vllm:prefix_cache_queries_total": "sglang:prompt_tokens_total",  # it looks up every token of a prompt
    "vllm:prefix_cache_hits_total": "sglang:cached_tokens_total",
    "vllm:generation_tokens_total": "sglang:generation_tokens_total",
    "vllm:request_success_total": "sglang:num_requests_total",
}


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_uncached_tokens: int = 0
    max_total_num_tokens: int = 0
    token_usage: float = 0.0


class _Loads(msgspec.Struct):
    loads: list[_Load]


async def warn_of_another_version(wire: Wire) -> None:
    """Warns when the server is not of the version that this folder is tried with. Raises: one of BROKEN."""
    found = "of an unknown version"
    with suppress(TimeoutError, *_ODD):
        status, body = await wire.get("/server_info", _LIMIT_S)
        found = msgspec.json.decode(body)["version"] if status == 200 else found
    if found != KNOWN:
        log.warning(
            "SGLang is %s; this Penstock was tried with %s. In another version an argument that is false may "
            "have no effect, and a parameter another meaning.",
            found,
            KNOWN,
        )


async def load(wire: Wire) -> Gauges | None:
    """The current load of its schedulers; None when it does not answer, or what another version would."""
    try:
        status, body = await wire.get("/v1/loads?include=core", _LIMIT_S)
        if status != 200:
            return None
        loads = msgspec.json.decode(body, type=_Loads).loads
    except (*BROKEN, TimeoutError, *_ODD):
        return None
    return Gauges(
        sum(one.num_running_reqs for one in loads),
        sum(one.num_waiting_reqs for one in loads),
        min(1.0, max((one.token_usage for one in loads), default=0.0)),
        sum(one.max_total_num_tokens for one in loads) or None,
        sum(one.num_waiting_uncached_tokens for one in loads),
    )


async def fields(wire: Wire) -> dict[str, frozenset[str]]:
    """Fields of each endpoint's requests, from SGLang's description of its API.

    Raises: NotReady; one of BROKEN.
    """
    try:
        status, body = await wire.get("/openapi.json", _FIELDS_LIMIT_S)
        if status != 200:
            raise NotReady(f"it answered /openapi.json with status {status}")
        said: dict[str, Any] = msgspec.json.decode(body)
        schemas = said["components"]["schemas"]
        return {
            path: frozenset(schemas[reference.rpartition("/")[2]]["properties"])
            for path, ways in said["paths"].items()
            if (reference := _reference(ways.get("post", {}))) is not None
        }
    except TimeoutError as error:
        raise NotReady(f"it did not answer /openapi.json within {_FIELDS_LIMIT_S:g} s") from error
    except _ODD as error:
        raise NotReady(f"its /openapi.json is of another form than SGLang {KNOWN}'s") from error


def _reference(operation: Mapping[str, Any]) -> str | None:
    content = operation.get("requestBody", {}).get("content", {})
    return content.get("application/json", {}).get("schema", {}).get("$ref")


def heard(body: bytes, status: int | None = None) -> Error:
    """As `foreign.heard`, for responses of SGLang.

    SGLang reports invalid fields with places in its own files and with the request's values; only the names
    of the fields and what is wrong with them are passed on.
    """
    message, _ = foreign.said(body)
    faults = _FAULT.findall(message) if status in (400, 422) else []
    if not faults:
        return foreign.heard(body, status)
    places = [_WORD.findall(place)[1:2] for place, *_ in faults]
    said = [": ".join([*place, one or other]) for place, (_, one, other) in zip(places, faults, strict=True)]
    named = next((place[0] for place in places if place), None)
    return BadRequest(f"{'; '.join(dict.fromkeys(said))}.", **({"param": named} if named else {}))


def exposition(text: str, names: ModelNames, seen: Gauges) -> str:
    """SGLang's /metrics as a fleet reads it: with the model's own name, and vLLM's names beside SGLang's.

    seen: its schedulers' numbers now; those in `text` lag by some steps.
    """
    label = f'model_name="{_escaped(names.ours)}"'
    text = text.replace(f'model_name="{_escaped(names.childs)}"', label)
    values: dict[str, float] = {
        "vllm:num_requests_running": seen.running,
        "vllm:num_requests_waiting": seen.waiting,
        "vllm:kv_cache_usage_perc": seen.kv_usage,
    }
    for name, theirs in _COUNTERS.items():
        found = re.findall(rf"^{theirs}(?:\{{.*\}})? (\S+)", text, re.MULTILINE)
        values[name] = sum(float(value) for value in found)
    kinds = {name: "counter" if name in _COUNTERS else "gauge" for name in values}
    lines = [f"# TYPE {name} {kinds[name]}\n{name}{{{label}}} {value}" for name, value in values.items()]
    return "\n".join([text.rstrip("\n"), *lines, ""])


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"")
