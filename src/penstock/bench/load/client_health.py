"""Whether the client itself was in the way: the CPU that it took, and how late its event loop was."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

_BEAT_S = 0.02


@dataclass(frozen=True, slots=True)
class WorkerStrain:
    """One worker's measured time. cpu: share of one core. lags_s: how late each beat of the loop was."""

    cpu: float
    lags_s: tuple[float, ...]


class LagProbe:
    """Beats from its making on; what is before `begin` (monotonic clock) is not counted."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._lags: list[float] = []
        self._from = (time.monotonic(), time.process_time())
        self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        await asyncio.sleep(max(0.0, self._begin - time.monotonic()))
        self._from = (time.monotonic(), time.process_time())
        while True:
            due = time.monotonic() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            self._lags.append(max(0.0, time.monotonic() - due))

    def end(self) -> WorkerStrain:
        self._task.cancel()
        began, spent = self._from
        wall_s = time.monotonic() - began
        return WorkerStrain((time.process_time() - spent) / wall_s if wall_s else 0.0, tuple(self._lags))
