"""`penstock plan`, `apply`, `history`, `rollback`, `audit`: the fleet of a running service, by its file."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any

import typer

from penstock.bench.load.target import parsed
from penstock.cli.client.service import AdminTarget
from penstock.cli.models.options import Json
from penstock.errors import ConfigError, Unauthorized, Unavailable, sentence
from penstock.options import option

_PLANNED_S = 430.0  # a gateway waits 400 s for a plan: engines are asked about their arguments
_LOOK_S = 0.5
_LOOK_ANSWER_S = 30.0
_SILENT_S, _LOST_S = 15.0, 60.0  # without an answer, until that is said, and until it ends
_FAILED, _CHANGES = 1, 3
_COLORS = {"added": "green", "removed": "red", "rolled": "yellow", "scaled": "cyan", "live": "cyan"}
_FILE = Annotated[str, typer.Argument(metavar="FLEET.yaml", help="The fleet as it should be.")]
_From = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="URL", help="Take versions from the `jobs.storage` of a service that was lost."
    ),
]
_OF_GATEWAY = {f"gateway.{name}": f"PENSTOCK_{name.upper()}" for name in ("api_key", "admin_key", "webhook")}


@dataclass(frozen=True, slots=True)
class FleetChange(AdminTarget):
    """A change of a service's fleet, and how long to follow it."""

    wait: float = option("Seconds to wait until the fleet is there; 0 for not at all.", 1800.0)
    take_over: bool = option("Even while another apply goes on.", False)


def plan(
    file: _FILE,
    target: AdminTarget,
    *,
    check: Annotated[bool, typer.Option("--check", help="Exit with 3 when there are changes.")] = False,
    as_json: Json = False,
) -> int:
    """Show what `penstock apply` would change in a running service, and what that would cost.

    Exits with 2 when the file is wrong, or the fleet has no room.

    - `penstock plan fleet.yaml`
    - `penstock plan fleet.yaml --check --json`
    """
    from penstock.config.fleet.document import read

    found = planned(target, read(file), file)
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _show(found)
    if found["faults"]:
        raise ConfigError(" ".join(found["faults"]))
    return _CHANGES if check and not found["is_empty"] else 0


def apply(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FLEET.yaml | VERSION",
            help="The fleet as it should be. With `--from`, the number of a version.",
            show_default="with `--from`, the newest one that did not fail",
        ),
    ] = None,
    *,
    target: FleetChange,
    storage: _From = None,
) -> int:
    """Change a running service to what the file says. Replicas that need no change stay.

    Ends when the fleet is there. Exits with 1 when it is not, and says why, or what holds it up.

    - `penstock apply fleet.yaml`
    - `penstock apply --from s3://bucket/penstock`
    """
    from penstock.config.fleet.document import read

    what = ""
    if storage is not None:
        fleet, what = _stored(target, storage, file)
    elif file is not None:
        fleet = read(file)
    else:
        raise ConfigError("Name the fleet's file, or with --from the storage of a service that was lost.")
    found = planned(target, fleet, None if storage else file)
    return apply_planned(target, fleet, found, what)


def _stored(target: AdminTarget, storage: str, version: str | None) -> tuple[dict[str, Any], str]:
    """A stored fleet with its secrets, and where it is from. Raises: ConfigError for missing secrets."""
    from penstock.config.messages.redact import unmasked
    from penstock.serve.control import stored_fleet

    if version is not None and not version.isdecimal():
        raise ConfigError(f"--from takes the number of a version, and not {version!r}.")
    own = {one["at"] for one in target.ask("GET", "fleet/history")["data"]}
    found = stored_fleet.pick(storage, None if version is None else int(version), own)
    fields: dict[str, list[str]] = {}

    def noted(path: str) -> str:
        name = re.sub(r"\W", "_", re.sub(r".*\.|\[\d+\]$", "", path)).upper()
        fields.setdefault(_OF_GATEWAY.get(path, name), []).append(path)
        return path

    unmasked(found.fleet, noted)
    names = {  # fields that share a name may have different secrets
        path: name if len(paths) == 1 else f"{name}_{number}"
        for name, paths in fields.items()
        for number, path in enumerate(paths, 1)
    }
    missing = [f"{path} as {name}" for path, name in names.items() if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"Version {found.version} was stored without its secrets. Give them in the environment: "
            f"{', '.join(missing)}. Or write them into a file with its `fleet`, which `penstock history "
            "--from URL --json` shows, and apply that."
        )
    fleet = unmasked(found.fleet, lambda path: os.environ[names[path]])
    return fleet, f"version {found.version} of {found.file}"


