"""`penstock serve --watch`: files whose changes are noticed when they are saved."""

import os
from collections.abc import Iterable

from penstock.cli.models.plan import ServePlan, is_file

Stamp = tuple[int, int, int] | None
"""When it was written, its size, and which file has the name; None for no file."""


class WatchedFiles:
    """Polled, by name: editors rename another file into its place, volumes of Kubernetes swap a link."""

    def __init__(self, sources: Iterable[str], plan: ServePlan) -> None:
        """sources: of the command. plan: made of them."""
        self._sources = [source for source in sources if is_file(source)]
        self._known: dict[str, Stamp] = {}
        self._before: dict[str, Stamp] = {}
        self.read(plan)

    def read(self, plan: ServePlan) -> None:
        """The files that the plan was read from are those to watch."""
        files = {*self._sources, *(config.location.file for config in plan.configs)} - {""}
        self._known = _stamps(files) | {file: self._known[file] for file in files & self._known.keys()}

    def saved(self) -> bool:
        """Whether they differ from what they were when this was last true, and no longer change. To be called
        twice a second.
        """
        before, self._before = self._before, _stamps(self._known)
        is_saved = self._before != self._known and self._before == before and None not in before.values()
        if is_saved:
            self._known = dict(before)
        return is_saved


def _stamps(files: Iterable[str]) -> dict[str, Stamp]:
    return {file: _stamp(file) for file in files}


def _stamp(file: str) -> Stamp:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
