"""The commands and their options. Each imports what it needs when it runs, so `--help` is there at once."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli.batch.commands import batch
from penstock.cli.cache import cache
from penstock.cli.client.batches import batches
from penstock.cli.client.bench import bench
from penstock.cli.client.chat import chat
from penstock.cli.client.ctl import ctl
from penstock.cli.client.fleet import apply, audit, history, plan, rollback
from penstock.cli.client.keys import keys
from penstock.cli.client.status import show_models
from penstock.cli.client.usage import usage
from penstock.cli.doctor import doctor
from penstock.cli.models.kuberay import kuberay
from penstock.cli.models.options import (
    ACCELERATOR_KINDS,
    DEFAULT_PORT,
    HERE,
    Arguments,
    Json,
    Key,
    split,
)
from penstock.cli.models.run import run
from penstock.cli.process.failure import fail
from penstock.cli.serve.fleet_models import add, remove
from penstock.cli.serve.logs import logs
from penstock.cli.version import show_versions
from penstock.errors import Error
from penstock.options import by_fields


class _Commands(TyperGroup):
    """Exits with the code that a command returns, or with the sentence of its error."""

    def invoke(self, ctx: Any) -> None:
        try:
            code = super().invoke(ctx)
        except Error as error:
            fail(ctx.invoked_subcommand, error)
        if code:
            sys.exit(code)


app = typer.Typer(
    name="penstock",
    cls=_Commands,
    help="One fleet of LLM engines on Ray, for online serving and offline batch.",
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback(invoke_without_command=True)
def penstock(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if show_version:
        print(f"penstock {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(context_settings={"ignore_unknown_options": True})
@by_fields
def serve(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL | CONFIG.yaml]...", help="What to serve.", show_default=False),
    ] = None,
    *,
    arguments: Arguments,
) -> int:
    """Serve models at one OpenAI-compatible address.

    MODEL is a hub id or a local folder; CONFIG.yaml describes one model or many. Without either, the small
    model that ships with Penstock is served. Options that are not listed below go to the engine and have the
    names of `vllm serve`; write them after the model.

    - `penstock serve`
    - `penstock serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 8192 --replicas 2`
    - `penstock serve ./my-model --served-model-name mine --tensor-parallel-size 2 --port 9000`
    - `penstock serve qwen.yaml llama.yaml --host 0.0.0.0`
    - `penstock serve --engine sim`
    """
    from penstock.cli.process import guard

    sources, engine_words = split(words or [])
    arguments = replace(arguments, sources=sources, engine_words=engine_words)
    if arguments.address in ("", "local"):  # Ray's names for starting a new cluster
        arguments = replace(arguments, address=None)
    if kind := arguments.accelerator:
        os.environ["PENSTOCK_ACCELERATOR"] = kind if kind in ACCELERATOR_KINDS else "gpu"
    from penstock.cli.serve.run import STOP_S

    return guard.guarded(partial(_serve, arguments), stop_s=STOP_S)


def _serve(arguments: Arguments, signals_fd: int) -> int:
    from penstock.cli.models import precheck
    from penstock.cli.serve.port import refuse_silent, refuse_taken
    from penstock.cli.serve.run import run as serve_until_signalled

    try:
        planned = precheck.planned(arguments)
        refuse_taken(planned.gateway.host, planned.gateway.port or DEFAULT_PORT)
        if arguments.address:
            refuse_silent(arguments.address)
        # Commands in other working directories are shown the fleet.
        folders = {word: os.path.abspath(word) for word in arguments.sources if os.path.isdir(word)}
        sources = tuple(folders.get(word, word) for word in arguments.sources)
        arguments = replace(arguments, sources=sources)
        return serve_until_signalled(planned.in_folders(folders), arguments, signals_fd)
    except Error as error:
        fail("serve", error, as_json=arguments.log_format == "json")


app.command(context_settings={"ignore_unknown_options": True})(run)
app.command()(chat)
app.command(name="models")(show_models)


@app.command()
def status(
    url: Annotated[
        str | None,
        typer.Option(help="Address of the service.", show_default=f"the only one that runs here, or {HERE}"),
    ] = None,
    api_key: Key = None,
    as_json: Json = False,
) -> int:
    """Show the replicas of a running service's models. Exits with 1 when a model cannot answer."""
    from penstock.cli.client.status import show_status
    from penstock.cli.serve.started import running

    here = running() if url is None else []
    own = len(here) == 1
    address = here[0].url if own else url or HERE
    return show_status(address, api_key, as_json=as_json, own=own)


@app.command()
def stop(
    processes: Annotated[
        list[int] | None,
        typer.Argument(metavar="[PROCESS]...", help="Which, where several run.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> int:
    """End the service that `penstock serve` runs here, as Ctrl-C does, and wait until it is gone."""
    from penstock.cli.serve.started import stop as end

    return end(processes or [], as_json=as_json)


app.command()(logs)


@app.command(context_settings={"ignore_unknown_options": True})
def check(
    words: Annotated[
        list[str], typer.Argument(metavar="[MODEL | CONFIG.yaml]...", help="Models or files to check.")
    ],
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPUs to plan for: `L4`, `H100:8`, or by memory `48GiB:2`.",
            show_default="those of this machine",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Report every mistake at once, whether each model fits on the GPUs, and where it would be placed.

    Starts neither Ray nor a model, and needs no GPU. Exits with 2 when there are mistakes. Options that are
    not listed below are the engine's, as for `penstock serve`; write them after the model.

    - `penstock check models/*.yaml`
    - `penstock check ./my-model --gpu L4`
    - `penstock check Qwen/Qwen2.5-72B-Instruct --gpu H100:4 --tensor-parallel-size 4 --max-model-len 8192`
    """
    from penstock.cli.models.check import check as report

    sources, engine_words = split(words)
    return report(sources, engine_words, gpu=gpu, as_json=as_json)


@app.command()
def schema() -> None:
    """Print the JSON schema of the files that `penstock serve` takes, with which editors complete and check.

    - `penstock schema > fleet.schema.json`, and `# yaml-language-server: $schema=fleet.schema.json` as the
    first line of the file beside it
    """
    from penstock.config.fleet.editor_schema import editor_schema

    print(json.dumps(editor_schema(), indent=1))


app.command()(doctor)
app.command()(cache)
app.command(name="version")(show_versions)
for command in (plan, apply, add, remove, history, rollback, audit):
    app.command()(by_fields(command))
app.command()(by_fields(kuberay))
app.command()(by_fields(bench))
app.add_typer(batch, name="batch")
app.add_typer(batches, name="batches")
app.add_typer(ctl, name="ctl")
app.add_typer(keys, name="keys")
app.command()(by_fields(usage))