def planned(target: AdminTarget, fleet: dict[str, Any], file: str | None) -> dict[str, Any]:
    """The service's plan of a fleet. file: where it was read. Raises: Error, with places in the file."""
    try:
        return target.ask("POST", "fleet/plan", {"fleet": fleet}, _PLANNED_S)
    except ConfigError as error:
        if file is None:
            raise
        from penstock.config import load_configs

        models = load_configs(file)  # the service has one for each version

        def place(found: re.Match[str]) -> str:
            where = models[int(found[1])].location
            for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", found[2]):
                where = where / (name or int(index))
            return str(where)

        pattern = r"^llm_configs\[(\d+)\]((?:\.\w+|\[\d+\])*)"
        raise ConfigError(re.sub(pattern, place, str(error), flags=re.MULTILINE)) from error


def apply_planned(target: FleetChange, fleet: dict[str, Any], planned: dict[str, Any], what: str = "") -> int:
    """Shows the plan of a fleet and applies it, unless the service has changed since. Returns the exit code.

    what: for the history, in place of what the plan says in a line.
    Raises: Error.
    """
    _show(planned)
    if planned["is_empty"]:
        return 0
    body = {"fleet": fleet, "who": _who(), "take_over": target.take_over} | ({"what": what} if what else {})
    match = {"if-match": f'"{planned["version"]}"'}
    version = target.ask("PUT", "fleet", body, _PLANNED_S, **match)["version"]
    return _followed(target, version, planned["gateway"], fleet.get("gateway", {}).get("admin_key"))


def rollback(
    target: FleetChange,
    version: Annotated[
        int | None, typer.Argument(help="Which.", show_default="the last one that was applied before")
    ] = None,
) -> int:
    """Apply an earlier version of the fleet again. `penstock history` shows them."""
    body = {"who": _who(), "take_over": target.take_over} | ({} if version is None else {"version": version})
    found = target.ask("POST", "fleet/rollback", body, _PLANNED_S)
    _show(found["plan"])
    gateway = found["plan"]["gateway"]
    return 0 if found["plan"]["is_empty"] else _followed(target, found["version"], gateway)


def history(target: AdminTarget, *, storage: _From = None, as_json: Json = False) -> None:
    """Show the versions of a service's fleet: who applied them, when, what changed, and the outcome."""
    file = ""
    for one in _rows(target, "fleet/history", as_json=as_json, storage=storage):
        if one.get("file", "") != file:
            file = one["file"]
            print(_plain(file))
        texts = map(_plain, (one["who"], one["what"], one["outcome"]))
        print(f"{one['version']:>3}  {_time(one['at'])}", *texts, sep="  ")


def audit(target: AdminTarget, *, as_json: Json = False) -> None:
    """Show who has changed a service's fleet, keys and limits, the newest change first."""
    for one in _rows(target, "fleet/audit", as_json=as_json):
        print(_time(one["at"]), _plain(one["who"]), _plain(one["what"]), sep="  ")


def _rows(
    target: AdminTarget, path: str, *, as_json: bool, storage: str | None = None
) -> list[dict[str, Any]]:
    """What a list has; nothing more to show where it was printed as JSON."""
    found: list[dict[str, Any]]
    if storage is None:
        found = target.ask("GET", path)["data"]
    else:
        from msgspec import to_builtins

        from penstock.serve.control import stored_fleet

        found = [to_builtins(one) for one in stored_fleet.read(storage)]
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    return [] if as_json else found


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
    except (OverflowError, ValueError, OSError):  # as others may have stored it
        return f"{seconds:g} s"


