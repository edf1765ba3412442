"""Checks arguments with vLLM without importing it here: one short process for all configs.

It takes five seconds and more, so answers are cached. The first answer includes the schemas of plain
arguments (numbers, names, flags): valid ones need no further question, whatever their values.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from pydantic_core import SchemaValidator, ValidationError

from penstock.config import LLMConfig
from penstock.config.messages.location import Location
from penstock.config.messages.problems import config_error
from penstock.engines.vllm.arguments import answer_cache
from penstock.engines.vllm.arguments.defaults import lora_faults
from penstock.errors import EngineStartFailed

_TIME_LIMIT_S = 180.0
_PLAIN = "plain arguments"
"""The cache key of their schemas."""

_OPAQUE = "__opaque__"
_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Findings:
    """Problems prevent a start; notices say what could not be checked."""

    problems: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def check_arguments(configs: Sequence[LLMConfig]) -> Findings:
    """What vLLM rejects in the `engine_kwargs` of these configs, each with its place.

    Raises: EngineStartFailed when vLLM is installed but cannot be imported.
    """
    asked = [config for config in configs if config.engine_kwargs]
    if not asked:
        return Findings()
    if not installed():
        ids = ", ".join(repr(config.model_id) for config in asked)
        why = "are not checked: vLLM is not installed here. The replica will check them."
        return Findings(notices=(f"engine_kwargs of {ids} {why}",))
    problems = [
        located(config.location / "engine_kwargs", path, text)
        for config, faults in zip(asked, _faults(asked), strict=True)
        for path, text in faults
    ]
    problems += [text for config in asked for text in lora_faults(config)]
    return Findings(tuple(problems))


def has_doubts(configs: Sequence[LLMConfig]) -> bool:
    """Whether a value does not fit its schema, as far as schemas are cached: it is wrong, or nearly."""
    plain = answer_cache.find(_PLAIN) or {}
    return any(
        name in plain and not _fits(plain[name], value)
        for config in configs
        for name, value in config.engine_kwargs.items()
    )


def _faults(configs: Sequence[LLMConfig]) -> list[list[tuple[list[str | int], str]]]:
    """Problems in the arguments of each, by path. Asks vLLM about those that are not certainly valid."""
    plain = answer_cache.find(_PLAIN) or {}
    doubted = [
        {name: value for name, value in config.engine_kwargs.items() if not _fits(plain.get(name), value)}
        for config in configs
    ]
    if not any(doubted):
        return [[] for _ in configs]
    answer = _ask({"engine_kwargs": doubted})
    answer_cache.keep(_PLAIN, answer["plain"])
    return answer["faults"]


def _fits(schema: Any, value: object) -> bool:
    """Whether the value is certainly valid. schema: pydantic's, as JSON; None where there is none."""
    if schema is None:
        return False
    try:
        SchemaValidator(schema).validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError):
        return False
    return True


def is_dense(config: LLMConfig) -> bool:
    """Whether vLLM finds no experts in the model; False for one that cannot be read from here."""
    question = {"model": config.model_source, "engine_kwargs": config.engine_kwargs}
    return installed() and not _fresh(question)["experts"]


def parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    """`vllm serve`'s flags (without model, host, port and key) as engine_kwargs.

    Raises: ConfigError with every unknown flag, or the first value that does not fit;
    EngineStartFailed when vLLM is not installed here or cannot be imported.
    """
    if not argv:
        return {}
    if not installed():
        raise EngineStartFailed(
            "vLLM is not installed here, so its flags cannot be read; write them as engine_kwargs in YAML."
        )
    answer = _ask({"argv": list(argv)})
    if answer["problems"]:
        raise config_error(answer["problems"])
    return answer["kwargs"]


def installed() -> bool:
    """Whether this Python has vLLM. Imports nothing."""
    return find_spec("vllm") is not None


def located(location: Location, path: Sequence[str | int], text: str) -> str:
    """`text` after the location of `path` below `location`."""
    return Location(location.file, (*location.path, *path), location.lines).says(text)


def to_json(value: object) -> str:
    """JSON in which a mapping stands for each Python object: such values are not looked into."""
    return json.dumps(value, default=lambda thing: {_OPAQUE: type(thing).__name__})


def is_opaque(value: object) -> bool:
    """Whether a Python object is somewhere in this value, which came from JSON."""
    return f'"{_OPAQUE}"' in json.dumps(value)


def _ask(question: Mapping[str, Any]) -> dict[str, Any]:
    text = to_json(question)
    cached = answer_cache.find(text)
    if cached is not None:
        return cached
    answer = _fresh(question)
    answer_cache.keep(text, answer)
    return answer


def _fresh(question: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "penstock.engines.vllm.arguments.respond"]
    try:
        done = subprocess.run(
            command,
            input=to_json(question),
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_S,
            env=_ENVIRONMENT | os.environ,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineStartFailed(f"vLLM gave no answer about its arguments in {_TIME_LIMIT_S:g} s.") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EngineStartFailed(f"vLLM is installed but cannot be asked about its arguments: {reason}")
    return json.loads(done.stdout)
