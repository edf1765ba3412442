"""Serve's log handlers stay open when a library sets up its own logging."""

from __future__ import annotations

import logging
import logging.config
from collections.abc import Iterator
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path

import pytest

from penstock import json_logs


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """The file behind a handler of `ray.serve`, made as Serve makes that of a replica."""
    logger, file = logging.getLogger("ray.serve"), tmp_path / "replica.log"
    before = logger.handlers, logger.level
    target = RotatingFileHandler(file)
    logger.handlers, logger.level = [MemoryHandler(1, logging.ERROR, target)], logging.INFO
    yield file
    target.close()
    logger.handlers, logger.level = before


def test_handlers_keep_their_file_when_a_library_configures_logging(file: Path):
    json_logs.configure()
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    (handler,) = [one for one in logging.getLogger("ray.serve").handlers if isinstance(one, MemoryHandler)]
    assert isinstance(handler.target, logging.FileHandler)
    assert handler.target.baseFilename == str(file)
    logging.getLogger("ray.serve").info("still here")
    assert file.read_text() == "still here\n"
