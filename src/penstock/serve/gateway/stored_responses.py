"""Requests that only one replica can answer, because it keeps the response that they name.

The response's id says which one that is, so every gateway knows, and forgets nothing when it restarts.
"""

from __future__ import annotations

import msgspec

from penstock.errors import NotFound
from penstock.openai.response_ids import keeper_of
from penstock.serve.fleet.replica import Replica
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.body import Fields
from penstock.serve.gateway.routes import Route

_RESPONSES = "/v1/responses"


def keeper(table: Table, route: Route, fields: Fields) -> Replica | None:
    """The replica that must be asked; None when any may be.

    Raises: NotFound when the replica that the id names is no more.
    """
    if not route.path.startswith(_RESPONSES):
        return None
    replica_id = keeper_of(route.argument or _previous(fields))
    if replica_id is None:
        return None  # no id of ours: whether there is such a response is the engine's to say
    replica = table.find(replica_id)
    if replica is None:
        raise lost()
    return replica


def lost() -> NotFound:
    """What is said of a response whose replica has ended."""
    return NotFound(
        "This response is not here any more: the replica that kept it has ended. "
        "Send the conversation again instead of its id.",
        param="response_id",
    )


def _previous(fields: Fields) -> str:
    raw = bytes(fields.previous_response_id)
    try:
        return msgspec.json.decode(raw, type=str) if raw else ""
    except msgspec.DecodeError:
        return ""  # null, or nonsense that the engine refuses
