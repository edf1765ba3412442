"""Checks of a job before its first row, and of whether it may continue an existing one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, cast, get_args

import msgspec

from penstock.data.job import manifest
from penstock.data.job.manifest import JobManifest
from penstock.data.job.output import (
    complete_mark,
    errors_path,
    failed_path,
    output_format,
    outputs_with_same_failed_file,
)
from penstock.data.job.pending import RequestBuilder
from penstock.data.job.report import JobReport
from penstock.data.job.spec import JobSpec
from penstock.data.journal.index import Index
from penstock.data.rows.coerce import truncate
from penstock.data.rows.input_columns import INPUTS, REQUIRED_INPUT, is_batch_line
from penstock.data.rows.parameters import PARAMETERS
from penstock.data.storage.paths import StoragePath, storage_path
from penstock.data.storage.readers import FileFormat
from penstock.data.storage.source import InputFiles, find_input
from penstock.errors import ConfigError, SourceNotFound
from penstock.temporary_folder import temporary_folder


def check_new(spec: JobSpec) -> None:
    """Whether the output is new, or that of this job.

    Raises: ConfigError, with what to do instead.
    """
    output_format(spec, "jsonl")
    if manifest.read(spec.journal) is not None:
        return
    there = spec.output_path.files() if spec.is_folder else spec.output_path.exists()
    if there:
        raise ConfigError(
            f"'{spec.output}' exists, and was not written by `penstock batch`. Name another output."
        )


def check_neighbours(spec: JobSpec, form: FileFormat) -> None:
    """Whether the files for failed rows are free, and not those of another job.

    Raises: ConfigError.
    """
    failed = failed_path(spec, form)
    beside = [failed, errors_path(spec)] if spec.is_openai_batch else [failed]
    for one in beside:
        if one.exists():
            raise ConfigError(
                f"'{one.url}' exists, where this job would write failed rows. Move it, or name another "
                "output."
            )
    for output in outputs_with_same_failed_file(spec, form):
        if manifest.read(storage_path(output).with_added_suffix(".journal")) is not None:
            raise ConfigError(
                f"'{output}' is the output of another job, which writes failed rows to '{failed.url}' as "
                "this one would. Name another output."
            )


def find_job_input(spec: JobSpec) -> InputFiles:
    """The input files. Raises: SourceNotFound; ConfigError when one of them is the output."""
    output_format(spec, "jsonl")
    failed = (failed_path(spec, form) for form in get_args(FileFormat))
    own = {_real(one) for one in (spec.output_path, errors_path(spec), *failed)}
    below = tuple(f"{_real(one)}/" for one in (spec.output_path, spec.journal))
    found = find_input(spec.inputs, spec.input_form)
    for url in (_real(part.path) for part in found.parts):
        if url in own or url.startswith(below):
            raise ConfigError(f"'{url}' would be both input and output; write output elsewhere.")
    return found


def _real(where: StoragePath) -> str:
    return os.path.realpath(where.url) if where.is_local else where.url


def detect_batch_lines(spec: JobSpec, source: InputFiles) -> JobSpec:
    """The spec with `is_openai_batch` set, by the first row that can be read."""
    first = next((row.fields for row in source.rows() if row.fields is not None), None)
    return msgspec.structs.replace(spec, is_openai_batch=first is not None and is_batch_line(first))


_LOOKED_AT = 100
"""Rows read to learn which columns an input has."""


def check_columns(spec: JobSpec, source: InputFiles) -> list[str]:
    """Columns of the input that are parameters of requests.

    Raises: ConfigError when the input has not what makes a request: a column of one, or those that --prompt
        names.
    """
    looked = (row.fields for row in islice(source.rows(), _LOOKED_AT))
    rows = [fields for fields in looked if fields is not None]
    there = list(dict.fromkeys(name for fields in rows for name in fields))
    if not there or spec.is_openai_batch:
        return []
    have = ", ".join(map(repr, there))
    if spec.template is None:
        if not {*there, *spec.defaults}.intersection(INPUTS[spec.kind]):
            raise ConfigError(
                f"The rows have no {REQUIRED_INPUT[spec.kind]}; they have {have}. --prompt makes one of "
                "columns, as in 'Summarise: {text}'."
            )
        return [name for name in there if name in PARAMETERS[spec.kind]]
    template = RequestBuilder(spec).template
    assert template is not None
    odd = source.format == "csv" and len(there) == 1 and any(mark in there[0] for mark in ";\t|")
    hint = "Columns of a CSV file are separated by commas." if odd else ""
    if fault := template.missing(there, hint):
        raise ConfigError(fault)
    if rows and all(faults := [template.fault(fields) for fields in rows]):
        raise ConfigError(f"No row goes into the text of --prompt. {faults[0]}")
    return []


def check_custom_ids(source: InputFiles) -> None:
    """Whether each line of OpenAI's batch format has a unique id. Raises: ConfigError."""
    seen: dict[str, int] = {}
    for row in source.rows():
        name = (row.fields or {}).get("custom_id")
        if isinstance(name, str) and seen.setdefault(name, row.number) != row.number:
            raise ConfigError(
                f"Rows {seen[name]} and {row.number} have the same custom_id, {name!r}: their answers could "
                "not be told apart. Make the ids unique."
            )


