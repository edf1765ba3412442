"""`penstock.batch`: a job over a table, which a second call continues."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.data.job.api import batch as run
from penstock.data.job.report import ProgressListener, RunStats
from penstock.data.results.merge import rename_own
from penstock.data.storage.paths import LocalPath, atomic_write
from penstock.data.table import frames
from penstock.data.table.asking import bar, json_schema, model_config, refuse_engine_arguments, with_schema
from penstock.errors import ConfigError, Unavailable
from penstock.processes.quiet import quiet
from penstock.temporary_folder import temporary_folder

if TYPE_CHECKING:
    from tqdm import tqdm

    from penstock.data.table.asking import Schema


def batch(
    table: Any,
    prompt: str,
    *,
    name: str | None = None,
    model: str | None = None,
    url: str | None = None,
    api_key: str | None = None,
    schema: Schema | None = None,
    system: str | None = None,
    answer: str = "answer",
    params: Mapping[str, Any] | None = None,
    **engine_kwargs: Any,
) -> Any:
    """The table with an answer for each row: its columns, then `answer` and `error`, in its order.

    table: a DataFrame of pandas or Polars, which is returned as such, or a path, which is returned as a
    DataFrame of pandas. schema: then a column for each of its fields, in place of `answer`.
    name: of files here (NAME.parquet and its journal), by which a second call resumes a job that was stopped
    or killed; without it nothing is kept. Other arguments as those of `LLM` and `LLM.map`.
    Raises: as `penstock.data.batch`.
    """
    if url:
        refuse_engine_arguments(engine_kwargs)
    asking = with_schema(params or {}, schema)
    fields = [] if schema is None else list(json_schema(schema).get("properties", {}))
    if "error" in fields:
        raise ConfigError("The schema has a field 'error', the name of the column with errors. Rename it.")
    folder = temporary_folder("table")
    try:
        output = Path(folder if name is None else ".").absolute() / f"{name or 'answers'}.parquet"
        source = table
        if not isinstance(table, str | os.PathLike):
            source = output.with_suffix(".input.parquet")
            rows = frames.arrow(table)
            if not (source.exists() and pq.read_table(source).equals(rows)):
                with atomic_write(LocalPath(source)) as file:  # a second call could not read a part of it
                    pq.write_table(rows, file)
        with quiet() as screen, bar(None, screen) as shown:
            report = run(
                str(source),
                str(output),
                config=None if url else model_config(model, engine_kwargs),
                url=url,
                model=model if url else None,
                api_key=api_key,
                prompt=prompt,
                system=system,
                params=asking,
                answer_column=answer,
                watcher=_Watcher(shown),
            )
        if not output.exists():
            again = "Call it again to continue." if name else "With a `name` a second call continues it."
            raise Unavailable(f"The job was stopped ({report.ended}). {again}")
        answers = pq.read_table(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if schema is not None:
        answers = _with_fields(answers, answer, fields)
    return frames.frame(answers, table)


def _with_fields(answers: Any, answer: str, fields: list[str]) -> Any:
    """A column for each field in place of the texts. The table's own columns of these names are renamed."""
    found: list[dict[str, Any]] = []
    for text in answers.column(answer).to_pylist():
        try:
            found.append(msgspec.json.decode(text or "{}", type=dict[str, Any]))
        except msgspec.DecodeError:  # cut at max_tokens
            found.append({})
    at = answers.column_names.index(answer)
    answers = answers.remove_column(at)
    answers = answers.rename_columns(list(rename_own(dict.fromkeys(answers.column_names), fields)))
    for name in reversed(fields):
        answers = answers.add_column(at, name, _column([one.get(name) for one in found]))
    return answers


def _column(values: list[Any]) -> Any:
    """An Arrow array; of JSON texts where the values have no common type."""
    try:
        return pa.array(values)
    except frames.NOT_IN_ARROW:
        return pa.array([None if one is None else msgspec.json.encode(one).decode() for one in values])


class _Watcher(ProgressListener):
    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar

    def on_tick(self, stats: RunStats) -> None:
        self._bar.total = stats.total
        self._bar.n = stats.before + stats.ok + stats.failed + stats.skipped
        self._bar.refresh()
