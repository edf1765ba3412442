"""Ids of responses that are kept for later, and of their items: each names the replica that keeps it.

So any gateway finds it, without a memory of its own and without asking around.
"""

from __future__ import annotations

import re
import uuid

_ID = re.compile(r"resp_([0-9a-f]{16})_[0-9a-f]{32}")
_ITEM = re.compile(r"[a-z]+_(([0-9a-f]{16}_)?[0-9a-f]{32})_[0-9a-f]+")


def new_id(keeper: str) -> str:
    """An id nobody can guess. keeper: a replica's id, or "" where there is one process only."""
    return f"resp_{keeper}_{uuid.uuid4().hex}" if keeper else f"resp_{uuid.uuid4().hex}"


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
