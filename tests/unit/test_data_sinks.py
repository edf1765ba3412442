"""The output as a function of input and journal: once each row, whatever the form."""

import csv
import json
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from penstock.data.columns import columns
from penstock.data.index import Index
from penstock.data.journal import Entry, line
from penstock.data.order import Order
from penstock.data.outcome import Failure, Outcome
from penstock.data.place import place
from penstock.data.reader import source
from penstock.data.sink import Sink
from penstock.errors import ConfigError

pytestmark = pytest.mark.parity("X5")

BODY = {"id": "chat-1", "choices": [{"index": 0, "message": {"content": "Hi."}, "finish_reason": "stop"}]}


def ok() -> Outcome:
    return Outcome(state="ok", body=msgspec.Raw(msgspec.json.encode(BODY)))


def failed(status: int | None = None) -> Outcome:
    failure = Failure(code="poison_row", message="No.", stage="engine", status=status)
    return Outcome(state="failed", failure=failure)


def written(tmp_path: Path, given: str, output: str, ends: list[Outcome], **order) -> list[str]:
    """Files of an output whose rows ended so."""
    asked = Order(inputs=(str(tmp_path / given),), output=f"{tmp_path}/{output}", **order)
    journal = Path(asked.journal.url)
    journal.mkdir(exist_ok=True)
    lines = b"".join(line(Entry(row, end)) for row, end in enumerate(ends))
    (journal / "0001-engine-1.jsonl").write_bytes(lines)
    found = source(asked.inputs)

    def shown(end: Outcome):
        return {name: value for name, value in columns(asked.task(), end).items() if value is not None}

    return Sink(asked, found, shown).write(Index(place(journal)))


@pytest.fixture
def rows(tmp_path: Path) -> list[dict]:
    rows = [{"id": number, "tag": {"deep": [number]}} for number in range(3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def read(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_json_lines_hold_the_rows_columns_and_ours_in_order(tmp_path: Path, rows):
    written(tmp_path, "in.jsonl", "out.jsonl", [ok()] * 3)
    found = read(tmp_path / "out.jsonl")
    assert [{name: row[name] for name in ("id", "tag")} for row in found] == rows
    assert {row["generated_text"] for row in found} == {"Hi."}


def test_a_failed_row_is_a_dead_letter_and_nowhere_else(tmp_path: Path, rows):
    files = written(tmp_path, "in.jsonl", "out.jsonl", [ok(), failed(), ok()])
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == [0, 2]
    (dead,) = read(tmp_path / "out.failed.jsonl")
    assert dead["tag"] == {"deep": [1]}
    assert dead["error"]["code"] == "poison_row"
    assert files == [str(tmp_path / "out.jsonl"), str(tmp_path / "out.failed.jsonl")]


def test_without_failures_an_old_file_of_dead_letters_goes(tmp_path: Path, rows):
    written(tmp_path, "in.jsonl", "out.jsonl", [ok(), failed(), ok()])
    written(tmp_path, "in.jsonl", "out.jsonl", [ok()] * 3)
    assert not (tmp_path / "out.failed.jsonl").exists()


def test_writing_again_gives_the_same_bytes(tmp_path: Path, rows):
    written(tmp_path, "in.jsonl", "out.jsonl", [ok(), failed(), ok()])
    before = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / ".out.jsonl.00000000.unfinished").write_bytes(b"half of")
    written(tmp_path, "in.jsonl", "out.jsonl", [ok(), failed(), ok()])
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert not list(tmp_path.glob(".*.unfinished"))


def test_a_column_named_as_one_of_ours_is_kept_beside_it(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text('{"generated_text": "mine"}\n')
    written(tmp_path, "in.jsonl", "out.jsonl", [ok()])
    (row,) = read(tmp_path / "out.jsonl")
    assert (row["original_generated_text"], row["generated_text"]) == ("mine", "Hi.")


def test_parquet_has_one_type_for_each_column(tmp_path: Path):
    mixed = [{"a": 1, "b": {"x": 1}}, {"a": 2.5, "b": "text"}, {"c": []}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    written(tmp_path, "in.jsonl", "out.parquet", [ok()] * 3)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column("a").to_pylist() == [1.0, 2.5, None]
    assert table.column("b").to_pylist() == ['{"x":1}', '"text"', None]
    assert table.column("generated_text").to_pylist() == ["Hi."] * 3
    assert (
        table.schema.field("logprobs").type == pq.read_schema(tmp_path / "out.parquet").field("logprobs").type
    )


def test_columns_of_a_parquet_input_keep_their_types(tmp_path: Path):
    import datetime

    import pyarrow as pa

    when = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    table = pa.table({"when": pa.array([when], pa.timestamp("ms", "UTC")), "n": pa.array([1], pa.int16())})
    pq.write_table(table, tmp_path / "in.parquet")
    written(tmp_path, "in.parquet", "out.parquet", [ok()])
    found = pq.read_table(tmp_path / "out.parquet").select(["when", "n"])
    assert found.equals(table)


def test_csv_has_the_columns_of_all_rows(tmp_path: Path, rows):
    written(tmp_path, "in.jsonl", "out.csv", [ok()] * 3)
    with (tmp_path / "out.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [row["id"] for row in found] == ["0", "1", "2"]
    assert found[0]["tag"] == '{"deep":[0]}'
    assert found[0]["generated_text"] == "Hi."


def test_a_folder_gets_parts_and_a_mark_at_its_end(tmp_path: Path, rows):
    written(tmp_path, "in.jsonl", "out/", [ok(), failed(), ok()], part_rows=2)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["_SUCCESS", "part-00000.jsonl", "part-00001.jsonl"]
    assert [row["id"] for row in read(tmp_path / "out/part-00001.jsonl")] == [2]
    assert len(read(tmp_path / "out.failed.jsonl")) == 1


def test_openais_lines_are_answered_in_openais_form(tmp_path: Path):
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": {"n": number}}
        for number in range(2)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    written(tmp_path, "in.jsonl", "out.jsonl", [ok(), failed(400)], lines=True)
    (answer,) = read(tmp_path / "out.jsonl")
    assert answer["custom_id"] == "r0"
    assert answer["response"] == {"status_code": 200, "request_id": "chat-1", "body": BODY}
    assert answer["error"] is None
    (error,) = read(tmp_path / "out.errors.jsonl")
    assert error["custom_id"] == "r1"
    assert error["response"]["status_code"] == 400
    assert error["error"] == {"code": "poison_row", "message": "No."}
    assert read(tmp_path / "out.failed.jsonl") == [lines[1]]


@pytest.mark.parametrize("output", ["out", "out.txt", "out.jsonl.gz"])
def test_an_output_of_no_form_is_refused(tmp_path: Path, rows, output: str):
    with pytest.raises(ConfigError, match=output):
        written(tmp_path, "in.jsonl", output, [ok()] * 3)
