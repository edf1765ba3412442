"""What the user wrote after `penstock serve`. Imports no config, so that `--help` is there at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

DEFAULT_PORT = 8000
YAML = (".yaml", ".yml")
ACCELERATOR_KINDS = ("auto", "cpu", "gpu")
Engine = Literal["vllm", "sglang", "process", "sim"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the user wrote; None where nothing was written."""

    sources: tuple[str, ...] = ()
    engine_words: tuple[str, ...] = ()
    host: str | None = None
    port: int | None = None
    api_key: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    log_format: str | None = None
    served_model_name: str | None = None
    replicas: int | None = None
    engine: str | None = None
    accelerator: str | None = None
    address: str | None = None
    name: str = "penstock"
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class CommandOptions:
    """A command whose unknown options go to the engine, and the options of its own."""

    name: str
    options: tuple[str, ...]


SERVE = CommandOptions(
    "penstock serve",
    tuple(
        f"--{field.name.replace('_', '-')}"
        for field in fields(Arguments)
        if field.name not in ("sources", "engine_words")
    ),
)


def split(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Models or files first; from the first dash on, everything is the engine's."""
    for i, word in enumerate(words):
        if word.startswith("-") and word != "-":
            return tuple(words[:i]), tuple(words[i:])
    return tuple(words), ()
