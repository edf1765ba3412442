"""The options of `penstock batch`. The work is in `run` and in `penstock.data`, imported when needed."""

from __future__ import annotations

import difflib
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from penstock.cli.models.options import Command, Engine, split
from penstock.cli.process.failure import fail
from penstock.errors import BadRequest, ConfigError, Error

_HELP = """
Run every row of a file through a model, without losing any.

INPUT is JSON lines, Parquet or CSV, or a file of OpenAI's batch form; a file, a folder or a glob, here or in
a bucket. Rows hold the fields of a request (`messages`, `prompt`, `max_tokens`, ...), or any columns of which
--prompt makes one. Options that are not listed go to the engine under the names of `vllm serve`.

- `penstock batch questions.jsonl -o answers.jsonl --model Qwen/Qwen2.5-0.5B-Instruct`
- `penstock batch articles.parquet -o out/ --model ./my-model --prompt "Summarise: {text}" --max-tokens 200`
- `penstock batch requests.jsonl -o answers.jsonl --url http://gpu-box:8000`
- `penstock batch 's3://bucket/in/*.jsonl' -o s3://bucket/out.jsonl --model qwen.yaml --replicas 4`

A job that was killed or stopped continues with the same command, or with

- `penstock batch resume answers.jsonl`, with `--retry-failed` to run failed rows again
- `penstock batch status answers.jsonl`
"""

_ENGINES, _ROWS, _LIMITS, _REPORT = "Engines", "Rows", "Limits", "Report"


