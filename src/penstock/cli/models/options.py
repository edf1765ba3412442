"""Options that several commands have, and those of `penstock serve`.

Imports no config, so that `--help` is there at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, Literal, get_origin

import typer

DEFAULT_PORT = 8000
YAML = (".yaml", ".yml")
ACCELERATOR_KINDS = ("auto", "cpu", "gpu")
Engine = Literal["vllm", "sglang", "process", "sim"]
LogFormat = Literal["text", "json"]

HERE = f"http://127.0.0.1:{DEFAULT_PORT}"
API_KEY_NAMES = ["PENSTOCK_API_KEY", "VLLM_API_KEY"]
"""As for the gateway (`config.schema.settings`)."""
KEY_HINT = "Give the key with --api-key or in PENSTOCK_API_KEY."

Url = Annotated[str, typer.Option(help="Address of the service.")]
Key = Annotated[str | None, typer.Option(help="Key of the service.", envvar=API_KEY_NAMES)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the user wrote; None where nothing was written."""

    sources: tuple[str, ...] = ()
    engine_words: tuple[str, ...] = ()
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None
    port: Annotated[
        int | None,
        typer.Option(help="Port to listen on.", min=1, max=65535, show_default=str(DEFAULT_PORT)),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that clients must send. Prefer PENSTOCK_API_KEY: other users can see arguments."
        ),
    ] = None
    tls_cert: Annotated[
        str | None, typer.Option(help="PEM file of a certificate: HTTPS. Read again when it changes.")
    ] = None
    tls_key: Annotated[str | None, typer.Option(help="PEM file of its private key.")] = None
    served_model_name: Annotated[str | None, typer.Option(help="Name that clients use for MODEL.")] = None
    replicas: Annotated[int | None, typer.Option(help="Replicas of each model.", min=1)] = None
    engine: Annotated[
        Engine | None,
        typer.Option(
            help="`process` runs any OpenAI-compatible server as a child, `sim` is a simulator.",
            case_sensitive=False,
            show_default="vllm",
        ),
    ] = None
    accelerator: Annotated[
        str | None, typer.Option(help="`cpu`, `gpu`, or Ray's name of a GPU type (L4, A10G, H100, ...).")
    ] = None
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster to use (host:port, or auto); it keeps running afterwards.", envvar="RAY_ADDRESS"
        ),
    ] = None
    name: Annotated[str, typer.Option(help="Name of the Serve application.")] = "penstock"
    log_format: Annotated[
        LogFormat | None, typer.Option(help="Format of log lines.", show_default="text")
    ] = None
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what Ray and the engines print.")] = False


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


def by_fields(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """The same command for typer: annotated fields of the dataclasses that it takes are its options."""
    signature = inspect.signature(command, eval_str=True)
    options: list[inspect.Parameter] = []
    shapes: dict[str, tuple[type, list[str]]] = {}
    for name, taken in signature.parameters.items():
        found = [taken]
        if isinstance(shape := taken.annotation, type) and is_dataclass(shape):
            inside = inspect.signature(shape, eval_str=True).parameters.values()
            found = [one for one in inside if get_origin(one.annotation) is Annotated]
            shapes[name] = shape, [one.name for one in found]
        options += found

    @wraps(command)
    def run(**given: Any) -> int | None:
        for name, (shape, written) in shapes.items():
            given[name] = shape(**{field: given.pop(field) for field in written})
        return command(**given)

    run.__signature__ = signature.replace(parameters=options)  # pyright: ignore[reportAttributeAccessIssue]
    return run
