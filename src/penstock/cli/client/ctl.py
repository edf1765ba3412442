"""`penstock ctl`: operates a running service through its admin endpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer
from typer.core import TyperCommand

from penstock.cli.client.service import AdminTarget
from penstock.cli.models.options import Json
from penstock.errors import ConfigError
from penstock.options import by_fields, option

_FAILED = 1
_SLACK_S = 30.0  # the gateway waits 15 s longer than the operation may take


class _Command(TyperCommand):
    """Takes the options of `ctl`, too: `ctl status --url X` is `ctl --url X status`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [*super().get_params(ctx), *self._common(ctx)]

    def invoke(self, ctx: Any) -> Any:
        common = {param.name: ctx.params.pop(param.name) for param in self._common(ctx)}
        given = {name for name in common if ctx.get_parameter_source(name).name == "COMMANDLINE"}
        ctx.obj = replace(ctx.obj, **{name: common[name] for name in given})
        return super().invoke(ctx)

    def _common(self, ctx: Any) -> list[Any]:
        """The group's options, but for one whose name an argument of this command has."""
        own = {param.name for param in self.params}
        return [param for param in ctx.parent.command.params if param.name not in own]


ctl = typer.Typer(
    name="ctl",
    help="""Operate a running service: put models to sleep, pause them, replace their weights.

Changes last: replicas that start later apply them, too. The service must have been started with
PENSTOCK_ADMIN_KEY, and the same key must be given here. These options may also follow the command.

- `penstock ctl status`
- `penstock ctl sleep --model qwen`
- `penstock ctl update-weights /models/qwen-v2 v2`
""",
    no_args_is_help=False,
    rich_markup_mode="markdown",
)

Mode = Annotated[Literal["wait", "keep", "abort"], typer.Option(help="What happens to running requests.")]


_option = partial(option, rich_help_panel="Service")


@dataclass(frozen=True, slots=True)
class ReplicaTarget(AdminTarget):
    """The service, and which of its replicas a command is for."""

    model: str | None = _option("Which model.", show_default="the only one")
    replica: str | None = _option("A single replica, by its id.", show_default="all")
    timeout_s: float = _option(
        "Seconds to wait for replicas. The change is still applied in the background afterwards.",
        300.0,
        "--timeout",
    )


@ctl.callback()
@by_fields
def common_options(context: typer.Context, target: ReplicaTarget) -> None:
    context.obj = target


@ctl.command(cls=_Command)
def status(context: typer.Context, as_json: Json = False) -> None:
    """Show the desired and the actual state of every replica."""
    target: ReplicaTarget = context.obj
    if target.replica is not None:
        raise ConfigError("--replica has no effect on `ctl status`; leave it out.")
    query = f"?model={quote(target.model, safe='')}" if target.model else ""
    found = target.ask("GET", f"status{query}", None, target.timeout_s + _SLACK_S)
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    for model, state in found.items():
        print(f"{model}  desired: {_state(state['desired'])}")
        for replica_id, one in state["replicas"].items():
            role = f"{one['role']}, " if "role" in one else ""
            actual = f"{role}{one['actual']}, weights {one['weights']}"
            desired = "" if one["reached"] else f"; desired: {_state(one['desired'])}"
            error = f"; failed: {one['error']}" if "error" in one else ""
            batch = one.get("batch")
            shares = f"; batch: {batch['requests']} requests, {batch['limit']} may run" if batch else ""
            print(f"  {replica_id}  {actual}{desired}{error}{shares}")


@ctl.command(cls=_Command)
def sleep(
    context: typer.Context,
    level: Annotated[
        Literal["1", "2"],
        typer.Option(help="1 keeps what makes waking up fast, such as weights in memory; 2 keeps nothing."),
    ] = "1",
    mode: Mode = "wait",
) -> int:
    """Free the engine's memory; it takes no requests until `wakeup`."""
    return _perform(context.obj, "sleep", level=int(level), mode=mode)