class _InputFirst(TyperGroup):
    """`penstock batch INPUT ...` is `penstock batch run INPUT ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            self._refuse_misspelt(ctx, *args[:1])
            args = ["run", *(args or ["--help"])]
        return super().parse_args(ctx, args)

    def _refuse_misspelt(self, ctx: Any, word: str = "") -> None:
        meant = difflib.get_close_matches(word, self.commands, 1)
        if meant and word.isidentifier() and not Path(word).exists():
            ctx.fail(f"There is no file {word!r}, and no such command. Did you mean {meant[0]!r}?")


batch = typer.Typer(
    cls=_InputFirst,
    help="Run every row of a file through a model, without losing any.",
    rich_markup_mode="markdown",
)

_Output = Annotated[str, typer.Argument(metavar="OUTPUT", help="The output of the job.")]
_Url = Annotated[
    str | None,
    typer.Option(help="OpenAI-compatible service to send requests to.", rich_help_panel=_ENGINES),
]
_App = Annotated[
    str | None,
    typer.Option(help="Application on a Ray cluster to send requests to.", rich_help_panel=_ENGINES),
]
_Deployment = Annotated[
    str | None,
    typer.Option(
        help="With --app: deployment to use, when it serves several models.", rich_help_panel=_ENGINES
    ),
]
_Model = Annotated[
    str | None,
    typer.Option(
        help="Model to load (hub id, folder or CONFIG.yaml); with --url or --app, the name of the model.",
        rich_help_panel=_ENGINES,
    ),
]
_Key = Annotated[
    str | None,
    typer.Option(help="Key of the service.", envvar="PENSTOCK_API_KEY", rich_help_panel=_ENGINES),
]
_Replicas = Annotated[
    int | None,
    typer.Option(help="Number of engines to start.", min=1, rich_help_panel=_ENGINES),
]
_Address = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster to use (host:port, or auto).", envvar="RAY_ADDRESS", rich_help_panel=_ENGINES
    ),
]
_MaxSeconds = Annotated[
    float | None, typer.Option(help="Stop after this many seconds.", min=0.0, rich_help_panel=_LIMITS)
]
_MaxTokens = Annotated[
    int | None,
    typer.Option(help="Stop after this many tokens of prompts and answers.", min=1, rich_help_panel=_LIMITS),
]
_MaxFailures = Annotated[
    int | None, typer.Option(help="Stop when this many rows have failed.", min=1, rich_help_panel=_LIMITS)
]
_Report = Annotated[
    str | None, typer.Option(help="Write the report as JSON to this file.", rich_help_panel=_REPORT)
]
_PriceIn = Annotated[
    float | None, typer.Option(help="Price of a million prompt tokens.", min=0, rich_help_panel=_REPORT)
]
_PriceOut = Annotated[
    float | None, typer.Option(help="Price of a million generated tokens.", min=0, rich_help_panel=_REPORT)
]
_FailOnErrors = Annotated[
    bool,
    typer.Option(
        "--fail-on-errors",
        help="Exit with 1 when any row failed, not only when all did.",
        rich_help_panel=_REPORT,
    ),
]
_Verbose = Annotated[bool, typer.Option("--verbose", help="Show what Ray and the engines print.")]


@batch.command(name="run", hidden=True, help=_HELP, context_settings={"ignore_unknown_options": True})
def run(
    context: typer.Context,
    words: Annotated[list[str], typer.Argument(metavar="INPUT...", help="Files, folders, globs.")],
    output: Annotated[
        str, typer.Option("--output", "-o", help="A file, or a folder of part files when it ends with /.")
    ],
    model: _Model = None,
    url: _Url = None,
    app: _App = None,
    deployment: _Deployment = None,
    api_key: _Key = None,
    replicas: _Replicas = None,
    engine: Annotated[
        Engine | None,
        typer.Option(
            help="`sim` is a simulator.", case_sensitive=False, show_default="vllm", rich_help_panel=_ENGINES
        ),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(help="`cpu`, `gpu`, or Ray's name of a GPU type.", rich_help_panel=_ENGINES),
    ] = None,
    address: _Address = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help="Most concurrent requests to --url.",
            min=1,
            rich_help_panel=_ENGINES,
            show_default="64",
        ),
    ] = None,
    task: Annotated[
        Literal["generate", "embed", "classify", "score"],
        typer.Option(help="What the model does with a row.", rich_help_panel=_ROWS),
    ] = "generate",
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Prompt template with columns in braces: `Summarise: {text}`.", rich_help_panel=_ROWS
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="With --prompt: a system prompt.", rich_help_panel=_ROWS)
    ] = None,
    no_chat: Annotated[
        bool,
        typer.Option(
            "--no-chat", help="Send --prompt as a plain prompt, not as a message.", rich_help_panel=_ROWS
        ),
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer.", min=1, rich_help_panel=_ROWS)
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE to add to every request: `temperature=0`.", rich_help_panel=_ROWS),
    ] = None,
    input_form: Annotated[
        Literal["jsonl", "parquet", "csv"] | None,
        typer.Option(help="Format of INPUT.", show_default="by its name", rich_help_panel=_ROWS),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Only the first so many rows.", min=1, rich_help_panel=_ROWS)
    ] = None,
    reuse: Annotated[
        Literal["exact", "all", "off"],
        typer.Option(
            help="Send identical requests once: `exact` only where the answer would be the same "
            "(temperature 0, a seed, embeddings).",
            rich_help_panel=_ROWS,
        ),
    ] = "exact",
    reuse_from: Annotated[
        str | None,
        typer.Option(help="Reuse answers of another job's output, too.", rich_help_panel=_ROWS),
    ] = None,
    no_group_prefixes: Annotated[
        bool,
        typer.Option(
            "--no-group-prefixes",
            help="Do not group rows with the same prefix.",
            rich_help_panel=_ROWS,
        ),
    ] = False,
    no_read_files: Annotated[
        bool,
        typer.Option(
            "--no-read-files",
            help="Refuse rows that name files or buckets. For rows from untrusted sources.",
            rich_help_panel=_ROWS,
        ),
    ] = False,
    attempts: Annotated[
        int,
        typer.Option(help="Attempts for a row that is refused temporarily.", min=1, rich_help_panel=_LIMITS),
    ] = 3,
    deadline: Annotated[
        float | None,
        typer.Option(help="Seconds for all attempts of a row.", min=0.001, rich_help_panel=_LIMITS),
    ] = None,
    max_seconds: _MaxSeconds = None,
    max_total_tokens: _MaxTokens = None,
    max_failures: _MaxFailures = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check all rows and show the first prompts; send nothing."),
    ] = False,
    report: _Report = None,
    price_input: _PriceIn = None,
    price_output: _PriceOut = None,
    fail_on_errors: _FailOnErrors = False,
    verbose: _Verbose = False,
) -> None:
    from penstock.data.job.spec import EngineSpec, JobSpec

    inputs, engine_words = split(words)
    try:
        _refuse_idle(
            "without --prompt" if prompt is None else None, {"--system": system, "--no-chat": no_chat or None}
        )
        _refuse_idle("with --reuse off" if reuse == "off" else None, {"--reuse-from": reuse_from})
        spec = JobSpec(
            inputs=inputs,
            output=output,
            engines=_engines(
                engine_words,
                EngineSpec(
                    url=url,
                    app=app,
                    deployment=deployment,
                    model=model,
                    replicas=replicas or 0,
                    engine=engine,
                    accelerator=accelerator,
                    address=address,
                    concurrency=concurrency or 64,
                ),
                {"--concurrency": concurrency},
                _command(context),
            ),
            input_form=input_form,
            kind=task,
            template=prompt,
            system=system,
            chat=not no_chat,
            defaults=_defaults(param or [], max_tokens),
            group_prefixes=not no_group_prefixes,
            reuse=reuse,
            reuse_from=reuse_from,
            read_files=not no_read_files,
            max_attempts=attempts,
            deadline_s=deadline,
            limit=limit,
        )
        spec = _absolute(spec)
        if dry_run:
            from penstock.cli.batch.run import dry_run as check_rows

            sys.exit(check_rows(spec))
    except Exception as error:
        _fail(error)
    _start(
        context,
        output,
        spec=spec,
        limits=(max_seconds, max_total_tokens, max_failures),
        prices=(price_input, price_output),
        report=report,
        api_key=api_key,
        fail_on_errors=fail_on_errors,
        verbose=verbose,
    )


@batch.command(context_settings={"ignore_unknown_options": True})
def resume(
    context: typer.Context,
    words: Annotated[list[str], typer.Argument(metavar="OUTPUT", help="The output of the job.")],
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed rows again.")] = False,
    model: _Model = None,
    url: _Url = None,
    app: _App = None,
    deployment: _Deployment = None,
    api_key: _Key = None,
    replicas: _Replicas = None,
    address: _Address = None,
    max_seconds: _MaxSeconds = None,
    max_total_tokens: _MaxTokens = None,
    max_failures: _MaxFailures = None,
    report: _Report = None,
    price_input: _PriceIn = None,
    price_output: _PriceOut = None,
    fail_on_errors: _FailOnErrors = False,
    verbose: _Verbose = False,
) -> None:
    """Continue a job that was stopped or killed; with other engines, where options name some."""
    from penstock.data.job.spec import EngineSpec

    outputs, engine_words = split(words)
    try:
        if len(outputs) != 1:
            raise ConfigError(f"Give one output, not {len(outputs)}.")
        engines = None
        output = _absolute_url(outputs[0])
        if model or url or app or engine_words:
            given = EngineSpec(
                url=url, app=app, deployment=deployment, model=model, replicas=replicas or 0, address=address
            )
            engines = _engines(engine_words, given, {}, _command(context))
        elif replicas or deployment:
            engines = _changed(output, replicas, deployment)
    except Exception as error:
        _fail(error)
    _start(
        context,
        output,
        engines=engines,
        url=url,
        retry_failed=retry_failed,
        limits=(max_seconds, max_total_tokens, max_failures),
        prices=(price_input, price_output),
        report=report,
        api_key=api_key,
        fail_on_errors=fail_on_errors,
        verbose=verbose,
    )


@batch.command()
def status(
    output: _Output,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the progress of a job: rows by state, tokens, errors by kind."""
    from penstock.cli.batch.run import status as show_status

    try:
        code = show_status(_absolute_url(output), as_json=json)
    except Exception as error:
        _fail(error)
    sys.exit(code)