def check_same(before: InputFiles, now: InputFiles) -> None:
    if change := before.changed(now):
        raise ConfigError(
            f"The input has changed since this job began: {change} Restore it, or start a new job with "
            "another output."
        )


def check_reuse(spec: JobSpec) -> None:
    if spec.reuse_from is not None:
        other = msgspec.structs.replace(spec, output=spec.reuse_from)
        if manifest.read(other.journal) is None:
            raise ConfigError(f"'{spec.reuse_from}' has no journal beside it to reuse answers from.")


def finished_report(before: JobManifest | None, spec: JobSpec, *, retry_failed: bool) -> JobReport | None:
    """The report of a finished job with nothing left to run; else None.

    Raises: ConfigError when its input has changed since, which makes it another job.
    """
    if before is None or before.report is None or not before.finished or retry_failed:
        return None
    if before.spec.limit != spec.limit or not complete_mark(spec).exists():
        return None
    with suppress(SourceNotFound):
        if change := before.source.changed(find_job_input(spec)):
            if not _has_answers(before):
                return None
            raise ConfigError(
                f"'{spec.output}' is finished, but for another input: {change} To go on, {_begin_anew(spec)}"
            )
    return before.report


def continued(spec: JobSpec, *, with_other_engines: bool = False) -> JobManifest | None:
    """The job that `spec` continues; None for a new one.

    with_other_engines: as the user said.
    Raises: ConfigError when the output is another job's.
    """
    before = manifest.read(spec.journal)
    if before is None or begins_anew(before, spec):
        return None
    if not with_other_engines:
        check_continuation(before.spec, spec)
    return before


def begins_anew(before: JobManifest, spec: JobSpec, now: InputFiles | None = None) -> bool:
    """Whether `spec`, over the input `now`, is another job than `before`, which has no answer to lose."""
    try:
        check_continuation(before.spec, spec)
        if now is not None:
            check_same(before.source, now)
    except ConfigError:
        return not _has_answers(before)
    return False


def _has_answers(before: JobManifest) -> bool:
    if before.report is not None:
        return before.report.ok + before.report.skipped > 0
    spool = temporary_folder("batch")
    try:
        counts = Index(before.spec.journal, spool).counts()
        return counts["ok"] + counts["skipped"] > 0
    finally:
        shutil.rmtree(spool, ignore_errors=True)


def discard(before: JobManifest) -> None:
    """Removes what a job has written, but for its lock."""
    spec, form = before.spec, output_format(before.spec, before.source.format)
    written = [failed_path(spec, form), *([errors_path(spec)] if spec.is_openai_batch else [])]
    if spec.is_folder:
        parts = (file.name for file in spec.output_path.files(1))
        written += [spec.output_path / name for name in parts if not name.endswith("/")]
    elif spec.output_path.exists():
        written.append(spec.output_path)
    segments = [file.name for file in spec.journal.files() if file.name.endswith(".jsonl")]
    for path in [*written, *(spec.journal / name for name in (*segments, manifest.NAME))]:
        path.remove()


def check_continuation(before: JobSpec, spec: JobSpec) -> None:
    """Raises: ConfigError when `spec` would continue a job with other options than it began with."""
    began, now = before.engines, manifest.redacted(spec).engines
    anyway = (
        f"If that is meant, name the engines to go on with: penstock batch resume {spec.output} "
        f"--model MODEL (or --url, --app). Else {_begin_anew(spec)}"
    )
    if other := list(_differences(began.identity, _without_new_adapters(now.identity, began.identity))):
        more = f" (and {len(other) - _SHOWN} more)" if len(other) > _SHOWN else ""
        raise ConfigError(
            f"'{spec.output}' was begun with other engines, and would hold answers of both: "
            f"{'; '.join(other[:_SHOWN])}{more}. {anyway}"
        )
    if before.limit is not None and spec.limit is not None and spec.limit < before.limit:
        raise ConfigError(
            f"'{spec.output}' was begun with limit = {before.limit}, which can be raised, not lowered."
        )
    if before.limit is None and spec.limit is not None:
        raise ConfigError(f"'{spec.output}' was begun without a limit, which can be raised, not lowered.")
    if other := manifest.differing_fields(before, spec):
        began, now = getattr(before, other[0]), getattr(spec, other[0])
        raise ConfigError(
            f"'{spec.output}' was begun with {_ARGUMENTS.get(other[0], other[0])} = {began!r}, not {now!r}. "
            f"Go on as it was begun (`penstock batch resume`), or {_begin_anew(spec)}"
        )


_SHOWN = 3
_ARGUMENTS = {"template": "prompt", "kind": "task", "defaults": "params", "prompts_as_messages": "chat"}
"""Names that users know of fields of a spec."""


def _without_new_adapters(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """`now` without files of adapters that were not there before, and so answered no row."""

    def folder(name: str) -> str:
        return "/".join(name.split("/")[:2]) if name.startswith("dynamic_lora_loading_path/") else ""

    there = {folder(name) for name in before.get("files", ())} | {""}
    files = {name: version for name, version in now.get("files", {}).items() if folder(name) in there}
    return {**now, "files": files} if "files" in now else now


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        old, new = cast("dict[str, Any]", before), cast("dict[str, Any]", now)
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name} was {truncate(repr(before))}, and is {truncate(repr(now))}"


def _begin_anew(spec: JobSpec) -> str:
    return f"name another output, or remove '{spec.journal.url}' and the output to begin anew."
