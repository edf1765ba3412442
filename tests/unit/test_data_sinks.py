"""The output as a function of input and journal: once each row, whatever the form."""

import csv
import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.data.job.output import OutputWriter
from penstock.data.job.spec import JobSpec
from penstock.data.journal.index import Index
from penstock.data.journal.segment import Entry, encode_entry
from penstock.data.results.outcome import Failure, Outcome
from penstock.data.storage.paths import atomic_write, storage_path
from penstock.data.storage.readers import batched
from penstock.data.storage.source import find_input
from penstock.data.storage.writers import OutputRow
from penstock.errors import ConfigError, Error

pytestmark = pytest.mark.parity("X5")

BODY = {"id": "chat-1", "choices": [{"index": 0, "message": {"content": "Hi."}, "finish_reason": "stop"}]}


def ok() -> Outcome:
    return Outcome(state="ok", body=msgspec.Raw(msgspec.json.encode(BODY)))


def failed(status: int | None = None) -> Outcome:
    failure = Failure(code="poison_row", message="No.", stage="engine", status=status)
    return Outcome(state="failed", failure=failure)


def written(tmp_path: Path, given: str, output: str, ends: list[Outcome], **spec) -> list[str]:
    """Files of an output whose rows ended so."""
    job_spec = JobSpec(inputs=(str(tmp_path / given),), output=f"{tmp_path}/{output}", **spec)
    journal = Path(job_spec.journal.url)
    journal.mkdir(exist_ok=True)
    lines = b"".join(encode_entry(Entry(row, end)) for row, end in enumerate(ends))
    (journal / "0001-engine-1.jsonl").write_bytes(lines)
    found = find_input(job_spec.inputs)
    return OutputWriter(job_spec, found).write(Index(storage_path(journal)))


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
    when = datetime(2026, 1, 2, tzinfo=UTC)
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
    written(tmp_path, "in.jsonl", "out.jsonl", [ok(), failed(400)], is_openai_batch=True)
    (answer,) = read(tmp_path / "out.jsonl")
    assert answer["custom_id"] == "r0"
    assert answer["response"] == {"status_code": 200, "request_id": "chat-1", "body": BODY}
    assert answer["error"] is None
    (error,) = read(tmp_path / "out.errors.jsonl")
    assert error["custom_id"] == "r1"
    assert error["response"]["status_code"] == 400
    assert error["error"] == {"code": "poison_row", "message": "No."}
    assert error["response"]["body"]["error"]["type"] == "invalid_request_error"
    assert read(tmp_path / "out.failed.jsonl") == [lines[1]]


@pytest.mark.parametrize("output", ["out", "out.txt", "out.jsonl.gz"])
def test_an_output_of_no_form_is_refused(tmp_path: Path, rows, output: str):
    with pytest.raises(ConfigError, match=output):
        written(tmp_path, "in.jsonl", output, [ok()] * 3)


LABELS = {"data": [{"index": 0, "label": "good", "probs": [1.0]}]}


def labelled() -> Outcome:
    return Outcome(state="ok", body=msgspec.Raw(msgspec.json.encode(LABELS)))