def _start(context: typer.Context, output: str, *, limits: Any, prices: Any, **options: Any) -> None:
    from penstock.cli.batch.run import STOP_S, BatchRun
    from penstock.cli.batch.run import run as run_job
    from penstock.cli.process import guard
    from penstock.data.job.report import Limits, Prices

    seconds, tokens, failures = limits
    price = Prices(prices[0] or 0.0, prices[1] or 0.0) if any(p is not None for p in prices) else None
    options["limits"] = Limits(seconds, tokens, failures)
    batch_run = BatchRun(_absolute_url(output), _command(context), prices=price, **options)
    code = guard.guarded(partial(run_job, batch_run), stop_s=STOP_S)
    if code - 128 in set(signal.Signals) - set(guard.STOPS):
        name = signal.Signals(code - 128).name
        print(
            f"penstock batch: its process was killed by {name}, perhaps for lack of memory. Finished rows "
            f"are in '{output.rstrip('/')}.journal': run the same command to continue.",
            file=sys.stderr,
        )
    sys.exit(code)


def _command(context: typer.Context) -> Command:
    words = [word for param in context.command.params for word in param.opts if word.startswith("--")]
    return Command("penstock batch", tuple(words))


def _fail(error: Exception) -> NoReturn:
    from penstock.cli.batch.run import sentence

    if isinstance(error, Error):
        fail("batch", error)
    print(f"penstock batch: {sentence(error)}", file=sys.stderr)
    sys.exit(1)


