"""Operations on a running engine: sleep, pause, new weights, profiles.

`Engine.control` provides them. Those that an engine lacks raise `Unsupported`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from penstock.errors import Unsupported

DEFAULT_WEIGHTS = "default"
"""The version of the weights that an engine starts with."""

PauseMode = Literal["wait", "keep", "abort"]
"""What becomes of running requests when their engine stops making tokens: "wait" lets them finish first,
"keep" holds them until the engine goes on, "abort" ends them at once, with finish_reason "abort"."""


PARTS = frozenset(("weights", "kv_cache"))
"""What a sleeping engine has given up, by vLLM's names."""


class EngineControl:
    """Control of one engine, which has none of the operations until a subclass defines them.

    Requests that arrive while the engine is asleep or paused wait in it. Repeating an operation does nothing.
    """

    async def sleep(self, level: int = 1, mode: PauseMode = "wait") -> None:
        """Frees the engine's memory until `wakeup`; returns when that is done, and caches are empty.

        level: 1 keeps what makes waking up fast, 2 keeps nothing but the process.
        """
        self._lacks("sleep")

    async def wakeup(self) -> None:
        """Brings the engine back as it was before the sleep: with its adapters, with the same weights.

        Raises: EngineStartFailed; it then still sleeps.
        """

    async def wakeup_parts(self, parts: Collection[str]) -> None:
        """Wakes these of `PARTS`; it sleeps on until all are. Workers can be called once weights are."""
        self._lacks("wakeup of parts")

    def is_sleeping(self) -> bool:
        return False

    async def pause(self, mode: PauseMode = "keep", clear_cache: bool = False) -> None:
        """Returns once no more tokens are made, until `resume`. Memory stays as it is."""
        self._lacks("pause")

    async def resume(self) -> None:
        """Ends a pause."""

    def is_paused(self) -> bool:
        return False

    async def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Raises: Conflict while requests use it."""
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
        """Calls a method of every worker; returns their results, in order of rank. timeout: seconds.

        Raises: DeadlineExceeded; BadRequest with a worker's reason when it refused.
        """
        self._lacks("collective_rpc")

    async def update_weights(self, source: Path, version: str, mode: PauseMode = "wait") -> None:
        """Replaces the weights by those in folder `source`, of the same shapes.

        mode: of the short pause that this takes. Requests that `pause` holds are held with "wait", too.
        Caches are empty after it.
        Raises: BadRequest; it then keeps the weights that it had.
        """
        self._lacks("update_weights")

    def weights_version(self) -> str:
        """The version of the current weights; `DEFAULT_WEIGHTS` before any update."""
        return DEFAULT_WEIGHTS

    def _lacks(self, operation: str) -> NoReturn:
        raise Unsupported(f"{type(self).__name__} has no operation '{operation}'.")


def control_of(engine: object) -> EngineControl:
    """The engine's `control`; for engines without one, their own methods of the same names.

    These operations were once methods of the engine itself, and still are in some users' engines.
    """
    control = getattr(engine, "control", None)
    return control if isinstance(control, EngineControl) else _MethodsOf(engine)


class _MethodsOf(EngineControl):
    """The operations that are methods of `engine`; the others are unsupported."""

    def __init__(self, engine: object) -> None:
        self._engine_class = type(engine).__name__
        for name in vars(EngineControl):
            if not name.startswith("_") and (method := getattr(engine, name, None)) is not None:
                setattr(self, name, method)

    def _lacks(self, operation: str) -> NoReturn:
        raise Unsupported(f"{self._engine_class} has no operation '{operation}'.")
