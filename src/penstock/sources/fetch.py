"""`fetch`, `version_of` and `children`, for every kind of source."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from functools import partial
from os.path import expanduser
from pathlib import Path, PurePosixPath
from typing import NoReturn, TypeVar

from penstock.errors import DownloadFailed, SourceNotFound
from penstock.sources import failures
from penstock.sources.cache import Slot
from penstock.sources.every_node import on_every_node
from penstock.sources.hub import Hub, is_hub_id
from penstock.sources.protocol import File, FileSource, Folder, cause, digest, shown
from penstock.sources.transfer import Arrived, Wanted, Watch, silent, transfer

log = logging.getLogger(__name__)

_BUCKETS = ("s3", "gs", "gcs")

Only = Sequence[str] | Callable[[list[str]], Iterable[str]]
"""Which files: patterns such as `*.json`, or a function of all names that gives those to fetch."""

Answer = TypeVar("Answer")

Extra = tuple[str, str]
"""A file or folder from elsewhere, and the path in the fetched folder under which it is wanted."""


def fetch(
    source: str,
    extra: Sequence[Extra] = (),
    *,
    timeout_s: float | None = None,
    tries: int = 3,
    only: Only | None = None,
    watch: Watch = silent,
) -> Path:
    """The folder on this node that holds the files of `source`, and `extra` ones.

    A local folder as it is, or copied if there are extra files; anything else is downloaded unless its
    present version is here.
    Raises: SourceNotFound, DownloadFailed; what `watch` raises.
    """
    deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    store = _store(source)
    if not extra and isinstance(store, Folder):
        _files(store, tries=1)
        return store.path
    if not extra and isinstance(store, Hub):
        return _from_hub(store, only, tries, deadline, watch)
    slot = Slot("\n".join([source, *(f"{uri} {to}" for uri, to in extra)]), store.shown)
    try:
        wanted = _wanted(store, extra, only, tries)
    except DownloadFailed as failure:
        return _cached_fallback(slot, failure)
    return slot.find(_version(wanted)) or _download(slot, wanted, tries, deadline, watch)


@on_every_node
def fetch_with_version(source: str, *, timeout_s: float | None = None, tries: int) -> tuple[Path, str]:
    """The folder and its `version_of`; "" when a cached version is used and is not known.

    Folders of our cache are named by their version. Elsewhere it is read before the fetch, to miss no change.
    """
    before = None
    if isinstance(_store(source), Folder | Hub):
        try:
            before = version_of(source)
        except DownloadFailed:
            before = ""
    folder = fetch(source, timeout_s=timeout_s, tries=tries)
    return folder, folder.name if before is None else before


def version_of(source: str) -> str:
    """A short text that changes when any file of `source` does. Lists; reads no file.

    Raises: SourceNotFound, DownloadFailed.
    """
    return digest(_files(_store(source), tries=1))


def sizes(source: str) -> dict[str, int]:
    """Bytes of each file of `source`, by name. Raises: SourceNotFound, DownloadFailed."""
    return {file.name: file.size_bytes for file in _files(_store(source), tries=1)}


def children(source: str, holding: str) -> list[str]:
    """The names of the folders directly below `source` that hold a file `holding`, as far as can be seen.

    Raises: SourceNotFound, DownloadFailed.
    """
    store = _store(source)
    return _asked(store, lambda: store.children(holding), tries=1)


def _store(source: str) -> FileSource:
    scheme, is_url = source.partition("://")[0].lower(), "://" in source
    if is_url and scheme in _BUCKETS:
        from penstock.sources.bucket import Bucket  # here, as fsspec below: local folders need neither

        return Bucket(source)
    if is_url and scheme not in ("file", "hf"):
        return _url(source)
    path = Path(expanduser(source.removeprefix("file://")))
    if path.exists() or scheme == "file":
        return Folder(path)
    if scheme == "hf" or is_hub_id(source):
        return Hub(source)
    raise SourceNotFound(f"'{source}' does not exist on this node, and is neither a URL nor a hub id.")


def _url(source: str) -> FileSource:
    from penstock.sources.fsspec_store import FsspecSource

    try:
        return FsspecSource(source)
    except (ImportError, ValueError) as error:
        raise SourceNotFound(f"'{shown(source)}' cannot be read: {error}.") from error
    except Exception as error:  # some file systems connect at once
        found = failures.classify(error)
        sentence = f"'{shown(source)}' cannot be read: {found.why}."
        raise DownloadFailed(sentence, retryable=found.retryable) from None


def _asked(store: FileSource, ask: Callable[[], Answer], tries: int) -> Answer:
    """The result of a listing, retried where that helps; foreign errors become ours."""

    def give_up(error: Exception, found: failures.FailureCause, attempts: int) -> NoReturn:
        if found.missing:
            raise SourceNotFound(f"'{store.shown}' was not found: {found.why}.") from cause(store, error)
        sentence = f"'{store.shown}' cannot be read{failures.after_tries(attempts)}: {found.why}."
        raise DownloadFailed(sentence, retryable=found.retryable) from cause(store, error)

    return failures.retry(ask, tries, give_up)


def _files(store: FileSource, tries: int) -> list[File]:
    files = _asked(store, store.files, tries)
    if not files:
        raise SourceNotFound(f"'{store.shown}' was not found: it holds no files.")
    return files


def _chosen(store: FileSource, only: Only | None, tries: int) -> list[File]:
    files = _files(store, tries)
    names = set(_names(only, [file.name for file in files]))
    chosen = [file for file in files if file.name in names]
    if not chosen:
        raise SourceNotFound(f"'{store.shown}' holds none of the files that are wanted.")
    return chosen


def _names(only: Only | None, names: list[str]) -> list[str]:
    if only is None:
        return names
    if callable(only):
        return list(only(names))
    return [name for name in names if matches(name, only)]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a path, or its last component, matches any of the patterns."""
    return any(fnmatch(one, pattern) for pattern in patterns for one in (name, PurePosixPath(name).name))


