"""What may be done to replicas and gateways: each operation's arguments, and the state desired after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.engine_control import PauseMode
from penstock.errors import BadRequest
from penstock.serve.control.state import DesiredState, Weights

CHANGES = ("sleep", "wakeup", "pause", "resume", "update_weights")
"""Operations that change the desired state of replicas."""

SHIFT = "shift"
"""The operation that changes the desired state of gateways."""


class Sleep(msgspec.Struct, forbid_unknown_fields=True):
    level: Literal[1, 2] = 1
    mode: Literal["wait", "abort"] = "wait"


class WakeUp(msgspec.Struct, forbid_unknown_fields=True):
    tags: list[Literal["weights", "kv_cache"]] | None = None


class _Pause(msgspec.Struct, forbid_unknown_fields=True):
    mode: PauseMode = "keep"
    clear_cache: bool = False


class _NoArguments(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Shift(msgspec.Struct, forbid_unknown_fields=True):
    application: str


class _CollectiveRpc(msgspec.Struct, forbid_unknown_fields=True):
    method: str
    timeout: float | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


_ARGUMENTS: dict[str, type[msgspec.Struct]] = {
    "sleep": Sleep,
    "wakeup": WakeUp,
    "pause": _Pause,
    "resume": _NoArguments,
    "update_weights": Weights,
    SHIFT: Shift,
    "is_sleeping": _NoArguments,
    "is_paused": _NoArguments,
    "reset_prefix_cache": _NoArguments,
    "start_profile": _NoArguments,
    "stop_profile": _NoArguments,
    "collective_rpc": _CollectiveRpc,
}

OPERATIONS = tuple(_ARGUMENTS)


def parse(operation: str, arguments: Mapping[str, Any]) -> Any:
    """The operation's arguments as one value. Raises: BadRequest that names what is allowed."""
    if operation not in _ARGUMENTS:
        raise BadRequest(f"There is no operation '{operation}'; there are {', '.join(OPERATIONS)}.")
    try:
        parsed = msgspec.convert(arguments, _ARGUMENTS[operation])
    except msgspec.ValidationError as error:
        names = ", ".join(_ARGUMENTS[operation].__struct_fields__) or "no arguments"
        raise BadRequest(f"{operation}: {error}. It takes {names}.") from error
    if isinstance(parsed, Weights) and not Path(parsed.source).is_absolute():
        raise BadRequest(f"update_weights: source must be an absolute path, not {parsed.source!r}.")
    return parsed


def apply(before: DesiredState, operation: str, arguments: Any, replica: str) -> DesiredState:
    """The state desired after one of `CHANGES` or `SHIFT`. arguments: as `parse` returns them."""
    now = msgspec.structs.replace(before, replica=replica)
    match operation:
        case "sleep":
            return msgspec.structs.replace(now, sleep=arguments.level, sleep_mode=arguments.mode)
        case "wakeup":
            if arguments.tags is not None:
                raise BadRequest(
                    "wakeup: control wakes whole engines. Wake parts by handle: "
                    "handle.broadcast('wakeup', tags=['weights'])."
                )
            return msgspec.structs.replace(now, sleep=0)
        case "pause":
            return msgspec.structs.replace(now, pause=arguments.mode, clear_cache=arguments.clear_cache)
        case "resume":
            return msgspec.structs.replace(now, pause=None)
        case "shift":
            return msgspec.structs.replace(now, application=arguments.application)
        case _:
            return msgspec.structs.replace(now, weights=arguments)
