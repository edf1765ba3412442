"""Which adapters a replica's engine holds, and when: the store over a simulated engine and real folders."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from interleaving import DISTURBANCES, Start, disturbed, ended, failing
from tests.waiting import until

from penstock import sources
from penstock.config import LLMConfig
from penstock.engines.sim.engine import SimEngine
from penstock.errors import AdapterBroken, BadRequest, DownloadFailed, Error, ModelNotFound, Overloaded
from penstock.layers.adapters import AdapterDownloader, Source, Store, source, store

pytestmark = pytest.mark.parity("S21", "X14")


class Engine(SimEngine):
    """Keeps a record of what it was told."""

    def __init__(self, config: LLMConfig) -> None:
        super().__init__(config)
        self.told: list[str] = []
        self.most = 0
        self.may_load, self.may_unload = asyncio.Event(), asyncio.Event()
        self.may_load.set()
        self.may_unload.set()

    async def load_adapter(self, name: str, path: Path) -> None:
        self.told.append(f"+{name}")
        await self.may_load.wait()
        await super().load_adapter(name, path)
        self.most = max(self.most, len(self.adapters()))

    async def unload_adapter(self, name: str) -> None:
        self.told.append(f"-{name}")
        await self.may_unload.wait()
        await super().unload_adapter(name)


class Kept:
    """A store with its engine, and the folder in which its adapters lie."""

    def __init__(self, engine: Engine, adapters: Store, folder: Path) -> None:
        self.engine = engine
        self.adapters = adapters
        self.folder = folder

    async def use(self, name: str) -> str:
        async with self.adapters.use(name) as key:
            assert key in self.engine.adapters()
            return key


def write(folder: Path, name: str, config: str = "{}") -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "adapter_config.json").write_text(config)


def lora_config(folder: Path, **options: Any) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": "m"},
        llm_engine="sim",
        lora_config={"dynamic_lora_loading_path": str(folder), "refresh_interval_s": None} | options,
    )


@asynccontextmanager
async def keeping(
    folder: Path, names: Iterable[str] = "abcdefgh", downloader: Any = None, **options: Any
) -> AsyncIterator[Kept]:
    for name in names:
        write(folder, name)
    config = lora_config(folder, **options)
    engine = Engine(config)
    await engine.start()
    assert config.lora_config is not None
    adapters = Store(engine, Source(config, downloader))
    try:
        await adapters.start()
        yield Kept(engine, adapters, folder)
    finally:
        await adapters.stop()
        await engine.stop()


async def test_a_hundred_requests_for_one_adapter_load_it_once(tmp_path: Path):
    async with keeping(tmp_path) as kept:
        keys = await asyncio.gather(*(kept.use("a") for _ in range(100)))
        assert set(keys) == {"a@1"}
        assert kept.engine.told == ["+a@1"]


async def test_the_one_asked_for_longest_ago_makes_room(tmp_path: Path):
    async with keeping(tmp_path, max_num_adapters_per_replica=2) as kept:
        for name in "abac":
            await kept.use(name)
        assert kept.engine.told == ["+a@1", "+b@2", "-b@2", "+c@3"]
        assert kept.adapters.loaded() == ("a", "c")


async def test_what_a_request_uses_is_not_evicted(tmp_path: Path):
    async with keeping(tmp_path, max_num_adapters_per_replica=2) as kept:
        async with kept.adapters.use("a"):
            for name in "bcde":
                await kept.use(name)
            assert "a" in kept.adapters.loaded()
        assert "-a@1" not in kept.engine.told


async def test_who_finds_all_places_in_use_waits_for_the_next_that_is_free(tmp_path: Path):
    async with keeping(tmp_path, max_num_adapters_per_replica=1) as kept:
        async with kept.adapters.use("a"):
            waiting = asyncio.create_task(kept.use("b"))
            await until(lambda: kept.adapters._wanted)
            assert kept.engine.adapters() == {"a@1"}
        assert await waiting == "b@2"


async def test_one_that_is_always_in_use_makes_room_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store, "_IDLE_WAIT_S", 0.01)
    async with keeping(tmp_path, max_num_adapters_per_replica=1) as kept:
        async with kept.adapters.use("a"):
            other = asyncio.create_task(kept.use("b"))
            await until(lambda: "a" not in kept.adapters.loaded())
            later = asyncio.create_task(kept.use("a"))  # else there would always be one
            await asyncio.sleep(0)
        assert await other == "b@2"
        assert await later == "a@3"


async def test_places_that_stay_in_use_are_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store, "_ROOM_WAIT_S", 0.02)
    async with keeping(tmp_path, max_num_adapters_per_replica=1) as kept, kept.adapters.use("a"):
        with pytest.raises(Overloaded, match="All 1 adapter slots are in use"):
            await kept.use("b")


async def test_a_place_is_not_lost_when_waiting_ends_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store, "_ROOM_WAIT_S", 0.02)
    async with keeping(tmp_path, max_num_adapters_per_replica=1) as kept:
        await kept.use("a")
        kept.engine.may_unload.clear()
        with pytest.raises(Overloaded):
            await kept.use("b")
        kept.engine.may_unload.set()
        assert await kept.use("c") == "c@3"


async def test_whoever_has_gone_while_waiting_pushes_nobody_out(tmp_path: Path):
    async with keeping(tmp_path, max_num_adapters_per_replica=1) as kept:
        async with kept.adapters.use("a"):
            gone = [asyncio.create_task(kept.use(name)) for name in "bcde"]
            await until(lambda: kept.adapters._wanted)
            for task in gone:
                task.cancel()
            await asyncio.wait(gone)
        await until(lambda: not kept.adapters._tasks)
        assert await kept.use("a") == "a@1"
        assert kept.engine.told == ["+a@1"]


async def test_one_who_stays_gets_the_adapter_that_others_have_given_up(tmp_path: Path):
    async with keeping(tmp_path, max_num_adapters_per_replica=1) as kept:
        async with kept.adapters.use("a"):
            waiting = [asyncio.create_task(kept.use("b")) for _ in range(3)]
            await until(lambda: kept.adapters._wanted)
            waiting.pop().cancel()
        assert await asyncio.gather(*waiting) == ["b@2", "b@2"]


async def test_sixty_four_adapters_through_four_places_all_get_their_turn(tmp_path: Path):
    """In about the order of asking, and none twice."""
    names = [f"one{number:02}" for number in range(64)]
    async with keeping(tmp_path, names=names, max_num_adapters_per_replica=4) as kept:
        keys = await asyncio.gather(*map(kept.use, names))
        assert [key.partition("@")[0] for key in keys] == names
        assert sum(told.startswith("+") for told in kept.engine.told) == 64
        assert kept.engine.most == 4


async def test_pinned_ones_are_there_at_the_start_and_stay(tmp_path: Path):
    async with keeping(tmp_path, max_num_adapters_per_replica=2, pinned=["c"]) as kept:
        assert kept.adapters.loaded() == ("c",)
        for name in "abde":
            await kept.use(name)
        assert "-c@1" not in kept.engine.told


async def test_where_all_places_are_pinned_nobody_waits(tmp_path: Path):
    async with keeping(tmp_path, max_num_adapters_per_replica=1, pinned=["c"]) as kept:
        with pytest.raises(Overloaded, match="All 1 adapter slots are pinned; 'a' finds none"):
            await kept.use("a")
        with pytest.raises(BadRequest, match="unload one of them first"):
            await kept.adapters.load_adapter("a", pin=True)
        await kept.adapters.unload_adapter("c")
        await kept.adapters.load_adapter("a", pin=True)
        assert kept.adapters.loaded() == ("a",)


async def test_unloading_waits_for_the_requests_that_use_it(tmp_path: Path):
    async with keeping(tmp_path) as kept:
        async with kept.adapters.use("a") as key:
            await kept.adapters.unload_adapter("a")
            assert kept.adapters.loaded() == ()
            assert key in kept.engine.adapters()
        await until(lambda: not kept.engine.adapters())


async def test_under_load_no_request_loses_its_adapter_and_no_place_is_exceeded(tmp_path: Path):
    async with keeping(tmp_path, max_num_adapters_per_replica=3) as kept:

        async def request(number: int) -> None:
            name = "abcdefgh"[number * 7 % 8]
            async with kept.adapters.use(name) as key:
                for _ in range(number % 5):
                    await asyncio.sleep(0)
                    assert key in kept.engine.adapters()
                    assert key.startswith(name)

        for _ in range(20):
            await asyncio.gather(*(request(number) for number in range(40)))
        assert kept.engine.most <= 3
        assert len(kept.engine.adapters()) == kept.adapters._slots <= 3


async def test_two_hundred_adapters_leave_nothing_behind(tmp_path: Path):
    names = [f"one{number}" for number in range(200)]
    async with keeping(tmp_path, names=names, max_num_adapters_per_replica=2) as kept:
        for name in names:
            await kept.use(name)
        assert len(kept.engine.adapters()) == len(kept.adapters._current) == 2


# -- what cannot be had


async def test_an_unknown_name_is_told_the_known_ones(tmp_path: Path):
    async with keeping(tmp_path, names="ab", adapters={"hub": "org/lora"}) as kept:
        with pytest.raises(ModelNotFound, match=r"'m' has no adapter 'nobody'. There are: 'a', 'b', 'hub'\."):
            await kept.use("nobody")
        (tmp_path / "empty").mkdir()
        with pytest.raises(ModelNotFound, match=r"no adapter 'empty'. There are: 'a', 'b', 'hub'\."):
            await kept.use("empty")
        for trick in ("..", "../a", "a/../b", "/etc", "a\0", "", "x" * 5000):
            with pytest.raises(ModelNotFound):
                await kept.use(trick)


async def test_an_engine_that_fails_to_unload_or_load_loses_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def fails(*_: object) -> None:
        raise RuntimeError("the engine's own error")

    async with keeping(tmp_path, max_num_adapters_per_replica=2) as kept:
        monkeypatch.setattr(kept.engine, "unload_adapter", fails)
        for name in "abcd":
            await kept.use(name)
        with monkeypatch.context() as broken:
            broken.setattr(kept.engine, "load_adapter", fails)
            for _ in range(3):
                with pytest.raises(RuntimeError):
                    await kept.use("a")
        await asyncio.gather(kept.use("a"), kept.use("b"))


async def test_a_broken_one_is_not_tried_again_at_once(tmp_path: Path, patched):
    async with keeping(tmp_path) as kept:
        write(tmp_path, "bad", "{")
        for _ in range(3):
            with pytest.raises(
                AdapterBroken, match=r"'bad' cannot be loaded: its adapter_config\.json is no"
            ):
                await kept.use("bad")
        assert kept.engine.told == ["+bad@1"]
        write(tmp_path, "bad")
        now = store.time.monotonic()
        patched(store.time, "monotonic", lambda: now + store._FAILURE_KEPT_S)
        assert await kept.use("bad") == "bad@2"


async def test_a_pinned_one_that_is_not_there_stops_the_start(tmp_path: Path):
    with pytest.raises(ModelNotFound, match="no adapter 'nobody'"):
        async with keeping(tmp_path, pinned=["nobody"]):
            pass


async def test_a_second_start_loads_what_an_engine_lost_that_was_stopped(tmp_path: Path, patched):
    write(tmp_path, "a")
    config = lora_config(tmp_path, pinned=["a", "b"], max_num_adapters_per_replica=2)
    engine = Engine(config)
    await engine.start()
    adapters = Store(engine, Source(config))
    with pytest.raises(ModelNotFound):
        await adapters.start()
    await until(lambda: adapters.loaded() == ("a",))
    engine._adapters.clear()
    write(tmp_path, "b")
    now = store.time.monotonic()
    patched(store.time, "monotonic", lambda: now + store._FAILURE_KEPT_S)
    await adapters.start()
    assert adapters.loaded() == ("a", "b")
    async with adapters.use("a") as key:
        assert key in engine.adapters()
    await adapters.stop()
    await engine.stop()


class Download:
    """As users of ray.serve.llm have written it."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, download_timeout_s: float | None = None, max_tries: int = 1) -> None:
        self.made.append({"download_timeout_s": download_timeout_s, "max_tries": max_tries})

    async def load_model_from_config(self, lora_model_id: str, llm_config: LLMConfig) -> Any:
        if lora_model_id == "m:secret":
            raise RuntimeError("token hf_123")
        path = Path(llm_config.lora_config.dynamic_lora_loading_path) / lora_model_id.removeprefix("m:")
        return type("DiskMultiplexConfig", (), {"local_path": str(path)})()


