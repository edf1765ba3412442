"""What two servers answered to the same request, in a form that can be compared, and what differs.

Ids, times and sentences count by their type. Of a stream counts what its pieces say together, and in which
order their kinds came: how many tokens a piece holds depends on how busy the server was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

ABSENT = "absent"
_BY_TYPE = {
    *("id", "request_id", "response_id", "item_id", "call_id", "tool_call_id", "created", "created_at"),
    *("completed_at", "message_id", "previous_response_id", "sequence_number", "signature"),
}
_SENTENCES = {"message"}
_DELTA = ("role", "reasoning", "content", "tool_calls", "refusal")
_DONE = "[DONE]"

Json = Any


@dataclass(frozen=True)
class Difference:
    """place: a path into the answer, with `*` for each index. vllm, penstock: the values there."""

    place: str
    vllm: Json
    penstock: Json


def seen(answer: httpx.Response | None) -> Json:
    """The answer in this form; None is one that was cut off."""
    if answer is None:
        return {"status": "cut off"}
    kind = answer.headers.get("content-type", "").partition(";")[0]
    found = {"status": answer.status_code, "type": kind, **_content(answer.content, kind)}
    events = found.get("events")
    if answer.status_code == 200 and events and "error" in events[0]:
        found["status"] = "200, then an error"
    return found


def _content(body: bytes, kind: str) -> dict[str, Json]:
    if kind == "text/event-stream":
        return _stream(body.decode())
    try:
        return {"body": _plain(json.loads(body))}
    except ValueError:
        return {"text": body.decode(errors="replace")}


def line(status: int, body: Json) -> Json:
    """A batch line's response in this form."""
    return {"status": status, "type": "application/json", "body": _plain(body)}


def _plain(value: Json, name: str = "") -> Json:
    if isinstance(value, dict):
        if isinstance(error := value.get("error"), dict) and "message" in error:
            return {**value, "error": _plain({**error, "message": type(error["message"]).__name__})}
        return {key: _plain(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return type(value).__name__ if name in _BY_TYPE and value is not None else value


def _stream(text: str) -> dict[str, Json]:
    pieces = [piece for piece in text.split("\n\n") if piece.strip() and not piece.startswith(":")]
    ended = pieces[-1:] == [f"data: {_DONE}"]
    events = [_event(piece) for piece in pieces[: -1 if ended else None]]
    if any("choices" in event for event in events):
        return {"done": ended, **_chunks(events)}
    return {"done": ended, "events": list(_merged(events))}


def _event(piece: str) -> Json:
    fields = dict(part.partition(": ")[::2] for part in piece.split("\n"))
    try:
        event = _plain(json.loads(fields.get("data", "null")))
    except ValueError:
        return {"unreadable": piece}
    return {**event, "event": fields["event"]} if "event" in fields else event


def _merged(events: list[Json]) -> Iterator[Json]:
    """Neighbours of one kind, whose deltas are pieces of one text, as one."""
    last: Json = None
    for event in events:
        if last is not None and _kind(last) == _kind(event) and "delta" in event:
            last = _added(last, event)
            continue
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last


def _kind(event: Json) -> tuple[Json, ...]:
    delta = event.get("delta")
    names = ("type", "event", "index", "output_index", "content_index", "summary_index")
    return (*(event.get(name) for name in names), delta.get("type") if isinstance(delta, dict) else None)


def _added(one: Json, other: Json) -> Json:
    delta = one["delta"]
    if isinstance(delta, dict):
        delta = {name: _sum(name, value, other["delta"].get(name)) for name, value in delta.items()}
    else:
        delta += other["delta"]
    lists = {name: value + other[name] for name, value in one.items() if isinstance(value, list)}
    return {**one, **lists, "delta": delta}


def _sum(name: str, one: Json, other: Json) -> Json:
    return one if name in ("type", "index", "id", "name", *_BY_TYPE) or other is None else one + other


def _chunks(events: list[Json]) -> dict[str, Json]:
    """Of a stream of choices: of each the order of what it said, and what came beside it."""
    choices: dict[int, Json] = {}
    whole: Json = {}
    errors = [event for event in events if "error" in event]
    for event in events:
        whole.update({name: value for name, value in event.items() if value is not None or name not in whole})
        for choice in event.get("choices") or ():
            told = choices.setdefault(choice["index"], {"said": [], "beside": {}})
            for name, value in _parts(choice):
                _say(told["said"], name, value)
            for name, value in choice.items():
                if name not in ("delta", "text", "finish_reason"):
                    told["beside"][name] = _piled(told["beside"].get(name), value)
    whole.pop("choices", None)
    return {"chunks": {"choices": choices, "fields": whole, "errors": errors}}


def _parts(choice: Json) -> Iterator[tuple[str, Json]]:
    """What a chunk says, in the order in which it would stand alone."""
    delta = choice.get("delta") or {}
    for name in (*_DELTA, *sorted(delta.keys() - {*_DELTA})):
        if name == "tool_calls":
            for call in delta.get(name) or ():
                for key, value in {**call, **call.get("function", {})}.items():
                    if key not in ("function", "index"):
                        yield f"tool_calls.{call['index']}.{key}", value
        else:
            yield name, delta.get(name)
    yield "text", choice.get("text")
    yield "finish_reason", choice.get("finish_reason")


def _say(said: list[Json], name: str, value: Json) -> None:
    if value in (None, "", []):
        return
    if said and said[-1][0] == name and isinstance(value, str | list):
        said[-1][1] += value
    else:
        said.append([name, value])


def _piled(before: Json, value: Json) -> Json:
    """Lists end to end, also in an object; of all others the last that is set."""
    if isinstance(before, list) and isinstance(value, list):
        return before + value
    if isinstance(before, dict) and isinstance(value, dict):
        return {name: _piled(before.get(name), value.get(name)) for name in {**before, **value}}
    return before if value is None else value


def between(vllm: Json, penstock: Json, place: str = "") -> Iterator[Difference]:
    """What differs. Answers of different statuses differ in that alone."""
    if not place and vllm["status"] != penstock["status"]:
        yield Difference("status", vllm["status"], penstock["status"])
    elif isinstance(vllm, dict) and isinstance(penstock, dict):
        for name in {**vllm, **penstock}:
            at = f"{place}.{name}" if place else str(name)
            yield from between(vllm.get(name, ABSENT), penstock.get(name, ABSENT), at)
    elif isinstance(vllm, list) and isinstance(penstock, list) and len(vllm) == len(penstock):
        for one, other in zip(vllm, penstock, strict=True):
            yield from between(one, other, f"{place}.*")
    elif not _same(vllm, penstock):
        yield Difference(place, vllm, penstock)


def _same(one: Json, other: Json) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-4)
    return type(one) is type(other) and one == other
