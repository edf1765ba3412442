"""A reconciler brings a real (simulated) engine into the desired state, whatever control sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from interleaving import DISTURBANCES, Start, disturbed, ended, failing
from tests.waiting import until

from penstock.config import LLMConfig
from penstock.engine import Progress, no_progress
from penstock.engine_control import PauseMode
from penstock.engines.sim.engine import SimEngine
from penstock.errors import EngineStartFailed, Unsupported
from penstock.layers.adapters import Source, Store
from penstock.serve.control.desired import DesiredStates
from penstock.serve.control.followers import Followers, due
from penstock.serve.control.state import (
    Actual,
    AdapterSources,
    Command,
    DesiredState,
    Done,
    Outcome,
    ReplicaStatus,
    Update,
    Weights,
)
from penstock.serve.replica import adapter_changes
from penstock.serve.replica import reconciler as module
from penstock.serve.replica.reconciler import Reconciler

pytestmark = pytest.mark.parity("S25")


class Control:
    """A replica's link to control: what is desired, and what was told."""

    def __init__(self, desired: DesiredState) -> None:
        self.desired = desired
        self.commands: list[Command] = []
        self.adapters: AdapterSources | None = None
        self.told: ReplicaStatus | None = None
        self.outcomes: dict[int, Outcome] = {}
        self.pause_s = 0.005

    async def follow(self, status, kind, received) -> None:
        while True:
            self.told = status()
            commands, self.commands = tuple(self.commands), []
            received(Update(self.desired, commands, self.adapters))
            await asyncio.sleep(self.pause_s)

    def report(self) -> None:
        pass

    def say(self, done: Done) -> None:
        self.outcomes[done.command] = done.outcome

    def want(self, **changes: object) -> None:
        version = self.desired.version + 1
        self.desired = msgspec.structs.replace(self.desired, version=version, **changes)

    async def until(self, actual: str, *, error: str = "") -> ReplicaStatus:
        """What was told once the reconciler is there."""
        async with asyncio.timeout(1000 * self.pause_s):
            while (  # noqa: ASYNC110 - nothing tells of it
                (told := self.told) is None
                or told.version != self.desired.version
                or told.actual != actual
                or error not in told.error
                or bool(told.error) != bool(error)
            ):
                await asyncio.sleep(self.pause_s)
        return told


class Restless(SimEngine):
    """An engine that cannot pause."""

    async def pause(self, mode: PauseMode = "keep", clear_cache: bool = False) -> None:
        raise Unsupported("It never pauses.")


class Replica:
    def __init__(self, engine: SimEngine, reconciler: Reconciler, said: list[str]) -> None:
        self.engine, self.reconciler, self.said = engine, reconciler, said


@asynccontextmanager
async def following(control: Control, engine_cls: type[SimEngine] = SimEngine) -> AsyncIterator[Replica]:
    config = LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim")
    engine = engine_cls(config)
    said: list[str] = []
    reconciler = Reconciler(engine, engine.start, lambda: said.append(reconciler.actual), "r")
    try:
        await reconciler.start(control)
        yield Replica(engine, reconciler, said)
    finally:
        reconciler.close()
        await engine.stop()


async def test_what_is_desired_is_reached_and_told():
    control = Control(DesiredState())
    async with following(control) as replica:
        await control.until("ready")
        control.want(pause="keep")
        await control.until("paused")
        assert replica.engine.control.is_paused()
        control.want(sleep=1)
        await control.until("asleep")
        control.want(sleep=0, pause=None)
        await control.until("ready")
        assert not replica.engine.control.is_paused()
        assert not replica.engine.control.is_sleeping()


async def test_gateways_are_told_before_a_state_that_takes_no_requests_begins(
    monkeypatch: pytest.MonkeyPatch,
):
    control = Control(DesiredState())
    async with following(control) as replica:
        replica.said.clear()
        asleep_when_told = []
        tell = replica.reconciler._tell
        monkeypatch.setattr(
            replica.reconciler,
            "_tell",
            lambda: (asleep_when_told.append(replica.engine.control.is_sleeping()), tell()),
        )
        await replica.reconciler.sleep(1, "wait")
        assert replica.said == ["asleep", "asleep"]
        assert asleep_when_told == [False, True]


async def test_control_is_told_whether_it_sleeps_or_is_only_in_transition():
    control, last = Control(DesiredState()), asyncio.Event()

    class Busy(SimEngine):
        async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
            await last.wait()  # a request that it waits for
            await super().sleep(level, mode)

    async with following(control, Busy):
        await control.until("ready")
        control.want(sleep=1)
        await until(lambda: control.told is not None and control.told.actual == "asleep")
        assert control.told.in_transition
        last.set()
        assert not (await control.until("asleep")).in_transition


async def test_a_second_order_to_sleep_at_the_same_moment_does_nothing():
    control, slept = Control(DesiredState()), []

    class Counting(SimEngine):
        async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
            slept.append(level)
            await asyncio.sleep(0)
            await super().sleep(level, mode)

    async with following(control, Counting) as replica:
        await asyncio.gather(replica.reconciler.sleep(1, "wait"), replica.reconciler.sleep(1, "wait"))
    assert slept == [1]


