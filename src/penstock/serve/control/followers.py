"""The replicas that follow control: each keeps one call open here, which returns when there is an update.

So a replica that starts, restarts or missed an update comes to the same state as the others.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.errors import BadRequest, ModelNotFound
from penstock.serve.control.desired import DesiredStates, Signal
from penstock.serve.control.state import FOLLOW_S, Command, DesiredState, Outcome, ReplicaStatus, Update

GONE_S = 3 * FOLLOW_S
"""A follower that has been silent for so long is gone."""

_FIRST_S = 5.0  # for replicas to report after control was restarted
_GONE = "The replica is gone. Its replacement starts in the desired state."


class _Follower:
    def __init__(self) -> None:
        self.status: ReplicaStatus | None = None
        self.heard_at = 0.0
        self.sent_version = 0
        self.commands: list[Command] = []

    @property
    def idle_s(self) -> float:
        """Seconds without a request; 0 for one that was busy at its last report."""
        idle_s = self.status.idle_s if self.status is not None else 0.0
        return idle_s and idle_s + time.monotonic() - self.heard_at

    @property
    def is_changing(self) -> bool:
        """Whether it serves, and was sent a version that it has neither reached nor failed to reach."""
        status = self.status
        if status is None or status.actual == "starting":
            return False
        return max(self.sent_version, status.desired.version) > status.version

    def hear(self, status: ReplicaStatus) -> bool:
        """Whether anything but the time since its last request has changed."""
        known, self.status, self.heard_at = self.status, status, time.monotonic()
        return known is None or msgspec.structs.replace(known, idle_s=status.idle_s) != status


class Followers:
    """By model and replica."""

    def __init__(self, desired: DesiredStates, changed: Signal) -> None:
        self._desired = desired
        self._changed = changed
        self._models: dict[str, dict[str, _Follower]] = {}
        self._numbers = itertools.count(1)
        self._outcomes: dict[int, dict[str, Outcome]] = {}

    def hear(self, model: str, status: ReplicaStatus) -> None:
        """Records a replica's report."""
        follower = self._models.setdefault(model, {}).setdefault(status.replica, _Follower())
        if follower.hear(status):
            self._changed.send()
        self._desired.recover(model, status.replica, status.desired)

    async def update(self, model: str, status: ReplicaStatus, wait_s: float) -> Update:
        """The update for a replica that was heard: at once if there is one, else after `wait_s`."""
        follower, deadline = self._models[model][status.replica], time.monotonic() + wait_s
        while True:
            desired = self._due(model, status)
            if desired.version != status.desired.version or follower.commands:
                break
            if not await self._changed.wait_until(deadline):
                break
        commands, follower.commands = tuple(follower.commands), []
        follower.sent_version = desired.version
        return Update(desired, commands)

    def _due(self, model: str, status: ReplicaStatus) -> DesiredState:
        others = (self._models[model][one] for one in self.living(model) if one != status.replica)
        others_change = any(other.is_changing for other in others)
        return due(self._desired.get(model, status.replica), status, others_change)

    async def wait_for_first(self) -> None:
        """After a restart of control, replicas report within a second."""
        deadline = time.monotonic() + _FIRST_S
        while not self._models and await self._changed.wait_until(deadline):
            pass

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
        followers, oldest = self._models.get(model, {}), time.monotonic() - GONE_S
        for replica in [one for one, follower in followers.items() if follower.heard_at < oldest]:
            del followers[replica]
            self._desired.forget(model, replica)
        return {replica: follower.status for replica, follower in followers.items() if follower.status}

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
        for one in ids:
            self._models[model][one].commands.append(command)
        self._changed.send()
        try:
            return await self.outcomes(model, ids, outcomes.get, timeout_s, "It may still end.")
        finally:
            del self._outcomes[command.id]

    def done(self, command: int, replica: str, outcome: Outcome) -> None:
        """Records a command's outcome."""
        if command in self._outcomes:
            self._outcomes[command][replica] = outcome
            self._changed.send()

    async def outcomes(
        self,
        model: str,
        ids: Sequence[str],
        outcome: Callable[[str], Outcome | None],
        timeout_s: float,
        late: str,
    ) -> dict[str, Outcome]:
        """Waits for `outcome` of each replica; those that are gone, or late, get an error."""
        deadline, found = time.monotonic() + timeout_s, dict[str, Outcome]()
        while True:
            for one in ids:
                if one not in found and (one not in self.living(model) or outcome(one) is not None):
                    found[one] = outcome(one) or {"error": _GONE}
            if len(found) == len(ids) or time.monotonic() >= deadline:
                break
            await self._changed.wait_until(min(deadline, time.monotonic() + FOLLOW_S))
        missing = {"error": f"No answer within {timeout_s:g} s. {late}"}
        return {one: found.get(one, missing) for one in ids}


def due(desired: DesiredState, status: ReplicaStatus, others_change: bool) -> DesiredState:
    """What a replica should be now. New weights wait while another replica changes, so that one serves."""
    changes = desired.weights is not None and desired.weights.version != status.weights
    if others_change and changes and status.actual == "ready" and not desired.sleep:
        return status.desired
    return desired
