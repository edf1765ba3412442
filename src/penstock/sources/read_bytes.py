"""One small file from anywhere, whole in memory: a picture of a row, say. Nothing is cached."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from penstock.errors import DownloadFailed, SourceNotFound
from penstock.sources import bucket, fsspec_store
from penstock.sources.failures import FailureCause, after_tries, retry
from penstock.sources.protocol import shown

_TRIES = 3
_BUCKETS = ("s3", "gs", "gcs")


def read(source: str) -> bytes:
    """Its bytes. source: a path, `file://`, `s3://`, `gs://`, or any URL fsspec knows. Blocks.

    Raises: SourceNotFound; DownloadFailed, whose fact `retryable` says whether a later try may succeed.
    """

    def give_up(error: Exception, found: FailureCause, attempts: int) -> NoReturn:
        sentence = f"{shown(source)} cannot be read{after_tries(attempts)}: {found.why}."
        if found.missing:
            raise SourceNotFound(sentence) from error
        raise DownloadFailed(sentence, retryable=found.retryable) from error

    return retry(lambda: _bytes(source), _TRIES, give_up)


def _bytes(source: str) -> bytes:
    scheme = urlsplit(source).scheme if "://" in source else ""
    if scheme in _BUCKETS:
        where = source.partition("://")[2]
        with bucket.client(scheme, where.partition("/")[0]).open_input_stream(where) as stream:
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
