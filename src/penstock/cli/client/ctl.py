"""`penstock ctl`: operates a service that runs, through its admin endpoints. Speaks HTTP only.

Standard library on purpose, as `penstock chat`: one question, one answer.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from penstock.cli.client.address import parsed
from penstock.cli.models.options import DEFAULT_PORT
from penstock.cli.process.failure import fail
from penstock.errors import ConfigError, Error, NotFound, Unauthorized, Unavailable

ctl = typer.Typer(
    name="ctl",
    help="""Operate a service that runs: put models to sleep, pause them, give them other weights.

What is set stays set: replicas that start later come up in it. The service must have been started with
PENSTOCK_ADMIN_KEY, and the same must be set here.

- `penstock ctl status`
- `penstock ctl sleep --model qwen`
- `penstock ctl update-weights /models/qwen-v2 v2`
""",
    no_args_is_help=False,
    rich_markup_mode="markdown",
)

_FAILED = 1

Url = Annotated[str, typer.Option(help="Address of the service.")]
AdminKey = Annotated[
    str | None,
    typer.Option(help="Admin key of the service.", envvar="PENSTOCK_ADMIN_KEY", show_default=False),
]
Model = Annotated[str | None, typer.Option(help="Which model.", show_default="the only one")]
Replica = Annotated[str | None, typer.Option(help="One replica only, by its id.", show_default="all")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait; what is set goes on to be tried after it.")]
Mode = Annotated[Literal["wait", "keep", "abort"], typer.Option(help="What becomes of running requests.")]

_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
_TIMEOUT_S = 300.0
_SLACK_S = 10.0


@ctl.command()
def status(url: Url = _URL, admin_key: AdminKey = None, model: Model = None) -> None:
    """Desired and actual state of every replica."""
    query = f"?model={quote(model, safe='')}" if model else ""
    _show_status(_asked(url, admin_key, "GET", f"status{query}", None, _TIMEOUT_S))


@ctl.command()
def sleep(
    url: Url = _URL,
    admin_key: AdminKey = None,
    model: Model = None,
    replica: Replica = None,
    timeout: Timeout = _TIMEOUT_S,
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1 keeps what makes waking up fast, 2 keeps nothing.")
    ] = 1,
    mode: Mode = "wait",
) -> None:
    """Give the engine's memory back; it takes no requests until `wakeup`."""
    _perform("sleep", url, admin_key, model, replica, timeout, level=level, mode=mode)


@ctl.command()
def pause(
    url: Url = _URL,
    admin_key: AdminKey = None,
    model: Model = None,
    replica: Replica = None,
    timeout: Timeout = _TIMEOUT_S,
    mode: Mode = "keep",
    clear_cache: Annotated[bool, typer.Option("--clear-cache", help="Forget what was computed.")] = False,
) -> None:
    """Make no more tokens until `resume`; memory stays as it is."""
    _perform("pause", url, admin_key, model, replica, timeout, mode=mode, clear_cache=clear_cache)


def _plain(operation: str, does: str) -> None:
    """A command for an operation without arguments of its own."""

    def command(
        url: Url = _URL,
        admin_key: AdminKey = None,
        model: Model = None,
        replica: Replica = None,
        timeout: Timeout = _TIMEOUT_S,
    ) -> None:
        _perform(operation, url, admin_key, model, replica, timeout)

    ctl.command(operation.replace("_", "-"), help=does)(command)


_plain("wakeup", "End a sleep.")
_plain("resume", "End a pause.")
_plain("reset_prefix_cache", "Forget what was computed of prompts.")
_plain("start_profile", "Begin to record where time goes; the engine's `profiler_config` says how.")
_plain("stop_profile", "Write what was recorded.")


@ctl.command()
def rpc(
    method: Annotated[str, typer.Argument(help="Method of the engine's workers.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments, each as JSON, or `name=JSON`.")
    ] = None,
    url: Url = _URL,
    admin_key: AdminKey = None,
    model: Model = None,
    replica: Replica = None,
    timeout: Timeout = _TIMEOUT_S,
) -> None:
    """Call a method of every worker, and show what each gave."""
    args, kwargs = _read_arguments(arguments or [])
    limits = {"method": method, "timeout": timeout, "args": args, "kwargs": kwargs}
    _perform("collective_rpc", url, admin_key, model, replica, timeout, **limits)


