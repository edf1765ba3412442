"""Why an engine failed, in its own words. Light: it runs before vLLM is imported.

vLLM's front-end learns only that "engine core initialization failed, see root cause above"; the cause is an
exception in another process. That process writes it to a file named in its environment.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

ENVIRONMENT = "_PENSTOCK_ENGINE_REASON"
"""Names the file in the environment of the core and its workers."""

_ELSEWHERE = re.compile(r"see (root cause|stack ?trace)", re.IGNORECASE)
_LONGEST = 1500


def describe(error: BaseException) -> str:
    """The message of `error`, on one line; for pydantic errors without a dump of the values."""
    details = cast("Callable[[], list[dict[str, Any]]] | None", getattr(error, "errors", None))
    text = "; ".join(str(detail["msg"]) for detail in details()) if callable(details) else str(error)
    text = " ".join(text.replace("Value error, ", "").split())
    if " " not in text:  # str(KeyError("x")) says nothing without its type
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


class Recorder(logging.Handler):
    """Records the last exception that vLLM logs as an error, which may not be fatal."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            write(logged(self._file), error)


def leave(error: BaseException) -> None:
    """As `write`, to the file named in the environment."""
    write(Path(os.environ[ENVIRONMENT]), error)


def write(file: Path, error: BaseException) -> None:
    """Writes to `file` why the process ends. An error that only points elsewhere gives way to what was
    logged, or is there already.
    """
    text = describe(error)
    elsewhere = _ELSEWHERE.search(text)
    cause = read(logged(file)) if elsewhere else None
    if cause or not (elsewhere and read(file)):
        file.write_text(cause or text)


def read(file: Path) -> str | None:
    """The reason recorded in `file`."""
    try:
        return file.read_text() or None
    except FileNotFoundError:
        return None


def logged(file: Path) -> Path:
    """The file beside `file` for errors that vLLM only logs."""
    return file.with_name(f"{file.name}-logged")


def clear(file: Path) -> None:
    """Removes what another process recorded there."""
    file.unlink(missing_ok=True)
    logged(file).unlink(missing_ok=True)


def forget() -> None:
    """Removes the file's folder with the engine's sockets; nobody reads them any more."""
    if file := os.environ.get(ENVIRONMENT):
        shutil.rmtree(Path(file).parent, ignore_errors=True)


def record() -> None:
    """Records from now on what vLLM logs as errors, in the file named in the environment."""
    log = logging.getLogger("vllm")
    if (file := os.environ.get(ENVIRONMENT)) and not any(
        isinstance(known, Recorder) for known in log.handlers
    ):
        log.addHandler(Recorder(Path(file)))
