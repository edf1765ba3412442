"""The input items of stored responses, as OpenAI's clients list them: plain JSON, in pages.

An item is a dict as a client sent it, or a pydantic model that an engine parsed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}

Item = dict[str, Any]
Order = Literal["asc", "desc"]


def items(given: str | Sequence[Any], response_id: str) -> list[Item]:
    """The items of one request's `input`, each with an id. A text is a message of the user."""
    listed = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_item(one, f"{response_id.removeprefix('resp_')}_{i}") for i, one in enumerate(listed)]


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
