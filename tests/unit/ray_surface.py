"""The public surface of a module of the installed Ray, read from its source without importing it.

Walks the names that a module exports, and follows their base classes through Ray's own files: importing
`ray.data.llm` or `ray.serve.llm` would import vLLM and more. Bases outside Ray end the walk.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Kind = Literal["class", "function", "method", "property", "field", "constant"]

_VALIDATORS = {"field_validator", "model_validator", "validator", "root_validator"}


@dataclass(frozen=True, slots=True)
class Entry:
    """signature: arguments with their defaults, without annotations, `self` and `cls`: `(name, *, depth=1)`;
    of a class those of its constructor, "" where it writes none. Of a field its default, or "required".
    """

    kind: Kind
    signature: str


def surface(module: str) -> dict[str, Entry]:
    """Entries by their names below `module`, members inherited within Ray included: `Config.field`,
    `build`; those of a package's public modules too: `deployment.Server.start`.
    """
    found = dict(_entries(module))
    path = _path(module)
    if path.name == "__init__.py":
        for inner in sorted(path.parent.glob("*.py")):
            if not inner.name.startswith("_"):
                found |= {f"{inner.stem}.{name}": entry for name, entry in _entries(f"{module}.{inner.stem}")}
    return found


def _entries(module: str) -> Iterator[tuple[str, Entry]]:
    for name in _exported(module):
        found = _definition(module, name)
        if found is None:
            yield name, Entry("constant", "")
        elif isinstance(found[1], ast.ClassDef):
            members = _members(*found)
            own = members.pop("__init__", None)
            yield name, Entry("class", own.signature if own else "")
            yield from ((f"{name}.{member}", entry) for member, entry in members.items())
        else:
            yield name, Entry("function", _arguments(found[1]))


def _members(module: str, node: ast.ClassDef) -> dict[str, Entry]:
    """Public members and `__init__` by name, in the order of bases first."""
    members: dict[str, Entry] = {}
    for base in reversed(node.bases):
        found = _definition(module, ast.unparse(base).partition("[")[0])
        if found and isinstance(found[1], ast.ClassDef):
            members |= _members(*found)
    for statement in node.body:
        for name, entry in _member(statement):
            if not name.startswith("_") or name == "__init__":
                members[name] = entry
    return members


def _member(statement: ast.stmt) -> Iterator[tuple[str, Entry]]:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        if "ClassVar" not in ast.unparse(statement.annotation):
            yield statement.target.id, Entry("field", _default(statement.value))
    elif isinstance(statement, ast.Assign):
        names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
        yield from ((name, Entry("constant", "")) for name in names if name != "model_config")
    elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        kinds = {ast.unparse(mark).partition("(")[0].rpartition(".")[2] for mark in statement.decorator_list}
        if kinds & {"property", "cached_property"}:
            yield statement.name, Entry("property", "")
        elif not kinds & _VALIDATORS:
            yield statement.name, Entry("method", _arguments(statement, bound="staticmethod" not in kinds))


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool = False) -> str:
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    for argument in ast.walk(arguments.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    text = ast.unparse(arguments.args)
    return f"({text.partition(',')[2].strip() if bound else text})"


def _default(value: ast.expr | None) -> str:
    if not isinstance(value, ast.Call):
        return "required" if value is None else ast.unparse(value)
    if ast.unparse(value.func).rpartition(".")[2] != "Field":
        return ast.unparse(value)
    named = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
    if value.args:
        named["default"] = ast.unparse(value.args[0])
    return named.get("default", named.get("default_factory", "required")).replace("...", "required")


def _exported(module: str) -> list[str]:
    """The names in `__all__`; without it the public definitions."""
    for statement in _tree(module).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    names = [one.name for one in _tree(module).body if isinstance(one, Definition)]
    return [name for name in names if not name.startswith("_")]


def _definition(module: str, name: str) -> tuple[str, Definition] | None:
    """Where the name is defined, followed through imports; None outside Ray, and for values."""
    for statement in _tree(module).body:
        if isinstance(statement, Definition) and statement.name == name:
            return module, statement
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    source = _absolute(module, node)
                    return _definition(source, alias.name) if source.split(".")[0] == "ray" else None
    return None


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module if _path(module).name == "__init__.py" else module.rpartition(".")[0]
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, *filter(None, [node.module])])


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text())


def _path(module: str) -> Path:
    spec = find_spec("ray")  # of a top-level package: it is found, not imported
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0], *module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
