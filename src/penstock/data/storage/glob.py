"""From a path, a folder or a pattern to files."""

from __future__ import annotations

import fnmatch
import os

from penstock.data.storage.paths import StoragePath, storage_path
from penstock.errors import SourceNotFound
from penstock.sources.protocol import File, shown

_MAGIC = "*?["


def expand_glob(pattern: str | os.PathLike[str]) -> list[tuple[StoragePath, File]]:
    """The files at a path, below a folder, or matched by a pattern, in order; `File.name` is "" for a path.

    A file whose name has `*`, `?` or `[` is found by that name. `*` does not match `/`; `**` matches any
    number of folders. Raises: SourceNotFound when there is none.
    """
    text = os.fspath(pattern)
    whole = storage_path(text)
    if not any(mark in text for mark in _MAGIC) or whole.exists():
        root, wanted = whole, ["**"]
    else:
        base = text
        while any(mark in base for mark in _MAGIC) and "/" in base:
            base = base.rpartition("/")[0]
        base = "." if any(mark in base for mark in _MAGIC) else base
        root, wanted = storage_path(base), text.removeprefix(base).strip("/").split("/")
    files = [
        (root / file.name if file.name else root, file)
        for file in root.files()
        if not file.name or _matches(file.name.split("/"), wanted)
    ]
    if not files:
        raise SourceNotFound(f"There is no file at '{shown(text)}'.")
    return files


def _matches(names: list[str], wanted: list[str]) -> bool:
    """Whether the components of a path match those of a pattern; `**` matches any number of them.

    Files that hold no data match only by their own first character or ending: `_SUCCESS`, `.crc` files,
    journals of earlier runs.
    """
    if not wanted or not names:
        return not names and all(one == "**" for one in wanted)
    name, pattern = names[0], wanted[0]
    if name.startswith(("_", ".")) and not pattern.startswith(name[0]):
        return False
    if name.endswith(".journal") and not pattern.endswith(".journal"):
        return False
    if pattern == "**":
        return _matches(names, wanted[1:]) or _matches(names[1:], wanted)
    return fnmatch.fnmatchcase(name, pattern) and _matches(names[1:], wanted[1:])
