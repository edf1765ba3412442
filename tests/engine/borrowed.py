"""A started engine for code that makes its own: PENSTOCK_ENGINE_CLS names `engine` in place of a class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.config import LLMConfig
from penstock.engine import Engine, Progress, no_progress

_lent: list[Engine] = []


class Borrowed:
    """The engine, which neither starts nor stops by what its borrower does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def start(self, progress: Progress = no_progress) -> None:
        """It has been started."""

    async def stop(self) -> None:
        """Others use it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def engine(config: LLMConfig) -> Borrowed:
    return Borrowed(_lent[-1])


@contextmanager
def lent(engine: Engine) -> Iterator[None]:
    """All engines that are made meanwhile are this one."""
    _lent.append(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_ENGINE_CLS", "borrowed:engine")
        try:
            yield
        finally:
            _lent.pop()