async def test_a_downloader_can_be_injected(tmp_path: Path):
    async with keeping(tmp_path, downloader=Download, download_timeout_s=7.0, max_download_tries=2) as kept:
        assert await kept.use("a") == "a@1"
        assert Download.made[-1] == {"download_timeout_s": 7.0, "max_tries": 2}
        with pytest.raises(DownloadFailed, match="RuntimeError, see the log") as failure:
            await kept.use("secret")
        assert "hf_123" not in str(failure.value)


class Hanging(AdapterDownloader):
    """Those whose name begins with "h" never come."""

    go_on = threading.Event()

    def load_model_from_config(self, lora_model_id: str, llm_config: LLMConfig) -> Path:
        if lora_model_id.startswith("m:h"):
            self.go_on.wait(20)
        return super().load_model_from_config(lora_model_id, llm_config)


async def test_downloads_that_hang_hold_up_no_other_adapter(tmp_path: Path):
    names = ["a", *(f"h{number}" for number in range(8))]
    async with keeping(tmp_path, names=names, downloader=Hanging) as kept:
        hanging = [asyncio.create_task(kept.use(name)) for name in names[1:]]
        await until(lambda: len(kept.adapters._tasks) == 8)
        assert await kept.use("a") == "a@9"
        assert not any(task.done() for task in hanging)
        Hanging.go_on.set()
        await asyncio.gather(*hanging)


