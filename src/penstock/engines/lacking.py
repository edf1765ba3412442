"""What an engine says of operations that it does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from penstock.engine import DEFAULT_WEIGHTS, PauseMode
from penstock.errors import Unsupported


class Lacking:
    """Base of engines: each control operation is `Unsupported` until the engine has its own."""

    async def sleep(self, level: int = 1, mode: PauseMode = "wait") -> None:
        self._lacks("sleep")

    async def wakeup(self) -> None:
        """It never sleeps."""

    def is_sleeping(self) -> bool:
        return False

    async def pause(self, mode: PauseMode = "keep", clear_cache: bool = False) -> None:
        self._lacks("pause")

    async def resume(self) -> None:
        """It never pauses."""

    def is_paused(self) -> bool:
        return False

    async def reset_prefix_cache(self) -> None:
        self._lacks("reset_prefix_cache")

    async def start_profile(self) -> None:
        self._lacks("start_profile")

    async def stop_profile(self) -> None:
        self._lacks("stop_profile")

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        self._lacks("collective_rpc")

    async def update_weights(self, source: Path, version: str, mode: PauseMode = "wait") -> None:
        self._lacks("update_weights")

    def weights_version(self) -> str:
        return DEFAULT_WEIGHTS

    def _lacks(self, operation: str) -> NoReturn:
        raise Unsupported(f"{type(self).__name__} has no operation '{operation}'.")
