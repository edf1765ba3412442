"""A YAML file as data, with the line of every key. Knows nothing of models or engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

import yaml

from penstock.config.messages.location import Location, Path
from penstock.config.messages.problems import config_error, nearest
from penstock.errors import ConfigError

Source = tuple[Any, Location]
"""What a file says, and its own location, with the lines of its keys."""


def read(
    name: str | os.PathLike[str], folder: File | None = None, *, twice: list[str] | None = None
) -> Source:
    """Reads a file; a relative name is looked for in `folder`, then in the working directory.

    twice: takes the sentences about keys that are given twice, which are otherwise an error.
    Raises: ConfigError for a missing or unreadable file, bad YAML, or a key that is given twice.
    """
    return read_at(find(os.fspath(name), folder), twice=twice)


def read_at(file: File, *, twice: list[str] | None = None) -> Source:
    """Reads a file once, which may be a pipe. twice and errors as of `read`."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text (byte {error.start}).") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}.") from error
    return parse(text, str(file), twice=twice)


def find(name: str, folder: File | None = None) -> File:
    """The existing file that `name` means.

    Raises: ConfigError naming the nearest existing file.
    """
    try:
        return _found(name, folder)
    except OSError as error:  # in a folder that is closed to this user, or with a name that is too long
        raise ConfigError(f"{name}: cannot be read: {error.strerror}.") from error


def _found(name: str, folder: File | None) -> File:
    candidates = [File(name)] if folder is None else [folder / name, File(name)]
    for file in candidates:
        if file.is_file():
            return file
    for file in candidates:
        if file.is_dir():
            raise ConfigError(f"{file}: is a folder; name a YAML file in it.")
    looked = " and ".join(dict.fromkeys(str(file.absolute().parent) for file in candidates))
    guess = next((found for file in candidates if (found := _neighbour(file))), None)
    raise ConfigError(f"{name}: no such file in {looked}." + (f" Did you mean '{guess}'?" if guess else ""))


def _neighbour(file: File) -> File | None:
    """The file with the likeliest name in the same folder."""
    if not file.parent.is_dir():
        return None
    names = [entry.name for entry in file.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    guess = nearest(file.name, names)
    return file.parent / guess if guess else None


def parse(text: str, file: str, *, twice: list[str] | None = None) -> Source:
    """The data of one YAML document; `file` is its name for messages. twice: as of `read`.

    Raises: ConfigError for bad YAML, and for every key that is given twice.
    """
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        shown = f"U+{error.character:04X}"
        raise ConfigError(f"{file}: is not YAML: it has the character {shown}; leave it out.") from error
    try:
        reading = _Reading(loader, file)
        node = loader.get_single_node()
        data = None if node is None else reading.value(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        raise ConfigError(f"{at}: is not valid YAML: {error.problem}.") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: is nested too deeply.") from error
    except Exception as error:  # PyYAML's own, of many kinds: a date in month 13, `!!bool maybe`, `!!int ''`
        raise ConfigError(f"{file}: is not valid YAML: {error}.") from error
    finally:
        loader.dispose()
    if reading.twice and twice is None:
        raise config_error(reading.twice)
    if twice is not None:
        twice += reading.twice
    return data, Location(file, (), reading.lines)


@dataclass(slots=True)
class _Reading:
    loader: yaml.SafeLoader
    file: str
    lines: dict[Path, int] = field(default_factory=dict[Path, int])
    twice: list[str] = field(default_factory=list[str])
    open: list[yaml.Node] = field(default_factory=list[yaml.Node])

    def value(self, node: yaml.Node, path: Path) -> Any:
        """What the node says; notes the lines of all keys below `path`."""
        if any(node is outer for outer in self.open):
            raise yaml.MarkedYAMLError(problem="an alias refers to itself", problem_mark=node.start_mark)
        self.open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return {key: self.value(child, (*path, key)) for key, child in self._entries(node, path)}
            if isinstance(node, yaml.SequenceNode):
                return [self._item(child, (*path, i)) for i, child in enumerate(node.value)]
            return self._scalar(node)
        finally:
            self.open.pop()

    def _scalar(self, node: yaml.Node) -> Any:
        """What it says. JSON, which is YAML, writes an emoji as two escapes, which PyYAML leaves apart."""
        found = self.loader.construct_object(node)
        if not isinstance(found, str) or found.isascii():
            return found
        try:
            return found.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            problem = "it has half of a character: an escape from \\ud800 to \\udfff alone"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

    def _item(self, node: yaml.Node, path: Path) -> Any:
        self.lines[path] = node.start_mark.line + 1
        return self.value(node, path)

    def _entries(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[str, yaml.Node]]:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        self._note(own, path)
        self.loader.flatten_mapping(node)  # `<<: *defaults`
        for key, child in node.value:
            yield self._name(key), child

    def _note(self, keys: list[yaml.Node], path: Path) -> None:
        first: dict[str, int] = {}
        for key in keys:
            name, line = self._name(key), key.start_mark.line + 1
            if name in first:
                where = Location(self.file, (*path, name), {(*path, name): line})
                self.twice.append(where.says(f"is given twice; the first is in line {first[name]}."))
            first.setdefault(name, line)
            self.lines[*path, name] = line

    def _name(self, key: yaml.Node) -> str:
        if isinstance(key, yaml.ScalarNode):
            return str(self._scalar(key))
        raise yaml.MarkedYAMLError(problem="a key must be a plain name", problem_mark=key.start_mark)
