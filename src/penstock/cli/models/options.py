"""Options that several commands have, and those of `penstock serve`.

Imports no config, so that `--help` is there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import typer

from penstock.options import OPTION, option

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
    host: str | None = option("Address to listen on.", show_default="127.0.0.1")
    port: int | None = option("Port to listen on.", min=1, max=65535, show_default=str(DEFAULT_PORT))
    api_key: str | None = option(
        "Key that clients must send. Prefer PENSTOCK_API_KEY: other users can see arguments."
    )
    tls_cert: str | None = option("PEM file of a certificate: HTTPS. Read again when it changes.")
    tls_key: str | None = option("PEM file of its private key.")
    served_model_name: str | None = option("Name that clients use for MODEL.")
    replicas: int | None = option("Replicas of each model.", min=1)
    engine: Engine | None = option(
        "`process` runs any OpenAI-compatible server as a child, `sim` is a simulator.",
        case_sensitive=False,
        show_default="vllm",
    )
    accelerator: str | None = option("`cpu`, `gpu`, or Ray's name of a GPU type (L4, A10G, H100, ...).")
    address: str | None = option(
        "Ray cluster to use (host:port, or auto); it keeps running afterwards.", envvar="RAY_ADDRESS"
    )
    name: str = option("Name of the Serve application.", "penstock")
    log_format: LogFormat | None = option("Format of log lines.", show_default="text")
    watch: bool = option("Apply CONFIG.yaml again each time it is saved.", False)
    quiet: bool = option("Show no steps of the start: only the address, and what is wrong.", False)
    verbose: bool = option("Show what Ray and the engines print.", False)


@dataclass(frozen=True, slots=True)
class CommandOptions:
    """A command whose unknown options go to the engine, and the options of its own."""

    name: str
    options: tuple[str, ...]


SERVE = CommandOptions(
    "penstock serve",
    tuple(f"--{field.name.replace('_', '-')}" for field in fields(Arguments) if OPTION in field.metadata),
)


CHECK = CommandOptions("penstock check", ("--gpu", "--json"))
RUN = CommandOptions("penstock run", ("--system", "--max-tokens", "--engine", "--verbose"))


def split(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Models or files first; from the first dash on, everything is the engine's."""
    for i, word in enumerate(words):
        if word.startswith("-") and word != "-":
            return tuple(words[:i]), tuple(words[i:])
    return tuple(words), ()
