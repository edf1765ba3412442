"""Every batch ends, whatever fails in between: with all lines once, or at its window with a reason."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from interleaving import DISTURBANCES, Start, disturbed, failing
from interleaving import ended as how_it_ended
from tests.waiting import until

from penstock.config import LLMConfig
from penstock.config.schema.jobs import JobsConfig
from penstock.data.backends.in_process import InProcessEngine
from penstock.data.backends.protocol import Response
from penstock.data.job.protocol import WorkerPool
from penstock.data.job.worker import InProcessPool
from penstock.data.journal.lock import acquire_lock
from penstock.data.rows.request import RowRequest
from penstock.data.storage.paths import LocalPath
from penstock.engine import Progress, no_progress
from penstock.errors import Conflict, ModelNotFound, StorageFull, Unavailable
from penstock.jobs import files, parameters, replicas, runner
from penstock.jobs.app import _pieces
from penstock.jobs.batches import FOLDER, JOURNAL
from penstock.jobs.files import FileStore
from penstock.jobs.owner import Owner
from penstock.jobs.records import BatchRecord, FileRecord
from penstock.jobs.replicas import Fleet
from penstock.jobs.runner import MakePool, RunningBatch
from penstock.jobs.service import JobService
from penstock.jobs.storage import JobStorage
from penstock.jobs.turns import Standing
from penstock.jobs.validation import Resolve
from penstock.openai.errors import envelope

pytestmark = pytest.mark.parity("X2")

ROWS = 6
FAST = {"step_base_ms": 0, "step_per_request_ms": 0, "prefill_tokens_per_s": float("inf")}
CONFIG = LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim", engine_kwargs=FAST)
CHAT = "/v1/chat/completions"
HEAD = (
    b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_MOST_PAUSE_S", 0.01)
    monkeypatch.setattr(runner, "_ENDING_S", 0.1)
    monkeypatch.setitem(parameters._UNITS, "m", 1)
    monkeypatch.setattr(os, "fsync", lambda file: None)


def engine(record: BatchRecord, standing: Standing, resolve: Resolve) -> WorkerPool:
    return InProcessPool(lambda: InProcessEngine(CONFIG))


class Service:
    """Files and Batches over a folder, with an engine in this process."""

    def __init__(
        self,
        folder: Path,
        pool: MakePool = engine,
        resolve: Resolve = lambda model, body: ("m", ""),
        resolve_only: Callable[[Sequence[str]], Resolve] | None = None,
    ) -> None:
        self.folder = folder
        self.jobs = JobService(JobsConfig(), str(folder), resolve, pool, resolve_only=resolve_only)

    async def __aenter__(self) -> Service:
        await self.jobs.start()
        await self.jobs.wait_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.jobs.close()

    async def upload(self, *models: str | None) -> FileRecord:
        """models: that lines name in turn."""
        names = itertools.cycle(models or ["m"])
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        line = {"method": "POST", "url": CHAT}
        rows = [
            json.dumps({"custom_id": f"row-{number}", **line, "body": {"model": next(names), **body}})
            for number in range(ROWS)
        ]

        async def pieces() -> AsyncIterator[bytes]:
            yield HEAD + "\n".join(rows).encode() + b"\r\n--B--\r\n"

        return await self.jobs.files.create("multipart/form-data; boundary=B", pieces())

    async def create(self, window: str = "24h", file: FileRecord | None = None) -> BatchRecord:
        return await self.jobs.create_batch(await self._asked(window, file))

    async def stored(self) -> BatchRecord:
        """A batch that this process does not run."""
        return await self.jobs.batches.create(await self._asked())

    async def _asked(self, window: str = "24h", file: FileRecord | None = None) -> bytes:
        file = file or await self.upload()
        return json.dumps({"input_file_id": file.id, "endpoint": CHAT, "completion_window": window}).encode()

    async def ended(self, batch_id: str) -> BatchRecord:
        async with asyncio.timeout(20):
            await self.jobs.wait_idle()
        record = self.jobs.batches.get(batch_id)
        assert record.ended, record
        return record

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        path = self.folder / self.jobs.files.get(file_id).path
        return [json.loads(text) for text in path.read_text().splitlines()]

    def check_each_once(self, record: BatchRecord) -> None:
        found = self.lines(record.output_file_id) + self.lines(record.error_file_id)
        assert sorted(one["custom_id"] for one in found) == [f"row-{number}" for number in range(ROWS)]


async def test_a_batch_whose_engine_never_comes_ends_at_its_window(tmp_path: Path):
    def gone(record: BatchRecord, standing: Standing, resolve: Resolve) -> WorkerPool:
        raise KeyError(record.models[0])

    async with Service(tmp_path, gone) as service:
        record = await service.ended((await service.create("1m")).id)
        assert (record.status, record.error_file_id) == ("expired", None)
        assert [one.code for one in record.errors] == ["internal_error"]
        assert (tmp_path / FOLDER / record.id).exists() == (tmp_path / FOLDER / record.id / JOURNAL).exists()


async def test_lines_that_name_a_model_which_left_fail_as_by_http_and_others_follow_the_default(
    tmp_path: Path,
):
    """The service came back with another config: 'old' was its default model, 'm' is it now."""

    begun = asyncio.Event()

    def away(record: BatchRecord, standing: Standing, resolve: Resolve) -> WorkerPool:
        begun.set()
        raise Unavailable("The replicas are not there.")

    def resolve(name: str | None, body: bytes) -> tuple[str, str]:
        if name not in (None, "m"):
            raise ModelNotFound(f"There is no model '{name}'.", param="model")
        return "m", ""

    async with Service(tmp_path, away, lambda name, body: ("old", "")) as before:
        batch = await before.create(file=await before.upload("old", None))
        await begun.wait()
    fleet = Fleet("app", {"m": "LLMServer:m"})
    fleet._sets["m"] = InProcessEngine(CONFIG)  # pyright: ignore[reportArgumentType]
    async with Service(tmp_path, fleet.pool, resolve) as after:
        record = await after.ended(batch.id)
        after.check_each_once(record)
        errors = after.lines(record.error_file_id)
    await fleet.close()
    assert (record.status, record.completed, record.failed) == ("completed", ROWS // 2, ROWS // 2)
    by_http = json.loads(envelope(ModelNotFound("There is no model 'old'.", param="model")))
    assert [one["response"] | {"request_id": ""} for one in errors] == ROWS // 2 * [
        {"status_code": 404, "request_id": "", "body": by_http}
    ]


class OneByOne(InProcessEngine):
    """In place of replicas, for one row at a time. may_start, may_answer: what waits for it."""

    def __init__(self, app: str, deployment: str) -> None:
        model = {"model_id": deployment.removeprefix("LLMServer:")}
        super().__init__(LLMConfig(model_loading_config=model, llm_engine="sim", engine_kwargs=FAST))
        self.may_start, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.may_answer.set()
        self.asked, self.stopped = 0, False

    async def start(self, progress: Progress = no_progress) -> None:
        await self.may_start.wait()
        await super().start(progress)

    async def stop(self) -> None:
        self.stopped = True
        await super().stop()

    async def send(self, request: RowRequest) -> Response:
        self.asked += 1
        await self.may_answer.wait()
        return await super().send(request)

    def available_slots(self, in_flight: int) -> int:
        return max(0, 1 - in_flight)


BOTH = {"m": "LLMServer:m", "n": "LLMServer:n"}


async def test_lines_end_once_each_when_their_model_is_removed_and_when_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The line that an engine has ends there, those that come after it as a 404."""
    monkeypatch.setattr(replicas, "ReplicaSet", OneByOne)
    monkeypatch.setattr(replicas, "_LOOK_S", 0.01)
    served = {"m", "n"}

    def resolve(name: str | None, body: bytes) -> tuple[str, str]:
        if name not in served:
            raise ModelNotFound(f"There is no model '{name}'.", param="model")
        return name, ""

    fleet = Fleet("app", BOTH)
    old: Any = fleet._sets["n"]
    old.may_answer.clear()
    async with Service(tmp_path, fleet.pool, resolve) as service:
        batch = await service.create(file=await service.upload("n"))
        await until(lambda: old.asked)
        served.remove("n")
        fleet.follow({"m": "LLMServer:m"})
        await asyncio.sleep(0.1)
        assert not old.stopped
        old.may_answer.set()
        record = await service.ended(batch.id)
        service.check_each_once(record)
        assert (record.completed, record.failed) == (1, ROWS - 1)
        statuses = {one["response"]["status_code"] for one in service.lines(record.error_file_id)}
        assert statuses == {404}
        await until(lambda: old.stopped)

        served.add("n")
        fleet.follow(BOTH)
        again = await service.ended((await service.create(file=await service.upload("n", "m"))).id)
        assert (again.status, again.completed) == ("completed", ROWS)
    await fleet.close()


