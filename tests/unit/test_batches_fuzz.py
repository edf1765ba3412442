"""Histories of Files and Batches: uploads, batches, cancels, deletions, engines and storage that fail,
redeploys and kills at any moment, in virtual time; against a model of what clients may see.

How to use it, and how to replay a failure: docs/inside/testing.md, "Random tests".
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from breaking import URL, Bucket, Fault, Killed, Storage, breaking, run_histories
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from virtual import START_S, Clock, ClockLoop, virtual

from penstock.config import LLMConfig
from penstock.config.schema.jobs import JobsConfig
from penstock.data.backends.in_process import InProcessEngine
from penstock.data.backends.protocol import Response
from penstock.data.execution import window
from penstock.data.job import driver, worker
from penstock.data.journal import lock, segment
from penstock.data.rows.request import RowRequest
from penstock.data.storage.paths import storage_path
from penstock.engine import Progress, no_progress
from penstock.errors import ModelNotFound, Unavailable
from penstock.jobs import replicas, service
from penstock.jobs.app import make_app
from penstock.jobs.service import JobService

pytestmark = [pytest.mark.parity("X2"), pytest.mark.timeout(0)]

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
ENDS = Counter[str]()
"""States in which batches ended."""

NEXT = {
    "validating": ("in_progress", "failed", "cancelling", "expired", "finalizing", "completed", "cancelled"),
    "in_progress": ("finalizing", "completed", "cancelling", "cancelled", "expired"),
    "finalizing": ("completed", "expired", "cancelled"),
    "cancelling": ("cancelled", "failed", "expired"),
}
"""States that may follow one, also some steps later."""

DAY_S = 86_400
KEPT_S = 30 * DAY_S
LATE_S = 300.0
"""A batch ends so long after its window: 30 s for running requests, and pauses between tries. Waits for
claims of killed processes add up here, where calls of storage are made one after the other.
"""

READY_S = 300.0
"""A process has its storage so long after its start."""

WHICH = st.integers(0, 9)
Lines = list[tuple[str, str | None]]
LINES = st.tuples(st.text("abc ", min_size=1), st.sampled_from(["m", "m", "n", None]))
"""The text of a line, and the model that it names."""


@dataclass
class Batch:
    """What the client knows. lines: texts by custom_id. models: that they name; None for the default one.

    missing: models that some deployment did not serve. trouble: what has happened since it was created.
    """

    file: str
    window_s: float
    created_s: float
    lines: dict[str, tuple[str, str | None]]
    is_valid: bool
    status: str = "validating"
    counts: tuple[int, int] = (0, 0)
    cancelled: bool = False
    trouble: set[str] = field(default_factory=set[str])
    missing: set[str | None] = field(default_factory=set[str | None])
    is_checked: bool = False


class Replicas(InProcessEngine):
    """Of one model. state: what they do to each request."""

    def __init__(self, model: str, deployment: Deployment) -> None:
        sizes = {"step_base_ms": 400, "max_num_seqs": 2}
        super().__init__(
            LLMConfig(model_loading_config={"model_id": model}, llm_engine="sim", engine_kwargs=sizes)
        )
        self._deployment = deployment

    async def start(self, progress: Progress = no_progress) -> None:
        if self._deployment.engines == "away":
            raise Unavailable("There are no replicas now.")
        await super().start(progress)

    async def send(self, request: RowRequest) -> Response:
        state = self._deployment.engines
        if state == "bug":
            raise RuntimeError("a bug")
        if state in ("500", "503"):
            return Response(int(state), b'{"error": {"message": "no"}}')
        if state == "hang":
            await asyncio.sleep(DAY_S)
        return await super().send(request)


class Deployment:
    """One process of files and batches. models: that it serves; the first is the default one."""

    def __init__(self, url: str, models: Sequence[str]) -> None:
        self.models, self.engines = models, "work"
        self.fleet = replicas.Fleet("app", {})
        self.fleet._sets = {model: Replicas(model, self) for model in models}  # pyright: ignore[reportAttributeAccessIssue]
        self.jobs = JobService(JobsConfig(), url, self.resolve, self.fleet.pool)
        self.app = make_app(self.jobs)

    def resolve(self, name: str | None, body: bytes) -> tuple[str, str]:
        if name is not None and name not in self.models:
            raise ModelNotFound(f"There is no model '{name}'.", param="model")
        return name or self.models[0], ""

    async def close(self) -> None:
        await self.jobs.close()
        await self.fleet.close()


class BatchesMachine(RuleBasedStateMachine):
    """One storage, and the processes that own it in turn. is_healthy: since when storage works, and a process
    owns it; None while it may fail. unsure: calls that failed, and may have had an effect all the same.
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__()
        self.storage = storage
        storage.breaks(None)
        self.folder = Path(tempfile.mkdtemp(dir=storage.root))
        self.clock = Clock()
        self.loop = ClockLoop(self.clock)
        self.loop.set_exception_handler(lambda loop, context: None)  # tasks of processes that were killed
        asyncio.set_event_loop(self.loop)
        self.files: dict[str, tuple[dict[str, tuple[str, str | None]], bool, float]] = {}
        self.gone: set[str] = set()
        self.batches: dict[str, Batch] = {}
        self.unsure = 0
        self.healthy_s: float | None = None
        self.engines = "work"
        self.deployment: Deployment | None = None

    # Steps.

    @initialize(bucket=st.booleans())
    def begin(self, bucket: bool) -> None:
        self.url = f"{URL}/{self.folder.name}" if bucket else f"{self.folder}/jobs"
        self.run(self.deploy(["m", "n"]))

    @rule(
        lines=st.lists(LINES, min_size=1, max_size=5) | st.lists(LINES, max_size=1),
        broken=st.sampled_from(["", "", "", "", "a line", "bytes"]),
        keep_s=st.sampled_from([None, None, 3600]),
        window=st.sampled_from(["1m", "30m", "2h", None]),
    )
    def submit(self, lines: Lines, broken: str, keep_s: int | None, window: str | None) -> None:
        """A file, and a batch of it unless the window is None."""
        rows = {f"row-{number}": (text.strip() or "x", model) for number, (text, model) in enumerate(lines)}
        content = b"".join(line_of(name, *row) for name, row in rows.items())
        content += {"": b"", "a line": b"{no json\n", "bytes": b"\xff\xfe"}[broken]
        fields = {"purpose": "batch"}
        if keep_s:
            fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(keep_s)}
        answer = self.call("POST", "/v1/files", data=fields, files={"file": ("in.jsonl", content)})
        if answer is None:
            return
        if answer.status_code != 200:
            assert answer.status_code == 400, answer.text
            assert broken == "bytes" or not content
            return
        assert content
        assert broken != "bytes"
        name = answer.json()["id"]
        self.files[name] = rows, bool(rows) and not broken, self.now() + (keep_s or KEPT_S)
        if window is not None:
            self.create(sorted(self.files).index(name), window)

    @precondition(lambda self: self.files)
    @rule(which=WHICH, window=st.sampled_from(["1m", "30m", "2h"]))
    def create(self, which: int, window: str) -> None:
        file = one_of(self.files, which)
        asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": window}
        answer = self.call("POST", "/v1/batches", json=asked)
        if answer is not None and answer.status_code != 200:
            assert answer.status_code == 404, answer.text
            assert not self.is_kept(file), answer.text
        elif answer is not None:
            self.meet(answer.json())

    @precondition(lambda self: self.batches)
    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        name = one_of(self.batches, which)
        batch = self.batches[name]
        answer = self.call("POST", f"/v1/batches/{name}/cancel")
        batch.cancelled |= answer is None or answer.status_code == 200
        if answer is not None and answer.status_code != 200:
            self.see()
            assert answer.status_code in (404, 409), answer.text
            assert batch.status in (*ENDED, "finalizing"), "it could not be cancelled"

    @precondition(lambda self: self.files)
    @rule(which=WHICH)
    def delete(self, which: int) -> None:
        name = one_of(self.files, which)
        readers = self.readers(name)
        answer = self.call("DELETE", f"/v1/files/{name}")
        if answer is None:
            self.gone.add(name)
        elif answer.status_code == 409:
            assert readers, answer.text
        elif answer.status_code == 404:
            assert not self.is_kept(name), answer.text
        else:
            assert answer.status_code == 200, answer.text
            del self.files[name]
            self.see()
            assert all(self.batches[one].status in ENDED for one in readers if one in self.batches)

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 40.0, 900.0, 3600.0]))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(state=st.sampled_from(["work", "away", "500", "503", "bug", "hang"]))
    def turn_engines(self, state: str) -> None:
        self.engines = state
        if self.deployment is not None:
            self.deployment.engines = state
        self.trouble(state)

    @rule(
        fault=st.builds(
            Fault,
            st.sampled_from(["full", "fails", "bug", "killed"]),
            st.integers(1, 60),
            st.sampled_from([1, 4, 10**9]),
            st.floats(0, 1),
        )
    )
    def break_storage(self, fault: Fault) -> None:
        if not self.storage.killed:
            self.storage.breaks(fault)
            self.healthy_s = None
            self.trouble("storage")

    @precondition(lambda self: self.healthy_s is None)
    @rule()
    def mend_storage(self) -> None:
        if self.storage.killed:
            self.redeploy("killed", ["m", "n"], 0.0)
        else:
            self.storage.breaks(None)
            self.run(asyncio.sleep(60))
            self.run(asyncio.wait_for(self.deployment.jobs.wait_ready(), READY_S))
            self.healthy_s = self.now()

    @rule(
        how=st.sampled_from(["closed", "killed", "replaced"]),
        models=st.sampled_from([["m", "n"], ["n", "m"], ["m"], ["n"]]),
        away_s=st.sampled_from([0.0, 60.0, 2 * 3600.0, 3.0 * DAY_S, 31.0 * DAY_S]),
    )
    def redeploy(self, how: str, models: list[str], away_s: float) -> None:
        """away_s: for which no process runs. What broke works again."""
        self.trouble("redeploy")
        old = self.deployment
        assert old is not None
        if how == "replaced" and not self.storage.killed and self.healthy_s is not None:
            self.run(self.deploy(models, beside=old))
            return
        if how == "killed" or self.storage.killed:
            self.storage.kill()
        self.run(old.close(), kills=True)
        self.deployment = None
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.run(asyncio.sleep(10), kills=True)
        self.clock.kill_threads(Killed)
        assert self.storage.killed or not asyncio.all_tasks(self.loop), asyncio.all_tasks(self.loop)
        self.storage.breaks(None)
        self.clock.now += away_s
        self.run(self.deploy(models))

    async def deploy(self, models: list[str], beside: Deployment | None = None) -> None:
        new = Deployment(self.url, models)
        new.engines = self.engines
        for batch in self.batches.values():
            if batch.status not in ENDED:
                batch.missing |= {"m", "n", None} - set(models)
        await new.jobs.start()
        if beside is not None:
            await asyncio.sleep(1)
            assert (await ask(new, "GET", "/v1/files")).status_code == 503
            await beside.close()
        await asyncio.wait_for(new.jobs.wait_ready(), READY_S)
        new.jobs.turns._clock = self.loop.time
        self.deployment, self.healthy_s = new, self.now()

    # What the client sees.

    def call(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """None where storage may have failed: then nothing is known."""
        assert self.deployment is not None
        answer = self.run(ask(self.deployment, method, path, **options), kills=True)
        if self.storage.killed or answer is None:
            self.healthy_s = None
            self.unsure += method != "GET"
            return None
        if answer.status_code >= 500:
            fault = self.storage.fault
            assert self.healthy_s is None, answer.text
            assert answer.status_code in ((500, 503, 507) if fault and fault.kind == "bug" else (503, 507))
            assert answer.json()["error"]["message"]
            self.unsure += method != "GET"
            return None
        return answer

    @invariant()
    def see(self) -> None:
        """Every batch, and every file."""
        if self.deployment is None or self.storage.killed:
            return
        listed, files = self.call("GET", "/v1/batches?limit=100"), self.call("GET", "/v1/files?limit=1000")
        if listed is not None and files is not None:
            for shown in listed.json()["data"]:
                self.meet(shown)
            there = {one["id"] for one in listed.json()["data"]}
            for name in self.batches.keys() - there:
                batch = self.batches[name]
                assert self.now() >= batch.created_s + KEPT_S, "a batch is gone"
                del self.batches[name]
            names = {one["id"] for one in files.json()["data"] if one["purpose"] == "batch"}
            lost = {
                name for name in self.files.keys() - names if self.is_kept(name) and not self.readers(name)
            }
            assert not lost, f"files are gone: {lost}"
            assert len(names - self.files.keys()) <= self.unsure

    def meet(self, shown: dict[str, Any]) -> None:
        """A batch as a client sees it now."""
        if (batch := self.batches.get(shown["id"])) is None:
            rows, is_valid, _ = self.files.get(shown["input_file_id"], ({}, False, 0.0))
            created_s = float(shown["created_at"])
            window_s = shown["expires_at"] - created_s
            batch = Batch(shown["input_file_id"], window_s, created_s, rows, is_valid)
            batch.trouble = {self.engines, *([] if self.healthy_s is not None else ["storage"])}
            served = set(self.deployment.models) if self.deployment else set()
            batch.missing |= {"m", "n"} - served
            self.batches[shown["id"]] = batch
        status, counts = shown["status"], shown["request_counts"]
        seen = counts["completed"], counts["failed"]
        assert status == batch.status or status in NEXT.get(batch.status, ()), (batch.status, status)
        if status not in ENDED:
            assert sum(seen) >= sum(batch.counts), (batch.counts, seen)
            deadline = max(batch.created_s + batch.window_s, self.healthy_s or 0.0) + LATE_S
            assert self.healthy_s is None or self.now() < deadline, f"it is {status} after its window"
        batch.status, batch.counts = status, seen
        if status in ENDED and not batch.is_checked and self.healthy_s is not None:
            self.check(batch, shown)
            batch.is_checked = True

    def check(self, batch: Batch, shown: dict[str, Any]) -> None:
        """A batch that has ended: each line once, with its own answer or a reason that is right."""
        ENDS[shown["status"]] += 1
        status, window_over = shown["status"], self.now() >= batch.created_s + batch.window_s
        assert status != "cancelled" or batch.cancelled
        assert status != "expired" or window_over
        if status == "failed":
            assert not batch.is_valid or batch.missing & {model for _, model in batch.lines.values()}, shown
            assert shown["errors"]["data"]
            return
        done, left = (self.content(shown[f"{kind}_file_id"]) for kind in ("output", "error"))
        if done is None or left is None:  # expired
            return
        counts = shown["request_counts"]
        if not done and not left:
            assert status in ("cancelled", "expired"), shown
            assert not counts["total"] or "storage" in batch.trouble, shown
            return
        assert batch.is_valid
        assert sorted(one["custom_id"] for one in done + left) == sorted(batch.lines)
        assert (counts["total"], *batch.counts) == (len(batch.lines), len(done), len(left))
        for one in done:
            said = one["response"]["body"]["choices"][0]["message"]["content"]
            assert said == batch.lines[one["custom_id"]][0], one
        for one in left:
            code = one["error"]["code"]
            _, model = batch.lines[one["custom_id"]]
            right = {
                "batch_cancelled": batch.cancelled and status in ("cancelled", "expired"),
                "batch_expired": status == "expired",
                "model_not_found": model in batch.missing,
            }
            assert right.get(code, bool(batch.trouble & {"500", "503", "bug", "away"})), (one, batch)

    def content(self, name: str | None) -> list[dict[str, Any]] | None:
        if name is None:
            return []
        answer = self.call("GET", f"/v1/files/{name}/content")
        assert answer is not None
        if answer.status_code == 404:
            assert self.call("GET", f"/v1/files/{name}").status_code == 404
            return None
        return [json.loads(line) for line in answer.text.splitlines()]

    def readers(self, name: str) -> list[str]:
        """Batches that may still read a file."""
        return [
            one for one, batch in self.batches.items() if batch.file == name and batch.status not in ENDED
        ]

    def is_kept(self, name: str) -> bool:
        return self.now() < self.files[name][2] - 1 and name not in self.gone

    def trouble(self, what: str) -> None:
        for batch in self.batches.values():
            batch.trouble.add(what)

    def now(self) -> float:
        return START_S + self.loop.time()

    def run(self, work: Any, *, kills: bool = False) -> Any:
        """kills: its process may be dead before it ends."""
        with virtual(self.clock):
            return self.loop.run_until_complete(until_killed(self.storage, work) if kills else work)

    def teardown(self) -> None:
        """In the end everything can be removed, and nothing is left."""
        try:
            if sys.exc_info()[0] is None:  # no step has failed
                self.clean_up()
        finally:
            self.storage.breaks(None)
            with_tasks = asyncio.all_tasks(self.loop)
            for task in with_tasks:
                task.cancel()
            if with_tasks:
                self.run(asyncio.wait(with_tasks, timeout=60))
            self.loop.close()
            asyncio.set_event_loop(None)
            shutil.rmtree(self.folder, ignore_errors=True)
            for key in [key for key in Bucket.store if f"/{self.folder.name}/" in key]:
                del Bucket.store[key]

    def clean_up(self) -> None:
        self.turn_engines("work")
        if self.healthy_s is None:
            self.mend_storage()
        ends = [one.created_s + one.window_s for one in self.batches.values() if one.status not in ENDED]
        self.wait(max([self.now(), *ends]) - self.now() + LATE_S)
        self.see()
        unsettled = [one for one in self.batches.values() if not one.is_checked]
        assert not unsettled, unsettled
        files = self.call("GET", "/v1/files?limit=1000")
        for one in files.json()["data"]:
            assert self.call("DELETE", f"/v1/files/{one['id']}").status_code == 200
        self.files = {}
        for _ in range(2):  # a batch of a call that failed may come to light, and end, after the first
            self.redeploy("closed", ["m", "n"], 31.0 * DAY_S)
            self.wait(900)
        self.run(self.deployment.close())
        self.deployment = None
        left = [file.name for file in storage_path(self.url).files() if file.name != "owner/driver"]
        assert not left, left
        assert not asyncio.all_tasks(self.loop)


async def ask(deployment: Deployment, method: str, path: str, **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(deployment.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://jobs", timeout=None) as client:
        return await client.request(method, path, **options)


async def until_killed(storage: Storage, work: Any) -> Any:
    """What `work` returns; None when its process is killed before."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait({task}, timeout=1)
        if storage.killed and not task.done():
            task.cancel()
    return None if task.cancelled() or (storage.killed and task.exception()) else task.result()


def one_of(names: Iterable[str], which: int) -> str:
    return sorted(names)[which % len(list(names))]


def line_of(name: str, text: str, model: str | None) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 99}
    return json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"


POLLS = {
    (window, "_POLL_S"): 1.0,
    (driver, "_LOOK_S"): 2.0,
    (worker, "_MAX_SILENCE_S"): 20.0,
    (segment, "SYNC_S"): 4.0,
    (lock, "HEARTBEAT_S"): 20.0,
    (lock, "_WATCH_S"): 60.0,
    (service, "_LOOK_S"): 20.0,
    (service, "_SWEEP_S"): 600.0,
}
"""What happens every second, less often: hours pass here."""


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    for (module, name), seconds in POLLS.items():
        monkeypatch.setattr(module, name, seconds)
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    with breaking(tmp_path) as broken:
        yield broken
    logging.getLogger("penstock").setLevel(logging.WARNING)


def test_each_line_is_answered_once_whatever_happens_to_the_service(storage: Storage):
    run_histories(lambda: BatchesMachine(storage), min(settings().max_examples, 200), steps=15)
    assert min(ENDS[status] for status in ENDED) >= 3, ENDS


def test_a_batch_that_is_cancelled_after_its_window_is_expired(storage: Storage):
    state = BatchesMachine(storage)
    state.begin(bucket=False)
    state.turn_engines("hang")
    state.submit([("a", "m"), ("b", "m")], "", None, "1m")
    state.wait(65.0)
    state.cancel(0)
    state.wait(40.0)
    state.see()
    assert [batch.status for batch in state.batches.values()] == ["expired"]
    state.teardown()


@pytest.mark.parametrize("operation", range(1, 9))
def test_a_batch_whose_process_is_killed_leaves_nothing(storage: Storage, operation: int):
    state = BatchesMachine(storage)
    state.begin(bucket=False)
    state.submit([("a", "m")], "", None, None)
    state.break_storage(Fault("killed", operation, torn=0.5))
    state.create(0, "1m")
    state.mend_storage()
    state.teardown()


@pytest.mark.parametrize("operation", range(4, 16, 2))
def test_a_batch_that_was_removed_does_not_come_back(storage: Storage, operation: int):
    """Each owner of a bucket writes its own record; one is killed before it has removed the former one."""
    state = BatchesMachine(storage)
    state.begin(bucket=True)
    state.turn_engines("hang")
    state.submit([("a", "m")], "", None, "2h")
    state.redeploy("killed", ["m", "n"], 0.0)
    state.break_storage(Fault("killed", operation))
    state.cancel(0)
    state.mend_storage()
    state.teardown()