async def test_sleep_at_another_level_is_an_error_that_is_told():
    control = Control(DesiredState())
    async with following(control):
        await control.until("ready")
        control.want(sleep=1)
        await control.until("asleep")
        control.want(sleep=2)
        await control.until("asleep", error="sleeps at level 1")
        control.want(sleep=1)
        await control.until("asleep")


async def test_one_that_shall_sleep_does_not_start_its_engine_until_it_wakes():
    control = Control(DesiredState(version=3, sleep=1))
    async with following(control) as replica:
        await control.until("asleep")
        assert replica.engine.max_model_len() is None
        assert not replica.reconciler.started.is_set()
        control.want(sleep=0)
        await control.until("ready")
        assert replica.engine.max_model_len() is not None


async def test_control_hears_of_a_replica_all_the_while_it_loads():
    control, loads, loaded = Control(DesiredState()), asyncio.Event(), asyncio.Event()

    class Slow(SimEngine):
        async def start(self, progress: Progress = no_progress) -> None:
            loads.set()
            await loaded.wait()
            await super().start(progress)

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:

        async def run() -> None:
            async with following(control, Slow):
                await control.until("ready")

        group.create_task(run())
        await loads.wait()
        for _ in range(3):
            control.told = None
            while control.told is None:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.005)
            assert control.told.actual == "starting"
        loaded.set()


