"""Histories of batch jobs: odd rows, options, kills, restarts, full disks, failing buckets, changed inputs
and configs, two commands at once; against a model that says which refusal is right and what the output holds.

How to use it, and how to replay a failure: docs/inside/testing.md, "Random tests".
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from breaking import URL, Bucket, Fault, Killed, Storage, breaking, run_histories
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)
from random_jobs import (
    MAX_ROWS,
    NO_OPTIONS,
    Engine,
    Job,
    check_own,
    command,
    jobs,
    processes,
    prompt,
    rows_of,
    run_really,
)
from virtual import Clock, virtual

from penstock.cli.batch.options import RunOptions
from penstock.data.job.spec import EngineSpec, JobSpec
from penstock.data.storage.paths import storage_path

pytestmark = [pytest.mark.parity("X5"), pytest.mark.timeout(0)]

LIMIT_S = 7_200.0
"""Of a command."""

UNREADABLE = {"csv": b'9,"open', "parquet": b"PAR1", "json": b"[{", "jsonl.gz": b""}
"""What follows half of an input's file, by its form, so that no command can read it."""

ENDS = Counter[int]()
"""Exit codes of all commands."""

ENGINES = st.sampled_from(
    [
        {},
        {},
        {},
        {"error_every": 1},
        {"error_every": 2},
        {"error_every": 7},
        {"die_after_requests": 3},
        {"die_after_requests": 1},
    ]
)
FAULTS = st.builds(
    Fault,
    st.sampled_from(["killed", "killed", "full", "fails"]),
    st.integers(1, 60) | st.integers(1, 200),
    st.sampled_from([1, 3, 10**9]),
    st.floats(0, 1),
)
EVENTS = st.sampled_from(["nothing", "second command", "signal", "edit", "key"])


@dataclass(frozen=True)
class Setup:
    """What the user has: the input's files, a config of engines that say `reply`, and options."""

    files: tuple[bytes, ...]
    unreadable: bool = False
    reply: str | None = None
    seqs: int = 4
    template: str = "<{q}>"
    tokens: int = 500
    limit: int | None = None

    def refusals(self, began: Setup, way: str) -> set[str]:
        """Why a command does not continue the job that began with another setup and has answers; or none."""
        found: set[str] = set()
        if self.reply != began.reply and way != "resume with engines":
            found.add("was begun with other engines")
        if way == "run" and self.limit is not None and (began.limit is None or self.limit < began.limit):
            found.add("which can be raised, not lowered")
        if way == "run" and (self.template, self.tokens) != (began.template, began.tokens):
            found.add("was begun with")
        if self.files != began.files:
            found |= {"input has changed", "for another input"}
        return found


