"""Sends what a process has counted to the usage store, once a second, and takes its answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from penstock.serve.tenancy.limits import Allowance
from penstock.serve.tenancy.usage import Settlement, Totals, UsageCounters

log = logging.getLogger(__name__)

Settle = Callable[[Settlement], Awaitable[Totals]]
"""Hands a settlement to the usage store. Raises: any exception, when it may not have it."""

Served = Callable[[str, str, str, float], None]
"""A model, a class of work, a tenant, and priced tokens."""

_SETTLE_S, _SOON_S = 1.0, 0.2
_FIRST_S = _LAST_S = 2.0  # for the first settlement and the last one
_WARN_S = 60.0


class UsageReporter:
    """Of one process, between `start` and `close`."""

    def __init__(
        self,
        settle: Settle | None,
        allowances: Callable[[], Mapping[str, Allowance]],
        *,
        is_gateway: bool = True,
        served: Served | None = None,
    ) -> None:
        """settle: None to report nothing. allowances: that other gateways share, by name. served: called with
        what others have served.
        """
        self._served = served
        self._settle = settle
        self._allowances = allowances
        self._soon = asyncio.Event()
        self._settled_at = self._warned_at = time.monotonic()
        self._unanswered = False
        self._task: asyncio.Task[None] | None = None
        self.counters = UsageCounters(is_gateway=is_gateway)

    async def start(self) -> None:
        """Returns when the totals of all tenants are known, or the store does not answer."""
        await self._try(_FIRST_S)
        if self._settle is not None:
            self._task = asyncio.create_task(self._send_often())

    async def close(self) -> None:
        """Sends what is left."""
        if self._task is not None:
            self._task.cancel()
            await self._try(_LAST_S)
            await self._try(_LAST_S)  # after one without an answer: what was counted since

    def hurry(self) -> None:
        """Has other gateways' counts asked for soon."""
        self._soon.set()

    async def _send_often(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S - _SOON_S):
                    await self._soon.wait()
            await asyncio.sleep(_SOON_S)
            self._soon.clear()
            await self._send()

    async def _try(self, limit_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._send()

    async def _send(self) -> None:
        """Without an answer, the same is sent again next time; soon after it, what was counted meanwhile."""
        if self._settle is None:
            return
        now, again, self._unanswered = time.monotonic(), self._unanswered, True
        try:
            totals = await self._settle(self.counters.settlement(self._allowances(), now))
        except Exception as error:  # of control, or of the disk
            self.counters.unanswered(now - self._settled_at, self._allowances())
            if now - self._warned_at > _WARN_S:
                self._warned_at = now
                log.warning("Usage could not be stored for a while, and is kept: %s", error)
            return
        self._settled_at = self._warned_at = now
        self._unanswered = False
        if again:
            self.hurry()
        self.counters.settled(totals, self._allowances())
        if self._served is not None:
            for one in totals.served:
                self._served(*one)
