"""Reads names, signatures and fields from an installed package's source. Imports nothing of it.

Importing vLLM takes seconds and needs its kernels; reading some twenty of its files takes half a second, also
where it cannot run.
"""

from __future__ import annotations

import ast
import functools
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

_parsing, _TRIES = threading.Lock(), 10

Function = ast.FunctionDef | ast.AsyncFunctionDef


class PackageSource:
    """The source of one package."""

    def __init__(self, folder: Path) -> None:
        """folder: the package's own, such as `site-packages/vllm`."""
        self.folder = folder
        self.text = functools.cache(self._text)
        self._module = functools.cache(self._parsed)

    @classmethod
    def installed(cls, package: str) -> PackageSource | None:
        """The package that this Python would import; None without it."""
        found = find_spec(package)
        return cls(Path(found.origin).parent) if found and found.origin else None

    def find(self, reference: str) -> ast.AST | None:
        """The definition of a name. reference: `v1.engine.core:EngineCoreProc.step`, below the package.

        An attribute that a method sets on `self`, or a class body annotates, is a definition, too; so is what
        a base class has, as far as bases are in this package.
        """
        module, _, path = reference.partition(":")
        owner, *names = path.split(".")
        found = self._top(module, owner)
        for name in names:
            if found is None or not isinstance(found[1], ast.ClassDef):
                return None
            found = self._member(*found, name)
        return found[1] if found else None

    def fields(self, reference: str) -> list[str] | None:
        """The annotated fields of a class, its bases' first; None without the class."""
        module, _, name = reference.partition(":")
        found = self._top(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        return [
            node.target.id
            for _, owner in reversed(list(self._with_bases(found[0], found[1])))
            for node in owner.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]

    def _text(self, module: str) -> str | None:
        base = self.folder.joinpath(*filter(None, module.split(".")))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file.read_text()
        return None

    def _parsed(self, module: str) -> ast.Module | None:
        text = self.text(module)
        return syntax_tree(text) if text is not None else None

    def _top(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """A definition at a module's top, followed through imports inside the package."""
        parsed = self._module(module)
        for node in _statements(parsed.body) if parsed else ():
            if name in _names(node):
                return module, node
            if isinstance(node, ast.ImportFrom) and (origin := self._origin(module, node)) is not None:
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self._top(origin, alias.name)
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str | None:
        """The module that is imported from, below the package; None outside of it."""
        package = self.folder.name
        if node.level == 0:
            inside = node.module == package or (node.module or "").startswith(f"{package}.")
            return (node.module or "")[len(package) + 1 :] if inside else None
        is_package = (self.folder.joinpath(*module.split(".")) / "__init__.py").is_file()
        above = module.split(".")[: len(module.split(".")) - node.level + is_package]
        return ".".join([*above, *filter(None, [node.module])])

    def _with_bases(self, module: str, owner: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        yield module, owner
        for base in owner.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base
            found = self._top(module, inner.id) if isinstance(inner, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield from self._with_bases(found[0], found[1])

    def _member(self, module: str, node: ast.AST, name: str) -> tuple[str, ast.AST] | None:
        assert isinstance(node, ast.ClassDef)
        for where, owner in self._with_bases(module, node):
            for statement in owner.body:
                if name in _names(statement):
                    return where, statement
            for method in owner.body:
                if isinstance(method, Function) and (found := _set_on_self(method, name)):
                    return where, found
        return None


def syntax_tree(text: str) -> ast.Module:
    """As `ast.parse`. CPython 3.11 counts depth for all threads together, and may raise when two parse."""
    with _parsing:
        for _ in range(_TRIES):
            with suppress(SystemError):  # a thread that is not ours parses, too
                return ast.parse(text)
            time.sleep(0.01)
        return ast.parse(text)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Also those below a top-level `if` or `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _names(node: ast.AST) -> set[str]:
    """What a statement defines."""
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    return {name.id for one in _targets(node) for name in ast.walk(one) if isinstance(name, ast.Name)}


def _set_on_self(method: Function, name: str) -> ast.AST | None:
    for node in ast.walk(method):
        if any(isinstance(one, ast.Attribute) and one.attr == name for one in _targets(node)):
            return node
    return None


def _targets(node: ast.AST) -> list[ast.expr]:
    """What an assignment assigns to."""
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    return node.targets if isinstance(node, ast.Assign) else []
