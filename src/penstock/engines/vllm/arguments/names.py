"""The names of vLLM's arguments, read from its source: vLLM itself is not imported, which takes seconds.

What is unknown here is unknown to vLLM. Values, and names that could be abbreviations, are left to `check`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points

from penstock.config import LLMConfig
from penstock.config.messages.problems import unknown
from penstock.engines.vllm.arguments.refused import REFUSED
from penstock.engines.vllm.arguments.source import PackageSource, syntax_tree

HELP = "`python -m vllm.entrypoints.openai.api_server --help=all` lists all."

_SOURCES = ("engine/arg_utils.py", "entrypoints/**/cli_args.py")
_CLASSES = ("AsyncEngineArgs", "FrontendArgs")
_FLAG = re.compile(r"--[a-z0-9][a-z0-9_-]*")
_REGISTRY, _DROPPED = "model_executor.models.registry", "_PREVIOUSLY_SUPPORTED_MODELS"
_CHOICES = {
    "dtype": ("config.model", "ModelDType"),
    "quantization": ("model_executor.layers.quantization", "QuantizationMethods"),
}
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


@functools.cache
def known() -> frozenset[str]:
    """Every argument and flag of the installed vLLM, as identifiers; empty where its source does not say."""
    source = PackageSource.installed("vllm")
    if source is None or entry_points(group=_PLUGINS):
        return frozenset()
    files = [file for pattern in _SOURCES for file in source.folder.glob(pattern)]
    modules = [".".join(file.relative_to(source.folder).with_suffix("").parts) for file in files]
    try:
        fields = [
            set[str]().union(*(source.fields(f"{module}:{name}") or () for module in modules))
            for name in _CLASSES
        ]
        flags = [name for file in files for name in _flags(syntax_tree(file.read_text()))]
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    return frozenset(flags).union(*fields) if all(fields) else frozenset()


@functools.cache
def architectures() -> tuple[frozenset[str], Mapping[str, str]]:
    """The architectures that the installed vLLM runs, and those it has dropped, with the version that did.

    None where that cannot be known: other plugins may bring architectures of their own.
    """
    tables = {
        name: value
        for name, value in _assigned(_REGISTRY)
        if name.endswith("_MODELS") and isinstance(value, ast.Dict)
    }
    gone = tables.pop(_DROPPED, ast.Dict([], []))
    names = (key.value for table in tables.values() for key in table.keys if isinstance(key, ast.Constant))
    return frozenset(map(str, names)), ast.literal_eval(gone)


@functools.cache
def choices() -> Mapping[str, Sequence[str]]:
    """What the installed vLLM takes for arguments that name one of a list; empty where that is not known."""
    found: dict[str, Sequence[str]] = {}
    for argument, (module, name) in _CHOICES.items():
        if (listed := dict(_assigned(module)).get(name)) is not None:
            values = (one.value for one in ast.walk(listed) if isinstance(one, ast.Constant))
            found[argument] = [value for value in values if isinstance(value, str)]
    return found


def _assigned(module: str) -> Iterator[tuple[str, ast.expr]]:
    """What one of vLLM's modules defines; nothing where other packages add what its source does not say."""
    source, plugins = PackageSource.installed("vllm"), entry_points(group="vllm.general_plugins")
    foreign = any(one.value.partition(".")[0] not in ("vllm", "penstock") for one in plugins)
    text = source.text(module) if source and not foreign else None
    for node in syntax_tree(text).body if text else ():
        if isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0]), node.value


def _flags(tree: ast.Module) -> Iterator[str]:
    """Flags that are written out, such as `--config`, which is a field of no class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _FLAG.fullmatch(node.value):
            yield node.value[2:].replace("-", "_")