async def test_asking_for_nonsense_lists_the_source_once(tmp_path: Path, patched):
    listed: list[str] = []
    children = sources.children
    patched(sources, "children", lambda path, file: listed.append(path) or children(path, file))
    async with keeping(tmp_path) as kept:
        asked = await asyncio.gather(*(kept.use(f"no{n}") for n in range(50)), return_exceptions=True)
        assert all("There are: 'a', 'b'" in str(error) for error in asked)
        assert len(listed) == 1
        assert not kept.adapters._source._fetching._threads  # none of those that fetch was kept busy


async def test_nonsense_that_is_looked_for_keeps_no_real_adapter_waiting(
    tmp_path: Path, monkeypatch, patched
):
    go_on, stamp = threading.Event(), AdapterDownloader.stamp

    def slow(self: AdapterDownloader, lora_model_id: str, llm_config: LLMConfig) -> str:
        assert lora_model_id.startswith("m:no")
        go_on.wait(10)
        return stamp(self, lora_model_id, llm_config)

    patched(AdapterDownloader, "stamp", slow)
    monkeypatch.setattr(source, "_NAMES_KEPT_S", 0.0)
    async with keeping(tmp_path) as kept:
        nonsense = [asyncio.create_task(kept.use(f"no{n}")) for n in range(50)]
        await until(lambda: kept.adapters._source._looking._work_queue.qsize() > 30)
        assert await kept.use("a") == "a@51"
        assert len(kept.adapters._source._fetching._threads) == 1
        go_on.set()
        asked = await asyncio.gather(*nonsense, return_exceptions=True)
        assert all("There are: 'a', 'b'" in str(error) for error in asked)


