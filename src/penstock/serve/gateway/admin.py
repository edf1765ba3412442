"""JSON of the admin endpoints: operations on the fleet and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from penstock.errors import BadRequest, NotFound
from penstock.serve.control.operations import parse
from penstock.serve.fleet.replica import Replica


class _Target(msgspec.Struct, omit_defaults=True):
    """Arguments that every operation takes: which replicas, and for how long."""

    model: str | None = None
    replica: str | None = None
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None


_TARGET = frozenset(_Target.__struct_fields__)
STATUS, USAGE, FLEET, ORGANIZATION = "status", "usage", "fleet", "organization"


class _FleetRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What may be said of a fleet, see `serve.control.fleet`."""

    fleet: dict[str, Any] = {}
    who: str = "a client of /admin/fleet"
    what: str = ""
    version: int | None = None
    take_over: bool = False


_FLEET_CALLS = {
    FLEET: (),
    f"{FLEET}/history": (),
    f"{FLEET}/audit": (),
    f"{FLEET}/plan": ("fleet",),
    f"{FLEET}/apply": ("fleet", "who", "what", "take_over"),
    f"{FLEET}/rollback": ("version", "who", "take_over"),
}
PLANNED = frozenset(call for call, names in _FLEET_CALLS.items() if names)
"""Those that make a plan, for which engines are asked about their arguments."""


def fleet_call(
    operation: str, method: str, body: bytes | bytearray, if_match: bytes | None
) -> tuple[str, dict[str, Any]]:
    """Control's call, and its arguments. Raises: BadRequest, NotFound."""
    call = f"{FLEET}/apply" if method == "PUT" else operation
    if (names := _FLEET_CALLS.get(call)) is None:
        raise NotFound(f"There is no path '/admin/{operation[:100]}' here.")
    try:
        given = msgspec.json.decode(body or b"{}", type=_FleetRequest)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f'The body must be a JSON object, as {{"fleet": ...}}: {error}.') from error
    arguments = {name: getattr(given, name) for name in names}
    if if_match is not None and "take_over" in names:
        arguments["if_match"] = if_match.decode("latin-1")
    return call, arguments


def arguments(operation: str, body: bytes | bytearray, model: str | None) -> dict[str, Any]:
    """Arguments of an operation, or of the status. model: as the query names it.

    Raises: BadRequest for an unknown operation, or for anything but a JSON object of its arguments or an
    empty body.
    """
    try:
        given = msgspec.json.decode(body or b"{}", type=dict[str, Any])
        target = msgspec.convert(
            {"model": model} | {name: given[name] for name in _TARGET & given.keys()}, _Target
        )
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body must be a JSON object of the operation's arguments: {error}.") from error
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None
    if operation == STATUS:
        if given.keys() - {"model"}:
            raise BadRequest("The status takes a model, and nothing else.")
        return msgspec.to_builtins(target)
    own = {name: value for name, value in given.items() if name not in _TARGET}
    parse(operation, own)
    return own | msgspec.to_builtins(target)


def with_batch(status: Mapping[str, Any], ready: Callable[[str], Sequence[Replica]]) -> dict[str, Any]:
    """The status of each model, and in it what replicas report to this gateway of batch.

    ready: a model's replicas. Units: requests. `limit`: those that may run; `requests`: those that run or
    wait; `requeued`: those aborted for online ones so far.
    """
    batch = {
        one.id: {"batch": {"limit": one.batch_limit, "requests": one.batch, "requeued": one.batch_requeued}}
        for model in status
        for one in ready(model)
        if one.batch_limit is not None
    }
    return {
        model: {
            **state,
            "replicas": {name: {**one, **batch.get(name, {})} for name, one in state["replicas"].items()},
        }
        for model, state in status.items()
    }
