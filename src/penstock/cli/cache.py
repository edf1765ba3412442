"""`penstock cache`: lists and removes what downloads have left here."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.filesize import decimal

from penstock.cli.models.options import Json
from penstock.errors import ConfigError, Unavailable


def cache(
    remove: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Delete this model; may be repeated.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models and adapters that were downloaded to this machine, or remove some.

    - `penstock cache`
    - `penstock cache --remove Qwen/Qwen2.5-0.5B-Instruct`
    """
    from penstock.config.messages.problems import nearest
    from penstock.sources.cache import cached

    there = cached()
    names = {one.name: one for one in there}
    for name in remove or ():
        if name not in names:
            guess = nearest(name, list(names))
            hint = f" Did you mean {guess!r}?" if guess else " `penstock cache` lists what is there."
            raise ConfigError(f"{name!r} is not in the cache.{hint}")
    for name in dict.fromkeys(remove or ()):
        try:
            names[name].remove()
        except OSError as error:
            raise Unavailable(f"{error.filename} cannot be removed: {error.strerror}.") from error
        print(f"Removed {name}, {decimal(names[name].size_bytes)}.")
    if remove:
        return
    if as_json:
        print(json.dumps([asdict(one) | {"folder": str(one.folder)} for one in there], indent=2))
        return
    for one in there:
        day = time.strftime("%Y-%m-%d", time.localtime(one.used))
        print(f"{decimal(one.size_bytes):>8}  {day}  {one.name}{'' if one.hub else f'  {one.folder}'}")
    print(f"{decimal(sum(one.size_bytes for one in there)):>8}  in all")
