"""Engines that are asked for control themselves, as all once were, work beside those with a `control`."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import LLMConfig
from penstock.engine_control import DEFAULT_WEIGHTS, EngineControl, control_of
from penstock.engines.sim.engine import SimEngine
from penstock.errors import Unsupported
from penstock.serve.replica.reconciler import Reconciler


class Older:
    """An engine of a user, written when control was methods of the engine."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def sleep(self, level: int = 1, mode: str = "wait") -> None:
        self.done.append(f"sleep {level} {mode}")

    async def wakeup(self) -> None:
        self.done.append("wakeup")

    def is_sleeping(self) -> bool:
        return bool(self.done) and self.done[-1].startswith("sleep")

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        return [method]


class Without:
    """An engine with no control at all."""


async def test_an_engine_of_an_older_protocol_is_controlled_by_its_methods():
    engine = Older()
    control = control_of(engine)
    await control.sleep(2, "abort")
    assert control.is_sleeping()
    assert await control.collective_rpc("rank") == ["rank"]
    await control.wakeup()
    assert engine.done == ["sleep 2 abort", "wakeup"]


async def test_a_replica_puts_an_engine_of_an_older_protocol_to_sleep():
    engine: Any = Older()

    async def begin() -> None: ...

    reconciler = Reconciler(engine, begin, lambda: None, "r")
    await reconciler.start(None)
    await reconciler.perform("sleep", {"level": 1})
    assert (reconciler.actual, engine.done) == ("asleep", ["sleep 1 wait"])
    await reconciler.perform("wakeup", {})
    assert reconciler.actual == "ready"


@pytest.mark.parametrize("engine", [Older(), Without()])
async def test_what_an_engine_has_not_is_unsupported(engine: object):
    with pytest.raises(Unsupported, match=f"{type(engine).__name__} has no operation 'pause'"):
        await control_of(engine).pause()
    assert control_of(engine).weights_version() == DEFAULT_WEIGHTS
    assert not control_of(engine).is_paused()


async def test_an_attribute_of_that_name_need_not_be_control():
    engine: Any = Older()
    engine.control = "of something else"
    await control_of(engine).sleep()
    assert engine.done == ["sleep 1 wait"]


def test_an_engine_gives_its_control():
    engine = SimEngine(LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim"))
    assert control_of(engine) is engine.control
    assert isinstance(engine.control, EngineControl)
