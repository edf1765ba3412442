"""`s3://` and `gs://`, by the clients in pyarrow, with their usual chains of credentials."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyarrow import fs

from penstock.sources.protocol import Count, File, FileSource, shown, within

_PART_BYTES = 64 << 20
_READ_BYTES = 16 << 20
"""One request each: a bucket gives some 100 MB/s to one, so many go side by side."""

_CONNECT_S = 10.0
_GCS_RETRY = timedelta(seconds=10)
"""Below our own tries; the client's default goes on for a quarter of an hour."""


class Bucket(FileSource):
    """Objects below a prefix; an object by itself is a source with one file."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.shown = shown(url).rstrip("/")
        self.bucket = parts.netloc.rpartition("@")[2]
        self._path = f"{self.bucket}/{parts.path.strip('/')}".rstrip("/")
        self._is_s3 = parts.scheme == "s3"
        self._fs = client(parts.scheme, self.bucket)
        self.part_bytes = _PART_BYTES if self._is_s3 else None

    def files(self) -> list[File]:
        selector = fs.FileSelector(self._path, allow_not_found=True, recursive=True)
        found = [info for info in self._fs.get_file_info(selector) if info.type == fs.FileType.File]
        if not found and "/" in self._path:
            found = [info for info in self._fs.get_file_info([self._path]) if info.is_file]
        if not found:
            self._check_bucket()
        return sorted(File(self._name(info.path), info.size, str(info.mtime_ns)) for info in found)

    def children(self, holding: str) -> list[str]:
        if not self._is_s3:  # there Arrow's client sees folders only in the names of their files
            return within(self.files(), holding)
        infos = self._fs.get_file_info(fs.FileSelector(self._path, allow_not_found=True))
        if not infos:
            self._check_bucket()
        return sorted(info.base_name for info in infos if info.type == fs.FileType.Directory)

    def copy(self, file: File, to: Path, start: int, end: int, count: Count) -> None:
        path = self._path if file.name == self._alone() else f"{self._path}/{file.name}"
        with self._open(path, start) as source, to.open("r+b") as target:
            target.seek(start)
            while start < end and (piece := source.read(min(_READ_BYTES, end - start))):
                target.write(piece)
                start += len(piece)
                count(len(piece))

    def _open(self, path: str, start: int) -> Any:
        if not self._is_s3:  # to seek there would hold Python's lock until the first byte has come
            return self._fs.open_input_stream(path)
        source = self._fs.open_input_file(path)
        source.seek(start)
        return source

    def _check_bucket(self) -> None:
        """A bucket that is not there lists as an empty one. Raises: NoBucket."""
        try:
            (info,) = self._fs.get_file_info([self.bucket])
        except OSError:  # some credentials may list a folder, but not query the bucket
            return
        if info.type == fs.FileType.NotFound:
            raise NoBucket(self.bucket)

    def _name(self, path: str) -> str:
        return self._alone() if path == self._path else path.removeprefix(f"{self._path}/")

    def _alone(self) -> str:
        return self._path.rpartition("/")[2]


VARIABLES = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ACCESS_KEY_ID",
    "STORAGE_EMULATOR_HOST",
)
"""Of the environment: what a client depends on."""


def client(scheme: str, bucket: str) -> Any:  # pyarrow has no types
    """The file system of `s3` or `gs`; its paths begin with the bucket's name.

    One for the whole process, as long as the environment is the same.
    """
    return _client(scheme, bucket, tuple(os.environ.get(name) for name in VARIABLES))


@cache
def _client(scheme: str, bucket: str, environment: tuple[str | None, ...]) -> Any:  # pyarrow has no types
    return _s3(bucket) if scheme == "s3" else _gcs()


class NoBucket(FileNotFoundError):
    """There is no bucket of this name."""


def _s3(bucket: str) -> Any:  # pyarrow has no types
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    url = urlsplit(endpoint) if endpoint else None
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return fs.S3FileSystem(
        region=named or (_region(bucket) if url is None else "us-east-1"),
        scheme=url.scheme if url else None,
        endpoint_override=url.netloc if url else None,
        connect_timeout=_CONNECT_S,
        allow_delayed_open=True,  # a small object is one request, not a multipart upload of three
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=2),  # `failures` retries, too
    )


@cache
def _region(bucket: str) -> str | None:
    """The bucket's own, which is asked for once."""
    try:
        return fs.resolve_s3_region(bucket)
    except OSError:  # the first real call fails with the reason
        return None


def _gcs() -> Any:  # pyarrow has no types
    """STORAGE_EMULATOR_HOST is the client's own variable for a local server."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    url = urlsplit(emulator if "://" in emulator else f"http://{emulator}") if emulator else None
    return fs.GcsFileSystem(
        anonymous=url is not None,
        scheme=url.scheme if url else None,
        endpoint_override=url.netloc if url else None,
        retry_time_limit=_GCS_RETRY,
    )