@ctl.command()
def shift(
    model: Annotated[str, typer.Argument(help="Whose requests.")],
    application: Annotated[str, typer.Argument(help="Application that has the model, too.")],
    url: Url = _URL,
    admin_key: AdminKey = None,
    timeout: Timeout = _TIMEOUT_S,
) -> None:
    """Send a model's requests to another application's replicas; the service's own name is the way back."""
    _perform("shift", url, admin_key, model, None, timeout, application=application)


@ctl.command()
def update_weights(
    source: Annotated[str, typer.Argument(help="Folder with weights, that every node sees.")],
    version: Annotated[str, typer.Argument(help="A name for them, which answers will carry.")],
    url: Url = _URL,
    admin_key: AdminKey = None,
    model: Model = None,
    replica: Replica = None,
    timeout: Timeout = _TIMEOUT_S,
    mode: Mode = "wait",
) -> None:
    """Take other weights of the same shapes."""
    _perform(
        "update_weights", url, admin_key, model, replica, timeout, source=source, version=version, mode=mode
    )


def _perform(
    operation: str,
    url: str,
    admin_key: str | None,
    model: str | None,
    replica: str | None,
    timeout_s: float,
    **arguments: Any,
) -> None:
    whom = {"model": model, "replica": replica, "timeout_s": timeout_s}
    body = arguments | {name: value for name, value in whom.items() if value is not None}
    found = _asked(url, admin_key, "POST", operation, body, timeout_s)
    for replica_id, outcome in found["replicas"].items():
        said = f"failed: {outcome['error']}" if "error" in outcome else _said(outcome.get("result"))
        print(f"{found['model']}  {replica_id}  {said}")
    if not found["replicas"]:
        print(f"{found['model']}  has no replica now; those that come are told.")
    sys.exit(0 if found["ok"] else _FAILED)


def _said(result: Any) -> str:
    return "done" if result is None else result if isinstance(result, str) else json.dumps(result)


def _show_status(found: dict[str, Any]) -> None:
    for model, state in found.items():
        print(f"{model}  desired: {_state(state['desired'])}")
        for replica_id, one in state["replicas"].items():
            role = f"{one['role']}, " if "role" in one else ""
            what = f"{role}{one['actual']}, weights {one['weights']}"
            desired = "" if one["reached"] else f"; desired: {_state(one['desired'])}"
            error = f"; failed: {one['error']}" if "error" in one else ""
            print(f"  {replica_id}  {what}{desired}{error}")


def _state(desired: dict[str, Any]) -> str:
    return f"{desired['state']}, weights {desired['weights']} (version {desired['version']})"


def _read_arguments(words: list[str]) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        named = bool(sign) and name.isidentifier()
        try:
            value = json.loads(text if named else word)
        except ValueError as error:
            fail("ctl", ConfigError(f"{word!r} is no JSON ({error}); a text is written '\"text\"'."))
        if named:
            kwargs[name] = value
        else:
            args.append(value)
    return args, kwargs


def _asked(
    url: str, admin_key: str | None, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
) -> dict[str, Any]:
    """The answer of the service; what goes wrong ends the command with a sentence."""
    try:
        return _answer(url, admin_key, method, path, body, timeout_s)
    except Error as error:
        fail("ctl", error)


def _answer(
    url: str, admin_key: str | None, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
) -> dict[str, Any]:
    parts = parsed(url)
    connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    where = f"{parts.path}/admin/{path}"
    headers = {"content-type": "application/json"}
    if admin_key:
        headers["authorization"] = f"Bearer {admin_key}"
    try:
        with closing(connect(parts.netloc, timeout=timeout_s + _SLACK_S)) as connection:
            connection.request(method, where, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
    except (OSError, HTTPException) as error:
        raise Unavailable(
            f"Nothing answers at {url} ({error}). Start a service with `penstock serve`, "
            "or name another with --url."
        ) from error
    return _read(status, content)


def _read(status: int, content: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(content)
    except ValueError as error:
        raise Error(f"What answers there is no Penstock: status {status}.") from error
    if "error" not in found:
        return found
    message = str(found["error"].get("message", found["error"]))
    if status == Unauthorized.status:
        raise Unauthorized(f"{message} The admin key is PENSTOCK_ADMIN_KEY, or --admin-key.")
    if status == NotFound.status and "path" in message:
        raise NotFound("The service has no admin endpoints: start it with PENSTOCK_ADMIN_KEY set.")
    raise Error(message)
