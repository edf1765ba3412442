"""What handles call to operate one replica; `LLMControl` does the same to all of a model, and keeps it.

`handle.broadcast("sleep", level=1)` reaches all replicas that live now. What is desired of the model, once it
changes, goes before what was done here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.serve.replica.reconciler import Steward


class Operated:
    """A server with a steward. Arguments and errors are those of `Engine`."""

    steward: Steward

    async def sleep(self, **options: Any) -> None:
        """level: 1 or 2. mode: "wait" or "abort"."""
        await self.steward.perform("sleep", options)

    async def wakeup(self) -> None:
        await self.steward.perform("wakeup", {})

    async def is_sleeping(self) -> bool:
        return await self.steward.perform("is_sleeping", {})

    async def pause(self, **options: Any) -> None:
        """mode: "keep", "wait" or "abort". clear_cache: whether to forget what was computed."""
        await self.steward.perform("pause", options)

    async def resume(self) -> None:
        await self.steward.perform("resume", {})

    async def is_paused(self) -> bool:
        return await self.steward.perform("is_paused", {})

    async def reset_prefix_cache(self) -> None:
        await self.steward.perform("reset_prefix_cache", {})

    async def start_profile(self) -> None:
        await self.steward.perform("start_profile", {})

    async def stop_profile(self) -> None:
        await self.steward.perform("stop_profile", {})

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Results of all workers of this replica. timeout: seconds."""
        asked = {"method": method, "timeout": timeout, "args": list(args), "kwargs": dict(kwargs or {})}
        return await self.steward.perform("collective_rpc", asked)

    async def update_weights(self, **options: Any) -> None:
        """source: an absolute path that every node sees. version: a name for these weights. mode."""
        await self.steward.perform("update_weights", options)

    async def weights_version(self) -> str:
        return self.steward.weights_version()
