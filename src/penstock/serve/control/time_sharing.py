"""Models that take turns on the same memory: who is awake, and who goes to sleep for whom.

Part of control: what it decides is desired state like any other, so that it outlives whoever decided it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.errors import Unavailable
from penstock.serve.control.state import Group, Told, checked

if TYPE_CHECKING:
    from penstock.serve.control.deployment import LLMControl

log = logging.getLogger(__name__)

_SLEEP = checked("sleep", {"level": 1, "mode": "wait"})


class Turns:
    """Of all groups of an application."""

    def __init__(self, control: LLMControl) -> None:
        self._control = control
        self._groups: dict[str, Group] = {}
        self._models: dict[str, str] = {}
        self._switching: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._woken: dict[str, float] = {}
        self._used: dict[str, float] = {}

    def enter(self, model: str, told: Told) -> None:
        """A replica speaks. A model that is new to its group comes up asleep where the group is full."""
        if told.group is None or model in self._models:
            return
        self._groups[told.group.name] = told.group
        awake = self._awake(told.group.name)
        self._models[model] = told.group.name
        if told.actual == "starting" and not told.desired.version and len(awake) >= told.group.awake:
            self._control.declare(model, "", "sleep", _SLEEP)

    def used(self, idle_s: Mapping[str, float]) -> None:
        """What a gateway says, which is newer than what replicas have told."""
        now = time.monotonic()
        for model, seconds in idle_s.items():
            self._used[model] = max(self._used.get(model, 0.0), now - seconds)

    async def want(self, model: str) -> None:
        """Raises: Unavailable when no turn can be had."""
        name = self._models.get(model)
        if name is None:
            raise Unavailable(f"No replica of model '{model}' has spoken yet.")
        async with self._switching[name]:
            if self._control.desired(model).sleep:
                await self._make_room(self._groups[name])
                log.info("%s: its turn begins", model)
                outcome = await self._control.perform("wakeup", model)
                self._woken[model] = time.monotonic()
                if not outcome["ok"]:
                    raise Unavailable(f"Model '{model}' did not wake up: {outcome['replicas']}")

    async def _make_room(self, group: Group) -> None:
        while len(awake := self._awake(group.name)) >= group.awake:
            victim = max(
                awake, key=lambda model: (self._control.desired(model).sleep > 0, self._idle_s(model))
            )
            await asyncio.sleep(self._woken.get(victim, 0.0) + group.min_awake_s - time.monotonic())
            log.info("%s: its turn ends", victim)
            outcome = await self._control.perform("sleep", victim, level=1, mode="wait")
            if not outcome["ok"] or victim in self._awake(group.name):
                raise Unavailable(f"Model '{victim}' did not go to sleep: {outcome['replicas']}")

    def _awake(self, group: str) -> list[str]:
        """Those that hold memory: also one that is to sleep, until all of its replicas do."""
        return [model for model, name in self._models.items() if name == group and self._holds_memory(model)]

    def _holds_memory(self, model: str) -> bool:
        if not self._control.desired(model).sleep:
            return True
        return any(
            told.on_its_way or told.actual not in ("asleep", "starting")
            for told in self._control.living(model).values()
        )

    def _idle_s(self, model: str) -> float:
        """Of its busiest replica, as far as is known."""
        return min(self._control.idle_s(model), time.monotonic() - self._used.get(model, 0.0))
