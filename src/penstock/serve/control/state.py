"""What a model's replicas shall be and what they say they are: the words between control and replicas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.engine_control import PauseMode
from penstock.errors import BadRequest

Actual = Literal["starting", "ready", "asleep", "paused"]


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Other weights than those of the config. source: a folder that every node sees."""

    source: str
    version: str
    mode: PauseMode = "wait"


class Desired(msgspec.Struct, frozen=True):
    """Units: sleep is the level, 0 for awake. pause: how running requests were treated; None for no pause.

    version: of all that is desired in the application; it grows with each change. replica: the only one that
    it is meant for; "" for all of the model. application: whose replicas gateways ask; "" for their own.
    """

    version: int = 0
    replica: str = ""
    sleep: int = 0
    sleep_mode: PauseMode = "wait"
    pause: PauseMode | None = None
    clear_cache: bool = False
    weights: Weights | None = None
    application: str = ""


class Group(msgspec.Struct, frozen=True):
    """Models that take turns. awake: how many at a time. Unit: seconds."""

    name: str
    awake: int
    min_awake_s: float


class Told(msgspec.Struct, frozen=True):
    """What a replica says of itself. done: the version that it has reached, or failed to: then `error`.

    desired: the last that it was told, for a control that has lost it. idle_s: seconds since a request came.
    role: what it is there for, such as "prefill"; "" for all of its model's work. unsupported: whether it
    failed because its engine has no such operation. on_its_way: whether it is not yet what `actual` says.
    """

    replica: str
    actual: Actual
    weights: str
    done: int
    desired: Desired
    error: str = ""
    group: Group | None = None
    idle_s: float = 0.0
    role: str = ""
    unsupported: bool = False
    on_its_way: bool = False


class Moved(msgspec.Struct, frozen=True):
    """Where a gateway sends a model's requests. open: requests still at the replicas before."""

    application: str
    open: int = 0


class Order(msgspec.Struct, frozen=True):
    """Something to do once, whose outcome is `{"result": ...}` or `{"error": sentence}`."""

    id: int
    operation: str
    arguments: Mapping[str, Any]


class News(msgspec.Struct, frozen=True):
    """What a replica that follows is told."""

    desired: Desired
    orders: tuple[Order, ...] = ()


Outcome = dict[str, Any]


class _Sleep(msgspec.Struct, forbid_unknown_fields=True):
    level: Literal[1, 2] = 1
    mode: Literal["wait", "abort"] = "wait"


class _Pause(msgspec.Struct, forbid_unknown_fields=True):
    mode: PauseMode = "keep"
    clear_cache: bool = False


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """An operation without arguments."""


class Shift(msgspec.Struct, forbid_unknown_fields=True):
    application: str


class _Rpc(msgspec.Struct, forbid_unknown_fields=True):
    method: str
    timeout: float | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


FOLLOW_S = 3.0
"""How long a follower's question to control stays open without news."""

WARN_AFTER = 30
"""Control that has not answered so many times in a row is worth a warning: it was not just restarted."""

CHANGES = ("sleep", "wakeup", "pause", "resume", "update_weights")
"""Operations that change what is desired of replicas."""

SHIFT = "shift"
"""The operation that changes what is desired of gateways."""

_FORMS: dict[str, type[msgspec.Struct]] = {
    "sleep": _Sleep,
    "wakeup": _Nothing,
    "pause": _Pause,
    "resume": _Nothing,
    "update_weights": Weights,
    SHIFT: Shift,
    "is_sleeping": _Nothing,
    "is_paused": _Nothing,
    "reset_prefix_cache": _Nothing,
    "start_profile": _Nothing,
    "stop_profile": _Nothing,
    "collective_rpc": _Rpc,
}

OPERATIONS = tuple(_FORMS)


def checked(operation: str, arguments: Mapping[str, Any]) -> Any:
    """The operation's arguments as one value. Raises: BadRequest that says what is allowed."""
    if operation not in _FORMS:
        raise BadRequest(f"There is no operation '{operation}'; there are {', '.join(OPERATIONS)}.")
    try:
        found = msgspec.convert(arguments, _FORMS[operation])
    except msgspec.ValidationError as error:
        names = ", ".join(_FORMS[operation].__struct_fields__) or "no arguments"
        raise BadRequest(f"{operation}: {error}. It takes {names}.") from error
    if isinstance(found, Weights) and not Path(found.source).is_absolute():
        raise BadRequest(f"update_weights: source must be an absolute path, not {found.source!r}.")
    return found


def changed(before: Desired, operation: str, asked: Any, replica: str) -> Desired:
    """What is desired after one of `CHANGES`. asked: as `checked` gives it."""
    now = msgspec.structs.replace(before, replica=replica)
    match operation:
        case "sleep":
            return msgspec.structs.replace(now, sleep=asked.level, sleep_mode=asked.mode)
        case "wakeup":
            return msgspec.structs.replace(now, sleep=0)
        case "pause":
            return msgspec.structs.replace(now, pause=asked.mode, clear_cache=asked.clear_cache)
        case "shift":
            return msgspec.structs.replace(now, application=asked.application)
        case "resume":
            return msgspec.structs.replace(now, pause=None)
        case _:
            return msgspec.structs.replace(now, weights=asked)


def due(desired: Desired, told: Told, others_change: bool) -> Desired:
    """What a replica shall be now. Other weights wait while another one changes: so one of several serves."""
    changes = desired.weights is not None and desired.weights.version != told.weights
    if others_change and changes and told.actual == "ready" and not desired.sleep:
        return told.desired
    return desired
