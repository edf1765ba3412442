"""`penstock batch --submit`: a file of OpenAI's batch lines to a service's Batches API, and its answers back.

The service runs the batch. A small file beside the output says which one it is, so that the same command
takes it up again.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai

from penstock.bench.load.target import parsed
from penstock.cli.batch.terminal import Meter
from penstock.cli.process.failure import INTERRUPTED, is_interrupt
from penstock.data.job.report import RunStats
from penstock.data.storage.paths import LocalPath, atomic_write
from penstock.errors import ConfigError, Error, Unavailable

_FAILED = 1
_LOOK_S = 1.0
_RETRIES = 45
"""The command gives up after some five minutes without an answer of the service; the batch goes on."""

_SHOWN_FAULTS = 10
_WINDOW = "24h"
_ENDED = ("completed", "failed", "expired", "cancelled")


class _Submitted(msgspec.Struct):
    """What the file beside the output holds. input: its path, size and time of its last change.

    batch_id: None until the service has said it; then the batch is found by the uploaded file.
    """

    url: str
    batch_id: str | None
    input: tuple[str, int, int]
    file_id: str = ""
    window: str = ""


def submit(
    inputs: tuple[str, ...],
    output: str,
    url: str,
    api_key: str | None,
    window: str | None,
    *,
    fail_on_errors: bool,
) -> int:
    """Exit code: 0 when the answers are there; 1 when the batch, or each of its rows, failed; 130 after
    Ctrl-C.

    Raises: ConfigError; Error when the service refuses the file or the batch.
    """
    if len(inputs) != 1 or output.endswith("/"):
        raise ConfigError("--submit sends one file, and writes one: give INPUT.jsonl and -o OUTPUT.jsonl.")
    source, to = Path(inputs[0]), Path(output)
    parts = parsed(url)
    base = f"{parts.scheme}://{parts.netloc}{parts.path}/v1"
    api = openai.OpenAI(base_url=base, api_key=api_key or "none", max_retries=0)
    note = to.with_name(f"{to.name}.batch.json")
    try:
        with _errors_of(url):
            known = _known(source, to, note, url, window)
            batch = _batch(api, source, note, known or _uploaded(api, source, note, url, window or _WINDOW))
            api = api.with_options(max_retries=_RETRIES)  # through a restart of the service
            meter = Meter(sys.stderr)
            with meter.bar:
                batch = _waited(api, batch, meter, str(source), output)
            return _ended(api, batch, to, note, fail_on_errors=fail_on_errors)
    except BaseException as error:
        if not is_interrupt(error):
            raise
        print(f"penstock batch: {_left(note)}", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def _errors_of(url: str) -> Generator[None]:
    """OpenAI's client with our errors. Raises: Unavailable; Error with the service's sentence."""
    try:
        yield
    except openai.APIStatusError as error:
        kind = Unavailable if error.status_code >= 500 else Error
        body: Any = error.body
        raise kind(
            str(body["message"]) if isinstance(body, dict) and "message" in body else str(error)
        ) from error
    except openai.APIConnectionError as error:
        raise Unavailable(f"Nothing answers at {url}; start a service with `penstock serve`.") from error


def _known(source: Path, to: Path, note: Path, url: str, window: str | None) -> _Submitted | None:
    """What an earlier run of the command began; None for nothing.

    Raises: ConfigError for an output of something else.
    """
    if not note.exists():
        if to.exists():
            raise ConfigError(f"'{to}' exists, and was not written by this command. Name another output.")
        return None
    known = msgspec.json.decode(note.read_bytes(), type=_Submitted)
    if known.url != url or known.input != _identity(source):
        raise ConfigError(
            f"'{note}' is of another batch: of '{known.input[0]}' at {known.url}. Name another output, or "
            "remove that file."
        )
    if window is not None and window != known.window:
        raise ConfigError(
            f"The batch of '{to}' has the window {known.window}, which cannot be changed; leave out --window."
        )
    return known


def _uploaded(api: openai.OpenAI, source: Path, note: Path, url: str, window: str) -> _Submitted:
    """Sends the file. It is noted before the batch is asked for, so that no batch is ever lost."""
    _endpoint(source)
    sent = _identity(source)  # first: it may be changed meanwhile
    with source.open("rb") as content:
        file = api.files.create(file=content, purpose="batch")
    known = _Submitted(url, None, sent, file.id, window)
    _write(note, known)
    return known


def _batch(api: openai.OpenAI, source: Path, note: Path, known: _Submitted) -> Any:
    """The batch of the uploaded file: noted, found at the service, or created."""
    if known.batch_id is not None:
        return api.batches.retrieve(known.batch_id)
    batch = next((one for one in api.batches.list(limit=100) if one.input_file_id == known.file_id), None)
    if batch is None:
        given: Any = {"endpoint": _endpoint(source), "completion_window": known.window}
        batch = api.batches.create(input_file_id=known.file_id, **given)
    _write(note, msgspec.structs.replace(known, batch_id=batch.id))
    return batch


def _write(note: Path, known: _Submitted) -> None:
    with atomic_write(LocalPath(note.absolute())) as out:
        out.write(msgspec.json.encode(known))


def _left(note: Path) -> str:
    """What becomes of the batch after Ctrl-C, and how to take it up again."""
    if not note.exists():
        return "left before the file was sent: there is no batch. The same command begins again."
    known = msgspec.json.decode(note.read_bytes(), type=_Submitted)
    if known.batch_id is None:
        return (
            "left while the batch was being created; if the service has it, it runs. The same command takes "
            f"it up, or creates it; to look: penstock batches list --url {known.url}"
        )
    return (
        "left; the batch goes on. The same command takes it up; to end it: "
        f"penstock batches cancel {known.batch_id} --url {known.url}"
    )


def _identity(source: Path) -> tuple[str, int, int]:
    try:
        found = source.stat()
    except OSError as error:
        raise ConfigError(f"'{source}' cannot be read: {error.strerror}.") from error
    return str(source), found.st_size, found.st_mtime_ns


def _endpoint(source: Path) -> str:
    """That of its first line. Raises: ConfigError when it is not of OpenAI's batch form."""
    try:
        with source.open("rb") as file:
            first = json.loads(next(line for line in file if line.strip()))
        return str(first["url"])
    except OSError as error:
        raise ConfigError(f"'{source}' cannot be read: {error.strerror}.") from error
    except (StopIteration, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"'{source}' is not a file of OpenAI's batch lines, which --submit sends: its first line needs "
            "custom_id, method, url and body. For rows of other forms use --url."
        ) from error


