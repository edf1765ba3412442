"""Why and how a job is to end before its last row. Set by signals and budgets, read by the job."""

from __future__ import annotations

import asyncio


class Stop:
    """First asked: no new rows, those that run may end. Asked again: at once. For one event loop."""

    def __init__(self) -> None:
        self.why: str | None = None
        self._asked = asyncio.Event()
        self._now = asyncio.Event()

    def ask(self, why: str) -> None:
        """The reason of the first time counts."""
        if self.why is not None:
            self._now.set()
            return
        self.why = why
        self._asked.set()

    def at_once(self) -> None:
        self._now.set()

    @property
    def asked(self) -> bool:
        return self.why is not None

    async def wait(self) -> None:
        await self._asked.wait()

    async def wait_now(self, limit_s: float) -> None:
        """Returns when it was asked again, or when the time is over, counted from now."""
        try:
            async with asyncio.timeout(limit_s):
                await self._now.wait()
        except TimeoutError:
            return
