"""Rows of files and their numbers."""

import bz2
import datetime
import gzip
import io
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.data.storage.paths import RemotePath, storage_path
from penstock.data.storage.readers import COMPRESSIONS
from penstock.data.storage.source import find_input
from penstock.errors import ConfigError, Unavailable


def rows(*paths: Path, wanted=lambda number: True):
    return list(find_input([str(path) for path in paths]).rows(wanted))


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
    assert first.fault == "The header names 2 columns; cells of the row: 1."
    assert second.fields == {"a": "2", "b": "3"}


def test_parquet_rows_come_with_their_types(tmp_path: Path):
    table = pa.table({"a": list(range(3000)), "b": [[1, 2]] * 3000})
    pq.write_table(table, tmp_path / "a.parquet")
    found = rows(tmp_path / "a.parquet", wanted=lambda number: number in (0, 2999))
    assert [(row.number, row.fields) for row in found] == [
        (0, {"a": 0, "b": [1, 2]}),
        (2999, {"a": 2999, "b": [1, 2]}),
    ]


@pytest.mark.parametrize("ending", COMPRESSIONS)
def test_packed_files_of_several_streams_are_read(tmp_path: Path, ending: str):
    codec = COMPRESSIONS[ending]
    streams = b""
    for text in (b'{"a": 1}\n', b'{"a": 2}\n'):
        packed = pa.BufferOutputStream()
        with pa.CompressedOutputStream(packed, codec) as stream:
            stream.write(text)
        streams += packed.getvalue().to_pybytes()
    (tmp_path / f"a.jsonl{ending}").write_bytes(streams)
    assert [row.fields for row in rows(tmp_path / f"a.jsonl{ending}")] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("text", ['[{"a": 1}, [2]]', '\n[\n{\n"a": 1},\n[2]\n]\n', '{"a": 1}\n[2]'])
