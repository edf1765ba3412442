"""Rows of files and their numbers."""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.data.reader import source
from penstock.errors import ConfigError


def rows(*paths: Path, wanted=None):
    return list(source([str(path) for path in paths]).rows(wanted))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n[1]\nbad\n{"a": 2}')
    return path


def test_rows_are_numbered_and_blank_lines_are_none(lines: Path):
    assert [row.number for row in rows(lines)] == [0, 1, 2, 3]


def test_a_line_that_is_no_object_says_why(lines: Path):
    _, second, third, _ = rows(lines)
    assert second.fields is None
    assert second.fault == "The line must be a JSON object, but is a list."
    assert third.fault.startswith("The line is not JSON")
    assert third.line == b"bad"


def test_the_last_line_needs_no_newline(lines: Path):
    assert rows(lines)[-1].fields == {"a": 2}


def test_a_mark_of_the_byte_order_is_no_part_of_a_line(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n')
    assert rows(tmp_path / "a.jsonl")[0].fields == {"a": 1}


def test_rows_of_several_files_are_numbered_by_their_names(tmp_path: Path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"from": "{name}"}}\n')
    assert [row.fields for row in rows(tmp_path)] == [{"from": "a"}, {"from": "b"}]


def test_an_unwanted_row_keeps_its_number(lines: Path):
    assert [row.number for row in rows(lines, wanted=lambda number: number != 1)] == [0, 2, 3]


def test_csv_cells_are_texts_also_over_lines(tmp_path: Path):
    (tmp_path / "a.csv").write_text('a,b\n1,"x\ny"\n')
    assert rows(tmp_path / "a.csv")[0].fields == {"a": "1", "b": "x\ny"}


def test_a_csv_row_with_a_cell_too_few_says_so(tmp_path: Path):
    (tmp_path / "a.csv").write_text("a,b\n1\n2,3\n")
    first, second = rows(tmp_path / "a.csv")
    assert first.fault == "The row has 1 cells, but the header names 2 columns."
    assert second.fields == {"a": "2", "b": "3"}


def test_parquet_rows_come_with_their_types(tmp_path: Path):
    table = pa.table({"a": list(range(3000)), "b": [[1, 2]] * 3000})
    pq.write_table(table, tmp_path / "a.parquet")
    found = rows(tmp_path / "a.parquet", wanted=lambda number: number in (0, 2999))
    assert [(row.number, row.fields) for row in found] == [
        (0, {"a": 0, "b": [1, 2]}),
        (2999, {"a": 2999, "b": [1, 2]}),
    ]


def test_packed_lines_are_read(tmp_path: Path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n'))
    assert rows(tmp_path / "a.jsonl.gz")[0].fields == {"a": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_rows_are_counted(tmp_path: Path, name: str):
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.table({"a": [1, 2, 3]}), path)
    else:
        path.write_text('{"a":1}\n{}\n{}' if name.endswith("jsonl") else "a\n1\n2\n3\n")
    assert source([str(path)]).count() == 3


def test_files_of_two_forms_are_refused(tmp_path: Path):
    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match="several forms"):
        source([str(tmp_path)])


def test_a_file_without_an_ending_needs_its_form_said(tmp_path: Path):
    (tmp_path / "rows").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="--input-form"):
        source([str(tmp_path / "rows")])
    assert source([str(tmp_path / "rows")], "jsonl").count() == 1


def test_a_change_of_the_input_is_named(lines: Path):
    before = source([str(lines)])
    assert before.changed(source([str(lines)])) is None
    lines.write_text('{"a": 3}\n')
    assert before.changed(source([str(lines)])) == f"'{lines}' has changed."
