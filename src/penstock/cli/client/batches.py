"""`penstock batches`: lists, shows and cancels the batches of a running service."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer

from penstock.cli.client.service import Service
from penstock.cli.models.options import HERE, KEY_HINT, Json, Key, Url

_Batch = Annotated[str, typer.Argument(metavar="BATCH", help="Id of the batch.")]
_Limit = Annotated[int, typer.Option(help="Only the latest so many.", min=1, max=100)]
_ANSWER_S = 60.0
_SHOWN_FAULTS = 10

batches = typer.Typer(
    help="List, show and cancel the batches of a running service's Batches API.",
    rich_markup_mode="markdown",
    no_args_is_help=True,
)


@batches.command(name="list")
def list_batches(limit: _Limit = 20, url: Url = HERE, api_key: Key = None, as_json: Json = False) -> None:
    """List batches, the latest first."""
    found = _ask(url, api_key, "GET", f"?limit={limit}")["data"]
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    for batch in found:
        print(_line(batch))
    if not found:
        print("There are no batches.")


@batches.command()
def show(batch: _Batch, url: Url = HERE, api_key: Key = None, as_json: Json = False) -> None:
    """Show one batch: its state, its counts, its files, and what is wrong with its input."""
    _show(_ask(url, api_key, "GET", f"/{quote(batch, safe='')}"), as_json=as_json)


@batches.command()
def cancel(batch: _Batch, url: Url = HERE, api_key: Key = None, as_json: Json = False) -> None:
    """Cancel a batch. What was done is kept."""
    _show(_ask(url, api_key, "POST", f"/{quote(batch, safe='')}/cancel"), as_json=as_json)


def _ask(url: str, api_key: str | None, method: str, path: str) -> dict[str, Any]:
    service = Service(url, api_key, key_hint=KEY_HINT)
    return service.json(method, f"/v1/batches{path}", timeout_s=_ANSWER_S)


def _show(batch: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(batch, indent=2, ensure_ascii=False))
        return
    print(_line(batch))
    for name in ("input_file_id", "output_file_id", "error_file_id"):
        if batch.get(name):
            print(f"  {name}: {batch[name]}")
    faults = (batch.get("errors") or {}).get("data", [])
    for fault in faults[:_SHOWN_FAULTS]:
        where = f"line {fault['line']}: " if fault.get("line") else ""
        print(f"  {where}{fault['message']}")
    if len(faults) > _SHOWN_FAULTS:
        print(f"  and {len(faults) - _SHOWN_FAULTS:,} more")


def _line(batch: Mapping[str, Any]) -> str:
    counts = batch["request_counts"]
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(batch["created_at"]))
    failed = f", {counts['failed']:,} failed" if counts["failed"] else ""
    done = f"{counts['completed']:,} of {counts['total']:,} done{failed}"
    return f"{batch['id']}  {batch['status']}  {made}  {batch['endpoint']}  {done}"
