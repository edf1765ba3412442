"""`python -m penstock.engines.vllm.arguments.respond`, started by `check`: answers one question and exits.

`vllm serve`'s flags are read as `engine_kwargs` here, by vLLM's own parser.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from pydantic import TypeAdapter
from vllm.utils.argparse_utils import FlexibleArgumentParser

from penstock.config.messages.location import Path
from penstock.config.messages.problems import unknown
from penstock.config.messages.type_names import shape
from penstock.engines.vllm.arguments.names import HELP
from penstock.engines.vllm.arguments.refused import REFUSED
from penstock.engines.vllm.arguments.schema import (
    cli_args,
    engine_arguments,
    faults,
    frontend_arguments,
    has_experts,
    plain,
)


class _Refusal(Exception):
    """What argparse would print before it exits."""


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refusal(message)


def parse(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """`vllm serve`'s flags as engine_kwargs (what differs from the defaults), and what is wrong with them."""
    parser = cast("_Parser", cli_args.make_arg_parser(_Parser(add_help=False)))
    _keep_json(parser)
    try:
        given = vars(parser.parse_args(list(argv)))
    except _Refusal as refusal:
        return {}, _told_by_argparse(str(refusal))
    except (OSError, ValueError) as error:  # the file of --config
        return {}, [f"--config: {error}."]
    except IndexError:
        return {}, [f"{argv[-1]}: expected one argument."]
    defaults = vars(parser.parse_args([]))
    if given["model_tag"] is not None:
        return {}, [f"unexpected argument {given['model_tag']!r}; flags start with --."]
    kwargs = {name: _plain(name, value) for name, value in given.items() if value != defaults[name]}
    return kwargs, [f"{_flag(path)}: {text}" for path, text in faults(kwargs)]


def _keep_json(parser: FlexibleArgumentParser) -> None:
    """Makes flags of config objects keep the JSON as given; `faults` validates it.

    vLLM's objects draw ids when created, and replicas must not share one.
    """
    arguments = engine_arguments()
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]  # argparse has no public way
        if action.dest in arguments and shape(arguments[action.dest].annotation) and callable(action.type):
            action.type = functools.partial(_json, action.type)


def _json(parse_text: Callable[[str], Any], text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        with contextlib.suppress(argparse.ArgumentTypeError):  # vLLM reads numbers such as 80m inside JSON
            value = parse_text(text)
            return TypeAdapter(type(value)).dump_python(value, mode="json", exclude_defaults=True)
        raise argparse.ArgumentTypeError(f"is not valid JSON: {error}") from error


def _plain(name: str, value: Any) -> Any:
    """The value as YAML has it."""
    if name == "optimization_level":  # the one number that vLLM's parser leaves a string
        return int(value)
    if name == "lora_modules":
        return [dataclasses.asdict(module) for module in value]
    if isinstance(value, enum.Enum):
        return value.name
    return sorted(value) if isinstance(value, set) else value


def _flag(path: Path) -> str:
    name, *inside = (str(part) for part in path)
    return ".".join([f"--{name.replace('_', '-')}", *inside])


def _told_by_argparse(message: str) -> list[str]:
    arguments = frontend_arguments() | engine_arguments()
    if message.startswith("unrecognized arguments:"):
        flags = [_flag((name,)) for name in arguments.keys() - REFUSED.keys()]
        given = [word.partition("=")[0] for word in message.split()[2:] if word.startswith("-")]
        return [unknown("flag", flag, flags, HELP) for flag in given] or [message]
    said = re.match(r"argument (\S+): (.*)", message)
    if said is None:
        return [f"{message}."]
    flag = next((name for name in said[1].split("/") if name.startswith("--")), said[1])
    value = re.match(
        r"(?:invalid choice: |invalid .* value: |Value )'?(.*?)'?(?: \(choose| cannot be|$)", said[2]
    )
    argument = arguments.get(flag[2:].replace("-", "_"))
    return [f"{flag}: {argument.misfit(value[1]) if argument and value else said[2] + '.'}"]


def main() -> None:
    """One JSON question on stdin, one JSON answer on stdout; whatever vLLM prints goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    question = json.load(sys.stdin)
    if "argv" in question:
        kwargs, problems = parse(question["argv"])
        json.dump({"kwargs": kwargs, "problems": problems}, answer)
    elif "model" in question:
        json.dump({"experts": has_experts(**question)}, answer)
    else:
        found = [faults(kwargs) for kwargs in question["engine_kwargs"]]
        json.dump({"faults": found, "plain": plain()}, answer)
    answer.close()


if __name__ == "__main__":
    main()
