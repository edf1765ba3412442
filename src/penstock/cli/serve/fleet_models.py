"""`penstock add`, `remove`: one model of a running service's fleet, and of the file that describes it."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from penstock.cli.client.fleet import FleetTarget, TakeOver, Wait, apply_planned, read
from penstock.cli.client.service import Service
from penstock.cli.models.options import Arguments, Engine
from penstock.errors import ConfigError

_File = Annotated[
    Path | None,
    typer.Option(help="The fleet's file.", show_default="the one with which the service here was started"),
]


def add(
    model: Annotated[str, typer.Argument(help="A hub id or a local folder.")],
    target: FleetTarget,
    *,
    alias: Annotated[list[str] | None, typer.Option(help="Another name for it; may be repeated.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name that clients use.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Replicas of the model.", min=1)] = None,
    engine: Annotated[Engine | None, typer.Option(help="As for `serve`.", show_default="vllm")] = None,
    file: _File = None,
    wait: Wait = 1800.0,
    take_over: TakeOver = False,
) -> int:
    """Add a model to a running service, and to its file once it is there.

    Everything else about the model is set in the file.

    - `penstock add ./my-model --alias gpt-4o-mini`
    """
    from penstock.cli.models.plan import is_file, make_plan
    from penstock.config.fleet.document import document
    from penstock.config.fleet.file_text import with_model

    if is_file(model):
        raise ConfigError(f"{model} is a file: name it in `llm_configs` of the fleet's file, and apply that.")
    source = os.path.abspath(model) if Path(model).is_dir() else model
    given = Arguments(
        sources=(source,), served_model_name=served_model_name, replicas=replicas, engine=engine
    )
    (config,) = make_plan(given).configs
    entry = document(config) | ({"aliases": alias} if alias else {})
    where = file or _file_of(target.url)
    text = with_model(_text(target, where), entry)
    return _apply(target, config.model_id, where, text, wait, take_over)


def remove(
    name: Annotated[str, typer.Argument(help="Id of the model.")],
    target: FleetTarget,
    *,
    file: _File = None,
    wait: Wait = 1800.0,
    take_over: TakeOver = False,
) -> int:
    """Remove a model from a running service, and from its file. Its open streams end by themselves.

    - `penstock remove my-model`
    """
    from penstock.config.fleet.file_text import without_model
    from penstock.config.messages.problems import unknown

    where = file or _file_of(target.url)
    text = _text(target, where)
    ids = _ids(text, where)
    if name not in ids:
        raise ConfigError(unknown("model", name, ids))
    for index in reversed([i for i, one in enumerate(ids) if one == name]):
        text = without_model(text, index)
    return _apply(target, name, where, text, wait, take_over)


def _file_of(url: str) -> Path | None:
    """The only file of the service that `penstock serve` of this user runs here at that address."""
    from penstock.cli.serve import started

    address = Service(url).url.replace("//localhost", "//127.0.0.1")
    files = [one.file for one in started.running() if one.url == address]
    return Path(files[0]).resolve() if len(files) == 1 and files[0] else None


def _text(target: FleetTarget, file: Path | None) -> str:
    """Of the file, or of what runs. Raises: ConfigError for faults of the file, or secrets in what runs."""
    from penstock.config.messages.redact import STARS

    if file is not None:
        read(str(file))
        return file.read_text(encoding="utf-8")
    fleet = target.ask("GET", "")["fleet"]
    # Keys that the command was given, or its environment, hold in every version; others show in the plan.
    fleet["gateway"] = {name: one for name, one in fleet.get("gateway", {}).items() if one != STARS}
    if STARS in repr(fleet):
        raise ConfigError(
            "The fleet has secrets, which the service does not show: name its file with --file."
        )
    return yaml.safe_dump(fleet, sort_keys=False, allow_unicode=True)


def _ids(text: str, file: Path | None) -> list[str]:
    """Of the models in `llm_configs`; versions that run have their model's."""
    from penstock.config.loading import yaml_source

    ids: list[str] = []
    for entry in yaml.safe_load(text).get("llm_configs", []):
        values = yaml_source.read(entry, file and file.parent).data if isinstance(entry, str) else entry
        version = values.get("version") or {"of": values["model_loading_config"]["model_id"]}
        ids.append(version["of"])
    return ids


def _apply(target: FleetTarget, name: str, file: Path | None, text: str, wait: float, take_over: bool) -> int:
    """Applies what `text` says, if it changes only that model, and writes it into the file. Raises: Error."""
    if file is None:
        code = _apply_only(target, name, yaml.safe_load(text), wait, take_over)
        if code == 0:
            print(
                f"No file says so, and the next start forgets it. As a file, the fleet is:\n\n{text}", end=""
            )
        return code
    handle, draft = tempfile.mkstemp(prefix=f".{file.stem}-", suffix=file.suffix, dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            opened.write(text)
        shutil.copymode(file, draft)
        try:
            fleet = read(draft)
        except ConfigError as error:
            raise ConfigError(str(error).replace(draft, str(file))) from error
        code = _apply_only(target, name, fleet, wait, take_over)
        if code == 0:
            os.replace(draft, file)
        print(f"{file} {'says so now' if code == 0 else 'is as it was'}.")
        return code
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)


def _apply_only(target: FleetTarget, name: str, fleet: dict[str, Any], wait: float, take_over: bool) -> int:
    """Applies a fleet that differs from the service's in that model. Raises: Error."""
    planned = target.ask("POST", "/plan", {"fleet": fleet})
    others = [
        one["model"]
        for one in planned["models"]
        if one["action"] != "unchanged" and one["model"].partition("@")[0] != name.partition("@")[0]
    ]
    others += [f"gateway.{change['path']}" for change in planned["gateway"]]
    if others:
        raise ConfigError(
            f"The fleet would change beside {name!r}, too: {', '.join(others)}. Its file and what runs are "
            "not the same: look at `penstock plan`, and apply that first."
        )
    return apply_planned(target, fleet, planned, wait, take_over)
