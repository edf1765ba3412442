"""Models that share the same memory: which of them are awake, and which one sleeps to make room.

Its decisions are desired state like any other, and survive a restart of control.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import Unavailable
from penstock.serve.control.desired import DesiredStates
from penstock.serve.control.followers import Followers
from penstock.serve.control.operations import Sleep, WakeUp
from penstock.serve.control.state import ReplicaStatus, SharingGroup

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class TimeSharing:
    """For all groups of an application. perform: as `LLMControl.perform`."""

    _desired: DesiredStates
    _followers: Followers
    _perform: Callable[..., Awaitable[dict[str, Any]]]
    _groups: dict[str, SharingGroup] = field(default_factory=dict[str, SharingGroup])
    _models: dict[str, str] = field(default_factory=dict[str, str])
    _switching: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    _woken: dict[str, float] = field(default_factory=dict[str, float])
    _used: dict[str, float] = field(default_factory=dict[str, float])

    def hear(self, status: ReplicaStatus) -> None:
        """A replica's report. A model that is new to its group starts asleep when the group is full; one that
        has left its group is woken up, as no request would do it.
        """
        model, group = status.model, status.group
        if group is None:
            if self._models.pop(model, None) is not None and self._desired.get(model).sleep:
                self._desired.change(model, "", "wakeup", WakeUp())
            return
        self._groups[group.name] = group
        if self._models.get(model) == group.name:
            return
        awake = self._awake(group.name)
        self._models[model] = group.name
        if status.actual == "starting" and not status.desired.version and len(awake) >= group.max_awake:
            self._desired.change(model, "", "sleep", Sleep())

    def forget(self, model: str) -> None:
        """For a model that has left the application."""
        self._models.pop(model, None)

    async def wake(self, model: str, idle_s: Mapping[str, float]) -> None:
        """For a request: makes room and wakes the model. Raises: Unavailable when either fails.

        idle_s: seconds since that gateway's last request to each model; newer than what replicas report.
        """
        now = time.monotonic()
        for each, seconds in idle_s.items():
            self._used[each] = max(self._used.get(each, 0.0), now - seconds)
        name = self._models.get(model)
        if name is None:
            raise Unavailable(f"No replica of model '{model}' has reported yet.")
        async with self._switching[name]:
            if self._desired.get(model).sleep:
                await self._make_room(self._groups[name])
                log.info("%s: waking up", model)
                outcome = await self._perform("wakeup", model)
                self._woken[model] = time.monotonic()
                if not outcome["ok"]:
                    raise Unavailable(f"Model '{model}' did not wake up: {outcome['replicas']}")

    async def _make_room(self, group: SharingGroup) -> None:
        while len(awake := self._awake(group.name)) >= group.max_awake:
            victim = max(awake, key=lambda model: (self._desired.get(model).sleep > 0, self._idle_s(model)))
            await asyncio.sleep(self._woken.get(victim, 0.0) + group.min_awake_s - time.monotonic())
            log.info("%s: going to sleep, to make room", victim)
            outcome = await self._perform("sleep", victim, level=1, mode="wait")
            if not outcome["ok"] or victim in self._awake(group.name):
                raise Unavailable(f"Model '{victim}' did not go to sleep: {outcome['replicas']}")

    def _awake(self, group: str) -> list[str]:
        """Models that hold memory: also one that is to sleep, until all of its replicas do."""
        return [model for model, name in self._models.items() if name == group and self._holds_memory(model)]

    def _holds_memory(self, model: str) -> bool:
        if not self._desired.get(model).sleep:
            return True
        return any(
            status.in_transition or status.actual != "asleep"
            for status in self._followers.living(model).values()
        )

    def _idle_s(self, model: str) -> float:
        return min(self._followers.idle_s(model), time.monotonic() - self._used.get(model, 0.0))
