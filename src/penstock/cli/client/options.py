"""Options that several commands have which ask a running service."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.models.options import DEFAULT_PORT

HERE = f"http://127.0.0.1:{DEFAULT_PORT}"
API_KEY_NAMES = ["PENSTOCK_API_KEY", "VLLM_API_KEY"]
"""As for the gateway (`config.schema.settings`)."""
KEY_HINT = "Give the key with --api-key or in PENSTOCK_API_KEY."

Url = Annotated[str, typer.Option(help="Address of the service.")]
Key = Annotated[str | None, typer.Option(help="Key of the service.", envvar=API_KEY_NAMES)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
