"""`fetch`, `stamp` and `children`, for every kind of source."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TypeVar

from penstock.errors import DownloadFailed, Error, SourceNotFound
from penstock.sources import failures
from penstock.sources.cache import Slot
from penstock.sources.folder import Folder
from penstock.sources.hub import Hub, is_hub_id
from penstock.sources.protocol import File, Store, cause, digest, shown
from penstock.sources.transfer import Wanted, Watch, silent, transfer

log = logging.getLogger(__name__)

_BUCKETS = ("s3", "gs", "gcs")

Only = Sequence[str] | Callable[[list[str]], Iterable[str]]
"""Which files: patterns such as `*.json`, or a function of all names that gives those to fetch."""

Answer = TypeVar("Answer")

Extra = tuple[str, str]
"""A file or folder from elsewhere, and the path in the fetched folder under which it is wanted."""


def fetch(
    source: str,
    *,
    timeout_s: float | None = None,
    tries: int = 3,
    only: Only | None = None,
    watch: Watch = silent,
) -> Path:
    """The folder on this node that holds the files of `source`.

    A local folder as it is; anything else is downloaded unless its present version is here.
    Raises: SourceNotFound, DownloadFailed; what `watch` raises.
    """
    return fetch_all(source, (), timeout_s=timeout_s, tries=tries, only=only, watch=watch)


def fetch_stamped(source: str, *, timeout_s: float | None = None, tries: int = 3) -> tuple[Path, str]:
    """The same, and the `stamp` of what came, "" when it is not known: an older version that was here.

    A folder of our cache is called by its stamp. Elsewhere that is asked for first: no change is missed.
    """
    before = None
    if isinstance(_store(source), Folder | Hub):
        try:
            before = stamp(source)
        except DownloadFailed:
            before = ""
    folder = fetch(source, timeout_s=timeout_s, tries=tries)
    return folder, folder.name if before is None else before


def fetch_all(
    source: str,
    extra: Sequence[Extra],
    *,
    timeout_s: float | None = None,
    tries: int = 3,
    only: Only | None = None,
    watch: Watch = silent,
) -> Path:
    """The same with further files in it. A local folder stays as it is: then they and it are copied."""
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
        return _former(slot, failure)
    return slot.find(_version(wanted)) or _download(slot, wanted, tries, deadline, watch)


def stamp(source: str) -> str:
    """A short text that changes when any file of `source` does. Lists; reads no file.

    Raises: SourceNotFound, DownloadFailed.
    """
    return digest(_files(_store(source), tries=1))


def children(source: str) -> list[str]:
    """The names of the folders directly below `source`, sorted.

    Raises: SourceNotFound, DownloadFailed.
    """
    store = _store(source)
    return _asked(store, store.children, tries=1)


def _store(source: str) -> Store:
    scheme, is_url = source.partition("://")[0].lower(), "://" in source
    if is_url and scheme in _BUCKETS:
        from penstock.sources.bucket import Bucket  # here, as Url: who reads local folders pays for neither

        return Bucket(source)
    if is_url and scheme not in ("file", "hf"):
        return _url(source)
    path = Path(source.removeprefix("file://")).expanduser()
    if path.exists() or scheme == "file":
        return Folder(path)
    if scheme == "hf" or is_hub_id(source):
        return Hub(source)
    raise SourceNotFound(f"'{source}' does not exist on this node, and is neither a URL nor a hub id.")


def _url(source: str) -> Store:
    from penstock.sources.fsspec_store import Url

    try:
        return Url(source)
    except (ImportError, ValueError) as error:
        raise SourceNotFound(f"'{shown(source)}' cannot be read: {error}.") from error
    except Exception as error:  # some file systems connect at once
        told = failures.told(error)
        sentence = f"'{shown(source)}' cannot be read: {told.why}."
        raise DownloadFailed(sentence, passing=told.passing) from None


def _asked(store: Store, ask: Callable[[], Answer], tries: int) -> Answer:
    """What a listing says, in the end; foreign errors as ours."""
    for attempt in range(1, tries + 1):
        try:
            return ask()
        except Error:
            raise
        except Exception as error:
            told = failures.told(error)
            if told.missing:
                raise SourceNotFound(f"'{store.shown}' was not found: {told.why}.") from cause(store, error)
            if not told.passing or attempt == tries:
                after = f" after {attempt} tries" if attempt > 1 else ""
                sentence = f"'{store.shown}' cannot be read{after}: {told.why}."
                raise DownloadFailed(sentence, passing=told.passing) from cause(store, error)
            time.sleep(failures.pause_s(attempt))
    raise AssertionError("tries is at least 1")


def _files(store: Store, tries: int) -> list[File]:
    files = _asked(store, store.files, tries)
    if not files:
        raise SourceNotFound(f"'{store.shown}' was not found: it holds no files.")
    return files


def _chosen(store: Store, only: Only | None, tries: int) -> list[File]:
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
    return [name for name in names if any(fnmatch(one, p) for p in only for one in (name, _last(name)))]


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _wanted(store: Store, extra: Sequence[Extra], only: Only | None, tries: int) -> list[Wanted]:
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
    """Servers say what their files are called. Raises: SourceNotFound for a path out of the folder."""
    path = PurePosixPath(wanted.name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in wanted.name:
        raise SourceNotFound(
            f"'{wanted.store.shown}' names the file {wanted.name!r}, which is not below its own folder; "
            "nothing was downloaded."
        )


def _version(wanted: Iterable[Wanted]) -> str:
    return digest(File(one.name, one.file.size_bytes, one.file.version) for one in wanted)


def _former(slot: Slot, failure: DownloadFailed) -> Path:
    """A source that cannot be asked just now may be here from an earlier time: better than nothing."""
    folder = slot.newest() if failure.facts.get("passing") else None
    if folder is None:
        raise failure
    log.warning("%s The version that is here is used.", failure)
    return folder


def _download(slot: Slot, wanted: Sequence[Wanted], tries: int, deadline: float, watch: Watch) -> Path:
    version = _version(wanted)
    try:
        with slot.locked(deadline):
            if folder := slot.find(version):
                return folder  # another process was quicker
            transfer(wanted, slot.partial(version), tries, deadline, watch)
            _check_unchanged(wanted, slot.shown, tries)
            return slot.publish(version)
    except OSError as error:
        why = failures.told(error).why
        raise DownloadFailed(f"'{slot.shown}' cannot be put into {slot.folder}: {why}.") from error


def _check_unchanged(wanted: Sequence[Wanted], shown: str, tries: int) -> None:
    """Files of two versions together would be a third one that never was."""
    for store in {one.store.shown: one.store for one in wanted}.values():
        now = set(_files(store, tries))
        if any(one.file not in now for one in wanted if one.store.shown == store.shown):
            raise DownloadFailed(f"'{shown}' was changed while it was downloaded; try again.", passing=True)


def _from_hub(hub: Hub, only: Only | None, tries: int, deadline: float, watch: Watch) -> Path:
    try:
        chosen = _chosen(hub, only, tries)
    except DownloadFailed as failure:
        return _hubs_former(hub, only, failure)
    arrived, total = 0, sum(file.size_bytes for file in chosen)
    lock = threading.Lock()

    def count(size_bytes: int) -> None:
        nonlocal arrived
        if time.monotonic() > deadline:
            raise DownloadFailed(f"The download of '{hub.shown}' was not finished in time.")
        with lock:
            arrived += size_bytes
            watch(min(arrived, total), total)

    return _asked(hub, lambda: hub.download([file.name for file in chosen], count), tries)


def _hubs_former(hub: Hub, only: Only | None, failure: DownloadFailed) -> Path:
    try:
        folder = hub.cached(lambda names: _names(only, names))
    except Exception:  # the client has many; none says more than the failure
        raise failure from failure.__cause__
    log.warning("%s What the hub's cache has is used.", failure)
    return folder
