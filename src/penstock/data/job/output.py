"""Writes the output from the journal, in the order of the input: every row once, here or among the failed.

No file is appended to: each is written whole and then renamed, so that writing again, after a kill at any
moment, gives the same files. Used by the job when every row is completed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from typing import Any

import msgspec

from penstock.data.job.spec import JobSpec
from penstock.data.journal.index import Index
from penstock.data.results.columns import ANSWERS, ERROR, result_columns, result_schema
from penstock.data.results.merge import merge, rename_own
from penstock.data.results.outcome import NO_BODY, Outcome
from penstock.data.storage.paths import StoragePath, atomic_write, unfinished_files
from penstock.data.storage.readers import COMPRESSIONS, EXTENSIONS, FileFormat, InputRow, format_of
from penstock.data.storage.source import InputFiles
from penstock.data.storage.writers import WRITERS, OutputRow, TypeMismatch, with_json_columns
from penstock.errors import ConfigError, Error

_SUCCESS = "_SUCCESS"
"""An empty file that marks a complete folder, as Hadoop and Spark write it."""

MakeRow = Callable[[InputRow, Outcome], Mapping[str, Any]]


class OutputWriter:
    """The output files of one job."""

    def __init__(self, spec: JobSpec, source: InputFiles) -> None:
        self._spec, self._source, self._task = spec, source, spec.task()
        self._format: FileFormat = output_format(spec, source.format)
        self._writer = WRITERS[self._format]
        types: dict[str, Any] = {field.name: field.type for field in result_schema(self._task)}
        if (name := spec.answer_column) is not None:
            types = {name: types[ANSWERS[spec.kind]], "error": ERROR}
        self._result_types = types

    def write(self, index: Index) -> list[str]:
        """The files, all complete. May be called again. Blocks.

        Failed rows are written first, so that an output is never without them; over an older output they are
        written last, since some of them are in the new one.
        Raises: Unavailable; JournalBroken; Error when the input has other rows than were run.
        """
        self._remove_unfinished()
        if self._spec.output_path.exists():
            files = self._write_good(index)
            return [*files, *self._write_failed(index)]
        failed = self._write_failed(index)
        return [*self._write_good(index), *failed]

    def _write_good(self, index: Index) -> list[str]:
        make_row, ours = self._answer_line, dict[str, Any]()
        if not self._spec.is_openai_batch:
            make_row, ours = self._result_row, self._result_types
        states = ("ok", "skipped") if self._spec.answer_column is None else ("ok", "skipped", "failed")
        return self._write(self._spec.output_path, index, states, make_row, ours, self._spec.is_folder)

    def _write_failed(self, index: Index) -> list[str]:
        failed: list[tuple[StoragePath, MakeRow]] = [
            (failed_path(self._spec, self._format), self._dead_letter)
        ]
        if self._spec.is_openai_batch:
            failed.append((errors_path(self._spec), self._error_line))
        files: list[str] = []
        for to, make_row in failed:
            if index.counts()["failed"] and self._spec.answer_column is None:
                files += self._write(to, index, ("failed",), make_row, {"error": ERROR})
            else:
                to.remove()
        return files

    def _write(
        self,
        to: StoragePath,
        index: Index,
        states: Sequence[str],
        make_row: MakeRow,
        ours: Mapping[str, Any],
        folder: bool = False,
    ) -> list[str]:
        """ours: Arrow types of the columns that come after the user's own."""

        def rows() -> Iterator[OutputRow]:
            for row, end in self._completed(index, states):
                size_bytes = row.size_bytes + len(end.body)
                yield OutputRow(row.number, size_bytes, make_row(row, end))

        schema = self._writer.infer_schema(rows(), {**self._known(ours), **ours}, ours)
        while misfits := self._write_files(to, rows(), schema, folder):
            schema = with_json_columns(schema, misfits)
        return [to.url]

    def _write_files(self, to: StoragePath, rows: Iterator[OutputRow], schema: Any, folder: bool) -> set[str]:
        """Returns columns whose values do not fit the schema; if there are any, a file is missing."""
        if folder:
            (to / _SUCCESS).remove()
        misfits: set[str] = set()
        first = list(islice(rows, 1))  # without any row there is one file, too
        rows = chain(first, rows)
        parts = groupby(rows, lambda row: row.number // self._spec.part_rows)
        for number, part in parts if folder and first else [(0, rows)]:
            try:
                with atomic_write(to / f"part-{number:05d}.{self._format}" if folder else to) as file:
                    self._writer.write(file, part, schema)
            except TypeMismatch as mismatch:
                misfits |= mismatch.names
        if folder and not misfits:
            (to / _SUCCESS).write(b"")
        return misfits

    def _known(self, taken: Iterable[str]) -> dict[str, Any]:
        """Types of the user's columns, with names in `taken` renamed, if input and output have types."""
        return rename_own(self._source.types(), taken) if self._format == "parquet" else {}

    def _completed(self, index: Index, states: Sequence[str]) -> Iterator[tuple[InputRow, Outcome]]:
        rows = 0
        for row in self._source.rows(lambda number: index.state(number) in states):
            rows += 1
            yield row, index.outcome(row.number)
        expected = sum(index.counts()[state] for state in states)
        if rows != expected:
            raise Error(
                f"The input has {rows:,} of the {expected:,} rows that were run ({', '.join(states)}): it "
                "has changed since. Restore it and run the same command again."
            )

    def _result_row(self, row: InputRow, outcome: Outcome) -> dict[str, Any]:
        """The user's columns, then the result columns that have a value; or the answer and the error."""
        results = result_columns(self._task, outcome)
        own = rename_own(_own(row), self._result_types)
        if (name := self._spec.answer_column) is not None:
            return {**own, name: results[ANSWERS[self._task.kind]], "error": results["error"]}
        return {**own, **{name: value for name, value in results.items() if value is not None}}

    def _dead_letter(self, row: InputRow, outcome: Outcome) -> dict[str, Any]:
        """The row as it was, so that it can be run again, and why it failed, unless that has its own file."""
        if self._spec.is_openai_batch:
            return _own(row)
        return merge(_own(row), {"error": msgspec.to_builtins(outcome.failure)})

    def _answer_line(self, row: InputRow, outcome: Outcome) -> dict[str, Any]:
        response = {"status_code": 200, "request_id": _id(outcome.body, row), "body": outcome.body}
        return _line(row, response, None)

    def _error_line(self, row: InputRow, outcome: Outcome) -> dict[str, Any]:
        failure = outcome.failure
        error = {"code": failure.code, "message": failure.message} if failure is not None else None
        if failure is None or failure.status is None:
            return _line(row, None, error)
        body = outcome.body or {"error": {**(error or {}), "type": failure.to_error().type, "param": None}}
        response = {"status_code": failure.status, "request_id": _id(NO_BODY, row), "body": body}
        return _line(row, response, error)

    def _remove_unfinished(self) -> None:
        """Removes files that a killed run left unfinished."""
        spec, format = self._spec, self._format
        for to in (spec.output_path, failed_path(spec, format), errors_path(spec), spec.journal / "job.json"):
            for path in unfinished_files(to):
                path.unlink(missing_ok=True)


def _own(row: InputRow) -> dict[str, Any]:
    """The user's columns; the line of a row that cannot be read."""
    return {"line": row.line.decode(errors="replace")} if row.fields is None else row.fields


def output_format(spec: JobSpec, source: FileFormat) -> FileFormat:
    """The format of a spec's output. Raises: ConfigError for one that cannot be written."""
    format = format_of(spec.output)
    if (ending := os.path.splitext(spec.output.lower())[1]) in COMPRESSIONS:
        raise ConfigError(
            f"'{spec.output}' cannot be written: outputs are not compressed. Leave out {ending}."
        )
    if not spec.is_folder and format is None:
        raise ConfigError(
            f"'{spec.output}' must end with .jsonl, .parquet, .csv or .tsv, or with / for a folder of parts."
        )
    if spec.is_openai_batch and (format or source) != "jsonl":
        raise ConfigError(f"'{spec.output}': answers to OpenAI's batch lines are .jsonl.")
    if spec.answer_column is not None and (spec.is_openai_batch or spec.answer_column in ("", "error")):
        why = "has no effect on OpenAI's batch lines" if spec.is_openai_batch else "must be another name"
        raise ConfigError(f"--answer-column {spec.answer_column!r} {why}.")
    return format or source


def complete_mark(spec: JobSpec) -> StoragePath:
    """What is there once an output is complete."""
    return spec.output_path / _SUCCESS if spec.is_folder else spec.output_path


def failed_path(spec: JobSpec, format: FileFormat) -> StoragePath:
    """Beside the output: `answers.jsonl` has `answers.failed.jsonl`, the folder `answers/` too."""
    return spec.output_path.with_name(f"{_stem(spec)}.failed.{format}")


def errors_path(spec: JobSpec) -> StoragePath:
    """OpenAI's error file."""
    return spec.output_path.with_name(f"{_stem(spec)}.errors.jsonl")


def outputs_with_same_failed_file(spec: JobSpec, format: FileFormat) -> list[str]:
    """Other outputs in the same folder whose failed rows would go to the same file."""
    stem = _stem(spec)
    names = [f"{stem}{ending}" for ending, of in EXTENSIONS.items() if of == format]
    return [spec.output_path.with_name(name).url for name in (stem, *names) if name != spec.output_path.name]


def _stem(spec: JobSpec) -> str:
    name = spec.output_path.name
    return name if spec.is_folder else name.rpartition(".")[0]


def _line(
    row: InputRow, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None
) -> dict[str, Any]:
    custom_id = (row.fields or {}).get("custom_id")
    return {"id": f"batch_req_{row.number}", "custom_id": custom_id, "response": response, "error": error}


class _Id(msgspec.Struct):
    id: str | None = None


def _id(body: msgspec.Raw, row: InputRow) -> str:
    try:
        found = msgspec.json.decode(body, type=_Id).id if body else None
    except msgspec.ValidationError:
        found = None
    return found or f"req_{row.number}"