def test_dead_letters_keep_columns_named_as_ours_with_their_own_types(tmp_path: Path):
    rows = [{"input": "a", "label": 3, "probs": "x"}, {"input": "b", "label": 4, "probs": "y"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written(tmp_path, "in.jsonl", "out.parquet", [labelled(), failed()], kind="classify")
    (dead,) = pq.read_table(tmp_path / "out.failed.parquet").to_pylist()
    assert {name: dead[name] for name in rows[1]} == rows[1]
    assert (sorted(dead), dead["error"]["code"]) == (["error", "input", "label", "probs"], "poison_row")
    (good,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert (good["original_label"], good["label"], good["original_probs"]) == (3, "good", "x")


def test_an_own_error_column_survives_in_dead_letters(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text('{"error": "mine", "original_error": "older"}\n')
    written(tmp_path, "in.jsonl", "out.jsonl", [failed()])
    (dead,) = read(tmp_path / "out.failed.jsonl")
    assert (dead["original_error"], dead["original_original_error"]) == ("mine", "older")
    assert dead["error"]["code"] == "poison_row"


def test_a_column_has_one_name_whatever_its_row_was_answered(tmp_path: Path):
    """Answers without reasoning leave out our column, in JSON lines; the user's moves all the same."""
    (tmp_path / "in.jsonl").write_text('{"reasoning": 1, "original_reasoning": 2}\n' * 2)
    thought = {"message": {"content": "Hi.", "reasoning": "Well."}, "index": 0, "finish_reason": "stop"}
    other = Outcome(state="ok", body=msgspec.Raw(msgspec.json.encode({"choices": [thought]})))
    written(tmp_path, "in.jsonl", "out.jsonl", [ok(), other])
    found = read(tmp_path / "out.jsonl")
    assert [row["original_reasoning"] for row in found] == [1, 1]
    assert [row["original_original_reasoning"] for row in found] == [2, 2]
    assert [row.get("reasoning") for row in found] == [None, "Well."]


def test_parquet_files_whose_types_differ_become_one_output(tmp_path: Path):
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(
        pa.table({"note": pa.nulls(1), "n": pa.array([1], pa.int32()), "x": [1]}), folder / "a.parquet"
    )
    pq.write_table(pa.table({"note": ["b"], "n": [1 << 40], "x": ["one"]}), folder / "b.parquet")
    written(tmp_path, "in", "out.parquet", [ok(), ok()])
    found = pq.read_table(tmp_path / "out.parquet").select(["note", "n", "x"])
    assert found.to_pylist() == [
        {"note": None, "n": 1, "x": "1"},
        {"note": "b", "n": 1 << 40, "x": '"one"'},
    ]


def test_a_number_too_large_for_the_type_of_its_column_makes_the_column_text(tmp_path: Path):
    """Whole numbers and floats share a type, which 2**53 + 1 does not fit."""
    rows = [{"n": 1.5}] + [{"n": 2}] * 2000 + [{"n": 2**53 + 1}, {"n": 2**70}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written(tmp_path, "in.jsonl", "out/", [ok()] * len(rows), part_rows=1500)
    written(tmp_path, "in.jsonl", "out.parquet", [ok()] * len(rows))
    found = pq.read_table(tmp_path / "out.parquet").column("n").to_pylist()
    assert [json.loads(text) for text in found] == [row["n"] for row in rows]


def test_numbers_of_any_size_stay_as_they_are(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"n": 2**70}))
    for name in ("out.jsonl", "out.csv"):
        written(tmp_path, "in.jsonl", name, [ok()])
        assert str(2**70) in (tmp_path / name).read_text()


def test_an_input_that_became_shorter_gives_no_output(tmp_path: Path, rows):
    with pytest.raises(Error, match="has 3 of the 4 rows that were run"):
        written(tmp_path, "in.jsonl", "out.jsonl", [ok()] * 4)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_folder_is_not_complete_while_its_parts_are_replaced(tmp_path: Path, rows, patched):
    written(tmp_path, "in.jsonl", "out/", [ok(), failed(), ok()])
    seen = []

    def file(to):
        seen.append((to.name, (tmp_path / "out/_SUCCESS").exists()))
        return atomic_write(to)

    patched("penstock.data.job.output.atomic_write", file)
    written(tmp_path, "in.jsonl", "out/", [ok(), ok(), failed()])
    assert seen == [("part-00000.jsonl", False), ("out.failed.jsonl", True)]


def test_only_what_this_output_left_is_swept(tmp_path: Path, rows):
    ours = [".out.jsonl.00000000.unfinished", ".out.failed.jsonl.00000000.unfinished"]
    other = ".out.jsonl.bak.00000000.unfinished"
    for name in (*ours, other):
        (tmp_path / name).write_bytes(b"half of")
    written(tmp_path, "in.jsonl", "out.jsonl", [ok()] * 3)
    assert [path.name for path in tmp_path.glob(".*")] == [other]
    written(tmp_path, "in.jsonl", "out/", [ok()] * 3)
    assert (tmp_path / other).exists()


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_own_columns_come_first_also_those_that_only_later_rows_have(tmp_path: Path, form: str):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "id": 1}\n{"prompt": "b", "late": 2}\n')
    written(tmp_path, "in.jsonl", f"out.{form}", [ok()] * 2, answer_column="answer")
    if form == "csv":
        with (tmp_path / "out.csv").open() as file:
            names = next(csv.reader(file))
    else:
        names = pq.read_schema(tmp_path / "out.parquet").names
    assert names == ["prompt", "id", "late", "answer", "error"]


def test_a_folder_without_rows_has_a_file_with_the_columns(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text("")
    written(tmp_path, "in.jsonl", "out/", [])
    assert (tmp_path / "out/part-00000.jsonl").read_bytes() == b""
    assert (tmp_path / "out/_SUCCESS").exists()


def test_a_csv_file_without_rows_has_a_header(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text("")
    written(tmp_path, "in.jsonl", "out.csv", [])
    with (tmp_path / "out.csv").open() as file:
        assert "generated_text" in next(csv.reader(file))


def test_truth_values_of_a_csv_file_are_those_of_json(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text('{"a": true}\n{"a": null}\n')
    written(tmp_path, "in.jsonl", "out.csv", [ok()] * 2)
    with (tmp_path / "out.csv").open() as file:
        assert [row["a"] for row in csv.DictReader(file)] == ["true", ""]


def test_rows_of_many_bytes_are_written_a_few_at_a_time():
    rows = (OutputRow(number, 1 << 20, {}) for number in range(150))
    assert [len(some) for some in batched(rows, 2000, 16 << 20)] == [*[16] * 9, 6]


def test_small_rows_of_parquet_are_in_one_group(tmp_path: Path):
    rows = 5000
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n' * rows)
    written(tmp_path, "in.jsonl", "out.parquet", [ok()] * rows)
    metadata = pq.ParquetFile(tmp_path / "out.parquet").metadata
    assert (metadata.num_rows, metadata.num_row_groups) == (rows, 1)


EXACT = {
    "decimal": (pa.array([Decimal("1.10")]), "1.10"),
    "date": (pa.array([date(2026, 1, 2)]), "2026-01-02"),
    "time": (pa.array([time(1, 2, 3)]), "01:02:03"),
    "nanoseconds": (pa.array([3_000_000_001], pa.time64("ns")), "00:00:03.000000001"),
    "when": (pa.array([datetime(2026, 1, 2, 3, tzinfo=UTC)]), "2026-01-02T03:00:00Z"),
    "far": (pa.array([253402300800000], pa.timestamp("ms")), "10000-01-01T00:00:00.000"),
    "uuid": (pa.array([UUID(int=1).bytes], pa.uuid()), str(UUID(int=1))),
    "bytes": (pa.array([b"\0\xff"]), "AP8="),
    "text": (pa.array(['"quoted"']), '"quoted"'),
}


@pytest.mark.parametrize("output", ["out.jsonl", "out.csv", "out.tsv", "out.parquet"])
def test_values_of_parquet_are_written_without_loss_and_without_quotes(tmp_path: Path, output: str):
    table = pa.table({name: array for name, (array, _) in EXACT.items()})
    pq.write_table(table, tmp_path / "in.parquet")
    written(tmp_path, "in.parquet", output, [ok()])
    if output == "out.parquet":
        assert (
            pq.read_table(tmp_path / output)
            .select(table.column_names)
            .equals(pq.read_table(tmp_path / "in.parquet"))
        )
        return
    (row,) = (one.fields for one in find_input([str(tmp_path / output)]).rows())
    texts = {name: text for name, (_, text) in EXACT.items()}
    assert {name: str(row[name]) for name in texts} == texts


@pytest.mark.parametrize(
    ("first", "last", "passes"),
    [(1, "x", 2), (2**53 + 1, 0.5, 3)],
    ids=["refused while it is read", "of which a later one makes an earlier one unsafe"],
)
def test_columns_of_mixed_types_cost_one_more_writing_at_most(
    tmp_path: Path, patched, first: object, last: object, passes: int
):
    names = [f"c{number}" for number in range(12)]
    rows = [*[dict.fromkeys(names, first)] * 2000, dict.fromkeys(names, last)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = []
    real = OutputWriter._result_row
    patched(OutputWriter, "_result_row", lambda *row: [made.append(1), real(*row)][1])
    written(tmp_path, "in.jsonl", "out.parquet", [ok()] * len(rows))
    assert len(made) == passes * len(rows)
    found = pq.read_table(tmp_path / "out.parquet").select(names).to_pylist()
    assert [{name: json.loads(text) for name, text in row.items()} for row in found] == rows


def test_a_line_of_the_output_is_a_line_for_every_reader(tmp_path: Path):
    text = "a\u2028b\u2029c\x85d"
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n")
    written(tmp_path, "in.jsonl", "out.jsonl", [ok()])
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(line)["prompt"] == text


@pytest.mark.parametrize("output", ["out.jsonl", "out.csv", "out.parquet", "out/"])
def test_an_answer_column_makes_one_row_of_each(tmp_path: Path, output: str):
    lines = ['{"answer": 1, "error": "mine"}', "no json", '{"answer": 3}']
    (tmp_path / "in.jsonl").write_text("".join(f"{line}\n" for line in lines))
    files = written(tmp_path, "in.jsonl", output, [ok(), failed(), ok()], answer_column="answer")
    assert files == [str(tmp_path / output)]
    found = [row.fields for row in find_input(files).rows()]
    assert [row["answer"] or None for row in found] == ["Hi.", None, "Hi."]
    assert [bool(row["error"]) for row in found] == [False, True, False]
    assert "poison_row" in str(found[1]["error"])
    assert (str(found[0]["original_answer"]), found[0]["original_error"], found[1]["line"]) == (
        "1",
        "mine",
        "no json",
    )
    names = {name for row in found for name in row}
    assert names == {"answer", "error", "original_answer", "original_error", "line"}


def test_an_answer_column_has_the_type_of_its_task(tmp_path: Path, rows):
    written(tmp_path, "in.jsonl", "out.parquet", [failed()] * 3, answer_column="vector", kind="embed")
    assert pq.read_schema(tmp_path / "out.parquet").field("vector").type == pa.list_(pa.float32())


@pytest.mark.parametrize(("name", "lines"), [("error", False), ("", False), ("answer", True)])
def test_an_answer_column_that_cannot_be_is_refused(tmp_path: Path, rows, name: str, lines: bool):
    with pytest.raises(ConfigError, match="--answer-column"):
        written(tmp_path, "in.jsonl", "out.jsonl", [], answer_column=name, is_openai_batch=lines)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
ROWS = st.lists(
    st.fixed_dictionaries(
        {"text": st.text(st.characters(exclude_categories=["Cs"]), min_size=1)},
        optional={
            "any": VALUES,
            "many": st.lists(VALUES, max_size=3),
            "deep": st.dictionaries(st.sampled_from("ab"), VALUES),
        },
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, form=st.sampled_from(["jsonl", "csv", "tsv", "parquet"]), array=st.booleans())
def test_columns_of_any_json_come_back_from_any_format(tmp_path: Path, rows: list, form: str, array: bool):
    (tmp_path / "in.json").write_text(
        json.dumps(rows, indent=1) if array else "".join(json.dumps(row) + "\n" for row in rows)
    )
    written(tmp_path, "in.json", f"out.{form}", [ok()] * len(rows))
    found = [row.fields for row in find_input([str(tmp_path / f"out.{form}")]).rows()]
    assert [row["text"] for row in found] == [row["text"] for row in rows]
    for before, after in zip(rows, found, strict=True):
        for name, value in before.items():
            now = after.get(name)
            if isinstance(now, str) and now != value:
                now = json.loads(now) if now else None
            assert (
                now == value or _without_nulls(now) == _without_nulls(value) or (value == "" and now is None)
            )


def _without_nulls(value: object) -> object:
    """Columns of Parquet have the keys of all rows."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _without_nulls(item) for name, item in value.items() if item is not None} or None


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(
        [
            *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
            pa.timestamp("us", "Asia/Tokyo"),
            *(pa.duration(unit) for unit in ("s", "ms", "us")),
            pa.date64(),
            pa.time64("us"),
            pa.time64("ns"),
        ]
    ),
    numbers=st.lists(st.none() | st.integers(0, 2**62), min_size=1, max_size=5),
)
def test_dates_and_times_of_any_size_keep_their_type_and_value(tmp_path: Path, kind, numbers: list):
    day = 86_400_000 * (1 if pa.types.is_date64(kind) else 1000)
    if pa.types.is_time(kind):
        numbers = [number and number % day for number in numbers]
    elif pa.types.is_date64(kind):
        numbers = [number and number // day % 2**31 * day for number in numbers]
    pq.write_table(
        pa.table({"prompt": ["x"] * len(numbers), "at": pa.array(numbers, kind)}), tmp_path / "in.parquet"
    )
    for output in ("out.parquet", "out.jsonl", "out.csv"):
        written(tmp_path, "in.parquet", output, [ok()] * len(numbers))
    at = pq.read_table(tmp_path / "in.parquet")["at"]
    assert pq.read_table(tmp_path / "out.parquet")["at"].equals(at)
    assert [row.get("at") is None for row in read(tmp_path / "out.jsonl")] == [one is None for one in numbers]