def _plain(text: str) -> str:
    """In one line, with what could change the terminal written as an escape sequence."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in some containers
        user = f"user {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _show(found: dict[str, Any]) -> None:
    for one in found["models"]:
        if one["action"] == "unchanged":
            continue
        before, after = one["replicas"]
        count = f", {before} to {after} replicas" if before != after else ""
        typer.secho(f"{one['model']}: {one['action']}{count}", fg=_COLORS[one["action"]])
        _show_changes(one["changes"])
        if one["cuts"]:
            print(f"    {one['cuts']}")
    if found["gateway"]:
        typer.secho("gateway", fg="cyan")
        _show_changes(found["gateway"])
    if found["is_empty"]:
        print("Nothing changes.")
    elif found["restarts"]:
        print(f"Restarts: {', '.join(found['restarts'])}.")
    else:
        print("Restarts: none.")
    before, after, most = found["gpus"]
    if most:
        print(f"GPUs: {before:g} now, {after:g} then, {most:g} at the most; there are {found['capacity']:g}.")
    for text in found["notes"]:
        print(text)


def _show_changes(changes: list[dict[str, Any]]) -> None:
    for change in changes:
        before, after = (json.dumps(change[name], ensure_ascii=False) for name in ("before", "after"))
        print(f"    {change['path']}: {before} -> {after}  ({change['cost']})")


def _followed(
    target: FleetChange, version: int, gateway: Sequence[Mapping[str, Any]] = (), key: str | None = None
) -> int:
    """Says what becomes of a version that is being applied. Returns the exit code.

    gateway: its changes, as a plan has them. key: its admin key then, if it is known.
    Raises: Unavailable when nothing answers for a minute; Unauthorized where the admin key is another one.
    """
    print(f"Applying version {version}.")
    moved = replace(target, url=_url_after(target.url, gateway), admin_key=key or target.admin_key)
    where = "" if moved.url == target.url else f" --url {moved.url}"
    shows = f"`penstock history{where}` shows the outcome"
    try:
        return _waited(target, moved, version, shows)
    except KeyboardInterrupt:
        print(f"Version {version} goes on being applied; {shows}.")
        raise


def _url_after(url: str, gateway: Sequence[Mapping[str, Any]]) -> str:
    """The service's address once its gateway has changed, if nothing in between has another one."""
    changed = {one["path"]: (one["before"], one["after"]) for one in gateway}
    if not changed.keys() & {"port", "tls"}:
        return url
    parts = parsed(url)
    host, port = parts.netloc.removesuffix(f":{parts.port}"), parts.port
    if "port" in changed and changed["port"][0] == port:
        port = changed["port"][1]
    scheme, (before, after) = parts.scheme, changed.get("tls", (None, None))
    if scheme == ("https" if before else "http"):
        scheme = "https" if after else "http"
    return parts._replace(scheme=scheme, netloc=f"{host}:{port}" if port else host).geturl()


def _waited(target: FleetChange, moved: FleetChange, version: int, shows: str) -> int:
    """Says what holds it up, and its outcome. Returns the exit code. moved: the same after the change.
    shows: which command shows the outcome later.
    """
    shown: set[str] = set()
    began_at, then = target.url, moved.url
    heard = time.monotonic()
    deadline = heard + target.wait
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        try:
            found = target.ask("GET", "fleet", None, _LOOK_ANSWER_S)
            rows = target.ask("GET", "fleet/history", None, _LOOK_ANSWER_S)["data"]
        except Unauthorized as error:
            if moved.admin_key == target.admin_key or time.monotonic() - heard > _LOST_S:
                raise Unauthorized(f"{error} Version {version} goes on being applied; {shows}.") from error
            target, moved = moved, target
            continue
        except Unavailable as error:  # the gateway restarts, or it says that control does
            if error.__cause__:
                target, moved = moved, target
            silent_s = time.monotonic() - heard if error.__cause__ else 0.0
            if not silent_s:
                heard = time.monotonic()
            elif silent_s > _LOST_S:
                raise Unavailable(
                    f"Nothing has answered at {began_at} for {_LOST_S:g} s: the service has ended, or "
                    f"cannot be reached. Once it answers again, {shows} of version {version}."
                ) from error
            elif silent_s > _SILENT_S and "" not in shown:
                shown.add("")
                print(f"    Nothing answers at {began_at}; still waiting, up to {_LOST_S:g} s for an answer.")
            continue
        heard = time.monotonic()
        shown.discard("")
        versions = {one["version"]: one for one in rows}
        if (one := versions.get(version)) is None:
            print(
                f"Version {version}: later versions have taken its place in the history; look at the newest."
            )
            return _FAILED
        if one["outcome"] != "applying":
            print(f"Version {version}: {sentence(one['outcome'])}")
            if (url := then if one["outcome"] == "applied" else target.url) != began_at:
                print(f"The service is at {url} now: name it with --url {url}.")
            if one["outcome"].startswith("failed"):
                print("`penstock rollback` goes back to the last version that was applied.")
            return 0 if one["outcome"] == "applied" else _FAILED
        for text in found["held_up"]:
            if text not in shown:
                shown.add(text)
                print(f"    {text}")
    print(f"It goes on; {shows}." if target.wait or then != began_at else "It goes on.")
    return _FAILED if target.wait else 0