def _waited(api: openai.OpenAI, batch: Any, meter: Meter, source: str, output: str) -> Any:
    """The batch when it has ended."""
    stats = RunStats(total=batch.request_counts.total or None)
    meter.on_start(output, [source], stats.total)
    meter.on_message(f"Batch {batch.id}. Ctrl-C leaves it running.")
    while batch.status not in _ENDED:
        time.sleep(_LOOK_S)
        batch = api.batches.retrieve(batch.id)
        counts = batch.request_counts
        stats.total, stats.ok, stats.failed = counts.total or None, counts.completed, counts.failed
        meter.on_tick(stats)
    return batch


def _ended(api: openai.OpenAI, batch: Any, to: Path, note: Path, *, fail_on_errors: bool) -> int:
    """Fetches the files of the batch. Gives the exit code."""
    counts = batch.request_counts
    errors = to.with_name(f"{to.stem}.errors.jsonl")
    for file_id, path in ((batch.error_file_id, errors), (batch.output_file_id, to)):
        if file_id is None:
            continue
        with (
            api.files.with_streaming_response.content(file_id) as answer,
            atomic_write(LocalPath(path.absolute())) as file,
        ):
            for piece in answer.iter_bytes():
                file.write(piece)
    if batch.errors is not None:
        note.unlink()
        for fault in batch.errors.data[:_SHOWN_FAULTS]:
            where = f"line {fault.line}: " if fault.line else ""
            print(f"penstock batch: {where}{fault.message}", file=sys.stderr)
        if (more := len(batch.errors.data) - _SHOWN_FAULTS) > 0:
            print(f"penstock batch: and {more:,} more.", file=sys.stderr)
    print(f"{batch.status}: {counts.completed:,} of {counts.total:,} rows in '{to}'", end="")
    print(f", {counts.failed:,} failed ones in '{errors}'." if counts.failed else ".")
    failed = batch.status != "completed" or (counts.failed and (fail_on_errors or not counts.completed))
    return _FAILED if failed else 0
