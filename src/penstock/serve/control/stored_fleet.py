"""Versions of fleets where they outlive their services: below the storage of files and batches.

    fleet/SERVICE-START.json    the versions of one run of a service, the newest first

Each run has a file of its own, so a new service never overwrites what the lost one has left. Stars stand for
secrets. Calls block: use them in threads. Read by commands, so it knows neither Ray nor control's database.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigError, Error, NotFound, Unavailable
from penstock.jobs.storage import JobStorage

log = logging.getLogger(__name__)

APPLYING, APPLIED, SUPERSEDED = "applying", "applied", "superseded"
_FOLDER, _SUFFIX = "fleet", ".json"
_RUNS = 50
_READERS = 16  # files that are read at a time


class FleetVersion(msgspec.Struct, frozen=True):
    """Units: at in seconds since 1970. who: as its sender says. what: in a line. outcome: begins with
    one of the constants above, or is a sentence that says what went wrong.
    """

    version: int
    at: float
    who: str
    what: str
    outcome: str


class StoredVersion(FleetVersion, frozen=True, omit_defaults=True):
    """fleet: its document without secrets. file: URL of the file that has it; not in the file itself."""

    fleet: dict[str, Any]
    file: str = ""


def file_name(service: str, began: float) -> str:
    """Of a run that began at so many seconds since 1970. Names of one service sort by time."""
    return f"{service}-{datetime.fromtimestamp(began, UTC):%Y%m%dT%H%M%S.%fZ}{_SUFFIX}"


def _service(name: str) -> str:
    return name.rpartition("/")[2].rpartition("-")[0]


def write(url: str, name: str, versions: Sequence[StoredVersion]) -> None:
    """Replaces the file of one run; the last 50 runs of its service stay. url: of the storage.

    Raises: Unavailable.
    """
    folder = JobStorage(url).root / _FOLDER
    if folder.is_local:  # for the user only, as control's own database is
        with suppress(OSError):  # writing says why
            Path(folder.url).mkdir(0o700, parents=True, exist_ok=True)
    (folder / name).write(msgspec.json.encode(versions))
    with suppress(Error):  # who may write may not be allowed to list or remove
        runs = [file.name for file in folder.files() if _service(file.name) == _service(name)]
        for old in sorted(runs)[:-_RUNS]:
            (folder / old).remove()


def read(url: str, broken: list[str] | None = None) -> list[StoredVersion]:
    """All versions, the newest first. url: of a storage, or of one of these files. broken: gets the URLs of
    files that cannot be read.

    Raises: NotFound where there are none; Unavailable.
    """
    files, root = [url], JobStorage(url).root.url
    try:
        if not url.endswith(_SUFFIX):
            kept = (JobStorage(url).root / _FOLDER).files()
            names = [one.name for one in kept if one.name.endswith(_SUFFIX)]
            files = [f"{url.rstrip('/')}/{_FOLDER}/{name}" for name in names]
        with ThreadPoolExecutor(_READERS) as pool:
            contents = dict(zip(files, pool.map(_read_file, files), strict=True))
    except OSError as error:
        raise Unavailable(f"'{root}' cannot be read: {error.strerror or error}.") from error
    if broken is not None:
        broken += [JobStorage(file).root.url for file, versions in contents.items() if versions is None]
    found = [one for versions in contents.values() for one in versions or ()]
    if not found:
        raise NotFound(
            f"'{root}' has no versions of a fleet. Name the storage of the service, as "
            "`jobs: {storage: ...}` of its file does; a service without one leaves none."
        )
    return sorted(found, key=lambda one: one.at, reverse=True)


def _read_file(url: str) -> list[StoredVersion] | None:
    path = JobStorage(url).root
    content = path.read()
    try:
        versions = msgspec.json.decode(content, type=list[StoredVersion])
    except msgspec.MsgspecError as error:
        log.warning("'%s' is left out, for it cannot be read: %s.", path.url, error)
        return None
    return [msgspec.structs.replace(one, file=path.url) for one in versions]


def pick(url: str, number: int | None, own: Collection[float]) -> StoredVersion:
    """The version to apply again. number: None for the newest one that did not fail. own: times of versions
    of the service that is to be changed, which are not meant.

    Raises: ConfigError where it is not clear whose; NotFound; Unavailable.
    """
    unread: list[str] = []
    found = [one for one in read(url, unread) if one.at not in own]
    newest = {_service(one.file): one.file for one in reversed(found)}
    unread = [file for file in unread if file > newest.get(_service(file), "")]  # else a newer one is there
    if newest and len(newest) + len(unread) > 1:
        whose = f"the fleets of {len(newest)} services"
        if unread:
            whose = f"a file that cannot be read, and that may be the one meant: {', '.join(unread)}"
        raise ConfigError(f"'{url}' has {whose}. Name the file of one: {', '.join(newest.values())}.")
    if number is None:
        found = [one for one in found if one.outcome in (APPLIED, APPLYING)]
    else:
        found = [one for one in found if one.version == number]
    if not found:
        which = "version that was applied" if number is None else f"version {number}"
        raise NotFound(
            f"'{url}' has no {which}, other than by the running service; `penstock history --from` shows all."
        )
    return found[0]