@ctl.command(cls=_Command)
def pause(
    context: typer.Context,
    mode: Mode = "keep",
    clear_cache: Annotated[bool, typer.Option("--clear-cache", help="Clear the prefix cache.")] = False,
) -> int:
    """Stop generating tokens until `resume`; memory stays allocated."""
    return _perform(context.obj, "pause", mode=mode, clear_cache=clear_cache)


def _add_plain(operation: str, help: str) -> None:
    """Adds a command for an operation without arguments."""

    def command(context: typer.Context) -> int:
        return _perform(context.obj, operation)

    ctl.command(operation.replace("_", "-"), help=help, cls=_Command)(command)


_add_plain("wakeup", "End a sleep.")
_add_plain("resume", "End a pause.")
_add_plain("reset_prefix_cache", "Clear the prefix cache.")
_add_plain("start_profile", "Start a profile, as the engine's `profiler_config` says.")
_add_plain("stop_profile", "Stop the profile and write it.")


@ctl.command(cls=_Command)
def rpc(
    context: typer.Context,
    method: Annotated[str, typer.Argument(help="Method of the engine's workers.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments, each as JSON or as `name=JSON`.")
    ] = None,
) -> int:
    """Call a method of every worker and show what each returned."""
    args, kwargs = _parse_arguments(arguments or [])
    target: ReplicaTarget = context.obj
    return _perform(
        target, "collective_rpc", method=method, timeout=target.timeout_s, args=args, kwargs=kwargs
    )


@ctl.command(cls=_Command)
def shift(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model whose traffic to move.")],
    application: Annotated[str, typer.Argument(help="Serve application to send it to.")],
) -> int:
    """Send a model's requests to another application's replicas; the service's own name moves them back."""
    target: ReplicaTarget = context.obj
    if target.model is not None or target.replica is not None:
        raise ConfigError("--model and --replica have no effect on `ctl shift`; leave them out.")
    return _perform(target, "shift", model=model, application=application)


@ctl.command(cls=_Command)
def update_weights(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="Folder with the weights, visible to every node.")],
    version: Annotated[str, typer.Argument(help="A name for them, which responses carry.")],
    mode: Mode = "wait",
) -> int:
    """Load other weights of the same shapes."""
    return _perform(context.obj, "update_weights", source=source, version=version, mode=mode)


def _perform(target: ReplicaTarget, operation: str, **arguments: Any) -> int:
    """Prints the outcome of each replica. Exit code: 0 when all have done it, else 1."""
    scope = {"model": target.model, "replica": target.replica, "timeout_s": target.timeout_s}
    body = {name: value for name, value in scope.items() if value is not None} | arguments
    # Whatever its status: of replicas that have failed, that is one of an error.
    found = target.ask("POST", operation, body, target.timeout_s + _SLACK_S, has="replicas")
    for replica_id, outcome in found["replicas"].items():
        text = f"failed: {outcome['error']}" if "error" in outcome else _result(outcome.get("result"))
        print(f"{found['model']}  {replica_id}  {text}")
    if not found["replicas"]:
        print(f"{found['model']}  has no replicas now; those that start later apply the change.")
    return 0 if found["ok"] else _FAILED


def _result(result: Any) -> str:
    return "done" if result is None else result if isinstance(result, str) else json.dumps(result)


def _state(desired: dict[str, Any]) -> str:
    return f"{desired['state']}, weights {desired['weights']} (version {desired['version']})"


def _parse_arguments(words: list[str]) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        is_named = bool(equals) and name.isidentifier()
        try:
            value = json.loads(text if is_named else word)
        except ValueError as error:
            raise ConfigError(f"{word!r} is not valid JSON ({error}). Quote strings: '\"x\"'.") from error
        if is_named:
            kwargs[name] = value
        else:
            args.append(value)
    return args, kwargs