async def test_where_names_cannot_be_listed_nonsense_is_looked_for_before_it_is_fetched(
    tmp_path: Path, patched
):
    def unlistable(path: str, holding: str) -> list[str]:
        raise DownloadFailed("The bucket lists nothing.")

    patched(sources, "children", unlistable)
    async with keeping(tmp_path) as kept:
        with pytest.raises(ModelNotFound, match="cannot be listed"):
            await kept.use("nonsense")
        assert not kept.adapters._source._fetching._threads
        assert await kept.use("a") == "a@2"


class Copying(AdapterDownloader):
    """Puts adapters where only it knows; whether they have changed, it leaves to the usual one."""

    def load_model_from_config(self, lora_model_id: str, llm_config: LLMConfig) -> Path:
        return super().load_model_from_config(lora_model_id, llm_config).local_path


async def test_a_downloader_of_ones_own_is_asked_for_stamps_too(tmp_path: Path):
    async with keeping(tmp_path, downloader=Copying, refresh_interval_s=0.01) as kept:
        old = await kept.use("a")
        assert kept.adapters._current["a"].stamp == await kept.adapters._source.stamp("a")
        change(tmp_path, "a")
        await until(lambda: kept.adapters._current["a"].key != old)
        assert [told for told in kept.engine.told if told[0] == "+"] == ["+a@1", "+a@2"]


