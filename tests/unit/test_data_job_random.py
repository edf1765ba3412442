"""Jobs drawn at random, interrupted at random and resumed: each row once, in order, with its own answer.

The simulator answers with the prompt, so that the right answer is known. What is drawn follows from the seed
in the test's name.
"""

import asyncio
import csv
import gzip
import json
import os
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.config import LLMConfig
from penstock.data.backends.in_process import InProcessEngine
from penstock.data.backends.protocol import Response
from penstock.data.job.job import Job
from penstock.data.job.spec import JobSpec
from penstock.data.job.worker import InProcessPool
from penstock.data.rows.request import RowRequest
from penstock.errors import Error

pytestmark = pytest.mark.parity("X5")

RUNS = 5
"""Interrupted ones, at most, before one that nothing interrupts."""

SEEDS = range(30)
ends: dict[int, list[str]] = {}
"""How the runs ended before the last one, by seed."""

FAST = {"step_base_ms": 0, "step_per_request_ms": 0, "prefill_tokens_per_s": float("inf")}

NOTES = [
    None,
    1,
    2.5,
    2**60 + 1,
    2**70,
    True,
    "text",
    "ü €\u2028\n,;\"'",
    [],
    [1, "a"],
    {},
    {"a": {"b": None}},
    "",
]


def made(draw: random.Random, form: str) -> list[dict]:
    """Rows with a column that has a name of ours, one of mixed types, and duplicates."""
    rows = []
    for number in range(draw.randrange(0, 60)):
        text = draw.choice([f"row {number}", "same", "x" * draw.randrange(3000), 'ü €\u2028 "quoted"\nline'])
        row: dict = {"id": number, "text": text, "temperature": draw.choice([0, 1])}
        if form == "jsonl":
            row["error"] = draw.choice(NOTES)
            row[draw.choice(["note", "original_error", "attempts", "label"])] = draw.choice(NOTES)
            if draw.random() < 0.1:
                row["text"] = {"not": "a text"} if draw.random() < 0.5 else None
        elif form == "parquet":
            row |= {
                "error": draw.choice(["e", None]),
                "note": draw.choice([None, [1, 2], []]),
                "deep": {"a": number},
            }
        rows.append(row)
    return rows


def put(path: Path, rows: list[dict], draw: random.Random) -> None:
    if path.name.endswith(".parquet"):
        table = (
            pa.Table.from_pylist(rows)
            if rows
            else pa.table({"id": pa.array([], pa.int64()), "text": [""][:0]})
        )
        if rows and draw.random() < 0.5:
            table = table.set_column(table.schema.get_field_index("id"), "id", table["id"].cast(pa.int32()))
        pq.write_table(table, path, row_group_size=draw.choice([3, 1000]))
    elif path.name.endswith(".csv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["id", "text", "temperature"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = [json.dumps(row, ensure_ascii=draw.random() < 0.5) for row in rows]
        data = "".join(f"{line}\n{draw.choice(['', chr(10)])}" for line in lines).encode()
        path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)


def prompt_of(row: dict) -> str | None:
    """What the template makes of a row; None for one that is skipped, as its text is empty."""
    text = row["text"]
    if text is None or (isinstance(text, str) and not text.strip()):
        return None
    return f"<{text if isinstance(text, str) else json.dumps(text, separators=(',', ':'))}>"


def read(path: Path) -> list[dict]:
    if path.is_dir():
        assert (path / "_SUCCESS").exists()
        return [row for part in sorted(path.glob("part-*")) for row in read(part)]
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def tear(journal: Path, draw: random.Random) -> None:
    """As a kill does in the middle of a line."""
    segments = [path for path in journal.glob("*.jsonl") if path.stat().st_size > 3]
    if segments and draw.random() < 0.5:
        path = draw.choice(segments)
        path.write_bytes(path.read_bytes()[: -draw.randrange(1, 3)])


class Interrupting(InProcessEngine):
    """Cancels the job, wherever it is, when it has begun so many requests."""

    def __init__(self, config: LLMConfig, job: asyncio.Task[object], after: int) -> None:
        super().__init__(config)
        self._job, self._after = job, after

    async def send(self, request: RowRequest) -> Response:
        if self._after == 0:
            self._job.cancel()
        self._after -= 1
        return await super().send(request)


@pytest.mark.parametrize("seed", SEEDS)
async def test_each_row_is_answered_once_whatever_interrupts_the_job(tmp_path: Path, seed: int):
    draw = random.Random(seed)
    form = draw.choice(["jsonl", "jsonl", "parquet", "csv"])
    ending = draw.choice([".jsonl", ".jsonl.gz"]) if form == "jsonl" else f".{form}"
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    names = sorted(f"{name}{ending}" for name in draw.sample(["a", "b", "c d", "é"], draw.randrange(1, 4)))
    files = [made(draw, form) for _ in names]
    for name, rows in zip(names, files, strict=True):
        put(data / name, rows, draw)
    rows = [row for one in files for row in one]
    inputs = draw.choice([(str(data),), (f"{data}/*{ending}",), tuple(str(data / name) for name in names)])
    output = draw.choice(["data/out.jsonl", "data/out.csv", "out.parquet", "out.jsonl", "data/out/", "out/"])
    job_spec = JobSpec(
        inputs=inputs,
        output=f"{tmp_path}/{output}",
        template="<{text}>",
        chat=False,
        input_form=form,
        reuse=draw.choice(["exact", "all", "off"]),
        part_rows=draw.choice([1, 7, 50_000]),
        defaults={"max_tokens": 4000},
    )

    def config(**engine: object) -> LLMConfig:
        sizes = {**FAST, "max_num_seqs": draw.choice([1, 4, 64]), "max_model_len": 16_000}
        model = {"model_id": "m"}
        return LLMConfig(model_loading_config=model, llm_engine="sim", engine_kwargs={**sizes, **engine})

    async def interrupted(found: LLMConfig, after: int, *, retry: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        await Job(job_spec, InProcessPool(lambda: Interrupting(found, task, after)), retry_failed=retry).run()

    wanted = [prompt_of(row) for row in rows]
    ends[seed] = []
    for _ in range(draw.randrange(RUNS)):
        one = config(**draw.choice([{}, {"die_after_requests": 5}, {"error_every": 9}]))
        work = interrupted(one, draw.randrange(len(rows) + 2), retry=draw.random() < 0.2)
        (ended,) = await asyncio.gather(asyncio.create_task(work), return_exceptions=True)
        assert ended is None or isinstance(ended, asyncio.CancelledError | Error), ended
        ends[seed].append(type(ended).__name__)
        tear(Path(job_spec.journal.url), draw)
    last = config()
    done = await Job(job_spec, InProcessPool(lambda: InProcessEngine(last)), retry_failed=True).run()
    assert (done.ended, done.failed, done.rows) == ("finished", 0, len(rows))
    found = read(Path(job_spec.output))
    assert [int(row["id"]) for row in found] == [row["id"] for row in rows]
    assert [row.get("generated_text") or None for row in found] == wanted
    again = Job(job_spec, InProcessPool(lambda: pytest.fail("nothing is left to ask")))
    assert (await again.run()).run_rows == 0
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if name.endswith(".unfinished")]


@pytest.mark.skipif("len(ends) < len(SEEDS)", reason="counts what all seeds have done in this process")
def test_many_of_these_jobs_were_interrupted():
    counts = Counter(end for runs in ends.values() for end in runs)
    assert counts["CancelledError"] > 20
