"""Stored responses: their ids, and their input items as OpenAI's clients list them: plain JSON, in pages.

An id of a response, and of its items, names the replica that keeps it: so any gateway finds it, without a
memory of its own and without asking around. An item is a dict as a client sent it, or a pydantic model that
an engine parsed from it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Literal, cast

_ID = re.compile(r"resp_([0-9a-f]{16})_(?:([0-9a-f]{12})_)?[0-9a-f]{32}")
_ITEM = re.compile(r"[a-z]+_(([0-9a-f]{16}_([0-9a-f]{12}_)?)?[0-9a-f]{32})_[0-9a-f]+")

REFERENCE = "item_reference"

_TEXTS = ("output_text", "input_text", "text", "refusal")
"""Kinds of parts of an assistant's message that have a text."""

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}

Item = dict[str, Any]
Order = Literal["asc", "desc"]


def new_id(keeper: str, seed: str = "") -> str:
    """An id nobody can guess. keeper: as of `keeper_name`, or "" where there is one process only.

    seed: random, for the same id wherever the response is continued.
    """
    unique = sha256(seed.encode()).hexdigest()[:32] if seed else uuid.uuid4().hex
    return f"resp_{keeper}_{unique}" if keeper else f"resp_{unique}"


def keeper_name(replica_id: str, tenant: str) -> str:
    """A replica as the ids of its responses name it. tenant: as of `tenant_mark`."""
    return f"{replica_id}_{tenant}" if tenant else replica_id


def tenant_mark(tenant: str) -> str:
    """What an id says of a tenant. One who writes another mark into an id has the id of no response."""
    return sha256(tenant.encode()).hexdigest()[:12]


def mark_of(response_id: str) -> str:
    """The tenant's mark in an id; "" without one, and in ids that `new_id` has not made for a replica."""
    match = _ID.fullmatch(response_id)
    return (match[2] or "") if match else ""


def is_of(response_id: str, keeper: str) -> bool:
    """Whether it is a response of the tenant in `keeper`, which is as of `keeper_name`."""
    return mark_of(response_id) == keeper.partition("_")[2]


def item_number(response_id: str, number: int | str) -> str:
    """What follows the kind in the id of an item of the response."""
    return f"{response_id.removeprefix('resp_')}_{number}"


def response_of(item_id: str) -> str | None:
    """The response whose item has this id; None for an id without `item_number`."""
    match = _ITEM.fullmatch(item_id)
    return f"resp_{match[1]}" if match else None


def keeper_of(response_id: str) -> str | None:
    """The replica's id; None for an id that `new_id` has not made for a replica."""
    match = _ID.fullmatch(response_id)
    return match[1] if match else None


def items(given: str | Sequence[Any], response_id: str) -> list[Item]:
    """The items of one request's `input`, each with an id. A text is a message of the user."""
    listed = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_item(one, item_number(response_id, i)) for i, one in enumerate(listed)]


def as_read(given: Any) -> Any:
    """An input item in the form that vLLM reads; itself if it has that form, or is not an item.

    An item with a role is a message unless it says otherwise. vLLM reads only the first part of a message of
    the assistant, and of reasoning: their parts become one.
    """
    if not isinstance(given, dict):
        return given
    item = cast("Item", given)
    if "type" not in item and ("role" in item or item.keys() == {"id"}):
        item = {**item, "type": "message" if "role" in item else REFERENCE}
    names: tuple[tuple[str, str], ...] = ()
    if item.get("type") == "message" and item.get("role") == "assistant":
        names = (("content", "output_text"),)
    elif item.get("type") == "reasoning":
        names = (("content", "reasoning_text"), ("summary", "summary_text"))
    for name, kind in names:
        if (joined := _joined(item.get(name), kind)) is not None:
            item = {**item, name: joined}
    return item


def _joined(parts: Any, kind: str) -> list[Item] | None:
    """One part with the text of all; None where nothing is to be joined, or not all is text."""
    if not isinstance(parts, list) or (not parts and kind != "output_text"):
        return None
    parts = cast("list[Any]", parts)
    if len(parts) == 1 and isinstance(parts[0], dict) and cast("Item", parts[0]).get("type") == kind:
        return None
    texts = [text for part in parts if (text := _text(part, kind)) is not None]
    if len(texts) < len(parts):
        return None
    whole: Item = {"type": kind, "text": ("\n" if kind == "summary_text" else "").join(texts)}
    return [{**whole, "annotations": []} if kind == "output_text" else whole]


def _text(part: Any, kind: str) -> str | None:
    """The text of a part of this kind, or of another that has one."""
    if not isinstance(part, dict) or cast("Item", part).get("type") not in (kind, *_TEXTS):
        return None
    found = cast("Item", part)
    text = found.get("refusal" if found["type"] == "refusal" else "text")
    return text if isinstance(text, str) else None


def page(found: Sequence[Item], after: str | None, limit: int, order: Order) -> Item | None:
    """One page of items that are in ascending order; None when `after` is none of them."""
    ordered = list(found) if order == "asc" else list(reversed(found))
    if after is not None:
        places = [i for i, item in enumerate(ordered) if item["id"] == after]
        if not places:
            return None
        ordered = ordered[places[0] + 1 :]
    shown = ordered[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(ordered) > limit,
    }


def plain(item: Any) -> Item:
    """An item as JSON, without fields that are not set."""
    return dict(item) if isinstance(item, dict) else item.model_dump(mode="json", exclude_none=True)


def _item(given: Any, number: str) -> Item:
    item = plain(given)
    kind = item.setdefault("type", "message")
    item["id"] = item.get("id") or f"{_PREFIXES.get(kind, 'item')}_{number}"
    item.setdefault("status", "completed")
    if isinstance(text := item.get("content"), str):
        said = item.get("role") == "assistant"
        item["content"] = [
            {"type": "output_text", "text": text, "annotations": []}
            if said
            else {"type": "input_text", "text": text}
        ]
    return item
