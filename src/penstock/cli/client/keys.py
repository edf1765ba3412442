"""`penstock keys`: makes, lists, revokes, rotates and imports keys in a file that gateways read."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from copy import deepcopy
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.models.options import Json
from penstock.errors import ConfigError, NotFound

_ID = slice(7, 15)  # of a hash: what tells keys apart in lists

File = Annotated[
    Path, typer.Option("--file", envvar="PENSTOCK_KEYS_FILE", help="File that `gateway.keys_file` names.")
]
_Which = Annotated[str, typer.Argument(metavar="KEY", help="TENANT/NAME, or an id as `keys list` shows it.")]

keys = typer.Typer(
    help="""Make, list, revoke, rotate and import keys in a file that gateways read again when it changes.

- `penstock keys create --tenant search --name ci --models qwen,llama --expires 90d --file keys.yaml`
- `penstock keys revoke search/ci --file keys.yaml`
""",
    rich_markup_mode="markdown",
    no_args_is_help=True,
)


@keys.command()
def create(
    file: File,
    tenant: Annotated[str, typer.Option(help="Whose key it is.")],
    name: Annotated[str, typer.Option(help="Tells the tenant's keys apart.")],
    models: Annotated[
        str | None, typer.Option(help="Models that it may use, by commas.", show_default="all")
    ] = None,
    scopes: Annotated[
        str | None,
        typer.Option(help="Endpoints that it may use, by commas.", show_default="all but admin, metrics"),
    ] = None,
    expires: Annotated[str | None, typer.Option(help="`90d`, `12h` or a date.", show_default="never")] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="A limit, as `tokens_per_minute=100000`; may be repeated."),
    ] = None,
) -> None:
    """Make a key and print it, once: the file has its hash only."""
    given = {
        "models": None if models is None else _words("--models", models),
        "scopes": None if scopes is None else _words("--scopes", scopes),
        "expires": None if expires is None else _until(expires),
        "limits": dict(map(_limit, limit or ())),
    }
    entry = {"tenant": tenant, "name": name} | {field: value for field, value in given.items() if value}
    with _changing(file) as entries:
        if any(_named(one) == f"{tenant}/{name}" for one in entries):
            raise ConfigError(f"{file} has a key {tenant}/{name}; give another name, or `keys rotate` it.")
        key = _new(entry)
        entries.append(entry)
    print(key)
    print("It is not shown again: keep it where its user finds it.", file=sys.stderr)


@keys.command(name="list")
def list_keys(file: File, as_json: Json = False) -> None:
    """List keys, without what could be used."""
    from penstock.config.loading.keys_file import load

    found: list[dict[str, Any]] = [
        {"id": one.hash[_ID], **one.model_dump(mode="json", exclude={"hash", "key"})}
        for one in load(file).keys
    ]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for one in found:
        until = one["expires"]
        state = f"{'expired' if until <= time.time() else 'until'} {_day(until)}" if until is not None else ""
        may = ",".join(one["models"] or ["all models"])
        print(
            f"{one['id']}  {one['tenant']}/{one['name']}  {may}  {','.join(one['scopes'])}  {state}".rstrip()
        )


@keys.command()
def revoke(which: _Which, file: File) -> None:
    """Remove a key; gateways refuse it within a second."""
    with _changing(file) as entries:
        for one in _found(entries, which, file):
            entries.remove(one)
            print(f"Revoked {_named(one)}, id {_id(one)}.")


@keys.command()
def rotate(
    which: _Which,
    file: File,
    keep: Annotated[str, typer.Option(help="How long the old key goes on: `24h`, `7d`.")] = "24h",
) -> None:
    """Make a new key with the rights of an old one, which goes on for a while."""
    from penstock.config.schema.tenants import seconds

    until = _until(keep)
    with _changing(file) as entries:
        old = _found(entries, which, file)[-1]
        ends = old.get("expires")
        if ends is not None and seconds(ends) <= time.time():
            raise ConfigError(f"{_named(old)} expired on {ends}, as its successor would; `keys create` one.")
        entry = deepcopy({field: value for field, value in old.items() if field not in ("hash", "key")})
        key = _new(entry)
        entries.append(entry)
        old["expires"] = until if ends is None else min(ends, until, key=seconds)
    print(key)
    print(f"It is not shown again. The old one goes on until {old['expires']}.", file=sys.stderr)
    if ends is not None:
        print(f"The new one ends when the old one would have ended, on {ends}.", file=sys.stderr)


@keys.command(name="import")
def import_keys(
    exported: Annotated[
        list[Path],
        typer.Argument(
            metavar="EXPORT",
            help="Files (JSON or YAML) with LiteLLM's answers to `/key/list?return_full_object=true`, to "
            "`/team/list` and to `/user/list`.",
        ),
    ],
    file: File,
) -> None:
    """Take over keys of a LiteLLM proxy: clients go on with the keys that they have."""
    from penstock.cli.client.litellm import Export, Import
    from penstock.config.loading.keys_file import changing, content

    export = Export(map(content, exported))
    with changing(file) as values:
        done = Import(export, values)
    left = ", ".join(f"{count} {why}" for why, count in done.left.items())
    print(f"{file}: keys added: {len(done.added)}, there before: {done.known}, left out: {left or 0}.")
    for sentence in done.notes():
        print(sentence, file=sys.stderr)


@contextmanager
def _changing(file: Path) -> Generator[list[dict[str, Any]]]:
    """The entries of the file, to be changed in the block."""
    from penstock.config.loading.keys_file import changing

    with changing(file) as values:
        yield values.setdefault("keys", [])


def _new(entry: dict[str, Any]) -> str:
    """A new key, whose hash the entry then has."""
    from penstock.config.schema.tenants import hashed
    from penstock.serve.tenancy.keys import new_key

    key = new_key()
    entry["hash"] = hashed(key)
    return key


def _named(entry: dict[str, Any]) -> str:
    return f"{entry.get('tenant')}/{entry.get('name')}"


def _id(entry: dict[str, Any]) -> str:
    from penstock.config.schema.tenants import KeyConfig

    return KeyConfig.model_validate(entry).hash[_ID]


def _found(entries: list[dict[str, Any]], which: str, file: Path) -> list[dict[str, Any]]:
    """Raises: NotFound."""
    found = [one for one in entries if which in (_named(one), _id(one))]
    if not found:
        raise NotFound(f"{file} has no key {which!r}; `penstock keys list` shows them.")
    return found


def _words(flag: str, text: str) -> list[str]:
    """Raises: ConfigError: without any the key would be for everything."""
    found = [word.strip() for word in text.split(",")]
    if not all(found):
        raise ConfigError(f"{flag} is {text!r}; write names with commas between them, or leave it out.")
    return found


def _until(text: str) -> str:
    """A time in UTC that is to come. Raises: ConfigError."""
    from penstock.config.schema.tenants import span_s

    if span := span_s(text):
        return datetime.fromtimestamp(time.time() + span, UTC).isoformat(timespec="seconds")
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is neither a duration in days, hours or minutes, such as 90d, 12h or 30m, nor a date."
        ) from None
    if day <= datetime.now(UTC).date():
        raise ConfigError(f"{text} is over: the key would be refused from the start.")
    return day.isoformat()


def _day(seconds: float) -> str:
    latest = datetime.max.replace(tzinfo=UTC).timestamp() - 1  # keys may be said to end later
    at = datetime.fromtimestamp(min(seconds, latest), UTC)
    return at.isoformat(timespec="minutes").replace("+00:00", "Z")


def _limit(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    if not re.fullmatch(r"\d+(\.\d+)?", number):
        raise ConfigError(
            f"--limit is {text!r}; write a limit's name and a number above 0, as tokens_per_minute=100000."
        )
    return name, float(number) if "." in number else int(number)