def _wanted(store: FileSource, extra: Sequence[Extra], only: Only | None, tries: int) -> list[Wanted]:
    wanted = {file.name: Wanted(store, file, file.name) for file in _chosen(store, only, tries)}
    for uri, to in extra:
        other = _store(uri)
        for file in _files(other, tries):
            alone = other.shown.endswith(f"/{file.name}")
            name = to if alone and not to.endswith("/") else f"{to.rstrip('/')}/{file.name}"
            wanted[name] = Wanted(other, file, name)
    for one in wanted.values():
        _check_name(one)
    return list(wanted.values())


def _check_name(wanted: Wanted) -> None:
    """Servers choose file names. Raises: SourceNotFound for a path that leaves the folder."""
    path = PurePosixPath(wanted.name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in wanted.name:
        raise SourceNotFound(
            f"'{wanted.store.shown}' names the file {wanted.name!r}, which is not below its own folder; "
            "nothing was downloaded."
        )


def _version(wanted: Iterable[Wanted]) -> str:
    return digest(File(one.name, one.file.size_bytes, one.file.version) for one in wanted)


def _cached_fallback(slot: Slot, failure: DownloadFailed) -> Path:
    """The last cached version, when the source cannot be reached just now."""
    folder = slot.newest() if failure.facts.get("retryable") else None
    if folder is None:
        raise failure
    log.warning("%s Using the cached version.", failure)
    return folder


def _download(slot: Slot, wanted: Sequence[Wanted], tries: int, deadline: float, watch: Watch) -> Path:
    version = _version(wanted)
    try:
        with slot.locked(deadline):
            if folder := slot.find(version):
                return folder  # another process has downloaded it
            transfer(wanted, slot.partial(version), tries, deadline, watch)
            _check_unchanged(wanted, slot.shown, tries)
            return slot.publish(version)
    except OSError as error:
        why = failures.classify(error).why
        raise DownloadFailed(f"'{slot.shown}' cannot be put into {slot.folder}: {why}.") from error


def _check_unchanged(wanted: Sequence[Wanted], shown: str, tries: int) -> None:
    """Files of two versions must not be mixed."""
    for store in {one.store.shown: one.store for one in wanted}.values():
        now = set(_files(store, tries))
        if any(one.file not in now for one in wanted if one.store.shown == store.shown):
            raise DownloadFailed(f"'{shown}' was changed while it was downloaded; try again.", retryable=True)


def _from_hub(hub: Hub, only: Only | None, tries: int, deadline: float, watch: Watch) -> Path:
    try:
        chosen = _chosen(hub, only, tries)
    except DownloadFailed as failure:
        return _hub_cache_fallback(hub, only, failure)
    arrived = Arrived(0, sum(file.size_bytes for file in chosen), watch, deadline)
    count = partial(arrived.add, what=f"'{hub.shown}'")
    return _asked(hub, lambda: hub.download([file.name for file in chosen], count), tries)


def _hub_cache_fallback(hub: Hub, only: Only | None, failure: DownloadFailed) -> Path:
    try:
        folder = hub.cached(lambda names: _names(only, names))
    except Exception:  # the client raises many kinds; none says more than the failure
        raise failure from failure.__cause__
    log.warning("%s Using the hub's cache.", failure)
    return folder
