"""The replicas that follow control, and what is sent to each.

A replica that starts, restarts or missed an update comes to the same state as the others.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from penstock.errors import BadRequest, ModelNotFound
from penstock.serve.control.desired import DesiredStates, Signal
from penstock.serve.control.state import (
    FOLLOW_S,
    GONE_S,
    AdapterSources,
    Command,
    DesiredState,
    Outcome,
    ReplicaStatus,
    Update,
)

_FIRST_S = 5.0  # for replicas to report after control was restarted
_T = TypeVar("_T")
_GONE = "The replica is gone. Its replacement starts in the desired state."


class Presence:
    """Whether a follower is there: it has a link, or had one until a moment ago."""

    def __init__(self) -> None:
        self.heard_at = time.monotonic()
        self._link: object = None

    @property
    def gone(self) -> bool:
        return not self.has_link and time.monotonic() - self.heard_at > GONE_S

    @property
    def has_link(self) -> bool:
        return self._link is not None

    async def updates(
        self, changed: Signal, due: Callable[[], _T], sending: Callable[[_T], None] = lambda update: None
    ) -> AsyncGenerator[_T]:
        """What is due: at once, at every change, and each `FOLLOW_S`. sending: called with each before.

        Ends when there is a newer link, or control ends.
        """
        mine = self._link = object()
        changed.send()
        try:
            while self._link is mine and not changed.closed:
                sent = due()
                sending(sent)
                yield sent

                def is_due(sent: _T = sent) -> bool:
                    return due() != sent or self._link is not mine or changed.closed

                await changed.wait_for(is_due, FOLLOW_S)
        finally:
            if self._link is mine:
                self._link, self.heard_at = None, time.monotonic()
            changed.send()


class _Replica(Presence):
    def __init__(self, status: ReplicaStatus) -> None:
        super().__init__()
        self.status = status
        self.sent_version = 0
        self.commands: dict[int, Command] = {}
        self.sent = set[int]()  # of them, on its link

    @property
    def idle_s(self) -> float:
        """Seconds without a request; 0 for one that was busy at its last report."""
        return self.status.idle_s and self.status.idle_s + time.monotonic() - self.heard_at

    @property
    def is_changing(self) -> bool:
        """Whether it serves, and was sent a version that it has neither reached nor failed to reach."""
        if self.status.actual == "starting":
            return False
        return max(self.sent_version, self.status.desired.version) > self.status.version

    def hear(self, status: ReplicaStatus) -> bool:
        """Whether anything but the time since its last request has changed."""
        known, self.status, self.heard_at = self.status, status, time.monotonic()
        return msgspec.structs.replace(known, idle_s=status.idle_s) != status


class Followers:
    """By model and replica."""

    def __init__(self, desired: DesiredStates) -> None:
        self._desired = desired
        self._adapters: Mapping[str, AdapterSources] = {}
        self._models: dict[str, dict[str, _Replica]] = {}
        self._numbers = itertools.count(time.time_ns())  # no earlier control has used them
        self._outcomes: dict[int, dict[str, Outcome]] = {}

    def hear(self, status: ReplicaStatus) -> None:
        """Records a replica's report."""
        replicas = self._models.setdefault(status.model, {})
        if status.replica not in replicas:
            replicas[status.replica] = _Replica(status)
            self._desired.changed.send()
        elif replicas[status.replica].hear(status):
            self._desired.changed.send()
        self._desired.recover(status.model, status.replica, status.desired)

    def updates(self, model: str, replica: str) -> AsyncGenerator[Update]:
        """For a replica that was heard."""
        follower = self._models[model][replica]

        def due() -> Update:
            status, adapters = follower.status, self._adapters.get(model)
            if adapters is not None and adapters.id == status.adapters and not status.adapters_fault:
                adapters = None
            commands = [one for id, one in follower.commands.items() if id not in follower.sent]
            return Update(self._due(model, status), tuple(commands), adapters)

        def sending(update: Update) -> None:
            follower.sent |= follower.commands.keys()
            follower.sent_version = update.desired.version

        follower.sent.clear()  # it may not have heard them; those that it has, it knows
        return follower.updates(self._desired.changed, due, sending)

    def set_adapters(self, adapters: Mapping[str, AdapterSources]) -> None:
        """By model, for all replicas that there are and will be."""
        known = self._adapters
        self._adapters = {
            model: known[model] if model in known and known[model].fields == sources.fields else sources
            for model, sources in adapters.items()
        }
        self._desired.changed.send()

    def retry_adapters(self) -> None:
        """Has the replicas of models where adapters could not be taken over try it now, and counts only what
        they say then.
        """
        for model, wanted in self._adapters.items():
            if any(replica.status.adapters_fault for replica in self._models.get(model, {}).values()):
                name = f"{wanted.id.partition('-')[0]}-{next(self._numbers)}"
                self._adapters = {**self._adapters, model: AdapterSources(name, wanted.fields)}
        self._desired.changed.send()

    def adapters(self) -> tuple[list[str], list[str]]:
        """Models with a replica that has not tried yet to take their adapters over; why others cannot."""
        late, faults = set[str](), set[str]()
        for model, wanted in self._adapters.items():
            for replica in self._models.get(model, {}).values():
                status = replica.status
                if not replica.has_link or status.actual == "starting":
                    continue
                if status.adapters != wanted.id:
                    late.add(model)
                elif status.adapters_fault:
                    what = f"a replica of '{model}' keeps its adapters, and tries again"
                    faults.add(f"{what}: {status.adapters_fault}")
        return sorted(late), sorted(faults)

    def _due(self, model: str, status: ReplicaStatus) -> DesiredState:
        others = (self._models[model][one] for one in self.living(model) if one != status.replica)
        others_change = any(other.is_changing for other in others)
        return due(self._desired.get(model, status.replica), status, others_change)

    async def wait_for_first(self) -> None:
        """After a restart of control, replicas report within a second."""
        await self._desired.changed.wait_for(lambda: self._models, _FIRST_S)

    def forget(self, model: str) -> None:
        """For a model that has left the application, and has no replica."""
        self._models.pop(model, None)

    def models(self) -> list[str]:
        return list(self._models)

    def model(self, model: str | None) -> str:
        """The model meant; None is the only one.

        Raises: BadRequest for None among several, ModelNotFound for one without followers.
        """
        names = list(self._models)
        if model is None and len(names) != 1:
            raise BadRequest(f"Which model? There are {', '.join(names) or 'none yet'}.", param="model")
        if model is not None and model not in names:
            raise ModelNotFound(f"There is no model '{model}'; there are {', '.join(names) or 'none yet'}.")
        return model or names[0]

    def replicas(self, model: str, replica: str | None) -> list[str]:
        """The replicas meant; None is all that have started: the others start in the desired state.

        Raises: BadRequest for one that the model does not have.
        """
        living = [one for one, status in self.living(model).items() if status.actual != "starting"]
        if replica is not None and replica not in living:
            raise BadRequest(
                f"Model '{model}' has no replica '{replica}'; it has {', '.join(living) or 'none'}.",
                param="replica",
            )
        return living if replica is None else [replica]

    def living(self, model: str) -> dict[str, ReplicaStatus]:
        """The last reports of replicas that are not gone."""
        followers = self._models.get(model, {})
        for replica in [one for one, follower in followers.items() if follower.gone]:
            del followers[replica]
            self._desired.forget(model, replica)
        return {replica: follower.status for replica, follower in followers.items()}

    def idle_s(self, model: str) -> float:
        """Seconds since the model's last request, as its replicas have reported."""
        idle = [self._models[model][one].idle_s for one in self.living(model)]
        return min(idle, default=math.inf)

    async def command(
        self, model: str, ids: Sequence[str], operation: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Outcome]:
        """Has replicas perform an operation once; outcomes by replica."""
        command = Command(next(self._numbers), operation, arguments)
        outcomes = self._outcomes[command.id] = {}
        followers = [self._models[model][one] for one in ids]
        for follower in followers:
            follower.commands[command.id] = command
        self._desired.changed.send()
        try:
            return await self.outcomes(model, ids, outcomes.get, timeout_s, "It may still end.")
        finally:
            del self._outcomes[command.id]
            for follower in followers:
                del follower.commands[command.id]

    def done(self, command: int, replica: str, outcome: Outcome) -> None:
        """Records a command's outcome."""
        if command in self._outcomes:
            self._outcomes[command][replica] = outcome
            self._desired.changed.send()

    async def outcomes(
        self,
        model: str,
        ids: Sequence[str],
        outcome: Callable[[str], Outcome | None],
        timeout_s: float,
        late: str,
    ) -> dict[str, Outcome]:
        """Waits for `outcome` of each replica; those that are gone, or late, get an error."""
        found = dict[str, Outcome]()

        def is_complete() -> bool:
            for one in ids:
                if one not in found and (one not in self.living(model) or outcome(one) is not None):
                    found[one] = outcome(one) or {"error": _GONE}
            return len(found) == len(ids)

        await self._desired.changed.wait_for(is_complete, timeout_s)
        missing = {"error": f"No answer within {timeout_s:g} s. {late}"}
        return {one: found.get(one, missing) for one in ids}


def due(desired: DesiredState, status: ReplicaStatus, others_change: bool) -> DesiredState:
    """What a replica should be now. New weights wait while another replica changes, so that one serves."""
    changes = desired.weights is not None and desired.weights.version != status.weights
    if others_change and changes and status.actual == "ready" and not desired.sleep:
        return status.desired
    return desired
