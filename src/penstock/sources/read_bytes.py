"""One small file from anywhere, whole in memory: a picture of a row, say. Nothing is cached."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from penstock.errors import DownloadFailed, SourceNotFound
from penstock.sources import bucket, fsspec_store
from penstock.sources.failures import classify, pause_s
from penstock.sources.protocol import shown

_TRIES = 3
_BUCKETS = ("s3", "gs", "gcs")


def read(source: str) -> bytes:
    """Its bytes. source: a path, `file://`, `s3://`, `gs://`, or any URL fsspec knows. Blocks.

    Raises: SourceNotFound; DownloadFailed, whose fact `retryable` says whether a later try may succeed.
    """
    for attempt in range(_TRIES):
        try:
            return _bytes(source)
        except Exception as error:
            trouble = classify(error)
            if trouble.missing:
                raise SourceNotFound(f"{shown(source)} cannot be read: {trouble.why}.") from error
            if not trouble.retryable or attempt == _TRIES - 1:
                sentence = f"{shown(source)} cannot be read: {trouble.why}."
                raise DownloadFailed(sentence, retryable=trouble.retryable) from error
            time.sleep(pause_s(attempt))
    raise AssertionError


def _bytes(source: str) -> bytes:
    scheme = urlsplit(source).scheme if "://" in source else ""
    if scheme in _BUCKETS:
        where = source.partition("://")[2]
        with _client(scheme, where.partition("/")[0], _environment()).open_input_stream(where) as stream:
            return stream.read()
    if scheme in ("", "file"):
        return _file(Path(unquote(urlsplit(source).path) if scheme else source))
    if "::" in source:  # fsspec's way to name a URL within another
        raise FileNotFoundError(source)
    return fsspec_store.read(source)


def _file(path: Path) -> bytes:
    """Only of a file that ends: a pipe or a device would be read for ever."""
    if not path.is_file():
        raise FileNotFoundError(str(path))
    return path.read_bytes()


@cache
def _client(scheme: str, name: str, environment: tuple[str | None, ...]) -> Any:  # pyarrow has no types
    return bucket.client(scheme, name)


def _environment() -> tuple[str | None, ...]:
    """What a kept client was made from."""
    return tuple(os.environ.get(name) for name in bucket.VARIABLES)
