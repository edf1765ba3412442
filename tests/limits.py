"""A limit of time for tests on an event loop.

pytest-timeout's alarm raises in whatever Python runs next; a loop of uvloop that waits for nothing that comes
runs none. Such a test would hold up all others for ever.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

_EARLIER_S = 10.0
"""Before pytest-timeout would end the whole run's process."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not isinstance(item, pytest.Function) or not inspect.iscoroutinefunction(item.obj):
            continue
        mark = item.get_closest_marker("timeout")
        limit_s = float(mark.args[0] if mark else config.getoption("timeout") or config.getini("timeout"))
        if not hasattr(item.obj, "hypothesis"):  # which draws many: each has a limit of its own
            item.obj = limited(item.obj, max(limit_s - _EARLIER_S, limit_s / 2))


def limited(test: Callable[..., Awaitable[Any]], limit_s: float) -> Callable[..., Awaitable[Any]]:
    """`test`, which raises TimeoutError where it waits after so many seconds."""

    @functools.wraps(test)
    async def within(*args: Any, **kwargs: Any) -> Any:
        async with asyncio.timeout(limit_s):
            return await test(*args, **kwargs)

    return within