class JobMachine(RuleBasedStateMachine):
    """One output and every command on it. began: setups, one of which is that of the journal. replies: of
    engines that answered, or may have.
    """

    def __init__(
        self, storage: Storage, remote: str | None = None, environment: Mapping[str, str] = {}
    ) -> None:
        super().__init__()
        self.storage, self.remote, self.environment = storage, remote, environment
        storage.breaks(None)
        self.clock = Clock()
        self.folder = Path(tempfile.mkdtemp(dir=storage.root))
        self.began: list[Setup] = []
        self.replies: set[str | None] = set()
        self.has_sibling = self.finished = False
        self.unsynced: list[Path] = []
        self.threads = set(threading.enumerate())

    @initialize(
        job=jobs(),
        bucket=st.booleans(),
        limit=st.none() | st.integers(0, 9),
        processes=st.sampled_from([False] * 7 + [True]),
    )
    def begin(self, job: Job, bucket: bool, limit: int | None, processes: bool) -> None:
        """processes: whether some commands are processes of their own, which takes seconds."""
        self.has_processes = bool(self.remote) or (processes and not bucket)
        self.root = f"{self.remote}/{self.folder.name}" if self.remote else str(self.folder)
        if bucket and not self.remote:
            self.root = f"{URL}/{self.folder.name}"
        self.is_local = "://" not in self.root
        self.data = storage_path(self.root) / "data"
        self.job = self.first = job
        self.put(job)
        self.kept = dict(Bucket.store)
        self.now = Setup(self.files(), limit=limit)
        self.configure()
        self.output = f"{self.root}/{job.output}"
        self.journal = storage_path(f"{self.output.rstrip('/')}.journal")

    # What the user changes.

    def put(self, job: Job, more: bytes | None = None) -> None:
        """more: what follows half of the last file, which then cannot be read."""
        if self.is_local:
            Path(self.data.url).mkdir(exist_ok=True)
        for number in range(len(job.files)):
            content = job.content(number)
            if more is not None and number == len(job.files) - 1:
                content = content[: len(content) // 2] + more
            (self.data / f"{number}.{job.form}").write(content)

    def files(self) -> tuple[bytes, ...]:
        names = [f"{number}.{self.job.form}" for number in range(len(self.job.files))]
        return tuple((self.data / name).read() for name in names)

    def configure(self) -> None:
        reply = "" if self.now.reply is None else f", reply: {self.now.reply}"
        (self.folder / "model.yaml").write_text(
            "model_loading_config: {model_id: m}\nllm_engine: sim\nengine_kwargs: {step_base_ms: 0, "
            f"step_per_request_ms: 0, prefill_tokens_per_s: .inf, max_num_seqs: {self.now.seqs}{reply}}}\n"
        )

    @precondition(lambda self: not self.remote)
    @rule(kind=st.sampled_from(["more", "unreadable", "touched"]))
    def change_input(self, kind: str) -> None:
        job = self.job
        if kind == "touched" and self.is_local and not self.now.unreadable:  # in a bucket: another version
            self.put(job)
        elif kind == "more":
            late = {"id": len(job.asked()), "q": "late", job.column: None if job.form == "parquet" else "z"}
            self.job = replace(job, files=[*job.files[:-1], [*job.files[-1], late]])
            self.put(self.job)
            self.now = replace(self.now, files=self.files(), unreadable=False)
        elif kind == "unreadable" and job.form in UNREADABLE:
            self.put(job, UNREADABLE[job.form])
            self.now = replace(self.now, files=self.files(), unreadable=True)

    @rule()
    def take_back_what_changed(self) -> None:
        """The user does what a refusal says."""
        self.job = self.first
        if self.is_local:
            self.put(self.job)
        else:  # the same versions
            Bucket.store.update(
                {key: self.kept[key] for key in self.kept if f"/{self.folder.name}/data/" in key}
            )
        self.now = replace((self.began or [self.now])[-1], files=self.files(), unreadable=False)
        self.configure()

    @rule(reply=st.sampled_from([None, "old", "new"]), seqs=st.sampled_from([1, 4]))
    def edit_config(self, reply: str | None, seqs: int) -> None:
        self.now = replace(self.now, reply=reply, seqs=seqs)
        self.configure()

    @rule(
        template=st.sampled_from(["<{q}>", "Say {q}"]),
        tokens=st.sampled_from([500, 400]),
        limit=st.none() | st.integers(0, 9),
    )
    def change_options(self, template: str, tokens: int, limit: int | None) -> None:
        self.now = replace(self.now, template=template, tokens=tokens, limit=limit)

    @rule()
    def remove_output(self) -> None:
        output = storage_path(self.output)
        for file in output.files():
            (output / file.name if file.name else output).remove()
        self.finished = False

    @precondition(lambda self: self.unsynced)
    @rule(share=st.floats(0, 1), zeros=st.integers(0, 2))
    def lose_power(self, share: float, zeros: int) -> None:
        """A disk loses the end of what a killed command wrote: any of one segment's."""
        segment = self.unsynced.pop()
        content = segment.read_bytes()
        segment.write_bytes(content[: int(share * len(content))] + bytes(zeros))

    # What the user runs.

    def spec(self, output: str) -> JobSpec:
        job, data = self.job, self.data.url
        files = tuple(f"{data}/{number}.{job.form}" for number in range(len(job.files)))
        return JobSpec(
            inputs={"files": files, "glob": (f"{data}/*.{job.form}",)}.get(job.given, (data,)),
            output=output,
            engines=self.engines(),
            template=self.now.template,
            defaults={"max_tokens": self.now.tokens, "temperature": job.temperature},
            reuse=job.reuse,
            part_rows=job.part_rows,
            limit=self.now.limit,
            answer_column=job.answer_column,
        )

    def engines(self) -> EngineSpec:
        return EngineSpec(cli_args=(f"{self.folder}/model.yaml",))

    @rule(
        way=st.sampled_from(["run", "run", "resume", "resume with engines", "retry"]),
        fault=st.none() | FAULTS,
        engine=ENGINES,
        event=EVENTS,
        at=st.integers(0, 9),
        limits=st.just(NO_OPTIONS)
        | st.builds(RunOptions, max_total_tokens=st.integers(1, 30), max_failures=st.integers(1, 3)),
    )
    def run(
        self, way: str, fault: Fault | None, engine: dict, event: str, at: int, limits: RunOptions
    ) -> None:
        told = Engine(engine, at, lambda: self.happen(event, way), at if event == "key" else 10**9)

        def run() -> tuple[int, str]:
            self.storage.breaks(fault)
            return self.command(way, told, limits)

        healthy = self.attempt(way, run, may_fail=bool(engine), limited=limits != NO_OPTIONS)
        if healthy is not None and event != "key" and not engine:
            again = told.sent - healthy
            assert not again, f"asked again: {again}"

    @precondition(lambda self: not self.finished)
    @rule(way=st.sampled_from(["run", "resume"]), fault=FAULTS)
    def run_broken(self, way: str, fault: Fault) -> None:
        self.run(way, fault, {}, "nothing", 0, NO_OPTIONS)

    def command(self, way: str, engine: Engine, limits: RunOptions = NO_OPTIONS) -> tuple[int, str]:
        self.clock.limit = self.clock.now + LIMIT_S
        with virtual(self.clock):
            return command(
                self.spec(self.output) if way == "run" else None,
                self.output,
                engine,
                resume_with=self.engines() if way == "resume with engines" else None,
                options=limits,
                retry_failed=way == "retry",
                on_begin=self.on_begin,
            )

    def on_begin(self, kill: Callable[[], object], signals: int) -> None:
        self.storage.on_kill, self.signals = kill, signals

    def happen(self, event: str, way: str) -> None:
        """While the command runs."""
        self.happened.add(event)
        if event == "signal":
            os.write(self.signals, bytes([signal.SIGINT]))
        with self.storage.untouched():
            if event == "edit" and not self.remote:
                self.change_input("more")
            elif event == "second command":
                ends: list[tuple[int, str]] = []
                second = threading.Thread(target=lambda: ends.append(self.command(way, Engine())))
                on_kill, signals = self.storage.on_kill, self.signals
                second.start()
                second.join()
                self.storage.on_kill, self.signals = on_kill, signals
                assert ends[0][0] == 1, ends
                assert "works on this output already" in ends[0][1]

    @precondition(lambda self: self.has_processes)
    @rule(kill_after=st.none() | st.integers(0, MAX_ROWS), disk_bytes=st.none() | st.integers(0, 9000))
    def run_in_a_process(self, kill_after: int | None, disk_bytes: int | None) -> None:
        """A real SIGKILL, and a real limit."""
        self.storage.breaks(None)
        said = self.folder / "said"
        said.write_text("")

        def run() -> tuple[int, str]:
            arguments = self.spec(self.output), said, disk_bytes, self.environment
            child = processes.Process(target=run_really, args=arguments)
            child.start()
            deadline = time.monotonic() + LIMIT_S
            while child.is_alive():
                assert time.monotonic() < deadline
                if kill_after is not None and len(self.journaled()) > kill_after:
                    child.kill()
                child.join(0.002 if self.is_local else 0.1)
            self.storage.broke = disk_bytes is not None
            return child.exitcode or 0, said.read_text()

        self.attempt("run", run)

    @precondition(lambda self: not self.has_sibling and not self.now.unreadable)
    @rule()
    def run_a_job_beside_it(self) -> None:
        """Over the same input, with its output in the folder of the input."""
        self.storage.breaks(None)
        self.has_sibling = True
        output = f"{self.data.url}/sibling.jsonl"
        with virtual(self.clock):
            code, said = command(self.spec(output), output, Engine())
        asked = self.job.asked(self.now.limit)
        broken = [row for row in asked if row["id"] in self.job.broken]
        good = [row for row in asked if row not in broken and prompt(self.now.template, row) is not None]
        assert code == (1 if broken and not good else 0), said
        found = [*self.rows(output), *self.rows(f"{self.data.url}/sibling.failed.jsonl")]
        assert sorted(map(id_of, found)) == [row["id"] for row in asked]

    def attempt(
        self, way: str, run: Callable[[], tuple[int, str]], *, may_fail: bool = False, limited: bool = False
    ) -> Counter[str] | None:
        """One command, whose end is what the model says. Gives what it was to ask, where nothing broke."""
        self.finished = False
        segments, claims = self.segments(), self.claims()
        now, states = self.now, self.journaled()
        answered = {row for row, state in states.items() if state != "failed"}
        reasons = self.refusals(way, answered)
        self.happened = set[str]()
        try:
            code, said = run()
        except BaseException:
            if not self.storage.killed:
                raise
            code, said = -signal.SIGKILL, ""
        ENDS[code] += 1
        killed, broke = code == -signal.SIGKILL, self.storage.broke
        self.clock.kill_threads(Killed)
        self.unsynced = sorted(self.segments() - segments) if killed else []
        self.storage.breaks(None)
        excused = broke or bool(self.happened & {"edit", "key"}) or now.unreadable
        assert code in (0, 1, 2, 3, 130, -signal.SIGKILL), said
        assert code <= 0 or said
        assert "fault of Penstock" not in said, said
        if all(reasons):
            assert code in (1, 2) or killed, (reasons, said)
            named = any(one in said for some in reasons for one in some)
            assert killed or broke or now.unreadable or named, (reasons, said)
            return None
        if code == 2 and any(reasons):
            return None
        if "nothing was run" not in said:
            self.accept(now, way, answered, sure=code in (0, 3, 130))
        finished = code == 0 or (code == 1 and "rows failed" in said)
        assert finished or excused or killed or (code == 3 and limited) or code == 130, f"{code}: {said}"
        if code == 130:
            assert "signal" in self.happened
        failed = {row for row, state in self.journaled().items() if state == "failed"}
        assert may_fail or failed <= states.keys() - answered | self.job.broken, "rows failed for no reason"
        if finished:
            assert "edit" not in self.happened
            assert not now.unreadable
            self.check_output()
            self.finished = True
        if not killed and not broke:
            self.check_left_overs(claims)
        if killed or broke or way == "retry" or not answered or len(self.began) > 1:
            return None
        open_rows = [row for number, row in enumerate(self.job.asked()) if number not in answered]
        return Counter(
            asked for row in open_rows if (asked := prompt(self.began[0].template, row)) is not None
        )

    def refusals(self, way: str, answered: set[int]) -> list[set[str]]:
        """Why the command is refused, for each setup that the journal may have; an empty set: it is not."""
        known = bool((self.journal / "job.json").exists())
        if not known:
            return [{"no job to resume"} if way != "run" else set()]
        if not answered:  # it may begin anew
            return [set()]
        return [self.now.refusals(began, way) for began in self.began]

    def accept(self, now: Setup, way: str, answered: set[int], *, sure: bool) -> None:
        """The command was not refused: the journal has its setup now, if it came so far."""
        if not answered:
            self.replies = set()
        self.replies.add(now.reply)
        setups = [now]
        if way != "run":
            setups = [replace(one, reply=now.reply, seqs=now.seqs, files=now.files) for one in self.began]
        self.began = list(dict.fromkeys([*([] if sure else self.began), *setups]))

    # What must be there.

    def segments(self) -> set[Path]:
        return set(Path(self.journal.url).glob("*.jsonl")) if self.is_local else set()

    def journaled(self) -> dict[int, str]:
        """The state of each row in the journal, torn lines aside."""
        states: dict[int, str] = {}
        for file in self.journal.files():
            if not file.name.endswith(".jsonl"):
                continue
            for line in (self.journal / file.name).read().splitlines(keepends=True):
                if line.endswith(b"\n") and ((entry := json.loads(line)).get("end") or "of" in entry):
                    state = entry["end"]["state"] if "end" in entry else "ok"
                    if states.get(entry["row"]) in (None, "failed"):
                        states[entry["row"]] = state
        return states

    def rows(self, output: str) -> list[dict]:
        """Of a file, or of the parts in a folder."""
        at, copies = storage_path(output), []
        for file in at.files():
            name = file.name or at.name
            if not name.startswith(("_", ".")):
                copies.append(self.folder / f"copy-{name}")
                copies[-1].write_bytes((at / file.name if file.name else at).read())
        found = list(rows_of(copies))
        for copy in copies:
            copy.unlink()
        return found

    def check_output(self) -> None:
        """As one of the setups says that the journal may have."""
        faults: list[AssertionError] = []
        for setup in self.began:
            try:
                self.check_rows(setup)
            except AssertionError as fault:
                faults.append(fault)
        if len(faults) == len(self.began):
            raise faults[-1]

    def check_rows(self, setup: Setup) -> None:
        """Each row once, in order, with its own answer, or among the failed ones."""
        job, asked = self.job, self.job.asked(setup.limit)
        stem, suffix = os.path.splitext(self.output.rstrip("/"))
        form = suffix[1:] or job.form.partition(".")[0].replace("json", "jsonl").replace("ll", "l")
        good = self.rows(self.output)
        if job.answer_column is None:
            failed = self.rows(f"{stem}.failed.{form}")
        else:
            failed = [row for row in good if row["error"] not in (None, "")]
            assert [id_of(row) for row in good] == [row["id"] for row in asked]
            good = [row for row in good if row["error"] in (None, "")]
        lost = [id_of(row) for row in failed]
        assert lost == sorted(row for row, state in self.journaled().items() if state == "failed")
        assert set(lost) >= job.broken & {row["id"] for row in asked}
        done = [row for row in asked if row["id"] not in lost]
        assert [id_of(row) for row in good] == [row["id"] for row in done]
        for row, own in zip(good, done, strict=True):
            check_own(job, row, own, suffix)
            text = prompt(setup.template, own)
            answers = {""} if text is None else {reply or text for reply in self.replies}
            assert (row.get(job.answer_column or "generated_text") or "") in answers, (row, answers)

    def claims(self) -> set[str]:
        """Those of killed commands stay until a command has something to do."""
        return {file.name for file in self.journal.files() if file.name.startswith("drivers/")}

    def check_left_overs(self, claims: set[str]) -> None:
        """Of a command that has ended: no new claim beside `claims`, no temporary folder, no thread."""
        assert self.claims() <= claims
        assert not list(Path(tempfile.gettempdir()).glob("penstock-*"))
        left = {thread.name for thread in set(threading.enumerate()) - self.threads}
        assert not left & {"journal", "heartbeat"}, left

    def teardown(self) -> None:
        """In the end the user gets the output, with every row that can be answered."""
        try:
            if sys.exc_info()[0] is None:  # no step has failed
                self.finish()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            for key in [key for key in Bucket.store if f"/{self.folder.name}/" in key]:
                del Bucket.store[key]

    def finish(self) -> None:
        self.take_back_what_changed()
        for way in ("run", "retry"):
            self.attempt(way, lambda way=way: self.command(way, Engine()))
        if self.finished:
            assert {row for row, state in self.journaled().items() if state == "failed"} <= self.job.broken
            left = [path.name for path in self.folder.rglob(".*.unfinished")]
            assert not left, left


def id_of(row: Mapping[str, Any]) -> int:
    """Of a row of an output; one that is no JSON has a line."""
    found = row.get("id")
    return int(json.loads(row["line"].partition(",")[0] + "}")["id"] if found in (None, "") else found)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    with breaking(tmp_path) as broken:
        yield broken


def test_each_row_is_answered_once_whatever_happens_to_the_job(storage: Storage):
    run_histories(lambda: JobMachine(storage), min(2 * settings().max_examples, 500), steps=12)
    assert min(ENDS[code] for code in (0, 1, 2, -signal.SIGKILL)) >= 3, ENDS


def test_a_folder_whose_files_were_removed_is_written_again(storage: Storage):
    state = JobMachine(storage)
    rows = [{"id": 0, "q": "same", "x": None}]
    job = Job([rows], [pa.string()], "x", "jsonl", "files", "out/", frozenset(), "off", 0, 7, None)
    state.begin(job=job, bucket=False, limit=None, processes=False)
    for _ in range(2):
        state.run("run", None, {}, "nothing", 0, NO_OPTIONS)
        state.remove_output()
    state.teardown()
