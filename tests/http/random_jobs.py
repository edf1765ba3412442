"""Batch jobs drawn at random: odd rows in odd files, and what breaks their runs off."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from pyarrow.csv import write_csv

Row = dict[str, Any]

MAX_ROWS = 40

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
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
}
names = st.sampled_from(["x", "label", "error", "generated_text", "original_error", "attempts", "ü", "a.b"])
"""Of another column: some are names of our own."""


@dataclass(frozen=True)
class Fault:
    """What breaks a run off.

    killed_after: rows that have ended. full_after: bytes that a file can hold. changed: the input, before.
    """

    killed_after: int | None = None
    full_after: int | None = None
    changed: bool = False


NONE = Fault()


@dataclass(frozen=True)
class Job:
    """form: of the input's files. given: how the command names them. faults: of one run each, in turn."""

    files: list[list[Row]]
    types: list[pa.DataType]
    column: str
    form: str
    given: str
    output: str
    faults: list[Fault]

    def rows(self) -> list[Row]:
        return [row for file in self.files for row in file]

    def write(self, folder: Path) -> str | list[str]:
        """The input's files. Gives what the command is told."""
        data = folder / "data"
        data.mkdir()
        for number, (rows, kind) in enumerate(zip(self.files, self.types, strict=True)):
            path = data / f"{number}.{self.form}"
            if self.form == "jsonl":
                path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            else:
                schema = pa.schema([("id", pa.int64()), ("q", pa.string()), (self.column, kind)])
                table = pa.Table.from_pylist(rows, schema)
                pq.write_table(table, path) if self.form == "parquet" else write_csv(table, path)
        if self.given == "files":
            return [str(path) for path in sorted(data.iterdir())]
        return str(data / f"*.{self.form}") if self.given == "glob" else str(data)

    def output_in(self, folder: Path | str) -> str:
        return f"{folder}/{self.output.format(form=self.form)}"

    def check(self, found: Iterable[Row]) -> None:
        """Each row once, in order, with the simulator's answer, which is the prompt."""
        seen = list(found)
        assert [int(row["id"]) for row in seen] == [row["id"] for row in self.rows()]
        for row, asked in zip(seen, self.rows(), strict=True):
            assert row["q"] == asked["q"]
            # A row in which all columns of the prompt are blank is skipped.
            assert (row.get("generated_text") or "") == (asked["q"] if asked["q"].strip() else "")
            if self.output == "answers.jsonl":
                assert row.get(f"original_{self.column}", row.get(self.column)) == asked[self.column]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    form = draw(st.sampled_from(["jsonl", "csv", "parquet"]))
    column = draw(names)
    files: list[list[Row]] = []
    types: list[pa.DataType] = []
    count = 0
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(list(columns))) if form == "parquet" else pa.string()
        values = st.none() | columns[kind] if form == "parquet" else text if form == "csv" else any_json
        size = draw(st.integers(0, MAX_ROWS // 3))
        files.append([{"id": count + place, "q": draw(text), column: draw(values)} for place in range(size)])
        types.append(kind)
        count += size
    return Job(
        files,
        types,
        column,
        form,
        draw(st.sampled_from(["files", "glob", "folder"])),
        draw(
            st.sampled_from(
                ["answers.jsonl", "data/answers.{form}", "answers.parquet", "answers.csv", "out/"]
            )
        ),
        draw(st.lists(faults(count), max_size=3)),
    )


def faults(count: int) -> st.SearchStrategy[Fault]:
    return (
        st.builds(Fault, killed_after=st.integers(0, max(count - 1, 0)))
        | st.builds(Fault, full_after=st.integers(0, 300 * max(count, 1)))
        | st.builds(Fault, changed=st.just(True))
    )


def read(output: Path) -> Iterator[Row]:
    """Rows of the output, as pandas and pyarrow read them."""
    paths = sorted(output.glob("part-*")) if output.is_dir() else [output]
    for path in paths:
        if path.suffix == ".parquet":
            yield from pq.read_table(path).to_pylist()
        elif path.suffix == ".csv":
            yield from pandas.read_csv(path, keep_default_na=False).to_dict("records")
        else:
            yield from map(json.loads, path.read_bytes().splitlines())
