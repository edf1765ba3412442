"""Log lines as JSON, one object a line, for collectors that read a container's output."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.progress import log_stream

_HANDLER = "penstock-json"


class JSONLines(logging.Formatter):
    """Time, level, logger, message; then the record's `facts` by their own names."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def write_json() -> None:
    """Sends Penstock's log of this process to stderr as JSON lines. Safe to call twice."""
    logger = logging.getLogger("penstock")
    if any(handler.name == _HANDLER for handler in logger.handlers):
        return
    handler = logging.StreamHandler(log_stream())
    handler.name = _HANDLER
    handler.setFormatter(JSONLines())
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)  # not the root's: vLLM, imported in the same process, changes that
    logger.propagate = False
