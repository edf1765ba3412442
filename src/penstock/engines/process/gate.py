"""A gate before the child: requests wait here while it sleeps, and are counted while it serves them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Gate:
    """Open at first. Units: requests."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._busy = asyncio.Event()
        self.inside = 0
        self.waiting = 0

    @asynccontextmanager
    async def passed(self) -> AsyncGenerator[None]:
        """Waits until the gate is open; counted as inside until the end of the block."""
        self.waiting += 1
        try:
            await self._opened.wait()
        finally:
            self.waiting -= 1
        self.inside += 1
        self._busy.set()
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                self._busy.clear()
                self._empty.set()

    def shut(self) -> None:
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    async def empty(self) -> None:
        """Returns when no request is inside."""
        await self._empty.wait()

    async def busy(self) -> None:
        """Returns when a request is inside."""
        await self._busy.wait()
