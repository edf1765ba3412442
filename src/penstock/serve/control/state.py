"""Desired and actual state of a model's replicas: the messages between control, replicas and gateways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from penstock.engine_control import PauseMode

NAME = "LLMControl"
"""Control's deployment, in the application of the models that it controls."""

FOLLOW_S = 3.0
"""Control and its followers send each other something at least this often."""

GONE_S = 3 * FOLLOW_S
"""A follower that was silent for so long is gone, and so is control for a follower."""

TIMEOUT_S = 300.0
"""Limit of an operation that gives none."""

Started = Literal["ready", "asleep", "paused"]
Actual = Literal["starting"] | Started

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


class AdapterSources(msgspec.Struct, frozen=True):
    """What replicas take over of `lora_config` while they run. id: of these fields, and of the try."""

    id: str
    fields: Mapping[str, Any]


class SharingGroup(msgspec.Struct, frozen=True):
    """Models that share memory. max_awake: how many of them at a time. min_awake_s: seconds."""

    name: str
    max_awake: int
    min_awake_s: float


class ReplicaStatus(msgspec.Struct, frozen=True, tag="replica"):
    """What a replica reports. version: the one that it has reached, or failed to reach: then `error`.

    desired: the last that it received, for a control that has lost it. idle_s: since its last request.
    role: what it is there for, such as "prefill"; "" for all of its model's work. unsupported: whether it
    failed because its engine lacks the operation. in_transition: whether it is still on the way to `actual`.
    adapters: id of the `AdapterSources` that it has taken over, or failed to: then `adapters_fault`.
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
    model: str = ""
    adapters: str = ""
    adapters_fault: str = ""


class RouteStatus(msgspec.Struct, frozen=True):
    """Where a gateway sends a model's requests. open: requests that the previous replicas still answer."""

    application: str
    open: int = 0


class CanaryReport(msgspec.Struct, frozen=True):
    """What a gateway has counted of a canary and of the other versions of its model.

    key: the name of the version, and what it and the canary's config are made of. counts: first its own, then
    those of the others: requests, those that failed, and what `Buckets.numbers` has of TTFT and ITL. others:
    their ids.
    """

    key: str
    config: dict[str, Any]
    counts: list[float]
    others: Sequence[str] = ()


class CanaryState(msgspec.Struct, frozen=True):
    """Its share in percent, and how it ended; "" while it goes on."""

    percent: float
    outcome: str = ""


class GatewayStatus(msgspec.Struct, frozen=True, tag="gateway"):
    """What a gateway reports: the route of every model. shifting: whether it moves one. fault: why it cannot
    take over the newest update, which it tries again. canaries: those that go on.
    """

    gateway: str
    routes: Mapping[str, RouteStatus]
    shifting: bool = False
    fault: str = ""
    canaries: Sequence[CanaryReport] = ()


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A replica's outcome of a command."""

    command: int
    replica: str
    outcome: Outcome


class Command(msgspec.Struct, frozen=True):
    """An operation to perform once."""

    id: int
    operation: str
    arguments: Mapping[str, Any]


class Update(msgspec.Struct, frozen=True):
    """What control sends to a replica. adapters: until it has taken them over; None for no change."""

    desired: DesiredState
    commands: tuple[Command, ...] = ()
    adapters: AdapterSources | None = None


class Routes(msgspec.Struct, frozen=True):
    """What control sends to a gateway.

    applications: whose replicas answer for a model, by model, where they are not the gateway's own. wanted:
    how many replicas Serve should run there, by model. canaries: by their keys.
    """

    applications: Mapping[str, str]
    wanted: Mapping[str, int] = {}
    canaries: Mapping[str, CanaryState] = {}
