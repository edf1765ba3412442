"""Batch jobs drawn at random: odd rows in odd files, the command that runs them, what its output holds."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import gzip
import io
import json
import multiprocessing
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from pyarrow.csv import write_csv

from penstock.cli.batch import run as commands
from penstock.cli.batch.options import RunOptions
from penstock.cli.batch.run import BatchRun, sentence
from penstock.cli.models.options import CommandOptions
from penstock.cli.process.output import Output
from penstock.data.backends.in_process import InProcessEngine
from penstock.data.backends.protocol import Response
from penstock.data.job.spec import EngineSpec, JobSpec
from penstock.data.job.worker import InProcessPool
from penstock.data.rows.request import RowRequest
from penstock.errors import ConfigError, Error, SourceNotFound

Row = dict[str, Any]

NO_OPTIONS = RunOptions()

MAX_ROWS = 24

processes = multiprocessing.get_context("forkserver")
"""Where a command starts at once, for what it imports is there."""
processes.set_forkserver_preload(
    [
        "hypothesis",
        "pandas",
        "pytest",
        "penstock.cli.batch.run",
        "penstock.data.job.output",
        "penstock.jobs.service",
    ]
)

text = st.just("same") | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12
)
"""What a prompt may be; every form of a file can hold it."""

any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
_FAR = range(253_402_300_800_000_000, 253_402_300_800_000_010)  # microseconds of the year 10000
columns = {  # what a column of Parquet may hold, by its type
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(allow_nan=False, allow_infinity=False),
    pa.bool_(): st.booleans(),
    pa.string(): text,
    pa.null(): st.none(),
    pa.list_(pa.int32()): st.lists(st.integers(-5, 5), max_size=3),
    pa.struct([("a", pa.string()), ("b", pa.int64())]): st.fixed_dictionaries(
        {"a": st.none() | text, "b": st.integers(0, 9)}
    ),
    pa.decimal128(9, 2): st.decimals(-999, 999, places=2),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes() | st.sampled_from(_FAR),
    pa.time64("us"): st.times(),
    pa.binary(): st.binary(max_size=4),
}
_TEXTS = (decimal.Decimal, datetime.date, datetime.time)
"""Of CSV cells that hold no JSON, and so no quotes."""

names = st.sampled_from(["x", "label", "error", "generated_text", "original_error", "attempts", "ü", "a.b"])
"""Of another column: some are names of our own."""


@dataclass(frozen=True)
class Job:
    """form: the ending of the input's files. given: how the command names them. broken: rows without JSON."""

    files: list[list[Row]]
    types: list[pa.DataType]
    column: str
    form: str
    given: str
    output: str
    broken: frozenset[int]
    reuse: str
    temperature: int
    part_rows: int
    answer_column: str | None

    def content(self, number: int) -> bytes:
        """One input file."""
        rows, to = self.files[number], io.BytesIO()
        if self.form.startswith("json"):
            lines = [
                f'{{"id": {row["id"]}, no json' if row["id"] in self.broken else json.dumps(row)
                for row in rows
            ]
            body = "\n".join(lines) if self.form.startswith("jsonl") else f"[{','.join(lines)}]"
            return gzip.compress(body.encode(), mtime=0) if self.form.endswith(".gz") else body.encode()
        schema = pa.schema([("id", pa.int64()), ("q", pa.string()), (self.column, self.types[number])])
        table = pa.Table.from_pylist(rows, schema)
        pq.write_table(table, to) if self.form == "parquet" else write_csv(table, to)
        return to.getvalue()

    def asked(self, limit: int | None = None) -> list[Row]:
        """Rows in the order of the input."""
        return [row for file in self.files for row in file][:limit]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    form = draw(st.sampled_from(["jsonl", "jsonl.gz", "json", "csv", "parquet"]))
    column = draw(names)
    files: list[list[Row]] = []
    types: list[pa.DataType] = []
    count = 0
    asks = text if form in ("csv", "parquet") else text | st.none() | any_json
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(list(columns))) if form == "parquet" else pa.string()
        values = st.none() | columns[kind] if form == "parquet" else text if form == "csv" else any_json
        size = draw(st.integers(0, MAX_ROWS // 3))
        files.append([{"id": count + place, "q": draw(asks), column: draw(values)} for place in range(size)])
        types.append(kind)
        count += size
    broken = st.just(frozenset[int]())
    if form.startswith("jsonl") and count:
        broken = st.frozensets(st.integers(0, count - 1), max_size=1) | broken
    outputs = [
        "answers.jsonl",
        "data/answers.jsonl",
        "data/answers.csv",
        "answers.parquet",
        "answers.csv",
        "out/",
    ]
    return Job(
        files,
        types,
        column,
        form,
        draw(st.sampled_from(["files", "glob", "folder"])),
        draw(st.sampled_from(outputs)),
        draw(broken),
        draw(st.sampled_from(["off", "exact", "all"])),
        draw(st.sampled_from([0, 1])),
        draw(st.sampled_from([1, 7, 50_000])),
        draw(st.none() | st.just("answer")),
    )


def prompt(template: str, row: Row) -> str | None:
    """What the model is asked; None for a row that is skipped, as all columns of its prompt are blank."""
    value = row["q"]
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    is_json = isinstance(value, list | dict)
    return template.format(q=msgspec.json.encode(value).decode() if is_json else value)


def rows_of(paths: Iterable[Path]) -> Iterator[Row]:
    """Rows of files, as pandas and pyarrow read them."""
    for path in sorted(paths):
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            for place, column in enumerate(table.schema):  # Python has no year 10000
                if pa.types.is_timestamp(column.type):
                    table = table.set_column(place, column.name, table[place].cast(pa.int64()))
            yield from table.to_pylist()
        elif path.suffix == ".csv":
            yield from pandas.read_csv(path, keep_default_na=False).to_dict("records")
        else:
            yield from map(json.loads, path.read_bytes().splitlines())


def check_own(job: Job, row: Row, asked: Row, output: str) -> None:
    """The user's columns are as they were."""
    value = asked[job.column]
    found = row.get(f"original_{job.column}", row.get(job.column))
    if output == ".csv":
        assert not isinstance(value, _TEXTS) or '"' not in str(found)
    elif output == ".jsonl" and not isinstance(value, (*_TEXTS, bytes)) and value not in _FAR:
        assert row["q"] == asked["q"]
        assert found == value


@dataclass
class Engine:
    """What the job's engine does to it. at: the number of the request before which `event` is called.
    refuses_from: the number of the request from which the API key is refused.
    """

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    at: int = -1
    event: Callable[[], object] = lambda: None
    refuses_from: int = 10**9
    sent: Counter[str] = field(default_factory=Counter[str])

    def pool(self, engines: EngineSpec, config: Any, **_: Any) -> InProcessPool:
        config = config.model_copy(update={"engine_kwargs": {**config.engine_kwargs, **self.options}})
        return InProcessPool(lambda: _Engine(config, self))


class _Engine(InProcessEngine):
    def __init__(self, config: Any, told: Engine) -> None:
        super().__init__(config)
        self._told = told

    async def send(self, request: RowRequest) -> Response:
        told = self._told
        number = told.sent.total()
        told.sent[json.loads(request.body)["messages"][-1]["content"]] += 1
        if number == told.at:
            told.event()
        if number >= told.refuses_from:
            return Response(401, b'{"error": {"message": "no such key", "code": "invalid_api_key"}}')
        return await super().send(request)


_signalled = commands._signalled


def command(
    spec: JobSpec | None,
    output: str,
    engine: Engine,
    *,
    resume_with: EngineSpec | None = None,
    options: RunOptions = NO_OPTIONS,
    retry_failed: bool = False,
    on_begin: Callable[[Callable[[], object], int], object] = lambda cancel, signals: None,
) -> tuple[int, str]:
    """`penstock batch`, or `resume` without a spec: its exit code, and what it says.

    on_begin: gets what ends the job's task as a kill would, and where its signals are written.
    """
    reads, signals = os.pipe()

    async def begun(job: Any, signals_fd: int, meter: Any) -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        loop.set_exception_handler(lambda loop, context: None)  # tasks of a process that was killed
        assert task is not None
        on_begin(lambda: loop.call_soon_threadsafe(task.cancel), signals)
        return await _signalled(job, signals_fd, meter)

    said = io.StringIO()
    run = BatchRun(
        output,
        CommandOptions("penstock batch", ()),
        options,
        spec=spec,
        engines=resume_with,
        retry_failed=retry_failed,
    )
    with patch.object(commands, "_signalled", begun), patch.object(commands, "make_worker_pool", engine.pool):
        try:
            return commands._run(run, reads, Output(io.StringIO(), said, None)), said.getvalue()
        except (Error, OSError) as error:
            return (2 if isinstance(error, ConfigError | SourceNotFound) else 1), sentence(error)
        finally:
            os.close(reads)
            os.close(signals)


def run_really(spec: JobSpec, said: Path, disk_bytes: int | None, environment: Mapping[str, str]) -> None:
    """The same in a process of its own, to be killed. disk_bytes: that any file can hold."""
    os.environ.update(environment)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if disk_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (disk_bytes, limits[1]))
    code, text = command(spec, spec.output, Engine({"step_base_ms": 0.5}))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said.write_text(text)
    os._exit(code)
