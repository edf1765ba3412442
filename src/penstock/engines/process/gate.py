"""A gate before the child: requests wait here while it sleeps, and are counted while it serves them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Gate:
    """Open at first. Units: requests."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self.empty = asyncio.Event()
        """Set while no request is inside."""
        self.empty.set()
        self.busy = asyncio.Event()
        """Set while a request is inside."""
        self.inside = 0
        self.waiting = 0

    @asynccontextmanager
    async def passed(self) -> AsyncGenerator[None]:
        """Waits until the gate is open; counted as inside until the end of the block."""
        self.waiting += 1
        try:
            await self.opened.wait()
        finally:
            self.waiting -= 1
        self.inside += 1
        self.busy.set()
        self.empty.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                self.busy.clear()
                self.empty.set()
