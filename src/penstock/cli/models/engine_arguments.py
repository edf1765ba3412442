"""Arguments of the engine, from words or from files: read and checked by the engine that will take them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from penstock.cli.models.options import CommandOptions
from penstock.cli.models.plan import ServePlan
from penstock.config.loading import yaml_source
from penstock.config.messages.problems import config_error, nearest
from penstock.engines.check import check_arguments, find_unknown, options_form
from penstock.engines.vllm.arguments.check import has_doubts, parse_flags
from penstock.engines.vllm.arguments.names import unknown_flags
from penstock.errors import ConfigError
from penstock.preflight.sizes import Sizes

_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
_KINDS: dict[str, type] = {
    **{field.name: {"b": bool, "f": float, "s": str}.get(str(field.type)[0], int) for field in fields(Sizes)},
    **dict.fromkeys(("tokenizer", "chat_template", "load_format", "runner", "model_impl"), str),
    "skip_tokenizer_init": bool,
    "hf_overrides": dict,
}


def read_engine_words(plan: ServePlan) -> ServePlan:
    """The plan with its engine's arguments read and checked. Takes seconds: it may ask the engine itself.

    Raises: ConfigError for what the engine does not know or take.
    """
    if not plan.engine_words:
        if problems := check_arguments(plan.configs).problems:
            raise config_error(problems)
        return plan
    (config,) = plan.configs
    return plan.with_engine_arguments(_read(config.engine_name, plan.engine_words))


def read_quick_words(plan: ServePlan, command: CommandOptions) -> ServePlan:
    """The plan with what can be read and checked at once; vLLM is asked where a value is probably wrong.

    Raises: ConfigError for what the engine does not know; it names options of `command` that may be meant.
    """
    vllm = [config for config in plan.configs if config.engine_name == "vllm"]
    try:
        if problems := find_unknown(plan.configs) or (unknown_flags(plan.engine_words) if vllm else []):
            raise config_error(problems)
        if plan.engine_words and not vllm:
            return read_engine_words(plan)
    except ConfigError as error:
        raise with_own_options(error, plan.engine_words, command) from None
    return read_engine_words(plan) if not plan.engine_words and has_doubts(vllm) else plan


def quick_values(words: Sequence[str]) -> dict[str, Any]:
    """The values of those flags of vLLM that `preflight` needs, without vLLM's parser, which takes seconds.

    Raises: ConfigError for what is no number, or no mapping.
    """
    found: dict[str, Any] = {}
    for word, after in zip(words, [*words[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        name = _SHORT.get(flag, flag).removeprefix("--").replace("-", "_")
        kind = _KINDS.get(name.removeprefix("no_")) if flag.startswith("-") else None
        if kind is bool:
            found[name.removeprefix("no_")] = not name.startswith("no_")
        elif kind is not None:
            text = value if equals else after
            found[name] = text if kind is str else _read_value(flag, text, kind)
    return found


def _read_value(flag: str, text: str, kind: type) -> Any:
    """A mapping as YAML. A number with a suffix or without: 32k is 32,000, 32K is 32,768; `auto` is -1."""
    if kind is dict:
        if not isinstance(found := yaml_source.parse(text, flag)[0], dict):
            raise ConfigError(f"{flag} is {text!r}; must be a mapping, such as '{{\"name\": 1}}'.")
        return found
    number = re.fullmatch(r"(-?\d{1,15}(?:\.\d+)?)([kKmMgG]?)", "-1" if text == "auto" else text)
    if number is None:
        raise ConfigError(
            f"{flag} is {text!r}; must be a number, such as {kind(8192 if kind is int else 0.9)}."
        )
    power = " kmg".index(number[2].lower() or " ")
    return kind(float(number[1]) * (1000 if number[2].islower() else 1024) ** power)


def with_own_options(error: ConfigError, words: Sequence[str], command: CommandOptions) -> ConfigError:
    """The error, and options of `command` that were perhaps meant: what it has not goes to the engine."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    meant = {flag: option for flag in flags if (option := nearest(flag, command.options))}
    hints = [
        f"Or did you mean an option of ours? `{command.name}` has {option}." for option in meant.values()
    ]
    *others, last = error.problems or (str(error),)
    return config_error([*others, "\n".join([last, *hints])])


def _read(engine_name: str, words: Sequence[str]) -> dict[str, Any]:
    """By vLLM's own parser; for other engines `--name value` or `--name=value`, the value as in YAML."""
    form = options_form(engine_name)
    if form is None:
        return parse_flags(words)
    read: dict[str, Any] = {}
    left = list(words)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"{name!r} belongs to no option. Options of this engine are --name value.")
        if not equals and not left:
            raise ConfigError(f"{name} needs a value.")
        word = value if equals else left.pop(0)
        read[name.removeprefix("--").replace("-", "_")] = yaml_source.parse(word, name)[0]
    form.parse(read)
    return read
