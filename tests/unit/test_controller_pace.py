"""Serve's control loop: slow while its controller is silent, at its own pace as soon as it logs."""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import time
from types import SimpleNamespace

import pytest
from ray.serve._private import controller
from ray.serve._private.constants import SERVE_LOGGER_NAME

from penstock.serve import controller_pace
from penstock.serve.controller_pace import INTERVAL, REST_S, follow, keep_pace

OWN_S = controller.CONTROL_LOOP_INTERVAL_S


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch):
    """Serve's, at INFO as in a controller; what a test did to it and to the interval is undone."""
    logger = logging.getLogger(SERVE_LOGGER_NAME)
    before = list(logger.filters), logger.level
    logger.setLevel(logging.INFO)
    monkeypatch.setattr(controller_pace, "HOLD_S", 0.05)
    monkeypatch.setattr(controller_pace, "_LOOK_S", 0.01)
    monkeypatch.setattr(controller, "CONTROL_LOOP_INTERVAL_S", OWN_S)
    yield logger
    logger.filters[:], level = before
    logger.setLevel(level)


async def reached(interval_s: float) -> None:
    limit = time.monotonic() + 10
    while interval_s != controller.CONTROL_LOOP_INTERVAL_S:
        assert time.monotonic() < limit
        await asyncio.sleep(0.01)


async def test_the_loop_is_slow_after_a_silence_and_its_own_again_with_the_next_line(logger):
    follow()
    await reached(REST_S)
    logger.handlers.clear()  # as Serve does when it is given a logging config
    logger.info("Adding 1 replica")
    assert controller.CONTROL_LOOP_INTERVAL_S == OWN_S
    await reached(REST_S)


async def test_a_controller_that_logs_no_starts_keeps_its_pace(logger):
    logger.setLevel(logging.WARNING)
    pace = asyncio.create_task(keep_pace(controller))
    await asyncio.sleep(0.2)
    assert controller.CONTROL_LOOP_INTERVAL_S == OWN_S
    pace.cancel()


async def test_an_interval_of_the_users_stays(logger, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(INTERVAL, "0.3")
    follow()
    await asyncio.sleep(0.2)
    assert controller.CONTROL_LOOP_INTERVAL_S == OWN_S


async def test_a_slower_interval_of_serves_stays(logger):
    own = SimpleNamespace(CONTROL_LOOP_INTERVAL_S=2.0)
    pace = asyncio.create_task(keep_pace(own))  # type: ignore[arg-type]
    await asyncio.sleep(0.2)
    assert own.CONTROL_LOOP_INTERVAL_S == 2.0
    pace.cancel()


def test_serves_loop_reads_the_interval_each_time():
    tree = ast.parse(inspect.getsource(controller))
    loop = next(node for node in ast.walk(tree) if getattr(node, "name", "") == "run_control_loop")
    assert any(isinstance(node, ast.Name) and node.id == "CONTROL_LOOP_INTERVAL_S" for node in ast.walk(loop))
