"""Every batch ends, whatever fails in between: with all lines once, or at its window with a reason."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.config import LLMConfig
from penstock.config.schema.jobs import JobsConfig
from penstock.data.backends.in_process import InProcessEngine
from penstock.data.job.protocol import WorkerPool
from penstock.data.job.worker import InProcessPool
from penstock.data.journal.index import Index
from penstock.data.journal.lock import JobLock
from penstock.data.storage.paths import LocalPath
from penstock.errors import ModelNotFound, Unavailable
from penstock.jobs import parameters, runner
from penstock.jobs.batches import FOLDER, JOURNAL
from penstock.jobs.records import BatchRecord, FileRecord
from penstock.jobs.replicas import Fleet
from penstock.jobs.service import JobService
from penstock.jobs.storage import JobStorage
from penstock.jobs.turns import Standing
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


def engine(models: Sequence[str], standing: Standing) -> WorkerPool:
    return InProcessPool(lambda: InProcessEngine(CONFIG))


class Service:
    """Files and Batches over a folder, with an engine in this process."""

    def __init__(
        self,
        folder: Path,
        pool: Callable[[Sequence[str], Standing], WorkerPool] = engine,
        resolve: Callable[[str | None], tuple[str, str]] = lambda model: ("m", ""),
    ) -> None:
        self.folder = folder
        self.jobs = JobService(JobsConfig(), str(folder), resolve, pool)

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
        file = file or await self.upload()
        asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": window}
        return await self.jobs.create_batch(json.dumps(asked).encode())

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


class Faults:
    """Counts calls on the way of a batch; calls `fault` at those that `at` chooses."""

    CALLS = (
        *((JobStorage, name) for name in ("write", "size_bytes", "remove_tree")),
        *((LocalPath, name) for name in ("open", "read", "write", "remove", "upload", "files", "exists")),
        *((InProcessEngine, name) for name in ("start", "send")),
        (Index, "outcome"),
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.at: Callable[[int, str], bool] = lambda call, name: False
        self.fault: Callable[[], object] = lambda: None
        for kind, name in self.CALLS:
            monkeypatch.setattr(kind, name, self._counting(getattr(kind, name)))

    def _counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            self.calls += 1
            if self.at(self.calls, f"{real.__qualname__}"):
                self.fault()
            return real(*arguments)

        return counting


def fails() -> None:
    raise random.choice((RuntimeError("bug"), KeyError("m"), OSError(5, "I/O"), Unavailable("away")))


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    random.seed(7)
    return Faults(monkeypatch)


async def steps_of_a_batch(folder: Path, faults: Faults) -> int:
    async with Service(folder) as service:
        batch = await service.create()
        before = faults.calls
        service.check_each_once(await service.ended(batch.id))
        return faults.calls - before


async def test_a_batch_completes_though_any_step_fails_once(tmp_path: Path, faults: Faults):
    steps = await steps_of_a_batch(tmp_path / "whole", faults)
    for step in range(1, steps, 3):
        async with Service(tmp_path / str(step)) as service:
            batch = await service.create()
            fatal = faults.calls + step
            faults.at, faults.fault = lambda call, name, fatal=fatal: call == fatal, fails
            record = await service.ended(batch.id)
            service.check_each_once(record)
            assert record.status == "completed"


async def test_a_batch_ends_at_its_window_though_every_step_fails_from_some_point_on(
    tmp_path: Path, faults: Faults
):
    """All but the writing of records: a state that cannot be stored is no state."""
    steps = await steps_of_a_batch(tmp_path / "whole", faults)
    for step in random.sample(range(1, steps), 3):
        async with Service(tmp_path / str(step)) as service:
            batch = await service.create("1m")
            first = faults.calls + step
            faults.fault = fails
            faults.at = lambda call, name, first=first: (
                call >= first and name not in ("JobStorage.write", "LocalPath.write", "LocalPath.upload")
            )
            record = await service.ended(batch.id)
            faults.at = lambda call, name: False
            assert (record.status, len(record.errors)) in (("expired", 1), ("completed", 0))


async def test_a_batch_that_is_cut_off_at_any_step_goes_on_in_the_next_process(
    tmp_path: Path, faults: Faults
):
    steps = await steps_of_a_batch(tmp_path / "whole", faults)
    loop = asyncio.get_running_loop()
    for step in range(2, steps, 5):
        cut = asyncio.Event()
        async with Service(tmp_path / str(step)) as first:
            batch = await first.create()
            fatal = faults.calls + step
            faults.at = lambda call, name, fatal=fatal: call == fatal
            faults.fault = lambda cut=cut: loop.call_soon_threadsafe(cut.set)
            waits = [asyncio.ensure_future(one) for one in (cut.wait(), first.jobs.wait_idle())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        async with Service(tmp_path / str(step)) as second:
            second.check_each_once(await second.ended(batch.id))


async def test_a_service_that_is_closed_while_it_takes_its_storage_leaves_it_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked, go, taken = threading.Event(), threading.Event(), threading.Event()
    real = JobStorage.lock

    def slowly(storage: JobStorage) -> JobLock:
        asked.set()
        go.wait(10)
        lock = real(storage)
        taken.set()
        return lock

    monkeypatch.setattr(JobStorage, "lock", slowly)
    first = Service(tmp_path)
    await first.jobs.start()
    await asyncio.to_thread(asked.wait, 10)
    asyncio.get_running_loop().call_later(0.1, go.set)
    await first.jobs.close()
    assert await asyncio.to_thread(taken.wait, 10)
    async with asyncio.timeout(10), Service(tmp_path):
        pass


async def test_a_batch_whose_engine_never_comes_ends_at_its_window(tmp_path: Path):
    def gone(models: Sequence[str], standing: Standing) -> WorkerPool:
        raise KeyError(models[0])

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

    def away(models: Sequence[str], standing: Standing) -> WorkerPool:
        begun.set()
        raise Unavailable("The replicas are not there.")

    def resolve(name: str | None) -> tuple[str, str]:
        if name not in (None, "m"):
            raise ModelNotFound(f"There is no model '{name}'.", param="model")
        return "m", ""

    async with Service(tmp_path, away, lambda name: ("old", "")) as before:
        batch = await before.create(file=await before.upload("old", None))
        await begun.wait()
    fleet = Fleet("app", {"m": "LLMServer:m"}, resolve)
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


async def test_a_batch_whose_input_is_gone_fails_with_that_reason(tmp_path: Path):
    async with Service(tmp_path) as service:
        file = await service.upload()
        (tmp_path / file.path).unlink()
        record = await service.ended((await service.create(file=file)).id)
    assert record.status == "failed"
    assert "not in the storage any more" in record.errors[0].message