# -- refreshing


def change(folder: Path, name: str, config: str = '{"r": 2}') -> None:
    write(folder, name, config)
    os.utime(folder / name / "adapter_config.json", ns=(1, 1))


async def test_a_changed_adapter_is_replaced_and_running_requests_keep_the_old(tmp_path: Path):
    async with keeping(tmp_path, refresh_interval_s=0.01, max_num_adapters_per_replica=1) as kept:
        async with kept.adapters.use("a") as old:
            change(tmp_path, "a")
            await until(lambda: kept.adapters._current["a"].key != old)
            new = await kept.use("a")
            assert kept.engine.adapters() == {old, new}
        await until(lambda: kept.engine.adapters() == {new})
        assert kept.engine.told == [f"+{old}", f"+{new}", f"-{old}"]


async def test_one_that_is_unloaded_while_a_newer_one_comes_stays_unloaded(tmp_path: Path):
    async with keeping(tmp_path, refresh_interval_s=0.01) as kept:
        await kept.use("a")
        kept.engine.may_load.clear()
        change(tmp_path, "a")
        await until(lambda: len(kept.engine.told) == 2)
        await kept.adapters.unload_adapter("a")
        kept.engine.may_load.set()
        await until(lambda: not kept.adapters._refreshing and not kept.engine.adapters())
        assert kept.adapters.loaded() == ()
        assert kept.adapters._slots == 0


async def test_a_newer_one_that_is_broken_replaces_nothing(tmp_path: Path):
    async with keeping(tmp_path, refresh_interval_s=0.01) as kept:
        old = await kept.use("a")
        change(tmp_path, "a", "{")
        await until(lambda: len(kept.engine.told) == 2)
        await until(lambda: not kept.adapters._refreshing)
        assert await kept.use("a") == old
        change(tmp_path, "a", '{"r": 4}')
        await until(lambda: kept.adapters._current["a"].key != old)
        assert len([told for told in kept.engine.told if told.startswith("+")]) == 3


async def test_an_adapter_that_has_left_its_source_is_not_found(tmp_path: Path):
    async with keeping(tmp_path, refresh_interval_s=0.01) as kept:
        await kept.use("a")
        (tmp_path / "a" / "adapter_config.json").unlink()
        (tmp_path / "a").rmdir()
        await until(lambda: not kept.adapters.loaded())
        with pytest.raises(ModelNotFound):
            await kept.use("a")


