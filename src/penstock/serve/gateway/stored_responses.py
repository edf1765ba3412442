"""Requests that only one replica can answer, because it stores the response that they refer to.

The response's id names that replica, and so do the ids of its items: every gateway knows it, also after a
restart.
"""

from __future__ import annotations

import re

import msgspec

from penstock.errors import NotFound
from penstock.openai.response_items import REFERENCE, keeper_of, mark_of, response_of
from penstock.serve.fleet.replica import Replica
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.body import Fields
from penstock.serve.gateway.request import UpstreamRequest
from penstock.serve.gateway.routes import Route

_RESPONSES = "/v1/responses"
_REFERENCE = re.compile(rb'"%b"|\{\s*"id"\s*:[^,{}]*\}' % REFERENCE.encode())


class _Item(msgspec.Struct):
    type: str | None = None
    role: str | None = None
    id: str | None = None


def keeper(table: Table, route: Route, fields: Fields, mark: str) -> Replica | None:
    """The replica that must answer; None when any replica can. mark: of the tenant; "" is `default`'s, as is
    everyone in a service without tenants.

    Raises: NotFound when the replica that the id names is gone, and for a response of another tenant.
    """
    if not is_about(route):
        return None
    named = [one for one in (route.argument, _previous(fields), *_referred_to(fields)) if one]
    if foreign := [one for one in named if mark_of(one) != mark]:
        raise unknown(foreign[0])
    replica_id = keeper_of(named[0]) if named else None
    if replica_id is None:
        return None  # not one of our ids: the engine decides
    replica = table.find(replica_id)
    if replica is None:
        raise lost()
    return replica


def is_about(route: Route) -> bool:
    """Whether requests there make, or refer to, stored responses."""
    return route.path.startswith(_RESPONSES)


def stands_alone(route: Route, request: UpstreamRequest) -> bool:
    """Whether another replica can answer it as well: it refers to nothing stored, and is answered at once."""
    return (
        route.path == _RESPONSES
        and request.keeper is None
        and bytes(request.body.fields.background) != b"true"
    )


def unknown(response_id: str) -> NotFound:
    """The error for a response that is not there, or not for this client."""
    return NotFound(f"There is no response with the id '{response_id[:200]}'.", param="response_id")


def lost() -> NotFound:
    """The error for a response whose replica is gone."""
    return NotFound(
        "This response is not here any more: the replica that kept it has ended. "
        "Send the conversation again instead of its id.",
        param="response_id",
    )


def _previous(fields: Fields) -> str:
    raw = bytes(fields.previous_response_id)
    try:
        return msgspec.json.decode(raw, type=str) if raw else ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""  # null, or nonsense that the engine refuses


def _referred_to(fields: Fields) -> list[str]:
    """The responses of the stored items that the input refers to by their ids, in the usual forms: where they
    go. Whose items they are, the replica knows.
    """
    if not _REFERENCE.search(fields.input):
        return []
    try:
        items = msgspec.json.decode(fields.input, type=list[_Item])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []  # as above
    references = [item for item in items if item.type == REFERENCE or not (item.type or item.role)]
    found = [response_of(item.id or "") for item in references]
    return [response for response in found if response is not None]
