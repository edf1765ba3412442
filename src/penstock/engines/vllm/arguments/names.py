"""The names of vLLM's arguments, read from its source: vLLM itself is not imported, which takes seconds.

What is unknown here is unknown to vLLM. Values, and names that could be abbreviations, are left to `check`.
"""

from __future__ import annotations

import ast
import functools
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from penstock.config import LLMConfig
from penstock.config.messages.problems import unknown
from penstock.engines.vllm.arguments.refused import REFUSED

HELP = "`python -m vllm.entrypoints.openai.api_server --help=all` lists all."

_SOURCES = ("engine/arg_utils.py", "entrypoints/**/cli_args.py")
_CLASSES = ("AsyncEngineArgs", "FrontendArgs")
_FLAG = re.compile(r"--[a-z0-9][a-z0-9_-]*")
_PLUGINS = "vllm.platform_plugins"  # a platform may add arguments of its own


def unknown_arguments(configs: Sequence[LLMConfig]) -> list[str]:
    """A sentence for each key of `engine_kwargs` that vLLM or Penstock refuses, as far as that is known."""
    there = known()
    return [
        (config.location / "engine_kwargs" / name).says(text)
        for config in configs
        for name in (config.engine_kwargs if there else ())
        if (text := _refusal(name, there)) is not None
    ]


def unknown_flags(words: Sequence[str]) -> list[str]:
    """A sentence for each flag that `vllm serve` has not; none where that cannot be known."""
    there = known()
    flags = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    named = [f"--{name.replace('_', '-')}" for name in _ours(there)]
    return [unknown("flag", flag, named, HELP) for flag in flags if there and not _may_be(flag, there)]


def _refusal(name: str, there: Iterable[str]) -> str | None:
    return REFUSED.get(name) if name in there else unknown("vLLM argument", name, _ours(there), HELP)


def _ours(there: Iterable[str]) -> list[str]:
    return [name for name in there if name not in REFUSED]


def _may_be(flag: str, there: Iterable[str]) -> bool:
    """Whether `flag` is a known one: whole, shortened, negated, or with a path inside it."""
    name = flag[2:].partition(".")[0].rstrip("+").replace("-", "_")
    return any(one.startswith((name, name.removeprefix("no_"))) for one in there)


_parsing, _TRIES = threading.Lock(), 10


@functools.cache
def known() -> frozenset[str]:
    """Every argument and flag of the installed vLLM, as identifiers; empty where its source does not say."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations or entry_points(group=_PLUGINS):
        return frozenset()
    root = Path(found.submodule_search_locations[0])
    try:
        trees = [syntax_tree(file.read_text()) for pattern in _SOURCES for file in root.glob(pattern)]
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    fields = [_fields(name, classes) for name in _CLASSES]
    if not all(fields):
        return frozenset()
    return frozenset().union(*fields, *(_flags(tree) for tree in trees))


def syntax_tree(text: str) -> ast.Module:
    """As `ast.parse`. CPython 3.11 counts depth for all threads together, and may raise when two parse."""
    with _parsing:
        for _ in range(_TRIES):
            with suppress(SystemError):  # a thread that is not ours parses, too
                return ast.parse(text)
            time.sleep(0.01)
        return ast.parse(text)


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> frozenset[str]:
    """The fields of a dataclass and of its bases; empty when one of them is not among `classes`."""
    found: set[str] = set()
    left = [name]
    while left:
        node = classes.get(left.pop())
        if node is None:
            return frozenset()
        found |= {
            field.target.id
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        left += [base.id if isinstance(base, ast.Name) else "" for base in node.bases]
    return frozenset(found)


def _flags(tree: ast.Module) -> Iterator[str]:
    """Flags that are written out, such as `--config`, which is a field of no class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _FLAG.fullmatch(node.value):
            yield node.value[2:].replace("-", "_")