async def test_a_source_that_cannot_be_read_now_takes_nothing_away(tmp_path: Path):
    class Flaky(AdapterDownloader):
        asked = 0

        def stamp(self, lora_model_id: str, llm_config: LLMConfig) -> str:
            Flaky.asked += 1
            if Flaky.asked > 1:
                raise DownloadFailed("The bucket cannot be reached.")
            return super().stamp(lora_model_id, llm_config)

    async with keeping(tmp_path, downloader=Flaky, refresh_interval_s=0.01) as kept:
        old = await kept.use("a")
        await until(lambda: Flaky.asked > 3)
        assert await kept.use("a") == old


@pytest.mark.parametrize(
    ("named", "says"),
    [("gone", "'m' cannot be listed: .*gone' does not exist"), (".", "'m' has no adapters yet")],
)
async def test_a_source_without_adapters_is_in_the_log_of_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, named: str, says: str
):
    config = LLMConfig(
        model_loading_config={"model_id": "m"},
        llm_engine="sim",
        lora_config={"dynamic_lora_loading_path": str(tmp_path / named)},
    )
    await Source(config).check_listing()
    assert re.search(says, caplog.text)


async def test_a_downloader_without_a_source_is_not_called_empty(caplog: pytest.LogCaptureFixture):
    config = LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim", lora_config={})
    await Source(config, AdapterDownloader).check_listing()
    assert not caplog.text


# -- other sources, by a change of the config


async def test_what_comes_from_elsewhere_is_loaded_beside_the_old_which_running_requests_keep(tmp_path: Path):
    async with keeping(tmp_path, max_num_adapters_per_replica=2) as kept:
        await kept.use("b")
        async with kept.adapters.use("a") as old:
            stamp = kept.adapters.stamp("a", old)
            await kept.adapters.change({"adapters": {"a": str(tmp_path / "c")}})
            new = await kept.use("a")
            assert kept.engine.adapters() == {"b@1", old, new}
            assert kept.adapters.stamp("a", new) != stamp
        await until(lambda: kept.engine.adapters() == {"b@1", new})
        await kept.adapters.change({"adapters": {"a": str(tmp_path / "c"), "z": str(tmp_path / "d")}})
        assert kept.engine.told == ["+b@1", f"+{old}", f"+{new}", f"-{old}"]
        await kept.use("z")


async def test_a_load_that_is_under_way_does_not_bring_the_old_source_back(tmp_path: Path):
    async with keeping(tmp_path) as kept:
        kept.engine.may_load.clear()
        first = asyncio.create_task(kept.use("a"))
        await until(lambda: kept.engine.told)
        changing = asyncio.create_task(kept.adapters.change({"adapters": {"a": str(tmp_path / "b")}}))
        await until(lambda: kept.adapters._source.lora.adapters)
        kept.engine.may_load.set()
        assert await first == "a@1"
        await changing
        assert kept.adapters._current["a"].origin == str(tmp_path / "b")
        await until(lambda: kept.engine.adapters() == {"a@2"})


async def test_pins_can_change_and_what_has_no_source_any_more_ends_with_its_requests(tmp_path: Path):
    async with keeping(tmp_path, max_num_adapters_per_replica=2, pinned=["a"]) as kept:
        await kept.adapters.change({"pinned": ["b", "c"]})
        assert kept.adapters.loaded() == ("b", "c")
        with pytest.raises(Overloaded):
            await kept.use("d")
        async with kept.adapters.use("c") as held:
            only = {"dynamic_lora_loading_path": None, "adapters": {"b": str(tmp_path / "b")}, "pinned": []}
            await kept.adapters.change(only)
            assert kept.adapters.loaded() == ("b",)
            assert held in kept.engine.adapters()
        await until(lambda: kept.engine.adapters() == {"b@2"})
        with pytest.raises(ModelNotFound, match="There are: 'b'"):
            await kept.use("c")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"adapters": {"a": "/nothere"}}, "adapter 'a' is not there: '/nothere' does not exist"),
        ({"adapters": {"z": "/nothere"}, "refresh_interval_s": 9.0}, "adapter 'z' is not there"),
        ({"pinned": ["b", "nobody"]}, "adapter 'nobody' is not there"),
        ({"pinned": ["a", "b", "c"]}, "3 adapters are to be pinned, and a replica holds 2"),
    ],
)
async def test_a_source_that_cannot_be_read_leaves_all_as_it_was(tmp_path: Path, fields: Any, says: str):
    async with keeping(tmp_path, max_num_adapters_per_replica=2) as kept:
        await kept.use("a")
        before = kept.adapters._source
        with pytest.raises(Error, match=says):
            await kept.adapters.change(fields)
        assert kept.adapters._source is before
        assert (kept.adapters._pinned, kept.engine.told) == (set(), ["+a@1"])