async def test_a_replica_does_not_start_before_it_knows_the_desired_state(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_FIRST_S", 0.05)
    started = []

    class Started(SimEngine):
        async def start(self, progress: Progress = no_progress) -> None:
            started.append(self)

    class Silent(Control):
        async def follow(self, status, kind, received) -> None:
            await asyncio.Event().wait()

    with pytest.raises(EngineStartFailed, match="has not told the desired state"):
        async with following(Silent(DesiredState(version=1, sleep=1)), Started):
            pass
    assert not started


async def test_one_that_loads_as_it_wakes_is_in_transition():
    control, loaded = Control(DesiredState(version=1, sleep=1)), asyncio.Event()

    class Slow(SimEngine):
        async def start(self, progress: Progress = no_progress) -> None:
            await loaded.wait()
            await super().start(progress)

    async with following(control, Slow):
        await control.until("asleep")
        control.want(sleep=0)
        await until(lambda: control.told.in_transition)
        loaded.set()
        assert not (await control.until("ready")).in_transition


async def test_a_replica_that_starts_is_neither_waited_for_nor_takes_others_turn(tmp_path: Path):
    desired = DesiredStates(tmp_path / "state.sqlite")
    followers = Followers(desired)
    ready, starting = told(), msgspec.structs.replace(told("starting"), replica="b", version=0)
    updates = {}
    for status in (ready, starting):
        followers.hear(status)
        updates[status.replica] = followers.updates("m", status.replica)
        await anext(updates[status.replica])
    assert set(followers.living("m")) == {"a", "b"}
    assert followers.replicas("m", None) == ["a"]
    wanted = desired.set("m", OTHER)
    assert (await anext(updates["a"])).desired == wanted


def test_a_fault_of_adapters_counts_until_they_are_to_be_tried_again(tmp_path: Path):
    followers, sources = Followers(DesiredStates(tmp_path / "x")), AdapterSources("one", {"pinned": ["a"]})
    followers.set_adapters({"m": sources, "other": sources})
    status = msgspec.structs.replace(told(), adapters="one", adapters_fault="no 'a'")
    followers.hear(status)
    followers._models["m"]["a"]._link = object()
    assert followers.adapters()[1] == ["a replica of 'm' keeps its adapters, and tries again: no 'a'"]
    followers.retry_adapters()
    followers.set_adapters({"m": sources})
    assert followers.adapters() == (["m"], [])
    followers.hear(msgspec.structs.replace(status, adapters=followers._adapters["m"].id))
    assert len(followers.adapters()[1]) == 1


async def test_what_could_not_be_reached_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    control, folder = Control(DesiredState()), tmp_path / "weights"
    async with following(control):
        control.want(weights=Weights(str(folder), "v2"))
        assert (await control.until("ready", error="no folder")).weights == "default"
        folder.mkdir()
        assert (await control.until("ready")).weights == "v2"


async def test_a_command_that_comes_again_by_the_next_link_is_performed_once(patched):
    control, performed = Control(DesiredState()), list[str]()
    async with following(control) as replica:

        async def perform(operation: str, arguments: object) -> None:
            performed.append(operation)

        patched(replica.reconciler, "perform", perform)
        control.commands = [Command(1, "start_profile", {})]
        await until(lambda: 1 in control.outcomes)
        control.commands = [Command(1, "start_profile", {}), Command(2, "stop_profile", {})]
        await until(lambda: 2 in control.outcomes)
    assert performed == ["start_profile", "stop_profile"]


async def test_commands_are_performed_once_and_failures_are_sentences():
    control = Control(DesiredState())
    async with following(control):
        control.commands = [
            Command(1, "is_sleeping", {}),
            Command(2, "collective_rpc", {"method": "x"}),
            Command(3, "reset_prefix_cache", {}),
        ]
        await until(lambda: len(control.outcomes) >= 3)
    assert control.outcomes == {
        1: {"result": False},
        2: {"error": "SimEngine has no operation 'collective_rpc'."},
        3: {"result": None},
    }


OTHER = DesiredState(version=2, weights=Weights("/other", "v2"))


def told(actual: Actual = "ready", weights: str = "default") -> ReplicaStatus:
    return ReplicaStatus(
        replica="a", actual=actual, weights=weights, version=1, desired=DesiredState(version=1), model="m"
    )


def test_other_weights_wait_while_another_replica_changes():
    assert due(OTHER, told(), others_change=True) == told().desired
    assert due(OTHER, told(), others_change=False) == OTHER


@pytest.mark.parametrize(
    ("desired", "replica"),
    [
        (OTHER, told(weights="v2")),
        (OTHER, told("starting")),
        (OTHER, told("asleep")),
        (msgspec.structs.replace(OTHER, sleep=1), told()),
        (DesiredState(version=2, pause="keep"), told()),
    ],
)
def test_what_costs_nobody_a_replica_waits_for_none(desired: DesiredState, replica: ReplicaStatus):
    assert due(desired, replica, others_change=True) == desired


async def test_adapters_are_taken_over_before_the_start_and_later_until_they_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(adapter_changes, "_RETRY_S", 0.0)
    control = Control(DesiredState())
    lora: dict[str, object] = {"dynamic_lora_loading_path": str(tmp_path / "gone"), "pinned": ["a"]}
    config = LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim", lora_config=lora)
    engine = SimEngine(config)
    store = Store(engine, Source(config))

    async def start() -> None:
        await engine.start()
        await store.start()

    def add(name: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")

    add("b")
    control.adapters = AdapterSources("one", {"dynamic_lora_loading_path": str(tmp_path), "pinned": ["b"]})
    reconciler = Reconciler(engine, start, lambda: None, "r", None, "m", store)
    try:
        await reconciler.start(control)
        assert store.loaded() == ("b",)
        control.adapters = AdapterSources("two", {"pinned": ["c"]})
        await until(lambda: control.told is not None and control.told.adapters_fault)
        assert control.told is not None
        assert control.told.adapters == "two"
        assert "adapter 'c' is not there" in control.told.adapters_fault
        assert caplog.text.count("stay as they were") == 1
        add("c")
        await until(lambda: not reconciler.status().adapters_fault)
        assert store.loaded() == ("b", "c")
    finally:
        reconciler.close()
        await store.stop()
        await engine.stop()


async def test_what_an_engine_cannot_do_does_not_keep_it_from_starting():
    control = Control(DesiredState(version=1, pause="keep"))
    async with following(control, Restless) as replica:
        told = await control.until("ready", error="It never pauses.")
        assert told.desired.version == 1
        assert not replica.engine.control.is_paused()


class Slow(SimEngine):
    """Each operation takes a second, and has happened in the middle of it."""

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        await super().sleep(level, mode)
        await asyncio.sleep(1)

    async def wakeup(self) -> None:
        await super().wakeup()
        await asyncio.sleep(1)

    async def pause(self, mode: PauseMode = "keep", clear_cache: bool = False) -> None:
        await super().pause(mode, clear_cache)
        await asyncio.sleep(1)


def test_the_desired_state_is_reached_wherever_an_operation_ends():
    async def operations(start: Start) -> None:
        control = Control(DesiredState())
        control.pause_s = 1.0
        async with following(control, Slow) as replica:
            given = [("sleep", {"level": 1}), ("wakeup", {}), ("pause", {}), ("resume", {})]
            tasks = [start(replica.reconciler.perform(*one)) for one in given]
            await asyncio.sleep(0.5)
            control.want(pause="keep")
            await asyncio.wait(tasks, timeout=5000)
            await control.until("paused")
            tasks.append(start(replica.reconciler.perform("sleep", {"level": 2})))
            _, open_ = await asyncio.wait(tasks, timeout=5000)
            assert not open_
            assert [task for task in tasks if ended(RuntimeError)(task) is None]
            for changes, actual in (
                ({"sleep": 2}, "asleep"),
                ({"sleep": 0}, "paused"),
                ({"pause": None}, "ready"),
                ({"sleep": 1}, "asleep"),
            ):
                control.want(**changes)
                assert not (await control.until(actual)).in_transition
            control.commands = [Command(1, "wakeup", {})]
            await asyncio.sleep(1.5)  # it is closed in the middle of it

    engine_fails = failing(RuntimeError("bug"), "sleep", "wakeup", "pause")
    assert disturbed(operations, (*DISTURBANCES, engine_fails), also=("_reach_latest",)) >= 8
