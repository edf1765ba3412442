"""Files of a fleet whose changes are noticed when they are saved."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.config.loading import yaml_source
from penstock.config.loading.serving_args import FORMS
from penstock.errors import ConfigError

Stamp = tuple[int, int, int] | None
"""When it was written, its size, and which file has the name; None for no file."""


class WatchedFiles:
    """Polled, by name: editors rename another file into its place, volumes of Kubernetes swap a link."""

    def __init__(self, sources: Iterable[str]) -> None:
        """sources: files of the fleet, each with those that it names."""
        self._sources = list(sources)
        self._known: dict[str, Stamp] = {}
        self._before: dict[str, Stamp] = {}
        self.look()

    def look(self) -> None:
        """Watches the sources, and the files that they name now, faulty and missing ones, too. To be called
        before they are read, so that what is written meanwhile is noticed.
        """
        files = {*self._sources, *(file for source in self._sources for file in _named(source))}
        self._known = _stamps(files) | {file: self._known[file] for file in files & self._known.keys()}

    def saved(self) -> bool:
        """Whether they differ from what they were when this was last true, or are gone, and no longer change.
        To be called twice a second.
        """
        before, self._before = self._before, _stamps(self._known)
        is_saved = self._before != self._known and self._before == before
        if is_saved:
            self._known = dict(before)
        return is_saved


def _named(source: str) -> Iterator[str]:
    """The files of its models; none of one that is no YAML."""
    with suppress(ConfigError):
        for name in _names(yaml_source.read(source, twice=[])[0]):
            folder = Path(source).parent
            file = folder / name
            with suppress(ConfigError):
                file = yaml_source.find(name, folder)
            yield str(file)


def _names(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, list):
        for entry in data:
            yield from _names(entry)
    elif isinstance(data, Mapping):
        for key in {"applications", "args", *FORMS} & data.keys():
            yield from _names(data[key])


def _stamps(files: Iterable[str]) -> dict[str, Stamp]:
    return {file: _stamp(file) for file in files}


def _stamp(file: str) -> Stamp:
    try:
        found = os.stat(file)
    except (OSError, ValueError):  # a name that no file can have
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
