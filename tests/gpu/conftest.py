"""Tests of what a GPU changes. Without one all but those marked `gpu` run on the CPU, in the full tier."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))  # configs and helpers of tests/engine
os.environ.setdefault("OMP_NUM_THREADS", "1")
if given := os.environ.get("PYTHONPATH"):  # Ray's workers start in another folder
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, filter(None, given.split(os.pathsep))))


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, object]:
    return {"uvloop": uvloop.new_event_loop}
