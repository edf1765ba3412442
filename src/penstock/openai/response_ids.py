"""Ids of responses that are kept for later: each names the replica that keeps it.

So any gateway finds it, without a memory of its own and without asking around.
"""

from __future__ import annotations

import re
import uuid

_ID = re.compile(r"resp_([0-9a-f]{16})_[0-9a-f]{32}")


def new_id(keeper: str) -> str:
    """An id nobody can guess. keeper: a replica's id, or "" where there is one process only."""
    return f"resp_{keeper}_{uuid.uuid4().hex}" if keeper else f"resp_{uuid.uuid4().hex}"


def keeper_of(response_id: str) -> str | None:
    """The replica's id; None for an id that `new_id` has not made for a replica."""
    match = _ID.fullmatch(response_id)
    return match[1] if match else None
