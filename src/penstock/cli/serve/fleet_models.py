"""`penstock add`, `remove`: one model of a running service's fleet, and of the file that describes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from penstock.cli.client.fleet import FleetChange, apply_planned, planned
from penstock.cli.client.service import Service
from penstock.cli.models.options import Arguments, Engine
from penstock.errors import ConfigError

_File = Annotated[
    Path | None,
    typer.Option(help="The fleet's file.", show_default="the one with which the service here was started"),
]


def add(
    model: Annotated[str, typer.Argument(help="A hub id or a local folder.")],
    target: FleetChange,
    *,
    alias: Annotated[list[str] | None, typer.Option(help="Another name for it; may be repeated.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name that clients use.")] = None,
    engine: Annotated[Engine | None, typer.Option(help="As for `serve`.", show_default="vllm")] = None,
    file: _File = None,
) -> int:
    """Add a model to a running service, and to its file once it is there.

    Everything else about the model is set in the file.

    - `penstock add ./my-model --alias gpt-4o-mini`
    """
    from penstock.cli.models.plan import is_file, make_plan
    from penstock.config.fleet.document import document
    from penstock.config.fleet.file_text import dumped, with_model

    if not model.strip():
        raise ConfigError("The model's name is empty; name a hub id or a folder.")
    if is_file(model):
        raise ConfigError(f"{model} is a file: name it in `llm_configs` of the fleet's file, and apply that.")
    is_path = model.startswith(("./", "../", "~")) or os.path.isdir(model)
    source = os.path.abspath(os.path.expanduser(model)) if is_path else model
    given = Arguments(sources=(source,), served_model_name=served_model_name, engine=engine)
    (config,) = make_plan(given).configs
    entry = document(config) | ({"aliases": alias} if alias else {})
    todo = f"Add this to its `llm_configs`:\n\n{dumped([entry])}"
    where = _path(file, target.url)
    return _apply(target, config.model_id, where, partial(with_model, entry=entry), todo)


def remove(
    name: Annotated[str, typer.Argument(help="Id of the model.")],
    target: FleetChange,
    *,
    file: _File = None,
) -> int:
    """Remove a model from a running service, and from its file. Its open streams end by themselves.

    - `penstock remove my-model`
    """
    where = _path(file, target.url)
    return _apply(target, name, where, partial(_without, name, where), f"Remove {name!r} from it.")


def _without(name: str, file: Path | None, text: str) -> str:
    """The text without each entry of the model. Raises: ConfigError."""
    from penstock.config.fleet.file_text import without_model
    from penstock.config.messages.problems import unknown

    models = _models(text, file)
    found = [index for index, (one, _) in enumerate(models) if one == name]
    if owner := next((one for one, aliases in models if not found and name in aliases), None):
        raise ConfigError(f"{name!r} is an alias of the model {owner!r}: name that one, or edit the file.")
    if models and not found:
        raise ConfigError(unknown("model", name, {one for one, _ in models}))
    for index in reversed(found or [0]):  # a file without such a list is refused there
        text = without_model(text, index)
    return text


def _path(file: Path | None, url: str) -> Path | None:
    """The file; by default the only one of the service that `penstock serve` of this user runs at `url`."""
    if file is not None:
        return file.resolve()
    from penstock.cli.serve import started

    address = Service(url).url.replace("//localhost", "//127.0.0.1")
    files = [one.file for one in started.running() if one.url == address]
    return Path(files[0]).resolve() if len(files) == 1 and files[0] else None


def _text(target: FleetChange, file: Path | None) -> str:
    """Of the file, or of what runs. Raises: ConfigError for a fault there, or secrets here."""
    from penstock.config.fleet import file_text
    from penstock.config.fleet.document import read
    from penstock.config.messages.redact import STARS

    if file is not None:
        read(str(file))
        return file.read_bytes().decode()  # with its own line ends
    fleet = target.ask("GET", "fleet")["fleet"]
    # Keys that the command was given, or its environment, hold in every version; others show in the plan.
    fleet["gateway"] = {name: one for name, one in fleet.get("gateway", {}).items() if one != STARS}
    if STARS in repr(fleet):
        raise ConfigError("The fleet has secrets that the service does not show: name its file, --file.")
    return file_text.dumped(fleet)


def _models(text: str, file: Path | None) -> list[tuple[str, list[str]]]:
    """Ids of the models in `llm_configs`, and aliases; versions that run have their model's id."""
    from penstock.config.loading import yaml_source

    models: list[tuple[str, list[str]]] = []
    for entry in yaml.safe_load(text).get("llm_configs", []):
        values = yaml_source.read(entry, file and file.parent)[0] if isinstance(entry, str) else entry
        version = values.get("version") or {"of": values["model_loading_config"]["model_id"]}
        models.append((version["of"], values.get("aliases", [])))
    return models


def _apply(target: FleetChange, name: str, file: Path | None, edit: Callable[[str], str], todo: str) -> int:
    """Applies the edited text, if it changes that model only, and writes it into the file. todo: what is left
    to do where it cannot be written. Raises: Error.
    """
    before = _text(target, file)
    text = edit(before)
    fleet = _fleet(text, file)
    found = planned(target, fleet, None)
    others = [
        one["model"]
        for one in found["models"]
        if one["action"] != "unchanged" and one["model"].partition("@")[0] != name.partition("@")[0]
    ]
    others += [f"gateway.{change['path']}" for change in found["gateway"]]
    if others:
        raise ConfigError(
            f"The fleet would change beside {name!r}, too: {', '.join(others)}. Its file and what runs are "
            "not the same: look at `penstock plan`, and apply that first."
        )
    code = apply_planned(target, fleet, found)
    if code == 0 and file is None:
        print(f"No file says so, and the next start forgets it. The fleet as a file:\n\n{text}", end="")
    if file is None or code:
        return code
    if not (target.wait or found["is_empty"]):
        print(f"{file} stays as it is, as nothing waits to see whether that succeeds. {todo}")
        return code
    try:
        _write(file, before, text, edit, fleet)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{file} is not written, though the service has changed: {why} {todo}") from error
    print(f"{file} says so now.")
    return 0


def _write(file: Path, before: str, text: str, edit: Callable[[str], str], fleet: dict[str, Any]) -> None:
    """Writes the edited text, or where others have changed the file, edits that if it means the same.

    Raises: OSError, ValueError.
    """
    from penstock.config.fleet import file_text

    if (now := file.read_bytes().decode()) != before:
        _fleet(now, file)  # it can be edited only when it is right
        text = edit(now)
        if _fleet(text, file) != fleet:
            raise ConfigError("It has got other changes meanwhile.")
    file_text.write(file, text)


def _fleet(text: str, file: Path | None) -> dict[str, Any]:
    """What it says. Raises: ConfigError."""
    from penstock.config.fleet.document import document
    from penstock.config.loading import yaml_source
    from penstock.config.loading.serving_args import LLMServingArgs

    data, location = yaml_source.parse(text, str(file or ""))
    return document(LLMServingArgs.parse(data, location)) if file else data
