"""Arguments of the engine, from words or from files: read and checked by the engine that will take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from penstock.cli.models.options import OPTIONS
from penstock.cli.models.plan import ServePlan
from penstock.config.messages.problems import config_error, nearest, translated
from penstock.engines.check import check_arguments, options_form
from penstock.errors import ConfigError


def read_engine_words(plan: ServePlan) -> ServePlan:
    """The plan with its engine's arguments read and checked. Takes seconds: it may ask the engine itself.

    Raises: ConfigError for what the engine does not know or take.
    """
    if not plan.engine_words:
        if problems := check_arguments(plan.configs).problems:
            raise config_error(problems)
        return plan
    (config,) = plan.configs
    try:
        read = _READERS[config.engine_name](plan.engine_words)
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *_own_options(plan.engine_words)]), error.problems) from None
    return plan.with_engine_arguments(read)


def _own_options(words: Sequence[str]) -> list[str]:
    """A sentence for each word that was perhaps meant for us: what we do not know goes to the engine."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    meant = {flag: option for flag in flags if (option := nearest(flag, OPTIONS))}
    return [f"Or did you mean an option of ours? `penstock serve` has {option}." for option in meant.values()]


def _vllm(words: Sequence[str]) -> dict[str, Any]:
    from penstock.engines.vllm.arguments.check import parse_flags

    return parse_flags(words)


def _form(engine_name: str) -> Callable[[Sequence[str]], dict[str, Any]]:
    """Reads `--name value` or `--name=value`, with the value as YAML reads it, for an engine with a form."""

    def read_words(words: Sequence[str]) -> dict[str, Any]:
        form = options_form(engine_name)
        assert form is not None
        read: dict[str, Any] = {}
        left = list(words)
        while left:
            name, equals, value = left.pop(0).partition("=")
            if not name.startswith("--"):
                raise ConfigError(f"{name!r} belongs to no option. Options of this engine are --name value.")
            if not equals and not left:
                raise ConfigError(f"{name} needs a value.")
            read[name.removeprefix("--").replace("-", "_")] = yaml.safe_load(value if equals else left.pop(0))
        with translated(form):
            form.model_validate(read)
        return read

    return read_words


_READERS: Mapping[str, Callable[[Sequence[str]], dict[str, Any]]] = {
    "process": _form("process"),
    "sglang": _form("sglang"),
    "sim": _form("sim"),
    "vllm": _vllm,
}