async def test_of_several_only_the_broken_one_stays_as_it_was_until_it_can_be_loaded(tmp_path: Path):
    async with keeping(tmp_path) as kept:
        for name in "ab":
            await kept.use(name)
        write(tmp_path, "bad", "{")
        fields = {"adapters": {"a": str(tmp_path / "bad"), "b": str(tmp_path / "c")}}
        with pytest.raises(AdapterBroken, match="'a' cannot be loaded"):
            await kept.adapters.change(fields)
        assert await kept.use("a") == "a@1"
        assert await kept.use("b") != "b@2"
        write(tmp_path, "bad")
        await kept.adapters.change(fields)
        assert await kept.use("a") != "a@1"


async def test_sources_are_looked_at_as_often_as_the_config_says_now(tmp_path: Path):
    async with keeping(tmp_path) as kept:
        old = await kept.use("a")
        await kept.adapters.change({"refresh_interval_s": 0.01})
        change(tmp_path, "a")
        await until(lambda: kept.adapters._current["a"].key != old)
        await kept.adapters.change({"refresh_interval_s": None})
        await until(lambda: not kept.adapters._tasks)


async def test_what_is_told_before_the_start_is_what_it_starts_with(tmp_path: Path):
    write(tmp_path, "b")
    config = lora_config(tmp_path / "gone", pinned=["a"])
    engine = Engine(config)
    await engine.start()
    adapters = Store(engine, Source(config))
    await adapters.change({"dynamic_lora_loading_path": str(tmp_path), "pinned": ["b"]})
    await adapters.start()
    assert adapters.loaded() == ("b",)
    await adapters.stop()
    await engine.stop()


def test_no_slot_is_lost_wherever_a_request_for_an_adapter_ends(tmp_path: Path):
    async def requests(start: Start) -> None:
        async with keeping(tmp_path, max_num_adapters_per_replica=2) as kept:
            takes_a_while: Any = SimpleNamespace(wait=lambda: asyncio.sleep(0.1))
            kept.engine.may_load = kept.engine.may_unload = takes_a_while

            async def request(name: str) -> None:
                async with kept.adapters.use(name) as key:
                    await asyncio.sleep(0.5)
                    assert key in kept.engine.adapters()

            tasks = [start(request(name)) for name in "abcab"]
            tasks.append(
                start(kept.adapters.change({"adapters": {"a": str(tmp_path / "d")}, "pinned": ["b"]}))
            )
            _, open_ = await asyncio.wait(tasks, timeout=10_000)
            assert not open_
            ends = map(ended(RuntimeError, Overloaded), tasks)
            assert sum(end is None for end in ends) >= 3
            await asyncio.sleep(300)
            adapters = kept.adapters
            assert {name.partition("@")[0] for name in kept.engine.adapters()} >= set(adapters.loaded())
            assert not [one for one in adapters._current.values() if one.users or not one.in_engine]
            assert (adapters._slots, adapters._turn.locked()) == (len(adapters.loaded()), False)
            for name in "abc":
                await asyncio.wait_for(kept.use(name), 60)

    engine_fails = (
        failing(RuntimeError("bug"), "load_adapter"),
        failing(RuntimeError("bug"), "unload_adapter"),
    )
    assert disturbed(requests, (*DISTURBANCES, *engine_fails), also=("_load", "_unload")) >= 20