def _refuse_idle(where: str | None, options: Mapping[str, Any]) -> None:
    """Raises: ConfigError for an option that is given and would do nothing. where: None where all do."""
    for name, value in options.items():
        if where is not None and value is not None:
            raise ConfigError(f"{name} has no effect {where}; leave it out.")


def _changed(output: str, replicas: int | None, deployment: str | None) -> Any:
    """The engines of a job that was begun, but for what is asked now. Raises: ConfigError."""
    from msgspec.structs import replace

    from penstock.data.job.job import Job

    found = Job.load_spec(output).engines
    _refuse_idle(None if found.cli_args else "on a job that starts no engines", {"--replicas": replicas})
    _refuse_idle(None if found.app else "on a job without --app", {"--deployment": deployment})
    return replace(found, replicas=replicas or found.replicas, deployment=deployment or found.deployment)


def _engines(words: tuple[str, ...], given: Any, more: Mapping[str, Any], command: Command) -> Any:
    """`given`, checked: it names one of engines, service and application. more: options that are not in it.

    Raises: ConfigError.
    """
    from msgspec.structs import replace

    from penstock.cli.models.engine_arguments import with_own_options

    address = None if given.address in ("", "local") else given.address
    if given.url is not None and given.app is not None:
        raise ConfigError("Give --url or --app, not both.")
    engine_options = {
        "--replicas": given.replicas or None,
        "--engine": given.engine,
        "--accelerator": given.accelerator,
    }
    if given.url is not None:
        _refuse_idle("with --url", {**engine_options, "--deployment": given.deployment})
    elif given.app is not None:
        _refuse_idle("with --app", {**engine_options, **more})
    else:
        _refuse_idle("without --app", {"--deployment": given.deployment})
        _refuse_idle("without --url", more)
    if given.url is not None or given.app is not None:
        if words:
            text = f"{words[0]} is not an option of `penstock batch` with --url or --app."
            raise with_own_options(ConfigError(text), words, command)
        return replace(given, address=address)
    if given.model is None and given.engine != "sim":
        text = "Name the engines: --model MODEL, --url URL or --app NAME (--model demo to try)."
        raise with_own_options(ConfigError(text), words, command)
    cli_args = (_absolute_path(given.model or ""), *words)
    return replace(given, cli_args=cli_args, model=None, address=address)


def _defaults(params: list[str], max_tokens: int | None) -> dict[str, Any]:
    """Raises: ConfigError."""
    import yaml

    from penstock.data.rows.coerce import to_json

    found: dict[str, Any] = {}
    for param in params:
        name, equals, value = param.partition("=")
        if not equals or not name:
            raise ConfigError(f"--param {param!r} must be NAME=VALUE, as in temperature=0.")
        try:
            found[name] = to_json(yaml.safe_load(value), f"--param {name}")
        except yaml.YAMLError as error:
            raise ConfigError(f"--param {param!r} is not YAML; quote it, as in 'stop=\"[1\"'.") from error
        except BadRequest as error:
            raise ConfigError(str(error)) from error
    return {**found, **({"max_tokens": max_tokens} if max_tokens is not None else {})}


def _absolute(spec: Any) -> Any:
    """The same from any working directory: the job may be resumed in another one."""
    from msgspec.structs import replace

    inputs = tuple(_absolute_url(one) for one in spec.inputs)
    reuse_from = None if spec.reuse_from is None else _absolute_url(spec.reuse_from)
    return replace(spec, inputs=inputs, output=_absolute_url(spec.output), reuse_from=reuse_from)


def _absolute_url(path: str) -> str:
    from penstock.data.storage.paths import absolute

    return absolute(path)


def _absolute_path(model: str) -> str:
    """A model's folder or a config's file from any working directory; hub ids stay."""
    return str(Path(model).absolute()) if model and Path(model).exists() else model