def test_the_items_of_an_array_are_rows(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    first, second = rows(tmp_path / name)
    assert (first.fields, second.line, second.fault) == (
        {"a": 1},
        b"[2]",
        "The line must be a JSON object, but is a list.",
    )


def test_a_first_line_that_is_a_list_is_a_fault_of_its_row(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('[1]\n{"a": 2}\n')
    assert [row.fields for row in rows(tmp_path / "a.jsonl")] == [None, {"a": 2}]


def test_blank_lines_before_a_header_are_none_of_it(tmp_path: Path):
    (tmp_path / "a.tsv").write_text('\n\na\tb\n\n1\t"x\ty"\n')
    assert [row.fields for row in rows(tmp_path / "a.tsv")] == [{"a": "1", "b": "x\ty"}]


def test_times_that_python_cannot_hold_are_texts(tmp_path: Path):
    at = 253402300800  # the first second of the year 10000
    table = pa.table(
        {
            "when": pa.array([at, 0, None], pa.timestamp("s")),
            "later": pa.array([2**62, 0, None], pa.timestamp("us")),
            "deep": pa.array([[{"at": at}], [], None], pa.list_(pa.struct({"at": pa.timestamp("s")}))),
            "exact": pa.array([1_000, 1_001, None], pa.time64("ns")),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    first, second, third = [row.fields for row in rows(tmp_path / "a.parquet")]
    assert first["when"] == "10000-01-01T00:00:00.000"
    assert first["deep"] == [{"at": "10000-01-01T00:00:00.000"}]
    assert first["exact"] == datetime.time(0, 0, 0, 1)
    assert first["later"] == str(2**62)
    assert second["when"] == datetime.datetime(1970, 1, 1)
    assert second["exact"] == "00:00:00.000001001"
    assert third == dict.fromkeys(["when", "later", "deep", "exact"])


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_rows_are_counted(tmp_path: Path, name: str):
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.table({"a": [1, 2, 3]}), path)
    else:
        path.write_text('{"a":1}\n{}\n{}' if name.endswith("jsonl") else "a\n1\n2\n3\n")
    assert find_input([str(path)]).count() == 3


def test_files_of_two_forms_are_refused(tmp_path: Path):
    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match="several formats"):
        find_input([str(tmp_path)])


def test_a_file_without_an_ending_needs_its_form_said(tmp_path: Path):
    (tmp_path / "rows").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="--input-form"):
        find_input([str(tmp_path / "rows")])
    assert find_input([str(tmp_path / "rows")], "jsonl").count() == 1


def test_a_change_of_the_input_is_named(lines: Path):
    before = find_input([str(lines)])
    assert before.changed(find_input([str(lines)])) is None
    lines.write_text('{"a": 3}\n')
    assert before.changed(find_input([str(lines)])) == f"'{lines}' has changed."


def test_files_are_looked_at_again_without_listing_their_folder(lines: Path):
    before = find_input([str(lines.parent)])
    lines.with_name("later.jsonl").write_text("{}\n")
    assert before.changed(before.now()) is None
    lines.unlink()
    assert before.changed(before.now()) == f"'{lines}' is gone."


def _utf16(path: Path) -> Path:
    path.write_bytes("a,b\n1,é\n".encode("utf-16"))
    return path


def _corrupt_parquet(path: Path) -> Path:
    path.write_bytes(b"PAR1" + b"x" * 100)
    return path


def _damaged_pages(path: Path) -> Path:
    pq.write_table(pa.table({"a": ["x" * 50 + str(row) for row in range(5000)]}), path)
    data = bytearray(path.read_bytes())
    data[100:5000] = b"\xff" * 4900
    path.write_bytes(data)
    return path


def _open_quote(path: Path) -> Path:
    path.write_text('\na,b\n1,x\n2,"y\n3,z\n'.replace(",", "\t" if path.suffix == ".tsv" else ","))
    return path


def _quoted_part(path: Path) -> Path:
    path.write_text('a,b\n1,"x"y\n')
    return path


def _open_array(path: Path) -> Path:
    path.write_text('[\n{"a": 1},\n{"a": 2},\n')
    return path


def _bz2(path: Path) -> Path:
    path.write_bytes(bz2.compress(b'{"a": 1}\n'))
    return path


def _lines_of_utf16(path: Path) -> Path:
    path.write_bytes('{"a": 1}\n'.encode("utf-16"))
    return path


def _latin_1(path: Path) -> Path:
    texts = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xe9"]).buffers())
    pq.write_table(pa.table({"a": texts}), path)
    return path


def _no_gzip(path: Path) -> Path:
    path.write_bytes(b'{"a": 1}\n')
    return path


def _cut_gzip(path: Path) -> Path:
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-12])
    return path


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("a.csv", _utf16, "it is not UTF-8 (byte 0xff)"),
        ("a.parquet", _corrupt_parquet, "cannot be read: "),
        ("c.parquet", _latin_1, "it is not UTF-8 (byte 0xe9)"),
        ("b.parquet", _damaged_pages, "cannot be read: "),
        (
            "b.csv",
            _open_quote,
            "after 1 rows: the row that begins in line 4 is not CSV: a quote is never closed",
        ),
        (
            "b.tsv",
            _open_quote,
            "after 1 rows: the row that begins in line 4 is not CSV: a quote is never closed",
        ),
        ("c.csv", _quoted_part, "the row that begins in line 2 is not CSV: ',' expected after"),
        ("a.json", _open_array, "it begins as a JSON array, but is none: "),
        ("a.jsonl", _bz2, "it is not UTF-8 text; if it is compressed, name it"),
        ("b.jsonl", _lines_of_utf16, "it is not UTF-8 text"),
        ("a.jsonl.gz", _no_gzip, "incorrect header check"),
        ("b.jsonl.gz", _cut_gzip, "Truncated compressed stream"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_in_one_sentence(tmp_path: Path, name: str, make, why: str):
    path = make(tmp_path / name)
    with pytest.raises(Unavailable) as refused:
        list(find_input([str(path)]).rows())
    assert str(refused.value).startswith(f"'{path}' cannot be read")
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_bucket_that_breaks_off_is_read_on_from_the_same_row(patched):
    class Breaking(io.BytesIO):
        opened = 0

        def __init__(self, data: bytes) -> None:
            super().__init__(data)
            Breaking.opened += 1
            self._broken = Breaking.opened < 3

        def readinto(self, buffer) -> int:
            if self._broken and self.tell() >= 1 << 20:
                raise OSError("AWS Error NETWORK_CONNECTION during GetObject: curlCode: 56")
            return super().readinto(memoryview(buffer)[: 1 << 19])

    patched("penstock.sources.failures.pause_s", lambda attempt: 0.0)
    storage_path("memory://breaking/a.jsonl").write(
        b"".join(b'{"a": %d, "pad": "%s"}\n' % (row, b"x" * 1000) for row in range(3000))
    )
    data = storage_path("memory://breaking/a.jsonl").read()
    patched(RemotePath, "open", lambda self: Breaking(data))
    assert [row.fields["a"] for row in rows("memory://breaking/a.jsonl")] == list(range(3000))
    assert Breaking.opened == 3


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, name: str):
    if name == "a.csv":
        (tmp_path / name).write_text("a,b,a\n1,2,3\n")
    else:
        pq.write_table(
            pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / name
        )
    with pytest.raises(ConfigError, match="two columns named 'a'"):
        find_input([str(tmp_path / name)]).count()
    with pytest.raises(ConfigError, match="two columns named 'a'"):
        rows(tmp_path / name)


def test_a_line_nested_too_deep_is_a_fault_of_its_row(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n{}\n")
    first, second = rows(tmp_path / "a.jsonl")
    assert (first.fault, second.fields) == ("The line is not JSON: it is nested too deeply.", {})


def test_large_rows_of_parquet_are_read_a_few_at_a_time(tmp_path: Path):
    table = pa.table({"picture": [b"%07d" % row + b"x" * (1 << 20) for row in range(80)]})
    pq.write_table(table, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    before = pa.total_allocated_bytes()
    found = find_input([str(tmp_path / "a.parquet")]).rows()
    assert next(found).number == 0
    assert pa.total_allocated_bytes() - before < 75 << 20


def test_a_packed_file_is_closed_with_its_reading(tmp_path: Path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000))
    reading: Any = find_input([str(path)]).rows()
    next(reading)
    reading.close()
    links = [Path(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    assert path not in [one.resolve() for one in links if one.is_symlink()]