async def test_rows_go_where_their_key_may_whatever_a_name_means_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rows name a model by versions of which their key has one; then an alias comes to mean another model."""
    monkeypatch.setattr(replicas, "ReplicaSet", OneByOne)
    alias = "m"

    def only(names: Sequence[str]) -> Resolve:
        def find(name: str | None, body: bytes) -> tuple[str, str]:
            if name == "alias" and alias not in names:
                raise ModelNotFound("The model 'alias' is not served here. Served are 'm'.", param="model")
            return "m", ""

        return find

    fleet = Fleet("app", BOTH)
    mine: Any = fleet._sets["m"]
    mine.may_answer.clear()
    key = Owner("default", "k", ["m"], ["chat"])
    async with Service(tmp_path, fleet.pool, lambda name, body: ("n", ""), only) as service:
        asked = await service._asked(file=await service.upload("model", "alias"))
        batch = await service.jobs.create_batch(asked, key)
        await until(lambda: mine.asked)
        alias = "n"
        mine.may_answer.set()
        record = await service.ended(batch.id)
        service.check_each_once(record)
        errors = service.lines(record.error_file_id)
    others: Any = fleet._sets["n"]
    await fleet.close()
    assert (record.completed, record.failed, others.asked) == (ROWS // 2, ROWS // 2, 0)
    assert {one["response"]["body"]["error"]["code"] for one in errors} == {"model_not_found"}


async def test_a_model_that_is_removed_while_its_replicas_are_looked_for_is_not_sent_to(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(replicas, "ReplicaSet", OneByOne)
    monkeypatch.setattr(replicas, "_LOOK_S", 0.01)
    fleet = Fleet("app", BOTH)
    old: Any = fleet._sets["n"]
    old.may_start.clear()
    view = replicas._View(fleet, ["m", "n"], Standing("batch", 0, 0), "t", lambda name, body: ("m", ""))
    starting = asyncio.create_task(view.start())
    await until(lambda: fleet.open[old])
    fleet.follow({"m": "LLMServer:m"})
    fleet.follow(BOTH)
    await asyncio.sleep(0.1)
    assert not old.stopped, "who waits for it would be cancelled"
    old.may_start.set()
    with pytest.raises(Unavailable, match="'n' has just been removed"):
        await starting
    assert not fleet.views
    await view.start()
    assert view._sets["n"] is fleet._sets["n"] is not old
    await until(lambda: old.stopped)
    await fleet.close()


async def test_a_batch_whose_input_is_gone_fails_with_that_reason(tmp_path: Path):
    async with Service(tmp_path) as service:
        file = await service.upload()
        (tmp_path / file.path).unlink()
        record = await service.ended((await service.create(file=file)).id)
    assert record.status == "failed"
    assert "not in the storage any more" in record.errors[0].message


FULL = failing(StorageFull("The storage of files is full."), "to_thread")
FORM = "multipart/form-data; boundary=B"
ON_THREADS = ("to_thread", "_keep", "_add", "_write", "_remove", "_create")


async def untouched(folder: Path) -> None:
    """Nothing is written any more, since the next process may hold the lock."""

    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    before = state()
    await asyncio.sleep(60)
    assert state() == before


def test_an_upload_leaves_a_file_or_nothing_wherever_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "_FEED_BYTES", 100)
    folders = itertools.count()

    async def uploads(start: Start) -> None:
        folder = tmp_path / str(next(folders))
        store = FileStore(JobsConfig(), JobStorage(str(folder)))

        async def pieces() -> AsyncIterator[bytes]:
            for piece in (HEAD, b'{"custom_id": "1"}\n' * 20, b"\r\n--B--\r\n"):
                await asyncio.sleep(0)
                yield piece

        async def upload() -> FileRecord:
            return await store.create(FORM, pieces())

        tasks = [start(upload()) for _ in range(2)]
        await asyncio.wait(tasks, timeout=1000)
        kept = {end.id for end in map(how_it_ended(StorageFull), tasks) if isinstance(end, FileRecord)}
        await asyncio.sleep(60)
        known = {one["id"] for one in store.listed({})["data"]}
        there = {path.name for path in (folder / files.FOLDER).glob("*")}
        assert kept <= known
        assert there == {f"{one}.json{end}" for one in known for end in ("", "l")}
        assert not store._uploading
        assert (await upload()).bytes == 380

    assert disturbed(uploads, (*DISTURBANCES, FULL), also=ON_THREADS) >= 20


def test_a_batch_goes_on_in_the_next_process_wherever_it_is_cut_off(tmp_path: Path):
    folders = itertools.count()

    async def batch(start: Start) -> None:
        folder = tmp_path / str(next(folders))
        async with Service(folder) as first:
            record, context = await first.stored(), first.jobs._context
            task = start(RunningBatch(record.id, context).run())
            await asyncio.wait([task], timeout=10_000)
            how_it_ended()(task)
            assert (context.turns._turns, context.turns._known) == ({}, {})
        await untouched(folder)
        async with Service(folder) as second:
            second.check_each_once(await second.ended(record.id))

    assert disturbed(batch, (*DISTURBANCES, FULL), also=ON_THREADS) >= 35


def test_a_service_leaves_its_storage_to_the_next_one_wherever_it_ends(tmp_path: Path):
    folders = itertools.count()

    async def service(start: Start) -> None:
        folder = tmp_path / str(next(folders))
        async with Service(folder) as before:
            record = await before.stored()
        owning = start(Service(folder).jobs._own())
        await asyncio.wait([owning], timeout=3)
        owning.cancel()
        await asyncio.wait([owning], timeout=1000)
        how_it_ended()(owning)
        await untouched(folder)
        async with Service(folder) as second:
            second.check_each_once(await second.ended(record.id))

    assert disturbed(service, (*DISTURBANCES, FULL), also=ON_THREADS) >= 10


async def test_uploads_at_the_same_time_share_the_room_that_is_left(tmp_path: Path):
    store = FileStore(JobsConfig(max_storage_bytes=100), JobStorage(str(tmp_path)))
    begun, over = asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield HEAD + b"x" * 60 + b"\r\n--B--\r\n"

    async def late() -> AsyncIterator[bytes]:
        begun.set()
        await over.wait()
        async for piece in pieces():
            yield piece

    slow = asyncio.create_task(store.create("multipart/form-data; boundary=B", late()))
    await begun.wait()
    assert (await store.create("multipart/form-data; boundary=B", pieces())).bytes == 60
    over.set()
    with pytest.raises(StorageFull, match="40 bytes are left"):
        await slow


async def test_a_file_that_a_batch_takes_at_the_moment_of_its_deletion_stays(tmp_path: Path):
    async with Service(tmp_path) as service:
        file, jobs = await service.upload(), service.jobs
        asked = await service._asked(file=file)
        deleting, creating = jobs.files.delete(file.id), jobs.batches.create(asked)
        refused, _ = await asyncio.gather(deleting, creating, return_exceptions=True)
        assert isinstance(refused, Conflict)
        assert jobs.files.get(file.id) == file


async def test_what_a_service_is_asked_while_it_ends_is_left_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with Service(tmp_path) as first:
        jobs, real = first.jobs, first.jobs.batches.create

        async def create(content: bytes, owner: Owner | None) -> BatchRecord:
            record = await real(content, owner)
            await jobs.close()
            return record

        monkeypatch.setattr(jobs.batches, "create", create)
        record = await first.create()
        assert jobs._runs == {}
        with pytest.raises(Unavailable, match="moved to another process"):
            await first.upload()
    async with Service(tmp_path) as second:
        second.check_each_once(await second.ended(record.id))


async def test_a_batch_whose_cancel_is_stored_before_its_task_knows_ends_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with Service(tmp_path) as service:
        record, batches, real = await service.stored(), service.jobs.batches, FileStore.content

        async def content(store: FileStore, file_id: str) -> Any:
            await batches.cancel(record.id)
            return await real(store, file_id)

        monkeypatch.setattr(FileStore, "content", content)
        await RunningBatch(record.id, service.jobs._context).run()
        assert batches.get(record.id).status == "cancelled"


async def test_counts_that_clients_have_seen_stay_while_a_batch_cannot_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with Service(tmp_path) as service:
        record, batches = await service.stored(), service.jobs.batches
        known: dict[str, Any] = {"total": ROWS, "completed": 4, "failed": 1}
        await batches.change(record.id, lambda one: one.to("in_progress", models=["m"], **known))
        lock = acquire_lock(LocalPath(tmp_path / FOLDER / record.id / JOURNAL))
        run = asyncio.create_task(RunningBatch(record.id, service.jobs._context).run())
        await until(lambda: "retrying" in caplog.text)
        shown = await batches.shown(batches.get(record.id))
        lock.release()
        await run
        assert shown["request_counts"] == known
        assert batches.get(record.id).completed == ROWS


async def test_a_download_that_ends_early_closes_its_file_when_nothing_reads_it_any_more():
    reading, going_on, seen = threading.Event(), threading.Event(), list[str]()

    class File:
        def seek(self, at: int) -> None: ...

        def read(self, size: int) -> bytes:
            reading.set()
            going_on.wait(20)
            seen.append("read")
            return b"x"

        def close(self) -> None:
            seen.append("closed")

    at: Any = SimpleNamespace(url="file", open=File)
    piece = asyncio.ensure_future(anext(_pieces(at, range(1))))
    await asyncio.to_thread(reading.wait, 20)
    piece.cancel()
    await asyncio.sleep(0)
    going_on.set()
    await asyncio.wait({piece})
    assert piece.cancelled()
    assert seen == ["read", "closed"]


async def test_rows_of_tenants_share_no_prefix_cache_where_that_is_asked_for():
    fleet, sent = Fleet("app", {}), list[dict[str, Any]]()

    class Replicas:
        async def send(self, request: RowRequest) -> Response:
            sent.append(json.loads(request.body))
            return Response(200, b"{}")

    fleet._sets["m"] = Replicas()  # pyright: ignore[reportArgumentType]
    for isolate, tenant, body in (
        (False, "a", b"{}"),
        (True, "a", b'{"prompt": "x"}'),
        (True, "a", b'{"cache_salt": "mine"}'),
        (True, "b", b"{}"),
        (True, "b", b"{"),
    ):
        fleet.isolate_cache = isolate
        view = replicas._View(fleet, ["m"], Standing("batch", 0, 0), tenant, lambda name, body: ("m", ""))
        view._sets = fleet._sets
        if body == b"{":
            with pytest.raises(json.JSONDecodeError):  # passed on as it is
                await view.send(RowRequest(path="/v1/completions", body=body))
            continue
        assert (await view.send(RowRequest(path="/v1/completions", body=body))).status == 200
    salts = [one.get("cache_salt") for one in sent]
    assert salts[0] is None
    assert len({*salts, "mine"}) == 5
    assert sent[1]["prompt"] == "x"
    refused = await view.send(RowRequest(path="/v2/embed", body=b"{}"))
    assert refused.status == 403
