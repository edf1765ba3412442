"""The log of a service's process: lines as JSON, one object a line, for collectors, and Serve's own handlers.

Every process of a service calls `configure` at its start: the gateway's, control's, a replica's, and those of
its engine. Where the command that started them runs on the same node, all write to its stderr, else each to
its own.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.config import Settings
from penstock.progress import log_stream

LOG_FORMAT = "PENSTOCK_LOG_FORMAT"
"""The variable that `Settings.log_format` reads, for processes to start."""

_RAYS = ("ray", "ray.serve")
"""Loggers of Ray's with a stream handler of their own. Serve's `encoding` sets the form of its files only."""

_HANDLER = "penstock-json"
_VLLM_FILE = "VLLM_LOGGING_CONFIG_PATH"


class JSONLines(logging.Formatter):
    """Time, level, logger, message; then the record's `facts` by their own names."""

    def format(self, record: logging.LogRecord) -> str:
        line = entry(record.getMessage(), record.levelname, record.name, record.created)
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class CommandHandler(logging.StreamHandler[Any]):
    """Writes JSON lines to the command's stderr, or to this process's."""

    def __init__(self) -> None:
        super().__init__(log_stream())
        self.name = _HANDLER
        self.setFormatter(JSONLines())


def entry(message: str, level: str, logger: str, at: float) -> dict[str, Any]:
    """What every line has. Units: at in seconds since 1970."""
    time = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return {"time": time, "level": level, "logger": logger, "message": message}


def error_line(message: str) -> str:
    """The line by which a command says why it ends."""
    return json.dumps(entry(message, "ERROR", "penstock.cli", time.time()), ensure_ascii=False)


def configure(log_format: str | None = None) -> None:
    """Does what `write_json` does, if this or PENSTOCK_LOG_FORMAT asks for it. Keeps Serve's files open."""
    keep_open(logging.getLogger("ray.serve"))
    if "json" in (log_format, Settings.read().log_format):
        write_json()


def keep_open(logger: logging.Logger) -> None:
    """Has closing this logger's handlers only flush them.

    `logging.config.dictConfig`, which vLLM and others call, closes all handlers of the process. Serve's loses
    its file by that, and Serve's next controller stops replicas whose logger has none.
    """
    for handler in logger.handlers:
        handler.close = handler.flush


def write_json() -> None:
    """Sends this process's log, warnings of Python included, to stderr as JSON lines. Safe to call twice."""
    logger = logging.getLogger("penstock")
    if any(handler.name == _HANDLER for handler in logger.handlers):
        return
    handler = CommandHandler()
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)  # not the root's: vLLM, imported in the same process, changes that
    logger.propagate = False
    root = logging.getLogger()
    root.handlers[:] = [other for other in root.handlers if type(other) is not logging.StreamHandler]
    root.addHandler(handler)
    logging.captureWarnings(True)
    for name in _RAYS:
        for other in logging.getLogger(name).handlers:
            if type(other) is logging.StreamHandler:
                other.setFormatter(JSONLines())


def prepare_vllm(level: str) -> None:
    """Has vLLM write JSON lines in all of its processes, if asked for; a config file of the user's stays.

    Call it before vLLM is imported. level: from which on it logs.
    """
    settings = Settings.read()
    if settings.log_format != "json" or os.environ.get(_VLLM_FILE):
        return
    handler = {"()": f"{CommandHandler.__module__}.{CommandHandler.__name__}"}
    logger = {"handlers": ["json"], "level": level, "propagate": False}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"json": handler},
        "loggers": {"vllm": logger},
    }
    file = settings.cache_folder() / f"vllm-logging-{level.lower()}.json"
    _write(file, json.dumps(config))
    os.environ[_VLLM_FILE] = str(file)


def _write(file: Path, text: str) -> None:
    """Whole or not at all: other replicas may be reading it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
        new.write(text)
    os.replace(new.name, file)
