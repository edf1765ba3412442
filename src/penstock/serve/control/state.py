"""Desired and actual state of a model's replicas: the messages between control, replicas and gateways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.engine_control import PauseMode

NAME = "LLMControl"
"""Control's deployment, in the application of the models that it controls."""

FOLLOW_S = 3.0
"""Control answers a long poll after so long, also without a change."""

WARN_AFTER = 30
"""Failed polls in a row before a warning is logged: a restart of control takes fewer."""

Actual = Literal["starting", "ready", "asleep", "paused"]

Outcome = dict[str, Any]
"""`{"result": ...}` or `{"error": sentence}`."""


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights that replace the config's. source: a folder that every node sees."""

    source: str
    version: str
    mode: PauseMode = "wait"


class DesiredState(msgspec.Struct, frozen=True):
    """Units: sleep is the level, 0 for awake. pause: how running requests are treated; None for no pause.

    version: counts all changes in the application. replica: the only one that this is for; "" for all of the
    model. application: whose replicas gateways send requests to; "" for their own. Field names are on disk.
    """

    version: int = 0
    replica: str = ""
    sleep: int = 0
    sleep_mode: PauseMode = "wait"
    pause: PauseMode | None = None
    clear_cache: bool = False
    weights: Weights | None = None
    application: str = ""


class SharingGroup(msgspec.Struct, frozen=True):
    """Models that share memory. max_awake: how many of them at a time. min_awake_s: seconds."""

    name: str
    max_awake: int
    min_awake_s: float


class ReplicaStatus(msgspec.Struct, frozen=True):
    """What a replica reports. version: the one that it has reached, or failed to reach: then `error`.

    desired: the last that it received, for a control that has lost it. idle_s: since its last request.
    role: what it is there for, such as "prefill"; "" for all of its model's work. unsupported: whether it
    failed because its engine lacks the operation. in_transition: whether it is still on the way to `actual`.
    """

    replica: str
    actual: Actual
    weights: str
    version: int
    desired: DesiredState
    error: str = ""
    group: SharingGroup | None = None
    idle_s: float = 0.0
    role: str = ""
    unsupported: bool = False
    in_transition: bool = False


class RouteStatus(msgspec.Struct, frozen=True):
    """Where a gateway sends a model's requests. open: requests that the previous replicas still answer."""

    application: str
    open: int = 0


class Command(msgspec.Struct, frozen=True):
    """An operation to perform once."""

    id: int
    operation: str
    arguments: Mapping[str, Any]


class Update(msgspec.Struct, frozen=True):
    """Control's answer to a replica's long poll."""

    desired: DesiredState
    commands: tuple[Command, ...] = ()
